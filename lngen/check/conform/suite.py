"""The common part of the cases: inputs from fixed seeds, calls on copies, verdicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from lngen.check.conform.contract import Contract, FailedError, Found, SkippedError
from lngen.check.conform.layout import clone
from lngen.check.conform.reference import Reference, reference
from lngen.check.conform.targets import Ran, Target
from lngen.check.inputs import differing
from lngen.ir import WIDE, D, DType, M, Type
from lngen.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.runtime.arrays import FROM_NUMPY

ELEMENTS = 2**20
Inputs = dict[str, Array]


class Calls(ABC):
    """Calls of a target with inputs of any shape, and the verdict on their results; ``d``: row length of most cases.

    matrices  names of the inputs, cotangents included, that are [M, D]
    rowwise   names of the results that have rows, columns: of the gradients that have none
    joined    whether a row's results depend on other rows
    """

    matrices: tuple[str, ...]
    rowwise: tuple[str, ...]
    columns: tuple[str, ...]
    joined = False

    def __init__(self, target: Target, dtype: DType, d: int) -> None:
        self.target, self.dtype, self.d = target, dtype, d

    @abstractmethod
    def inputs(self, m: int | None = None, d: int | None = None, *, mean: float = 0.5, std: float = 1.0) -> Inputs:
        """Random inputs and cotangents by name, for ``m`` rows of ``d``."""

    @abstractmethod
    def type_of(self, name: str) -> Type:
        """The type of an input or a result."""

    @abstractmethod
    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Found:
        """Every result within its bounds, or FailedError with the errors in units of the bounds."""

    def rows(self, most: int, d: int | None = None) -> int:
        """``most`` rows, or as many as keep an array near a million elements, but at least five."""
        return max(min(most, 5), min(most, ELEMENTS // (d or self.d)))

    def raw(self, inputs: Mapping[str, Array]) -> Ran:
        """One call, on copies of the inputs in their layout."""
        return self.target.run({n: clone(a) for n, a in inputs.items()})

    def results(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One call's results in their dtypes; FailedError for a wrong shape or dtype."""
        m, d = inputs[self.matrices[0]].shape
        found = {}
        for name, got in self.raw(inputs).results.items():
            wanted = self.type_of(name)
            if got.shape != wanted.shape(m, d):
                raise FailedError(f"{name} has shape {got.shape}, expected {wanted.shape(m, d)}.")
            if got.dtype not in FROM_NUMPY:
                raise FailedError(f"{name} has dtype {got.dtype}, expected {wanted.dtype}.")
            with np.errstate(all="ignore"):
                found[name] = np.array(got.astype(NUMPY_DTYPE[wanted.dtype]))
        return found

    def accuracy(self, inputs: Mapping[str, Array]) -> Found:
        """One call within its bounds."""
        return self.judged(inputs, self.results(inputs))

    def some(self, inputs: Mapping[str, Array], rows: Array) -> Inputs:
        """The inputs of some rows."""
        return {n: np.ascontiguousarray(a[rows]) if M in self.type_of(n).axes else a for n, a in inputs.items()}

    def need_rows(self) -> None:
        """SkippedError if a row's results depend on other rows."""
        if self.joined:
            raise SkippedError("an equation of the graph joins rows")

    def need(self, *names: str) -> None:
        """SkippedError unless backward returns every one of these gradients."""
        for name in names:
            if name not in self.target.gradients:
                raise SkippedError(f"no {name}: a backward is not given" if not self.target.gradients else f"no {name}")


class Suite(Calls):
    """A norm: a target of x, gamma and beta, and its contract."""

    matrices, rowwise, columns = ("x", "dy"), ("y", "dx"), ("dgamma", "dbeta")

    def __init__(self, target: Target, contract: Contract, d: int) -> None:
        super().__init__(target, contract.dtype, d)
        self.contract = contract

    def wide(self) -> Suite:
        """The same suite in float64."""
        return Suite(self.target, self.contract.wide(), self.d)

    def type_of(self, name: str) -> Type:
        return Type(self.contract.dtype_of(name), WIDE if name in (*self.matrices, *self.rowwise) else (D,))

    def inputs(self, m: int | None = None, d: int | None = None, *, mean: float = 0.5, std: float = 1.0) -> Inputs:
        """x around ``mean``, gamma, beta and dy: random, nothing at zero or one, dy with a nonzero mean."""
        d = self.d if d is None else d
        m = self.rows(37, d) if m is None else m
        rng = np.random.default_rng([m, d])
        drawn = {
            "x": rng.normal(mean, std, (m, d)),
            "gamma": rng.normal(0.5, 1.0, d),
            "beta": rng.normal(0.5, 1.0, d),
            "dy": rng.normal(0.3, 1.0, (m, d)),
        }
        absent = {n for n in ("gamma", "beta") if not getattr(self.contract, n)}
        return {n: round_to(a, self.contract.dtype_of(n)) for n, a in drawn.items() if n not in absent}

    def reference(self, inputs: Mapping[str, Array]) -> Reference:
        """The expected results."""
        return reference(self.contract, inputs)

    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Found:
        return self.within(self.reference(inputs), results)

    def within(self, want: Reference, got: Mapping[str, Array]) -> Found:
        """Every result within its bounds, or FailedError with the errors in units of the bounds."""
        return of_bounds({name: want.excess(name, a) for name, a in got.items()})

    def need_gamma(self) -> None:
        """SkippedError without gamma."""
        if not self.contract.gamma:
            raise SkippedError("no gamma")

    def need_layernorm(self, reason: str) -> None:
        """SkippedError with ``reason`` for RMSNorm."""
        if self.contract.norm != "layernorm":
            raise SkippedError(reason)


def of_bounds(measured: dict[str, float]) -> Found:
    """The errors in units of their bounds; FailedError if one exceeds its bound."""
    detail = f"{', '.join(f'{n} {v:.2g}' for n, v in measured.items())} of the bound"
    if max(measured.values()) > 1:
        raise FailedError(detail, measured)
    return Found(detail, measured)


def changed(inputs: Mapping[str, Array], **arrays: Array) -> Inputs:
    """The inputs with some replaced, in their own dtypes; an absent array stays absent."""
    new = {n: a.astype(np.float64) for n, a in arrays.items() if n in inputs}
    with np.errstate(all="ignore"):
        return {**inputs, **{n: round_to(a, FROM_NUMPY[inputs[n].dtype]) for n, a in new.items()}}


def same(pairs: Mapping[str, tuple[Array, Array]], what: str) -> Found:
    """FailedError with the results whose bits differ, and the number of differences."""
    wrong = {n: differing(got, want) for n, (got, want) in pairs.items()}
    parts = [f"{n}: {count} of {pairs[n][0].size} differ" for n, count in wrong.items() if count]
    if parts:
        raise FailedError(f"{what}: {'; '.join(parts)}", {n: float(c) for n, c in wrong.items()})
    return Found(f"{sum(got.size for got, _ in pairs.values())} numbers equal")
