"""Every op as a method, one line per op, so that a graph reads like its text."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lngen.ir.types import Attr, Axis, DType, Value


class Methods(ABC):
    """Every op is a method that takes the name of its result first and returns the new value.

    The op table and its derivatives are written with these methods; ``lngen.ir.builder`` adds them to a graph.
    """

    @abstractmethod
    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation; ``name`` gets a suffix if it is taken or reserved."""

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

    def segment_sum(self, name: str, x: Value) -> Value:
        """The sum of each segment along D: [M, D] -> [M, S]."""
        return self.emit("segment_sum", name, (x,))

    def segment_dot(self, name: str, a: Value, b: Value) -> Value:
        """The sum of a * b of each segment along D, each product rounded together with its addition."""
        return self.emit("segment_dot", name, (a, b))

    def segment_size(self, name: str, dtype: DType) -> Value:
        """The number of elements of each segment along D: [S]."""
        return self.emit("segment_size", name, (), dtype=dtype)

    def reduce_mean(self, name: str, x: Value, *, axis: Axis) -> Value:
        """The sum over an axis divided by its length."""
        return self.emit("reduce_mean", name, (x,), axis=axis)

    def reduce_max(self, name: str, x: Value, *, axis: Axis) -> Value:
        """The largest element along D or M, a NaN if there is one; equal maxima share its cotangent equally."""
        return self.emit("reduce_max", name, (x,), axis=axis)

    def maximum(self, name: str, a: Value, b: Value) -> Value:
        """The larger one, a NaN if either is one; equal operands share the cotangent equally.

        For ``maximum(x, 0)`` half of the cotangent goes to x where x = 0, for ``relu`` none.
        """
        return self.emit("maximum", name, (a, b))

    def relu(self, name: str, x: Value) -> Value:
        """x where x > 0, a NaN where x is one, else 0; the cotangent passes only where x > 0."""
        return self.emit("relu", name, (x,))

    def select_gt(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """c where a is greater than b, else 0."""
        return self.emit("select_gt", name, (a, b, c))

    def select_eq(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """c where a equals b, else 0."""
        return self.emit("select_eq", name, (a, b, c))

    def where_gt(self, name: str, a: Value, b: Value, c: Value, d: Value) -> Value:
        """c where a is greater than b, else d, also where a or b is a NaN."""
        return self.emit("where_gt", name, (a, b, c, d))

    def minimum(self, name: str, a: Value, b: Value) -> Value:
        """The smaller one, a NaN if either is one; equal operands share the cotangent equally."""
        return self.emit("minimum", name, (a, b))

    def clamp(self, name: str, x: Value, *, low: float, high: float) -> Value:
        """x, but ``low`` below it and ``high`` above it; the cotangent passes where low <= x <= high."""
        return self.emit("clamp", name, (x,), low=float(low), high=float(high))

    def abs(self, name: str, x: Value) -> Value:
        """|x|; no cotangent passes at 0."""
        return self.emit("abs", name, (x,))

    def rint(self, name: str, x: Value) -> Value:
        """The nearest whole number, of two the even one; no cotangent passes."""
        return self.emit("rint", name, (x,))

    def detach(self, name: str, x: Value) -> Value:
        """x, through which no cotangent passes."""
        return self.emit("detach", name, (x,))

    def exp(self, name: str, x: Value) -> Value:
        """e^x, in f32."""
        return self.emit("exp", name, (x,))

    def exp2(self, name: str, x: Value) -> Value:
        """2^x, in f32."""
        return self.emit("exp2", name, (x,))

    def log(self, name: str, x: Value) -> Value:
        """The natural logarithm, in f32."""
        return self.emit("log", name, (x,))

    def tanh(self, name: str, x: Value) -> Value:
        """The hyperbolic tangent, in f32."""
        return self.emit("tanh", name, (x,))

    def sigmoid(self, name: str, x: Value) -> Value:
        """1 / (1 + e^-x), in f32."""
        return self.emit("sigmoid", name, (x,))

    def softplus(self, name: str, x: Value) -> Value:
        """log(1 + e^x), in f32."""
        return self.emit("softplus", name, (x,))

    def erf(self, name: str, x: Value) -> Value:
        """The error function, in f32."""
        return self.emit("erf", name, (x,))

    def normal_cdf(self, name: str, x: Value) -> Value:
        """Phi(x), the cumulative distribution function of the normal distribution, in f32."""
        return self.emit("normal_cdf", name, (x,))

    def gelu(self, name: str, x: Value) -> Value:
        """x Phi(x) (Hendrycks and Gimpel, 2016), in f32."""
        return self.emit("gelu", name, (x,))

    def gelu_tanh(self, name: str, x: Value) -> Value:
        """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, the approximation of gelu, in f32."""
        return self.emit("gelu_tanh", name, (x,))

    def silu(self, name: str, x: Value) -> Value:
        """x sigmoid(x), in f32."""
        return self.emit("silu", name, (x,))

    def copysign(self, name: str, a: Value, b: Value) -> Value:
        """|a| with the sign of b."""
        return self.emit("copysign", name, (a, b))

    def exp2_biased(self, name: str, x: Value) -> Value:
        """2^n for x = n + 1.5 * 2^23 + 127, n whole from -126 to 127."""
        return self.emit("exp2_biased", name, (x,))

    def exponent(self, name: str, x: Value) -> Value:
        """The whole number k with x / 2^k in [2/3, 4/3), of a positive normal x."""
        return self.emit("exponent", name, (x,))

    def reciprocal_guess(self, name: str, x: Value) -> Value:
        """1 / x to within 5.1 percent, for x from 2^-126 to 1.89 * 2^125."""
        return self.emit("reciprocal_guess", name, (x,))

    def significand(self, name: str, x: Value) -> Value:
        """x / 2^k in [2/3, 4/3), of a positive normal x."""
        return self.emit("significand", name, (x,))
