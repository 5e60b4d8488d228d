"""Norms with a gate or an activation: silu(z) beside a norm, sigmoid of the norm, an activation behind it."""

from __future__ import annotations

from collections.abc import Callable

from lngen.graphs.graph_builder import GraphBuilder
from lngen.graphs.norms import Weights, centred, scaled, zero_centred
from lngen.ir import D, M, Value

Normalise = Callable[[GraphBuilder, Value], Value]

GATES: dict[str, Callable[[Value], Value]] = {
    "silu": Value.silu,
    "sigmoid": Value.sigmoid,
    "gelu": Value.gelu,
    "gelu_tanh": Value.gelu_tanh,
}
ACTIVATIONS: dict[str, Callable[[Value], Value]] = {**GATES, "relu": Value.relu}


def gated_layernorm(b: GraphBuilder) -> None:
    """y = layernorm(x) * silu(z), or with ``gate=before`` y = layernorm(x * silu(z)) (Mamba's norm_before_gate=False).

    ``act`` is the function of z.
    """
    _gated(b, centred, beta=True)


def gated_rmsnorm(b: GraphBuilder) -> None:
    """y = rmsnorm(x) * silu(z), or with ``gate=before`` y = rmsnorm(x * silu(z)); see ``gated_layernorm``."""
    _gated(b, scaled, beta=False)


def _gated(b: GraphBuilder, normalise: Normalise, *, beta: bool) -> None:
    x, z = b.input("x", M, D), b.input("z", M, D)
    weights = Weights.inputs(b, beta=beta, one=zero_centred(b))
    act = str(b.option("act", "silu", tuple(GATES), "function of z"))
    gate = b.named("gate", GATES[act](z))
    if b.option("gate", "after", ("after", "before"), "whether the gate follows the norm or precedes it") == "before":
        b.output("y", weights.apply(b, normalise(b, b.mul("gated", x, gate))))
    else:
        b.output("y", b.mul("gated", weights.apply(b, normalise(b, x)), gate))


def layernorm_sigmoid_mul(b: GraphBuilder) -> None:
    """y = x * sigmoid(layernorm(x)) (AITemplate's layernorm_sigmoid_mul)."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, one=zero_centred(b))
    b.output("y", b.mul("gated", x, weights.apply(b, centred(b, x)).sigmoid()))


def rmsnorm_sigmoid_mul(b: GraphBuilder) -> None:
    """y = x * sigmoid(rmsnorm(x))."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, beta=False, one=zero_centred(b))
    b.output("y", b.mul("gated", x, weights.apply(b, scaled(b, x)).sigmoid()))


def layernorm_act(b: GraphBuilder) -> None:
    """y = act(layernorm(x) * gamma + beta)."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, one=zero_centred(b))
    b.output("y", _activated(b, weights.apply(b, centred(b, x))))


def rmsnorm_act(b: GraphBuilder) -> None:
    """y = act(rmsnorm(x) * gamma)."""
    x = b.input("x", M, D)
    weights = Weights.inputs(b, beta=False, one=zero_centred(b))
    b.output("y", _activated(b, weights.apply(b, scaled(b, x))))


def _activated(b: GraphBuilder, norm: Value) -> Value:
    return ACTIVATIONS[str(b.option("act", "silu", tuple(ACTIVATIONS), "the activation"))](norm)


def dyt(b: GraphBuilder) -> None:
    """y = tanh(alpha * x) * gamma + beta, alpha one number (Zhu et al., Transformers without Normalization, 2025).

    It needs no statistic: forward reads x once and sums nothing.
    """
    x, alpha = b.input("x", M, D), b.input("alpha")
    weights = Weights.inputs(b)
    b.output("y", weights.apply(b, b.named("t", b.mul("ax", x, alpha).tanh())))
