"""The PTX executor on forms of instructions that the compiler or a template may pick: cache operators, bits, warps."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lngen.errors import PtxError
from lngen.ptx import Outcome, parse, run_kernel
from lngen.toolchain import compile_ptx
from ptx_source import clean, kinds, run

pytest.importorskip("cupy")

U4 = np.uint32


POLICY = "{ .reg .b64 pol; createpolicy.fractional.L2::evict_%s.b64 pol%s; "


def moves(load: str, store: str) -> str:
    """A kernel that copies 16 bytes a thread in that way."""
    return f"""extern "C" __global__ void k(const uint4* a, uint4* o) {{
        unsigned w, x, y, z; a += threadIdx.x; o += threadIdx.x;
        asm volatile("{load}" : "=r"(w), "=r"(x), "=r"(y), "=r"(z) : "l"(a) : "memory");
        asm volatile("{store}" :: "l"(o), "r"(w), "r"(x), "r"(y), "r"(z) : "memory"); }}"""


def four(opcode: str) -> str:
    return f"{opcode} {{%0, %1, %2, %3}}, [%4];" if opcode[0] == "l" else f"{opcode} [%0], {{%1, %2, %3, %4}};"


LOADS = [
    "ld.global.nc.v4.u32", "ld.global.nc.L1::no_allocate.v4.b32", "ld.global.nc.L1::no_allocate.L2::128B.v4.u32",
    "ld.global.nc.L1::no_allocate.L2::256B.v4.f32", "ld.global.L1::evict_first.v4.u32",
    "ld.global.nc.L1::evict_last.L2::256B.v4.u32", "ld.global.cs.v4.u32", "ld.global.cg.v4.u32",
    "ld.global.ca.v4.u32", "ld.global.lu.v4.u32", "ld.global.L2::64B.v4.u32", "ld.weak.global.v4.u32",
]  # fmt: skip
STORES = [
    "st.global.v4.u32", "st.global.cs.v4.u32", "st.global.cg.v4.b32", "st.global.wt.v4.u32", "st.global.wb.v4.u32",
    "st.global.L1::no_allocate.v4.u32", "st.global.L1::evict_first.v4.f32",
]  # fmt: skip


@pytest.mark.parametrize(
    ("load", "store"),
    [(load, STORES[n % len(STORES)]) for n, load in enumerate(LOADS)]
    + [("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32", "st.global.L1::no_allocate.L2::cache_hint.v4.u32"),
       ("ld.global.L2::cache_hint.v4.u32", "st.global.L2::cache_hint.v4.u32")],
)  # fmt: skip
def test_cache_operators(load: str, store: str) -> None:
    first, second = four(load), four(store)
    if "hint" in load:
        first = POLICY % ("first", ", 1.0") + first.replace(";", ", pol; }")
        second = POLICY % ("last.L2::evict_unchanged", ", 0.5") + second.replace(";", ", pol; }")
    a = np.arange(128, dtype=U4)
    kind = "f" if "f32" in load + store else "r"
    source = moves(first, second)
    if kind == "f":
        source = source.replace("unsigned w, x, y, z", "float w, x, y, z").replace('"=r"', '"=f"')
        source = source.replace('"r"', '"f"')
        source = source.replace(".u32", ".f32").replace(".b32", ".f32")
    outcome = run(source, 1, 32, a, np.zeros(128, U4))
    assert (clean(outcome)["1"] == a).all()
    assert outcome.traffic.tensors["k"]["k_param_0"]["bytes_read"] == 512


def test_narrow_vectors_and_prefetches() -> None:
    source = """extern "C" __global__ void k(const unsigned short* a, unsigned short* o) {
        unsigned short v[4]; a += 4 * threadIdx.x; o += 4 * threadIdx.x;
        asm volatile("prefetch.global.L1 [%0];" :: "l"(a));
        asm volatile("prefetch.global.L2 [%0];" :: "l"(a));
        asm volatile("prefetch.global.L2::evict_last [%0];" :: "l"(a));
        asm volatile("ld.global.nc.v4.b16 {%0, %1, %2, %3}, [%4];"
            : "=h"(v[0]), "=h"(v[1]), "=h"(v[2]), "=h"(v[3]) : "l"(a));
        asm volatile("st.global.cs.v2.b16 [%0], {%1, %2};" :: "l"(o), "h"(v[3]), "h"(v[2]) : "memory");
        asm volatile("st.global.v2.u16 [%0+4], {%1, %2};" :: "l"(o), "h"(v[1]), "h"(v[0]) : "memory");
        }"""
    a = np.arange(128, dtype=np.uint16)
    outcome = run(source, 1, 32, a, np.zeros(128, np.uint16))
    assert (clean(outcome)["1"] == a.reshape(-1, 4)[:, ::-1].ravel()).all()
    assert outcome.traffic.tensors["k"]["k_param_0"]["prefetches"] == 3 * 32
    beyond = run(source.replace('"l"(a)', '"l"(a + 128)', 1), 1, 32, a, np.zeros(128, np.uint16))
    assert {f.kind for f in beyond.findings} == {"out-of-bounds"}


def test_wide_vectors() -> None:
    source = """extern "C" __global__ void k(const double* a, double* o) {
        double x, y; a += 2 * threadIdx.x; o += 2 * threadIdx.x;
        asm volatile("ld.global.nc.L1::no_allocate.v2.f64 {%0, %1}, [%2];" : "=d"(x), "=d"(y) : "l"(a));
        long long p = __double_as_longlong(x), q = __double_as_longlong(y);
        asm volatile("st.global.v2.b64 [%0], {%1, %2};" :: "l"(o), "l"(q), "l"(p) : "memory"); }"""
    a = np.arange(64, dtype=np.float64)
    assert (clean(run(source, 1, 32, a, np.zeros(64)))["1"] == a.reshape(-1, 2)[:, ::-1].ravel()).all()


def bits(asm: str, *inputs: str) -> Any:
    """The results of an instruction for threads 0 to 31: %0 = f(%1, %2, ...)."""
    operands = ", ".join(f'"r"((unsigned)({text}))' for text in inputs)
    source = f"""extern "C" __global__ void k(unsigned* o) {{ unsigned t = threadIdx.x, r;
        asm volatile("{asm}" : "=r"(r) : {operands}); o[t] = r; }}"""
    return clean(run(source, 1, 32, np.zeros(32, U4)))["0"]


T = np.arange(32, dtype=np.uint64)
A, B = "0x89abcdef + t", "0x12345678 * (t + 1)"
AV, BV = (0x89ABCDEF + T) & 0xFFFFFFFF, (0x12345678 * (T + 1)) & 0xFFFFFFFF
BOTH = AV | BV << np.uint64(32)


def shifted(value: Any, n: Any) -> Any:
    return np.array([int(v) >> int(k) for v, k in zip(value, n, strict=True)], dtype=object) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("asm", "want"),
    [
        ("shf.r.wrap.b32 %0, %1, %2, %3;", shifted(BOTH, T)),
        ("shf.r.clamp.b32 %0, %1, %2, 40;", BV),
        ("shf.l.wrap.b32 %0, %1, %2, %3;", shifted(BOTH, 32 - T)),
        ("shf.l.clamp.b32 %0, %1, %2, 33;", AV),
        ("prmt.b32 %0, %1, %2, 0x5410;", (AV & 0xFFFF) | (BV & 0xFFFF) << np.uint64(16)),
        ("prmt.b32 %0, %1, %2, 0x7632;", AV >> np.uint64(16) | (BV >> np.uint64(16)) << np.uint64(16)),
        ("lop3.b32 %0, %1, %2, %3, 0x96;", AV ^ BV ^ T),
        ("lop3.b32 %0, %1, %2, %3, 0xE8;", (AV & BV) | (AV & T) | (BV & T)),
        ("bfe.u32 %0, %1, 4, 8;", AV >> np.uint64(4) & np.uint64(255)),
        ("bfi.b32 %0, %1, %2, 8, 8;", (BV & 0xFFFF00FF) | (AV & 255) << np.uint64(8)),
        ("brev.b32 %0, %3;", [int(f"{int(t):032b}"[::-1], 2) for t in T]),
        ("popc.b32 %0, %3;", [int(t).bit_count() for t in T]),
        ("clz.b32 %0, %3;", [32 - int(t).bit_length() for t in T]),
        ("{ .reg .pred p, q; setp.gt.u32 p|q, %3, 20; selp.u32 %0, %1, %2, q; }", np.where(T > 20, BV, AV)),
        ("{ .reg .pred p; setp.ne.b32 p, %3, 3; selp.s32 %0, %1, %2, p; }", np.where(T != 3, AV, BV)),
    ],
)
def test_bits(asm: str, want: Any) -> None:
    assert (bits(asm, A, B, "t") == np.asarray(want, dtype=np.uint64)).all()


def test_sums_and_products_of_halves_in_f32() -> None:
    """One rounding: operands but the last are f16 or bf16; instructions of sm_100 and later."""
    for half, widen in (("f16", lambda u: u.view(np.float16)), ("bf16", lambda u: u.view(ml_dtypes.bfloat16))):
        x = widen((0x3801 + 97 * T).astype(np.uint16)).astype(np.float32)
        c = (0x3F000000 + 12345 * T).astype(U4).view(np.float32)
        given = ("0x3801 + 97 * t", "0x3f000000 + 12345 * t")
        for asm, want in (
            (f"add.rn.f32.{half} %0, h, %2;", x + c),
            (f"sub.rn.f32.{half} %0, h, %2;", x - c),
            (f"fma.rn.f32.{half} %0, h, h, %2;", (x.astype(np.float64) * x + c).astype(np.float32)),
        ):
            found = bits(f"{{ .reg .b16 h, l; mov.b32 {{h, l}}, %1; {asm} }}", *given)
            assert (found == want.view(U4)).all(), (asm, half)


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


@pytest.mark.parametrize("asm", ["ld.global.q.u32 %0, [%1];", "elect.all %0, [%1];", "shf.x.wrap.b32 %0, %0, %0, 1;"])
def test_unknown_forms_name_their_line(asm: str) -> None:
    source = """extern "C" __global__ void k(unsigned* o) {
        unsigned r; asm volatile("ld.global.cv.u32 %0, [%1];" : "=r"(r) : "l"(o)); o[0] = r; }"""
    text = compile_ptx(source, "sm_90", name="k.cu")
    asm = asm.replace("%0", "%r1").replace("[%1]", "[%rd1]")
    line = next(n for n, t in enumerate(text.splitlines()) if "ld.global.cv" in t)
    lines = text.splitlines()
    lines[line] = asm
    with pytest.raises(PtxError, match=f"PTX line {line + 1}"):
        run_kernel(parse("\n".join(lines)), "k", 1, 1, [np.zeros(1, U4)])
