"""An entry made ready to run: registers are slots of a list, instructions are functions, code is cut into segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lngen.errors import PtxError
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Entry, Instruction, Module, Operand
from lngen.ptx.pure import Pure
from lngen.ptx.table import pure, refusal
from lngen.ptx.values import DT, DTYPES, UNSIGNED, Adapter, Value, adapter, immediate

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch

Step = Callable[["Batch", Lanes], None]
SPECIAL = {
    f"%{n}.{a}": f"{n}.{a}" for n in ("tid", "ntid", "ctaid", "nctaid") for a in "xyz"
} | {"%laneid": "laneid", "%cluster_ctarank": "cluster_ctarank", "%cluster_nctarank": "cluster_nctarank"} | {
    f"%{n}.{a}": f"{n}.{a}" for n in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for a in "xyz"
}  # fmt: skip
SINK = -1


@dataclass(frozen=True)
class Segment:
    """Instructions without a jump into or out of them: from ``begin``, the steps, then what ends it."""

    begin: int
    steps: tuple[Step, ...]
    end: int
    control: Instruction | None


@dataclass
class Program:
    """An entry's instructions as functions over slots."""

    entry: Entry
    symbols: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    dtypes: list[DT] = field(default_factory=list)
    start: list[Value] = field(default_factory=list)
    specials: dict[int, str] = field(default_factory=dict)
    params: dict[str, int] = field(default_factory=dict)
    segments: dict[int, Segment] = field(default_factory=dict)
    shuffles: dict[int, Any] = field(default_factory=dict)

    def new(self, dtype: DT, value: Value) -> int:
        """A slot that starts with ``value``."""
        self.dtypes.append(dtype)
        self.start.append(value)
        return len(self.start) - 1

    def register(self, name: str, i: Instruction) -> int:
        """The slot of a register."""
        if name not in self.slots:
            kind = self.entry.registers.get(name)
            if name in SPECIAL:
                slot = self.new(UNSIGNED[4], np.uint32(0))
                self.specials[slot] = SPECIAL[name]
            elif kind is None or kind not in DTYPES:
                raise unknown(i, f"uses the register '{name}', which is not declared")
            else:
                slot = self.new(DTYPES[kind], _poison(DTYPES[kind]))
            self.slots[name] = slot
        return self.slots[name]

    def source(self, o: Operand, dtype: DT, i: Instruction) -> tuple[int, Adapter | None]:
        """Slot of an operand read as ``dtype``, and how to read it so."""
        if o.kind == "imm":
            return self.new(dtype, immediate(o.text, dtype)), None
        if o.kind == "sym":
            if o.text not in self.symbols:
                raise unknown(i, f"uses the symbol '{o.text}', which is not known")
            unsigned = UNSIGNED[dtype.itemsize]
            return self.new(dtype, unsigned.type(self.symbols[o.text]).view(dtype)), None
        if o.kind != "reg":
            raise unknown(i, f"has the operand '{o.text}', which is not expected there")
        slot = self.register(o.text, i)
        return slot, adapter(self.dtypes[slot], dtype)

    def target(self, o: Operand, dtype: DT, i: Instruction) -> tuple[int, Adapter | None]:
        """Slot of a destination to which a value of ``dtype`` is written, and how to convert that."""
        if o.text == "_":
            return SINK, None
        if o.kind != "reg" or o.text in SPECIAL:
            raise unknown(i, f"writes to '{o.text}', which is not a register")
        slot = self.register(o.text, i)
        return slot, adapter(dtype, self.dtypes[slot])


def unknown(i: Instruction, why: str = "is not one the executor knows") -> PtxError:
    """The error for an instruction that cannot be run."""
    return PtxError(f"PTX line {i.line}: instruction '{i.opcode}' {why}: {i.text};")


def _poison(dtype: DT) -> Value:
    return np.zeros(1, dtype)[0] if dtype.kind == "b" else np.full(dtype.itemsize, 0xFE, np.uint8).view(dtype)[0]


def write(batch: Batch, slot: int, value: Value, lanes: Lanes) -> None:
    """Set a register of those lanes."""
    if slot == SINK:
        return
    batch.R[slot] = value if lanes.array is None else np.where(lanes.array, value, batch.R[slot])


def predicated(program: Program, i: Instruction, step: Step) -> Step:
    """The step for the lanes whose predicate holds."""
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
    """``fn`` on registers; the frequent cases without a loop."""
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
    """mov.b32 {lo, hi}, r and mov.b32 r, {lo, hi}; also of 64 bits, and of four parts."""
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
                    piece = (value >> whole.type(n * width) if n else value).astype(part)
                    write(batch, slot_, convert(piece) if convert else piece, lanes)

        return unpack
    slot, convert = program.target(to, whole, i)
    pieces = [program.source(o, part, i) for o in source.items]

    def pack(batch: Batch, lanes: Lanes) -> None:
        total: Value = 0
        for n, (slot_, read) in enumerate(pieces):
            piece = (batch.R[slot_] if read is None else read(batch.R[slot_])).astype(whole)
            total = total | piece << whole.type(n * width) if n else piece
        write(batch, slot, convert(total) if convert else total, lanes)

    return pack


def leaders(entry: Entry) -> set[int]:
    """Where a segment may begin: the start, every label, what follows an instruction that directs control."""
    found = {0, *entry.labels.values()}
    found |= {n + 1 for n, i in enumerate(entry.instructions) if is_control(i)}
    found |= {n for n, i in enumerate(entry.instructions) if i.opcode.startswith(("shfl", "vote", "elect", "bar.warp"))}
    return found


CONTROL = ("bra", "bar", "barrier", "shfl", "vote", "elect", "ret", "exit", "trap")


def is_control(i: Instruction) -> bool:
    """True for what moves lanes: branches, barriers, shuffles, ends."""
    return i.opcode.split(".", 1)[0] in CONTROL


def symbols(module: Module, entry: Entry, places: dict[str, int]) -> dict[str, int]:
    """Addresses by name; ``places`` are those in shared, local and global memory."""
    return {s.name: places[s.name] for s in (*module.symbols, *entry.symbols) if s.name in places}
