"""The IR's data: an ordered list of typed equations, frozen and compared by value; and its text.

``parse(print_graph(g)) == g``; the grammar is in lngen/docs/graph.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from lngen.compiler.ir.axes import Axis, D, Lengths, M, along
from lngen.dtypes import FLOATS, DType
from lngen.errors import VerifyError

F16, BF16, F32, F64 = FLOATS


def compute_dtype(*dtypes: DType) -> DType:
    """The dtype of arithmetic on ``dtypes``: f64 if any is f64, else f32."""
    return F64 if F64 in dtypes else F32


SET_ROWS = 1024  # rows of a set, such as the tokens of a sample, where no call says how many: in benchmarks


def sets_in(rows: int) -> int:
    """Sets of ``SET_ROWS`` rows, or of as many of them as divide ``rows``."""
    return rows // max(math.gcd(rows, SET_ROWS), 1)


@dataclass(frozen=True)
class Type:
    """A dtype over named axes, at most one of each base, M before D; printed ``bf16[M, D]``.

    The type of a result that is stored by columns has M last: the rows of a column of f32[B, M] lie side by side.
    """

    dtype: DType
    axes: tuple[Axis, ...] = ()

    def along(self, root: Axis) -> Axis | None:
        """The axis of M, or of D; None without one."""
        return along(self.axes, root)

    def shape_of(self, lengths: Lengths) -> tuple[int, ...]:
        """The shape of an array whose axes have these lengths."""
        return tuple(lengths[a] for a in self.axes)

    def shape(self, rows: int | tuple[int, ...], d: int) -> tuple[int, ...]:
        """The shape of an array with ``rows`` rows, a number or leading dimensions, and D = ``d``.

        Sets of rows whose length a call says have ``SET_ROWS`` here, or what of it divides the rows, and a table has
        as many rows as there are.
        """
        leading = rows if isinstance(rows, tuple) else (rows,)
        count = math.prod(leading)
        sets = {a: count if a.of_table else sets_in(count) for a in self.axes if isinstance(a.number, str)}
        lengths = Lengths({M: count, D: d, **sets})
        return tuple(n for a in self.axes for n in (leading if a is M else (lengths[a],)))

    @property
    def by_columns(self) -> bool:
        """True for one that is stored by columns."""
        return self.axes[1:] == (M,) and self.axes[0].base is D

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.axes))}]"


# ---- values, and the operators that describe graphs ----


class Recorder(Protocol):
    """What turns an operator into an equation."""

    def record(self, op: str, *operands: Any, **attrs: float) -> Any:
        """The result of an op of the table on values, or on numbers where another operand is a value."""


_current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Operators on values become equations of ``recorder``, in this thread."""
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)


def _record(x: Value, op: str, *operands: object, **attrs: float) -> Value:
    recorder = _current.get()
    if recorder is None:
        raise VerifyError(
            f"'{x} ...' is expected in a function that describes a graph, where an operator adds the equation '{op}'; "
            "give the function to lngen.compile, or use the methods of a Builder."
        )
    found: Value = recorder.record(op, *operands, **attrs)
    return found


def _unary(op: str) -> Callable[[Value], Value]:
    def operator(self: Value) -> Value:
        return _record(self, op, self)

    operator.__name__, operator.__qualname__ = op, f"Value.{op}"  # for help() and the messages of Python
    return operator


def _binary(op: str) -> Callable[[Value, Value | float], Value]:
    def operator(self: Value, other: Value | float) -> Value:
        return _record(self, op, self, other)

    operator.__name__, operator.__qualname__ = op, f"Value.{op}"
    return operator


def _reflected(op: str) -> Callable[[Value, float], Value]:
    return lambda self, other: _record(self, op, other, self)


MOST_FACTORS = 64  # of a power


@dataclass(frozen=True)
class Value:
    """A name with a type. A kernel's variable has the same name, or a similar one where C has a meaning for it.

    While a graph is described, operators and methods add equations: ``x * rstd`` is ``b.mul("x_rstd", x, rstd)``. A
    number is a constant in the dtype of the other operand. VerifyError outside the description of a graph, or for an
    operand that is neither a value nor a number.
    """

    name: str
    type: Type

    def __hash__(self) -> int:
        """That of the name, which is one in a graph: values are keys everywhere."""
        return hash(self.name)

    def __str__(self) -> str:
        return f"%{self.name}"

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __neg__ = _unary("neg")

    def __pow__(self, exponent: float) -> Value:
        """The product of that many factors, 1 to ``MOST_FACTORS``, by squaring."""
        if not isinstance(exponent, int | float) or exponent not in range(1, MOST_FACTORS + 1):
            return NotImplemented
        if exponent == 1:
            return self
        root: Value = self ** (exponent // 2)
        return root * root * self if exponent % 2 else root * root

    # The op table gives these methods the docstrings of its rows.
    sqrt = _unary("sqrt")
    rsqrt = _unary("rsqrt")
    abs = __abs__ = _unary("abs")
    rint = _unary("rint")
    detach = _unary("detach")
    relu = _unary("relu")
    maximum = _binary("maximum")
    minimum = _binary("minimum")
    exp = _unary("exp")
    decay = _unary("decay")
    exp2 = _unary("exp2")
    log = _unary("log")
    tanh = _unary("tanh")
    sigmoid = _unary("sigmoid")
    softplus = _unary("softplus")
    erf = _unary("erf")
    gelu = _unary("gelu")
    gelu_tanh = _unary("gelu_tanh")
    silu = _unary("silu")

    def clamp(self, low: float, high: float) -> Value:
        return _record(self, "clamp", self, low=float(low), high=float(high))


# ---- numbers that a launch passes by value ----

Run = Literal["run"]
RUN: Run = "run"  # the value of the key eps for a graph that gets it from every call
DEFAULT_EPS = 1e-5


@dataclass(frozen=True)
class ByValue(Value):
    """A parameter of no axes that a launch passes by value, not in memory.

    ``rule``: how it follows from the eps of the call, a key of ``RULES``.
    """

    rule: str

    __hash__ = Value.__hash__


# ---- equations and graphs ----

Attr = str | int | float | Axis | DType
Attrs = tuple[tuple[str, Attr], ...]


@dataclass(frozen=True)
class Eqn:
    """One equation, ``out = op args {attrs}``; attrs are sorted by key."""

    out: Value
    op: str
    args: tuple[Value, ...] = ()
    attrs: Attrs = ()

    def __hash__(self) -> int:
        """That of the value that it defines."""
        return hash(self.out)

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
    def to(self) -> Axis | None:
        """The attribute ``to`` of a reduction, the axis that is left of the one it reduces; None if none is."""
        return self._axis("to")

    @property
    def per(self) -> Axis | None:
        """The attribute ``per`` of a size: the elements of ``axis`` that one of ``per`` has; None for all."""
        return self._axis("per")

    def _axis(self, key: str) -> Axis | None:
        axis = dict(self.attrs).get(key)
        assert axis is None or isinstance(axis, Axis), axis
        return axis

    @property
    def value(self) -> int | float:
        """The attribute ``value``, of a constant."""
        return self.number_attr("value")


@dataclass(frozen=True, repr=False)
class Graph:
    """Parameters, equations in order, and results.

    ``attrs``: ``order``, the version of the rule that ordered the sums, once they are ordered; and ``dresidual=%dx``
    for a result that is the same as another.
    """

    name: str
    params: tuple[Value, ...]
    eqns: tuple[Eqn, ...]
    results: tuple[Value, ...]
    attrs: Attrs = ()

    def __getstate__(self) -> dict[str, object]:
        """Without what ``places.once`` keeps."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def tensors(self) -> tuple[Value, ...]:
        """The parameters in memory: all but those that are passed by value."""
        return tuple(p for p in self.params if not isinstance(p, ByValue))

    @property
    def by_value(self) -> tuple[ByValue, ...]:
        """The parameters that are passed by value."""
        return tuple(p for p in self.params if isinstance(p, ByValue))

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

    def __repr__(self) -> str:
        """One line; the text has all equations."""
        return f"<Graph {print_graph(self).splitlines()[0][6:-2]}: {len(self.eqns)} equations>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def preformatted(text: str) -> str:
    """A text as a notebook shows it: HTML in its own colours."""
    from html import escape

    return f"<pre>{escape(text)}</pre>"


def print_graph(graph: Graph) -> str:
    """The graph as text, one equation a line, names and types aligned."""
    params = ", ".join(map(print_param, graph.params))
    results = ", ".join(str(r.type) for r in graph.results)
    name_width = max((len(str(e.out)) for e in graph.eqns), default=0)
    type_width = max((len(str(e.out.type)) for e in graph.eqns), default=0)
    head = [*(a.declaration for a in derived_axes(graph)), *_listed(graph.attrs)]
    attrs = f" {{{', '.join(head)}}}" if head else ""
    lines = [f"graph @{graph.name}{attrs}({params}) -> ({results}) {{"]
    lines += [f"  {print_eqn(e, name_width, type_width)}" for e in graph.eqns]
    lines += [f"  return {', '.join(map(str, graph.results))}", "}"]
    return "\n".join(lines) + "\n"


def print_param(param: Value) -> str:
    """One parameter, ``%x: bf16[M, D]`` or ``%eps: f32[] by value of eps``."""
    return f"{param}: {param.type}{f' by value of {param.rule}' if isinstance(param, ByValue) else ''}"


def print_eqn(eqn: Eqn, name_width: int = 0, type_width: int = 0) -> str:
    """One equation, ``%y : f32[M, D] = add %a, %b``."""
    parts = [f"{eqn.out!s:<{name_width}} : {eqn.out.type!s:<{type_width}} = {eqn.op}"]
    if eqn.args:
        parts.append(", ".join(map(str, eqn.args)))
    if eqn.attrs:
        parts.append(_attrs(eqn.attrs))
    return " ".join(parts)


def _attrs(attrs: Attrs) -> str:
    return f"{{{', '.join(_listed(attrs))}}}"


def _listed(attrs: Attrs) -> list[str]:
    return [f"{k}={_attr(v)}" for k, v in attrs]


def _attr(value: Attr) -> str:
    # repr of a float is the shortest text that parses back to the same bits.
    return repr(value) if isinstance(value, float) else str(value)


# ---- the equations that reduce: over the rows, over the features of a row, or over a segment of them ----

SUMS = ("reduce_sum", "reduce_dot")
FOLDS = (*SUMS, "reduce_max")

# Versions of the rule that gives sums their order, the default first: lngen/compiler/passes/order_v1.toml.
ORDERS = ("v1",)


def is_sum(eqn: Eqn, axis: Axis) -> bool:
    """True for a sum over all of ``axis``."""
    return eqn.op in SUMS and eqn.axis is axis and eqn.to is None


def is_segment_sum(eqn: Eqn) -> bool:
    """True for a sum over each segment of a row."""
    return eqn.op in SUMS and eqn.to is not None and eqn.to.of_order


def is_join(eqn: Eqn) -> bool:
    """True for a sum over the segments of a row."""
    return eqn.op in SUMS and eqn.axis.of_order


def is_segment_size(eqn: Eqn) -> bool:
    """True for the number of elements of each segment of a row."""
    return eqn.op == "size" and eqn.per is not None and eqn.per.of_order


def is_over_segments(value: Value) -> bool:
    """True for a value that has a number for each segment of a row."""
    return any(a.of_order for a in value.type.axes)


def is_row_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over D, of a row or of each of its segments, which ends a phase."""
    whole = eqn.op in FOLDS and eqn.axis is D and (eqn.to is None or eqn.to.of_order)
    return whole and M in eqn.out.type.axes


def is_block_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over each block of a row that a graph derives: [M, D] to [M, B]."""
    blocks = eqn.op in FOLDS and eqn.axis is D and eqn.to is not None and not eqn.to.of_order and not eqn.to.period
    return blocks and M in eqn.out.type.axes


def is_column_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over the rows of each column: [M, D] to [D]."""
    return eqn.op in FOLDS and eqn.axis is M and D in eqn.out.type.axes


def is_set_fold(eqn: Eqn) -> bool:
    """True for a sum over the rows of each set that a graph derives, such as a sample: [M, D] to [N, D]."""
    return eqn.op in SUMS and eqn.axis is M and eqn.to is not None


def is_over_sets(eqn: Eqn) -> bool:
    """True for a sum over all sets of rows: [N, D] to [D]."""
    return eqn.op in SUMS and eqn.axis.base is M and eqn.to is None


def is_over_heads(eqn: Eqn) -> bool:
    """True for a sum of what repeats along a vector, such as the heads of a row: [D] to [E]."""
    to = eqn.to if eqn.op in SUMS and eqn.axis is D else None
    return to is not None and to.period > 0 and to.each == 1 and M not in eqn.out.type.axes


def is_of_halves(eqn: Eqn) -> bool:
    """True for a rotation whose planes have a feature of each half, so that it takes elements of other vectors."""
    return eqn.op == "rotate" and eqn.attr("by") == "halves"


def is_of_columns(value: Value) -> bool:
    """True for a value with a number for each column, or for each of those that repeat: [D] or [E]."""
    return len(value.type.axes) == 1 and (value.type.axes[0] is D or value.type.axes[0].period > 0)


def is_of_set(value: Value) -> bool:
    """True for a value that has numbers for each set of rows that a graph derives."""
    rows = value.type.along(M)
    return rows is not None and rows.is_declared and not rows.of_table


def is_of_table(value: Value) -> bool:
    """True for a value whose columns repeat along a row, and that has some for each row: [M, E], or [P, E] of a table.

    Such are the cosines of a rotation, by row or by position.
    """
    rows = value.type.along(M)
    by_row = rows is M or (rows is not None and rows.of_table)
    return by_row and len(value.type.axes) == 2 and value.type.axes[1].period > 0


def sets_of(graph: Graph) -> Axis | None:
    """The axis of the sets of consecutive rows whose length a call says, ``{N = M / n}``; None without one."""
    found = (a for a in derived_axes(graph) if a.base is M and a.by == "/" and isinstance(a.number, str))
    return next(found, None)


def is_number_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum of all elements of a vector: [D] or [M] to []."""
    return eqn.op in FOLDS and not eqn.out.type.axes


def independent_rows(graph: Graph) -> bool:
    """True if no equation joins rows: then some of the rows have the results that they have among all."""
    joined = any(dict(eqn.attrs).get("axis") is M for eqn in graph.eqns)
    return not joined and all(a.base is D or a.of_table for a in derived_axes(graph))


def segment_of(graph: Graph, d: int) -> int:
    """Elements of a segment in rows of ``d``: the row if no equation has segments (``verify``: all agree)."""
    lengths = (dict(eqn.attrs).get("segment") for eqn in graph.eqns if is_segment_sum(eqn) or is_segment_size(eqn))
    return next((n for n in lengths if isinstance(n, int)), d)


def derived_axes(graph: Graph) -> tuple[Axis, ...]:
    """The axes that ``graph`` derives from M and D, in the order in which values have them, without segments."""
    values = (v for v in (*graph.params, *(e.out for e in graph.eqns)))
    named = (a for e in graph.eqns for _, a in e.attrs if isinstance(a, Axis))
    every = dict.fromkeys([*(a for v in values for a in v.type.axes), *named])
    return tuple(a for a in every if a.is_declared)
