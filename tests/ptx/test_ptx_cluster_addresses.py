"""Ranks in a cluster, and the block whose shared memory an address names, are wrong if these fail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptx_source import clean, run, run_ptx, with_mbarrier

U4 = np.uint32
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 2), (8, 1)]

NAMES = (
    "cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z", "cluster_nctaid.x", "cluster_nctaid.y", "clusterid.x",
    "clusterid.y", "nclusterid.x", "nclusterid.y", "cluster_ctarank", "cluster_nctarank",
)  # fmt: skip

MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"

PLACE = f"""
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ctaid.y;
mov.u32 %r4, %nctaid.x;
mad.lo.u32 %r5, %r3, %r4, %r2;
mul.wide.u32 %rd8, %r5, {4 * len(NAMES)};
add.u64 %rd9, %rd0, %rd8;
"""


def blocks(shape: tuple[int, int], many: tuple[int, int]) -> list[dict[str, int]]:
    """Every block of a grid of so many clusters of that shape, row after row: what its special registers hold."""
    found = []
    for y in range(shape[1] * many[1]):
        for x in range(shape[0] * many[0]):
            cx, cy = x % shape[0], y % shape[1]
            at = {"cluster_ctaid.x": cx, "cluster_ctaid.y": cy, "cluster_ctaid.z": 0}
            at |= {"cluster_nctaid.x": shape[0], "cluster_nctaid.y": shape[1]}
            at |= {"clusterid.x": x // shape[0], "clusterid.y": y // shape[1]}
            at |= {"nclusterid.x": many[0], "nclusterid.y": many[1]}
            found.append(at | {"cluster_ctarank": cx + cy * shape[0], "cluster_nctarank": shape[0] * shape[1]})
    return found


def by_rank(all_blocks: list[dict[str, int]], like: dict[str, int], rank: int) -> int:
    """The number of the block of that rank in the cluster of ``like``."""
    same = ("clusterid.x", "clusterid.y")
    return next(
        n for n, b in enumerate(all_blocks) if b["cluster_ctarank"] == rank and all(b[k] == like[k] for k in same)
    )


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from(SHAPES), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(0, 3))
def test_special_registers_of_clusters(shape: tuple[int, int], many: tuple[int, int], order: int) -> None:
    text = PLACE + "".join(
        f"mov.u32 %r1, %{name};\nst.global.u32 [%rd9+{4 * n}], %r1;\n" for n, name in enumerate(NAMES)
    )
    grid, wanted = (shape[0] * many[0], shape[1] * many[1]), blocks(shape, many)
    out = with_mbarrier(text, grid, 1, np.zeros(len(wanted) * len(NAMES), U4), cluster=shape, order=order)
    assert not out.findings
    assert out.results["0"].reshape(-1, len(NAMES)).tolist() == [[b[name] for name in NAMES] for b in wanted]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from(SHAPES), st.tuples(st.integers(1, 2), st.integers(1, 2)), st.integers(0, 7), st.integers(0, 3))
def test_mapa_names_the_block_of_that_rank(
    shape: tuple[int, int], many: tuple[int, int], turn: int, order: int
) -> None:
    """Each block stores its number at home, reads that of rank + turn, and counts up in that of rank - turn."""
    size, grid = shape[0] * shape[1], (shape[0] * many[0], shape[1] * many[1])
    text = PLACE + f"""
mov.u32 %r6, 0;
st.shared.u32 [s], %r5;
st.shared.u32 [s+4], %r6;
{MEET}
mov.u32 %r7, %cluster_ctarank;
add.u32 %r8, %r7, {turn};
rem.u32 %r8, %r8, {size};
add.u32 %r9, %r7, {size * 8 - turn};
rem.u32 %r9, %r9, {size};
mov.u32 %r10, s;
mapa.shared::cluster.u32 %r11, %r10, %r8;
mapa.shared::cluster.u32 %r12, %r10, %r9;
ld.shared::cluster.u32 %r13, [%r11];
st.global.u32 [%rd9], %r13;
add.u32 %r14, %r5, 1000;
st.shared::cluster.u32 [%r12+4], %r14;
{MEET}
ld.shared.u32 %r13, [s+4];
st.global.u32 [%rd9+4], %r13;
"""  # fmt: skip
    there = blocks(shape, many)
    out = with_mbarrier(text, grid, 1, np.zeros(len(there) * len(NAMES), U4), cluster=shape, order=order)
    assert not out.findings, out.findings[0]
    read = [by_rank(there, b, (b["cluster_ctarank"] + turn) % size) for b in there]
    assert out.results["0"].reshape(-1, len(NAMES))[:, :2].tolist() == [[n, 1000 + n] for n in read]


def multicast(mask: int, leader: int) -> str:
    """A copy of one block of each cluster to the blocks in a mask, which wait for it; others keep a 7."""
    return (
        PLACE
        + f"""
mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
mov.u32 %r6, 7;
st.shared.u32 [s], %r6;
fence.proxy.async.shared::cta;
{MEET}
mov.u32 %r7, %cluster_ctarank;
mov.u16 %h0, {mask};
setp.eq.u32 %p2, %r7, {leader};
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [s], [%rd1], 16, [bar], %h0;
mov.u32 %r8, 1;
shl.b32 %r8, %r8, %r7;
and.b32 %r8, %r8, {mask};
setp.eq.u32 %p2, %r8, 0;
@%p2 bra END;
AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [bar], 0;
@!%p1 bra AGAIN;
END:
ld.shared.u32 %r13, [s];
st.global.u32 [%rd9], %r13;
{MEET}
"""
    )


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from([s for s in SHAPES if s != (1, 1)]), st.integers(1, 2), st.data())
def test_a_multicast_goes_to_the_ranks_of_its_mask(shape: tuple[int, int], many: int, data: st.DataObject) -> None:
    """One block of each cluster copies for those in a mask; each of these has the bytes, and its own mbarrier."""
    size = shape[0] * shape[1]
    mask, leader = data.draw(st.integers(1, (1 << size) - 1)), data.draw(st.integers(0, size - 1))
    text = multicast(mask, leader)
    there = blocks(shape, (many, 1))
    out = with_mbarrier(
        text, (shape[0] * many, shape[1]), 1, np.zeros(len(there) * len(NAMES), U4), np.full(4, 9, U4), cluster=shape
    )
    assert not out.findings, out.findings[0]
    wanted = [9 if mask >> b["cluster_ctarank"] & 1 else 7 for b in there]
    assert out.results["0"].reshape(-1, len(NAMES))[:, 0].tolist() == wanted


def test_an_address_of_another_block_has_to_be_there() -> None:
    """One that mapa gives, and one that a mask names."""
    text = "mov.u32 %r10, s;\nmapa.shared::cluster.u32 %r11, %r10, RANK;\nst.shared::cluster.u32 [%r11], %r0;\n"
    near, far = (
        with_mbarrier(MEET + text.replace("RANK", r) + MEET, 2, 1, cluster=(2,)).findings
        for r in ("%cluster_ctarank", "2")
    )
    assert not near
    assert any("mapa names a block that the cluster does not have" in f.message for f in far)
    out = with_mbarrier(multicast(7, 0), 2, 1, np.zeros(2 * len(NAMES), U4), np.full(4, 9, U4), cluster=(2,))
    assert [f.message for f in out.findings if f.kind == "out-of-bounds"] == [
        "The mask 0x7 names a block that the cluster of 2 blocks does not have."
    ]


@pytest.mark.parametrize(("window", "found"), [("", True), ("::cta", True), ("::cluster", False)])
def test_only_cluster_addresses_reach_another_block(window: str, found: bool) -> None:
    body = f""".shared .align 16 .b8 mine[16];
mov.u32 %r1, %cluster_ctarank;
st.shared.u32 [mine], %r1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r2, mine;
xor.b32 %r3, %r1, 1;
mapa.shared::cluster.u32 %r4, %r2, %r3;
ld.shared{window}.u32 %r5, [%r4];
mul.wide.u32 %rd1, %r1, 4;
add.s64 %rd2, %rd0, %rd1;
st.global.u32 [%rd2], %r5;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
    outcome = run_ptx(body, np.zeros(2, U4), grid=2, cluster=(2,))
    assert {f.kind for f in outcome.findings} == ({"out-of-bounds"} if found else set())
    if not found:
        assert outcome.results["0"].tolist() == [1, 0]


GENERIC = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned s[32];
    unsigned long long far; unsigned r, v;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    s[threadIdx.x] = blockIdx.x + threadIdx.x;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(far) : "l"(s + 31 - threadIdx.x), "r"(r ^ 1));
    v = *(volatile unsigned*)far;
    asm volatile("mapa.shared::cluster.u64 %0, %1, %2;"
        : "=l"(far) : "l"((unsigned long long)__cvta_generic_to_shared(s + threadIdx.x)), "r"(r ^ 1));
    unsigned w;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w) : "l"(far) : "memory");
    o[blockIdx.x * 32 + threadIdx.x] = v + w;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}"""


def test_generic_addresses_of_other_blocks() -> None:
    b = np.arange(64) // 32
    assert (clean(run(GENERIC, 2, 32, np.zeros(64, U4)))["0"] == 2 * (b ^ 1) + 31).all()
