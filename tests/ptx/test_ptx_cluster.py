"""Blocks of a cluster exchange other values, or reach blocks that are gone without a finding, if these fail."""

from functools import partial

import numpy as np
import pytest

from lngen.ptx import Outcome
from ptx_source import HELPERS, broken, clean, kinds, messages, run

U4 = np.uint32

run_cluster = partial(run, dynamic=2048)

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


@pytest.mark.parametrize("grid", [8, 400])
@pytest.mark.parametrize("order", [0, 5])
def test_vectors_of_other_blocks(grid: int, order: int) -> None:
    out = clean(run_cluster(VECTORS, grid, 32, np.zeros(grid * 128, U4), order=order))["0"]
    b, t = np.divmod(np.arange(grid * 32), 32)
    neighbour, v = b // 4 * 4 + (b + 1) % 4, out.reshape(-1, 4)
    assert (v[:, 0] == 1000 * neighbour + 4 * (31 - t) + 3).all()
    assert (v[:, 1:] == 1000 * b[:, None] + 4 * t[:, None] + [1, 3, 2]).all()


def test_vector_defects() -> None:
    def found(old: str, new: str) -> set[str]:
        return kinds(run_cluster(broken(VECTORS, old, new), 8, 32, np.zeros(8 * 128, U4)))

    assert "shared-race" in found("    cluster_sync();\n    unsigned far", "    unsigned far")
    assert "shared-race" in found("cluster_sync(); // written", "cluster_arrive(); __syncthreads();")
    assert "out-of-bounds" in found("(rank() + 1) % 4", "rank() + 1")
    assert "misaligned" in found("map(s + 4 * (31 - t)", "map(s + 2 + 4 * (30 - t)")
    relaxed = 'asm volatile("barrier.cluster.arrive.relaxed.aligned;"); cluster_wait();\n    unsigned far'
    assert "shared-race" in found("cluster_sync();\n    unsigned far", relaxed)
    assert "divergent-barrier" in found("cluster_sync(); // read", "cluster_arrive(); cluster_sync();")
    assert "divergent-barrier" in found("cluster_sync(); // read", "if (rank()) cluster_arrive(); cluster_wait();")


READ = HELPERS + """
extern "C" __global__ void k(unsigned* o) {
    unsigned v;
    s[threadIdx.x] = blockIdx.x + threadIdx.x;
    cluster_sync();
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(map(s + 31 - threadIdx.x, rank() ^ 1)) : "memory");
    o[blockIdx.x * 32 + threadIdx.x] = v;
    cluster_sync(); // stay
}"""  # fmt: skip


def test_a_cluster_that_the_launch_sets() -> None:
    b, t = np.divmod(np.arange(128), 32)
    assert (clean(run_cluster(READ, 4, 32, np.zeros(128, U4), cluster=(2,)))["0"] == (b ^ 1) + 31 - t).all()


@pytest.mark.parametrize("order", range(3))
def test_a_block_that_ends_before_it_is_read(order: int) -> None:
    found = run_cluster(
        broken(READ, "cluster_sync(); // stay", ""), 4, 32, np.zeros(128, U4), cluster=(2,), order=order
    )
    assert kinds(found) == {"early-exit"}
    assert "may end before this access" in found.findings[0].message
    split = broken(READ, "cluster_sync(); // stay", "cluster_arrive(); cluster_wait();")
    clean(run_cluster(split, 4, 32, np.zeros(128, U4), cluster=(2,), order=order))
    relaxed = broken(
        READ, "cluster_sync(); // stay", 'asm volatile("barrier.cluster.arrive.relaxed;"); cluster_wait();'
    )
    assert kinds(run_cluster(relaxed, 4, 32, np.zeros(128, U4), cluster=(2,), order=order)) == {"early-exit"}


STATISTICS = HELPERS + """
extern "C" __global__ void __cluster_dims__(4, 1, 1) k(float* o) {
    __shared__ __align__(16) float2 part[2][4];
    __shared__ unsigned long long bar[2];
    unsigned t = threadIdx.x;
    if (t == 0) { init(bar, 1); init(bar + 1, 1); }
    cluster_sync();
    for (int n = 0; n < 4; ++n) {
        int turn = n & 1;
        if (t == 0) expect(bar + turn, 32);
        if (t < 4) {
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                :: "r"(map(&part[turn][rank()], t)), "f"(float(rank() + n)), "f"(1.0f), "r"(map(bar + turn, t))
                : "memory");
        }
        wait(bar + turn, n / 2 & 1); // come
        float a = 0, b = 0;
        for (int r = 0; r < 4; ++r) { a += part[turn][r].x; b += part[turn][r].y; }
        __syncthreads();
        o[(blockIdx.x * 4 + n) * 32 + t] = a + b;
    }
    cluster_sync(); // stay
}"""  # fmt: skip


def statistics(source: str, order: int = 0) -> Outcome:
    return run_cluster(source, 8, 32, np.zeros(8 * 4 * 32, np.float32), order=order)


@pytest.mark.parametrize("order", range(3))
def test_asynchronous_stores(order: int) -> None:
    out = clean(statistics(STATISTICS, order))["0"].reshape(8, 4, 32)
    assert (out == (6 + 4 * np.arange(4) + 4)[:, None]).all()


@pytest.mark.parametrize(("old", "new", "found"), [
    ("wait(bar + turn, n / 2 & 1); // come", "", {"async-read", "uninitialised", "deadlock"}),
    ("expect(bar + turn, 32)", "expect(bar + turn, 24)", {"deadlock", "async-read"}),
    ("expect(bar + turn, 32)", "expect(bar + turn, 40)", {"deadlock"}),
    ('"r"(map(bar + turn, t))', '"r"(map(bar + turn, 0))', {"out-of-bounds"}),
    ("&part[turn][rank()], t", "&part[turn][rank()].y, t", {"misaligned"}),
    ("int turn = n & 1;", "int turn = 0;", {"deadlock", "async-read", "shared-race"}),
])  # fmt: skip
def test_asynchronous_store_defects(old: str, new: str, found: set[str]) -> None:
    assert kinds(statistics(broken(STATISTICS, old, new))) & found


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


def test_arrivals_at_both_barriers() -> None:
    b, t = np.divmod(np.arange(64), 32)
    assert (clean(run_cluster(ARRIVE, 2, 32, np.zeros(64, U4)))["0"] == 31 - t + (b ^ 1) + 7).all()
    never = broken(ARRIVE, "wait(&bar, 0); // come", "")
    assert kinds(run_cluster(never, 2, 32, np.zeros(64, U4))) & {"shared-race", "uninitialised"}
    relaxed = broken(ARRIVE, "arrive.release.cluster", "arrive.relaxed.cluster")
    assert "shared-race" in kinds(run_cluster(relaxed, 2, 32, np.zeros(64, U4)))
    assert kinds(run_cluster(broken(ARRIVE, "    cluster_sync(); // stay\n", ""), 2, 32, np.zeros(64, U4))) == set()
    for count, found in ((65, "deadlock"), (63, "shared-race")):
        assert found in kinds(
            run_cluster(broken(ARRIVE, "init(&bar, 64)", f"init(&bar, {count})"), 2, 32, np.zeros(64, U4))
        )


def test_a_relaxed_wait_shows_nothing_before_a_fence() -> None:
    relaxed = broken(ARRIVE, "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster")
    assert "shared-race" in kinds(run_cluster(relaxed, 2, 32, np.zeros(64, U4)))
    waits = "wait(&bar, 0); // come"
    restricted = 'asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");'
    for fence in (restricted, 'asm volatile("fence.acq_rel.cluster;" ::: "memory");'):
        clean(run_cluster(broken(relaxed, waits, f"{waits}\n    {fence}"), 2, 32, np.zeros(64, U4)))
        assert "shared-race" in kinds(run_cluster(broken(relaxed, waits, f"{fence} {waits}"), 2, 32, np.zeros(64, U4)))


def test_a_restricted_fence_is_none_for_global_memory() -> None:
    """What the other block wrote there before it arrived; a fence for all memory shows it, a later one, too."""
    relaxed = broken(ARRIVE, "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster")
    relaxed = broken(relaxed, "    for (unsigned r", "    o[64 + blockIdx.x * 32 + t] = t;\n    for (unsigned r")
    relaxed = broken(relaxed, "s[2 * t + 1];\n", "s[2 * t + 1] + o[64 + (1 - blockIdx.x) * 32 + 31 - t];\n")
    waits = "wait(&bar, 0); // come"
    restricted = 'asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");'
    whole = 'asm volatile("fence.acq_rel.cluster;" ::: "memory");'
    for fences, found in ((restricted, {"global-race"}), (whole, set()), (f"{restricted} {whole}", set())):
        outcome = run_cluster(broken(relaxed, waits, f"{waits}\n    {fences}"), 2, 32, np.zeros(128, U4))
        assert kinds(outcome) == found


def test_an_arrival_at_a_block_that_may_have_ended() -> None:
    """Nobody waits for it: the other block may be gone."""
    wrong = broken(broken(ARRIVE, "wait(&bar, 0); // come", "cluster_sync();"), "    cluster_sync(); // stay\n", "")
    clean(run_cluster(wrong, 2, 32, np.zeros(64, U4)))
    arrive = (
        'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(map(&bar, rank() ^ 1)));'
    )
    last = broken(wrong, "+ s[2 * t + 1];", f"+ s[2 * t + 1];\n    {arrive}")
    assert kinds(run_cluster(last, 2, 32, np.zeros(64, U4))) == {"early-exit"}


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


def test_copies_from_block_to_block() -> None:
    b, t = np.divmod(np.arange(64), 32)
    assert (clean(run_cluster(ACROSS, 2, 32, np.zeros(64, U4)))["0"] == 100 * (b ^ 1) + 31 - t).all()
    fence = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // fence'
    assert kinds(run_cluster(broken(ACROSS, fence, ""), 2, 32, np.zeros(64, U4))) == {"proxy"}


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


def test_a_block_of_a_cluster_is_reached_after_it_has_begun() -> None:
    def found(before: str, access: str = STORE) -> dict[str, str]:
        return messages(
            run_cluster(CLUSTER.replace("BEFORE", before).replace("ACCESS", access), 4, 32, np.zeros(128, U4))
        )

    early = found("")
    assert set(early) == {"early-remote"}
    assert "shared memory of block 1, which may not have started" in early["early-remote"]
    assert found("cluster_sync();") == {}
    assert found('asm volatile("barrier.cluster.arrive.relaxed.aligned;"); cluster_wait();') == {}
    assert set(found("__syncthreads();")) == {"early-remote"}
    assert "early-remote" in found("", 'asm volatile("red.shared::cluster.add.u32 [%0], 1;" :: "r"(far) : "memory");')


FENCE = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'

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


def remote(old: str = "", new: str = "") -> dict[str, str]:
    """What is found in the exchange with an edit."""
    out = run_cluster(broken(REMOTE, old, new) if old else REMOTE, 4, 32, np.zeros(128, U4))
    b, t = np.divmod(np.arange(128), 32)
    assert out.findings or (out.results["0"] == 100 * (b ^ 1) + t).all()
    return messages(out)


def test_other_blocks_want_an_mbarrier_fenced_or_released() -> None:
    """fence.mbarrier_init is enough for a relaxed cluster barrier behind it; one that releases needs no fence."""
    assert remote() == {}
    assert set(remote(FENCE, "")) == {"shared-race"}
    released = REMOTE.replace("arrive.relaxed.aligned", "arrive.release.aligned").replace(FENCE, "")
    assert run_cluster(released, 2, 32, np.zeros(64, U4)).findings == ()
    fenced = REMOTE.replace(FENCE, 'asm volatile("fence.acq_rel.cluster;" ::: "memory");')
    assert run_cluster(fenced, 2, 32, np.zeros(64, U4)).findings == ()
    block = REMOTE.replace(FENCE, 'asm volatile("fence.acq_rel.cta;" ::: "memory");')
    assert "shared-race" in messages(run_cluster(block, 2, 32, np.zeros(64, U4)))


def test_what_other_blocks_send_is_acquired_for_the_cluster() -> None:
    for order in ("acquire.cta", "relaxed.cluster"):
        assert set(remote("try_wait.parity.acquire.cluster", f"try_wait.parity.{order}")) == {
            "async-read",
            "early-exit",
        }
    fence = 'asm volatile("fence.acq_rel.cluster;" ::: "memory");\n    o[32'
    relaxed = broken(REMOTE, "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster")
    assert run_cluster(broken(relaxed, "o[32", fence), 2, 32, np.zeros(64, U4)).findings == ()
    narrow = broken(broken(REMOTE, "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cta"), "o[32", fence)
    assert "async-read" in messages(run_cluster(narrow, 2, 32, np.zeros(64, U4)))


ARRIVALS = HELPERS + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x;
    if (t == 0) init(&bar, 32);
    cluster_sync();
    unsigned to = rank() ^ 1;
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(map(s + t, to)), "r"(100 * blockIdx.x + t) : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(map(&bar, to)) : "memory");
    wait(&bar, 0);
    o[32 * blockIdx.x + t] = s[31 - t];
    cluster_sync();
}"""  # fmt: skip


@pytest.mark.parametrize(("release", "acquire"), [("cluster", "cluster"), ("cta", "cluster"), ("cluster", "cta")])
def test_what_threads_of_another_block_release(release: str, acquire: str) -> None:
    """They and the threads that wait for them both name the cluster, or nothing is handed over."""
    source = broken(ARRIVALS, "arrive.release.cluster", f"arrive.release.{release}")
    source = broken(source, "parity.acquire.cluster", f"parity.acquire.{acquire}")
    out = run_cluster(source, 2, 32, np.zeros(64, U4))
    if release == acquire:
        assert (clean(out)["0"] == np.r_[131:99:-1, 31:-1:-1]).all()
    assert ("shared-race" in messages(out)) == (release != acquire)
