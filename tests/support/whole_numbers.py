"""A graph with an input of whole numbers, or of truth values, over each set of axes."""

from collections.abc import Callable

from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.ir import D, DType, M

WHOLE = (DType.INT8, DType.I32, DType.I64, DType.BOOL)


def everywhere(t: DType) -> Callable[[GraphBuilder], None]:
    """An input of the dtype over each set of axes, two of them masks; rows and columns are summed."""

    def describe(b: GraphBuilder) -> None:
        x, gamma, n = b.input("x", M, D), b.input("gamma", D), b.input("n", M, D, dtype=t)
        row, column, number = b.input("row", M, dtype=t), b.input("column", D, dtype=t), b.input("number", dtype=t)
        h = b.where_gt("h", n, 0.0, x, 0.0) + n * row * column
        rstd = (b.mean(h * h) + 1).rsqrt()
        b.output("y", h * rstd * gamma + number)
        b.output("total", b.sum(b.where_gt("kept", row, 0, gamma, x), M))
        b.statistic(rstd, "rstd")

    return describe
