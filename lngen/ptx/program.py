"""An entry ready to run: registers are slots of a list, instructions are functions, code is cut into segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lngen.errors import PtxError
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Entry, Instruction, Module, Operand
from lngen.ptx.values import DT, DTYPES, UNSIGNED, Adapter, Value, adapter, immediate

Step = Callable[[Any, Lanes], None]  # of a batch, which has a program itself
SPECIAL = {
    f"%{n}.{a}": f"{n}.{a}" for n in ("tid", "ntid", "ctaid", "nctaid") for a in "xyz"
} | {"%laneid": "laneid", "%cluster_ctarank": "cluster_ctarank", "%cluster_nctarank": "cluster_nctarank"} | {
    f"%{n}.{a}": f"{n}.{a}" for n in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for a in "xyz"
}  # fmt: skip
SINK = -1


@dataclass(frozen=True)
class Segment:
    """Straight code: from ``begin``, the steps, then the instruction that ends the segment."""

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
        """Slot of an operand read as ``dtype``, and the conversion of the slot's value, if one is needed."""
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
        """Slot of a destination to which a value of ``dtype`` is written, and the conversion to the slot's dtype."""
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


def leaders(entry: Entry) -> set[int]:
    """Where segments may begin: the start, every label, the instruction after control flow."""
    found = {0, *entry.labels.values()}
    found |= {n + 1 for n, i in enumerate(entry.instructions) if is_control(i)}
    found |= {n for n, i in enumerate(entry.instructions) if i.opcode.startswith(("shfl", "vote", "elect", "bar.warp"))}
    return found


CONTROL = ("bra", "bar", "barrier", "shfl", "vote", "elect", "ret", "exit", "trap")


def is_control(i: Instruction) -> bool:
    """True for an instruction that moves lanes: branch, barrier, shuffle, exit."""
    return i.opcode.split(".", 1)[0] in CONTROL


def symbols(module: Module, entry: Entry, places: dict[str, int]) -> dict[str, int]:
    """Addresses by name; ``places`` has those in shared, local and global memory."""
    return {s.name: places[s.name] for s in (*module.symbols, *entry.symbols) if s.name in places}
