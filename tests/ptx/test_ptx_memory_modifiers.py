"""Every modifier that the PTX manual lists for loads, stores, atomics, fences and shuffles is executed or refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import sampling
from lngen.errors import PtxError
from lngen.ptx import Outcome, parse, run_kernel
from lngen.ptx.opcodes import access, atomic, fence

U4 = np.uint32
SCOPES = ["cta", "cluster", "gpu", "sys"]
TYPES = [f"{k}{w}" for k in "bus" for w in (8, 16, 32, 64)] + ["f32", "f64"]
LEVEL1 = ["L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"]
SIZES = ["L2::64B", "L2::128B", "L2::256B"]
SHARED = ["shared", "shared::cta", "shared::cluster"]
CACHED = ["", "global"]


def words(*slots: list[str]) -> Iterator[str]:
    """Every choice of one word for each slot."""
    return (".".join(p for p in chosen if p) for chosen in product(*slots))


def scoped(order: str) -> list[str]:
    return [f"{order}.{scope}" for scope in SCOPES]


# The manual's lines, without .unified, .mmio, the priorities of 32-byte accesses and what belongs to functions.
LOADS = {
    *words(["ld"], ["", "weak"], CACHED, ["", "ca", "cg", "cs", "lu", "cv"], ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld"], ["", "weak"], CACHED, LEVEL1, ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld"], ["", "weak"], ["local", "const", "param", "param::entry", *SHARED]),
    *words(["ld.volatile"], CACHED, ["", *SIZES]),
    *words(["ld.volatile"], ["local", *SHARED]),
    *words(["ld"], scoped("relaxed") + scoped("acquire"), CACHED, ["", *LEVEL1], ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld"], scoped("relaxed") + scoped("acquire"), ["local", *SHARED]),
    *words(["ld.global"], ["", "ca", "cg", "cs", "lu", "cv"], ["nc"], ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld.global.nc"], LEVEL1, ["", "L2::cache_hint"], ["", *SIZES]),
}
STORES = {
    *words(["st"], ["", "weak"], CACHED, ["", "wb", "cg", "cs", "wt"], ["", "L2::cache_hint"]),
    *words(["st"], ["", "weak"], CACHED, LEVEL1, ["", "L2::cache_hint"]),
    *words(["st"], ["", "weak", "volatile"], ["local", *SHARED]),
    *words(["st.volatile"], CACHED),
    *words(["st"], scoped("relaxed") + scoped("release"), CACHED, ["", *LEVEL1], ["", "L2::cache_hint"]),
    *words(["st"], scoped("relaxed") + scoped("release"), ["local", *SHARED]),
}
ORDERS = ["", "weak", "volatile", "mmio.relaxed.sys", "relaxed", "acquire", "release", "acq_rel"]
SPACES = ["", "global", "local", "const", "param", "param::entry", "param::func", *SHARED]
OPERATORS = ["", "ca", "cg", "cs", "lu", "cv", "wb", "wt"]


def ordered() -> list[str]:
    return [*ORDERS, *(s for order in ("relaxed", "acquire", "release", "weak", "volatile") for s in scoped(order))]


@pytest.mark.parametrize(("name", "known"), [("ld", LOADS), ("st", STORES)])
def test_loads_and_stores_have_the_modifiers_of_the_manual(name: str, known: set[str]) -> None:
    """All others, and all other orders of them, are refused."""
    tried, hints = set(), ["", "L2::cache_hint"]
    for order in ordered():
        tried |= set(words([name], [order], SPACES, OPERATORS, ["", "nc"], ["", LEVEL1[0]], hints, ["", SIZES[0]]))
        tried |= set(words([name], [order], ["", "global", "shared"], ["", "unified"], ["", *LEVEL1], ["", *SIZES]))
        tried |= set(words([name], [order], ["", "global"], ["L2::evict_first", "L2::evict_last", "L2::evict_normal"]))
    for prefix in tried | known:
        assert (access(f"{prefix}.u32") is not None) == (prefix in known), prefix
    for suffix in ("u32", "v2.u32", "v4.f32", "s8", "v2.b64"):
        assert access(f"{name}.global.{suffix}") is not None
    for suffix in ("v8.b32", "b128", "f16", "v3.u32", "v4.v4.u32", "u32.cg", "u32.global", "pred"):
        assert access(f"{name}.global.{suffix}") is None


HEAD = """.version 8.3
.target sm_90
.address_size 64
{globals}
.visible .entry k(
{params}
)
{{
.reg .pred %p<8>;
.reg .b16 %rs<8>;
.reg .b32 %r<16>;
.reg .b64 %rd<16>;
.reg .f32 %f<8>;
.reg .f64 %fd<8>;
{body}
ret;
}}"""


def run(
    body: str, *arguments: Any, block: int = 1, grid: int = 1, kinds: str = "", globals_: str = "", **options: Any
) -> Outcome:
    """What a kernel of these instructions does; %rd0, %rd1, ... are the addresses of arrays."""
    types = kinds.split() or ["u64"] * len(arguments)
    params = ",\n".join(f".param .{t} p{n}" for n, t in enumerate(types))
    loads = "".join(f"ld.param.u64 %rd{n}, [p{n}];\n" for n, t in enumerate(types) if t == "u64" and not kinds)
    text = HEAD.format(globals=globals_, params=params, body=loads + body)
    return run_kernel(parse(text), "k", grid, block, arguments, **options)


def clean(outcome: Outcome) -> dict[str, Any]:
    assert outcome.findings == (), "\n".join(map(str, outcome.findings[:3]))
    return outcome.results


def test_hints_and_orders_change_no_value() -> None:
    """Each load and store of global memory once: what it reads, what it writes."""
    loads = sorted(p for p in LOADS if not any(s in p for s in ("shared", "local", "const", "param")))
    stores = sorted(p for p in STORES if not any(s in p for s in ("shared", "local")))

    def policy(opcode: str) -> str:
        return ", %rd9" if "cache_hint" in opcode else ""

    body = "createpolicy.fractional.L2::evict_last.b64 %rd9, 0f3F800000;\n"
    for n, opcode in enumerate(loads):
        body += f"{opcode}.u32 %r1, [%rd0+{4 * n}]{policy(opcode)};\nst.global.u32 [%rd1+{4 * n}], %r1;\n"
    for n, opcode in enumerate(stores):
        body += f"ld.global.u32 %r1, [%rd0+{4 * n}];\n{opcode}.u32 [%rd2+{4 * n}], %r1{policy(opcode)};\n"
    source = np.arange(1, 1 + max(len(loads), len(stores)), dtype=U4)
    source.flags.writeable = False
    found = clean(run(body, source, np.zeros(len(loads), U4), np.zeros(len(stores), U4)))
    assert (found["1"] == source[: len(loads)]).all()
    assert (found["2"] == source[: len(stores)]).all()


@pytest.mark.parametrize("space", ["shared", "shared::cta", "shared::cluster", "local"])
def test_memories_of_blocks_and_threads(space: str) -> None:
    base = space.partition(":")[0]
    body = f".{base} .align 16 .b8 mine[64];\n"
    orders = [("", ""), ("weak.", "weak."), ("volatile.", "volatile.")]
    orders += [("relaxed.cta.", "acquire.cta."), ("release.gpu.", "relaxed.sys.")]
    for n, (order, back) in enumerate(orders):
        body += f"mov.u32 %r1, {n + 5};\nst.{order}{space}.u32 [mine+{4 * n}], %r1;\n"
        body += f"ld.{back}{space}.u32 %r2, [mine+{4 * n}];\nst.global.u32 [%rd0+{4 * n}], %r2;\n"
    assert clean(run(body, np.zeros(5, U4)))["0"].tolist() == [5, 6, 7, 8, 9]


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
    found = clean(run(body, data, np.zeros(at, np.uint8), np.zeros(80, np.uint8)))
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
    found = clean(run(body, np.zeros(10, U4), number, 0x12345678, 1.5, kinds="u64 u64 u32 f64"))["0"]
    want = [0xB5A69788, 0xF1E2D3C4, 0xFFFFF1E2, 0x97, 0xFFFFFFF1, 0x1234, 0, 0x3FF80000, 0x3FF80000, 0]
    assert found.tolist() == want
    for kind, place in (("u32", "p1+8"), ("u64", "p1+4"), ("u16", "p1+1"), ("u32", "p1+-4")):
        message = r"reads \d bytes from byte -?\d of the parameter 'p1', which has 8"
        with pytest.raises(PtxError, match=message):
            run(f"ld.param.{kind} %rd3, [{place}];\n", np.zeros(1, U4), 1)
    with pytest.raises(PtxError, match="reads several elements of a parameter"):
        run("ld.param.v2.u32 {%r1, %r2}, [p1];\n", np.zeros(1, U4), 1)


# ---- atomics ----

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
OPERATIONS = {
    **{op: ["b32", "b64"] for op in ("and", "or", "xor", "exch", "cas")},
    **{op: ["u32", "s32", "u64", "s64"] for op in ("min", "max")},
    "add": ["u32", "s32", "u64", "f32", "f64"], "inc": ["u32"], "dec": ["u32"],
}  # fmt: skip
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
    found = clean(run(body, first, second, *blank))
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


def test_atomics_have_the_modifiers_of_the_manual() -> None:
    kinds = [*TYPES, "f16", "bf16", "f16x2", "bf16x2", "b128"]
    operations = [*OPERATIONS, "add.noftz", "sub", "popc"]
    for name, op, kind in product(("atom", "red"), operations, kinds):
        known = kind in OPERATIONS.get(op, []) and not (name == "red" and op in ("exch", "cas"))
        assert (atomic(f"{name}.global.{op}.{kind}") is not None) == known, (name, op, kind)
    for name, orders in (("atom", ["relaxed", "acquire", "release", "acq_rel"]), ("red", ["relaxed", "release"])):
        tried = ["", *ORDERS[1:], "sc", *(s for o in orders for s in scoped(o)), *SCOPES]
        known_orders = {"", *orders, *(s for o in orders for s in scoped(o)), *SCOPES}
        for order, space in product(tried, [*SPACES, "shared::entry"]):
            found = atomic(".".join(p for p in (name, order, space, "add.u32") if p))
            wanted = order in known_orders and space in ("", "global", *SHARED)
            assert (found is not None) == wanted, (name, order, space)
            if found:
                assert found.how.acquire == order.startswith(("acq",))
                assert found.how.release == order.startswith(("release", "acq_rel"))
                scope = next((s for s in SCOPES if s in order.split(".")), "gpu")
                assert found.how.level == SCOPES.index(scope)
    for more in ("atom.global.add.L2::cache_hint.u32", "red.global.add.v2.f32", "atom.add.global.u32"):
        assert atomic(more) is None


def test_what_is_not_known_is_an_error() -> None:
    for line in ("atom.global.add.s64 %rd3, [%rd0], %rd4", "red.global.exch.b32 [%rd0], %r1", "nanosleep.u64 %rd3",
                 "activemask.b64 %rd3", "fence.sc", "ld.global.f16 %rs1, [%rd0]"):  # fmt: skip
        with pytest.raises(PtxError, match=f"instruction '{line.split()[0]}' is not one the executor knows"):
            run(f"{line};\n", np.zeros(8, U4))


# ---- fences ----


def test_fences_have_the_modifiers_of_the_manual() -> None:
    orders = ["", "sc", "acq_rel", "acquire", "release", "relaxed", "weak"]
    limits = ["", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"]
    for order, limit, scope in product(orders, limits, ["", *SCOPES, "gl"]):
        opcode = ".".join(p for p in ("fence", order, limit, scope) if p)
        whole = order in orders[:5] and scope in SCOPES and not limit
        part = (order, limit, scope) == ("acquire", limits[2], "cluster")
        found = fence(opcode)
        assert (found is not None) == (whole or part), opcode
        if found:
            assert (found.acquire, found.release) == (order != "release", order != "acquire")
            assert (found.scope, found.restricted) == (scope, part)
    for scope in ("cta", "gl", "sys", "gpu", ""):
        assert (fence(f"membar.{scope}") is not None) == (scope in ("cta", "gl", "sys"))


MESSAGE = """mov.u32 %r1, %ctaid.x;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra $reader;
mov.u32 %r2, 7;
st.global.u32 [%rd0], %r2;
WRITER
mov.u32 %r3, 1;
st.relaxed.gpu.global.u32 [%rd1], %r3;
ret;
$reader:
ld.relaxed.gpu.global.u32 %r4, [%rd1];
setp.eq.u32 %p2, %r4, 0;
@%p2 bra $reader;
READER
ld.global.u32 %r5, [%rd0];
st.global.u32 [%rd2], %r5;
"""


@pytest.mark.parametrize("reader", ["acquire", "release", "acq_rel", "sc"])
@pytest.mark.parametrize("writer", ["acquire", "release", "acq_rel", "sc"])
def test_a_fence_goes_one_way(writer: str, reader: str) -> None:
    """A flag hands over what a release comes before, to what comes after an acquire."""
    body = MESSAGE.replace("WRITER", f"fence.{writer}.gpu;").replace("READER", f"fence.{reader}.gpu;")
    outcome = run(body, *(np.zeros(1, U4) for _ in range(3)), grid=2)
    ordered_ = writer != "acquire" and reader != "release"
    assert {f.kind for f in outcome.findings} == (set() if ordered_ else {"global-race"})


# ---- memory of another block ----


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
    outcome = run(body, np.zeros(2, U4), grid=2, cluster=(2,))
    assert {f.kind for f in outcome.findings} == ({"out-of-bounds"} if found else set())
    if not found:
        assert outcome.results["0"].tolist() == [1, 0]


# ---- shuffles and votes ----

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
    found = clean(run(body, b, c, *blank, block=256, grid=len(cases) // 8))
    for warp, (distance, bound) in enumerate(cases):
        for lane in range(32):
            n = 32 * warp + lane
            source, inside = reads(mode, lane, distance, bound)
            got = int(found["2"][n]), int(found["3"][n])
            assert got == (3 * (n % 256 - lane + source), inside), (distance, hex(bound), lane)


def test_shuffles_and_votes_have_the_modifiers_of_the_manual() -> None:
    operands = "%r1|%p1, %r2, %r3, %r4, -1"
    for mode, kind in product(("up", "down", "bfly", "idx", "xor", ""), ("b32", "b64", "u32", "")):
        opcode = ".".join(p for p in ("shfl.sync", mode, kind) if p)
        known = mode in ("up", "down", "bfly", "idx") and kind == "b32"
        outcome = _refused(f"{opcode} {operands}")
        assert outcome != known, opcode
    assert _refused("shfl.up.b32 %r1|%p1, %r2, %r3, %r4")
    for mode, kind in product(("all", "any", "uni", "ballot", "none"), ("pred", "b32", "b64")):
        known = (mode in ("all", "any", "uni") and kind == "pred") or (mode, kind) == ("ballot", "b32")
        result = "%p1" if kind == "pred" else "%r1"
        assert _refused(f"vote.sync.{mode}.{kind} {result}, %p2, -1") != known, (mode, kind)
    assert _refused("vote.all.pred %p1, %p2")


def _refused(line: str) -> bool:
    start = "mov.u32 %r2, 0;\nmov.u32 %r3, 0;\nmov.u32 %r4, 31;\nsetp.eq.u32 %p2, %r2, 0;\n"
    try:
        clean(run(f"{start}{line};\n", np.zeros(1, U4), block=32))
    except PtxError:
        return True
    return False


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
    found = clean(run(body, first, second, *blank, block=32, grid=len(cases)))
    for warp, (pattern, mask) in enumerate(cases):
        ayes = pattern & mask
        want = (ayes == mask) + 2 * (ayes != 0) + 4 * (ayes in (0, mask))
        for lane in range(32):
            inside = mask >> lane & 1
            got = int(found["2"][32 * warp + lane]), int(found["3"][32 * warp + lane])
            assert got == (want * inside, ayes * inside), (hex(pattern), hex(mask), lane)
