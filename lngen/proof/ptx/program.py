"""An entry ready to run: registers are slots of a list, instructions are functions on them, threads are lanes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.dtypes import FLOATS
from lngen.errors import PtxError
from lngen.proof.ptx.parser import INTEGER, Entry, Instruction, Operand, integer

Value = Any  # an array over all threads of a batch, or a NumPy scalar for all of them
DT = np.dtype[Any]
Adapter = Callable[[Value], Value]
BOOL: DT = np.dtype(np.bool_)
UNSIGNED: dict[int, DT] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
SIGNED: dict[int, DT] = {1: np.dtype("i1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}
DTYPES: dict[str, DT] = {
    **{f"{k}{8 * n}": d for k in "ub" for n, d in UNSIGNED.items()},
    **{f"s{8 * n}": d for n, d in SIGNED.items()},
    **{t.ptx: t.numpy() for t in FLOATS},
    "f16x2": UNSIGNED[4],
    "bf16x2": UNSIGNED[4],
    "pred": BOOL,
}


def immediate(text: str, dtype: DT) -> Value:
    """The scalar of an immediate operand."""
    prefix = text[:2].lower()
    if prefix == "0f":
        bits = np.uint32(int(text[2:], 16)).view(np.float32)
        return _cast(bits, dtype)
    if prefix == "0d":
        return _cast(np.float64(struct.unpack(">d", bytes.fromhex(text[2:]))[0]), dtype)
    if not INTEGER.fullmatch(text):
        return dtype.type(float(text))
    number = integer(text)
    if dtype == BOOL:
        return np.bool_(number != 0)
    if dtype.kind == "f" or dtype.kind == "V":
        return dtype.type(number)
    return UNSIGNED[dtype.itemsize].type(number & ((1 << 8 * dtype.itemsize) - 1)).view(dtype)


def _cast(number: Value, dtype: DT) -> Value:
    if dtype.kind == "f":
        return number.astype(dtype)
    return number.view(UNSIGNED[number.dtype.itemsize]).astype(UNSIGNED[dtype.itemsize]).view(dtype)


def adapter(have: DT, want: DT) -> Adapter | None:
    """The conversion of a value held as ``have`` to ``want``: its low bits, or extended by the sign of ``have``."""
    if have == want:
        return None
    if have == BOOL or want == BOOL:
        return lambda v: v.astype(want)
    if have.itemsize == want.itemsize:
        return lambda v: v.view(want)
    whole = have if have.kind in "iu" else UNSIGNED[have.itemsize]
    part = (SIGNED if whole.kind == "i" else UNSIGNED)[want.itemsize]
    return lambda v: v.view(whole).astype(part).view(want)


WARP = 32


class Lanes:
    """A set of threads of a batch; ``array`` is None if it holds all of them."""

    def __init__(self, array: Array | None, total: int, count: int | None = None) -> None:
        self.total = total
        self.count = total if array is None else int(np.count_nonzero(array)) if count is None else count
        self.array = None if self.count == total else array

    @classmethod
    def of(cls, numbers: Array, total: int) -> Lanes:
        """The threads with those numbers."""
        mask = np.zeros(total, np.bool_)
        mask[numbers] = True
        return cls(mask, total, len(numbers))

    @cached_property
    def index(self) -> Array:
        """Their numbers, ascending."""
        return np.arange(self.total) if self.array is None else np.flatnonzero(self.array)

    @cached_property
    def mask(self) -> Array:
        """One bool per thread."""
        return np.ones(self.total, np.bool_) if self.array is None else self.array

    @cached_property
    def warps(self) -> int:
        """Warps with at least one of these threads."""
        if self.array is None:
            return self.total // WARP
        return int(np.count_nonzero(self.array.reshape(-1, WARP).any(axis=1)))

    def narrow(self, wanted: Any) -> Lanes:
        """The threads for which ``wanted``, an array or one bool, is true."""
        if np.ndim(wanted) == 0:
            return self if wanted else Lanes(np.zeros(self.total, np.bool_), self.total, 0)
        array = wanted if self.array is None else wanted & self.array
        count = int(np.count_nonzero(array))
        return self if count == self.count else Lanes(array, self.total, count)

    def without(self, other: Lanes) -> Lanes:
        """The threads that are not in ``other``, a subset."""
        return Lanes(self.mask & ~other.mask, self.total, self.count - other.count)

    def union(self, other: Lanes) -> Lanes:
        """The union of two sets that have no thread in common."""
        return Lanes(self.mask | other.mask, self.total, self.count + other.count)

    def each(self, value: Value) -> Array:
        """The value of each of these threads."""
        if np.ndim(value) == 0:
            return np.full(self.count, value)
        return np.asarray(value if self.array is None else value[self.index])

    def bits(self) -> Array:
        """One u32 per warp; bit i is set if thread i of the warp belongs to the set."""
        packed = np.packbits(self.mask.reshape(-1, WARP), axis=1, bitorder="little")
        return np.asarray(packed.view("<u4")[:, 0])


Step = Callable[[Any, Lanes], None]  # of a batch, which has a program itself
Jump = Callable[[Any, int, Lanes], None]  # as Step, for the instruction at a position that ends a segment
Registers = list[Value]  # by slot
Reader = Callable[[Registers], Value]
Writer = Callable[[Registers, Value, Lanes], None]
Address = Callable[[Registers, Lanes], Array]
SPECIAL = {
    f"%{n}.{a}": f"{n}.{a}" for n in ("tid", "ntid", "ctaid", "nctaid") for a in "xyz"
} | {"%laneid": "laneid", "%cluster_ctarank": "cluster_ctarank", "%cluster_nctarank": "cluster_nctarank"} | {
    f"%{n}.{a}": f"{n}.{a}" for n in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for a in "xyz"
}  # fmt: skip
SINK = -1


@dataclass(frozen=True)
class Segment:
    """Straight code: from ``begin``, the steps, then the instruction that ends the segment, and what it does."""

    begin: int
    steps: tuple[Step, ...]
    end: int
    control: Instruction | None
    jump: Jump | None = None  # None: a branch


@dataclass
class Program:
    """An entry's instructions as functions over slots."""

    entry: Entry
    symbols: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    dtypes: list[DT] = field(default_factory=list)
    start: Registers = field(default_factory=list)
    specials: dict[int, str] = field(default_factory=dict)
    segments: dict[int, Segment] = field(default_factory=dict)

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

    def reader(self, o: Operand, dtype: DT, i: Instruction) -> Reader:
        """The value of an operand, as ``dtype``."""
        slot, adapt = self.source(o, dtype, i)
        return (lambda R: R[slot]) if adapt is None else lambda R: adapt(R[slot])

    def writer(self, o: Operand, dtype: DT, i: Instruction) -> Writer:
        """Sets a destination, of some lanes, to a value of ``dtype``."""
        slot, adapt = self.target(o, dtype, i)
        if slot == SINK:
            return lambda R, value, lanes: None

        def write(R: Registers, value: Value, lanes: Lanes) -> None:
            value = adapt(value) if adapt else value
            R[slot] = value if lanes.array is None else np.where(lanes.array, value, R[slot])

        return write

    def address(self, o: Operand, i: Instruction) -> Address:
        """The addresses that lanes access: a register, or a symbol that stands for a number, and an offset."""
        if o.kind != "mem":
            raise unknown(i)
        if o.text in self.entry.registers:
            slot = self.register(o.text, i)
        elif o.text in self.symbols:
            slot = self.new(UNSIGNED[8], np.uint64(self.symbols[o.text]))
        else:
            raise unknown(i, f"has the address '{o.text}', which is neither a register nor a symbol")

        def address(R: Registers, lanes: Lanes) -> Array:
            value = lanes.each(R[slot])
            return value + value.dtype.type(o.offset & (1 << 8 * value.dtype.itemsize) - 1) if o.offset else value

        return address


def unknown(i: Instruction, why: str = "is not one the executor knows") -> PtxError:
    """The error for an instruction that cannot be run."""
    return PtxError(f"PTX line {i.line}: instruction '{i.opcode}' {why}: {i.text};")


def _poison(dtype: DT) -> Value:
    return np.zeros(1, dtype)[0] if dtype.kind == "b" else np.full(dtype.itemsize, 0xFE, np.uint8).view(dtype)[0]
