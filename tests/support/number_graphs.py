"""Graphs of numbers and column maxima: what they mean, their specs, their schedules and the bits of their kernels."""

from collections.abc import Callable, Mapping

import numpy as np

from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, Graph, M
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule, problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import Spec, make_spec
from plans import run_checked

Describe = Callable[[GraphBuilder], None]


def scaled(b: GraphBuilder) -> None:
    """A dynamic tanh without the tanh: y = gamma * (alpha * x) + beta, where alpha is one number."""
    x, alpha = b.input("x", M, D), b.input("alpha")
    b.output("y", b.add("y32", b.mul("of", b.input("gamma", D), b.mul("ax", alpha, x)), b.input("beta", D)))


def everything(b: GraphBuilder) -> None:
    """The mean of all elements, along rows first and along columns first."""
    x = b.input("x", M, D)
    b.output("by_rows", b.reduce_mean("r", b.reduce_mean("row", x, axis=D), axis=M))
    b.output("by_columns", b.reduce_mean("c", b.reduce_mean("column", x, axis=M), axis=D))


def amax(b: GraphBuilder) -> None:
    """The largest absolute value, by rows and by columns."""
    x = b.input("x", M, D)
    size = b.maximum("size", x, b.neg("minus", x))
    b.output("by_rows", b.reduce_max("r", b.reduce_max("row", size, axis=D), axis=M))
    b.output("by_columns", b.reduce_max("c", b.reduce_max("column", size, axis=M), axis=D))


def columns(b: GraphBuilder) -> None:
    """The largest element and the sum of each column, two of both, and what follows from them."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    most, sum_ = b.reduce_max("m", x, axis=M), b.reduce_sum("s", x, axis=M)
    b.output("most", most)
    b.output("sum", sum_)
    b.output("both", b.mul("p", b.reduce_max("mz", z, axis=M), b.reduce_sum("sz", b.mul("xz", x, z), axis=M)))


def loss(b: GraphBuilder) -> None:
    """The mean and the variance over the rows of a number that each row reduces to, and the rows' numbers."""
    x, weight = b.input("x", M, D), b.input("weight", M)
    row = b.mul("row", b.reduce_mean("square", b.mul("xx", x, x), axis=D), weight)
    mean = b.reduce_mean("mean", row, axis=M)
    far = b.sub("far", row, mean)
    b.output("rows", row)
    b.output("loss", mean)
    b.output("variance", b.reduce_mean("v", b.mul("ff", far, far), axis=M))


def weights(b: GraphBuilder) -> None:
    """Numbers of vectors alone, and weights over the sum of their squares."""
    gamma, u = b.input("gamma", D), b.input("u", M)
    total = b.reduce_sum("t", b.mul("gg", gamma, gamma), axis=D)
    b.output("share", b.div("q", gamma, total))
    b.output("most", b.reduce_max("m", gamma, axis=D))
    b.output("rows", b.reduce_sum("r", u, axis=M))
    b.output("most_of_rows", b.reduce_max("n", u, axis=M))
    b.output("count", b.size("length", M, b.compute))


def variance(b: GraphBuilder) -> None:
    """Numbers that wait for each other: the variance of the column sums; and more of them than one loop takes."""
    x = b.input("x", M, D)
    column = b.reduce_sum("column", x, axis=M)
    far = b.sub("far", column, b.reduce_mean("mean", column, axis=D))
    b.output("variance", b.reduce_mean("v", b.mul("ff", far, far), axis=D))
    powers = [column]
    for n in range(5):
        powers.append(b.mul(f"power{n}", powers[-1], b.number(f"tenth{n}", 0.1)))
    for n, power in enumerate(powers):
        b.output(f"sum{n}", b.reduce_sum(f"s{n}", power, axis=D))


def largest(b: GraphBuilder) -> None:
    """The largest element of each column."""
    b.output("most", b.reduce_max("m", b.input("x", M, D), axis=M))


def wide(a: Array) -> Array:
    return a.astype(np.float64)


# What the graphs mean, written without the IR; for at least one row.
NUMPY: dict[Describe, Callable[..., Mapping[str, Array]]] = {
    scaled: lambda x, alpha, gamma, beta: {"y": gamma * alpha * x + beta},
    everything: lambda x: {"by_rows": x.mean(), "by_columns": x.mean()},
    amax: lambda x: {"by_rows": np.abs(x).max(), "by_columns": np.abs(x).max()},
    columns: lambda x, z: {"most": x.max(0), "sum": x.sum(0), "both": z.max(0) * (x * z).sum(0)},
    loss: lambda x, weight: {
        "rows": (x**2).mean(1) * weight,
        "loss": ((x**2).mean(1) * weight).mean(),
        "variance": ((x**2).mean(1) * weight).var(),
    },
    weights: lambda gamma, u: {
        "share": gamma / (gamma**2).sum(), "most": gamma.max(), "rows": u.sum(), "most_of_rows": u.max(),
        "count": np.float64(len(u)),
    },
    variance: lambda x: {"variance": x.sum(0).var()} | {f"sum{n}": (x.sum(0) * 0.1**n).sum() for n in range(6)},
}  # fmt: skip

# The backwards that kernels compute: no row of a gradient waits for a reduction over rows.
BACKWARD: dict[Describe, dict[str, tuple[str, ...]]] = {
    scaled: {}, everything: {}, columns: {"of": ("sum",)}, loss: {"of": ("rows", "loss")},
    weights: {"of": ("share", "most", "rows"), "wrt": ("gamma", "u")},
}  # fmt: skip


def spec_of(describe: Describe, direction: str = "fwd", d: int = 37, dtype: str = "f32") -> Spec:
    keys: dict[str, object] = {"d": d, "dtype": dtype}
    if direction == "bwd":
        keys |= {key: "+".join(names) for key, names in BACKWARD[describe].items()}
    return make_spec(Definition(describe.__name__, describe), direction, keys)


def schedules(spec: Spec, graph: Graph | None = None) -> list[Schedule]:
    """The best of each form, and of those with clusters."""
    found: dict[object, Schedule] = {}
    for s in ranked(problem(graph or spec.graph(), spec.d)):
        if not s.single_launch:
            found.setdefault((s.form, s.cluster > 1), s)
    return list(found.values())


def has_bits(spec: Spec, schedule: Schedule, rows: int, graph: Graph | None = None, seed: int = 0) -> None:
    """The PTX has the interpreter's bits and breaks no rule."""
    run_checked(lower(spec, schedule, graph), rows, seed)
