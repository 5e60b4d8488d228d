"""The PTX executor on threads that wait for more than barriers: atomics, fences, grid barriers, copies, clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lngen.ptx import Outcome, parse, run_kernel
from lngen.toolchain import compile_ptx
from ptx_source import broken, clean, kinds, run

pytest.importorskip("cupy")


U4 = np.uint32


@pytest.mark.parametrize(
    ("call", "dtype", "start", "want"),
    [
        ("atomicAdd(p, v)", "unsigned", 5, 5 + sum(range(64))),
        ("atomicAdd(p, v)", "int", -7, -7 + sum(range(64))),
        ("atomicAdd(p, v)", "unsigned long long", 1 << 33, (1 << 33) + sum(range(64))),
        ("atomicAdd(p, v)", "float", 0.5, 0.5 + sum(range(64))),
        ("atomicAdd(p, v)", "double", 0.25, 0.25 + sum(range(64))),
        ("atomicMin(p, v)", "int", 40, 0),
        ("atomicMax(p, v)", "unsigned", 40, 63),
        ("atomicInc(p, 9)", "unsigned", 0, 64 % 10),
        ("atomicOr(p, v)", "unsigned", 64, 127),
        ("atomicAnd(p, v)", "unsigned", 3, 0),
        ("atomicExch(p, 3)", "unsigned", 1, 3),
        ("atomicCAS(p, 3, 8)", "unsigned", 3, 8),
    ],
)
@pytest.mark.parametrize("returning", [True, False])
def test_atomics(call: str, dtype: str, start: Any, want: Any, returning: bool) -> None:
    keep = f"o[blockIdx.x * 32 + threadIdx.x] = {call};" if returning else f"{call};"
    source = f"""extern "C" __global__ void k({dtype}* p, {dtype}* o) {{
        {dtype} v = blockIdx.x * 32 + threadIdx.x; {keep} }}"""
    kind = {"unsigned": U4, "int": np.int32, "float": np.float32, "double": np.float64}.get(dtype, np.uint64)
    results = clean(run(source, 2, 32, np.array([start], kind), np.zeros(64, kind)))
    assert results["0"][0] == kind(want)
    if returning and "atomicAdd" in call:
        assert results["1"][0] == kind(start)
        assert results["1"][5] == kind(start + 10)


SHARED = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s;
    if (threadIdx.x == 0) s = 0;
    __syncthreads();
    atomicAdd(&s, threadIdx.x);
    __syncthreads();
    o[threadIdx.x] = s;
}"""


def test_shared_atomics() -> None:
    assert (clean(run(SHARED, 1, 64, np.zeros(64, U4)))["0"] == sum(range(64))).all()
    late = broken(SHARED, "threadIdx.x);\n    __syncthreads();", "threadIdx.x);")
    assert kinds(run(late, 1, 64, np.zeros(64, U4))) == {"shared-race"}
    early = broken(SHARED, "s = 0;\n    __syncthreads();", ";")
    assert kinds(run(early, 1, 64, np.zeros(64, U4))) == {"uninitialised"}


GENERIC = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ unsigned s[64];
    s[threadIdx.x] = 100 + threadIdx.x;
    __syncthreads();
    unsigned long long p = (unsigned long long)(threadIdx.x & 1 ? (const void*)(s + (threadIdx.x ^ 2))
                                                               : (const void*)(a + threadIdx.x));
    unsigned v;
    asm volatile("ld.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    asm volatile("st.u32 [%0], %1;" :: "l"(o + threadIdx.x), "r"(v) : "memory");
}"""


def test_generic_addresses() -> None:
    a = np.arange(64, dtype=U4)
    out = clean(run(GENERIC, 1, 64, a, np.zeros(64, U4)))["1"]
    t = np.arange(64)
    assert (out == np.where(t & 1, 100 + (t ^ 2), t)).all()
    wrong = broken(GENERIC, "s + (threadIdx.x ^ 2)", "s + threadIdx.x + 32")
    assert "out-of-bounds" in kinds(run(wrong, 1, 64, a, np.zeros(64, U4)))


VOTES = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[32];
    unsigned t = threadIdx.x;
    s[t] = __ballot_sync(~0u, t % 3 == 0);
    __syncwarp();
    unsigned m = 0;
    if (t < 8) m = __activemask();
    o[t] = s[31 - t] + (__all_sync(~0u, t < 32) ? 1 : 0) + (__any_sync(~0u, t > 31) ? 2 : 0);
    o[32 + t] = m;
    __nanosleep(10);
}"""


def test_votes_and_warp_barrier() -> None:
    out = clean(run(VOTES, 1, 32, np.zeros(64, U4)))["0"]
    ballot = sum(1 << n for n in range(0, 32, 3))
    assert (out[:32] == ballot + 1).all()
    assert (out[32:40] == 255).all()
    assert kinds(run(broken(VOTES, "__syncwarp();", ""), 1, 32, np.zeros(64, U4))) == {"shared-race"}


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


def grid(source: str) -> Outcome:
    return run(source, 4, 64, np.zeros(1, U4), np.zeros(256, U4), np.zeros(256, U4))


def test_grid_barrier() -> None:
    b, t = np.divmod(np.arange(256), 64)
    module = parse(compile_ptx(GRID, "sm_90", name="k.cu", lines=True))
    for order in range(4):
        arguments = [np.zeros(1, U4), np.zeros(256, U4), np.zeros(256, U4)]
        out = clean(run_kernel(module, "k", 4, 64, arguments, order=order))["2"]
        assert (out == (b + 1) % 4 + (t + 5) % 64).all()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("__threadfence(); // before", "", "global-race"),
        ("__threadfence(); // before", "__threadfence_block();", "global-race"),
        ("__threadfence(); // after", "", "global-race"),
        ("__syncthreads();\n    if", "if", "global-race"),
        ("__syncthreads(); // all", "", "global-race"),
        ("while (*(volatile unsigned*)counter < 4u);", "", "global-race"),
        ("< 4u", "< 3u", "global-race"),
        ("< 4u", "< 5u", "deadlock"),
        ("*(volatile unsigned*)counter", "atomicAdd(counter, 0u)", ""),
    ],
)
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


ASYNC = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ __align__(16) unsigned s[2][128];
    unsigned t = threadIdx.x, to = (unsigned)__cvta_generic_to_shared(&s[0][4 * t]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(a + 4 * t) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(to + 512), "l"(a + 4 * t), "r"(t % 2 * 4 + 4));
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory"); // first
    __syncthreads(); // first
    o[t] = s[0][127 - t];
    asm volatile("cp.async.wait_all;" ::: "memory"); // second
    o[32 + t] = s[1][4 * t] + s[1][4 * t + 1];
}"""


def async_(source: str) -> Outcome:
    return run(source, 1, 32, np.arange(1, 129, dtype=U4), np.zeros(64, U4))


def test_async_copies() -> None:
    out, t = clean(async_(ASYNC))["1"], np.arange(32)
    assert (out[:32] == 128 - t).all()
    assert (out[32:] == 4 * t + 1 + np.where(t % 2, 4 * t + 2, 0)).all()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ('asm volatile("cp.async.wait_group 1;" ::: "memory"); // first', "", "async-read"),
        ("wait_group 1", "wait_group 2", "async-read"),
        ("__syncthreads(); // first", "", "shared-race"),
        ('asm volatile("cp.async.wait_all;" ::: "memory"); // second', "", "async-read"),
        ("__syncthreads(); // first", "__syncthreads(); s[1][4 * t] = 1;", "async-read"),
        ("a + 4 * t) :", "a + 4 * t + 4) :", "out-of-bounds"),
        ("a + 4 * t) :", "a + 4 * t + 1) :", "misaligned"),
    ],
)
def test_async_copy_defects(old: str, new: str, kind: str) -> None:
    assert kind in kinds(async_(broken(ASYNC, old, new)))


BULK = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ __align__(16) unsigned s[256];
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x, b = (unsigned)__cvta_generic_to_shared(&bar);
    unsigned to = (unsigned)__cvta_generic_to_shared(s);
    if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\\nfence.mbarrier_init.release.cluster;"
                             :: "r"(b), "r"(1) : "memory");
    __syncthreads(); // init
    for (int n = 0; n < 2; ++n) {
        if (t == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(512) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         :: "r"(to), "l"(a + 128 * n), "r"(512), "r"(b) : "memory");
        }
        unsigned done;
        do { asm volatile("{ .reg .pred p;\\n"
                          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                          : "=r"(done) : "r"(b), "r"(n) : "memory"); } while (!done);
        s[128 + t] = s[127 - t] + 1;
        __syncthreads(); // filled
        if (t == 0) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                         :: "l"(o + 128 * n), "r"(to + 512), "r"(512) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        __syncthreads(); // stored
    }
}"""


def bulk(source: str) -> Outcome:
    return run(source, 1, 128, np.arange(256, dtype=U4), np.zeros(256, U4))


def test_bulk_copies() -> None:
    n, t = np.divmod(np.arange(256), 128)
    assert (clean(bulk(BULK))["1"] == 128 * n + 128 - t).all()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("while (!done)", "while (0)", "async-read"),
        ('"r"(b), "r"(n)', '"r"(b), "r"(n ^ 1)', "async-read"),
        ('_, [%0], %1;" :: "r"(b), "r"(512)', '_, [%0], %1;" :: "r"(b), "r"(528)', "deadlock"),
        ('"r"(b), "r"(1)', '"r"(b), "r"(2)', "deadlock"),
        ("__syncthreads(); // init", "", "uninitialised"),
        ("__syncthreads(); // filled", "", "shared-race"),
        ("__syncthreads(); // stored", "", "none"),
        ('asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");', "", "async-read"),
        ('"l"(a + 128 * n), "r"(512)', '"l"(a + 128 * n), "r"(508)', "misaligned"),
        ("a + 128 * n", "a + 128 * n + 64", "out-of-bounds"),
    ],
)
def test_bulk_copy_defects(old: str, new: str, kind: str) -> None:
    source = broken(BULK, old, new)
    if "init" in old:
        source = source.replace("if (t == 0) asm", "if (t == 127) asm")
        kind = ""
    found = kinds(bulk(source))
    assert kind in found or (not kind and found) or (kind == "none" and not found)


CLUSTER = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned s[32];
    unsigned t = threadIdx.x, rank, size, far, v;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    s[t] = 100 * blockIdx.x + t;
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); // written
    unsigned near = (unsigned)__cvta_generic_to_shared(&s[31 - t]);
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(near), "r"(rank ^ 1));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(far) : "memory");
    o[32 * blockIdx.x + t] = v + size;
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); // read
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(far), "r"(v + 1) : "memory");
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); // back
    o[128 + 32 * blockIdx.x + t] = s[t];
}"""
WAIT = 'asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); // '


def cluster(source: str) -> Outcome:
    return run(source, 4, 32, np.zeros(256, U4))


def test_clusters() -> None:
    out, (b, t) = clean(cluster(CLUSTER))["0"], np.divmod(np.arange(128), 32)
    assert (out[:128] == 100 * (b ^ 1) + 31 - t + 2).all()
    assert (out[128:] == 100 * b + t + 1).all()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("arrive.release.aligned", "arrive.relaxed.aligned", "shared-race"),
        (WAIT + "back", "", "shared-race"),
        (WAIT + "read", "", "divergent-barrier"),
        ("rank ^ 1", "rank + 2", "out-of-bounds"),
        ("31 - t]", "32 - t]", "out-of-bounds"),
        ('asm volatile("barrier.cluster.arrive.release', 'if (rank) asm volatile("barrier.cluster.arrive.release', ""),
    ],
)
def test_cluster_defects(old: str, new: str, kind: str) -> None:
    found = kinds(cluster(broken(CLUSTER, old, new)))
    assert kind in found or (not kind and found)


REMOTE = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned s[32];
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x, b = (unsigned)__cvta_generic_to_shared(&bar), far, farbar, rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (t == 0) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(32) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(far) : "r"((unsigned)__cvta_generic_to_shared(&s[t])), "r"(rank ^ 1));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(farbar) : "r"(b), "r"(rank ^ 1));
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(far), "r"(t + rank) : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(farbar) : "memory");
    unsigned done;
    do { asm volatile("{ .reg .pred p;\\n"
       "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                          : "=r"(done) : "r"(b), "r"(0) : "memory"); } while (!done);
    o[32 * blockIdx.x + t] = s[31 - t];
}"""


def test_arrivals_from_the_other_block() -> None:
    out, (b, t) = clean(run(REMOTE, 2, 32, np.zeros(64, U4)))["0"], np.divmod(np.arange(64), 32)
    assert (out == 31 - t + 1 - b).all()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("while (!done)", "while (0)", "shared-race"),
        ('"r"(32)', '"r"(33)', "deadlock"),
        ('"r"(32)', '"r"(31)', "shared-race"),
    ],
)
def test_remote_arrival_defects(old: str, new: str, kind: str) -> None:
    found = kinds(run(broken(REMOTE, old, new), 2, 32, np.zeros(64, U4)))
    assert found & {kind, "uninitialised"}


PIPELINE = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ __align__(16) unsigned s[2][128];
    unsigned t = threadIdx.x, to = (unsigned)__cvta_generic_to_shared(&s[0][4 * t]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(a + 4 * t) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    unsigned x = 0;
    for (int n = 0; n < 8; ++n) {
      if (n < 7) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :: "r"(to + (n + 1) % 2 * 512), "l"(a + 128 * (n + 1) + 4 * t) : "memory");
      asm volatile("cp.async.commit_group;" ::: "memory");
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads(); // full
      for (int j = 0; j < 4; ++j) x += s[n % 2][127 - t - 32 * j];
      __syncthreads(); // empty
    }
    o[t] = x;
}"""


def pipeline(source: str) -> Outcome:
    return run(source, 1, 32, np.arange(1024, dtype=U4), np.zeros(32, U4))


def test_two_buffers() -> None:
    want = [sum(128 * n + 127 - t - 32 * j for n in range(8) for j in range(4)) for t in range(32)]
    assert (clean(pipeline(PIPELINE))["1"] == want).all()
    assert kinds(pipeline(broken(PIPELINE, "__syncthreads(); // full", ""))) == {"shared-race"}
    assert kinds(pipeline(broken(PIPELINE, "__syncthreads(); // empty", ""))) == {"shared-race"}
    assert kinds(pipeline(broken(PIPELINE, "wait_group 1", "wait_group 2"))) == {"async-read"}


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
