"""Shuffles, votes, elections or barriers of a warp exchange other values, or races pass, if these fail."""

import numpy as np
import pytest

from ptx_source import broken, clean, kinds, run, run_ptx

U4 = np.uint32

WARPS = """mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;
shr.u32 %r5, %r4, 5;
mul.wide.u32 %rd5, %r5, 4;
mul.wide.u32 %rd6, %r4, 4;
add.s64 %rd7, %rd0, %rd5;
ld.global.u32 %r6, [%rd7];
add.s64 %rd7, %rd1, %rd5;
ld.global.u32 %r7, [%rd7];
add.s64 %rd8, %rd2, %rd6;
add.s64 %rd9, %rd3, %rd6;
"""


def reads(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """By the manual: the lane whose value a lane gets, and whether that is the one it asked for."""
    b, bound, segment = b % 32, c % 32, c // 256 % 32
    most = (lane & segment) | (bound & ~segment)
    wanted = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}[mode]
    inside = wanted >= most if mode == "up" else wanted <= most
    return (wanted if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    """Every distance with every bound of every segment, and bits that do not count."""
    segments = [0, 16, 24, 28, 30, 31, 5, 21]
    cases = [(b, s << 8 | bound) for s in segments for bound in (0, 1, 7, 15, 30, 31) for b in range(32)]
    cases += [(33, 31), (1, 1 << 13 | 31), (65, 0x1F00 | 0xE0)]
    cases += [(0, 31)] * (-len(cases) % 8)
    body = WARPS + f"""mul.lo.s32 %r8, %r1, 3;
shfl.sync.{mode}.b32 %r9|%p1, %r8, %r6, %r7, -1;
selp.u32 %r10, 1, 0, %p1;
st.global.u32 [%rd8], %r9;
st.global.u32 [%rd9], %r10;
"""  # fmt: skip
    b, c = (np.array([case[n] for case in cases], U4) for n in (0, 1))
    blank = [np.zeros(32 * len(cases), U4) for _ in range(2)]
    found = clean(run_ptx(body, b, c, *blank, block=256, grid=len(cases) // 8))
    for warp, (distance, bound) in enumerate(cases):
        for lane in range(32):
            n = 32 * warp + lane
            source, inside = reads(mode, lane, distance, bound)
            got = int(found["2"][n]), int(found["3"][n])
            assert got == (3 * (n % 256 - lane + source), inside), (distance, hex(bound), lane)


def test_votes() -> None:
    """Of whole warps, and of the half of a warp whose other half does something else."""
    patterns = [0, 1, 1 << 31, 0xFFFF, 0xFFFF0000, 0xFFFFFFFF, 0x5A5A5A5A, 0xFFFFFFFE]
    masks = [0xFFFFFFFF, 0x0000FFFF]
    cases = [(p, m) for p in patterns for m in masks]
    body = WARPS + """and.b32 %r8, %r1, 31;
shr.u32 %r9, %r6, %r8;
and.b32 %r9, %r9, 1;
setp.ne.u32 %p1, %r9, 0;
shr.u32 %r9, %r7, %r8;
and.b32 %r9, %r9, 1;
setp.eq.u32 %p2, %r9, 0;
mov.u32 %r10, 0;
mov.u32 %r11, 0;
@%p2 bra $out;
vote.sync.all.pred %p3, %p1, %r7;
vote.sync.any.pred %p4, %p1, %r7;
vote.sync.uni.pred %p5, %p1, %r7;
vote.sync.ballot.b32 %r11, %p1, %r7;
selp.u32 %r10, 1, 0, %p3;
@%p4 add.s32 %r10, %r10, 2;
@%p5 add.s32 %r10, %r10, 4;
$out:
st.global.u32 [%rd8], %r10;
st.global.u32 [%rd9], %r11;
"""  # fmt: skip
    first, second = (np.array([case[n] for case in cases], U4) for n in (0, 1))
    blank = [np.zeros(32 * len(cases), U4) for _ in range(2)]
    found = clean(run_ptx(body, first, second, *blank, block=32, grid=len(cases)))
    for warp, (pattern, mask) in enumerate(cases):
        ayes = pattern & mask
        want = (ayes == mask) + 2 * (ayes != 0) + 4 * (ayes in (0, mask))
        for lane in range(32):
            inside = mask >> lane & 1
            got = int(found["2"][32 * warp + lane]), int(found["3"][32 * warp + lane])
            assert got == (want * inside, ayes * inside), (hex(pattern), hex(mask), lane)


EIGHT = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[32];
    unsigned t = threadIdx.x;
    s[t] = 0;
    if (t < 8) s[t] = __activemask();
    __syncwarp();
    o[t] = s[31 - t];
}"""


def test_active_threads_and_warp_barrier() -> None:
    out = clean(run(EIGHT, 1, 32, np.zeros(32, U4)))["0"]
    assert (out == np.where(np.arange(32) > 23, 255, 0)).all()
    assert kinds(run(broken(EIGHT, "__syncwarp();", ""), 1, 32, np.zeros(32, U4))) == {"shared-race"}


def test_one_thread_of_a_warp_is_elected() -> None:
    source = """extern "C" __global__ void k(unsigned* o) {
        unsigned r = 99, p = 0;
        if (threadIdx.x % 32 >= 5)
            asm volatile("{ .reg .pred q; elect.sync %0|q, 0xffffffe0; selp.u32 %1, 1, 0, q; }" : "=r"(r), "=r"(p));
        o[threadIdx.x] = r + 100 * p; }"""
    out = clean(run(source, 1, 64, np.zeros(64, U4)))["0"].reshape(2, 32)
    assert (out[:, :5] == 99).all()
    assert (out[:, 5] == 105).all()
    assert (out[:, 6:] == 5).all()
    sink = source.replace("elect.sync %0|q", "elect.sync _|q")
    assert (clean(run(sink, 1, 32, np.zeros(32, U4)))["0"][5:] == np.where(np.arange(5, 32) == 5, 199, 99)).all()
