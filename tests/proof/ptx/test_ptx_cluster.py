"""Blocks of a cluster exchange other values, or reach blocks that are gone without a finding, if these fail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptx_source import HELPERS, Sample, edits, judge, run_ptx, with_mbarrier

U4 = np.uint32

VECTORS = HELPERS + """
extern "C" __global__ void __cluster_dims__(4, 1, 1) k(unsigned* o) {
    unsigned t = threadIdx.x, v[4];
    for (int n = 0; n < 4; ++n) s[4 * t + n] = 1000 * blockIdx.x + 4 * t + n;
    cluster_sync();
    unsigned far = map(s + 4 * (31 - t), (rank() + 1) % 4);
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(far) : "memory");
    cluster_sync(); // read
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" :: "r"(far), "r"(v[0] + 1), "r"(v[1] + 2) : "memory");
    cluster_sync(); // written
    o[blockIdx.x * 128 + 4 * t] = v[3];
    for (int n = 1; n < 4; ++n) o[blockIdx.x * 128 + 4 * t + n] = s[4 * t + n - 1];
}"""  # fmt: skip

READ = HELPERS + """
extern "C" __global__ void k(unsigned* o) {
    unsigned v;
    s[threadIdx.x] = blockIdx.x + threadIdx.x;
    cluster_sync();
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(map(s + 31 - threadIdx.x, rank() ^ 1)) : "memory");
    o[blockIdx.x * 32 + threadIdx.x] = v;
    cluster_sync(); // stay
}"""  # fmt: skip


ARRIVE = HELPERS + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x;
    if (t == 0) init(&bar, 64);
    cluster_sync();
    asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};"
        :: "r"(map(s + 2 * t, rank() ^ 1)), "r"(t + blockIdx.x), "r"(7) : "memory");
    for (unsigned r = 0; r < 2; ++r)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(map(&bar, r)) : "memory");
    wait(&bar, 0); // come
    o[blockIdx.x * 32 + t] = s[2 * (31 - t)] + s[2 * t + 1];
    cluster_sync(); // stay
}"""  # fmt: skip

ACROSS = HELPERS + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x;
    if (t == 0) { init(&bar, 1); expect(&bar, 128); }
    s[t] = 100 * blockIdx.x + t;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // fence
    cluster_sync();
    if (t == 0) asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        " [%0], [%1], %2, [%3];"
        :: "r"(map(s + 32, rank() ^ 1)), "r"(at(s)), "r"(128), "r"(map(&bar, rank() ^ 1)) : "memory");
    wait(&bar, 0);
    o[blockIdx.x * 32 + t] = s[63 - t];
    cluster_sync(); // stay
}"""  # fmt: skip

CLUSTER = HELPERS + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    unsigned t = threadIdx.x;
    BEFORE
    unsigned far = map(s + t, rank() ^ 1);
    ACCESS
    cluster_sync();
    o[32 * blockIdx.x + t] = s[t];
}"""  # fmt: skip

STORE = 'asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(far), "r"(t) : "memory");'

REMOTE = HELPERS + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x;
    if (t == 0) { init(&bar, 1); expect(&bar, 128); }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
    cluster_wait();
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :: "r"(map(s + t, rank() ^ 1)), "r"(100 * blockIdx.x + t), "r"(map(&bar, rank() ^ 1)) : "memory");
    wait(&bar, 0);
    o[32 * blockIdx.x + t] = s[t];
    cluster_sync();
}"""  # fmt: skip

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


def numbers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The block, and the thread in it, of so many threads of blocks of 32."""
    b, t = np.divmod(np.arange(count), 32)
    return b, t


def vectors(grid: int) -> np.ndarray:
    """What ``VECTORS`` leaves."""
    b, t = numbers(grid * 32)
    first = 1000 * (b // 4 * 4 + (b + 1) % 4) + 4 * (31 - t) + 3
    return np.column_stack([first, *(1000 * b + 4 * t + n for n in (1, 3, 2))]).ravel()


def sample(source: str, grid: int, size: int, want: object = None, **options: object) -> Sample:
    dtype = np.float32 if "float* o" in source else U4
    return Sample(source, grid, 32, (np.zeros(size, dtype),), want, {"dynamic": 2048, **options})


def samples() -> dict[str, Sample]:
    """Each kernel as it is right."""
    b, t = numbers(128)
    pair, exchanged = ((b ^ 1) + 31 - t), 100 * (b ^ 1) + 31 - t
    stored = CLUSTER.replace("ACCESS", STORE)
    relaxed = ARRIVE.replace("try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster")
    across = relaxed.replace(
        "    for (unsigned r", "    o[64 + blockIdx.x * 32 + t] = t;\n    for (unsigned r"
    ).replace("s[2 * t + 1];\n", "s[2 * t + 1] + o[64 + (1 - blockIdx.x) * 32 + 31 - t];\n")
    gone = ARRIVE.replace("wait(&bar, 0); // come", "cluster_sync();").replace("    cluster_sync(); // stay\n", "")
    red = CLUSTER.replace(
        "ACCESS", STORE.replace("st.shared::cluster.u32 [%0], %1", "red.shared::cluster.add.u32 [%0], 1")
    )
    return {
        "vectors": sample(VECTORS, 8, 1024, vectors(8)),
        "vectors, other order": sample(VECTORS, 8, 1024, vectors(8), order=5),
        "vectors, many": sample(VECTORS, 400, 51200, vectors(400)),
        "read": sample(READ, 4, 128, pair, cluster=(2,)),
        "read, other order": sample(READ, 4, 128, pair, cluster=(2,), order=2),
        "arrive": sample(ARRIVE, 2, 64, (pair + 7)[:64]),
        "arrive, relaxed": sample(relaxed, 2, 64),
        "arrive, global memory": sample(across, 2, 128),
        "arrive, gone": sample(gone, 2, 64),
        "across": sample(ACROSS, 2, 64, exchanged[:64]),
        "store": sample(stored, 4, 128),
        "reduce": sample(red, 4, 128),
        "remote": sample(REMOTE, 4, 128, 100 * (b ^ 1) + t),
        "generic": Sample(GENERIC, 2, 32, (np.zeros(64, U4),), 2 * (np.arange(64) // 32 ^ 1) + 31),
    }


SAMPLES = samples()
STAY, COME, WAITS = "cluster_sync(); // stay", "wait(&bar, 0); // come", "try_wait.parity.acquire.cluster"
RELAXED = 'asm volatile("barrier.cluster.arrive.relaxed.aligned;"); cluster_wait();'
WHOLE = 'asm volatile("fence.acq_rel.cluster;" ::: "memory");'
RESTRICTED = 'asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");'
INITIAL = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'
LAST = 'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(map(&bar, rank() ^ 1)));'
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // fence'
FOUND: dict[str, list[tuple[str, ...]]] = {
    "vectors": [
        ("",), ("shared-race", "    cluster_sync();\n    unsigned far", "    unsigned far"),
        ("shared-race", "cluster_sync(); // written", "cluster_arrive(); __syncthreads();"),
        ("out-of-bounds", "(rank() + 1) % 4", "rank() + 1"),
        ("misaligned", "map(s + 4 * (31 - t)", "map(s + 2 + 4 * (30 - t)"),
        ("shared-race", "cluster_sync();\n    unsigned far", f"{RELAXED}\n    unsigned far"),
        ("divergent-barrier", "cluster_sync(); // read", "cluster_arrive(); cluster_sync();"),
        ("divergent-barrier", "cluster_sync(); // read", "if (rank()) cluster_arrive(); cluster_wait();"),
    ],
    "vectors, other order": [("",)], "vectors, many": [("",)], "generic": [("",)],
    # A block that ends before it is read.
    "read": [
        ("",), ("", STAY, "cluster_arrive(); cluster_wait();"), ("=early-exit: may end before this access", STAY, ""),
        ("=early-exit", STAY, RELAXED.replace(".aligned", "")),
    ],
    "read, other order": [("",), ("=early-exit", STAY, "")],
    "arrive": [
        ("",), ("shared-race|uninitialised", COME, ""), ("", f"    {STAY}\n", ""),
        ("shared-race", "arrive.release.cluster", "arrive.relaxed.cluster"),
        # Those who arrive and those who wait both name the cluster.
        ("shared-race", "arrive.release.cluster", "arrive.release.cta"),
        ("shared-race", "parity.acquire.cluster", "parity.acquire.cta"),
        ("deadlock", "init(&bar, 64)", "init(&bar, 65)"), ("shared-race", "init(&bar, 64)", "init(&bar, 63)"),
    ],
    # A relaxed wait shows nothing before a fence; a restricted one is none for global memory.
    "arrive, relaxed": [
        ("shared-race",), ("", COME, f"{COME}\n    {RESTRICTED}"), ("", COME, f"{COME}\n    {WHOLE}"),
        ("shared-race", COME, f"{RESTRICTED} {COME}"), ("shared-race", COME, f"{WHOLE} {COME}"),
    ],
    "arrive, global memory": [
        ("=global-race", COME, f"{COME}\n    {RESTRICTED}"), ("", COME, f"{COME}\n    {WHOLE}"),
        ("", COME, f"{COME}\n    {RESTRICTED} {WHOLE}"),
    ],
    # Nobody waits for the last arrival: the other block may be gone.
    "arrive, gone": [("",), ("=early-exit", "+ s[2 * t + 1];", f"+ s[2 * t + 1];\n    {LAST}")],
    "across": [("",), ("=proxy", FENCE, "")],
    # A block of a cluster is reached after it has begun.
    "store": [
        ("=early-remote: shared memory of block 1, which may not have started", "BEFORE", ""),
        ("", "BEFORE", "cluster_sync();"), ("", "BEFORE", RELAXED), ("=early-remote", "BEFORE", "__syncthreads();"),
    ],
    "reduce": [("early-remote", "BEFORE", "")],
    # fence.mbarrier_init is enough for a relaxed cluster barrier behind it; one that releases needs no fence.
    "remote": [
        ("",), ("=shared-race", INITIAL, ""), ("", INITIAL, WHOLE),
        ("", "arrive.relaxed.aligned", "arrive.release.aligned", INITIAL, ""),
        ("async-read|uninitialised|deadlock", "wait(&bar, 0);", ""),
        ("deadlock", "expect(&bar, 128)", "expect(&bar, 136)"),
        ("deadlock|async-read", "expect(&bar, 128)", "expect(&bar, 120)"),
        ("out-of-bounds", 'map(&bar, rank() ^ 1)) : "memory");\n    wait', 'map(&bar, rank())) : "memory");\n    wait'),
        ("misaligned", "map(s + t, rank() ^ 1)", "map(s + t, rank() ^ 1) + 2"),
        ("shared-race", INITIAL, WHOLE.replace("cluster", "cta")),
        ("=async-read early-exit", WAITS, "try_wait.parity.acquire.cta"),
        ("=async-read early-exit", WAITS, "try_wait.parity.relaxed.cluster"),
        ("", WAITS, "try_wait.parity.relaxed.cluster", "o[32", f"{WHOLE}\n    o[32"),
        ("async-read", WAITS, "try_wait.parity.relaxed.cta", "o[32", f"{WHOLE}\n    o[32"),
    ],
}  # fmt: skip


@edits(FOUND)
def test_blocks_of_a_cluster(name: str, expected: str, texts: tuple[str, ...]) -> None:
    judge(SAMPLES[name].run(*texts), expected, SAMPLES[name].want)


# ---- addresses ----

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


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.sampled_from(SHAPES), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(0, 3))
def test_special_registers_of_clusters(shape: tuple[int, int], many: tuple[int, int], order: int) -> None:
    text = PLACE + "".join(
        f"mov.u32 %r1, %{name};\nst.global.u32 [%rd9+{4 * n}], %r1;\n" for n, name in enumerate(NAMES)
    )
    grid, wanted = (shape[0] * many[0], shape[1] * many[1]), blocks(shape, many)
    out = with_mbarrier(text, grid, 1, np.zeros(len(wanted) * len(NAMES), U4), cluster=shape, order=order)
    assert not out.findings
    assert out.results["0"].reshape(-1, len(NAMES)).tolist() == [[b[name] for name in NAMES] for b in wanted]


@settings(deadline=None, max_examples=15, derandomize=True)
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


@settings(deadline=None, max_examples=15, derandomize=True)
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
