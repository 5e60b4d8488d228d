"""Loads, stores and atomics move other bytes, or accesses narrower than a word race wrongly, if these fail."""

import struct
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

import sampling
from lngen.compiler.toolchain import compile_ptx
from lngen.proof.ptx import parse
from lngen.proof.ptx.opcodes import narrowest
from ptx_source import OPERATIONS, TYPES, Sample, clean, edits, judge, run, run_ptx

U4 = np.uint32


@pytest.mark.parametrize("space", ["shared", "shared::cta", "shared::cluster", "local"])
def test_memories_of_blocks_and_threads(space: str) -> None:
    base = space.partition(":")[0]
    body = f".{base} .align 16 .b8 mine[64];\n"
    orders = [("", ""), ("weak.", "weak."), ("volatile.", "volatile.")]
    orders += [("relaxed.cta.", "acquire.cta."), ("release.gpu.", "relaxed.sys.")]
    for n, (order, back) in enumerate(orders):
        body += f"mov.u32 %r1, {n + 5};\nst.{order}{space}.u32 [mine+{4 * n}], %r1;\n"
        body += f"ld.{back}{space}.u32 %r2, [mine+{4 * n}];\nst.global.u32 [%rd0+{4 * n}], %r2;\n"
    assert clean(run_ptx(body, np.zeros(5, U4)))["0"].tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", TYPES)
def test_types_and_vectors(kind: str) -> None:
    """A register wider than the element gets its sign, or zeros; a vector's elements lie side by side."""
    width = int(kind[1:]) // 8
    register = {"f32": "%f", "f64": "%fd"}.get(kind, "%rd" if width == 8 else "%r")
    first = 3 if register == "%rd" else 1
    data = np.frombuffer(bytes(range(0x7D, 0x7D + 64)), np.uint8).copy()
    body, wide = "", 8 if register in ("%rd", "%fd") else 4
    kept = "b64" if register == "%rd" else "f64" if register == "%fd" else "f32" if register == "%f" else "b32"
    at = 0
    for vec in (1, 2, 4):
        if width * vec > 16:
            continue
        names = [f"{register}{first + n}" for n in range(vec)]
        group = "{" + ", ".join(names) + "}" if vec > 1 else names[0]
        body += f"ld.global{f'.v{vec}' if vec > 1 else ''}.{kind} {group}, [%rd0+16];\n"
        body += f"st.global{f'.v{vec}' if vec > 1 else ''}.{kind} [%rd2+{16 * vec}], {group};\n"
        for name in names:
            body += f"st.global.{kept} [%rd1+{at}], {name};\n"
            at += wide
    found = clean(run_ptx(body, data, np.zeros(at, np.uint8), np.zeros(80, np.uint8)))
    numbers = data[16:].view(f"{'i' if kind[0] == 's' else 'u'}{width}")
    each = [int(numbers[n]) & (1 << 8 * wide) - 1 for vec in (1, 2, 4) if width * vec <= 16 for n in range(vec)]
    assert found["1"].view(f"u{wide}").tolist() == each
    for vec in (1, 2, 4):
        if width * vec <= 16:
            assert (found["2"][16 * vec : 16 * vec + width * vec] == data[16 : 16 + width * vec]).all()


def test_parts_of_a_parameter() -> None:
    body = "ld.param.u64 %rd0, [p0];\n"
    reads = [("u32", "p1"), ("u32", "p1+4"), ("s16", "p1+6"), ("u8", "p1+1"), ("s8", "p1+7"), ("u16", "p2+2")]
    for n, (kind, place) in enumerate(reads):
        body += f"ld.param.{kind} %r1, [{place}];\nst.global.u32 [%rd0+{4 * n}], %r1;\n"
    body += "ld.param.f64 %fd1, [p3];\nst.global.f64 [%rd0+24], %fd1;\n"
    body += "ld.param::entry.b32 %r1, [p3+4];\nst.global.u32 [%rd0+32], %r1;\n"
    number = 0xF1E2D3C4B5A69788
    found = clean(run_ptx(body, np.zeros(10, U4), number, 0x12345678, 1.5, kinds="u64 u64 u32 f64"))["0"]
    want = [0xB5A69788, 0xF1E2D3C4, 0xFFFFF1E2, 0x97, 0xFFFFFFF1, 0x1234, 0, 0x3FF80000, 0x3FF80000, 0]
    assert found.tolist() == want


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


WIDTHS = {t: int(t[1:]) for t in TYPES}


def added(old: int, a: int, kind: str, flushes: bool) -> int:
    """The bits of a sum; of f32 in global memory with no subnormal numbers."""
    if kind[0] != "f":
        return old + a
    code, width = ("<f", 4) if kind == "f32" else ("<d", 8)
    x, y = (struct.unpack(code, n.to_bytes(width, "little"))[0] for n in (old, a))

    def flush(v: float) -> float:
        return np.copysign(0.0, v) if flushes and abs(v) < 2.0**-126 else v

    total = flush(x) + flush(y)
    rounded = struct.unpack(code, struct.pack(code, total))[0]
    return int.from_bytes(struct.pack(code, flush(rounded)), "little")


def signed(n: int, kind: str) -> int:
    return n - (1 << WIDTHS[kind]) if kind[0] == "s" and n >> WIDTHS[kind] - 1 else n


MEANING: dict[str, Callable[[int, int, int], int]] = {
    "inc": lambda old, a, b: 0 if old >= a else old + 1,
    "dec": lambda old, a, b: a if old == 0 or old > a else old - 1,
    "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a,
    "xor": lambda old, a, b: old ^ a,
    "exch": lambda old, a, b: a,
    "cas": lambda old, a, b: b if old == a else old,
}

F32 = [0, 1, 0x80000001, 0x00400000, 0x00800000, 0x80800001, 0x3F800000, 0x00C00000]
F64 = [0, 1, 1 << 63 | 1, 0x0010000000000000, 0x3FF0000000000000]
INTEGERS = [0, 1, 5, 6, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF]


@sampling.grid(
    ("op", "kind", "space"),
    [(op, kind, space) for op, ks in OPERATIONS.items() for kind in ks for space in ("global", "shared", "generic")],
    lambda op, kind, space: ((op, kind), (kind, space)),
    strength=1,
)
def test_what_atomics_do(op: str, kind: str, space: str) -> None:
    """Each pair of numbers: what is found, what is left; red leaves the same."""
    width, mask = WIDTHS[kind] // 8, (1 << WIDTHS[kind]) - 1
    values = F32 if kind == "f32" else F64 if kind == "f64" else sorted({n & mask for n in INTEGERS})
    pairs = list(product(values, values))
    swap = 0x55
    bits = "b32" if width == 4 else "b64"
    a, old, third = (f"%{'r' if width == 4 else 'rd'}{n}" for n in (11, 12, 13))
    register = {"f32": "%f", "f64": "%fd"}.get(kind)
    body = f".shared .align 16 .b8 mine[16];\nmov.{bits} {third}, {swap};\n"
    spelled = "" if space == "generic" else f".{space}"
    more = f", {third}" if op == "cas" else ""
    for n in range(len(pairs)):
        at = width * n
        body += f"ld.global.{bits} {old}, [%rd0+{at}];\nld.global.{bits} {a}, [%rd1+{at}];\n"
        place = f"%rd2+{at}" if space != "shared" else "mine"
        body += f"st{spelled if space != 'generic' else '.global'}.{bits} [{place}], {old};\n"
        operand, result = (f"{register}1", f"{register}2") if register else (a, old)
        if register:
            body += f"mov.{bits} {operand}, {a};\n"
        body += f"atom{spelled}.{op}.{kind} {result}, [{place}], {operand}{more};\n"
        body += f"st.global.{kind} [%rd3+{at}], {result};\n"
        if space == "shared":
            body += f"ld.shared.{bits} {old}, [mine];\nst.global.{bits} [%rd2+{at}], {old};\n"
        if op not in ("exch", "cas"):
            body += f"ld.global.{bits} {old}, [%rd0+{at}];\nst.global.{bits} [%rd4+{at}], {old};\n"
            body += f"red.global.{op}.{kind} [%rd4+{at}], {operand};\n"
    unsigned = np.dtype(f"u{width}")
    first, second = (np.array([p[n] for p in pairs], unsigned) for n in (0, 1))
    blank = [np.zeros(len(pairs), unsigned) for _ in range(3)]
    found = clean(run_ptx(body, first, second, *blank))
    assert found["3"].tolist() == first.tolist()
    for n, (x, y) in enumerate(pairs):
        flushes = kind == "f32" and space != "shared"
        if op in ("min", "max"):
            want = {"min": min, "max": max}[op](signed(x, kind), signed(y, kind)) & mask
        else:
            want = (added(x, y, kind, flushes) if op == "add" else MEANING[op](x, y, swap)) & mask
        assert int(found["2"][n]) == want, (hex(x), hex(y))
        if op not in ("exch", "cas"):
            assert int(found["4"][n]) == (added(x, y, kind, kind == "f32") & mask if op == "add" else want)


def test_a_misaligned_access_names_its_thread() -> None:
    """Of threads that access several arrays at once."""
    body = "mov.u32 %r0, %tid.x;\nsetp.eq.u32 %p0, %r0, 1;\nadd.s64 %rd2, %rd1, 2;\n"
    body += "selp.b64 %rd3, %rd2, %rd0, %p0;\nld.global.u32 %r1, [%rd3];\n"
    (found,) = run_ptx(body, np.zeros(4, U4), np.zeros(4, U4), block=2).findings
    assert (found.kind, found.thread) == ("misaligned", 1)


# ---- accesses narrower than a word ----

SUM = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s;
    if (threadIdx.x == 0) s = 0;
    __syncthreads();
    atomicAdd(&s, threadIdx.x);
    __syncthreads();
    o[threadIdx.x] = s;
}"""
SHARED = """extern "C" __global__ void k(const T* a, T* o, unsigned long long at) {
    __shared__ T s[256];
    int t = threadIdx.x, i = t;
    s[t] = 7; s[t + 128] = 7;
    __syncthreads(); CLOCK
    s[i] = a[t];
    // between
    o[t] = s[i];
}"""
WHOLE = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned words[64];
    unsigned short* halves = reinterpret_cast<unsigned short*>(words);
    int t = threadIdx.x;
    __syncthreads(); CLOCK
    if (t < 32) words[t] = t;
    else *reinterpret_cast<volatile unsigned short*>(halves + 2 * t) = t;
    __syncthreads();
    if (t < 32) o[t] = words[t];
}"""
GLOBAL = """extern "C" __global__ void k(const T* a, void* o, unsigned* p) {
    int t = 2 * threadIdx.x + blockIdx.x;
    CLOCK
    static_cast<T*>(o)[t] = a[t];
}"""
PROXY = """extern "C" __global__ void k(unsigned* o) {
    extern __shared__ __align__(128) unsigned short s[];
    int t = threadIdx.x;
    s[t] = t;
    if (t >= 0) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (t == 0) {
        unsigned from = (unsigned)__cvta_generic_to_shared(s);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(o), "r"(from) : "memory");
        asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
}"""
NARROW = {"unsigned short": np.uint16, "unsigned char": np.uint8}
# A warp barrier makes the executor keep clocks of what threads have seen of each other, and so does a strong access.
CLOCKS = {"": "", ", clocks": "__syncwarp();"}
STRONG = {**CLOCKS, ", strong": 'asm volatile("red.relaxed.gpu.global.add.u32 [%0], 0;" :: "l"(p));'}
N = np.arange(128)


def samples() -> dict[str, Sample]:
    """Each kernel as it is right."""
    found = {
        "sum": Sample(SUM, 1, 64, (np.zeros(64, U4),), sum(range(64))),
        "halves and a proxy": Sample(PROXY, 1, 128, (np.zeros(64, U4),), N[::2] + (N[1::2] << 16), {"dynamic": 256}),
        "generic": Sample(GENERIC, 1, 64, (N[:64].astype(U4), np.zeros(64, U4)),
                          np.where(N[:64] & 1, 100 + (N[:64] ^ 2), N[:64])),
    }  # fmt: skip
    for clock, code in CLOCKS.items():
        found[f"words and halves{clock}"] = Sample(WHOLE.replace("CLOCK", code), 1, 64, (np.zeros(64, U4),))
        for kind, dtype in NARROW.items():
            arrays = N.astype(dtype), np.zeros(128, dtype), 0
            source = SHARED.replace("CLOCK", code).replace("T", kind)
            found[f"shared, {kind}{clock}"] = Sample(source, 1, 128, arrays)
    for (clock, code), (kind, dtype), item in product(STRONG.items(), NARROW.items(), (np.uint8, np.uint64)):
        target = np.zeros(64 * dtype().itemsize, np.uint8).view(item)
        source = GLOBAL.replace("CLOCK", code).replace("T", kind)
        name = f"global, {kind} in an array of {item.__name__}{clock}"
        found[name] = Sample(source, 2, 32, (N[:64].astype(dtype), target, np.zeros(1, U4)))
    return found


SAMPLES = samples()
BETWEEN, READ = "// between", "o[t] = s[i]"
BEHIND = BETWEEN, "__syncthreads();"


def shared(bytes_: str) -> list[tuple[str, ...]]:
    """Threads that write neighbours, read another's behind a barrier, write one place, read without a barrier."""
    return [
        ("",), ("", *BEHIND, READ, "o[t] = s[t ^ 1]"), ("", "i = t;", "i = t ^ 1;", *BEHIND),
        ("=shared-race", "i = t;", "i = t & ~1;", *BEHIND),
        (f"=shared-race: bytes {bytes_} of shared memory", READ, "o[t] = s[t ^ 1]"),
    ]  # fmt: skip


FOUND: dict[str, list[tuple[str, ...]]] = {
    "sum": [
        ("",), ("=shared-race", "threadIdx.x);\n    __syncthreads();", "threadIdx.x);"),
        ("=uninitialised", "s = 0;\n    __syncthreads();", ";"),
    ],
    "halves and a proxy": [("",), ("=proxy", "t >= 0", "t % 2 == 0"), ("=proxy", "t >= 0", "t % 2 == 1")],
    "generic": [("",), ("out-of-bounds", "s + (threadIdx.x ^ 2)", "s + threadIdx.x + 32")],
    **{name: shared("1 to 1" if "char" in name else "2 to 3") for name in SAMPLES if name.startswith("shared")},
    **{name: [("",), ("=shared-race", "2 * t)", "2 * t - 63)")] for name in SAMPLES if name.startswith("words")},
    **{name: [("",), ("=global-race", "(o)[t]", "(o)[t & ~1]")] for name in SAMPLES if name.startswith("global")},
}  # fmt: skip


@edits(FOUND)
def test_narrow_accesses(name: str, expected: str, texts: tuple[str, ...]) -> None:
    outcome = SAMPLES[name].run(*texts)
    judge(outcome, expected, SAMPLES[name].want)
    if not texts and name.startswith(("shared", "global")):
        narrow = outcome.results["1"].view(NARROW[next(k for k in NARROW if k in name)])
        assert (narrow == N[: narrow.size]).all()


def test_words_stay_the_unit_where_nothing_is_narrower() -> None:
    """What is noted for each word costs time; a vector of halves is as wide as the words it fills."""

    def unit(body: str, space: str) -> int:
        head = 'extern "C" __global__ void k(const unsigned* a, unsigned short* o) { __shared__ unsigned s[64]; '
        text = head + body + " }"
        return narrowest(parse(compile_ptx(text, "sm_90", name="k.cu")).entries["k"], space)

    words = "s[threadIdx.x] = a[threadIdx.x]; __syncthreads(); o[threadIdx.x] = s[threadIdx.x ^ 1];"
    assert (unit(words, "shared"), unit(words, "global")) == (4, 2)
    pair = words + 'asm volatile("st.shared.v2.b16 [%0], {%1, %1};" :: "r"(0), "h"(o[0]) : "memory");'
    assert unit(pair, "shared") == 4
    half = words + 'asm volatile("st.shared::cta.b16 [%0], %1;" :: "r"(0), "h"(o[0]) : "memory");'
    assert unit(half, "shared") == 2
    generic = words + 'asm volatile("st.b8 [%0], %1;" :: "l"(o), "h"(o[0]) : "memory");'
    assert (unit(generic, "shared"), unit(generic, "global")) == (1, 1)
