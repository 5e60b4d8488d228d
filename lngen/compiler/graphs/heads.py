"""Norms of heads: of each head of the queries and keys of a packed projection, with weights for a head. Forward only.

Rows are tokens: x is [M, D], D the heads of q and behind them those of k, of ``head`` features each. A head is a block
of features, H = D / head, and its weights repeat along a row, E = D % head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lngen.compiler.graphs.graph_builder import GraphBuilder
from lngen.compiler.graphs.norms import CASTS, Weights, cast_weights, centred, scaled
from lngen.compiler.graphs.quantised import returned
from lngen.compiler.graphs.rotary import Rotation
from lngen.compiler.ir import Axis, D, DType, M, Value

# Features of a head. Up to 32 neighbouring lanes fold what each has of it, 32 numbers at most.
HEADS = frozenset(n for n in range(8, 1025, 8) if n <= 32 * (n & -n))
MOST_HEADS = 2**16

Normalise = Callable[[GraphBuilder, Value, Axis], Value]  # of each block of features


def qk_rmsnorm(b: GraphBuilder) -> None:
    """y = x / sqrt(mean(x^2) + eps) * gamma of each head, of those of k gamma_k (Qwen3, Gemma 3).

    ``k_heads``: the last heads of a row, which are k's. Without them all heads have one gamma; with ``head_weights``
    each has its own (Cohere). ``casts`` as of ``norms.rmsnorm``. Backward computes the statistics again: it reads x
    anyway, and the threads of a head are lanes of a warp. ``rotate=halves|pairs``: RoPE behind it, see
    ``rotary.rope``; Qwen3 has casts=llama with rotate_in=x, Gemma 3 gemma with x, vLLM once with f32, FlashInfer once
    with norm.
    """
    _normed(b, scaled, CASTS, beta=False)


def qk_layernorm(b: GraphBuilder) -> None:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta of each head (Chameleon, Cohere); see ``qk_rmsnorm``.

    ``casts=eager``: the norm, its product with gamma and y are rounded as PyTorch's operators store them (Chameleon).
    """
    _normed(b, centred, ("once", "nemotron", "eager"), beta=True)


def _normed(b: GraphBuilder, normalise: Normalise, orders: tuple[str, ...], *, beta: bool) -> None:
    features = head_features(b)
    heads, x = b.axis("H", D / features), b.input("x", M, D)
    weights = cast_weights(b, orders, beta=beta, inputs=partial(_weights, features=features, heads=heads))
    y32 = weights.apply(b, normalise(b, x, heads))
    rotation = Rotation.by_keys(b, features, needed=False)
    returned(b, y32 if rotation is None else rotation.apply(b, y32))


def head_features(b: GraphBuilder) -> int:
    """The option ``head``; SpecError for a number of features that the threads of a row do not fold."""
    features = int(b.option("head", 128, about="features of a head: E = D % head", whole=True))
    if features not in HEADS:
        b.refuse(
            f"head is expected to be a multiple of 8 up to 256, of 16 up to 512, or of 32 up to 1024, got {features}; "
            "for other heads take rmsnorm or layernorm of x as rows of one head, (tokens, heads, features), with "
            "strides=2."
        )
    return features


def _weights(b: GraphBuilder, *, beta: bool, one: bool, rounding: DType | None, features: int, heads: Axis) -> Weights:
    """gamma and beta of a head, of those of q and of k, or of each one."""
    of_k = int(b.option("k_heads", 0, about="the last heads of a row, those of k; 0: all have one gamma", whole=True))
    said = b.option("head_weights", "shared", ("shared", "own"), "what has a gamma and a beta; own: each head, [D]")
    if not 0 <= of_k <= MOST_HEADS:
        b.refuse(f"k_heads is expected to be from 0 to 2^16, got {of_k}.")
    if said == "own" and of_k:
        b.refuse("with head_weights=own each head has weights of its own; leave k_heads away.")
    axis = D if said == "own" else b.axis("E", D % features)
    gamma, beta32 = b.optional_input("gamma", axis), b.optional_input("beta", axis, default=beta)
    if of_k:
        b.needs_row(of_k * features, f"k_heads={of_k} heads of {features} features")
        of_q = b.sub("q_heads", b.size("heads", heads, b.compute), b.number("k_heads", float(of_k)))
        head = b.cast("head", b.iota("head_index", heads), to=b.compute)

        def chosen(name: str, q: Value | None) -> Value | None:
            return q if q is None else b.where_gt(f"{name}s", of_q, head, q, b.input(f"{name}_k", axis))

        gamma, beta32 = chosen("gamma", gamma), chosen("beta", beta32)
    return Weights(gamma, beta32, rounding).centred_at(b, "", one)
