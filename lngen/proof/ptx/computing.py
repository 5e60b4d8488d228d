"""The instructions that only compute: one row per family, from an opcode pattern to types and NumPy meaning.

The maker of a row gets the modifiers that its pattern names and returns a ``Pure``: the dtypes of the operands, the
dtypes of the results, and a function from the operands to the result (a tuple if there are several). An opcode is
refused if the maker does not read each of its modifiers.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from lngen.compiler.ir import numerics
from lngen.proof.ptx.arithmetic import (
    Maker,
    Pure,
    convert,
    convert_two,
    counting,
    extract,
    funnel,
    insert,
    logic,
    mul_high,
    permute,
    quotient,
    remainder,
    widen_two,
)
from lngen.proof.ptx.batch import Batch
from lngen.proof.ptx.opcodes import Opcode, read
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import (
    BOOL,
    DTYPES,
    SIGNED,
    SINK,
    UNSIGNED,
    Adapter,
    Lanes,
    Program,
    Reader,
    Registers,
    Step,
    Value,
    Writer,
    unknown,
)


def same(fn: Callable[..., Any], count: int) -> Maker:
    """All operands and the result have the type <t>."""
    return lambda m: Pure((DTYPES[m["t"]],), (DTYPES[m["t"]],) * count, fn)


def bits(fn: Callable[..., Any], count: int) -> Maker:
    """As ``same``, for operations with the same result on signed and unsigned numbers: computed on unsigned ones."""

    def operation(m: Opcode) -> Pure:
        t = BOOL if m["t"] == "pred" else UNSIGNED[DTYPES[m["t"]].itemsize]
        return Pure((t,), (t,) * count, fn)

    return operation


def shift(fn: Callable[..., Any]) -> Maker:
    """The amount is a u32 whatever <t> is, clamped to the width; NumPy shifts by the width as PTX does."""

    def operation(m: Opcode) -> Pure:
        t = DTYPES[m["t"]]
        width = np.uint32(8 * t.itemsize)
        return Pure((t,), (t, UNSIGNED[4]), lambda a, n: fn(a, np.minimum(n, width).astype(t)))

    return operation


def wide(fn: Callable[..., Any], count: int) -> Maker:
    """Two factors of type <t>, a result (and a third operand) twice as wide."""

    def operation(m: Opcode) -> Pure:
        t = DTYPES[m["t"]]
        to = (SIGNED if t.kind == "i" else UNSIGNED)[2 * t.itemsize]
        return Pure((to,), (t, t, *((to,) * (count - 2))), lambda a, b, *c: fn(a.astype(to), b.astype(to), *c))

    return operation


def mixed(fn: Callable[..., Any], count: int) -> Maker:
    """In f32; all operands but the last have the type <t> (sm_100 and later) or, without <t>, f32."""

    def operation(m: Opcode) -> Pure:
        f32 = DTYPES["f32"]
        narrow = DTYPES[m["t"] or "f32"]
        return Pure((f32,), (*(narrow,) * (count - 1), f32), lambda *v: fn(*(a.astype(f32, copy=False) for a in v)))

    return operation


def _fused(a: Value, b: Value, c: Value) -> Value:
    return numerics.fma(*np.broadcast_arrays(a, b, c))


def _number(fn: Callable[..., Any], negative: bool) -> Callable[[Value, Value], Value]:
    """min or max of numbers, -0 below +0."""
    return lambda a, b: np.where(a == b, np.where(np.signbit(a) == negative, a, b), fn(a, b))


def _extreme(number: Callable[..., Any], nan: Callable[..., Any], negative: bool) -> Maker:
    """min and max: of a NaN and a number the number; with .NaN, the NaN."""

    def operation(m: Opcode) -> Pure:
        t = DTYPES[m["t"]]
        return Pure((t,), (t, t), _number(nan if m["n"] else number, negative))

    return operation


def _extreme_of_two(m: Opcode) -> Pure:
    """max.NaN of the two numbers of a register."""
    part, larger = DTYPES[m["t"].removesuffix("x2")], _number(np.maximum, False)
    whole, own = UNSIGNED[4], UNSIGNED[2]

    def half(v: Value, place: int) -> Value:
        return np.asarray(v >> whole.type(place)).astype(own).view(part)

    def fn(a: Value, b: Value) -> Value:
        low, high = (larger(half(a, n), half(b, n)).astype(part).view(own).astype(whole) for n in (0, 16))
        return high << whole.type(16) | low

    return Pure((whole,), (whole, whole), fn)


def _least_magnitude(a: Value, b: Value) -> Value:
    """min.NaN.xorsign.abs: the smaller magnitude, negative if one of the two is."""
    least = np.minimum(np.abs(a), np.abs(b))
    return np.where(np.signbit(a) != np.signbit(b), -least, least)


_COMPARE: dict[str, Callable[[Value, Value], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_COMPARE_UNSIGNED = _COMPARE | {"lo": _COMPARE["lt"], "ls": _COMPARE["le"], "hi": _COMPARE["gt"], "hs": _COMPARE["ge"]}


def _ordered(a: Value, b: Value) -> Value:
    return (a == a) & (b == b)


_COMPARE_FLOAT: dict[str, Callable[[Value, Value], Any]] = {
    **{k: _COMPARE[k] for k in ("eq", "lt", "le", "gt", "ge")},
    "ne": lambda a, b: (a != b) & _ordered(a, b),
    "equ": lambda a, b: (a == b) | ~_ordered(a, b),
    "neu": _COMPARE["ne"],
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": _ordered,
    "nan": lambda a, b: ~_ordered(a, b),
}
_COMPARISONS = {
    "s": _COMPARE, "u": _COMPARE_UNSIGNED, "b": {k: _COMPARE[k] for k in ("eq", "ne")},
}  # fmt: skip
_COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip


def _compare(m: Opcode) -> Pure | None:
    """setp: one result, or two that are complements; optionally combined with another predicate."""
    t = DTYPES[m["t"]]
    known = _COMPARISONS[m["t"][0]] if t.kind in "iu" else _COMPARE_FLOAT
    if m["c"] not in known:
        return None
    test = known[m["c"]]
    if not m["b"]:
        return Pure((BOOL, BOOL), (t, t), lambda a, b: _twice(test(a, b)))
    combine = _COMBINE[m["b"]]

    def both(a: Value, b: Value, c: Value) -> tuple[Value, Value]:
        found = test(a, b)
        return combine(found, c), combine(~found, c)

    return Pure((BOOL, BOOL), (t, t, BOOL), both)


def _twice(found: Value) -> tuple[Value, Value]:
    return found, ~found


def _choose(m: Opcode) -> Pure:
    t = DTYPES[m["t"]]
    return Pure((t,), (t, t, BOOL), lambda a, b, p: np.where(p, a, b))


def _window(m: Opcode) -> Pure:
    """Between addresses of a memory and generic ones: generic shared memory starts at 2^40, local memory at 2^41."""
    base = np.uint64({"shared": 1 << 40, "local": 1 << 41}.get(m["s"].partition("::")[0], 0))
    return Pure((UNSIGNED[8],), (UNSIGNED[8],), (lambda a: a - base) if m["to"] else lambda a: a + base)


_INT = r"[us](?:16|32|64)"
_FLOAT = r"f32|f64"
_HALF = r"f16|bf16"
_ANY_FLOAT = rf"{_FLOAT}|{_HALF}"  # of operations that do not round
_BITS = r"b16|b32|b64|pred"
ROWS: tuple[tuple[str, Maker], ...] = (
    (rf"add\.rn\.(?P<t>{_FLOAT})", same(lambda a, b: a + b, 2)),
    (rf"sub\.rn\.(?P<t>{_FLOAT})", same(lambda a, b: a - b, 2)),
    (rf"mul\.rn\.(?P<t>{_FLOAT})", same(lambda a, b: a * b, 2)),
    (rf"div\.rn\.(?P<t>{_FLOAT})", same(lambda a, b: a / b, 2)),
    (rf"rcp\.rn\.(?P<t>{_FLOAT})", same(lambda a: a.dtype.type(1) / a, 1)),
    (rf"sqrt\.rn\.(?P<t>{_FLOAT})", same(np.sqrt, 1)),
    (rf"add\.rn\.f32\.(?P<t>{_HALF})", mixed(lambda a, b: a + b, 2)),
    (rf"sub\.rn\.f32\.(?P<t>{_HALF})", mixed(lambda a, b: a - b, 2)),
    (rf"fma\.rn\.f32(?:\.(?P<t>{_HALF}))?", mixed(_fused, 3)),
    (rf"neg\.(?P<t>{_ANY_FLOAT}|s16|s32|s64)", same(np.negative, 1)),
    (rf"abs\.(?P<t>{_ANY_FLOAT}|s16|s32|s64)", same(np.abs, 1)),
    (rf"copysign\.(?P<t>{_FLOAT})", same(lambda a, b: np.copysign(b, a), 2)),  # the sign of the first operand
    (rf"min(?P<n>\.NaN)?\.(?P<t>f32|{_HALF})", _extreme(np.fmin, np.minimum, True)),
    (rf"max(?P<n>\.NaN)?\.(?P<t>f32|{_HALF})", _extreme(np.fmax, np.maximum, False)),
    (r"max\.NaN\.(?P<t>f16x2|bf16x2)", _extreme_of_two),
    (r"min\.NaN\.xorsign\.abs\.(?P<t>f32)", same(_least_magnitude, 2)),
    (r"min\.(?P<t>f64)", same(_number(np.fmin, True), 2)),
    (r"max\.(?P<t>f64)", same(_number(np.fmax, False), 2)),
    (rf"min\.(?P<t>{_INT})", same(np.minimum, 2)),
    (rf"max\.(?P<t>{_INT})", same(np.maximum, 2)),
    (rf"add\.(?P<t>{_INT})", bits(lambda a, b: a + b, 2)),
    (rf"sub\.(?P<t>{_INT})", bits(lambda a, b: a - b, 2)),
    (rf"mul\.lo\.(?P<t>{_INT})", bits(lambda a, b: a * b, 2)),
    (rf"mad\.lo\.(?P<t>{_INT})", bits(lambda a, b, c: a * b + c, 3)),
    (rf"mul\.hi\.(?P<t>{_INT})", mul_high),
    (r"mul\.wide\.(?P<t>[us](?:16|32))", wide(lambda a, b: a * b, 2)),
    (r"mad\.wide\.(?P<t>[us](?:16|32))", wide(lambda a, b, c: a * b + c, 3)),
    (rf"div\.(?P<t>{_INT})", same(quotient, 2)),
    (rf"rem\.(?P<t>{_INT})", same(remainder, 2)),
    (rf"and\.(?P<t>{_BITS})", bits(lambda a, b: a & b, 2)),
    (rf"or\.(?P<t>{_BITS})", bits(lambda a, b: a | b, 2)),
    (rf"xor\.(?P<t>{_BITS})", bits(lambda a, b: a ^ b, 2)),
    (rf"not\.(?P<t>{_BITS})", bits(lambda a: ~a, 1)),
    (r"shl\.(?P<t>b16|b32|b64)", shift(lambda a, n: a << n)),
    (r"shr\.(?P<t>[bus](?:16|32|64))", shift(lambda a, n: a >> n)),
    (r"shf\.(?P<d>[lr])\.(?P<w>wrap|clamp)\.b32", funnel),
    (r"lop3\.b32", logic),
    (r"(?P<op>popc|clz|brev)\.(?P<t>b32|b64)", counting),
    (r"prmt\.b32", permute),
    (r"bfe\.(?P<t>[us](?:32|64))", extract),
    (r"bfi\.(?P<t>b32|b64)", insert),
    (rf"setp\.(?P<c>\w+?)(?:\.(?P<b>and|or|xor))?\.(?P<t>b16|b32|b64|{_INT}|{_ANY_FLOAT})", _compare),
    (rf"selp\.(?P<t>b16|b32|b64|{_INT}|{_FLOAT})", _choose),
    (
        r"cvt(?:\.(?P<r>rn|rz|rm|rp|rni|rzi|rmi|rpi))?\.(?P<t>[us](?:8|16|32|64)|f16|bf16|f32|f64)"
        r"\.(?P<s>[us](?:8|16|32|64)|f16|bf16|f32|f64)",
        convert,
    ),
    (r"cvt\.rn\.(?P<t>bf16x2|f16x2)\.f32", convert_two),
    (r"cvt\.rn\.satfinite\.(?P<t>e4m3x2|e5m2x2)\.f32", convert_two),
    (r"cvt\.rn\.f16x2\.(?P<s>e4m3x2|e5m2x2)", widen_two),
    (r"cvt\.(?P<r>rni)\.sat\.(?P<t>s8)\.(?P<s>f32)", convert),
    (r"cvta(?P<to>\.to)?\.(?P<s>global|const|local|shared(?:::cta)?)\.u64", _window),
    (rf"mov\.(?P<t>{_BITS}|{_INT}|{_FLOAT})", same(lambda a: a, 1)),
)
_COMPILED = tuple((re.compile(pattern), maker) for pattern, maker in ROWS)
UNROUNDED = re.compile(r"(add|sub|mul)(\.sat)?\.(f32|f64)")


@cache
def pure(opcode: str) -> Pure | None:
    """The row for ``opcode``; None if there is none, or if it does not execute all of the modifiers."""
    for pattern, maker in _COMPILED:
        if found := read(pattern, opcode):
            row = maker(found)
            return None if found.left else row
    return None


def refusal(opcode: str) -> str:
    """The reason why ``pure`` has no row for it."""
    if UNROUNDED.fullmatch(opcode):
        return "names no rounding, so the assembler may fuse it with another (compile with -fmad=false)"
    return "is not one the executor knows"


def pure_step(program: Program, i: Instruction) -> Step:
    """The step of an instruction that only computes."""
    if i.opcode in ("mov.b32", "mov.b64") and any(o.kind == "vec" for o in i.operands):
        return _packing(program, i)
    row = pure(i.opcode)
    if row is None or not i.operands:
        raise unknown(i, refusal(i.opcode))
    return _bound(program, i, row)


def _bound(program: Program, i: Instruction, row: Pure) -> Step:
    ins = i.operands[1:]
    if len(ins) != len(row.ins):
        raise unknown(i, f"has {len(ins)} source operands, expected {len(row.ins)}")
    sources = [program.source(o, t, i) for o, t in zip(ins, row.ins, strict=True)]
    first = i.operands[0]
    names = first.items if first.kind == "pair" else (first,)
    if len(names) > len(row.outs):
        raise unknown(i, "has too many results")
    fn = _reading(row.fn, sources)
    if len(row.outs) > 1:
        return _several(fn, [program.writer(o, t, i) for o, t in zip(names, row.outs, strict=False)])
    slot, convert = program.target(names[0], row.outs[0], i)
    if slot == SINK:
        return lambda batch, lanes: None
    return _single(fn if convert is None else lambda R: convert(fn(R)), slot)


def _single(fn: Reader, slot: int) -> Step:
    def step(batch: Batch, lanes: Lanes) -> None:
        R = batch.R
        R[slot] = fn(R) if lanes.array is None else np.where(lanes.array, fn(R), R[slot])

    return step


def _several(fn: Callable[[Registers], Any], writers: list[Writer]) -> Step:
    def step(batch: Batch, lanes: Lanes) -> None:
        for write, value in zip(writers, fn(batch.R), strict=False):
            write(batch.R, value, lanes)

    return step


def _reading(fn: Callable[..., Any], sources: list[tuple[int, Adapter | None]]) -> Reader:
    """``fn`` on registers; the frequent cases have no loop."""
    if all(a is None for _, a in sources):
        slots = [s for s, _ in sources]
        if len(slots) == 1:
            (x,) = slots
            return lambda R: fn(R[x])
        if len(slots) == 2:
            x, y = slots
            return lambda R: fn(R[x], R[y])
        return lambda R: fn(*[R[s] for s in slots])
    return lambda R: fn(*[R[s] if a is None else a(R[s]) for s, a in sources])


def _packing(program: Program, i: Instruction) -> Step:
    """mov.b32 {lo, hi}, r and mov.b32 r, {lo, hi}; also with 64 bits, and with four parts."""
    if len(i.operands) != 2:
        raise unknown(i)
    to, source = i.operands
    whole = UNSIGNED[4 if i.opcode == "mov.b32" else 8]
    vec = to if to.kind == "vec" else source
    part = UNSIGNED[whole.itemsize // len(vec.items)]
    width = 8 * part.itemsize
    if to.kind == "vec":
        read, writers = program.reader(source, whole, i), [program.writer(o, part, i) for o in to.items]

        def unpack(batch: Batch, lanes: Lanes) -> None:
            value = read(batch.R)
            for n, write in enumerate(writers):
                write(batch.R, (value >> whole.type(n * width)).astype(part), lanes)

        return unpack
    write, readers = program.writer(to, whole, i), [program.reader(o, part, i) for o in source.items]

    def pack(batch: Batch, lanes: Lanes) -> None:
        parts = (read(batch.R).astype(whole) << whole.type(n * width) for n, read in enumerate(readers))
        write(batch.R, functools.reduce(operator.or_, parts), lanes)

    return pack
