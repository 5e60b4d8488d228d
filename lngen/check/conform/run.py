"""Runs the cases one after the other; a target that is not a norm at all is reported once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lngen.check.conform.case import Case
from lngen.check.conform.cases import CASES
from lngen.check.conform.contract import Contract, FailedError, Found, Outcome, RaisedError, SkippedError, Status
from lngen.check.conform.graph_suite import GraphSuite
from lngen.check.conform.reference import reference
from lngen.check.conform.suite import Inputs, Suite
from lngen.check.conform.targets import Target
from lngen.check.tolerances import NORMS
from lngen.errors import CheckError
from lngen.ir.numerics import Array

D = 768
# The cases find a wrong norm (a biased variance, eps outside the root); this finds a target that is no norm.
STRANGE_EXCESS, STRANGE_ERROR = 100, 0.05


def conform(target: Target, contract: Contract, cases: Sequence[Case] = CASES, *, d: int = D) -> Iterator[Outcome]:
    """The outcome of each case, in order; ``d`` is the row length of cases without one.

    CheckError, before the first case, if y on ordinary data raises, has a wrong shape, or is more than 100 times the
    bound and 5 % of its size away from the norm.
    """
    suite = Suite(target, contract, d)
    look(suite)
    for case in cases:
        yield _outcome(case, partial(case.run, suite))


def conform_graph(suite: GraphSuite, cases: Sequence[Case] = CASES) -> Iterator[Outcome]:
    """The outcome of each case, in order, for the kernels of a graph that is not one of the two norms."""
    for case in cases:
        run = case.of_graph
        yield _outcome(case, partial(_skipped, run) if isinstance(run, str) else partial(run, suite))


def _skipped(why: str) -> Found:
    raise SkippedError(why)


def _outcome(case: Case, run: Callable[[], Found]) -> Outcome:
    status, found = answer(run)
    return Outcome(case.name, status, case.why, found.detail, found.measured)


def answer(run: Callable[[], Found]) -> tuple[Status, Found]:
    """A case's status and its findings."""
    try:
        return "pass", run()
    except FailedError as failed:
        return "fail", failed.found
    except SkippedError as skipped:
        return "skipped", Found(str(skipped))
    except RaisedError as raised:
        return "fail", Found(f"raised {raised}")


def look(suite: Suite) -> None:
    """CheckError if y on ordinary data shows that the target is not the norm."""
    contract = suite.contract
    inputs = {n: a for n, a in suite.inputs().items() if n != "dy"}
    what = f"'{suite.target.name}' does not look like a {contract.norm}"
    given = f"of x {contract.dtype}{list(inputs['x'].shape)}"
    try:
        y = suite.results(inputs)["y"]
    except RaisedError as error:
        raise CheckError(f"{what}: {given} it raised {error}") from error
    except FailedError as error:
        raise CheckError(f"{what}: {given} {error}") from error
    if not strange(contract, inputs, y):
        return
    others = [n for n in NORMS if n != contract.norm]
    near = [n for n in others if not strange(replace(contract, norm=n, beta=n == "layernorm"), inputs, y)]
    excess = reference(contract, inputs).excess("y", y)
    hint = f" It does look like {near[0]}: say --norm {near[0]}." if near else ""
    raise CheckError(f"{what}: {given} its y is {excess:.2g} times the bound away from the closed form.{hint}")


def strange(contract: Contract, inputs: Inputs, y: Array) -> bool:
    """True if the error is too large for a norm that is merely wrong."""
    known = {n: a for n, a in inputs.items() if n != "beta" or contract.beta}
    want = reference(contract, known)
    size = 1 + np.abs(want.values["y"])
    with np.errstate(all="ignore"):
        error = float(np.nan_to_num(np.abs(y.astype(np.float64) - want.values["y"]) / size, nan=np.inf).max())
    return error > STRANGE_ERROR and want.excess("y", y) > STRANGE_EXCESS
