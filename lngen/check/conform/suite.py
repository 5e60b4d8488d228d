"""The common part of the cases: inputs from fixed seeds, calls on copies, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lngen.check.conform.contract import Contract, FailedError, Found, SkippedError
from lngen.check.conform.layout import clone
from lngen.check.conform.reference import Reference, reference
from lngen.check.conform.targets import Ran, Target
from lngen.check.inputs import differing
from lngen.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.runtime.arrays import FROM_NUMPY

ELEMENTS = 2**20
Inputs = dict[str, Array]


class Suite:
    """A target, its contract, and the row length of the cases without one."""

    def __init__(self, target: Target, contract: Contract, d: int) -> None:
        self.target, self.contract, self.d = target, contract, d

    def wide(self) -> Suite:
        """The same suite in float64."""
        return Suite(self.target, self.contract.wide(), self.d)

    def rows(self, most: int, d: int | None = None) -> int:
        """``most`` rows, or as many as keep an array near a million elements, but at least five."""
        return max(min(most, 5), min(most, ELEMENTS // (d or self.d)))

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

    def raw(self, inputs: Mapping[str, Array]) -> Ran:
        """One call, on copies of the inputs in their layout."""
        return self.target.run({n: clone(a) for n, a in inputs.items()})

    def results(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One call's results in the contract's dtypes; FailedError for a wrong shape or dtype."""
        m, d = inputs["x"].shape
        found = {}
        for name, got in self.raw(inputs).results.items():
            shape = (m, d) if name in ("y", "dx") else (d,)
            if got.shape != shape:
                raise FailedError(f"{name} has shape {got.shape}, expected {shape}.")
            if got.dtype not in FROM_NUMPY:
                raise FailedError(f"{name} has dtype {got.dtype}, expected {self.contract.dtype_of(name)}.")
            with np.errstate(all="ignore"):
                found[name] = np.array(got.astype(NUMPY_DTYPE[self.contract.dtype_of(name)]))
        return found

    def reference(self, inputs: Mapping[str, Array]) -> Reference:
        """The expected results."""
        return reference(self.contract, inputs)

    def accuracy(self, inputs: Mapping[str, Array]) -> Found:
        """One call within its bounds."""
        return self.within(self.reference(inputs), self.results(inputs))

    def within(self, want: Reference, got: Mapping[str, Array]) -> Found:
        """Every result within its bounds, or FailedError with the errors in units of the bounds."""
        measured = {name: want.excess(name, a) for name, a in got.items()}
        detail = f"{', '.join(f'{n} {v:.2g}' for n, v in measured.items())} of the bound"
        if max(measured.values()) > 1:
            raise FailedError(detail, measured)
        return Found(detail, measured)

    def need(self, *names: str) -> None:
        """SkippedError unless backward returns every one of these gradients."""
        for name in names:
            if name not in self.target.gradients:
                raise SkippedError(f"no {name}: a backward is not given" if not self.target.gradients else f"no {name}")

    def need_gamma(self) -> None:
        """SkippedError without gamma."""
        if not self.contract.gamma:
            raise SkippedError("no gamma")

    def need_layernorm(self, reason: str) -> None:
        """SkippedError with ``reason`` for RMSNorm."""
        if self.contract.norm != "layernorm":
            raise SkippedError(reason)


@dataclass(frozen=True)
class Case:
    """A named case; ``why`` is the meaning of a failure, in one line."""

    name: str
    why: str
    run: Callable[[Suite], Found]


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
