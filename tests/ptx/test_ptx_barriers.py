"""A barrier of a block waits for the wrong threads, or a wrong count or number is no finding, if these fail."""

import numpy as np

from ptx_source import broken, clean, kinds, messages, run

U4 = np.uint32

COUNTED = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[128];
    s[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync 1, %0;" :: "r"(COUNT) : "memory");
    o[threadIdx.x] = s[threadIdx.x ^ 1];
}"""


def test_a_barrier_waits_for_whole_warps() -> None:
    def found(block: int, count: str) -> dict[str, str]:
        return messages(run(COUNTED.replace("COUNT", count), 1, block, np.zeros(block, U4)))

    assert found(64, "64") == {}
    assert found(48, "64") == {}  # the last warp is not full, and counts as one that is
    assert "waits for 48 threads: a multiple of 32 is expected" in found(48, "48")["barrier-count"]
    assert "waits for 16 threads" in found(64, "16")["barrier-count"]
    assert "which waits for 96" in found(64, "96")["deadlock"]
    assert "64 threads arrive at a barrier that waits for 32" in found(64, "32")["divergent-barrier"]
    assert "some with a count of 32, some of 64" in found(64, "threadIdx.x < 32 ? 32 : 64")["barrier-count"]
    assert "deadlock" in found(64, "threadIdx.x < 32 ? 64 : 96")


def test_arrivals_and_waits_give_one_count() -> None:
    """One warp arrives, the other waits for both."""
    either = '"{ .reg .pred p; setp.lt.u32 p, %0, 32; @p bar.arrive 1, 96; @!p bar.sync 1, 64; }"'
    pair = broken(COUNTED, '"bar.sync 1, %0;"', either)
    pair = broken(pair.replace("COUNT", "threadIdx.x"), "o[threadIdx.x] = s[threadIdx.x ^ 1];", "")
    assert "some with a count of 64, some of 96" in messages(run(pair, 1, 64, np.zeros(64, U4)))["barrier-count"]
    assert run(pair.replace("96", "64"), 1, 64, np.zeros(64, U4)).findings == ()


def test_half_a_warp_does_not_arrive() -> None:
    """Of two warps a half each at either barrier: 32 threads, and no warp. Those that have ended need not come."""
    half = broken(COUNTED, '"bar.sync 1, %0;"', '"{ .reg .pred p; setp.lt.u32 p, %0, 16; @p bar.sync 1, 32; OTHERS }"')
    half = half.replace("COUNT", "threadIdx.x % 32")
    found = messages(run(half.replace("OTHERS", "@!p bar.sync 2, 32;"), 1, 64, np.zeros(64, U4)))
    assert "wait for ever at barrier 1, which waits for 32" in found["deadlock"]
    assert "deadlock" not in messages(run(half.replace("OTHERS", "@!p exit;"), 1, 64, np.zeros(64, U4)))


def test_barriers_with_ids_in_registers() -> None:
    source = """extern "C" __global__ void k(unsigned* o, unsigned zero) {
        __shared__ unsigned s[128];
        unsigned group = threadIdx.x / 64, id = group + 1 + zero, count = 64 + zero;
        s[threadIdx.x] = threadIdx.x;
        asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory");
        unsigned x = s[threadIdx.x ^ 33];
        asm volatile("barrier.cta.sync %0, %1;" :: "r"(id), "r"(count) : "memory");
        asm volatile("bar.warp.sync 0xffffffff; nanosleep.u32 20;" ::: "memory");
        asm volatile("membar.cta; membar.gl; fence.acq_rel.gpu;" ::: "memory");
        o[threadIdx.x] = x; }"""
    assert (clean(run(source, 1, 128, np.zeros(128, U4), 0))["0"] == (np.arange(128) ^ 33)).all()
    assert kinds(run(source.replace("^ 33", "^ 65"), 1, 128, np.zeros(128, U4), 0)) == {"shared-race"}


ARRIVE = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[64];
    if (threadIdx.x < 64) {
        s[threadIdx.x] = threadIdx.x;
        asm volatile("bar.arrive 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 128;" ::: "memory");
        o[threadIdx.x - 64] = s[127 - threadIdx.x];
    } }"""


def test_threads_that_arrive_and_go_on() -> None:
    assert (clean(run(ARRIVE, 1, 128, np.zeros(64, U4)))["0"] == 63 - np.arange(64)).all()
    assert "deadlock" in kinds(run(ARRIVE.replace("bar.arrive 1", "bar.arrive 2"), 1, 128, np.zeros(64, U4)))
