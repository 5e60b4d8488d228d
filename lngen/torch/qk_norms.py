"""Norms of the heads of queries and keys with RoPE behind them, on a packed projection: one launch for both.

    q, k, v = qk_norm_rope(qkv, q_weight, k_weight, cos, sin, positions, heads=(32, 8, 8))

The graph is ``qk_rmsnorm`` (``lngen help heads``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lngen.torch.any_graph import GraphFunction, function
from lngen.torch.bridge import FROM_TORCH, TorchError, constant, run
from lngen.torch.given import check_tensors

CALLS: dict[str, GraphFunction] = {}  # by their specs
POSITIONS = {torch.int32: "i32", torch.int64: "i64"}


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    heads: tuple[int, int, int] = (0, 0, 0),
    eps: float = 1e-6,
    interleaved: bool = False,
    casts: str = "once",
    rotate_in: str = "f32",
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``q, k, v``: the RMSNorm of each head of q and of k, rotated, and v as it is.

    qkv        (..., (Hq + Hk + Hv) * Dh), the heads of q, of k and of v; ``heads`` is (Hq, Hk, Hv)
    q_weight   (Dh), the factors of q's heads, and ``k_weight`` those of k's; both None without
    cos, sin   (P, rot / 2), a row for each position, or without ``positions`` (..., rot / 2), one for each row of qkv;
               the first rot features of a head are rotated, and others pass
    positions  (...), the position of each row, in int32 or int64, below P; a GPU does not check that
    interleaved  planes of features 2j and 2j + 1 (GPT-J), not of j and j + rot / 2
    casts      the order of roundings of the norm: ``once``, ``llama``, ``t5`` or ``gemma``, as of ``rms_norm``
    rotate_in  ``f32`` rounds once, behind the rotation (vLLM, SGLang); ``norm`` the norm, too (FlashInfer); ``x`` each
               step, as transformers
    in_place   q and k are written over those of qkv, without gradients

    q is (..., Hq, Dh), k (..., Hk, Dh), and v (..., Hv, Dh) is a view of qkv. RuntimeError for what does not fit,
    SpecError for options that do not.
    """
    given = [("qkv", qkv), ("q_weight", q_weight), ("k_weight", k_weight), ("cos", cos), ("sin", sin)]
    check_tensors("qk_rmsnorm", [(name, t) for name, t in given if t is not None or "weight" not in name])
    head = _head(qkv, heads)
    _check(qkv, q_weight, k_weight, cos, sin, positions, head)
    rows = qkv.shape[:-1]
    x, v = qkv.split([(heads[0] + heads[1]) * head, heads[2] * head], -1)  # whose gradients are joined by one copy
    options = {
        "head": head,
        "k_heads": heads[1],
        "gamma": q_weight is not None,
        "rotate": "pairs" if interleaved else "halves",
        "rotary": 2 * cos.shape[-1],
        "positions": "no" if positions is None else POSITIONS[positions.dtype],
        "table_dtype": str(FROM_TORCH[cos.dtype]),
        "casts": casts,
        "rotate_in": rotate_in,
    }
    call = CALLS[_known(tuple(options.items()))]
    tensors = [t for t in (x, q_weight, k_weight, cos, sin, positions) if t is not None]
    y = _over(call, x, tensors, eps) if in_place else call(*tensors, eps=eps)
    q, k = y.view(*rows, -1, head).split(heads[:2], -2)
    return q, k, v.view(*rows, heads[2], head)


@constant
def _known(options: tuple[tuple[str, Any], ...]) -> str:
    """Where ``CALLS`` has the function for these options; Dynamo reads it there."""
    call = function("qk_rmsnorm", **dict(options))
    CALLS[str(call.spec)] = call
    return str(call.spec)


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def _over(call: GraphFunction, x: Tensor, tensors: Sequence[Tensor], eps: float) -> Tensor:
    """The results, over x."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise TorchError("in_place=True writes over qkv, which backward reads; leave it away, or use torch.no_grad().")
    given = (*tensors, x)
    if call.direct(given, eps) is None and call.direct.prepare(call.ops, given, eps, call.keys, eps) is None:
        _by_array_call(call, x, tensors, eps)
    torch.autograd.graph.increment_version(x)
    return x


def _by_array_call(call: GraphFunction, x: Tensor, tensors: Sequence[Tensor], eps: float) -> None:
    """The same for a call that does not go the direct way."""
    given = dict(zip(call.names, tensors, strict=True))
    side = call.ops.side([given.get(name) for name in call.ops.inputs], call.keys)
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        raise TorchError("in_place=True writes rows at one distance; make qkv contiguous.") from None
    run(side, [given[name] for name in side.names], eps, (rows,))


def _head(qkv: Tensor, heads: tuple[int, int, int]) -> int:
    """The features of a head."""
    counts = isinstance(heads, Sequence) and len(heads) == 3 and all(isinstance(n, int) and n >= 0 for n in heads)
    if not counts or heads[0] < 1 or heads[1] < 1:
        raise TorchError(
            f"heads is expected to be the numbers of heads of q, k and v, for example (32, 8, 8), got {heads!r}."
        )
    features, total = qkv.shape[-1] if qkv.dim() else 0, sum(heads)
    if not features or features % total:
        raise TorchError(
            f"qkv is expected to have {total} heads of the same length in its last dimension, for heads={heads}, got "
            f"shape {list(qkv.shape)}."
        )
    return features // total


def _check(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    head: int,
) -> None:
    """RuntimeError, in the words of the function's arguments, for what the graph would refuse in its own."""
    if (q_weight is None) != (k_weight is None):
        raise TorchError("q_weight and k_weight are expected to be there both, or neither.")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and tuple(weight.shape) != (head,):
            raise TorchError(
                f"'{name}' is expected to have shape [{head}], one factor for each feature of a head, got "
                f"{list(weight.shape)}."
            )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in FROM_TORCH or table.dtype != cos.dtype:
            raise TorchError(f"'{name}' is expected to have the dtype of cos, a floating one, got {table.dtype}.")
    rows = qkv.shape[:-1]
    width = cos.shape[-1] if cos.dim() else 0
    lead = rows if positions is None else cos.shape[:1]
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) != (*lead, width) or not 1 <= width <= head // 2:
            expected = list(rows) if positions is None else ["positions"]
            raise TorchError(
                f"'{name}' is expected to have shape {[*expected, 'angles']}, at most {head // 2} angles for heads of "
                f"{head} features, and the same for both, got {list(table.shape)}."
            )
    if positions is None:
        return
    if positions.dtype not in POSITIONS or tuple(positions.shape) != tuple(rows):
        raise TorchError(
            f"'positions' is expected to have shape {list(rows)} and dtype torch.int32 or torch.int64, got "
            f"{list(positions.shape)} and {positions.dtype}."
        )


class QKNormRope(nn.Module):  # type: ignore[misc]
    """``qk_norm_rope`` with the weights of q and of k, ``q_weight`` and ``k_weight``, (Dh) each."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        head: int,
        eps: float = 1e-6,
        interleaved: bool = False,
        casts: str = "once",
        rotate_in: str = "f32",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head, self.eps, self.interleaved = heads, head, eps, interleaved
        self.casts, self.rotate_in = casts, rotate_in
        start = torch.zeros if casts == "gemma" else torch.ones
        self.q_weight, self.k_weight = (nn.Parameter(start(head, device=device, dtype=dtype)) for _ in range(2))

    def forward(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return qk_norm_rope(
            qkv, self.q_weight, self.k_weight, cos, sin, positions, self.heads, self.eps, self.interleaved, self.casts,
            self.rotate_in,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The arguments, for a print of the module."""
        return f"heads={self.heads}, head={self.head}, eps={self.eps}, interleaved={self.interleaved}"


fx.wrap("qk_norm_rope")
