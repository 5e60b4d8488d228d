"""gamma and beta, the weights that a norm is followed by."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.graphs.builder import GraphBuilder
from lngen.ir import D, DType, Value


@dataclass(frozen=True)
class Weights:
    """[D] each, None without; ``rounding``: the dtype to which a row is rounded before it is multiplied by gamma."""

    gamma: Value | None
    beta: Value | None
    rounding: DType | None = None

    @classmethod
    def inputs(
        cls, b: GraphBuilder, suffix: str = "", *, beta: bool = True, one: bool = False, rounding: DType | None = None
    ) -> Weights:
        """The inputs gamma and beta, whose names end in ``suffix``; ``beta``: whether it is there by default.

        ``one``: gamma is the weight less 1, so rows are multiplied by 1 + gamma, added in the compute dtype (in bf16 a
        gamma below 2^-9 would be lost). SpecError without the gamma that this needs.
        """
        gamma32 = b.optional_input(f"gamma{suffix}", D)
        beta32 = b.optional_input(f"beta{suffix}", D, default=beta)
        if one and gamma32 is None:
            b.refuse(f"1 + gamma{suffix} needs gamma{suffix}; leave gamma{suffix}=no or zero_centred=yes away.")
        if one and gamma32 is not None:
            gamma32 = b.add(f"scale{suffix}", b.number("one", 1.0), gamma32)
        return cls(gamma32, beta32, rounding)

    def apply(self, b: GraphBuilder, xhat: Value, suffix: str = "") -> Value:
        """xhat * gamma + beta, as far as they are there."""
        if self.rounding is not None:
            xhat = rounded(b, xhat, self.rounding)
        y32 = xhat if self.gamma is None else b.mul(f"scaled{suffix}", xhat, self.gamma)
        return y32 if self.beta is None else b.add(f"y{suffix}32", y32, self.beta)


def zero_centred(b: GraphBuilder) -> bool:
    """The option ``zero_centred``."""
    return b.flag("zero_centred", False, "whether rows are multiplied by 1 + gamma")


def rounded(b: GraphBuilder, x: Value, to: DType) -> Value:
    """x rounded to a dtype, in the compute dtype again."""
    return b.cast(f"{x.name}_rounded32", b.cast(f"{x.name}_rounded", x, to=to), to=b.compute)
