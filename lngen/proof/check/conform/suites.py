"""The common part of the cases: what a target is expected to compute, inputs from fixed seeds, calls, verdicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, D, DType, Lengths, M, Type, compute_dtype, independent_rows, values_of
from lngen.compiler.ir.numerics import FROM_NUMPY, NUMPY_DTYPE, Array, round_to
from lngen.compiler.passes.instance import NAMED, indexed, lengths
from lngen.compiler.spec import Spec
from lngen.dtypes import WRITTEN
from lngen.errors import SpecError
from lngen.proof.check.conform.implementations import FailedError, Found, Ran, Target, clone
from lngen.proof.check.differences import real_results
from lngen.proof.check.inputs import differing, draw
from lngen.proof.check.oracles import NORMS, SLACK, Expected, NormName, closed_form, excess

ELEMENTS = 2**20
Inputs = dict[str, Array]


class SkippedError(Exception):
    """The case does not apply to this target; the message gives the reason."""


@dataclass(frozen=True)
class Contract:
    """The norm and the element types of x, of gamma and beta, and of y."""

    norm: NormName
    dtype: DType
    weight: DType
    out: DType
    eps: float
    gamma: bool
    beta: bool

    @classmethod
    def of(cls, norm: NormName, dtype: DType, eps: float = 1e-5) -> Contract:
        """A function with one dtype; LayerNorm has gamma and beta, RMSNorm gamma."""
        return cls(norm, dtype, dtype, dtype, eps, True, norm == "layernorm")

    @classmethod
    def of_spec(cls, spec: Spec) -> Contract:
        """The contract of a spec of one of the two norms; SpecError for any other graph."""
        if not spec.builtin:
            raise SpecError(f"'{spec}' is not a norm that conform knows, expected one of {', '.join(NORMS)}.")
        (norm,) = (n for n in NORMS if n == spec.definition.name)
        names = {p.name for p in spec.forward().params}
        return cls(norm, spec.dtype, spec.weight, spec.out, spec.eps_or_default, "gamma" in names, "beta" in names)

    def wide(self) -> Contract:
        """The same contract in float64."""
        return replace(self, dtype=DType.F64, weight=DType.F64, out=DType.F64)

    @property
    def compute(self) -> DType:
        """The dtype expected of the computation: f32, or f64 if any array is f64."""
        return compute_dtype(self.dtype, self.weight, self.out)

    def dtype_of(self, name: str) -> DType:
        """The element type of an input or a result."""
        if name in ("y", "dy"):
            return self.out
        return self.dtype if name in ("x", "dx") else self.weight

    def expected(self, inputs: Mapping[str, Array]) -> dict[str, Expected]:
        """The results for ``inputs`` with their bounds: y, and with ``dy`` dx, dgamma and dbeta.

        An f64 result is measured in longdouble, which on some machines is no wider; the bound has room for both.
        """
        names = ("y", "dx", "dgamma", "dbeta") if "dy" in inputs else ("y",)
        stored = {name: self.dtype_of(name) for name in names}
        wide = np.longdouble if self.compute is DType.F64 else np.float64
        with np.errstate(all="ignore"):
            return closed_form(self.norm, inputs, stored, self.eps, self.compute, wide)


class Calls(ABC):
    """Calls of a target with inputs of any shape, and the verdict on their results; ``d``: row length of most cases.

    matrices    names of the inputs, cotangents included, that are [M, D]
    rowwise     names of the results that have rows
    columns     names of the gradients that have no rows
    weights     names of the inputs that a case may make zero or negative
    no_weights  why a case that needs weights is skipped, if there are none
    joined      whether a row's results depend on other rows
    """

    matrices: tuple[str, ...]
    rowwise: tuple[str, ...]
    columns: tuple[str, ...]
    weights: tuple[str, ...]
    no_weights: str
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
        found = {}
        for name, got in self.raw(inputs).results.items():
            wanted, shape = self.type_of(name), self.shape_of(name, inputs)
            if got.shape != shape:
                raise FailedError(f"{name} has shape {got.shape}, expected {shape}.")
            if FROM_NUMPY.get(got.dtype) not in WRITTEN:
                raise FailedError(f"{name} has dtype {got.dtype}, expected {wanted.dtype}.")
            with np.errstate(all="ignore"):
                found[name] = np.array(got.astype(NUMPY_DTYPE[wanted.dtype]))
        return found

    def shape_of(self, name: str, inputs: Mapping[str, Array]) -> tuple[int, ...]:
        """The shape of a result for such inputs, of which those of sets of rows say how many there are."""
        m, d = inputs[self.matrices[0]].shape
        axes = ((axis, n) for key, a in inputs.items() for axis, n in zip(self.type_of(key).axes, a.shape, strict=True))
        return self.type_of(name).shape_of(Lengths({**dict(axes), M: m, D: d}))

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

    def need_weights(self) -> None:
        """SkippedError without weights."""
        if not self.weights:
            raise SkippedError(self.no_weights)

    def need(self, *names: str) -> None:
        """SkippedError unless backward returns every one of these gradients."""
        for name in names:
            if name not in self.target.gradients:
                raise SkippedError(f"no {name}: a backward is not given" if not self.target.gradients else f"no {name}")


class Suite(Calls):
    """A norm: a target of x, gamma and beta, and its contract."""

    matrices, rowwise, columns = ("x", "dy"), ("y", "dx"), ("dgamma", "dbeta")
    no_weights = "no gamma"

    def __init__(self, target: Target, contract: Contract, d: int) -> None:
        super().__init__(target, contract.dtype, d)
        self.contract, self.weights = contract, ("gamma",) if contract.gamma else ()

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

    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Found:
        want = self.contract.expected(inputs)
        return of_bounds({name: want[name].excess(a) for name, a in results.items()})

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


class GraphSuite(Calls):
    """lngen's kernels of any graph, judged by the graph in float64, with running bounds of its roundings; at any D.

    ``positive`` are the inputs that have to be, ``weights`` those over D alone that may have either sign. SpecError for
    a graph without an [M, D] input, which no case has rows of, and for gradients that are added to arrays.
    """

    no_weights = "no input over D alone that may have either sign"

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__(target, spec.dtype, spec.d)
        self.spec, self.forward = spec, spec.with_direction("fwd").forward()
        if spec.accumulate:
            raise SpecError(f"conform compares gradients with expected ones; leave accumulate out of '{spec}'.")
        self._given = {p.name: p for p in self.forward.tensors}
        self._cotangents = {
            f"d{r.name}": replace(r, name=f"d{r.name}")
            for r in self.forward.results
            if spec.direction == "bwd" and r.name in spec.differentiated
        }
        known = {*self._given, *self._cotangents, *(r.name for r in self.forward.results)}
        self._scales = {p.name: p for p in spec.graph().tensors if p.name not in known}  # of dx
        self._types = {v.name: v.type for g in (spec.graph(), self.forward) for v in (*g.params, *g.results)}
        self._types |= {name: v.type for name, v in self._cotangents.items()}
        self._types |= {name: self._types[same] for name, same in spec.graph().shared.items()}
        outputs = spec.definition.outputs(spec.options)
        floats = [n for n in (*self._given, *self._cotangents) if self.type_of(n).dtype.digits]
        self.matrices = tuple(n for n in floats if self.type_of(n).axes == WIDE)
        self.rowwise = tuple(n for n in (*outputs, *target.gradients) if M in self.type_of(n).axes)
        self.columns = tuple(n for n in target.gradients if M not in self.type_of(n).axes)
        self.joined = not independent_rows(self.forward)
        self.positive = spec.positive_inputs()
        self.weights = tuple(
            n for n in self._given if n in floats and self.type_of(n).axes == (D,) and n not in self.positive
        )
        if not any(n in self._given for n in self.matrices):
            raise SpecError(f"conform expects a graph with an [M, D] input, '{spec}' has none; try lngen check {spec}")

    def type_of(self, name: str) -> Type:
        return self._types[name]

    def inputs(self, m: int | None = None, d: int | None = None, *, mean: float = 0.5, std: float = 1.0) -> Inputs:
        """[M, D] inputs around ``mean``, others and cotangents as in ``lngen check``: nothing at zero or one."""
        d = self.d if d is None else d
        m = self.rows(37, d) if m is None else m
        rng, sizes = np.random.default_rng([m, d]), lengths(self.forward, m, d, sets=NAMED)
        found = {}
        for name, v in self._given.items():
            around = (mean, std) if v.type.axes == WIDE else (0.5, 1.0)
            found[name] = draw(rng, v, sizes, *around, of=indexed(self.forward).get(v), positive=name in self.positive)
        found |= {n: draw(rng, v, sizes, 0.3) for n, v in self._cotangents.items()}
        return found | {n: draw(rng, v, sizes, 0.5, positive=True) for n, v in self._scales.items()}

    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Found:
        """Outputs by the graph as described; gradients by the derived graph, whose formulas ``differences`` checks.

        SkippedError where the graph has no bound: a number beyond the largest, or a divisor that may be zero.
        """
        spec = replace(self.spec, d=inputs[self.matrices[0]].shape[1])
        forward, values = spec.with_direction("fwd"), values_of(self.forward, spec.eps_or_default)
        given = {n: inputs[n] for n in self._given} | values
        wanted = real_results(forward, given)
        if any(n in results for n in self.target.gradients):
            known = {**interpret(forward.graph(), given), **inputs, **values}
            wanted |= real_results(spec, {p.name: known[p.name] for p in spec.graph().params})
            wanted |= {name: wanted[same] for name, same in spec.graph().shared.items()}
        measured: dict[str, float] = {}
        for name, got in results.items():
            value, error = wanted[name].value, wanted[name].error
            if not bool(np.isfinite(value).all() and np.isfinite(error).all()):
                raise SkippedError(f"no error bound for such numbers: {name} or its bound is infinite")
            measured[name] = excess(got.reshape(value.shape), value, SLACK * error)
        return of_bounds(measured)
