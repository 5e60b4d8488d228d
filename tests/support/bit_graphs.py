"""Graphs of one's own whose kernels have structures that no named graph has."""

from collections.abc import Callable
from functools import partial

from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import BF16, D, DType, M, S, Value
from lngen.examples.derived_axes import class_loss, group_normed
from number_graphs import BACKWARD, NUMPY, largest


def taken(b: GraphBuilder) -> None:
    """An element of each row and one of a weight, by an index that is a whole number, and by one that is computed."""
    x, index = b.input("x", M, D), b.index("index", M, dtype="i64")
    place = b.cast("place", b.cast("number", index, to=b.compute), to=DType.I32)
    b.output("y", x * b.take("own", x, index) + b.take("weight", b.input("gamma", D), place))


def taken_of_sums(b: GraphBuilder) -> None:
    """An element of each row, of which all results wait for a sum; so they may lie over x."""
    x = b.input("x", M, D)
    b.output("y", x * b.take("own", x, b.index("index", M)) + b.sum(x))


def plain(b: GraphBuilder) -> None:
    """No row is summed: nothing ends a phase, and a cluster exchanges nothing."""
    b.output("y", b.mul("product", b.input("x", M, D), b.input("gamma", D)))


def block_scaled(b: GraphBuilder, features: int = 32) -> None:
    """A norm over the largest number of each block of features, which is a result, and a fold of its quotients."""
    blocks = b.axis("B", D / features)
    x = b.input("x", M, D)
    y = x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("gamma", D)
    scale = b.max(abs(y), to=blocks).maximum(1e-6) * 0.25
    b.output("y", y / scale * b.mean(y / scale + 2.0, to=blocks))
    b.output("scale", scale, dtype="f32")


def quantised(b: GraphBuilder) -> None:
    """A scale for each block of 32 features, one for the row, and a given one; an input of 8 bits."""
    x, bias = b.input("x", M, D), b.input("bias", D, dtype="e5m2")
    y = x * (b.mean(x * x) + b.eps()).rsqrt() + bias
    b.quantise("q", y, "e4m3", to=b.axis("B", D / 32))
    b.quantise("n", y, "int8")
    b.quantise("whole", y, "e5m2", scale=b.input("s", dtype="f32", differentiable=False))


def scaled_twice(b: GraphBuilder) -> None:
    """A sum of each row, and then of each column, of quotients by numbers of blocks; two sizes of them."""
    x = b.input("x", M, D)
    near = x / b.max(abs(x), to=b.axis("B", D / 16)).maximum(1e-6)
    y = near * (b.mean(near * near) + b.eps()).rsqrt()
    scale = b.mean(y * y, to=b.axis("C", D / 96))
    b.output("y", y / (scale + 1.0))
    b.output("scale", scale, dtype="f32")
    b.output("columns", b.sum(y * scale, axis=M))


def divided(b: GraphBuilder) -> None:
    """Quotients by the largest number of each block, and their sums over rows: no row is summed."""
    x = b.input("x", M, D)
    y = x / b.max(abs(x), to=b.axis("B", D / 24)).maximum(1e-6)
    b.output("y", y)
    b.output("columns", b.sum(y, axis=M))


def placed(b: GraphBuilder) -> None:
    """Places beside column sums, in results by column, and in a number."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    hit = b.select_eq("hit", b.index("pick", dtype="i64"), b.iota("column", D, DType.I64), gamma)
    b.output("y", x * (gamma + hit))
    b.output("z", hit * 3.0)
    b.output("n", b.sum(hit * hit))


def peaked(b: GraphBuilder) -> None:
    """A maximum and a sum end one phase; a cluster meets twice before it is told the next row."""
    x = b.input("x", M, D)
    square = b.mul("square", x, x)
    top = b.reduce_max("largest", square, axis=D)
    total = b.add("total", b.add("raised", top, b.eps()), b.reduce_mean("ms", square, axis=D))
    b.output("y", b.mul("scaled", x, b.rsqrt("rstd", total)))


def mixed(b: GraphBuilder) -> None:
    """An f32 weight beside a bf16 one, and the sum of a row."""
    x = b.param("x", b.compute, M, D)
    narrow = b.cast("narrow32", b.param("narrow", BF16, D), to=b.compute)
    y = b.add("sum", b.mul("product", x, b.param("wide", b.compute, D)), narrow)
    b.results.append(b.reduce_sum("total", b.reduce_sum("parts", y, axis=D, to=S), axis=S))


def halved(b: GraphBuilder) -> None:
    """A column sum times a number: both halves of one launch compute with it."""
    x, s = b.input("x", M, D), b.cast("s32", b.param("s", b.options.weight), to=b.compute)
    total = b.reduce_dot("total", b.cast("x32", x, to=b.compute), s, axis=M)
    b.results.append(b.mul("scaled", total, s))


def apart(b: GraphBuilder) -> None:
    """Each row times the squares of distances from its segments' means, without the sum of the row."""
    x = b.input("x", M, D)
    centre = b.div("centre", b.reduce_sum("parts", x, axis=D, to=S), b.size("n", D, b.compute, per=S))
    far = b.sub("far", x, centre)
    squares = b.reduce_sum("apart", b.reduce_dot("squares", far, far, axis=D, to=S), axis=S)
    b.output("y", b.mul("p", b.add("moved", x, centre), squares))


def exchanged_twice(b: GraphBuilder) -> None:
    """A sum over S reads sums of segments of which some depend on another sum over S; maxima of rows among them."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    parts = b.reduce_sum("parts", x, axis=D, to=S)
    far = b.sub("far", x, b.reduce_sum("total", parts, axis=S))
    again = b.reduce_dot("again", far, b.add("near", z, parts), axis=D, to=S)
    both = b.reduce_sum("both", b.fma("term", parts, b.reduce_dot("squares", far, far, axis=D, to=S), again), axis=S)
    most = b.reduce_max("most", b.mul("scaled", b.sub("lower", far, b.reduce_max("top", far, axis=D)), both), axis=D)
    b.output("y", b.sub("p", far, most))
    b.statistic(both)


def crossed(b: GraphBuilder) -> None:
    """Two tensors that are centred, each scaled by the reciprocal standard deviation of the other."""
    centred = {}
    for name in ("x", "z"):
        value = b.input(name, M, D)
        centred[name] = b.sub(f"{name}c", value, b.reduce_mean(f"{name}_mean", value, axis=D))
    for name, other in (("z", "x"), ("x", "z")):  # the variance of x comes after its elements are scaled
        var = b.reduce_mean(f"{name}_var", b.mul(f"{name}_square", centred[name], centred[name]), axis=D)
        rstd = b.rsqrt(f"{name}_rstd", b.add(f"{name}_veps", var, b.eps()))
        b.output(f"{other}_scaled", b.mul(f"{other}_hat", centred[other], rstd))


def early_and_late(b: GraphBuilder) -> None:
    """One result is known before the row sums, one after them, with an input that only it takes."""
    x, residual, z = (b.input(name, M, D) for name in ("x", "residual", "z"))
    total = b.add("total", x, residual)
    square = b.reduce_mean("square", b.mul("squared", total, total), axis=D)
    b.output("before", total)
    b.output("after", b.add("moved", b.mul("scaled", total, b.rsqrt("rstd", b.add("raised", square, b.eps()))), z))


def stream(b: GraphBuilder) -> None:
    """A result called as kernels used to call the chunk of another one."""
    h = b.add("total", b.input("x", M, D), b.input("residual", M, D))
    b.output("h", h)
    b.output("h_out", b.mul("square", h, h))


def twice(b: GraphBuilder) -> None:
    """A value and an input, each returned twice under names of their own."""
    x = b.input("x", M, D)
    square = b.mul("square", x, x)
    for name, v in {"y": square, "z": square, "p": x, "q": b.params[0]}.items():
        b.output(name, v)


def hostile(b: GraphBuilder) -> None:
    """A norm whose inputs have names that a kernel is likely to have for something of its own."""
    x, rows, at = b.input("X", M, D), b.input("rows", M), b.input("at")
    first, step, seen = b.input("first", D), b.input("step", D), b.input("seen", M, D)
    centred = b.sub("row", b.add("lane", x, seen), b.reduce_mean("mean", x, axis=D))
    rstd = b.rsqrt("rstd", b.add("i", b.reduce_mean("v", b.mul("k", centred, centred), axis=D), b.eps()))
    scaled = b.mul("next", b.mul("tile", centred, rstd), first)
    b.output("y", b.add("stage", b.mul("group", b.add("sum", scaled, step), rows), at))
    b.output("total", b.reduce_sum("sums", scaled, axis=D))


def numbers_of_rows(b: GraphBuilder) -> None:
    """No [M, D] tensor at all, but a kernel for rows."""
    b.output("y", b.mul("p", b.input("u", M), b.input("w", M)))


def result_alone(b: GraphBuilder) -> None:
    """An [M, D] result without such an input."""
    b.output("y", b.mul("p", b.input("u", M), b.input("gamma", D)))


def weights_alone(b: GraphBuilder) -> None:
    """A result without rows."""
    b.output("w", b.mul("p", b.input("gamma", D), b.input("beta", D)))


def statistic_of_columns(b: GraphBuilder) -> None:
    """A row statistic that a column sum and a number need, returned once."""
    x = b.input("x", M, D)
    mean = b.statistic(b.reduce_mean("mean", x, axis=D))
    b.output("column", b.reduce_sum("c", b.sub("xc", x, mean), axis=M))
    b.output("total", b.reduce_sum("t", mean, axis=M))


def without_effect(b: GraphBuilder) -> None:
    """Inputs of every kind that move nothing: their gradients are zeros."""
    y = b.input("x", M, D)
    for name, axes in (("s", ()), ("v", (D,)), ("u", (M,)), ("z", (M, D))):
        value = b.input(name, *axes)
        y = b.add(f"with_{name}", y, b.sub(f"no_{name}", value, value))
    b.output("y", y)


def clashing(b: GraphBuilder) -> None:
    """An input called eps, and one called as a word of C."""
    x, eps = b.input("x", M, D), b.input("eps", D)
    double = b.named("double", b.eps())
    b.output("y", x * (b.mean(x * x) + double).rsqrt() * eps + b.eps())


def centred(b: GraphBuilder, name: str, h: Value) -> Value:
    """(h - mean) / sqrt(var + eps); mean and rstd are kept."""
    mean = b.statistic(b.reduce_mean(f"{name}_mean", h, axis=D))
    xc = b.sub(f"{name}_xc", h, mean)
    var = b.reduce_mean(f"{name}_var", b.mul(f"{name}_xc2", xc, xc), axis=D)
    rstd = b.statistic(b.rsqrt(f"{name}_rstd", b.add(f"{name}_veps", var, b.eps())))
    return b.mul(f"{name}_xhat", xc, rstd)


def norm_and_sum(b: GraphBuilder) -> None:
    """LayerNorm of a sum, which goes on, too."""
    h = b.add("h", b.input("x", M, D), b.input("residual", M, D))
    gamma = b.input("gamma", D)
    b.output("y", b.mul("scaled", centred(b, "n", h), gamma))
    b.output("residual_out", h)


def two_norms(b: GraphBuilder) -> None:
    """One sum under two weights."""
    xhat = centred(b, "n", b.add("h", b.input("x", M, D), b.input("residual", M, D)))
    for n in "01":
        scaled = b.mul(f"scaled{n}", xhat, b.input(f"gamma{n}", D))
        b.output(f"y{n}", b.add(f"moved{n}", scaled, b.input(f"beta{n}", D)))


def norms_apart(b: GraphBuilder) -> None:
    """Two norms that share nothing."""
    for name in ("x", "z"):
        b.output(f"{name}_hat", centred(b, name, b.input(name, M, D)))


def two_kinds(b: GraphBuilder) -> None:
    """LayerNorm with a weight and RMSNorm without: every gradient is of the first, but not every sum over a row."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    b.output("y", b.mul("scaled", centred(b, "n", x), gamma))
    ms = b.reduce_mean("ms", b.mul("x2", x, x), axis=D)
    b.output("z", b.mul("z32", x, b.statistic(b.rsqrt("rstd", b.add("mseps", ms, b.eps())))))


def chained(b: GraphBuilder) -> None:
    """An output that another is computed from, one with a row's numbers, and one that no input with rows moves."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    square = b.output("square", b.mul("x2", x, x))
    b.output("y", b.mul("p", b.cast("square_again", square, to=b.compute), gamma))
    b.output("total", b.reduce_sum("s", b.mul("x3", x, x), axis=D))
    b.output("weight", b.mul("gamma2", gamma, gamma))


def sums(count: int) -> Callable[[GraphBuilder], None]:
    """The sums of each column, scaled by 1 to ``count``."""

    def describe(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        for n in range(count):
            b.output(f"sum{n}", b.reduce_sum(f"s{n}", x * (1.0 + n), axis=M))

    return describe


_LISTED = (
    plain, block_scaled, scaled_twice, divided, quantised, group_normed, class_loss, taken, taken_of_sums, placed,
    peaked, mixed, halved,
    apart, exchanged_twice, crossed, early_and_late, stream, twice, hostile, numbers_of_rows, result_alone,
    weights_alone, statistic_of_columns, without_effect, clashing, largest, norm_and_sum, two_norms, norms_apart,
    two_kinds, chained, *NUMPY, *BACKWARD,
)  # fmt: skip
DEFINITIONS = {f.__name__: Definition(f.__name__, f) for f in _LISTED}
DEFINITIONS |= {
    f"block_scaled{n}": Definition(f"block_scaled{n}", partial(block_scaled, features=n))
    for n in (16, 24, 64, 96, 128, 256)
}
DEFINITIONS |= {f"sums{n}": Definition(f"sums{n}", sums(n)) for n in (8, 9, 13, 33)}
