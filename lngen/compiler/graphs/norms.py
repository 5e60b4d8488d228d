"""LayerNorm and RMSNorm: with weights, of a sum, with a gate or an activation. Forward only, backwards are derived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lngen.compiler.graphs.graph_builder import GraphBuilder
from lngen.compiler.graphs.quantised import Returned, returned
from lngen.compiler.ir import Axis, D, DType, M, Value
from lngen.compiler.ir.names import widened


@dataclass(frozen=True)
class Weights:
    """[D] each, None without; ``rounding``: the dtype to which a row is rounded before it is multiplied by gamma.

    ``stepwise``: then so is the product, to the dtype that PyTorch gives it.
    """

    gamma: Value | None
    beta: Value | None
    rounding: DType | None = None
    stepwise: bool = False

    @classmethod
    def inputs(
        cls,
        b: GraphBuilder,
        suffix: str = "",
        *,
        gamma: bool = True,
        beta: bool = True,
        one: bool = False,
        rounding: DType | None = None,
    ) -> Weights:
        """The inputs gamma and beta, whose names end in ``suffix``; ``gamma``, ``beta``: whether they are the default.

        ``one``: gamma is the weight less 1, so rows are multiplied by 1 + gamma, added in the compute dtype (in bf16 a
        gamma below 2^-9 would be lost). SpecError without the gamma that this needs."""
        gamma32 = b.optional_input(f"gamma{suffix}", D, default=gamma)
        beta32 = b.optional_input(f"beta{suffix}", D, default=beta)
        return cls(gamma32, beta32, rounding).centred_at(b, suffix, one)

    def centred_at(self, b: GraphBuilder, suffix: str, one: bool) -> Weights:
        """The same, with ``one`` added to gamma."""
        if one and self.gamma is None:
            b.refuse(f"1 + gamma{suffix} needs gamma{suffix}; leave gamma{suffix}=no or zero_centred=yes away.")
        return self.plus_one(b, suffix) if one else self

    def plus_one(self, b: GraphBuilder, suffix: str = "", rounding: DType | None = None) -> Weights:
        """The same with 1 + gamma for a gamma that is there, ``rounding``: to this dtype."""
        if self.gamma is None:
            return self
        scale = b.add(f"scale{suffix}", b.number("one", 1.0), self.gamma)
        return replace(self, gamma=scale if rounding is None else rounded(b, scale, rounding))

    def apply(self, b: GraphBuilder, xhat: Value, suffix: str = "") -> Value:
        """xhat * gamma + beta, as far as they are there."""
        if self.rounding is not None:
            xhat = rounded(b, xhat, self.rounding)
        y32 = xhat if self.gamma is None else b.mul(f"scaled{suffix}", xhat, self.gamma)
        if self.stepwise and self.gamma is not None and self.rounding is not None:
            y32 = rounded(b, y32, promoted(self.rounding, b.options.weight))
        return y32 if self.beta is None else b.add(widened(f"y{suffix}"), y32, self.beta)


def zero_centred(b: GraphBuilder) -> bool:
    """The option ``zero_centred``."""
    return b.flag("zero_centred", False, "whether rows are multiplied by 1 + gamma")


def rounded(b: GraphBuilder, x: Value, to: DType) -> Value:
    """x rounded to a dtype, in the compute dtype again; x itself where that has no more digits."""
    if to.size >= b.compute.size:
        return x
    return b.cast(f"{x.name}_rounded32", b.cast(f"{x.name}_rounded", x, to=to), to=b.compute)


def promoted(one: DType, other: DType) -> DType:
    """The dtype of a product in PyTorch: the wider one, f32 of f16 and bf16."""
    if one.size == other.size:
        return one if one is other else DType.F32
    return max(one, other, key=lambda dtype: dtype.size)


CASTS = ("once", "llama", "gemma", "t5")


def layernorm(b: GraphBuilder) -> None:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta, the variance centred (Ba, Kiros and Hinton, 2016).

    The mean is a sum in the compute dtype divided by D. Equal elements could give a mean that differs from them: in f32
    rows and sums, in bf16 rows of more than 65536 elements, in f16 rows of more than 8192. There the mean of the
    differences corrects it (``passes.compensate``). So the mean of equal numbers is that number, and y is beta.
    ``casts=nemotron``: rows are multiplied by 1 + gamma if there is a gamma, the sum rounded to gamma's dtype.
    """
    x32 = b.input("x", M, D)
    returned(b, cast_weights(b, ("once", "nemotron"), beta=True).apply(b, centred(b, x32)))


def rmsnorm(b: GraphBuilder) -> None:
    """y = x / sqrt(mean(x^2) + eps) * gamma (Zhang and Sennrich, 2019).

    ``casts`` is the order of roundings of a model whose weights were trained with it. ``once``: all in the compute
    dtype, y rounded at the end. ``llama``: xhat is rounded to x's dtype, before it is multiplied by gamma. ``t5``: the
    same to gamma's dtype. ``gemma``: as once, with 1 + gamma if there is a gamma. The orders of llama and gemma differ
    in a quarter of the bf16 results of a row of 4096, by 1 or 2 units in the last place.
    """
    x32 = b.input("x", M, D)
    returned(b, cast_weights(b).apply(b, scaled(b, x32)))


def centred(b: GraphBuilder, x32: Value, to: Axis | None = None) -> Value:
    """(x - mean) * rstd of a row, or of what it has of each of ``to``, and the statistics of a row."""
    mean = b.reduce_mean("mean", x32, axis=D, to=to)
    xc = b.sub("xc", x32, mean)
    var = b.reduce_mean("var", b.mul("xc2", xc, xc), axis=D, to=to)
    rstd = b.rsqrt("rstd", b.add("veps", var, b.eps()))
    xhat = b.mul("xhat", xc, rstd)
    if to is None:
        b.statistic(mean)
        b.statistic(rstd)
    return xhat


def scaled(b: GraphBuilder, x32: Value, to: Axis | None = None) -> Value:
    """x * rstd, rstd of the mean square of a row, or of what it has of each of ``to``; and the statistic of a row."""
    ms = b.reduce_mean("ms", b.mul("x2", x32, x32), axis=D, to=to)
    rstd = b.rsqrt("rstd", b.add("mseps", ms, b.eps()))
    xhat = b.mul("xhat", x32, rstd)
    if to is None:
        b.statistic(rstd)
    return xhat


def cast_weights(
    b: GraphBuilder,
    orders: tuple[str, ...] = CASTS,
    *,
    beta: bool = False,
    inputs: Callable[..., Weights] = Weights.inputs,
) -> Weights:
    """gamma and beta with the order of roundings of the option ``casts``; ``inputs`` as ``Weights.inputs``."""
    casts, one = str(b.option("casts", "once", orders, "order of roundings")), zero_centred(b)
    if one and casts in ("gemma", "nemotron"):
        b.refuse(f"casts={casts} multiplies by 1 + gamma already; leave zero_centred=yes away.")
    rounding = {"llama": b.options.dtype, "t5": b.options.weight, "eager": b.options.dtype}.get(casts)
    weights = replace(inputs(b, beta=beta, one=one, rounding=rounding), stepwise=casts == "eager")
    if casts == "nemotron":
        return weights.plus_one(b, rounding=b.options.weight)
    return weights.plus_one(b) if casts == "gemma" else weights


DTYPES = ("dtype", "f16", "bf16", "f32")


@dataclass(frozen=True)
class ResidualSum:
    """The sum that is ``normalised``, and the value that is returned as h, of the dtype ``stored``."""

    normalised: Value
    returned: Value
    stored: DType

    def write(self, b: GraphBuilder) -> None:
        """The output h, from which backward computes."""
        b.optional_output("h", self.returned, dtype=self.stored, save=True)


def add_layernorm(b: GraphBuilder) -> None:
    """h = x * rowscale * colscale + x1 + residual, y = layernorm(h) * gamma + beta.

    Pre-LN returns h, the residual stream; post-LN does without it (``h=no``). Backward reads h in place of its terms,
    besides x for the gradients of its factors, and adds dh after the norm's own gradient, as DeepSpeed's
    BackwardFusedAdd does. The norm is of h as it is stored (PyTorch's two operators, Liger, vLLM), so that backward has
    what forward had. With ``round_sum=no`` it is of the sum in the compute dtype (FlashAttention, FlashInfer), and
    backward differs from the derivative by the rounding of h: lngen/docs/family.md has the bound.
    """
    total = summed(b)
    weights = Weights.inputs(b, one=zero_centred(b))
    returned(b, weights.apply(b, centred(b, total.normalised)))
    total.write(b)


def add_rmsnorm(b: GraphBuilder) -> None:
    """h = x * rowscale * colscale + x1 + residual, y = rmsnorm(h) * gamma; see ``add_layernorm`` and ``rmsnorm``.

    T5 and Llama normalise the sum as it is stored, too: ``casts=t5``.
    """
    total = summed(b)
    weights = cast_weights(b)
    returned(b, weights.apply(b, scaled(b, total.normalised)))
    total.write(b)


def parallel_layernorm(b: GraphBuilder) -> None:
    """y = layernorm(h) * gamma + beta, y1 = layernorm(h) * gamma1 + beta1: two norms of one sum, for parallel blocks.

    h and its terms as in ``add_layernorm``.
    """
    total, one = summed(b), zero_centred(b)
    weights, others = Weights.inputs(b, one=one), Weights.inputs(b, "1", one=one)
    _two_outputs(b, centred(b, total.normalised), weights, others)
    total.write(b)


def parallel_rmsnorm(b: GraphBuilder) -> None:
    """y = rmsnorm(h) * gamma, y1 = rmsnorm(h) * gamma1: two norms of one sum; see ``parallel_layernorm``."""
    total, one = summed(b), zero_centred(b)
    weights, others = (Weights.inputs(b, suffix, beta=False, one=one) for suffix in ("", "1"))
    _two_outputs(b, scaled(b, total.normalised), weights, others)
    total.write(b)


def _two_outputs(b: GraphBuilder, xhat: Value, weights: Weights, others: Weights) -> None:
    if weights.gamma is None and others.gamma is None and weights.beta is None and others.beta is None:
        b.refuse("two norms of one sum without weights are the same; use a graph with one output.")
    result = Returned.by_keys(b)
    result.write(b, weights.apply(b, xhat))
    result.write(b, others.apply(b, xhat, "1"), "1")


def summed(b: GraphBuilder) -> ResidualSum:
    """The sum of the terms that are there, rounded as it is stored, unless ``round_sum=no``.

    The factors come in the order of FlashAttention: x by the row's, then by the feature's.
    """
    chosen = str(b.option("residual_dtype", "dtype", DTYPES, "dtype of residual and h"))
    stored = b.options.dtype if chosen == "dtype" else DType(chosen)
    term = b.input("x", M, D)
    residual = b.optional_input("residual", M, D, dtype=stored)
    x1 = b.optional_input("x1", M, D, default=False)
    rowscale = b.optional_input("rowscale", M, default=False)
    colscale = b.optional_input("colscale", D, default=False)
    if residual is None and x1 is None and rowscale is None and colscale is None:
        b.refuse("without residual, x1, rowscale and colscale there is no sum; use the norm alone.")
    if rowscale is not None:
        term = b.mul("x_rows", term, rowscale)
    if colscale is not None:
        term = b.mul("x_columns", term, colscale)
    total = term if x1 is None else b.add("branches", term, x1)
    total = total if residual is None else b.add("total", total, residual)
    return rounded_sum(b, total, stored, b.flag("round_sum", True, "whether the norm is of the sum as it is stored"))


def rounded_sum(b: GraphBuilder, total: Value, stored: DType, rounds: bool) -> ResidualSum:
    """The sum in the dtype ``stored``; the norm is of it, or of ``total`` unless it ``rounds``."""
    if not rounds:
        return ResidualSum(total, total, stored)
    h = b.cast("h", total, to=stored)
    return ResidualSum(b.cast("h32", h, to=b.compute), h, stored)


# ---- gates and activations ----

Normalise = Callable[[GraphBuilder, Value], Value]

GATES: dict[str, Callable[[Value], Value]] = {
    "silu": Value.silu,
    "sigmoid": Value.sigmoid,
    "gelu": Value.gelu,
    "gelu_tanh": Value.gelu_tanh,
}
ACTIVATIONS: dict[str, Callable[[Value], Value]] = {**GATES, "relu": Value.relu}


def gated_layernorm(b: GraphBuilder) -> None:
    """y = layernorm(x) * silu(z), or with ``gate_first`` y = layernorm(x * silu(z)) (Mamba's norm_before_gate=False).

    ``act`` is the function of z.
    """
    _gated(b, centred, beta=True)


def gated_rmsnorm(b: GraphBuilder) -> None:
    """y = rmsnorm(x) * silu(z), or with ``gate_first`` y = rmsnorm(x * silu(z)); see ``gated_layernorm``.

    ``casts`` as of ``rmsnorm``. Orders that round xhat round the norm, too, before a gate that follows it (Qwen3-Next).
    """
    _gated(b, scaled, beta=False)


def _gated(b: GraphBuilder, normalise: Normalise, *, beta: bool) -> None:
    x, z = b.input("x", M, D), b.input("z", M, D)
    weights = Weights.inputs(b, one=zero_centred(b)) if beta else cast_weights(b)
    act = str(b.option("act", "silu", tuple(GATES), "function of z"))
    gate = b.named("gate", GATES[act](z))
    if b.flag("gate_first", False, "whether the gate precedes the norm"):
        returned(b, weights.apply(b, normalise(b, b.mul("gated", x, gate))))
    else:
        returned(b, b.mul("gated", replace(weights, stepwise=True).apply(b, normalise(b, x)), gate))


def layernorm_sigmoid_mul(b: GraphBuilder) -> None:
    """y = x * sigmoid(layernorm(x)) (AITemplate's layernorm_sigmoid_mul)."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, one=zero_centred(b))
    returned(b, b.mul("gated", x, weights.apply(b, centred(b, x)).sigmoid()))


def rmsnorm_sigmoid_mul(b: GraphBuilder) -> None:
    """y = x * sigmoid(rmsnorm(x))."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, beta=False, one=zero_centred(b))
    returned(b, b.mul("gated", x, weights.apply(b, scaled(b, x)).sigmoid()))


def layernorm_act(b: GraphBuilder) -> None:
    """y = act(layernorm(x) * gamma + beta)."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, one=zero_centred(b))
    returned(b, _activated(b, weights.apply(b, centred(b, x))))


def rmsnorm_act(b: GraphBuilder) -> None:
    """y = act(rmsnorm(x) * gamma)."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, beta=False, one=zero_centred(b))
    returned(b, _activated(b, weights.apply(b, scaled(b, x))))


def _activated(b: GraphBuilder, norm: Value) -> Value:
    return ACTIVATIONS[str(b.option("act", "silu", tuple(ACTIVATIONS), "the activation"))](norm)


def dyt(b: GraphBuilder) -> None:
    """y = tanh(alpha * x) * gamma + beta, alpha one number (Zhu et al., Transformers without Normalization, 2025).

    It needs no statistic: forward reads x once and sums nothing.
    """
    x, alpha = b.input("x", M, D), b.input("alpha")
    weights = Weights.inputs(b)
    returned(b, weights.apply(b, b.named("t", b.mul("ax", x, alpha).tanh())))
