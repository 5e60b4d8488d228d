"""Norms that a sample modulates: y = norm(x) * (1 + scale) + shift, as in diffusion transformers (AdaLN).

Peebles and Xie, Scalable Diffusion Models with Transformers, 2022. A sample is n consecutive rows. Forward only.
"""

from __future__ import annotations

from lngen.compiler.graphs.graph_builder import GraphBuilder
from lngen.compiler.graphs.norms import (
    DTYPES,
    Normalise,
    ResidualSum,
    Weights,
    centred,
    promoted,
    rounded,
    rounded_sum,
    scaled,
)
from lngen.compiler.graphs.quantised import returned
from lngen.compiler.ir import Axis, D, DType, M, Value

CASTS = ("once", "norm", "eager")
MODULATION_DTYPES = ("weight", *DTYPES[1:])


def ada_layernorm(b: GraphBuilder) -> None:
    """y = layernorm(h) * (1 + scale) + shift, h = residual + gate * x or x itself.

    scale, shift and gate are of a sample, n consecutive rows, or of a row with ``modulation=row``. A norm with gamma
    and beta is modulated behind these. h is as in ``norms.add_layernorm``.

    ``casts`` is the order of roundings. ``once``: all in the compute dtype, y rounded at the end (FlashInfer).
    ``norm``: the norm with its gamma and beta is rounded to x's dtype before it is modulated (SGLang's CuTe kernels).
    ``eager``: so are 1 + scale, the product with it, and gate * x, each to the dtype that PyTorch's operators give.
    """
    _modulated(b, centred)


def ada_rmsnorm(b: GraphBuilder) -> None:
    """y = rmsnorm(h) * (1 + scale) + shift; see ``ada_layernorm``. With ``shift=no`` Lumina's and Liger's."""
    _modulated(b, scaled)


def _modulated(b: GraphBuilder, normalise: Normalise) -> None:
    by, stored = _axis(b), _dtype(b)
    x = b.input("x", M, D)
    shift = b.optional_input("shift", by, D, dtype=stored)
    scale = b.input("scale", by, D, dtype=stored)
    gate = b.optional_input("gate", by, D, dtype=stored, default=False)
    residual = b.optional_input("residual", M, D, default=False)
    casts = str(b.option("casts", "once", CASTS, "order of roundings"))
    wide = promoted(b.options.dtype, stored) if casts == "eager" else b.compute  # of products
    total = _summed(b, x, gate, residual, wide)
    weights = Weights.inputs(b, gamma=False, beta=False)
    normed = weights.apply(b, normalise(b, x if total is None else total.normalised))
    gain = b.add("gain", b.number("one", 1.0), scale)
    if casts != "once":
        normed = rounded(b, normed, b.options.dtype)
    if casts == "eager":
        gain = rounded(b, gain, stored)
    y32 = rounded(b, b.mul("modulated", normed, gain), wide)
    returned(b, y32 if shift is None else b.add("shifted", y32, shift))
    if total is not None:
        total.write(b)


def _axis(b: GraphBuilder) -> Axis:
    by = b.option("modulation", "sample", ("sample", "row"), "what has scale, shift and gate of its own")
    return M if by == "row" else b.axis("N", M / "n")


def _dtype(b: GraphBuilder) -> DType:
    chosen = str(b.option("modulation_dtype", "weight", MODULATION_DTYPES, "dtype of scale, shift and gate"))
    return b.options.weight if chosen == "weight" else DType(chosen)


def _summed(b: GraphBuilder, x: Value, gate: Value | None, residual: Value | None, wide: DType) -> ResidualSum | None:
    """h, where there is a gate or a residual, of a product in ``wide``; SpecError for its key without it."""
    rounds = b.flag("round_sum", True, "whether the norm is of h as it is stored")
    if gate is None and residual is None:
        if not rounds:
            b.refuse("round_sum is of h, which needs residual=yes or gate=yes; add one.")
        b.reserve("h", "an output")
        return None
    total = x if gate is None else rounded(b, b.mul("gated", x, gate), wide)
    return rounded_sum(b, total if residual is None else b.add("total", total, residual), b.options.dtype, rounds)
