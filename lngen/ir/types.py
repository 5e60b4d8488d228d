"""The IR's data: an ordered list of typed equations, frozen and compared by value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """An element type; the value is its spelling in the graph text."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"

    @property
    def size(self) -> int:
        """Bytes per element."""
        return {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}[self.value]

    def __str__(self) -> str:
        return self.value


F16, BF16, F32, F64 = DType


class Axis(Enum):
    """A named axis: M rows, known at launch; D features, bound per kernel."""

    M = "M"
    D = "D"

    def __str__(self) -> str:
        return self.value


M, D = Axis
WIDE = M, D


@dataclass(frozen=True)
class Type:
    """A dtype over a set of named axes, printed ``bf16[M, D]``; axes stand in the order of ``Axis``."""

    dtype: DType
    axes: tuple[Axis, ...] = ()

    def shape(self, rows: int | tuple[int, ...], d: int) -> tuple[int, ...]:
        """The shape of an array with ``rows`` rows, a number or the leading dimensions they come in, and D = ``d``."""
        lengths = {M: rows if isinstance(rows, tuple) else (rows,), D: (d,)}
        return tuple(n for axis in self.axes for n in lengths[axis])

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.axes))}]"


def axes_union(*axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes named by any operand, in the order of ``Axis``: axes meet by name, nothing is broadcast."""
    return tuple(a for a in Axis if any(a in group for group in axes))


@dataclass(frozen=True)
class Value:
    """A name with a type; the name is used verbatim as the C identifier."""

    name: str
    type: Type

    def __str__(self) -> str:
        return f"%{self.name}"


Attr = str | int | float | Axis | DType
Attrs = tuple[tuple[str, Attr], ...]


@dataclass(frozen=True)
class Eqn:
    """One equation, ``out = op args {attrs}``; attrs are sorted by key."""

    out: Value
    op: str
    args: tuple[Value, ...] = ()
    attrs: Attrs = ()

    def attr(self, key: str) -> Attr:
        """The attribute ``key``; KeyError if the equation has none."""
        return dict(self.attrs)[key]

    def int_attr(self, key: str) -> int:
        """The attribute ``key``, which must be an integer."""
        value = self.attr(key)
        assert isinstance(value, int), (key, value)
        return value

    @property
    def axis(self) -> Axis:
        """The attribute ``axis``, of a size, an expansion or a reduction."""
        axis = self.attr("axis")
        assert isinstance(axis, Axis), axis
        return axis

    @property
    def value(self) -> int | float:
        """The attribute ``value``, of a constant."""
        value = self.attr("value")
        assert isinstance(value, int | float), value
        return value


@dataclass(frozen=True)
class Graph:
    """Parameters, equations in order, results: what to compute."""

    name: str
    params: tuple[Value, ...]
    eqns: tuple[Eqn, ...]
    results: tuple[Value, ...]

    def param(self, name: str) -> Value:
        """The parameter called ``name``."""
        return next(p for p in self.params if p.name == name)

    def values(self) -> dict[str, Value]:
        """Every value by name, parameters first."""
        return {v.name: v for v in (*self.params, *(e.out for e in self.eqns))}

    def producers(self) -> dict[Value, Eqn]:
        """The equation that defines each computed value."""
        return {e.out: e for e in self.eqns}

    def __str__(self) -> str:
        from lngen.ir.printer import print_graph

        return print_graph(self)
