"""cp.async, bulk copies, their groups and proxies move other bytes, or a defect is no finding, if these fail."""

import numpy as np
import pytest

from ptx_source import HELPERS, Sample, edits, judge, kinds, with_mbarrier

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

WRITTEN = HELPERS + """
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
PREFETCH = """extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(a), "r"(128) : "memory");
    o[threadIdx.x] = a[threadIdx.x];
}"""
# One mbarrier, and its life.
BULK = HELPERS + """
extern "C" __global__ void k(const unsigned* a, unsigned* o) {
    __shared__ __align__(16) unsigned s[128];
    __shared__ __align__(16) unsigned long long bar[64];
    unsigned t = threadIdx.x;
    if (t == 0) init(bar, 1);
    __syncthreads(); // ready
    if (t == 32) { expect(bar, 512); load(s, a, 512, bar); }
    // loading
    wait(bar, 0);
    o[t] = s[t];
    // later
}"""  # fmt: skip


def pipeline(rows: int, grid: int, block: int) -> Sample:
    a = np.arange(rows * 256, dtype=U4)
    want = (a.reshape(rows, 256)[:, ::-1] + 1).ravel()
    return Sample(PIPELINE, grid, block, (a, np.zeros(rows * 256, U4), rows), want, {"dynamic": 3072})


def copied(blocks: int) -> Sample:
    n, t = np.divmod(np.arange(128 * blocks), 128)
    arrays = np.arange(128 * blocks, dtype=U4), np.zeros(128 * blocks, U4)
    return Sample(COPY, blocks, 128, arrays, 128 * n + 128 - t, {"dynamic": 1024})


T = np.arange(32)
SAMPLES = {
    "async": Sample(ASYNC, 1, 32, (np.arange(1, 129, dtype=U4), np.zeros(64, U4)),
                    np.r_[128 - T, 4 * T + 1 + np.where(T % 2, 4 * T + 2, 0)]),
    "copy": copied(3), "copy, many blocks": copied(300),
    "pipeline": pipeline(20, 3, 96), "pipeline, of few rows": pipeline(8, 132, 288),
    "pipeline, large": pipeline(8, 132, 1024), "pipeline, of one row": pipeline(1, 1, 64),
    "written": Sample(WRITTEN, 1, 32, (np.zeros(32, U4), np.zeros(32, U4)), 31 - T),
    "prefetch": Sample(PREFETCH, 1, 32, (np.zeros(32, U4), np.zeros(32, U4))),
    "bulk": Sample(BULK, 1, 128, (np.arange(128, dtype=U4), np.zeros(128, U4)), np.arange(128)),
}  # fmt: skip
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // fence'
UNNAMED = FENCE.removesuffix(" // fence")
HINT = '"{ .reg .b64 pol; createpolicy.fractional.L2::evict_%s.b64 pol, 1.0;\\n'
BEFORE_STORE = 'asm volatile("cp.async.bulk.global'
READ, BYTES = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); // read', '"r"(at(s + 128)), "r"(512)'
BEGIN = "if (t == 0) { init(&bar, 1);"
FILLED = "wait(full + stage, n / STAGES & 1); // filled"
FREE = "if (n >= STAGES) wait(empty + stage, (n / STAGES - 1) & 1); // free"
INITIAL, BY_LOADER = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "if (t == 32) {"
INVAL = 'asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at(bar)) : "memory");'
LATER = "__syncthreads(); if (t == 0) { %s }"
LIVE = "which holds an mbarrier that nothing has invalidated"
ACCESSES = {
    "write": ("bar[0] = 0;", "((unsigned*)bar)[1] = 0;", "atomicAdd((unsigned*)bar, 1u);"),
    "read": ("o[0] = (unsigned)bar[0];",),
}
FOUND: dict[str, list[tuple[str, ...]]] = {
    "async": [
        ("",), ("async-read", 'asm volatile("cp.async.wait_group 1;" ::: "memory"); // first', ""),
        ("async-read", "wait_group 1", "wait_group 2"), ("shared-race", "__syncthreads(); // first", ""),
        ("async-read", 'asm volatile("cp.async.wait_all;" ::: "memory"); // second', ""),
        ("async-read", "__syncthreads(); // first", "__syncthreads(); s[1][4 * t] = 1;"),
        ("out-of-bounds", "a + 4 * t) :", "a + 4 * t + 4) :"), ("misaligned", "a + 4 * t) :", "a + 4 * t + 1) :"),
    ],
    "copy": [
        ("",), ("", LOAD, LOAD.replace("shared::cluster", "shared::cta")),
        ("", f'"{LOAD}"', HINT % "first" + LOAD.replace("bytes [", "bytes.L2::cache_hint [").replace(";", ', pol; }"')),
        ("", f'"{STORE}"',
         HINT % "last" + STORE.replace("group [", "group.L2::cache_hint [").replace(";", ', pol; }"')),
        ("", "wait_group.read 0", "wait_group 0"), ("", "fence.proxy.async.shared::cta", "fence.proxy.async"),
        ("", FENCE, "", BEFORE_STORE, f'asm volatile("fence.proxy.async;" ::: "memory");\n{BEFORE_STORE}'),
        ("", "acquire.cluster.", ""),
        # A copy over what a thread stored comes after the store if a fence lies between.
        ("", BEGIN, f"s[t] = 0; {UNNAMED}\n    {BEGIN}"), ("=proxy", BEGIN, f"s[t] = 0; {BEGIN}"),
        ("proxy", FENCE, ""), ("proxy", FENCE, FENCE.replace(".shared::cta", ".global")),
        ("proxy", FENCE, f"if (t < 64) {FENCE}"), ("async-read", READ, ""),
        ("async-read", "wait_group.read 0", "wait_group.read 1"),
        ("misaligned", BYTES, '"r"(at(s + 128)), "r"(520)'), ("misaligned", BYTES, '"r"(at(s + 129)), "r"(512)'),
        ("out-of-bounds", BYTES, '"r"(at(s + 132)), "r"(512)'),
        ("misaligned", "load(s, a, 512, &bar)", "load(s, a + 1, 512, &bar)"),
        ("out-of-bounds", "load(s, a, 512, &bar)", "load(s, a + 64 * blockIdx.x, 512, &bar)"),
        ("deadlock", "expect(&bar, 512)", "expect(&bar, 1024)"), ("deadlock", "init(&bar, 1)", "init(&bar, 2)"),
        ("async-read", "wait(&bar, 0);", "wait(&bar, 1);"), ("async-read", "wait(&bar, 0);", ""),
        ("global-race", "o += 128 * blockIdx.x", "o += 64 * blockIdx.x"),
        ("shared-race", FENCE + "\n    __syncthreads();", FENCE),
    ],
    # So many blocks that they do not run side by side.
    "copy, many blocks": [("global-race", "o += 128 * blockIdx.x", "o += 128 * (blockIdx.x % 299)")],
    "pipeline": [
        ("",), ("async-read|uninitialised", FILLED, ""), ("async-read|shared-race", FREE, ""),
        ("deadlock|shared-race|async-read", "(n / STAGES - 1) & 1", "(n / STAGES) & 1"),
        ("divergent-barrier|shared-race|async-read", "blockDim.x - 32); }", "blockDim.x - 33); }"),
        ("deadlock", "blockDim.x - 32); }", "blockDim.x - 31); }"),
        ("deadlock|async-read", "expect(full + stage, 4 * N)", "expect(full + stage, 4 * N - 16)"),
    ],
    "pipeline, of few rows": [("",)], "pipeline, large": [("",)], "pipeline, of one row": [("",)],
    "written": [("",), ("=proxy", "fence.proxy.async.global", "fence.proxy.async.shared::cta")],
    "prefetch": [("",), ("=out-of-bounds", "(128)", "(144)")],
    "bulk": [
        # An mbarrier is fenced by who initialised it, or its proxy by whoever comes after.
        ("",), ("=proxy: initialised, and neither fence.mbarrier_init nor fence.proxy.async", INITIAL, ""),
        ("", INITIAL, UNNAMED), ("", INITIAL, "", BY_LOADER, BY_LOADER + UNNAMED),
        ("=proxy", INITIAL, "", BY_LOADER, BY_LOADER + INITIAL),
        ("=proxy", INITIAL, "", 'asm volatile("mbarrier.init', INITIAL + ' asm volatile("mbarrier.init'),
        ("shared-race", "__syncthreads(); // ready", ""),
        # While it lives it is opaque; what is beside it is not.
        *(row for verb, listed in ACCESSES.items() for access in listed for row in (
            (f"=mbarrier: A {verb} of bytes.*{LIVE}", "// later", LATER % access),
            ("=uninitialised" if access != "bar[0] = 0;" and "unsigned*)bar)[" not in access else "", "// later",
             LATER % access.replace("bar", "(bar + 1)")),
            )),
        ("mbarrier: A write of bytes", "load(s, a,", "load(bar, a,"),
        # It is initialised once, invalidated behind its copies, and holds so many arrivals and bytes.
        ("mbarrier: initialised over one", "// later", LATER % "init(bar, 1);"),
        ("", "// later", LATER % f"{INVAL} init(bar, 1);"), ("shared-race", "// later", f"if (t == 0) {{ {INVAL} }}"),
        ("async-read: which an asynchronous copy also writes", "// loading", "if (t == 32) atomicAdd(s, 1u);"),
        ("mbarrier: on which an asynchronous copy has yet to complete", "// loading", f"if (t == 32) {INVAL}"),
        ("mbarrier: with 0 arrivals: 1 to 1048575", "init(bar, 1)", "init(bar, 0)"),
        ("mbarrier: with 1048576 arrivals", "init(bar, 1)", "init(bar, 1048576)"),
        ("mbarrier: expects 1048576 bytes: 1048575 at most", "expect(bar, 512)", "expect(bar, 1048576)"),
    ],
}  # fmt: skip


@edits(FOUND)
def test_copies(name: str, expected: str, texts: tuple[str, ...]) -> None:
    judge(SAMPLES[name].run(*texts), expected, SAMPLES[name].want)


def test_a_bulk_prefetch_is_counted() -> None:
    assert SAMPLES["prefetch"].run().traffic.tensors["k"]["k_param_0"]["prefetches"] == 1


@pytest.mark.parametrize("access", [a for listed in ACCESSES.values() for a in listed])
def test_an_mbarrier_that_is_invalidated_is_memory(access: str) -> None:
    assert "mbarrier" not in kinds(SAMPLES["bulk"].run("// later", LATER % f"{INVAL} {access}"))


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
