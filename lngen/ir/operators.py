"""Arithmetic on values, ``x * rstd`` for ``b.mul("mul", x, rstd)``, while a graph is described."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from lngen.errors import VerifyError


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


class Operators:
    """The operators of a value. A number is a constant in the dtype of the other operand.

    VerifyError outside the description of a graph, or for an operand that is neither a value nor a number.
    """

    def __add__(self, other: Self | float) -> Self:
        return self._record("add", self, other)

    def __radd__(self, other: float) -> Self:
        return self._record("add", other, self)

    def __sub__(self, other: Self | float) -> Self:
        return self._record("sub", self, other)

    def __rsub__(self, other: float) -> Self:
        return self._record("sub", other, self)

    def __mul__(self, other: Self | float) -> Self:
        return self._record("mul", self, other)

    def __rmul__(self, other: float) -> Self:
        return self._record("mul", other, self)

    def __truediv__(self, other: Self | float) -> Self:
        return self._record("div", self, other)

    def __rtruediv__(self, other: float) -> Self:
        return self._record("div", other, self)

    def __pow__(self, exponent: float) -> Self:
        return self * self if isinstance(exponent, int | float) and exponent == 2 else NotImplemented

    def __neg__(self) -> Self:
        return self._record("neg", self)

    def __abs__(self) -> Self:
        return self.abs()

    def sqrt(self) -> Self:
        """The square root, correctly rounded."""
        return self._record("sqrt", self)

    def rsqrt(self) -> Self:
        """1 / sqrt(x), two correctly rounded steps."""
        return self._record("rsqrt", self)

    def relu(self) -> Self:
        """x where x > 0, a NaN where x is one, else 0; the cotangent passes only where x > 0."""
        return self._record("relu", self)

    def maximum(self, other: Self | float) -> Self:
        """The larger one, a NaN if either is one; equal operands share the cotangent equally."""
        return self._record("maximum", self, other)

    def minimum(self, other: Self | float) -> Self:
        """The smaller one, a NaN if either is one; equal operands share the cotangent equally."""
        return self._record("minimum", self, other)

    def clamp(self, low: float, high: float) -> Self:
        """x, but ``low`` below it and ``high`` above it; the cotangent passes where low <= x <= high."""
        return self._record("clamp", self, low=float(low), high=float(high))

    def abs(self) -> Self:
        """|x|; no cotangent passes at 0."""
        return self._record("abs", self)

    def rint(self) -> Self:
        """The nearest whole number, of two the even one; no cotangent passes."""
        return self._record("rint", self)

    def detach(self) -> Self:
        """x, through which no cotangent passes."""
        return self._record("detach", self)

    def exp(self) -> Self:
        """e^x, in f32."""
        return self._record("exp", self)

    def exp2(self) -> Self:
        """2^x, in f32."""
        return self._record("exp2", self)

    def log(self) -> Self:
        """The natural logarithm, in f32."""
        return self._record("log", self)

    def tanh(self) -> Self:
        """The hyperbolic tangent, in f32."""
        return self._record("tanh", self)

    def sigmoid(self) -> Self:
        """1 / (1 + e^-x), in f32."""
        return self._record("sigmoid", self)

    def softplus(self) -> Self:
        """log(1 + e^x), in f32."""
        return self._record("softplus", self)

    def erf(self) -> Self:
        """The error function, in f32."""
        return self._record("erf", self)

    def gelu(self) -> Self:
        """x Phi(x) (Hendrycks and Gimpel, 2016), in f32."""
        return self._record("gelu", self)

    def gelu_tanh(self) -> Self:
        """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, the approximation of gelu, in f32."""
        return self._record("gelu_tanh", self)

    def silu(self) -> Self:
        """x sigmoid(x), in f32."""
        return self._record("silu", self)

    def _record(self, op: str, *operands: object, **attrs: float) -> Self:
        recorder = _current.get()
        if recorder is None:
            raise VerifyError(
                f"'{self} ...' is expected in a function that describes a graph, where an operator adds the equation "
                f"'{op}'; give the function to lngen.compile, or use the methods of a Builder."
            )
        found: Self = recorder.record(op, *operands, **attrs)
        return found
