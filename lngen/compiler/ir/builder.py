"""Graphs under construction, and the rules that a graph keeps.

A builder infers types and keeps names unique. ``verify`` runs after build, after parse and after every pass.

Every value is defined once, and its name is valid in C. Every use follows its definition and has its type. Each
equation has the type that its op's rule gives. Every result is defined. No parameter or result varies along S, and all
segments of a graph have one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lngen.compiler.ir.axes import BASES, Axis, Derivation, axes_union
from lngen.compiler.ir.functions import FUNCTIONS
from lngen.compiler.ir.indices import Indices
from lngen.compiler.ir.names import fresh, is_graph_name, is_name
from lngen.compiler.ir.ops import OPS
from lngen.compiler.ir.types import (
    ORDERS,
    Attr,
    ByValue,
    Eqn,
    Graph,
    Type,
    Value,
    derived_axes,
    is_over_segments,
    is_segment_size,
    is_segment_sum,
    print_eqn,
    print_param,
)
from lngen.dtypes import DType
from lngen.errors import VerifyError, short
from lngen.rules import RULES

# Versions of what fixes bits, by the key of a spec and the attribute of a graph that name one; the default first.
VERSIONS = {"order": ORDERS, "functions": FUNCTIONS}

# ---- construction ----


def derived(name: str, base: str, by: str, number: int | str, each: int = 1) -> Axis:
    """An axis of that name; ValueError for a name that no axis may have, another base, or no number."""
    if not is_name(name) or name in BASES:
        raise ValueError(f"a name of letters and digits other than M and D is expected, got '{short(name)}'")
    if base not in BASES:
        raise ValueError(f"an axis is expected to be derived from M or D, got '{short(base)}'")
    whole = isinstance(number, int) and not isinstance(number, bool) and number >= 1
    if by == "@" and (base != "M" or not isinstance(number, str) or each != 1):
        raise ValueError(f"a table's rows are M @ name, got {Derivation(Axis(base), by, number, each)}")
    if each != 1 and not (base == "D" and by == "%" and whole and isinstance(each, int) and 0 < each <= int(number)):
        raise ValueError(
            f"neighbours are one element of D % number alone, got {Derivation(Axis(base), by, number, each)}"
        )
    if each != 1 and int(number) % each:
        raise ValueError(f"{each} neighbours are one of {number} elements that repeat, which they do not divide")
    if not whole and not (base == "M" and isinstance(number, str) and is_name(number)):
        named = ", or a name" if base == "M" else ""
        raise ValueError(f"a whole number from 1{named} is expected, got {short(repr(number))}")
    return Axis(name, Axis(base), by, number, each)


@dataclass(frozen=True)
class Unnamed(Value):
    """The result of equation ``number`` of a builder, not equal to any other value; its name is a proposal."""

    number: int


Unnamed.__name__ = "Value"  # for the messages of Python


class Builder(Indices):
    """A graph under construction."""

    def __init__(
        self,
        name: str,
        *,
        params: tuple[Value, ...] = (),
        eqns: tuple[Eqn, ...] = (),
        taken: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.params: list[Value] = list(params)
        self.eqns: list[Eqn] = list(eqns)
        self.results: list[Value] = []
        axes = (a for v in (*params, *(e.out for e in eqns)) for a in v.type.axes)
        self.axes = {a.name: a for a in axes if a.is_declared}
        self._names = {*taken, *(v.name for v in params), *(e.out.name for e in eqns)}

    def axis(self, name: str, of: Derivation) -> Axis:
        """An axis that the graph derives from M or D, such as ``b.axis("N", M / "n")``, ``b.axis("B", D / 128)``.

        Rows belong to samples, n neighbouring ones to each; features to blocks of 128. ``M % 8`` derives heads: row m
        belongs to head m % 8. ``D % 64 / 2`` are pairs that repeat, ``M @ "p"`` the rows of a table. VerifyError for a
        name that is taken, or a number that is none.
        """
        if not isinstance(of, Derivation):
            raise VerifyError(
                f"graph @{self.name}: axis '{short(str(name))}' is expected to be derived from M or D, such as "
                f"D / 128 or M % 8, got {short(repr(of))}."
            )
        try:
            axis = derived(name, str(of.base), of.by, of.number, of.each)
        except ValueError as e:
            raise VerifyError(f"graph @{self.name}: axis '{short(str(name))}': {e}.") from e
        if self.axes.setdefault(name, axis) is not axis:
            raise VerifyError(f"graph @{self.name}: axis '{name}' is {self.axes[name].declaration} already.")
        return axis

    def param(self, name: str, dtype: DType, *axes: Axis) -> Value:
        """A new parameter; VerifyError if it cannot have exactly that name, or for axes that no type has."""
        self.reserve(name, "an input")
        for a in axes:
            if isinstance(a, Axis) and a.base is not None and self.axes.get(a.name) is not a:
                raise VerifyError(
                    f"graph @{self.name}: '{name}' has the axis {a.declaration}, which this graph does not declare; "
                    f'write b.axis("{a.name}", {Derivation(a.base, a.by, repr(a.number), a.each)}).'
                )
        if not all(isinstance(a, Axis) for a in axes) or axes != axes_union(axes):
            got = ", ".join(str(a) if isinstance(a, Axis) else short(repr(a)) for a in axes)
            several = all(isinstance(a, Axis) for a in axes) and any(a.base for a in axes)
            raise VerifyError(
                f"graph @{self.name}: '{name}' expects some of the axes lngen.M, lngen.D, in this order, got {got}"
                f"{': at most one of M, or derived from it, and one of D' if several else ''}."
            )
        value = Value(name, Type(dtype, axes))
        self.params.append(value)
        return value

    def by_value(self, name: str, dtype: DType, rule: str) -> Value:
        """A parameter that a launch passes by value, by a rule of ``RULES``; the same for a rule that has one already.

        ``name`` gets a suffix if it is taken.
        """
        for known in self.params:
            if isinstance(known, ByValue) and (known.rule, known.type.dtype) == (rule, dtype):
                return known
        self._check(name, "a value")
        value = ByValue(fresh(name, self._names), Type(dtype), rule)
        self._names.add(value.name)
        self.params.append(value)
        return value

    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation; ``name`` gets a suffix if it is taken or reserved."""
        typ = self._type(op, args, attrs)
        self._check(name, "a value")
        out = Value(fresh(name, self._names), typ)
        self._names.add(out.name)
        return self._define(out, op, args, attrs)

    def _type(self, op: str, args: tuple[Value, ...], attrs: Mapping[str, Attr]) -> Type:
        """The type of the result; VerifyError for operands or attributes that the op does not take."""
        for arg in args:
            self._value(arg, f"an operand of '{op}'")
        try:
            return OPS[op].typ(tuple(a.type for a in args), tuple(sorted(attrs.items())))
        except ValueError as e:
            text = ", ".join(f"{a}: {a.type}" for a in args)
            raise VerifyError(f"graph @{self.name}: '{op} {text}': {e}.") from e

    def propose(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation whose value gets a name later, such as ``name``."""
        return self._define(Unnamed(name, self._type(op, args, attrs), len(self.eqns)), op, args, attrs)

    def _define(self, out: Value, op: str, args: tuple[Value, ...], attrs: Mapping[str, Attr]) -> Value:
        self.eqns.append(Eqn(out, op, args, tuple(sorted(attrs.items()))))
        return out

    def _value(self, x: object, what: str) -> None:
        """VerifyError, which says ``what`` it is, if ``x`` is no value."""
        if not isinstance(x, Value):
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be a value, got {type(x).__name__}; make it an input, or "
                "a constant with b.number(name, value)."
            )

    def exactly(self, name: str, what: str) -> str:
        """``name``, unchanged, for the next value; VerifyError, which names ``what`` requires it, if it is taken."""
        self._check(name, what)
        if name in self._names:
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be called '{name}', but another value is; rename one of "
                "them."
            )
        return name

    def _check(self, name: str, what: str) -> None:
        if not is_name(name):
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be called by words of letters and digits, one "
                f"underscore between two, got {name!r}."
            )

    def is_free(self, name: str) -> bool:
        """True if no value has that name."""
        return name not in self._names

    def reserve(self, name: str, what: str) -> None:
        """Keeps ``name`` for a value that is still to come; VerifyError as of ``exactly``."""
        self._names.add(self.exactly(name, what))

    def build(self, *results: Value, stage: str = "build") -> Graph:
        """The verified graph."""
        return verify(Graph(self.name, tuple(self.params), tuple(self.eqns), results), stage)


class Draft(Builder):
    """A graph whose values get their names when it is written into another."""

    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation, whose value proposes ``name``."""
        return self.propose(op, name, args, **attrs)


# ---- verification ----


def verify(graph: Graph, stage: str) -> Graph:
    """``graph`` itself, or a VerifyError that names the stage, the equation and the rule."""
    known: dict[str, Value] = {}
    if not is_graph_name(graph.name):
        raise VerifyError(f"graph @{graph.name} needs a lower-case name of letters, digits and _, for its kernels.")
    _check_attrs(graph, stage)
    for value in (*graph.params, *graph.results):
        if is_over_segments(value):
            raise VerifyError(
                _message(graph, stage, f"'{value}: {value.type}' varies along S, which no input or result does")
            )
    for value in graph.params:
        if value.type.by_columns:
            raise VerifyError(
                _message(graph, stage, f"input '{value}: {value.type}' is stored by columns, as only results are")
            )
        _check_by_value(graph, stage, value)
        _define(graph, stage, known, value, f"parameter '{value}'")
    for number, eqn in enumerate(graph.eqns):
        problem = _problem(eqn, known)
        if problem:
            raise VerifyError(_message(graph, stage, f"equation {number}: {problem}", print_eqn(eqn)))
        _define(graph, stage, known, eqn.out, f"equation {number}: '{eqn.out}'")
    _one_segment(graph, stage)
    for axis in derived_axes(graph):
        if isinstance(axis.number, str) and all(axis not in p.type.axes for p in graph.params):
            what = f"no input has the axis {axis.declaration}, whose length the shape of an input says"
            raise VerifyError(_message(graph, stage, what))
    for result in graph.results:
        if known.get(result.name) != result:
            raise VerifyError(_message(graph, stage, f"result '{result}: {result.type}' is not defined"))
    if len(set(graph.results)) != len(graph.results):
        raise VerifyError(_message(graph, stage, "a value is returned twice"))
    return graph


def _check_by_value(graph: Graph, stage: str, value: Value) -> None:
    """A parameter that is passed by value is one f32 or f64 number, by a rule that lngen has."""
    if not isinstance(value, ByValue):
        return
    if value.type.axes or not value.type.dtype.arithmetic:
        what = f"'{print_param(value)}' is expected to be f32[] or f64[], as it is passed by value"
        raise VerifyError(_message(graph, stage, what))
    if value.rule not in RULES:
        what = f"'{print_param(value)}': there is no rule '{value.rule}', expected one of {', '.join(RULES)}"
        raise VerifyError(_message(graph, stage, what))


def _check_attrs(graph: Graph, stage: str) -> None:
    """The attributes of a graph are versions, and names of results that are another result, ``%name``."""
    results = {str(r) for r in graph.results}
    for key, value in graph.attrs:
        if key in VERSIONS:
            if value not in VERSIONS[key]:
                what = f"there is no {key} '{value}'; the versions are {', '.join(VERSIONS[key])}"
                raise VerifyError(_message(graph, stage, what))
        elif not isinstance(value, str) or not value.startswith("%"):
            known = f"{', '.join(VERSIONS)}, and results that are another, dz=%dx"
            what = f"a graph has no attribute '{key}'; its attributes are {known}"
            raise VerifyError(_message(graph, stage, what))
        elif value not in results or key in graph.values():
            what = f"'{key}={value}' is expected to name a result that is another result, such as dz=%dx"
            raise VerifyError(_message(graph, stage, what))


def _one_segment(graph: Graph, stage: str) -> None:
    """All values along S have segments of one length."""
    first: Eqn | None = None
    for number, eqn in enumerate(graph.eqns):
        if is_segment_sum(eqn) or is_segment_size(eqn):
            first = first or eqn
            wanted, found = (dict(e.attrs).get("segment") for e in (first, eqn))
            if found != wanted:
                problem = f"equation {number}: segment={wanted} is expected, as of '{first.out}', got {found}"
                raise VerifyError(_message(graph, stage, problem, print_eqn(eqn)))


def _define(graph: Graph, stage: str, known: dict[str, Value], value: Value, where: str) -> None:
    if value.name in known:
        raise VerifyError(_message(graph, stage, f"{where} is defined twice"))
    if not is_name(value.name):
        raise VerifyError(
            _message(graph, stage, f"{where} needs a name of letters and digits, one underscore between two words")
        )
    known[value.name] = value


def _problem(eqn: Eqn, known: dict[str, Value]) -> str | None:
    op = OPS.get(eqn.op)
    if op is None:
        return f"there is no op '{eqn.op}'; the ops are {', '.join(OPS)}"
    if len(eqn.args) != op.arity:
        return f"'{eqn.op}' takes {op.arity} operands, got {len(eqn.args)}"
    for arg in eqn.args:
        if arg.name not in known:
            return f"'{arg}' is used before it is defined"
        if known[arg.name].type != arg.type:
            return f"'{arg}' is used as {arg.type} but defined as {known[arg.name].type}"
    for key, _ in eqn.attrs:
        if key not in op.attrs:
            return f"'{eqn.op}' has no attribute '{key}'; its attributes are {', '.join(op.attrs) or 'none'}"
    try:
        expected = op.typ(tuple(a.type for a in eqn.args), eqn.attrs)
    except ValueError as e:
        return str(e)
    return None if expected == eqn.out.type else f"the result is {expected}, not {eqn.out.type}"


def _message(graph: Graph, stage: str, problem: str, eqn: str = "") -> str:
    return f"graph @{graph.name} is malformed after '{stage}': {problem}." + (f"\n    {short(eqn)}" if eqn else "")
