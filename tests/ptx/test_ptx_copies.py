"""cp.async, bulk copies or their groups and proxies move other bytes, or a defect is no finding, if these fail."""

import numpy as np
import pytest

from lngen.ptx import Outcome
from ptx_source import HELPERS, broken, clean, kinds, run, with_mbarrier

U4 = np.uint32

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


@pytest.mark.parametrize(("old", "new", "kind"), [
    ('asm volatile("cp.async.wait_group 1;" ::: "memory"); // first', "", "async-read"),
    ("wait_group 1", "wait_group 2", "async-read"),
    ("__syncthreads(); // first", "", "shared-race"),
    ('asm volatile("cp.async.wait_all;" ::: "memory"); // second', "", "async-read"),
    ("__syncthreads(); // first", "__syncthreads(); s[1][4 * t] = 1;", "async-read"),
    ("a + 4 * t) :", "a + 4 * t + 4) :", "out-of-bounds"),
    ("a + 4 * t) :", "a + 4 * t + 1) :", "misaligned"),
])  # fmt: skip
def test_async_copy_defects(old: str, new: str, kind: str) -> None:
    assert kind in kinds(async_(broken(ASYNC, old, new)))


WHOLE = "cp.async.ca.shared.global [%r3], [%rd3], 16;"  # a place for each thread
WORD = "cp.async.ca.shared.global [%r3], [%rd3+4], 4;"  # the first word of that place
PAIRED = "cp.async.ca.shared.global [%r4], [%rd3], 16;"  # a place for two threads
TOGETHER = """mov.u32 %r1, s;
setp.lt.u32 %p1, %r0, 8;
shl.b32 %r2, %r0, 4;
add.u32 %r3, %r1, %r2;
shr.u32 %r4, %r0, 1;
mad.lo.u32 %r4, %r4, 16, %r1;
mul.wide.u32 %rd2, %r0, 16;
add.u64 %rd3, %rd0, %rd2;
{}
cp.async.wait_all;
ld.shared.u32 %r5, [%r3];
mul.wide.u32 %rd2, %r0, 4;
add.u64 %rd4, %rd1, %rd2;
st.global.u32 [%rd4], %r5;"""


@pytest.mark.parametrize(("copies", "findings", "first", "last", "most"), [
    ([WHOLE, "cp.async.wait_all;", WORD], "", 1, 125, 512),
    ([WHOLE, WORD], "async-read 0", 1, 125, 640),
    ([WORD, WHOLE], "async-read 0", 0, 124, 640),
    ([WHOLE, "cp.async.commit_group;", "@%p1 cp.async.wait_group 0;", WORD], "async-read 8", 1, 125, 512),
    ([WHOLE, "cp.async.commit_group;", "@%p1 cp.async.wait_group 1;", WORD], "async-read 0", 1, 125, 640),
    ([f"@%p1 {PAIRED}", WHOLE], "async-read 1, shared-race 1, async-read 0, shared-race 0, shared-race 0", 4, 124, 640),
    (["@%p1 st.shared.u32 [%r4], %r0;", WHOLE], "shared-race 0, shared-race 0", 0, 124, 512),
], ids=str)  # fmt: skip
def test_copies_of_one_instruction_are_those_of_its_threads(
    copies: list[str], findings: str, first: int, last: int, most: int
) -> None:
    """Each finding names its first thread. Of copies to one place that of the last thread stays, and of it the last."""
    body = TOGETHER.format("\n".join(copies))
    out = with_mbarrier(body, 1, 32, np.arange(128, dtype=U4), np.zeros(32, U4))
    assert ", ".join(f"{f.kind} {f.thread}" for f in out.findings) == findings
    assert out.results["1"][[0, 31]].tolist() == [first, last]
    assert out.traffic.in_flight["k"] == most


BUFFERS = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
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


def buffers(source: str) -> Outcome:
    return run(source, 1, 32, np.arange(1024, dtype=U4), np.zeros(32, U4))


def test_two_buffers() -> None:
    want = [sum(128 * n + 127 - t - 32 * j for n in range(8) for j in range(4)) for t in range(32)]
    assert (clean(buffers(BUFFERS))["1"] == want).all()
    assert kinds(buffers(broken(BUFFERS, "__syncthreads(); // full", ""))) == {"shared-race"}
    assert kinds(buffers(broken(BUFFERS, "__syncthreads(); // empty", ""))) == {"shared-race"}
    assert kinds(buffers(broken(BUFFERS, "wait_group 1", "wait_group 2"))) == {"async-read"}


LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"

COPY = HELPERS + """
extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ unsigned long long bar;
    unsigned t = threadIdx.x;
    a += 128 * blockIdx.x; o += 128 * blockIdx.x;
    if (t == 0) { init(&bar, 1); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
    __syncthreads();
    if (t == 0) { expect(&bar, 512); load(s, a, 512, &bar); }
    wait(&bar, 0);
    s[128 + t] = s[127 - t] + 1;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // fence
    __syncthreads();
    if (t == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(o), "r"(at(s + 128)), "r"(512) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); // read
    }
    __syncthreads();
    s[128 + t] = 0;
}"""  # fmt: skip

FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // fence'


def copy(source: str, blocks: int = 3) -> Outcome:
    n = 128 * blocks
    return run(source, blocks, 128, np.arange(n, dtype=U4), np.zeros(n, U4), dynamic=1024)


HINT = '"{ .reg .b64 pol; createpolicy.fractional.L2::evict_%s.b64 pol, 1.0;\\n'


@pytest.mark.parametrize("edits", [
    (),
    ((LOAD, LOAD.replace("shared::cluster", "shared::cta")),),
    ((f'"{LOAD}"', HINT % "first" + LOAD.replace("bytes [", "bytes.L2::cache_hint [").replace(";", ', pol; }"')),),
    ((f'"{STORE}"', HINT % "last" + STORE.replace("group [", "group.L2::cache_hint [").replace(";", ', pol; }"')),),
    (("wait_group.read 0", "wait_group 0"),),
    (("fence.proxy.async.shared::cta", "fence.proxy.async"),),
    ((FENCE, ""), ('asm volatile("cp.async.bulk.global', 'asm volatile("fence.proxy.async;" ::: "memory");\n'
                   'asm volatile("cp.async.bulk.global')),
    (("acquire.cluster.", ""),),
])  # fmt: skip
def test_forms_of_bulk_copies(edits: tuple[tuple[str, str], ...]) -> None:
    source = COPY
    for old, new in edits:
        source = broken(source, old, new)
    n, t = np.divmod(np.arange(384), 128)
    assert (clean(copy(source))["1"] == 128 * n + 128 - t).all()


def test_a_copy_over_what_a_thread_stored() -> None:
    """It comes after the store if a fence lies between."""
    init = "if (t == 0) { init(&bar, 1);"
    stored = broken(COPY, init, f"s[t] = 0; {FENCE.split(' //')[0]}\n    {init}")
    clean(copy(stored))
    assert kinds(copy(broken(stored, FENCE.split(" //")[0] + "\n    if", "if"))) == {"proxy"}


@pytest.mark.parametrize(("old", "new", "kind"), [
    (FENCE, "", "proxy"),
    (FENCE, FENCE.replace(".shared::cta", ".global"), "proxy"),
    (FENCE, f"if (t < 64) {FENCE}", "proxy"),
    ('asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); // read', "", "async-read"),
    ("wait_group.read 0", "wait_group.read 1", "async-read"),
    ('"r"(at(s + 128)), "r"(512)', '"r"(at(s + 128)), "r"(520)', "misaligned"),
    ('"r"(at(s + 128)), "r"(512)', '"r"(at(s + 129)), "r"(512)', "misaligned"),
    ('"r"(at(s + 128)), "r"(512)', '"r"(at(s + 132)), "r"(512)', "out-of-bounds"),
    ("load(s, a, 512, &bar)", "load(s, a + 1, 512, &bar)", "misaligned"),
    ("expect(&bar, 512)", "expect(&bar, 1024)", "deadlock"),
    ("init(&bar, 1)", "init(&bar, 2)", "deadlock"),
    ("wait(&bar, 0);", "wait(&bar, 1);", "async-read"),
    ("load(s, a, 512, &bar)", "load(s, a + 64 * blockIdx.x, 512, &bar)", "out-of-bounds"),
    ("o += 128 * blockIdx.x", "o += 64 * blockIdx.x", "global-race"),
    ("wait(&bar, 0);", "", "async-read"),
    (FENCE + "\n    __syncthreads();", FENCE, "shared-race"),
])  # fmt: skip
def test_bulk_copy_defects(old: str, new: str, kind: str) -> None:
    assert kind in kinds(copy(broken(COPY, old, new)))


def test_blocks_of_other_batches_race_too() -> None:
    """So many blocks that they do not run side by side."""
    clean(copy(COPY, 300))
    last = broken(COPY, "o += 128 * blockIdx.x", "o += 128 * (blockIdx.x % 299)")
    assert "global-race" in kinds(copy(last, 300))


PIPELINE = HELPERS + """
constexpr int STAGES = 3, N = 256;
extern __shared__ __align__(128) unsigned s[];
extern "C" __global__ void k(const unsigned* a, unsigned* o, int rows) {
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    int t = threadIdx.x;
    if (t == 0) for (int n = 0; n < STAGES; ++n) { init(full + n, 1); init(empty + n, blockDim.x - 32); }
    __syncthreads();
    if (t >= blockDim.x - 32) { // the last warp loads
        if (t % 32) return;
        int n = 0;
        for (int row = blockIdx.x; row < rows; row += gridDim.x, ++n) {
            int stage = n % STAGES;
            if (n >= STAGES) wait(empty + stage, (n / STAGES - 1) & 1); // free
            expect(full + stage, 4 * N);
            load(s + stage * N, a + row * N, 4 * N, full + stage);
        }
        return;
    }
    int n = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, ++n) {
        int stage = n % STAGES;
        wait(full + stage, n / STAGES & 1); // filled
        for (int i = t; i < N; i += blockDim.x - 32) o[row * N + i] = s[stage * N + N - 1 - i] + 1;
        arrive(empty + stage);
    }
}"""  # fmt: skip


def pipeline(source: str, rows: int = 20, grid: int = 3, block: int = 96) -> Outcome:
    a = np.arange(rows * 256, dtype=U4)
    return run(source, grid, block, a, np.zeros(rows * 256, U4), rows, dynamic=3 * 1024)


@pytest.mark.parametrize(("rows", "grid", "block"), [(20, 3, 96), (8, 132, 288), (8, 132, 1024), (1, 1, 64)])
def test_a_pipeline_of_a_persistent_grid(rows: int, grid: int, block: int) -> None:
    out = clean(pipeline(PIPELINE, rows, grid, block))["1"].reshape(rows, 256)
    assert (out == np.arange(rows * 256).reshape(rows, 256)[:, ::-1] + 1).all()


@pytest.mark.parametrize(("old", "new", "kinds_"), [
    ("wait(full + stage, n / STAGES & 1); // filled", "", {"async-read", "uninitialised"}),
    ("if (n >= STAGES) wait(empty + stage, (n / STAGES - 1) & 1); // free", "", {"async-read", "shared-race"}),
    ("(n / STAGES - 1) & 1", "(n / STAGES) & 1", {"deadlock", "shared-race", "async-read"}),
    ("blockDim.x - 32); }", "blockDim.x - 33); }", {"divergent-barrier", "shared-race", "async-read"}),
    ("blockDim.x - 32); }", "blockDim.x - 31); }", {"deadlock"}),
    ("expect(full + stage, 4 * N)", "expect(full + stage, 4 * N - 16)", {"deadlock", "async-read"}),
])  # fmt: skip
def test_pipeline_defects(old: str, new: str, kinds_: set[str]) -> None:
    assert kinds(pipeline(broken(PIPELINE, old, new))) & kinds_


def test_a_bulk_load_of_what_the_launch_wrote() -> None:
    source = HELPERS + """
extern "C" __global__ void k(unsigned* w, unsigned* o) {
    __shared__ __align__(16) unsigned s[32];
    __shared__ unsigned long long bar;
    w[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) init(&bar, 1);
    asm volatile("fence.proxy.async.global;" ::: "memory"); // fence
    __syncthreads();
    if (threadIdx.x == 0) { expect(&bar, 128); load(s, w, 128, &bar); }
    wait(&bar, 0);
    o[threadIdx.x] = s[31 - threadIdx.x];
}"""  # fmt: skip
    out = clean(run(source, 1, 32, np.zeros(32, U4), np.zeros(32, U4)))["1"]
    assert (out == 31 - np.arange(32)).all()
    wrong = broken(source, "fence.proxy.async.global", "fence.proxy.async.shared::cta")
    assert kinds(run(wrong, 1, 32, np.zeros(32, U4), np.zeros(32, U4))) == {"proxy"}


def test_bulk_prefetch() -> None:
    source = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(a), "r"(128) : "memory");
        o[threadIdx.x] = a[threadIdx.x];
    }"""
    outcome = run(source, 1, 32, np.zeros(32, U4), np.zeros(32, U4))
    clean(outcome)
    assert outcome.traffic.tensors["k"]["k_param_0"]["prefetches"] == 1
    assert kinds(run(broken(source, "(128)", "(144)"), 1, 32, np.zeros(32, U4), np.zeros(32, U4))) == {"out-of-bounds"}
