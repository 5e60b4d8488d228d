"""The conformance suite: one adversarial list for lngen's kernels and for anybody's normalisation, and its run.

::

    for outcome in conform(NumpyTarget("mine", forward, backward), Contract.of("layernorm", DType.F32)):
        print(outcome.name, outcome.status, outcome.detail)

A target that is not a norm at all is reported once, before the first case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec
from lngen.errors import CheckError, SpecError, one_of
from lngen.proof.check.conform import memory_cases as memory
from lngen.proof.check.conform import number_cases as values
from lngen.proof.check.conform import quantised_cases as quantised
from lngen.proof.check.conform.implementations import FailedError, Found, RaisedError, Target
from lngen.proof.check.conform.suites import Calls, Contract, GraphSuite, Inputs, SkippedError, Suite
from lngen.proof.check.oracles import NORMS

Status = Literal["pass", "fail", "skipped"]

D = 768
# The cases find a wrong norm (a biased variance, eps outside the root); this finds a target that is no norm.
STRANGE_EXCESS, STRANGE_ERROR = 100, 0.05


@dataclass(frozen=True)
class Case:
    """A named case; ``why`` is the meaning of a failure, in one line.

    ``of_graph`` is its form for a graph that is not one of the two norms; a text is the reason why there is no form.
    """

    name: str
    why: str
    run: Callable[[Suite], Found] | str
    of_graph: Callable[[GraphSuite], Found] | str


def general(name: str, why: str, run: Callable[[Calls], Found]) -> Case:
    """A case that says nothing about what is computed."""
    return Case(name, why, run, run)


# Why a case has no form for graphs that are not one of the two norms.
NO_FORMULA = "correctly rounded results are those of a closed form, which a graph has not"
NO_RANGE = "which numbers overflow, and what follows, is known of a norm, not of a graph"
NO_SUBNORMALS = "the error bound of a graph assumes that no intermediate number is subnormal"
OF_LAYERNORM = "it is a property of LayerNorm"

CASES: tuple[Case, ...] = (
    general("ordinary", "the closed form in float64: random gamma, dy with a mean", values.ordinary),
    Case(
        "differences",
        "backward is the derivative of forward, along random directions",
        values.directions,
        values.graph_directions,
    ),
    Case("ulps", "errors against the correctly rounded result", values.ulps, NO_FORMULA),
    general("large-mean-1e2", "E[x^2] - mean^2 loses 4 digits", partial(values.large_mean, ratio=1e2)),
    general("large-mean-1e3", "E[x^2] - mean^2 loses 6 digits", partial(values.large_mean, ratio=1e3)),
    general("large-mean-1e4", "E[x^2] - mean^2 may be negative", partial(values.large_mean, ratio=1e4)),
    general("tiny-variance", "variance 1e-12: eps stands inside the root", partial(values.spread, std=1e-6)),
    Case("huge", "16-bit sums overflow, and the cube of rstd underflows", values.huge, NO_RANGE),
    Case("overflow", "squares overflow f32: that row is beta (0 without) or NaN", values.overflow, NO_RANGE),
    general("gamma-zero", "gamma 0 and 1e-6: nothing divides by gamma", values.weights_zero),
    general("gamma-negative", "the sign of gamma reaches y and dx", values.weights_negative),
    Case("subnormal-x", "inputs below the smallest normal number", values.subnormal_x, NO_SUBNORMALS),
    Case(
        "subnormal-y",
        "results below the smallest normal number are not flushed",
        values.subnormal_y,
        NO_SUBNORMALS,
    ),
    general("nan-row", "a NaN poisons exactly its row", values.nan_row),
    general("inf-row", "an infinity shows, in its row alone", values.inf_row),
    Case("constant-rows", "variance 0: y = beta, dx finite", values.constant_rows, values.graph_constant_rows),
    Case("shift-invariance", "LayerNorm of x + 8 is that of x", values.shift_invariance, OF_LAYERNORM),
    Case("dx-sums-to-zero", "the mean term of LayerNorm's dx", values.dx_sums_to_zero, OF_LAYERNORM),
    general("d-1", "one feature", partial(values.ordinary, d=1)),
    general("d-2", "two features: dx nearly cancels", partial(values.ordinary, d=2)),
    general("d-31", "odd: masked lanes must not enter the sums", partial(values.ordinary, d=31)),
    general("d-768", "not a power of two", partial(values.ordinary, d=768)),
    general("d-4093", "prime: no vector width divides a row", partial(values.ordinary, d=4093)),
    general("m-0", "no rows: empty y and dx, dgamma and dbeta zero", memory.no_rows),
    general("m-1", "one row", partial(values.ordinary, m=1)),
    general("m-4096", "many rows: dgamma and dbeta summed in f32", partial(values.ordinary, m=4096, d=64)),
    general("strided-rows", "x[:, :D] of a wider array: right or refused", memory.strided_rows),
    general("unaligned-base", "one element off alignment: right or refused", memory.unaligned_base),
    general("transposed", "rows not contiguous: right or refused", memory.column_major),
    general("rows-alone", "a row's bits do not depend on other rows", memory.rows_alone),
    general("rows-permuted", "a row's bits do not depend on its place", memory.rows_permuted),
    general("rows-in-bigger-batch", "a row's bits do not depend on M", memory.rows_in_bigger_batch),
    general("repeat", "the same call gives the same bits", memory.repeated),
    general("repeat-columns", "dgamma and dbeta are deterministic", memory.repeated_columns),
    general("inputs-unmodified", "no input is written to", memory.inputs_unmodified),
    general("shape-and-dtype", "results have the shape and dtype of what they belong to", memory.shape_and_dtype),
)


def of_8_bits(name: str, why: str, run: Callable[[GraphSuite], Found]) -> Case:
    """A case about quantised results."""
    return Case(name, why, "a norm of floating-point numbers has no results of 8 bits", run)


QUANTISED_CASES: tuple[Case, ...] = (
    of_8_bits("q-numbers", "a number of 8 bits stays itself, also a subnormal one", quantised.every_number),
    of_8_bits("q-ties", "halfway between two numbers: the even one", quantised.ties),
    of_8_bits("q-saturation", "beyond the largest number: that, with its sign", quantised.saturation),
    of_8_bits("q-division", "v / s, or as the spec says v * (1 / s), v * (Q / amax)", quantised.division),
    of_8_bits("q-scale", "amax / Q, rounded once, within the bounds of the spec", quantised.scale),
    of_8_bits("q-zeros", "amax 0: the least scale, and zeros keep their signs", quantised.zeros),
    of_8_bits("q-nan", "a NaN reaches its scale, and all that is divided by it", quantised.nan),
    of_8_bits("q-infinity", "its scale is infinite, and a quotient 0 or NaN; or it saturates", quantised.infinity),
    of_8_bits("q-tiny", "subnormal numbers are not flushed; the least scale", quantised.tiny),
    of_8_bits("q-huge", "amax near the largest number, small ones beside it", quantised.huge),
    of_8_bits("q-last", "the largest number stands last, where no vector fits", quantised.last),
)


def cases_of(spec: Spec) -> tuple[Case, ...]:
    """The cases for a spec: all, or without those of results of 8 bits."""
    return CASES + QUANTISED_CASES if quantised.is_quantised(spec) else CASES


def select(names: Sequence[str], cases: Sequence[Case] = CASES) -> tuple[Case, ...]:
    """The named ones of ``cases`` in their order, all without names; SpecError for an unknown one."""
    known = [case.name for case in cases]
    for name in names:
        if name not in known:
            raise SpecError(f"there is no case '{name}', {one_of(name, known, 'expected some of')}")
    return tuple(case for case in cases if not names or case.name in names)


@dataclass(frozen=True)
class Outcome:
    """A case's answer."""

    name: str
    status: Status
    why: str
    detail: str
    measured: dict[str, float]


def conform(target: Target, contract: Contract, cases: Sequence[Case] = CASES, *, d: int = D) -> Iterator[Outcome]:
    """The outcome of each case, in order; ``d`` is the row length of cases without one.

    CheckError, before the first case, if y on ordinary data raises, has a wrong shape, or is more than 100 times the
    bound and 5 % of its size away from the norm.
    """
    suite = Suite(target, contract, d)
    look(suite)
    for case in cases:
        yield _outcome(case, case.run, suite)


def conform_graph(suite: GraphSuite, cases: Sequence[Case] = CASES) -> Iterator[Outcome]:
    """The outcome of each case, in order, for the kernels of a graph that is not one of the two norms."""
    for case in cases:
        yield _outcome(case, case.of_graph, suite)


def _skipped(why: str) -> Found:
    raise SkippedError(why)


def _outcome(case: Case, run: Callable[[Any], Found] | str, suite: Calls) -> Outcome:
    status, found = run_case(partial(_skipped, run) if isinstance(run, str) else partial(run, suite))
    return Outcome(case.name, status, case.why, found.detail, found.measured)


def run_case(run: Callable[[], Found]) -> tuple[Status, Found]:
    """Run one case; its status and findings, also where it fails, is skipped or raises."""
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
    excess = contract.expected(inputs)["y"].excess(y)
    hint = f" It does look like {near[0]}: say --norm {near[0]}." if near else ""
    raise CheckError(f"{what}: {given} its y is {excess:.2g} times the bound away from the closed form.{hint}")


def strange(contract: Contract, inputs: Inputs, y: Array) -> bool:
    """True if the error is too large for a norm that is merely wrong."""
    known = {n: a for n, a in inputs.items() if n != "beta" or contract.beta}
    want = contract.expected(known)["y"]
    with np.errstate(all="ignore"):
        error = np.abs(y.astype(np.float64) - want.value) / (1 + np.abs(want.value))
    return float(np.nan_to_num(error, nan=np.inf).max()) > STRANGE_ERROR and want.excess(y) > STRANGE_EXCESS
