"""Graphs of one's own, each an expression of its inputs: ``named("loss")`` describes it, ``own("loss")`` is a spec.

An input has rows and features, or the axes that are the default of its parameter: ``gamma=D``. A result is y, or one
of several by name.
"""

import re
from collections.abc import Callable
from inspect import signature
from typing import Any

from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M, Value
from lngen.compiler.spec import Spec, make_spec

Expression = Callable[..., Any]
Describe = Callable[[GraphBuilder], None]
NUMBER = ()


def described(expression: Expression, name: str = "own") -> Describe:
    """The description that an expression is short for."""

    def describe(b: GraphBuilder) -> None:
        inputs = []
        for p in [*signature(expression).parameters.values()][1:]:
            axes = (M, D) if p.default is p.empty else p.default
            inputs.append(b.input(p.name, *(axes if isinstance(axes, tuple) else (axes,))))
        found = expression(b, *inputs)
        for result, value in (found if isinstance(found, dict) else {"y": found}).items():
            b.output(result, value)

    describe.__name__ = describe.__qualname__ = name
    return describe


def rms(b: GraphBuilder, h: Value, name: str = "rstd") -> Value:
    """What a row is divided by, as a factor; a statistic."""
    return b.statistic((b.mean(h * h) + b.eps()).rsqrt(), name)


def layernorm_of(b: GraphBuilder, h: Value) -> Value:
    """LayerNorm of a value; the statistics are kept."""
    xc = h - b.statistic(b.mean(h), "mean")
    return xc * rms(b, xc) * b.input("gamma", D) + b.input("beta", D)


def gate(z: Value) -> Value:
    """z / sqrt(1 + z^2)."""
    return z * (z * z + 1).rsqrt()


def exp_below_largest(b: GraphBuilder, x: Value, detach: bool = False) -> Value:
    """What a softmax divides by its sum."""
    most = b.reduce_max("most", x, axis=D)
    return (x - (most.detach() if detach else most)).exp()


# Of every kind that a program may describe: several inputs, outputs and axes.
OWN: dict[str, Expression] = {
    "add_rmsnorm": lambda b, x, residual, gamma=D: {
        "y": (h := b.named("hidden", x + residual)) * rms(b, h) * gamma,
        "h": h,
    },
    # Its backward reads three and writes two.
    "gated": lambda b, x, z, gamma=D: x * rms(b, x) * gamma * z.relu(),
    # The cotangent of a number is a sum over rows and features.
    "scaled": lambda b, x, alpha=NUMBER, gamma=D: (x * alpha) / (1 + x * x).sqrt() * gamma,
    "weighted_rows": lambda b, x, weight_of_row=M: x * rms(b, x) * weight_of_row,
    "larger": lambda b, x, z: x.maximum(z) - b.reduce_max("top", x, axis=D),
    # A call writes no [M, D] tensor.
    "loss": lambda b, x, target: {"loss": b.mean((off := x - target) * off)},
    "doubled": lambda b, x, shift=M: {"y": 2 * x - shift, "total": b.sum(x) * shift},
}

# Whose gradient is worth simplifying.
SUMS: dict[str, Expression] = {
    "colscale": lambda b, x, colscale=D, residual=(M, D): layernorm_of(b, x * colscale + residual),
    "bias_and_colscale": lambda b, x, bias=D, colscale=D, residual=(M, D): layernorm_of(
        b, (x + bias) * colscale + residual
    ),
    "rowscale": lambda b, x, rowscale=M, residual=(M, D): layernorm_of(b, x * rowscale + residual),
    "halved": lambda b, x, colscale=D, residual=(M, D): layernorm_of(b, x * colscale - residual * 0.5),
    "gated_norm": lambda b, x, z, gamma=D: x * rms(b, x) * gamma * gate(z),
    "gated_before": lambda b, x, z, gamma=D: (h := x * gate(z)) * rms(b, h) * gamma,
    "norm_of_norm": lambda b, x, weight=D: layernorm_of(b, x * rms(b, x, "rms") * weight),
    "quadratic": lambda b, x, square=D: (h := (c := x - b.mean(x)) * rms(b, c)) + h * h * square,
}

# Whose gradient has a trap.
TRAPS: dict[str, Expression] = {
    "product": lambda b, x, z, gamma=D: (p := x * z) * rms(b, p) * gamma,
    "square of a scaled product": lambda b, x, z: (p := x * 0.5 * z) * p,
    "quotient": lambda b, x, z: x / (z * z + 1) / b.sum(x * x),
    "three ways to the result": lambda b, x, gamma=D: (c := x - b.mean(x)) * c * c * gamma + -x,
    "two results": lambda b, x, z=D: {"y": x * z * x, "other": x * z + x},
    "unit length": lambda b, x: x / b.sum(x * x).sqrt(),
    "column centred": lambda b, x: (c := x - b.mean(x, M)) * c,
    "gamma plus one": lambda b, x, gamma=D, shift=M: (2 - (x * (gamma + 1) - shift)) * b.size("length", D, b.compute),
    "gradient zero": lambda b, x, z: x * z / z,
    # A number per row and one per column, each counted as often as its sum has terms.
    "moved sums": lambda b, x, shift=M, beta=D: b.sum(x + shift) * b.sum(x + beta, M),
    # A product that forward names completes itself in a mean: it once lost a factor 1/D.
    "mean in a product": lambda b, x: x * (b.mean(x * x) + b.eps()).rsqrt() * (x + 1.5),
    # Self-rescaled normalisation (arXiv 2510.22777).
    "seednorm": lambda b, x, alpha=D, beta=D, gamma=D: (
        (b.sum(x * beta).tanh() * alpha + gamma) * (x * (b.mean(x * x) + b.eps()).rsqrt())
    ),
    "entropy of a softmax": lambda b, x: (
        (total := b.sum(e := (z := x - b.reduce_max("most", x, axis=D).detach()).exp())).log() - b.sum(e * z) / total
    ),
    "gate of its norm": lambda b, x: x * (x * rms(b, x)).sigmoid(),
}

OTHERS: dict[str, Expression] = {
    # y = mean(x)^2 at every column: backward needs the mean, and no [M, D] array but dy.
    "only_statistics": lambda b, x: b.add(
        "sum", b.sub("zero", x, x), b.mul("square", mean := b.statistic(b.reduce_mean("mean", x, axis=D), "mean"), mean)
    ),
    # A straight-through estimator.
    "rounded": lambda b, x, scale=D: scale * (x + b.stop_gradient(x.rint() - x)),
    "softmax": lambda b, x: (e := exp_below_largest(b, x)) * (1 / b.sum(e)),
    "softmax, detached": lambda b, x: (e := exp_below_largest(b, x, detach=True)) * (1 / b.sum(e)),
}
NAMED = {**OWN, **SUMS, **TRAPS, **OTHERS}


def named(name: str) -> Describe:
    """The description of one of the graphs."""
    return described(NAMED[name], re.sub(r"\W+", "_", name))


def own(graph: str | Expression, direction: str = "fwd", **keys: object) -> Spec:
    """The spec of a graph, with D = 24 unless ``keys`` say otherwise."""
    describe = named(graph) if isinstance(graph, str) else described(graph)
    return make_spec(Definition(describe.__name__, describe), direction, {"d": 24, **keys})


only_statistics, gated = named("only_statistics"), named("product")
