"""Norms whose result is quantised, for a GEMM of 8 bits (``lngen help quantised``), and the way back.

    q, q_scale = rms_norm_quant(x, (d,), weight, eps)  # a scale for each row
    q, q_scale, h = add_rms_norm_quant(x, residual, (d,), weight, eps, scales="block")
    q, q_scale, y = rms_norm_quant(x, (d,), weight, eps, y=True)  # gradients come through y
    q, _ = rms_norm_quant(x, (d,), weight, eps, scales="tensor", q_scale=scale)
    q, q_scale, amax = rms_norm_quant(x, (d,), weight, eps, amax=amax)  # the largest |v| so far

They go the way of all functions (``torch_functions``). Keyword arguments are the keys of a spec.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from lngen.compiler.graphs.quantised import KEYS
from lngen.dtypes import QUANTISED
from lngen.launch.direct import TO_TORCH
from lngen.torch.bridge import TorchError, TorchTypeError, constant
from lngen.torch.graph_ops import OPS
from lngen.torch.graph_way import Direct
from lngen.torch.torch_functions import Shape, keys_of, norm, outputs_of

NUMBERS = ("q_scale", "amax_max", "amax_in")  # inputs of one number: the last is the key amax
RULE = tuple(key for key in KEYS if key not in NUMBERS)


class Keys(TypedDict, total=False):
    """The keys of a spec: from ``quant`` on, which is e4m3 by default, and those of the norm."""

    quant: str
    scales: str
    q_scale: Tensor | None
    block_size: int
    tensor_scale: str
    apply: str
    amax_min: float
    amax_max: Tensor | None
    scale_min: float
    scale_pow2: str
    scale_layout: str
    quantised: str
    y: bool
    amax: Tensor | None
    zero_centred: bool
    casts: str
    round_sum: bool


def _direct(graph: str, tensors: str, options: str) -> Direct:
    return Direct(graph, (*tensors.split(), *NUMBERS), (*options.split(), *RULE))


WAYS = {
    "rmsnorm": _direct("rmsnorm", "x gamma", "zero_centred casts"),
    "add_rmsnorm": _direct("add_rmsnorm", "x residual gamma", "zero_centred casts round_sum"),
    "layernorm": _direct("layernorm", "x gamma beta", "zero_centred"),
    "add_layernorm": _direct("add_layernorm", "x residual gamma beta", "zero_centred round_sum"),
}


def rms_norm_quant(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    **keys: Unpack[Keys],
) -> tuple[Tensor, ...]:
    """``q, q_scale`` of ``rms_norm``, with ``y=True`` ``q, q_scale, y``.

    q has the shape of ``input`` and is float8_e4m3fn, float8_e5m2 or int8, as ``quant`` says. q_scale is float32, of
    shape (...) for a scale of each row, and (..., D / block_size) for ``scales="block"``; with
    ``scale_layout="columns"`` the rows of a column lie side by side. With ``scales="tensor"`` it is the argument
    ``q_scale``, which has one element, as ``amax_max`` and ``amax`` have. With ``amax`` the last result is the larger
    one of it and of all that is quantised, without signs. The other keys are those of a spec
    (``lngen help quantised``) and of ``rms_norm``. Gradients come through y; q and q_scale have none. Autocast changes
    nothing. RuntimeError for tensors that do not fit, and for one that requires grad without ``y=True``; SpecError for
    keys that do not fit together.
    """
    return _quantised("rmsnorm", normalized_shape, (input, weight), eps, keys)


def add_rms_norm_quant(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    **keys: Unpack[Keys],
) -> tuple[Tensor, ...]:
    """``q, q_scale, h`` of ``add_rms_norm``, with ``y=True`` ``q, q_scale, h, y``; the rest as ``rms_norm_quant``.

    Gradients come through h as well.
    """
    return _quantised("add_rmsnorm", normalized_shape, (input, residual, weight), eps, keys)


def layer_norm_quant(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **keys: Unpack[Keys],
) -> tuple[Tensor, ...]:
    """``q, q_scale`` of ``layer_norm``, with ``y=True`` ``q, q_scale, y``; the rest as ``rms_norm_quant``."""
    return _quantised("layernorm", normalized_shape, (input, weight, bias), eps, keys)


def add_layer_norm_quant(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **keys: Unpack[Keys],
) -> tuple[Tensor, ...]:
    """``q, q_scale, h`` of ``add_layer_norm``, with ``y=True`` ``q, q_scale, h, y``; as ``add_rms_norm_quant``."""
    return _quantised("add_layernorm", normalized_shape, (input, residual, weight, bias), eps, keys)


def _quantised(
    graph: str, shape: Shape, tensors: Sequence[Tensor | None], eps: float | None, keys: Keys
) -> tuple[Tensor, ...]:
    """The results in the order that the functions promise."""
    given, bound, before = keys.pop("q_scale", None), keys.pop("amax_max", None), keys.pop("amax", None)
    options, order = _planned(graph, (*keys.items(), *([] if before is None else [("amax", True)])))
    if (given is None) == (order[1] is None):
        raise TorchError("q_scale is expected with scales='tensor', and only there; pass both, or neither.")
    if not torch.is_grad_enabled():  # so that weights of a model take the direct way, which has no gradients of these
        tensors = [t if t is None or not getattr(t, "requires_grad", False) else t.detach() for t in tensors]
    numbers = map(_number, (given, bound, before))
    results = norm(WAYS[graph], shape, (*tensors, *numbers, None), eps, options)
    found: list[Any] = [given if n is None else results[n] for n in order]
    q, scale, *others = found
    return q, scale.movedim(0, -1) if keys.get("scale_layout") == "columns" else scale, *others


@constant
def _planned(
    graph: str, keys: tuple[tuple[str, Any], ...]
) -> tuple[tuple[bool | str | float, ...], tuple[int | None, ...]]:
    """The options of a function, and the results that it returns by number, None for the argument ``q_scale``."""
    way, said = WAYS[graph], {**OPS[graph].defaults, "quant": "e4m3", **dict(keys)}
    if unknown := [name for name, _ in keys if name not in way.options]:
        near = difflib.get_close_matches(unknown[0], [*way.options, *NUMBERS], 1) or [", ".join(way.options)]
        raise TorchTypeError(f"a quantised '{graph}' has no key '{unknown[0]}'; take {near[0]}.")
    if said["quant"] == "no":
        raise TorchError("quant is expected to be a dtype of 8 bits, got no; take the function without quant.")
    options = tuple([said[name] for name in way.options])
    names = outputs_of(graph, keys_of(way, options))
    wanted = ["q", "q_scale", *[name for name in ("h", "y", "amax") if name in names]]
    return options, tuple([names.index(name) if name in names else None for name in wanted])


def _number(tensor: Tensor | None) -> Tensor | None:
    """A tensor of one element without dimensions; others are refused later."""
    return tensor.reshape(()) if isinstance(tensor, Tensor) and tensor.numel() == 1 else tensor


def dequantise(q: Tensor, q_scale: Tensor) -> Tensor:
    """``q * q_scale`` in float32, for a scale of each row, of each block of a row, or one for all, as its shape says.

    q         [..., D] of float8_e4m3fn, float8_e5m2 or int8
    q_scale   [...], [..., blocks] or one element, in float32

    RuntimeError for other dtypes and shapes.
    """
    known, rows = [TO_TORCH[dtype] for dtype in QUANTISED], q.shape[:-1]
    scale = q_scale.reshape(()).expand(rows) if q_scale.numel() == 1 else q_scale
    blocks, more = scale.shape[len(rows) :].numel(), scale.dim() - len(rows)
    fits = scale.shape[: len(rows)] == rows and more in (0, 1) and blocks and q.shape[-1] % blocks == 0
    if q.dtype not in known or scale.dtype != torch.float32 or not fits:
        raise TorchError(
            f"dequantise expects q of {', '.join(map(str, known))} and a float32 q_scale of one element, of shape "
            f"{list(rows)}, or of that and a number of equal blocks of a row; got {q.dtype} {list(q.shape)} and "
            f"{scale.dtype} {list(q_scale.shape)}."
        )
    return (q.float().unflatten(-1, (blocks, -1)) * scale.reshape(*rows, blocks, 1)).flatten(-2)
