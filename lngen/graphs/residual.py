"""Norms of a sum: a residual, a second branch, scales per row and per feature, the sum written for the next layer."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.graphs.builder import GraphBuilder
from lngen.graphs.norms import cast_weights, centred, scaled
from lngen.graphs.weights import Weights, zero_centred
from lngen.ir import D, DType, M, Value

DTYPES = ("dtype", "f16", "bf16", "f32")


@dataclass(frozen=True)
class Sum:
    """The sum that is ``normalised``, and the value that is returned as h, of the dtype ``stored``."""

    normalised: Value
    returned: Value
    stored: DType

    def write(self, b: GraphBuilder) -> None:
        """The output h, from which backward computes."""
        b.optional_output("h", self.returned, dtype=self.stored, save=True)


def add_layernorm(b: GraphBuilder) -> None:
    """h = x * rowscale * colscale + x1 + residual, y = layernorm(h) * gamma + beta.

    Pre-LN returns h, the residual stream; post-LN does without it (``h=no``). Backward reads h in place of its terms,
    besides x for the gradients of its factors, and adds dh after the norm's own gradient, as DeepSpeed's
    BackwardFusedAdd does. The norm is of h as it is stored (PyTorch's two operators, Liger, vLLM), so that backward has
    what forward had. With ``round_sum=no`` it is of the sum in the compute dtype (FlashAttention, FlashInfer), and
    backward differs from the derivative by the rounding of h: lngen/docs/family.md has the bound.
    """
    total = summed(b)
    weights = Weights.inputs(b, one=zero_centred(b))
    b.output("y", weights.apply(b, centred(b, total.normalised)))
    total.write(b)


def add_rmsnorm(b: GraphBuilder) -> None:
    """h = x * rowscale * colscale + x1 + residual, y = rmsnorm(h) * gamma; see ``add_layernorm`` and ``rmsnorm``.

    T5 and Llama normalise the sum as it is stored, too: ``casts=t5``.
    """
    total = summed(b)
    weights = cast_weights(b)
    b.output("y", weights.apply(b, scaled(b, total.normalised)))
    total.write(b)


def parallel_layernorm(b: GraphBuilder) -> None:
    """y = layernorm(h) * gamma + beta, y1 = layernorm(h) * gamma1 + beta1: two norms of one sum, for parallel blocks.

    h and its terms as in ``add_layernorm``.
    """
    total, one = summed(b), zero_centred(b)
    weights, others = Weights.inputs(b, one=one), Weights.inputs(b, "1", one=one)
    _two_outputs(b, centred(b, total.normalised), weights, others)
    total.write(b)


def parallel_rmsnorm(b: GraphBuilder) -> None:
    """y = rmsnorm(h) * gamma, y1 = rmsnorm(h) * gamma1: two norms of one sum; see ``parallel_layernorm``."""
    total, one = summed(b), zero_centred(b)
    weights, others = (Weights.inputs(b, suffix, beta=False, one=one) for suffix in ("", "1"))
    _two_outputs(b, scaled(b, total.normalised), weights, others)
    total.write(b)


def _two_outputs(b: GraphBuilder, xhat: Value, weights: Weights, others: Weights) -> None:
    if weights.gamma is None and others.gamma is None and weights.beta is None and others.beta is None:
        b.refuse("two norms of one sum without weights are the same; use a graph with one output.")
    b.output("y", weights.apply(b, xhat))
    b.output("y1", others.apply(b, xhat, "1"))


def summed(b: GraphBuilder) -> Sum:
    """The sum of the terms that are there, rounded as it is stored, unless ``round_sum=no``.

    The factors come in the order of FlashAttention: x by the row's, then by the feature's.
    """
    chosen = str(b.option("residual_dtype", "dtype", DTYPES, "dtype of residual and h"))
    stored = b.options.dtype if chosen == "dtype" else DType(chosen)
    term = b.input("x", M, D)
    residual = b.optional_input("residual", M, D, dtype=stored)
    x1 = b.optional_input("x1", M, D, default=False)
    rowscale = b.optional_input("rowscale", M, default=False)
    colscale = b.optional_input("colscale", D, default=False)
    if residual is None and x1 is None and rowscale is None and colscale is None:
        b.refuse("without residual, x1, rowscale and colscale there is no sum; use the norm alone.")
    if rowscale is not None:
        term = b.mul("x_rows", term, rowscale)
    if colscale is not None:
        term = b.mul("x_columns", term, colscale)
    total = term if x1 is None else b.add("branches", term, x1)
    total = total if residual is None else b.add("total", total, residual)
    if b.flag("round_sum", True, "whether the norm is of the sum as it is stored"):
        rounded = b.cast("h", total, to=stored)
        return Sum(b.cast("h32", rounded, to=b.compute), rounded, stored)
    return Sum(total, total, stored)
