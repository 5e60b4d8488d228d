"""LayerNorm and RMSNorm: forward only, the backward is derived."""

from __future__ import annotations

from lngen.graphs.definition import GraphBuilder
from lngen.ir import D, M, Value


def layernorm(b: GraphBuilder) -> None:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta, the variance centred (Ba, Kiros and Hinton, 2016).

    The mean is a sum in the compute dtype divided by D, so the mean of a row of equal numbers c may differ from c, by
    at most (d + 1) u |c| (u: half a unit in the last place of 1, d: the depth of the sum). Then y differs from beta by
    up to |gamma| (d + 1) u |c| / sqrt(eps). It is beta exactly where every partial sum is exact: f32 rows of a power of
    two elements, bf16 rows of up to 65536, f16 rows of up to 8192. A mean compensated in a second pass (Chan, Golub and
    LeVeque, 1983) would always be exact. It takes 6 to 10 % more instructions with the sum of the differences beside
    that of their squares, 11 to 18 % in a pass of its own (f32, sm_90, D = 768 to 12288), so it is not used.
    """
    x32 = b.input("x", M, D)
    gamma32 = b.optional_input("gamma", D)
    beta32 = b.optional_input("beta", D)
    mean = b.reduce_mean("mean", x32, axis=D)
    xc = b.sub("xc", x32, mean)
    var = b.reduce_mean("var", b.mul("xc2", xc, xc), axis=D)
    rstd = b.rsqrt("rstd", b.add("veps", var, b.eps()))
    xhat = b.mul("xhat", xc, rstd)
    b.output("y", _affine(b, xhat, gamma32, beta32))
    b.statistic(mean)
    b.statistic(rstd)


def rmsnorm(b: GraphBuilder) -> None:
    """y = x / sqrt(mean(x^2) + eps) * gamma (Zhang and Sennrich, 2019)."""
    x32 = b.input("x", M, D)
    gamma32 = b.optional_input("gamma", D)
    beta32 = b.optional_input("beta", D, default=False)
    ms = b.reduce_mean("ms", b.mul("x2", x32, x32), axis=D)
    rstd = b.rsqrt("rstd", b.add("mseps", ms, b.eps()))
    xhat = b.mul("xhat", x32, rstd)
    b.output("y", _affine(b, xhat, gamma32, beta32))
    b.statistic(rstd)


def _affine(b: GraphBuilder, xhat: Value, gamma32: Value | None, beta32: Value | None) -> Value:
    y32 = xhat if gamma32 is None else b.mul("scaled", xhat, gamma32)
    return y32 if beta32 is None else b.add("y32", y32, beta32)
