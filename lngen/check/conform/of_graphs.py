"""Forms of the cases about numbers for graphs that are not one of the two norms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lngen.check.conform.contract import FailedError, Found, SkippedError
from lngen.check.conform.graph_suite import GraphSuite
from lngen.check.conform.suite import changed
from lngen.check.differences import gradient_excess
from lngen.check.inputs import differing
from lngen.ir import WIDE
from lngen.ir.numerics import Array

CONSTANTS = (0.0, 1.0, 3.3, -0.1, 7.0)


def directions(suite: GraphSuite) -> Found:
    """The derived gradients against differences of the graph, both in float64."""
    if not suite.target.gradients:
        raise SkippedError("no gradients: the spec is a forward")
    measured = gradient_excess(suite.spec)
    detail = f"{', '.join(f'{n} {v:.2g}' for n, v in measured.items())} of what is allowed (of the graph in f64)"
    if max(measured.values(), default=0.0) > 1:
        raise FailedError(detail, measured)
    return Found(detail, measured)


def weights_zero(suite: GraphSuite) -> Found:
    """Every third number of each [D] input of either sign is 0, every third 1e-6: this shows a division by it."""

    def sparse(weight: Array) -> Array:
        weight[0::3], weight[1::3] = 0.0, 1e-6
        return weight

    return _weights(suite, sparse)


def weights_negative(suite: GraphSuite) -> Found:
    """Every number of each [D] input of either sign below zero."""
    return _weights(suite, lambda weight: -np.abs(weight) - 0.1)


def _weights(suite: GraphSuite, change: Callable[[Array], Array]) -> Found:
    if not suite.weights:
        raise SkippedError("no input over D alone that may have either sign")
    inputs = suite.inputs()
    return suite.accuracy(changed(inputs, **{n: change(inputs[n].astype(np.float64)) for n in suite.weights}))


def constant_rows(suite: GraphSuite) -> Found:
    """The elements of a row are equal in each [M, D] input, and positive where they have to be."""
    inputs = suite.inputs(m=len(CONSTANTS))
    rows = np.broadcast_to(np.array(CONSTANTS)[:, None], (len(CONSTANTS), suite.d))
    given = [p.name for p in suite.forward.params if p.type.axes == WIDE]
    return suite.accuracy(changed(inputs, **{n: np.abs(rows) + 0.25 if n in suite.positive else rows for n in given}))


def nan_row(suite: GraphSuite) -> Found:
    """One NaN in the first [M, D] input: every other row keeps its bits."""
    return _poisoned(suite, np.nan)


def inf_row(suite: GraphSuite) -> Found:
    """One infinity: every other row keeps its bits."""
    return _poisoned(suite, np.inf)


def _poisoned(suite: GraphSuite, value: float) -> Found:
    suite.need_rows()
    clean, name, row = suite.inputs(), suite.matrices[0], 1
    x = clean[name].astype(np.float64)
    x[row, suite.d // 2] = value
    want, got = suite.results(clean), suite.results(changed(clean, **{name: x}))
    others = np.arange(len(x)) != row
    for result in (n for n in suite.rowwise if n in got):
        if spilled := differing(got[result][others], want[result][others]):
            raise FailedError(f"{result}: {spilled} elements of other rows changed", {result: float(spilled)})
    return Found("its row alone")
