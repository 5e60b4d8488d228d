"""Dynamic shared memory, or the wait for the previous kernel, is handled or checked wrongly, if these fail."""

from dataclasses import replace

import numpy as np
import pytest

from lngen.check.inputs import random_inputs
from lngen.emit import emit
from lngen.lower import lower
from lngen.problem import Schedule
from lngen.ptx import Outcome, run_plan
from lngen.spec import parse_spec
from ptx_source import broken, clean, kinds, run

U4 = np.uint32

pytest.importorskip("cupy")


DYNAMIC = """extern __shared__ __align__(128) unsigned s[];
extern "C" __global__ void k(unsigned* o, unsigned n) {
    __shared__ unsigned first[32];
    if (threadIdx.x < 32) first[threadIdx.x] = 7;
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) s[i] = i + blockIdx.x;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) o[blockIdx.x * n + i] = s[n - 1 - i] + first[i % 32];
}"""


@pytest.mark.parametrize("size", [1024, 200 << 10])
def test_dynamic_shared_memory(size: int) -> None:
    n = size // 4
    out = clean(run(DYNAMIC, 3, 256, np.zeros(3 * n, U4), n, dynamic=size))["0"].reshape(3, n)
    assert (out == np.arange(n)[::-1] + np.arange(3)[:, None] + 7).all()


def test_dynamic_shared_memory_has_bounds() -> None:
    found = run(DYNAMIC, 1, 64, np.zeros(256, U4), 256, dynamic=1020).findings
    assert {f.kind for f in found} == {"out-of-bounds"}
    assert "'s', which has 1020 bytes" in found[0].message
    assert "out-of-bounds" in kinds(run(DYNAMIC, 1, 64, np.zeros(256, U4), 256))
    late = broken(DYNAMIC, "i = threadIdx.x; i < n; i += blockDim.x) s[i]", "i = threadIdx.x + 1; i < n; i += 64) s[i]")
    assert kinds(run(late, 1, 64, np.zeros(256, U4), 256, dynamic=1024)) == {"uninitialised"}
    assert "shared-race" in kinds(
        run(broken(DYNAMIC, "__syncthreads();", ""), 1, 64, np.zeros(256, U4), 256, dynamic=1024)
    )


ARENA = """extern __shared__ __align__(1024) unsigned char arena[];
extern "C" __global__ void k(unsigned* o) {
    unsigned* a = (unsigned*)arena;
    o += 64 * blockIdx.x;
    unsigned long long* b = (unsigned long long*)(arena + 256);
    a[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 4) b[threadIdx.x] = 5ull << 32;
    __syncthreads();
    o[threadIdx.x] = a[63 - threadIdx.x] + (unsigned)(b[threadIdx.x % 4] >> 32);
}
extern "C" __global__ void other(unsigned* o) { arena[threadIdx.x] = 1; o[threadIdx.x] = arena[threadIdx.x]; }"""


def test_an_arena_of_bytes_in_several_kernels() -> None:
    out = clean(run(ARENA, 2, 64, np.zeros(128, U4), dynamic=288))["0"]
    assert (out == np.tile(63 - np.arange(64) + 5, 2)).all()


WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'

DEPENDENT = f"""extern "C" __global__ void k(const unsigned* a, unsigned* o) {{
    __shared__ unsigned s[64];
    s[threadIdx.x] = threadIdx.x;
    {WAIT}
    unsigned x = a[blockIdx.x * 64 + threadIdx.x];
    asm volatile("griddepcontrol.launch_dependents;");
    __syncthreads();
    o[blockIdx.x * 64 + threadIdx.x] = x + s[63 - threadIdx.x];
}}"""


def dependent(source: str) -> Outcome:
    return run(source, 3, 64, np.arange(192, dtype=U4), np.zeros(192, U4))


def test_a_kernel_that_waits_for_the_one_before_it() -> None:
    assert (clean(dependent(DEPENDENT))["1"] == np.arange(192) + 63 - np.arange(192) % 64).all()
    assert (clean(dependent(broken(DEPENDENT, WAIT, "")))["1"] == clean(dependent(DEPENDENT))["1"]).all()


def test_one_thread_may_wait_for_those_it_meets() -> None:
    one = broken(DEPENDENT, WAIT, f"if (threadIdx.x == 3) {WAIT} __syncthreads();")
    clean(dependent(one))
    assert kinds(dependent(broken(one, "__syncthreads();\n    unsigned", "\n    unsigned"))) == {"early-access"}


@pytest.mark.parametrize("access", [
    "o[blockIdx.x * 64 + threadIdx.x] = 1;",
    "s[threadIdx.x] += a[0] > 5;",
    "atomicMax(o + blockIdx.x * 64 + threadIdx.x, 0u);",
    "asm volatile(\"cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;\" :: "
    "\"r\"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), \"l\"(a) : \"memory\");",
])  # fmt: skip
def test_an_access_before_the_wait(access: str) -> None:
    found = dependent(broken(DEPENDENT, WAIT, f"{access}\n    {WAIT}")).findings
    assert "early-access" in {f.kind for f in found}
    assert any("before griddepcontrol.wait" in f.message for f in found)
    assert "early-access" not in kinds(dependent(broken(DEPENDENT, WAIT, access)))


PLAIN = 'extern "C" __global__ void k(unsigned* o) { WAIT if (threadIdx.x < 8) o[threadIdx.x] = threadIdx.x; }'


def test_a_kernel_that_never_waits_for_the_one_before() -> None:
    source = PLAIN.replace("WAIT", 'asm volatile("griddepcontrol.wait;" ::: "memory");')
    assert run(source, 1, 32, np.zeros(8, U4), programmatic=True).findings == ()
    found = run(PLAIN.replace("WAIT", ""), 1, 32, np.zeros(8, U4), programmatic=True).findings
    assert {f.kind for f in found} == {"early-access"}
    assert "before griddepcontrol.wait" in found[0].message
    assert "none of its threads executes griddepcontrol.wait" in found[-1].message
    assert run(PLAIN.replace("WAIT", ""), 1, 32, np.zeros(8, U4)).findings == ()


def test_a_kernel_without_accesses_has_to_wait_all_the_same() -> None:
    """The kernel behind it waits for this one, not for those before."""
    found = run('extern "C" __global__ void k(unsigned* o) {}', 1, 32, np.zeros(8, U4), programmatic=True).findings
    assert [f.kind for f in found] == ["early-access"]


def test_a_plan_says_how_much_dynamic_shared_memory_and_what_clusters() -> None:
    plan = lower(parse_spec("rmsnorm.fwd:d=1024,dtype=f32"), Schedule("registers", 64, 1, 4))
    source = emit(plan).replace('extern "C"', 'extern __shared__ float more[];\nextern "C"', 1)
    begin = source.index("{\n", source.index("__global__")) + 2
    use = "    more[threadIdx.x] = 1.0f; __syncthreads(); if (more[threadIdx.x ^ 1] != 1.0f) return;\n"
    source = source[:begin] + use + source[begin:]
    inputs = random_inputs(plan.spec, 4)
    for dynamic, cluster, want in ((256, 1, set()), (256, 2, set()), (128, 1, {"out-of-bounds"})):
        kernel = replace(plan.kernels[0], dynamic=dynamic, cluster=cluster)
        launched = replace(plan, kernels=(kernel, *plan.kernels[1:]))
        found = {f.kind for f in run_plan(launched, inputs, source=source).findings}
        assert found >= want if want else not found
