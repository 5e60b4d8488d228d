"""The PTX executor on what threads must do for each other and do not: every omission is a finding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lngen.errors import PtxError
from lngen.ptx import Outcome, parse, run_kernel
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

U4 = np.uint32


def run(source: str, grid: int, block: int, *arguments: Any, **options: Any) -> Outcome:
    """What the kernel ``k`` of a CUDA source does."""
    module = parse(compile_ptx(source, "sm_90", name="k.cu", lines=True))
    return run_kernel(module, "k", grid, block, arguments, source=source, **options)


def messages(outcome: Outcome) -> dict[str, str]:
    """The first message of every kind of finding."""
    return {f.kind: f.message for f in reversed(outcome.findings)}


def broken(source: str, old: str, new: str) -> str:
    """The source with one defect."""
    assert old in source, old
    return source.replace(old, new)


# ---- races in global memory, inside a block ----

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


# ---- barriers of a block ----

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


# ---- programmatic launches ----

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


# ---- mbarriers ----

BULK = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ __align__(16) unsigned s[128];
    __shared__ __align__(16) unsigned long long bar[64];
    unsigned t = threadIdx.x, b = (unsigned)__cvta_generic_to_shared(bar), done;
    unsigned to = (unsigned)__cvta_generic_to_shared(s);
    if (t == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads(); // ready
    if (t == 32) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(b) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];"
                     :: "r"(to), "l"(a), "r"(b) : "memory");
    }
    do { asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                      : "=r"(done) : "r"(b) : "memory"); } while (!done);
    o[t] = s[t];
    // later
}"""
FENCE = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'


def bulk(*edits: tuple[str, str]) -> dict[str, str]:
    """What is found in the bulk copy with some edits."""
    source = BULK
    for old, new in edits:
        source = broken(source, old, new)
    out = run(source, 1, 128, np.arange(128, dtype=U4), np.zeros(128, U4))
    assert out.findings or (out.results["1"] == np.arange(128)).all()
    return messages(out)


def test_a_bulk_copy_wants_its_mbarrier_fenced() -> None:
    assert bulk() == {}
    found = bulk((FENCE, ""))
    assert set(found) == {"proxy"}
    assert "initialised, and neither fence.mbarrier_init nor fence.proxy.async" in found["proxy"]
    proxy = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
    assert bulk((FENCE, proxy)) == {}  # of the thread that initialised it, or of one that comes after
    assert bulk((FENCE, ""), ("if (t == 32) {", "if (t == 32) {" + proxy)) == {}
    assert set(bulk((FENCE, ""), ("if (t == 32) {", "if (t == 32) {" + FENCE))) == {"proxy"}  # of its own thread only
    first = (FENCE, ""), ('asm volatile("mbarrier.init', FENCE + ' asm volatile("mbarrier.init')
    assert set(bulk(*first)) == {"proxy"}
    assert "shared-race" in bulk(("__syncthreads(); // ready", ""))


@pytest.mark.parametrize(
    ("access", "verb"),
    [
        ("bar[0] = 0;", "write"),
        ("((unsigned*)bar)[1] = 0;", "write"),
        ("o[0] = (unsigned)bar[0];", "read"),
        ("atomicAdd((unsigned*)bar, 1u);", "write"),
    ],
)
def test_a_live_mbarrier_is_opaque(access: str, verb: str) -> None:
    later = f"__syncthreads(); if (t == 0) {{ INVALID {access} }}"
    found = bulk(("// later", later.replace("INVALID", "")))
    assert set(found) == {"mbarrier"}
    assert f"A {verb} of bytes" in found["mbarrier"]
    assert "which holds an mbarrier that nothing has invalidated" in found["mbarrier"]
    ended = 'asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(b) : "memory");'
    assert "mbarrier" not in bulk(("// later", later.replace("INVALID", ended)))
    beside = later.replace("INVALID", "").replace("bar", "(bar + 1)")
    assert set(bulk(("// later", beside))) <= {"uninitialised"}


def test_a_copy_over_a_live_mbarrier() -> None:
    over = '"r"(to), "l"(a), "r"(b)', '"r"(b), "l"(a), "r"(b)'
    assert "A write of bytes" in bulk(over)["mbarrier"]


@pytest.mark.parametrize("use", ["arrive.shared::cta.b64 _, [%0]", "inval.shared::cta.b64 [%0]"])
def test_whoever_uses_an_mbarrier_comes_after_its_initialisation(use: str) -> None:
    source = f"""extern "C" __global__ void k() {{
        __shared__ unsigned long long bar;
        unsigned t = threadIdx.x, b = (unsigned)__cvta_generic_to_shared(&bar);
        if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 9;" :: "r"(b) : "memory");
        __syncthreads();
        if (t == 32) asm volatile("mbarrier.{use};" :: "r"(b) : "memory");
    }}"""
    assert run(source, 1, 64).findings == ()
    assert set(messages(run(broken(source, "__syncthreads();", ""), 1, 64))) == {"shared-race"}


def test_an_mbarrier_is_initialised_once() -> None:
    again = 'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");'
    ended = 'asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(b) : "memory");'
    later = f"__syncthreads(); if (t == 0) {{ {again} }}"
    assert "initialised over one" in bulk(("// later", later))["mbarrier"]
    assert bulk(("// later", later.replace(again, ended + again))) == {}
    assert "shared-race" in bulk(("// later", later.replace("__syncthreads();", "").replace(again, ended)))


def test_an_atomic_access_to_what_a_copy_writes() -> None:
    early = "if (t == 32) atomicAdd(s, 1u); do { asm"
    assert "which an asynchronous copy also writes" in bulk(("do { asm", early))["async-read"]


def test_an_mbarrier_is_invalidated_behind_its_copies() -> None:
    ended = 'if (t == 32) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(b) : "memory"); do { asm'
    assert "on which an asynchronous copy has yet to complete" in bulk(("do { asm", ended))["mbarrier"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("try_wait.parity.shared::cta", "try_wait.parity.release.cta.shared::cta"),
        ("try_wait.parity.shared::cta", "try_wait.parity.acquire.shared::cta"),
        ("try_wait.parity.shared::cta", "try_wait.parity.shared::cluster"),
        ("init.shared::cta", "init.shared::cluster"),
        ("init.shared::cta", "init.release.cta.shared::cta"),
        ("arrive.expect_tx.shared::cta", "arrive.expect_tx.acquire.cta.shared::cta"),
        ("fence.mbarrier_init.release.cluster", "fence.mbarrier_init.acquire.cluster"),
    ],
)
def test_forms_that_do_not_exist(old: str, new: str) -> None:
    text = broken(compile_ptx(BULK, "sm_90", name="k.cu"), old, new)
    with pytest.raises(PtxError, match=r"not one the executor knows"):
        run_kernel(parse(text), "k", 1, 128, [np.arange(128, dtype=U4), np.zeros(128, U4)])


def test_numbers_an_mbarrier_cannot_hold() -> None:
    assert "with 0 arrivals: 1 to 1048575" in bulk(("[%0], 1;", "[%0], 0;"))["mbarrier"]
    assert "with 1048576 arrivals" in bulk(("[%0], 1;", "[%0], 1048576;"))["mbarrier"]
    assert "expects 1048576 bytes: 1048575 at most" in bulk(("[%0], 512;", "[%0], 1048576;"))["mbarrier"]


# ---- clusters ----

CLUSTER = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned s[32];
    unsigned far, r, t = threadIdx.x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    BEFORE
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(far) : "r"((unsigned)__cvta_generic_to_shared(s + t)), "r"(r ^ 1));
    ACCESS
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    o[32 * blockIdx.x + t] = s[t];
}"""
STORE = 'asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(far), "r"(t) : "memory");'
MEET = 'asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");'


def test_a_block_of_a_cluster_is_reached_after_it_has_begun() -> None:
    def found(before: str, access: str = STORE) -> dict[str, str]:
        return messages(run(CLUSTER.replace("BEFORE", before).replace("ACCESS", access), 4, 32, np.zeros(128, U4)))

    early = found("")
    assert set(early) == {"early-remote"}
    assert "shared memory of block 1, which may not have started" in early["early-remote"]
    assert found(MEET) == {}
    assert found(broken(MEET, "arrive.aligned", "arrive.relaxed.aligned")) == {}  # orders nothing, and they are there
    assert set(found("__syncthreads();")) == {"early-remote"}
    assert "early-remote" in found("", 'asm volatile("red.shared::cluster.add.u32 [%0], 1;" :: "r"(far) : "memory");')


def test_a_wait_for_the_cluster_acquires() -> None:
    text = compile_ptx(CLUSTER.replace("BEFORE", MEET).replace("ACCESS", STORE), "sm_90", name="k.cu")
    for wrong in ("wait.relaxed", "wait.release"):
        with pytest.raises(PtxError, match=f"barrier.cluster.{wrong}"):
            run_kernel(parse(text.replace("cluster.wait", f"cluster.{wrong}")), "k", 2, 32, [np.zeros(64, U4)])
    with pytest.raises(PtxError, match=r"barrier\.cluster\.arrive\.acquire"):
        run_kernel(parse(text.replace("cluster.arrive", "cluster.arrive.acquire")), "k", 2, 32, [np.zeros(64, U4)])


REMOTE = """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* o) {
    __shared__ unsigned long long bar;
    __shared__ __align__(16) unsigned s[32];
    unsigned r, t = threadIdx.x, b = (unsigned)__cvta_generic_to_shared(&bar), far, there, done;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    if (t == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" :: "r"(b) : "memory"); // expected
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(b), "r"(r ^ 1));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(far) : "r"((unsigned)__cvta_generic_to_shared(s + t)), "r"(r ^ 1));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :: "r"(far), "r"(100 * blockIdx.x + t), "r"(there) : "memory");
    do { asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\\n"
                      "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(b) : "memory"); } while (!done);
    o[32 * blockIdx.x + t] = s[t];
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}"""


def remote(old: str = "", new: str = "") -> dict[str, str]:
    """What is found in the exchange with an edit."""
    out = run(broken(REMOTE, old, new) if old else REMOTE, 4, 32, np.zeros(128, U4))
    b, t = np.divmod(np.arange(128), 32)
    assert out.findings or (out.results["0"] == 100 * (b ^ 1) + t).all()
    return messages(out)


def test_other_blocks_want_an_mbarrier_fenced_or_released() -> None:
    """fence.mbarrier_init is enough for a relaxed cluster barrier behind it; one that releases needs no fence."""
    assert remote() == {}
    assert set(remote(FENCE, "")) == {"shared-race"}
    released = REMOTE.replace("arrive.relaxed.aligned", "arrive.release.aligned").replace(FENCE, "")
    assert run(released, 2, 32, np.zeros(64, U4)).findings == ()
    fenced = REMOTE.replace(FENCE, 'asm volatile("fence.acq_rel.cluster;" ::: "memory");')
    assert run(fenced, 2, 32, np.zeros(64, U4)).findings == ()
    block = REMOTE.replace(FENCE, 'asm volatile("fence.acq_rel.cta;" ::: "memory");')
    assert "shared-race" in messages(run(block, 2, 32, np.zeros(64, U4)))


def test_what_other_blocks_send_is_acquired_for_the_cluster() -> None:
    for order in ("acquire.cta", "relaxed.cluster"):
        assert set(remote("acquire.cluster", order)) == {"async-read", "early-exit"}
    fence = 'asm volatile("fence.acq_rel.cluster;" ::: "memory");\n    o[32'
    relaxed = broken(REMOTE, "acquire.cluster", "relaxed.cluster")
    assert run(broken(relaxed, "o[32", fence), 2, 32, np.zeros(64, U4)).findings == ()
    narrow = broken(broken(REMOTE, "acquire.cluster", "relaxed.cta"), "o[32", fence)
    assert "async-read" in messages(run(narrow, 2, 32, np.zeros(64, U4)))


# ---- scopes ----

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
