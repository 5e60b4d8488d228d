"""Accesses that nothing orders pass, or flags, fences and scopes that order them are findings, if these fail."""

from typing import Any

import numpy as np
import pytest

from lngen.ptx import Outcome
from ptx_source import broken, clean, kinds, messages, run, run_ptx

U4 = np.uint32
HALVES = 'extern "C" __global__ void k(unsigned* o) { o[threadIdx.x / 2] = threadIdx.x; }'

TURNS = """extern "C" __global__ void k(unsigned* o, unsigned* p) {
    o[threadIdx.x] = threadIdx.x;
    __syncthreads();
    p[threadIdx.x] = o[threadIdx.x ^ 1];
}"""


@pytest.mark.parametrize("more", ["", " __syncthreads();", ' asm volatile("fence.acq_rel.gpu;");'])
def test_two_threads_of_a_block_write_one_word(more: str) -> None:
    """With nothing else in the kernel, with a barrier behind, and with a fence, which takes another path."""
    found = messages(run(HALVES.replace("}", more + "}"), 3, 64, np.zeros(32, U4)))
    assert set(found) == {"global-race"}
    assert "'k_param_0'" in found["global-race"]
    assert "and nothing orders the two" in found["global-race"]


def test_a_thread_reads_what_another_of_its_block_writes() -> None:
    arrays = np.zeros(64, U4), np.zeros(64, U4)
    assert run(TURNS, 1, 64, *arrays).findings == ()
    found = messages(run(broken(TURNS, "__syncthreads();", ""), 1, 64, *arrays))
    assert set(found) == {"global-race"}
    early = broken(TURNS, "o[threadIdx.x] = threadIdx.x;\n    __syncthreads();", "")
    late = broken(
        early, "p[threadIdx.x] = o[threadIdx.x ^ 1];", "p[threadIdx.x] = o[threadIdx.x ^ 1]; o[threadIdx.x] = 1;"
    )
    assert "thread" in messages(run(late, 1, 64, *arrays))["global-race"]


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


def grid(source: str, order: int = 0) -> Outcome:
    return run(source, 4, 64, np.zeros(1, U4), np.zeros(256, U4), np.zeros(256, U4), order=order)


def test_grid_barrier() -> None:
    b, t = np.divmod(np.arange(256), 64)
    for order in range(4):
        assert (clean(grid(GRID, order))["2"] == (b + 1) % 4 + (t + 5) % 64).all()


@pytest.mark.parametrize(("old", "new", "kind"), [
    ("__threadfence(); // before", "", "global-race"),
    ("__threadfence(); // before", "__threadfence_block();", "global-race"),
    ("__threadfence(); // after", "", "global-race"),
    ("__syncthreads();\n    if", "if", "global-race"),
    ("__syncthreads(); // all", "", "global-race"),
    ("while (*(volatile unsigned*)counter < 4u);", "", "global-race"),
    ("< 4u", "< 3u", "global-race"),
    ("< 4u", "< 5u", "deadlock"),
    ("*(volatile unsigned*)counter", "atomicAdd(counter, 0u)", ""),
])  # fmt: skip
def test_grid_barrier_defects(old: str, new: str, kind: str) -> None:
    assert kinds(grid(broken(GRID, old, new))) == ({kind} if kind else set())


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


def flag(source: str) -> Outcome:
    return run(source, 2, 1, np.zeros(1, U4), np.zeros(2, U4), np.zeros(1, U4))


def test_release_and_acquire() -> None:
    assert clean(flag(FLAG))["2"][0] == 42
    assert kinds(flag(broken(FLAG, "st.release.gpu", "st.relaxed.gpu"))) == {"global-race"}
    assert kinds(flag(broken(FLAG, "ld.acquire.gpu", "ld.relaxed.gpu"))) == {"global-race"}
    assert kinds(flag(broken(FLAG, "st.release.gpu", "st.release.cta"))) == {"global-race"}
    assert kinds(flag(broken(FLAG, '"r"(1)', '"r"(0)'))) == {"deadlock"}


def test_release_and_acquire_inside_a_block() -> None:
    """The scope of a block is enough for its own threads, and what it does not reach is a race."""
    warps = broken(FLAG, "blockIdx.x == 1", "threadIdx.x == 32")
    warps = broken(warps, "} else {", "} else if (threadIdx.x == 0) {")

    def inside(source: str) -> set[str]:
        return kinds(run(source, 1, 64, np.zeros(1, U4), np.zeros(2, U4), np.zeros(1, U4)))

    narrow = broken(broken(warps, "st.release.gpu", "st.release.cta"), "ld.acquire.gpu", "ld.acquire.cta")
    for right in (warps, narrow, broken(warps, "ld.acquire.gpu", "ld.acquire.cta")):
        assert inside(right) == set()
    for old, new in (("st.release.cta", "st.relaxed.cta"), ("ld.acquire.cta", "ld.relaxed.cta")):
        assert inside(broken(narrow, old, new)) == {"global-race"}


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


def test_released_and_acquired_counters() -> None:
    def red(source: str) -> Outcome:
        return run(source, 4, 1, np.zeros(1, U4), np.zeros(3, U4), np.zeros(1, U4))

    assert clean(red(RED))["2"][0] == 9
    assert kinds(red(RED.replace("red.release", "red.relaxed"))) == {"global-race"}


LAST = """__device__ unsigned ticket;
extern "C" __global__ void k(unsigned* partial, unsigned* o) {
    __shared__ unsigned last;
    partial[blockIdx.x * 32 + threadIdx.x] = blockIdx.x + 1;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&ticket, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence(); // seen
    unsigned x = 0;
    for (int b = 0; b < gridDim.x; ++b) x += partial[b * 32 + threadIdx.x];
    o[threadIdx.x] = x;
}"""


def test_the_last_block_adds_up() -> None:
    def last(source: str) -> Outcome:
        return run(source, 5, 32, np.zeros(160, U4), np.zeros(32, U4))

    assert (clean(last(LAST))["1"] == 15).all()
    assert kinds(last(broken(LAST, "gridDim.x - 1", "gridDim.x - 2"))) == {"global-race"}
    assert kinds(last(broken(LAST, "    __threadfence();\n", ""))) == {"global-race"}


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


COUNTER = """extern "C" __global__ void k(unsigned* o) {
    unsigned before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(o) : "memory");
    o[1 + blockIdx.x] = before;
}"""


def test_a_strong_access_races_beyond_its_scope() -> None:
    def found(scope: str, **more: Any) -> dict[str, str]:
        return messages(run(COUNTER.replace(".gpu", scope), 4, 1, np.zeros(8, U4), **more))

    assert found(".gpu") == found(".sys") == {}
    assert set(found(".cta")) == {"global-race"}
    assert set(found(".cluster")) == {"global-race"}
    assert found(".cluster", cluster=(4,)) == {}
    assert set(found(".cluster", cluster=(2,))) == {"global-race"}
