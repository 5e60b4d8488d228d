"""Instructions that compute, as functions over the registers of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lngen.ptx.batch import Batch
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import SINK, Program, Step, unknown
from lngen.ptx.pure import Pure
from lngen.ptx.table import pure, refusal
from lngen.ptx.values import UNSIGNED, Adapter, Value


def write(batch: Batch, slot: int, value: Value, lanes: Lanes) -> None:
    """Set a register of those lanes."""
    if slot == SINK:
        return
    batch.R[slot] = value if lanes.array is None else np.where(lanes.array, value, batch.R[slot])


def predicated(program: Program, i: Instruction, step: Step) -> Step:
    """The step restricted to the lanes whose predicate holds."""
    if not i.predicate:
        return step
    slot, negated = program.register(i.predicate, i), i.negated

    def narrowed(batch: Batch, lanes: Lanes) -> None:
        p = batch.R[slot]
        some = lanes.narrow(~p if negated else p)
        if some.count:
            step(batch, some)

    return narrowed


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
    targets = [program.target(o, t, i) for o, t in zip(names, row.outs, strict=False)]
    fn = _reading(row.fn, sources)
    if len(row.outs) > 1:
        return _several(fn, targets)
    slot, convert = targets[0]
    if slot == SINK:
        return lambda batch, lanes: None
    return _single(fn, slot, convert)


def _single(fn: Callable[[list[Value]], Value], slot: int, convert: Adapter | None) -> Step:
    if convert is None:

        def plain(batch: Batch, lanes: Lanes) -> None:
            R = batch.R
            R[slot] = fn(R) if lanes.array is None else np.where(lanes.array, fn(R), R[slot])

        return plain

    def converted(batch: Batch, lanes: Lanes) -> None:
        R = batch.R
        value = convert(fn(R))
        R[slot] = value if lanes.array is None else np.where(lanes.array, value, R[slot])

    return converted


def _several(fn: Callable[[list[Value]], Any], targets: list[tuple[int, Adapter | None]]) -> Step:
    def step(batch: Batch, lanes: Lanes) -> None:
        for (slot, convert), value in zip(targets, fn(batch.R), strict=False):
            write(batch, slot, convert(value) if convert else value, lanes)

    return step


def _reading(fn: Callable[..., Any], sources: list[tuple[int, Adapter | None]]) -> Callable[[list[Value]], Any]:
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
        slot, read = program.source(source, whole, i)
        parts = [program.target(o, part, i) for o in to.items]

        def unpack(batch: Batch, lanes: Lanes) -> None:
            value = batch.R[slot] if read is None else read(batch.R[slot])
            for n, (slot_, convert) in enumerate(parts):
                if slot_ != SINK:
                    bits = (value >> whole.type(n * width) if n else value).astype(part)
                    write(batch, slot_, convert(bits) if convert else bits, lanes)

        return unpack
    slot, convert = program.target(to, whole, i)
    sources = [program.source(o, part, i) for o in source.items]

    def pack(batch: Batch, lanes: Lanes) -> None:
        total: Value = 0
        for n, (slot_, read) in enumerate(sources):
            bits = (batch.R[slot_] if read is None else read(batch.R[slot_])).astype(whole)
            total = total | bits << whole.type(n * width) if n else bits
        write(batch, slot, convert(total) if convert else total, lanes)

    return pack
