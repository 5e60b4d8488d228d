"""Functions of a row without weights: softmax, its logarithm, cross-entropy, the L2 norm."""

from __future__ import annotations

from lngen.compiler.graphs import class_targets
from lngen.compiler.graphs.graph_builder import GraphBuilder
from lngen.compiler.graphs.quantised import returned
from lngen.compiler.ir import D, M, Value


def softmax(b: GraphBuilder) -> None:
    """y = exp(s x - max(s x)) / sum(exp(s x - max(s x))), with ``scale`` s.

    A row of -inf alone is NaN. Backward computes y again from x and two numbers of the row, which is as cheap as to
    read y and more exact; ``save=y`` takes y.
    """
    shifted, top = _shifted(b)
    e = b.named("e", shifted.exp())
    total = b.reduce_sum("rowsum", e, axis=D)
    returned(b, b.mul("p", e, b.div("rsum", b.number("one", 1.0), total)))
    _statistics(b, top, total)


def log_softmax(b: GraphBuilder) -> None:
    """y = s x - max(s x) - log(sum(exp(s x - max(s x)))), with ``scale`` s; see ``softmax``."""
    shifted, top = _shifted(b)
    total = b.reduce_sum("rowsum", b.named("e", shifted.exp()), axis=D)
    b.output("y", b.sub("y32", shifted, b.named("logsum", total.log())))
    _statistics(b, top, total)


def cross_entropy(b: GraphBuilder) -> None:
    """loss = -sum(target * log_softmax(x)), a number per row, in f32; target is a distribution, such as a one-hot row.

    The gradient dx is (softmax(x) * sum(target) - target) * dloss. The target has no gradient. 0 log 0 is 0, so a class
    of target 0 adds nothing, also if its logit is -inf. With ``target=index`` it is a class of each row, see
    ``class_targets.cross_entropy``.
    """
    said = class_targets.by_keys(b)
    if said["target"] == "index":
        class_targets.cross_entropy(b, said, _scale(b))
        return
    shifted, top = _shifted(b)
    target = b.input("target", M, D, differentiable=False)
    total = b.reduce_sum("rowsum", b.named("e", shifted.exp()), axis=D)
    mass = b.reduce_sum("mass", target, axis=D)
    hit = b.reduce_sum("hit", b.weighted("target_x", target, shifted), axis=D)
    loss = b.sub("loss32", b.mul("mass_logsum", mass, b.named("logsum", total.log())), hit)
    b.output("loss", loss, dtype=b.compute)
    _statistics(b, top, total)


def _shifted(b: GraphBuilder) -> tuple[Value, Value]:
    """x less the largest element of its row, and that."""
    x = b.input("x", M, D)
    scale = _scale(b)
    if scale != 1.0:
        x = b.mul("x_scaled", x, b.number("scale", scale))
    top = b.reduce_max("rowmax", x, axis=D)
    return b.sub("shifted", x, top), top


def _scale(b: GraphBuilder) -> float:
    return float(b.option("scale", 1.0, about="factor of x"))


def _statistics(b: GraphBuilder, *values: Value) -> None:
    for value in values:
        b.statistic(value)


def l2norm(b: GraphBuilder) -> None:
    """y = x / sqrt(sum(x^2) + eps), or with ``guard=max`` y = x / max(sqrt(sum(x^2)), eps) (torch's F.normalize).

    The divisor of the latter is sqrt(max(sum(x^2), eps^2)), whose derivative is finite for a row of zeros, too. An eps
    below 2^-63 counts as that: squares of smaller numbers are not in the range of f32.
    """
    x = b.input("x", M, D)
    square = b.reduce_sum("square", b.mul("x2", x, x), axis=D)
    if b.option("guard", "add", ("add", "max"), "eps is added to the sum, or is the least divisor") == "add":
        guarded = b.add("square_eps", square, b.eps())
    else:
        guarded = b.maximum("square_eps", square, b.from_eps("eps2", "eps_squared"))
    inverse = b.rsqrt("rnorm", guarded)
    returned(b, b.mul("y32", x, inverse))
    b.statistic(inverse)
