"""Accesses that nothing orders pass, or barriers, flags, fences and launches that order them are findings, if not."""

from dataclasses import replace

import numpy as np
import pytest

from lngen.compiler.emit import emit
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from lngen.proof.check.inputs import random_inputs
from lngen.proof.ptx import run_plan
from ptx_source import Sample, edits, judge, kinds, run_ptx

U4 = np.uint32

# ---- threads, blocks and what they hand over ----

HALVES = 'extern "C" __global__ void k(unsigned* o) { o[threadIdx.x / 2] = threadIdx.x; }'

TURNS = """extern "C" __global__ void k(unsigned* o, unsigned* p) {
    o[threadIdx.x] = threadIdx.x;
    __syncthreads();
    p[threadIdx.x] = o[threadIdx.x ^ 1];
}"""

GRID = """extern "C" __global__ void k(unsigned* counter, unsigned* data, unsigned* o) {
    data[blockIdx.x * 64 + threadIdx.x] = blockIdx.x + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); // before
        atomicAdd(counter, 1u);
        while (*(volatile unsigned*)counter < 4u);
        __threadfence(); // after
    }
    __syncthreads(); // all
    o[blockIdx.x * 64 + threadIdx.x] = data[(blockIdx.x + 1) % 4 * 64 + (threadIdx.x + 5) % 64];
}"""

FLAG = """extern "C" __global__ void k(unsigned* flag, unsigned* data, unsigned* o) {
    if (blockIdx.x == 1) {
        unsigned v;
        do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); } while (v == 0);
        o[0] = *(volatile unsigned*)data + data[1];
    } else {
        for (int n = 0; n < 10; ++n) data[1] = n;
        data[0] = 33;
        asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(flag), "r"(1) : "memory");
    }
}"""

RED = """extern "C" __global__ void k(unsigned* flag, unsigned* data, unsigned* o) {
    if (blockIdx.x < 3) {
        data[blockIdx.x] = blockIdx.x + 1;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");
    } else {
        unsigned v;
        do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); } while (v < 3);
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 5;" : "=r"(v) : "l"(flag) : "memory");
        o[0] = data[0] + data[1] + data[2] + v;
    } }"""

COUNTER = """extern "C" __global__ void k(unsigned* o) {
    unsigned before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(o) : "memory");
    o[1 + blockIdx.x] = before;
}"""

# ---- barriers ----

COUNTED = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[128];
    s[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync 1, %0;" :: "r"(COUNT) : "memory");
    o[threadIdx.x] = s[threadIdx.x ^ 1];
}"""

ARRIVE = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[64];
    if (threadIdx.x < 64) {
        s[threadIdx.x] = threadIdx.x;
        asm volatile("bar.arrive 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 128;" ::: "memory");
        o[threadIdx.x - 64] = s[127 - threadIdx.x];
    } }"""

NUMBERED = """extern "C" __global__ void k(unsigned* o, unsigned zero) {
    __shared__ unsigned s[128];
    unsigned group = threadIdx.x / 64, id = group + 1 + zero, count = 64 + zero;
    s[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory");
    unsigned x = s[threadIdx.x ^ 33];
    asm volatile("barrier.cta.sync %0, %1;" :: "r"(id), "r"(count) : "memory");
    asm volatile("bar.warp.sync 0xffffffff; nanosleep.u32 20;" ::: "memory");
    asm volatile("membar.cta; membar.gl; fence.acq_rel.gpu;" ::: "memory");
    o[threadIdx.x] = x; }"""

# ---- launches ----

DYNAMIC = """extern __shared__ __align__(128) unsigned s[];
extern "C" __global__ void k(unsigned* o, unsigned n) {
    __shared__ unsigned first[32];
    if (threadIdx.x < 32) first[threadIdx.x] = 7;
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) s[i] = i + blockIdx.x;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) o[blockIdx.x * n + i] = s[n - 1 - i] + first[i % 32];
}"""

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

PLAIN = 'extern "C" __global__ void k(unsigned* o) { WAIT if (threadIdx.x < 8) o[threadIdx.x] = threadIdx.x; }'


def zeros(*sizes: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(n, U4) for n in sizes)


def samples() -> dict[str, Sample]:
    """Each kernel as it is right."""
    n, (b, t) = np.arange(256), np.divmod(np.arange(256), 64)
    warps = FLAG.replace("blockIdx.x == 1", "threadIdx.x == 32").replace("} else {", "} else if (threadIdx.x == 0) {")
    narrow = warps.replace("st.release.gpu", "st.release.cta").replace("ld.acquire.gpu", "ld.acquire.cta")
    either = '"{ .reg .pred p; setp.lt.u32 p, %0, 32; @p bar.arrive 1, 96; @!p bar.sync 1, 64; }"'
    pair = COUNTED.replace('"bar.sync 1, %0;"', either).replace("COUNT", "threadIdx.x")
    half = '"{ .reg .pred p; setp.lt.u32 p, %0, 16; @p bar.sync 1, 32; OTHERS }"'
    dynamic = 7 + 255 - n + np.arange(3)[:, None]
    early = TURNS.replace("o[threadIdx.x] = threadIdx.x;\n    __syncthreads();", "")
    return {
        "halves": Sample(HALVES, 3, 64, zeros(32)), "turns": Sample(TURNS, 1, 64, zeros(64, 64)),
        "turns, early": Sample(early, 1, 64, zeros(64, 64)),
        "grid": Sample(GRID, 4, 64, zeros(1, 256, 256), (b + 1) % 4 + (t + 5) % 64),
        "grid, other order": Sample(GRID, 4, 64, zeros(1, 256, 256), (b + 1) % 4 + (t + 5) % 64, {"order": 3}),
        "flag": Sample(FLAG, 2, 1, zeros(1, 2, 1), 42), "flag, warps": Sample(warps, 1, 64, zeros(1, 2, 1), 42),
        "flag, scope of a block": Sample(narrow, 1, 64, zeros(1, 2, 1), 42),
        "counters": Sample(RED, 4, 1, zeros(1, 3, 1), 9), "scope": Sample(COUNTER, 4, 1, zeros(8)),
        "scope, cluster": Sample(COUNTER, 4, 1, zeros(8), None, {"cluster": (4,)}),
        "scope, small cluster": Sample(COUNTER, 4, 1, zeros(8), None, {"cluster": (2,)}),
        "barrier": Sample(COUNTED, 1, 64, zeros(64), n[:64] ^ 1), "barrier, 48": Sample(COUNTED, 1, 48, zeros(48)),
        "barrier, two kinds": Sample(pair.replace("o[threadIdx.x] = s[threadIdx.x ^ 1];", ""), 1, 64, zeros(64)),
        "barrier, halves of warps": Sample(
            COUNTED.replace('"bar.sync 1, %0;"', half).replace("COUNT", "threadIdx.x % 32"), 1, 64, zeros(64)),
        "arrive": Sample(ARRIVE, 1, 128, zeros(64), 63 - n[:64]),
        "numbered": Sample(NUMBERED, 1, 128, (np.zeros(128, U4), 0), n[:128] ^ 33),
        "dynamic": Sample(DYNAMIC, 3, 64, (np.zeros(768, U4), 256), dynamic.ravel(), {"dynamic": 1024}),
        "dynamic, 1020": Sample(DYNAMIC, 1, 64, (np.zeros(256, U4), 256), None, {"dynamic": 1020}),
        "dynamic, none": Sample(DYNAMIC, 1, 64, (np.zeros(256, U4), 256)),
        "dependent": Sample(DEPENDENT, 3, 64, (n[:192].astype(U4), np.zeros(192, U4)), (n + 63 - n % 64)[:192]),
        "programmatic": Sample(PLAIN, 1, 32, zeros(8), n[:8], {"programmatic": True}),
        "alone": Sample(PLAIN, 1, 32, zeros(8), n[:8]),
        "empty": Sample(PLAIN[: PLAIN.index("WAIT")] + "}", 1, 32, zeros(8), None, {"programmatic": True}),
    }  # fmt: skip


SAMPLES = samples()
SYNC, END = "__syncthreads();", "o[threadIdx.x] = s[threadIdx.x ^ 1];"
ORDERED: dict[str, list[tuple[str, ...]]] = {
    # With nothing else in the kernel, with a barrier behind, and with a fence, which takes another path.
    "halves": [
        ("=global-race: 'k_param_0'.*and nothing orders the two",), ("=global-race", "}", f"{SYNC} }}"),
        ("=global-race", "}", ' asm volatile("fence.acq_rel.gpu;"); }'),
    ],
    "turns": [("",), ("=global-race", SYNC, "")],
    "turns, early": [("global-race: thread", "o[threadIdx.x ^ 1];", "o[threadIdx.x ^ 1]; o[threadIdx.x] = 1;")],
    "grid": [
        ("",), ("=global-race", "__threadfence(); // before", ""),
        ("=global-race", "__threadfence(); // before", "__threadfence_block();"),
        ("=global-race", "__threadfence(); // after", ""), ("=global-race", "__syncthreads();\n    if", "if"),
        ("=global-race", "__syncthreads(); // all", ""),
        ("=global-race", "while (*(volatile unsigned*)counter < 4u);", ""), ("=global-race", "< 4u", "< 3u"),
        ("=deadlock", "< 4u", "< 5u"), ("", "*(volatile unsigned*)counter", "atomicAdd(counter, 0u)"),
    ],
    "grid, other order": [("",)],
    "flag": [
        ("",), ("=global-race", "st.release.gpu", "st.relaxed.gpu"),
        ("=global-race", "ld.acquire.gpu", "ld.relaxed.gpu"), ("=global-race", "st.release.gpu", "st.release.cta"),
        ("=deadlock", '"r"(1)', '"r"(0)'),
    ],
    # The scope of a block is enough for its own threads.
    "flag, warps": [("",), ("", "ld.acquire.gpu", "ld.acquire.cta")],
    "flag, scope of a block": [
        ("",), ("=global-race", "st.release.cta", "st.relaxed.cta"),
        ("=global-race", "ld.acquire.cta", "ld.relaxed.cta"),
    ],
    "counters": [("",), ("=global-race", "red.release", "red.relaxed")],
    # A strong access races beyond its scope.
    "scope": [("",), ("", ".gpu", ".sys"), ("=global-race", ".gpu", ".cta"), ("=global-race", ".gpu", ".cluster")],
    "scope, cluster": [("", ".gpu", ".cluster")], "scope, small cluster": [("=global-race", ".gpu", ".cluster")],
    "barrier": [
        ("", "COUNT", "64"), ("barrier-count: waits for 16 threads", "COUNT", "16"),
        ("deadlock: which waits for 96", "COUNT", "96"), ("deadlock", "COUNT", "threadIdx.x < 32 ? 64 : 96"),
        ("divergent-barrier: 64 threads arrive at a barrier that waits for 32", "COUNT", "32"),
        ("barrier-count: some with a count of 32, some of 64", "COUNT", "threadIdx.x < 32 ? 32 : 64"),
    ],
    "barrier, 48": [
        ("", "COUNT", "64"), ("barrier-count: waits for 48 threads: a multiple of 32 is expected", "COUNT", "48"),
    ],
    "barrier, two kinds": [("barrier-count: some with a count of 64, some of 96",), ("", "96", "64")],
    # Of two warps a half each at either barrier: 32 threads, and no warp. Those that have ended need not come.
    "barrier, halves of warps": [
        ("deadlock: wait for ever at barrier 1, which waits for 32", "OTHERS", "@!p bar.sync 2, 32;"),
        ("=divergent-barrier", "OTHERS", "@!p exit;"),
    ],
    "arrive": [("",), ("deadlock", "bar.arrive 1", "bar.arrive 2")],
    "numbered": [("",), ("=shared-race", "^ 33", "^ 65")],
    "dynamic": [
        ("",), ("shared-race", SYNC, ""),
        ("uninitialised", "i = threadIdx.x; i < n; i += blockDim.x) s[i]", "i = threadIdx.x + 1; i < n; i += 64) s[i]"),
    ],
    "dynamic, 1020": [("=out-of-bounds: 's', which has 1020 bytes",)], "dynamic, none": [("out-of-bounds",)],
    # A kernel waits for the one before it; one thread may wait for those that it meets.
    "dependent": [
        ("",), ("", WAIT, ""), ("", WAIT, f"if (threadIdx.x == 3) {WAIT} {SYNC}"),
        ("=early-access", WAIT, f"if (threadIdx.x == 3) {WAIT}"),
    ],
    "programmatic": [
        ("", "WAIT", WAIT), ("=early-access: before griddepcontrol.wait", "WAIT", ""),
        ("=early-access: none of its threads executes griddepcontrol.wait", "WAIT", ""),
    ],
    "alone": [("", "WAIT", "")],
    # The kernel behind an empty one waits for it, not for those before.
    "empty": [("=early-access",)],
}  # fmt: skip


@edits(ORDERED)
def test_what_is_ordered(name: str, expected: str, texts: tuple[str, ...]) -> None:
    judge(SAMPLES[name].run(*texts), expected, SAMPLES[name].want)


@pytest.mark.parametrize("access", [
    "o[blockIdx.x * 64 + threadIdx.x] = 1;", "s[threadIdx.x] += a[0] > 5;",
    "atomicMax(o + blockIdx.x * 64 + threadIdx.x, 0u);",
    'asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;" :: '
    '"r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), "l"(a) : "memory");',
], ids=["store", "load", "atomic", "copy"])  # fmt: skip
def test_an_access_before_the_wait(access: str) -> None:
    judge(SAMPLES["dependent"].run(WAIT, f"{access}\n    {WAIT}"), "early-access: before griddepcontrol.wait")
    assert "early-access" not in kinds(SAMPLES["dependent"].run(WAIT, access))


MESSAGE = """mov.u32 %r1, %ctaid.x;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra $reader;
mov.u32 %r2, 7;
st.global.u32 [%rd0], %r2;
WRITER
mov.u32 %r3, 1;
st.relaxed.gpu.global.u32 [%rd1], %r3;
ret;
$reader:
ld.relaxed.gpu.global.u32 %r4, [%rd1];
setp.eq.u32 %p2, %r4, 0;
@%p2 bra $reader;
READER
ld.global.u32 %r5, [%rd0];
st.global.u32 [%rd2], %r5;
"""


@pytest.mark.parametrize("reader", ["acquire", "release", "acq_rel", "sc"])
@pytest.mark.parametrize("writer", ["acquire", "release", "acq_rel", "sc"])
def test_a_fence_goes_one_way(writer: str, reader: str) -> None:
    """A flag hands over what a release comes before, to what comes after an acquire."""
    body = MESSAGE.replace("WRITER", f"fence.{writer}.gpu;").replace("READER", f"fence.{reader}.gpu;")
    outcome = run_ptx(body, *(np.zeros(1, U4) for _ in range(3)), grid=2)
    ordered_ = writer != "acquire" and reader != "release"
    assert {f.kind for f in outcome.findings} == (set() if ordered_ else {"global-race"})


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
