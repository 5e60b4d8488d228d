"""Builds a graph equation by equation: types are inferred, names kept unique."""

from __future__ import annotations

from collections.abc import Iterable

from lngen.errors import VerifyError
from lngen.ir import names
from lngen.ir.ops import OPS
from lngen.ir.types import Attr, Axis, DType, Eqn, Graph, Type, Value
from lngen.ir.verify import verify


class Builder:
    """Every op is a method that takes the name of its result first and returns the new value."""

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
        """A new parameter; VerifyError if it cannot have exactly that name."""
        self._names.add(self.exactly(name, "an input"))
        value = Value(name, Type(dtype, tuple(a for a in Axis if a in axes)))
        self.params.append(value)
        return value

    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation; ``name`` gets a suffix if it is taken or reserved."""
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

    def exactly(self, name: str, what: str) -> str:
        """``name``, which the next value will have as it is; VerifyError, naming ``what`` asks for it, if none can."""
        self._check(name, what)
        if name in self._names:
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be called '{name}', but another value is; rename one of "
                "them."
            )
        if names.is_reserved(name):
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be called '{name}', a name that C and the kernels need; "
                "choose another."
            )
        return name

    def _check(self, name: str, what: str) -> None:
        if not names.is_name(name):
            raise VerifyError(
                f"graph @{self.name}: {what} is expected to be called by lower-case words of letters and digits, one "
                f"underscore between two, got {name!r}."
            )

    def build(self, *results: Value, stage: str = "build") -> Graph:
        """The verified graph."""
        return verify(Graph(self.name, tuple(self.params), tuple(self.eqns), results), stage)

    # One line per op, so that a graph reads like its text.

    def const(self, name: str, value: float, dtype: DType) -> Value:
        """A constant of no axes."""
        return self.emit("const", name, (), value=float(value), dtype=dtype)

    def size(self, name: str, axis: Axis, dtype: DType) -> Value:
        """The length of an axis, as a number."""
        return self.emit("size", name, (), axis=axis, dtype=dtype)

    def cast(self, name: str, x: Value, *, to: DType) -> Value:
        """x rounded to ``to``."""
        return self.emit("cast", name, (x,), to=to)

    def expand(self, name: str, x: Value, *, axis: Axis) -> Value:
        """x, repeated along an axis it lacks."""
        return self.emit("expand", name, (x,), axis=axis)

    def neg(self, name: str, x: Value) -> Value:
        """-x."""
        return self.emit("neg", name, (x,))

    def add(self, name: str, a: Value, b: Value) -> Value:
        """a + b."""
        return self.emit("add", name, (a, b))

    def sub(self, name: str, a: Value, b: Value) -> Value:
        """a - b."""
        return self.emit("sub", name, (a, b))

    def mul(self, name: str, a: Value, b: Value) -> Value:
        """a * b."""
        return self.emit("mul", name, (a, b))

    def div(self, name: str, a: Value, b: Value) -> Value:
        """a / b, correctly rounded."""
        return self.emit("div", name, (a, b))

    def fma(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.emit("fma", name, (a, b, c))

    def sqrt(self, name: str, x: Value) -> Value:
        """The square root, correctly rounded."""
        return self.emit("sqrt", name, (x,))

    def rsqrt(self, name: str, x: Value) -> Value:
        """1 / sqrt(x), two correctly rounded steps."""
        return self.emit("rsqrt", name, (x,))

    def reduce_sum(self, name: str, x: Value, *, axis: Axis) -> Value:
        """The sum over an axis."""
        return self.emit("reduce_sum", name, (x,), axis=axis)

    def reduce_dot(self, name: str, a: Value, b: Value, *, axis: Axis) -> Value:
        """The sum of a * b over an axis, each product rounded together with its addition."""
        return self.emit("reduce_dot", name, (a, b), axis=axis)

    def reduce_spread(self, name: str, x: Value, *, axis: Axis) -> Value:
        """The sum of the squares of the distances from the mean over D."""
        return self.emit("reduce_spread", name, (x,), axis=axis)

    def segment_mean(self, name: str, x: Value, *, axis: Axis) -> Value:
        """About the mean of each element's segment along D."""
        return self.emit("segment_mean", name, (x,), axis=axis)

    def reduce_mean(self, name: str, x: Value, *, axis: Axis) -> Value:
        """The sum over an axis divided by its length."""
        return self.emit("reduce_mean", name, (x,), axis=axis)

    def reduce_max(self, name: str, x: Value, *, axis: Axis) -> Value:
        """The largest element along D, a NaN if there is one; elements as large share its cotangent equally."""
        return self.emit("reduce_max", name, (x,), axis=axis)

    def maximum(self, name: str, a: Value, b: Value) -> Value:
        """The larger one, a NaN if either is one; operands as large share the cotangent equally.

        Of ``maximum(x, 0)`` half of the cotangent goes to x where x = 0: ``relu`` passes none there.
        """
        return self.emit("maximum", name, (a, b))

    def relu(self, name: str, x: Value) -> Value:
        """x where x > 0, a NaN where it is one, else 0; the cotangent passes where x > 0 only."""
        return self.emit("relu", name, (x,))

    def select_gt(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """c where a is greater than b, else 0."""
        return self.emit("select_gt", name, (a, b, c))

    def select_eq(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """c where a equals b, else 0."""
        return self.emit("select_eq", name, (a, b, c))
