"""The contract of a target, a case, and the three outcomes of a case."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from lngen.check.tolerances import NORMS, NormName
from lngen.errors import SpecError
from lngen.ir import DType, compute_dtype
from lngen.spec import Spec

Status = Literal["pass", "fail", "skipped"]


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
        return cls(norm, spec.dtype, spec.weight, spec.out, spec.eps, "gamma" in names, "beta" in names)

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


@dataclass(frozen=True)
class Found:
    """How a case passed: a few words, and numbers for programs."""

    detail: str
    measured: dict[str, float] = field(default_factory=dict)


class FailedError(Exception):
    """The case fails; the message gives the size of the error."""

    def __init__(self, detail: str, measured: dict[str, float] | None = None) -> None:
        super().__init__(detail)
        self.found = Found(detail, measured or {})


class SkippedError(Exception):
    """The case does not apply to this target; the message gives the reason."""


class RaisedError(Exception):
    """The target raised; the message is the exception's type and first line."""

    def __init__(self, error: BaseException) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        super().__init__(": ".join([type(error).__name__, *lines[:1]]))


@dataclass(frozen=True)
class Outcome:
    """A case's answer."""

    name: str
    status: Status
    why: str
    detail: str
    measured: dict[str, float]
