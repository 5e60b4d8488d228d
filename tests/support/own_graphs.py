"""Graphs of one's own, of every kind that a program may describe: several inputs, outputs and axes."""

from collections.abc import Callable

from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.spec import Spec, make_spec


def add_rmsnorm(b: GraphBuilder) -> None:
    """Two [M, D] inputs, two outputs: the norm of a sum, and the sum."""
    x, residual, gamma = b.input("x", M, D), b.input("residual", M, D), b.input("gamma", D)
    h = b.named("hidden", x + residual)
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * gamma)
    b.output("h", h)
    b.statistic(rstd, "rstd")


def gated(b: GraphBuilder) -> None:
    """A gate that is cut off at zero; reads two and writes one, its backward reads three and writes two."""
    x, z, gamma = b.input("x", M, D), b.input("z", M, D), b.input("gamma", D)
    rstd = (b.mean(x * x) + b.eps()).rsqrt()
    b.output("y", x * rstd * gamma * z.relu())
    b.statistic(rstd, "rstd")


def scaled(b: GraphBuilder) -> None:
    """An input that is one number; its cotangent is a sum over rows and features."""
    x, alpha, gamma = b.input("x", M, D), b.input("alpha"), b.input("gamma", D)
    b.output("y", (x * alpha) / (1 + x * x).sqrt() * gamma)


def weighted_rows(b: GraphBuilder) -> None:
    """An input that is one number a row."""
    x, weight = b.input("x", M, D), b.input("weight_of_row", M)
    rstd = (b.mean(x * x) + b.eps()).rsqrt()
    b.output("y", x * rstd * weight)
    b.statistic(rstd, "rstd")


def larger(b: GraphBuilder) -> None:
    """A maximum of two tensors and the maximum of a row."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    top = b.reduce_max("top", x, axis=D)
    b.output("y", x.maximum(z) - top)


def loss(b: GraphBuilder) -> None:
    """An output of one number a row, mean over D: a call writes no [M, D] tensor."""
    x, target = b.input("x", M, D), b.input("target", M, D)
    off = x - target
    b.output("loss", b.mean(off * off))


def doubled(b: GraphBuilder) -> None:
    """One number of two inputs that are one number a row, and a graph without features in its output's gradient."""
    x, shift = b.input("x", M, D), b.input("shift", M)
    b.output("y", 2 * x - shift)
    b.output("total", b.sum(x) * shift)


def only_statistics(b: GraphBuilder) -> None:
    """y = mean(x)^2 at every column: backward needs the mean, and no [M, D] array but dy."""
    x = b.input("x", M, D)
    mean = b.statistic(b.reduce_mean("mean", x, axis=D))
    b.output("y", b.add("sum", b.sub("zero", x, x), b.mul("square", mean, mean)))


OWN: dict[str, Callable[[GraphBuilder], None]] = {
    f.__name__: f for f in (add_rmsnorm, gated, scaled, weighted_rows, larger, loss, doubled)
}


def own(name: str, direction: str = "fwd", **keys: object) -> Spec:
    """The spec of one of the graphs, with D = 24 unless ``keys`` say otherwise."""
    return make_spec(Definition(name, OWN[name]), direction, {"d": 24, **keys})
