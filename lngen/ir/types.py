"""The IR's data: an ordered list of typed equations, frozen and compared by value; and its text.

``parse(print_graph(g)) == g``; the grammar is in lngen/docs/graph.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lngen.ir.operators import Operators


class DType(Enum):
    """An element type; the value is its spelling in the graph text."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"

    @classmethod
    def of(cls, value: object) -> DType:
        """By its own name or any library's: f32, "float32", np.float32, np.dtype("float32"), torch.float32.

        ValueError for anything else.
        """
        if isinstance(value, cls):
            return value
        word = value if isinstance(value, str) else getattr(value, "__name__", None) or getattr(value, "name", value)
        return cls(str(word).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f"))

    @property
    def size(self) -> int:
        """Bytes per element."""
        return {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}[self.value]

    @property
    def roundoff(self) -> float:
        """The unit roundoff: half a unit in the last place of 1."""
        return {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24, "f64": 2.0**-53}[self.value]

    @property
    def floor(self) -> float:
        """Half of the smallest subnormal number; 0 for f64, whose 2^-1075 is no f64 number."""
        return {"f16": 2.0**-25, "bf16": 2.0**-134, "f32": 2.0**-150, "f64": 0.0}[self.value]

    def __str__(self) -> str:
        return self.value


F16, BF16, F32, F64 = DType


class Axis(Enum):
    """A named axis: M rows, known at launch; D features, bound per kernel; S segments, runs of features along D."""

    M = "M"
    D = "D"
    S = "S"

    def __str__(self) -> str:
        return self.value


M, D, S = Axis
WIDE = M, D


@dataclass(frozen=True)
class Type:
    """A dtype over a set of named axes, printed ``bf16[M, D]``; axes are in the order of ``Axis``."""

    dtype: DType
    axes: tuple[Axis, ...] = ()

    def shape(self, rows: int | tuple[int, ...], d: int) -> tuple[int, ...]:
        """The shape of an array with ``rows`` rows, a number or leading dimensions, and D = ``d``."""
        lengths = {M: rows if isinstance(rows, tuple) else (rows,), D: (d,)}
        return tuple(n for axis in self.axes for n in lengths[axis])

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.axes))}]"


def axes_union(*axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes named by any operand, in the order of ``Axis``: axes combine by name, nothing is broadcast.

    S combines with D as well: each element along D uses the number of its segment, and the result varies along D.
    """
    named = {a for group in axes for a in group}
    return tuple(a for a in Axis if a in named and not (a is S and D in named))


@dataclass(frozen=True)
class Value(Operators):
    """A name with a type. A kernel's variable has the same name, or, where C has a meaning for it, one close to it."""

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

    def number_attr(self, key: str) -> int | float:
        """The attribute ``key``, which must be a number."""
        value = self.attr(key)
        assert isinstance(value, int | float), (key, value)
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
        return self.number_attr("value")


@dataclass(frozen=True)
class Graph:
    """Parameters, equations in order, and results.

    ``attrs``: after the sums have their order, ``order``, the version of the rule that chose it; and for each result
    that is the same as another, its name with that other result, ``dresidual=%dx``.
    """

    name: str
    params: tuple[Value, ...]
    eqns: tuple[Eqn, ...]
    results: tuple[Value, ...]
    attrs: Attrs = ()

    def param(self, name: str) -> Value:
        """The parameter called ``name``."""
        return next(p for p in self.params if p.name == name)

    def values(self) -> dict[str, Value]:
        """Every value by name, parameters first."""
        return {v.name: v for v in (*self.params, *(e.out for e in self.eqns))}

    @property
    def shared(self) -> dict[str, str]:
        """The names of results that are not stored, each with the name of the result that is the same."""
        return {k: v.removeprefix("%") for k, v in self.attrs if isinstance(v, str) and v.startswith("%")}

    def producers(self) -> dict[Value, Eqn]:
        """The equation that defines each computed value."""
        return {e.out: e for e in self.eqns}

    def __str__(self) -> str:
        return print_graph(self)


def print_graph(graph: Graph) -> str:
    """The graph as text, one equation a line, names and types aligned."""
    params = ", ".join(f"{p}: {p.type}" for p in graph.params)
    results = ", ".join(str(r.type) for r in graph.results)
    name_width = max((len(str(e.out)) for e in graph.eqns), default=0)
    type_width = max((len(str(e.out.type)) for e in graph.eqns), default=0)
    attrs = f" {_attrs(graph.attrs)}" if graph.attrs else ""
    lines = [f"graph @{graph.name}{attrs}({params}) -> ({results}) {{"]
    lines += [f"  {print_eqn(e, name_width, type_width)}" for e in graph.eqns]
    lines += [f"  return {', '.join(map(str, graph.results))}", "}"]
    return "\n".join(lines) + "\n"


def print_eqn(eqn: Eqn, name_width: int = 0, type_width: int = 0) -> str:
    """One equation, ``%y : f32[M, D] = add %a, %b``."""
    parts = [f"{eqn.out!s:<{name_width}} : {eqn.out.type!s:<{type_width}} = {eqn.op}"]
    if eqn.args:
        parts.append(", ".join(map(str, eqn.args)))
    if eqn.attrs:
        parts.append(_attrs(eqn.attrs))
    return " ".join(parts)


def _attrs(attrs: Attrs) -> str:
    return "{" + ", ".join(f"{k}={_attr(v)}" for k, v in attrs) + "}"


def _attr(value: Attr) -> str:
    # repr of a float is the shortest text that parses back to the same bits.
    return repr(value) if isinstance(value, float) else str(value)
