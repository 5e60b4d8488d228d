"""LayerNorm and RMSNorm: forward only, the backward is derived."""

from __future__ import annotations

from lngen.graphs.builder import GraphBuilder
from lngen.graphs.weights import Weights, zero_centred
from lngen.ir import D, M, Value

CASTS = ("once", "llama", "gemma", "t5")


def layernorm(b: GraphBuilder) -> None:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta, the variance centred (Ba, Kiros and Hinton, 2016).

    The mean is a sum in the compute dtype divided by D. Where equal elements could give a mean that differs from them
    (f32 rows and sums, bf16 rows of more than 65536 elements, f16 of more than 8192), it is corrected by the mean of
    the differences (``passes.compensate``). So the mean of a row of equal numbers is that number, and y is beta.
    """
    x32 = b.input("x", M, D)
    weights = Weights.inputs(b, one=zero_centred(b))
    b.output("y", weights.apply(b, centred(b, x32)))


def rmsnorm(b: GraphBuilder) -> None:
    """y = x / sqrt(mean(x^2) + eps) * gamma (Zhang and Sennrich, 2019).

    ``casts`` is the order of roundings of a model whose weights were trained with it. ``once``: all in the compute
    dtype, y rounded at the end. ``llama``: xhat is rounded to x's dtype, before it is multiplied by gamma. ``t5``: the
    same to gamma's dtype. ``gemma``: as once, with 1 + gamma. The orders of llama and gemma differ in a quarter of the
    bf16 results of a row of 4096, by 1 or 2 units in the last place.
    """
    x32 = b.input("x", M, D)
    b.output("y", cast_weights(b).apply(b, scaled(b, x32)))


def centred(b: GraphBuilder, x32: Value) -> Value:
    """(x - mean) * rstd, and its statistics."""
    mean = b.reduce_mean("mean", x32, axis=D)
    xc = b.sub("xc", x32, mean)
    var = b.reduce_mean("var", b.mul("xc2", xc, xc), axis=D)
    rstd = b.rsqrt("rstd", b.add("veps", var, b.eps()))
    xhat = b.mul("xhat", xc, rstd)
    b.statistic(mean)
    b.statistic(rstd)
    return xhat


def scaled(b: GraphBuilder, x32: Value) -> Value:
    """x * rstd, rstd of the mean square, and its statistic."""
    ms = b.reduce_mean("ms", b.mul("x2", x32, x32), axis=D)
    rstd = b.rsqrt("rstd", b.add("mseps", ms, b.eps()))
    xhat = b.mul("xhat", x32, rstd)
    b.statistic(rstd)
    return xhat


def cast_weights(b: GraphBuilder) -> Weights:
    """gamma and beta of RMSNorm, with the order of roundings that the option ``casts`` names."""
    casts, one = str(b.option("casts", "once", CASTS, "order of roundings")), zero_centred(b)
    if casts == "gemma" and one:
        b.refuse("casts=gemma multiplies by 1 + gamma already; leave zero_centred=yes away.")
    rounding = {"llama": b.options.dtype, "t5": b.options.weight}.get(casts)
    return Weights.inputs(b, beta=False, one=one or casts == "gemma", rounding=rounding)
