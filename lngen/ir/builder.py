"""Builds a graph equation by equation: types are inferred, names kept unique."""

from __future__ import annotations

from collections.abc import Iterable

from lngen.errors import VerifyError, short
from lngen.ir import names
from lngen.ir.methods import Methods
from lngen.ir.ops import OPS
from lngen.ir.types import Attr, Axis, DType, Eqn, Graph, Type, Value, axes_union
from lngen.ir.verify import verify


class Builder(Methods):
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
        self._names = {*taken, *(v.name for v in params), *(e.out.name for e in eqns)}

    def param(self, name: str, dtype: DType, *axes: Axis) -> Value:
        """A new parameter; VerifyError if it cannot have exactly that name, or for axes that no type has."""
        self._names.add(self.exactly(name, "an input"))
        if not all(isinstance(a, Axis) for a in axes) or axes != axes_union(axes):
            got = ", ".join(str(a) if isinstance(a, Axis) else short(repr(a)) for a in axes)
            raise VerifyError(
                f"graph @{self.name}: '{name}' expects some of the axes lngen.M, lngen.D, in this order, got {got}."
            )
        value = Value(name, Type(dtype, axes))
        self.params.append(value)
        return value

    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation; ``name`` gets a suffix if it is taken or reserved."""
        for arg in args:
            self._value(arg, f"an operand of '{op}'")
        sorted_attrs = tuple(sorted(attrs.items()))
        try:
            typ = OPS[op].typ(tuple(a.type for a in args), sorted_attrs)
        except ValueError as e:
            text = ", ".join(f"{a}: {a.type}" for a in args)
            raise VerifyError(f"graph @{self.name}: '{op} {text}': {e}.") from e
        self._check(name, "a value")
        out = Value(names.fresh(name, self._names), typ)
        self._names.add(out.name)
        self.eqns.append(Eqn(out, op, args, sorted_attrs))
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
        if not names.is_name(name):
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be called by words of letters and digits, one "
                f"underscore between two, got {name!r}."
            )

    def build(self, *results: Value, stage: str = "build") -> Graph:
        """The verified graph."""
        return verify(Graph(self.name, tuple(self.params), tuple(self.eqns), results), stage)
