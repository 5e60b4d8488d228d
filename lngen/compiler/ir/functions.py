"""The op table's rows of functions: exp, log, tanh and their relatives, as equations in f32 with their derivatives.

The equations are the definition: the interpreter evaluates them, kernels compute them, and both have the same bits.
``ULPS`` bounds their error in units in the last place of the exact result, 2^-149 for subnormal ones;
``tests/compiler/ir/test_functions.py`` compares with float64. A NaN gives a NaN. The coefficients are those of minimax
polynomials: iteratively reweighted least squares at 2000 Chebyshev nodes, targets by mpmath. They are rounded to f32
one after the other, the lowest power first. After each rounding the rest is fitted again.

Every function is monotone but gelu, gelu_tanh and silu, which have a minimum, and decay. ``decay`` is exp for numbers
that are not above 0. It takes 11 instructions, 10 where a sum takes its last product, and exp takes 17. No result is an
infinity, and one below 2^-126 may be 0. Its polynomial has a power less than that of exp, and its bound is 2.5 in place
of 2. At one pair of neighbours in 100,000 decay falls by a unit in the last place.

The equations have a version, ``functions=v1`` of a spec. Those of the op table are v1; ``EXPANSIONS`` has what another
version replaces. Bounds and promises are the same in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from lngen.compiler.ir import real, type_rules
from lngen.compiler.ir.names import of_number
from lngen.compiler.ir.ops import Expansion, Method, Ops, RealMeaning, TypeRule, op
from lngen.compiler.ir.types import F32, Eqn, Value

# The largest errors, rounded up. gelu_tanh has 3 more for each unit of its sigmoid's argument. The sigmoid is 0 below
# -87.25: an error of 1.3e-38, times x in silu and gelu_tanh. Products of x and a subnormal factor (gelu below -13) may
# be off by 2^-142, if that is more.
ULPS: dict[str, float] = {
    "exp": 2.0, "decay": 2.5, "exp2": 2.0, "log": 1.5, "tanh": 2.0, "sigmoid": 2.75, "softplus": 2.5, "erf": 1.25,
    "normal_cdf": 6.5, "gelu": 7.0, "gelu_tanh": 3.0, "silu": 3.0,
}  # fmt: skip

# t = n + BIAS has n + 127 in its low bits, which ``exp2_biased`` moves into the exponent: 2^n. The addition also rounds
# numbers below 2^22 to whole ones.
BIAS = 1.5 * 2**23 + 127

# 1.5 * 2^23 has few bits, so that its product with a factor of few bits is exact: ``exp2_whole`` adds the 127.
WHOLE = 1.5 * 2**23

_EXP_HALVES = ("0x1.715476p-1", "-0x1.62e400p+0", "-0x1.7f7d1cp-19")  # log2(e) / 2; -2 ln 2 in two parts
# log2(e) / 2; 1687/1024, and the float next to -2 ln 2 / (1687/1024), whose relative error is 2^-33.8. Of factors of 11
# bits this one has the least error.
_EXP_STEPS = ("0x1.715476p-1", "0x1.a5cp+0", "-0x1.aed596p-1")
_EXP_STEP = ("0x1.715476p+0", "0x1.a5cp-1", "-0x1.aed596p-1")  # the same for a period of ln 2
# (e^r - 1 - r) / r^2 on [-ln 2, ln 2], relative error of e^r below 2^-26.
_EXP = ("0x1.9baec2p-13", "0x1.71bf64p-10", "0x1.1126dap-7", "0x1.5549eep-5", "0x1.555514p-3", "0x1.00000cp-1")
# The same on [-log(2) / 2, log(2) / 2], relative error of e^r below 2^-28.
_EXP_NARROW = ("0x1.6a4d60p-10", "0x1.12398ep-7", "0x1.5558b0p-5", "0x1.555492p-3", "0x1.fffffcp-2")
# The same with a power less, on [-log(2) / 2, log(2) / 2]: below 2^-23.
_EXP_SHORT = ("0x1.1064c8p-7", "0x1.572a0ep-5", "0x1.5557aap-3", "0x1.fffdfcp-2")
_EXP_WHOLE = ("0x1.715476p+0", "-0x1.62e400p-1", "-0x1.7f7d1cp-20")  # log2(e); -ln 2 in two parts
# (e^(2 r) - 1 - 2 r) / (2 r^2) on [-log(2) / 4, log(2) / 4], relative error of e^(2 r) below 2^-28.
_EXP_TWICE = ("0x1.6a4d60p-5", "0x1.12398ep-3", "0x1.5558b0p-2", "0x1.555492p-1", "0x1.fffffcp-1")
# 1 / (1 - h) in h^3, h and 1 on [0, 1/2], relative error 0.0017: (1 - T4(4 h - 1) / T4(3)) / (1 - h) has no square.
_RECIPROCAL = ("0x1.c65286p+1", "0x1.1bf394p+0", "0x1.ff1cd6p-1")
# (log(1 + f) - f) / f^2 on [-1/3, 1/3], relative error of log(1 + f) below 2^-27.
_LOG = (
    "-0x1.07c48cp-3", "0x1.1e6ccap-3", "-0x1.f332b8p-4", "0x1.1ed562p-3", "-0x1.559c66p-3", "0x1.99d050p-3",
    "-0x1.fffefap-3", "0x1.555506p-2", "-0x1p-1",
)  # fmt: skip
# (erf(x) - x) / x in x^2 for |x| <= 1, relative error of erf below 2^-29.
_ERF = (
    "0x1.4771fcp-14", "-0x1.a3515ep-11", "0x1.53f224p-8", "-0x1.b7f71ap-6", "0x1.ce2ce6p-4", "-0x1.81273ep-2",
    "0x1.06eba8p-3",
)  # fmt: skip
# log(erfc(x)) + x^2 on [1, 3.95], relative error of erf below 2^-28.
_ERFC = (
    "0x1.86dce4p-13", "-0x1.825ab4p-9", "0x1.65cb60p-6", "-0x1.a6533cp-4", "0x1.728a28p-2", "-0x1.2088eap+0",
    "-0x1.661cd8p-12",
)  # fmt: skip
# Phi(-t) e^(t^2 / 2) / (1 - v) in v = (t - 3.5) / (t + 3.5) for t in [0, 14.6], relative error below 2^-26. The
# variable is that of M. M. Shepherd and J. G. Laframboise, Chebyshev approximation of (1 + 2x) exp(x^2) erfc x,
# Math. Comp. 36, 1981.
_MILLS = (
    "0x1.0a5828p-16", "0x1.fd7548p-15", "-0x1.26cabcp-14", "-0x1.dc0736p-12", "0x1.e61e20p-11",
    "0x1.45f0d8p-9", "-0x1.0fa0f2p-6", "0x1.712326p-5", "-0x1.4aef38p-4", "0x1.b396fap-4",
)  # fmt: skip


# ---- equations and slopes ----


def _exp(b: Ops, e: Eqn) -> Value:
    """e^x; subnormal results are rounded once, above 88.73 infinity, below -103.98 zero."""
    return _power_of_e(b, _at_least(b, _at_most(b, e.args[0], 89.0), -104.0))


def _exp_v2(b: Ops, e: Eqn) -> Value:
    """The same in three instructions fewer: one clamp, one rounding of r = x - m log 4, and 1 is added as it is scaled.

    The period is a product of two numbers. The first has so few bits that m times it is exact, and it is chosen so that
    the second needs no low part.
    """
    r, whole = _in_steps(b, b.limited("near", e.args[0], _const(b, 104.0)), _EXP_STEPS)
    grown = _grown(b, r, _EXP)
    scale = b.exp2_whole("scale", whole)
    return b.mul("scaled", b.fma("scaled", grown, scale, scale), scale)


def _decay(b: Ops, e: Eqn) -> Value:
    """e^x for x up to 88, e^88 above; below -87.68 zero, where 2^n has no exponent any more.

    The result is a product, which ``place_fma`` leaves to a sum.
    """
    r, whole = _in_steps(b, b.limited("near", e.args[0], _const(b, 88.0)), _EXP_STEP)
    power = _horner(b, r, (*_EXP_SHORT, "0x1p0", "0x1p0"))
    return b.mul("scaled", power, b.exp2_whole("scale", whole))


def _in_steps(b: Ops, x: Value, reduction: Iterable[str]) -> tuple[Value, Value]:
    """r = x - m period, and m."""
    per_period, steps, step = (float.fromhex(c) for c in reduction)
    whole = b.fma("whole", x, _const(b, per_period), _const(b, WHOLE))
    taken = b.fma("steps", whole, _const(b, steps), _const(b, -WHOLE * steps))
    return b.fma("reduced", taken, _const(b, step), x), whole


def _exp2(b: Ops, e: Eqn) -> Value:
    """2^x, exact for whole x; from 128 on infinity, up to -150 zero."""
    x = _at_least(b, _at_most(b, e.args[0], 128.0), -150.0)
    biased = b.fma("biased", x, _const(b, 0.5), _const(b, BIAS))
    halves = b.sub("halves", biased, _const(b, BIAS))
    r = b.fma("reduced", halves, _const(b, -2.0), x)
    return _scaled_twice(b, _power(b, b.mul("natural", r, _const(b, math.log(2))), _EXP), biased)


def _log(b: Ops, e: Eqn) -> Value:
    """log x = k log 2 + log(m) with m = x / 2^k in [2/3, 4/3); of zero -infinity, of negative numbers a NaN."""
    x, zero = e.args[0], _const(b, 0.0)
    least = _const(b, 2.0**-126)
    normal = b.where_gt("normal", least, x, b.mul("raised", x, _const(b, 2.0**24)), x)
    shift = b.select_gt("shift", least, x, _const(b, -24.0))
    f = b.sub("fraction", b.significand("significand", normal), _const(b, 1.0))
    k = b.add("exponent", b.exponent("exponent", normal), shift)
    found = b.fma("log", k, _const(b, math.log(2)), _log1p(b, f))
    infinity = _const(b, math.inf)
    # -infinity at 0; infinity - infinity, a NaN, below.
    below = b.sub("below", b.select_gt("negative", zero, x, infinity), infinity)
    positive = b.where_gt("positive", x, zero, found, below)
    return b.where_gt("log", infinity, x, positive, x)


def _sigmoid(b: Ops, e: Eqn) -> Value:
    """1 / (1 + e^-x); 0 below -87.25, near where 1 + e^-x leaves the range of ``reciprocal``."""
    x, lowest = e.args[0], _const(b, -87.25)
    power, scale = _exp_parts(b, b.neg("minus", _at_most(b, x, 40.0)))
    ratio = reciprocal(b, b.fma("above", power, scale, _const(b, 1.0)))
    return b.where_gt("sigmoid", lowest, x, _const(b, 0.0), ratio)


def _tanh(b: Ops, e: Eqn) -> Value:
    """h / (1 - h) with h = (1 - e^-2|x|) / 2, where -2|x| = n log 2 + 2 r; odd to the bit.

    1 / (1 - h) is refined as in ``reciprocal``. The quotient is written as h + h (1 / (1 - h) - 1), which is monotone:
    the error of the second term is less than the last place of the first.
    """
    x, one, half, bias = e.args[0], _const(b, 1.0), _const(b, 0.5), _const(b, BIAS)
    size = _at_most(b, b.abs("size", x), 10.0)
    biased = b.fma("biased", size, _const(b, -2 / math.log(2)), bias)
    n = b.sub("whole", biased, bias)
    r = b.fma("reduced", n, _const(b, -math.log(2) / 2), b.neg("minus", size))
    grown = _grown(b, r, _EXP_TWICE)
    scale = b.exp2_biased("scale", biased)
    h = b.fma("half", b.neg("minus", grown), scale, b.fma("rest", scale, b.neg("minus", half), half))
    cubic, linear, constant = (_const(b, float.fromhex(c)) for c in _RECIPROCAL)
    guess = b.fma("guess", h, b.fma("guess", b.mul("square", h, h), cubic, linear), constant)
    below = b.sub("below", one, guess)
    rest = b.fma("rest", h, guess, below)
    more = b.fma("more", guess, b.fma("correction", rest, rest, rest), b.neg("minus", below))
    return b.copysign("tanh", b.fma("magnitude", h, more, h), x)


def _tanh_slope(b: Ops, e: Eqn) -> Value:
    square = b.mul("square", e.out, e.out)
    return b.sub("slope", _const(b, 1.0), square)


def _erf(b: Ops, e: Eqn) -> Value:
    """A polynomial up to 1, 1 - e^q(|x|) beyond, with q = log(erfc); odd to the bit."""
    x, one = e.args[0], _const(b, 1.0)
    size, square = b.abs("size", x), b.mul("square", x, x)
    near = b.fma("near", _horner(b, square, _ERF), size, size)
    tail = _at_most(b, size, 3.95)
    log = b.fma("log", b.neg("minus", tail), tail, _horner(b, tail, _ERFC))
    power, scale = _exp_parts(b, log)
    far = b.fma("far", b.neg("minus", power), scale, one)
    return b.copysign("erf", b.where_gt("magnitude", size, one, far, near), x)


def _erf_slope(b: Ops, e: Eqn) -> Value:
    power = b.emit("exp", "power", (b.neg("minus", b.mul("square", e.args[0], e.args[0])),))
    return b.mul("slope", power, _const(b, 2 / math.sqrt(math.pi)))


def _normal_cdf(b: Ops, e: Eqn) -> Value:
    """Phi(x) = erfc(-x / sqrt(2)) / 2: Phi(-|x|) by its ratio to e^(-x^2 / 2), and 1 - Phi(-|x|) above 0."""
    x, one = e.args[0], _const(b, 1.0)
    size = _at_most(b, b.abs("size", x), 15.0)
    centre = _const(b, 3.5)
    ratio = reciprocal(b, b.add("above", size, centre))
    v = b.mul("mapped", b.sub("below", size, centre), ratio)
    mills = b.mul("mills", _horner(b, v, _MILLS), b.sub("rest", one, v))
    below = _power_of_e(b, size, b.mul("halved", size, _const(b, -0.5)), mills)
    return b.where_gt("phi", x, _const(b, 0.0), b.sub("rest", one, below), below)


def _density(b: Ops, x: Value) -> Value:
    """The density of the normal distribution, the slope of ``normal_cdf``."""
    power = b.emit("exp", "power", (b.mul("halved", b.mul("square", x, x), _const(b, -0.5)),))
    return b.mul("density", power, _const(b, 1 / math.sqrt(2 * math.pi)))


def _softplus(b: Ops, e: Eqn) -> Value:
    """log(1 + e^x), and x above 18, where both are the same and the power would overflow."""
    x, one, bias = e.args[0], _const(b, 1.0), _const(b, BIAS)
    power = _power_of_e(b, _at_least(b, _at_most(b, x, 18.0), -104.0))
    # (1 + u) / 2^k - 1 without the error of 1 + u, which log(1 + u) = k log 2 + log(1 + f) would keep for small u
    k = b.exponent("exponent", b.add("above", one, power))
    scale = b.exp2_biased("scale", b.sub("biased", bias, k))
    f = b.fma("fraction", power, scale, b.sub("rest", scale, one))
    found = b.fma("log", k, _const(b, math.log(2)), _log1p(b, f))
    return b.where_gt("softplus", x, _const(b, 18.0), x, found)


def _gelu(b: Ops, e: Eqn) -> Value:
    """x Phi(x); of -infinity a NaN, the product of infinity and 0."""
    return b.mul("gelu", e.args[0], b.emit("normal_cdf", "phi", (e.args[0],)))


def _gelu_slope(b: Ops, e: Eqn) -> Value:
    x = e.args[0]
    return b.add("slope", b.emit("normal_cdf", "phi", (x,)), b.mul("part", x, _density(b, x)))


def _gelu_tanh(b: Ops, e: Eqn) -> Value:
    """x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3); of -infinity a NaN."""
    return b.mul("gelu", e.args[0], b.emit("sigmoid", "sigmoid", (_gelu_argument(b, e.args[0]),)))


def _gelu_tanh_ulps(x: real.Array) -> real.Array:
    return np.asarray(ULPS["gelu_tanh"] + 3 * np.abs(real.gelu_argument(x)))


def _gelu_tanh_slope(b: Ops, e: Eqn) -> Value:
    x = e.args[0]
    s = b.emit("sigmoid", "sigmoid", (_gelu_argument(b, x),))
    linear, cubic = _const(b, _GELU_LINEAR), _const(b, 3 * _GELU_CUBIC)
    inner = b.fma("inner", b.mul("square", x, x), cubic, linear)
    rest = b.mul("rest", e.out, b.sub("rest", _const(b, 1.0), s))
    return b.add("slope", s, b.mul("part", rest, inner))


def _silu(b: Ops, e: Eqn) -> Value:
    """x sigmoid(x); of -infinity a NaN, the product of infinity and 0."""
    return b.mul("silu", e.args[0], b.emit("sigmoid", "sigmoid", (e.args[0],)))


def _silu_slope(b: Ops, e: Eqn) -> Value:
    s = b.emit("sigmoid", "sigmoid", e.args)
    rest = b.sub("rest", _const(b, 1.0), s)
    return b.add("slope", s, b.mul("part", e.out, rest))


def _clamp(b: Ops, e: Eqn) -> Value:
    """x, but ``low`` below it and ``high`` above it."""
    low, high = (float(e.number_attr(key)) for key in ("low", "high"))
    return _at_most(b, _at_least(b, e.args[0], low), high)


def _clamp_slope(b: Ops, e: Eqn) -> Value:
    # x is its own clamp where low <= x <= high.
    return b.select_eq("slope", e.args[0], e.out, b.const("number", 1.0, e.out.type.dtype))


# ---- their parts ----

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = _GELU_LINEAR * 0.044715


def _gelu_argument(b: Ops, x: Value) -> Value:
    """2 u of ``gelu_tanh``."""
    square = b.mul("square", x, x)
    slope = b.fma("slope", square, _const(b, _GELU_CUBIC), _const(b, _GELU_LINEAR))
    return b.mul("argument", x, slope)


def _const(b: Ops, value: float) -> Value:
    return b.const(of_number(value), value, F32)


def _horner(b: Ops, x: Value, coefficients: Iterable[str]) -> Value:
    """The polynomial, highest power first, one fma a power."""
    first, *rest = (_const(b, float.fromhex(c)) for c in coefficients)
    for c in rest:
        first = b.fma("poly", first, x, c)
    return first


def _grown(b: Ops, r: Value, coefficients: Iterable[str]) -> Value:
    """e^r - 1, or another r + r^2 p(r), by the coefficients of the polynomial p."""
    return b.fma("grown", b.mul("square", r, r), _horner(b, r, coefficients), r)


def _at_least(b: Ops, x: Value, low: float) -> Value:
    """x, but ``low`` below it; a NaN stays one."""
    bound = b.const("low", low, x.type.dtype)
    return b.where_gt("raised", bound, x, bound, x)


def _at_most(b: Ops, x: Value, high: float) -> Value:
    """x, but ``high`` above it; a NaN stays one."""
    bound = b.const("high", high, x.type.dtype)
    return b.where_gt("lowered", x, bound, bound, x)


def _power_of_e(b: Ops, x: Value, by: Value | None = None, factor: Value | None = None) -> Value:
    """factor e^(x by) for products in [-120, 90]: 4^m e^r with r = x by - m log 4, |r| <= log 2; it rounds once."""
    biased, r = _reduced(b, x, _EXP_HALVES, by)
    p = _power(b, r, _EXP)
    return _scaled_twice(b, p if factor is None else b.mul("power", p, factor), biased)


def _exp_parts(b: Ops, x: Value) -> tuple[Value, Value]:
    """e^r and 2^n, whose product is e^x, for x in [-87, 88]: r = x - n log 2, |r| <= log(2) / 2.

    For other x the product is not e^x; a NaN gives a NaN.
    """
    biased, r = _reduced(b, x, _EXP_WHOLE)
    return _power(b, r, _EXP_NARROW), b.exp2_biased("scale", biased)


def _reduced(b: Ops, x: Value, parts: Iterable[str], by: Value | None = None) -> tuple[Value, Value]:
    """n + BIAS and the rest r of x, or of the product x by, after n periods; n is the nearest whole number.

    ``parts``: 1 / period, and the negative period in two parts. n has few digits, as has the first part, so that their
    product is exact and r has two roundings (W. J. Cody and W. Waite, Software Manual for the Elementary Functions,
    1980).
    """
    scale, high, low = (_const(b, float.fromhex(c)) for c in parts)
    product = x if by is None else b.mul("product", x, by)
    biased = b.fma("biased", product, scale, _const(b, BIAS))
    n = b.sub("whole", biased, _const(b, BIAS))
    near = b.fma("reduced", n, high, x) if by is None else b.fma("reduced", x, by, b.mul("multiple", n, high))
    return biased, b.fma("reduced", n, low, near)


def _power(b: Ops, r: Value, coefficients: Iterable[str]) -> Value:
    """e^r for |r| <= log 2 and ``_EXP``, or half of it and ``_EXP_NARROW``.

    r + r^2 q is monotone, because the rounding of r^2 q is finer than the steps of r.
    """
    grown = _grown(b, r, coefficients)
    return b.add("power", grown, _const(b, 1.0))


def reciprocal(b: Ops, x: Value) -> Value:
    """1 / x for x in [2^-126, 1.89 * 2^125], monotone, off by at most 0.6 units in the last place.

    A step whose error is quadratic, 0.0013, and one whose error is cubic (R. P. Brent and P. Zimmermann, Modern
    Computer Arithmetic, 2010, section 4.2). 2.0013 in place of 2 in the first halves the largest error.
    """
    minus, guess = b.neg("minus", x), b.reciprocal_guess("guess", x)
    near = b.mul("near", guess, b.fma("correction", minus, guess, _const(b, 2.0013)))
    rest = b.fma("rest", minus, near, _const(b, 1.0))
    return b.fma("reciprocal", near, b.fma("correction", rest, rest, rest), near)


def _scaled_twice(b: Ops, p: Value, biased: Value) -> Value:
    """p 4^m for ``biased`` = m + BIAS: the first product is exact, so that subnormal results are rounded once."""
    scale = b.exp2_biased("scale", biased)
    return b.mul("scaled", b.mul("scaled", p, scale), scale)


def _log1p(b: Ops, f: Value) -> Value:
    """log(1 + f) for f in [-1/3, 1/3]."""
    return b.fma("log", b.mul("square", f, f), _horner(b, f, _LOG), f)


# By version, the default first, the expansions that it has in place of the op table's.
EXPANSIONS: dict[str, dict[str, Expansion]] = {"v1": {}, "v2": {"exp": _exp_v2}}
FUNCTIONS = (*EXPANSIONS,)

# ---- the rows ----


def function(
    equations: Expansion,
    slope: Callable[[Ops, Eqn], Value],
    exact: RealMeaning,
    typ: TypeRule = type_rules.function,
    attrs: tuple[str, ...] = (),
) -> Callable[[Method], Method]:
    """Adds the row of a function of one operand; its cotangent is that of the result times the slope.

    A slope ends in no product, except with a constant. To ``passes.simplify`` it is then one factor, and a sum over the
    row stays one sum.
    """
    return op(typ, exact, expand=equations, vjp=lambda b, e, ct: (b.mul("ct", ct, slope(b, e)),), attrs=attrs)


class Functions(Ops):
    """Every op as a method, also the functions."""

    @function(_exp, lambda b, e: e.out, real.function(np.exp, ULPS["exp"]))
    def exp(self, name: str, x: Value) -> Value:
        """e^x, in f32."""
        return self.emit("exp", name, (x,))

    @function(_decay, lambda b, e: e.out, real.function(real.decay, real.decay_ulps))
    def decay(self, name: str, x: Value) -> Value:
        """e^x for numbers that are not above 0, in f32; 0 where it would be below 2^-126.5."""
        return self.emit("decay", name, (x,))

    @function(_exp2, lambda b, e: b.mul("slope", e.out, _const(b, math.log(2))), real.function(np.exp2, ULPS["exp2"]))
    def exp2(self, name: str, x: Value) -> Value:
        """2^x, in f32."""
        return self.emit("exp2", name, (x,))

    @op(
        type_rules.function,
        real.function(np.log, ULPS["log"]),
        expand=_log,
        vjp=lambda b, e, ct: (b.div("ct", ct, e.args[0]),),
    )
    def log(self, name: str, x: Value) -> Value:
        """The natural logarithm, in f32."""
        return self.emit("log", name, (x,))

    @function(_tanh, _tanh_slope, real.function(np.tanh, ULPS["tanh"]))
    def tanh(self, name: str, x: Value) -> Value:
        """The hyperbolic tangent, in f32."""
        return self.emit("tanh", name, (x,))

    @function(
        _sigmoid,
        lambda b, e: b.sub("slope", e.out, b.mul("square", e.out, e.out)),
        real.function(real.sigmoid, ULPS["sigmoid"]),
    )
    def sigmoid(self, name: str, x: Value) -> Value:
        """1 / (1 + e^-x), in f32."""
        return self.emit("sigmoid", name, (x,))

    @function(
        _softplus, lambda b, e: b.emit("sigmoid", "slope", e.args), real.function(real.softplus, ULPS["softplus"])
    )
    def softplus(self, name: str, x: Value) -> Value:
        """log(1 + e^x), in f32."""
        return self.emit("softplus", name, (x,))

    @function(_erf, _erf_slope, real.function(real.erf, ULPS["erf"]))
    def erf(self, name: str, x: Value) -> Value:
        """The error function, in f32."""
        return self.emit("erf", name, (x,))

    @function(_normal_cdf, lambda b, e: _density(b, e.args[0]), real.function(real.normal_cdf, ULPS["normal_cdf"]))
    def normal_cdf(self, name: str, x: Value) -> Value:
        """Phi(x), the cumulative distribution function of the normal distribution, in f32."""
        return self.emit("normal_cdf", name, (x,))

    @function(_gelu, _gelu_slope, real.function(real.gelu, ULPS["gelu"]))
    def gelu(self, name: str, x: Value) -> Value:
        """x Phi(x) (Hendrycks and Gimpel, 2016), in f32."""
        return self.emit("gelu", name, (x,))

    @function(_gelu_tanh, _gelu_tanh_slope, real.function(real.gelu_tanh, _gelu_tanh_ulps))
    def gelu_tanh(self, name: str, x: Value) -> Value:
        """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, the approximation of gelu, in f32."""
        return self.emit("gelu_tanh", name, (x,))

    @function(_silu, _silu_slope, real.function(real.silu, ULPS["silu"]))
    def silu(self, name: str, x: Value) -> Value:
        """x sigmoid(x), in f32."""
        return self.emit("silu", name, (x,))

    @function(_clamp, _clamp_slope, real.clamp, type_rules.clamp, attrs=("high", "low"))
    def clamp(self, name: str, x: Value, *, low: float, high: float) -> Value:
        """x, but ``low`` below it and ``high`` above it; the cotangent passes where low <= x <= high."""
        return self.emit("clamp", name, (x,), low=float(low), high=float(high))
