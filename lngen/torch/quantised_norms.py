"""Norms whose result is quantised, for a GEMM of 8 bits (``lngen help quantised``), and the way back.

q, q_scale = rms_norm_quant(x, (d,), weight, eps)                  a scale for each row
q, q_scale, h = add_rms_norm_quant(x, residual, (d,), weight, eps, scales="block")
q, q_scale, y = rms_norm_quant(x, (d,), weight, eps, y=True)       gradients come through y
q, _ = rms_norm_quant(x, (d,), weight, eps, scales="tensor", q_scale=scale)
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
from lngen.torch.bridge import TorchError, TorchTypeError
from lngen.torch.graph_ops import OPS
from lngen.torch.graph_way import Direct
from lngen.torch.torch_functions import Shape, keys_of, norm, outputs_of

NUMBERS = ("q_scale", "amax_max")  # keys that are tensors here
RULE = tuple(key for key in KEYS if key not in NUMBERS)


class Keys(TypedDict, total=False):
    """The keys of a spec, by which a norm is quantised; defaults are the spec's, and ``quant`` is e4m3."""

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
    quantised: str
    y: bool
    zero_centred: bool


class RmsKeys(Keys, total=False):
    """The same of an RMSNorm."""

    casts: str


class AddKeys(Keys, total=False):
    """The same of a norm of a sum."""

    round_sum: bool


class AddRmsKeys(RmsKeys, AddKeys, total=False):
    """The same of an RMSNorm of a sum."""


def _direct(graph: str, tensors: str, options: str) -> Direct:
    return Direct(graph, (*tensors.split(), *NUMBERS), (*options.split(), *RULE))


RMS = _direct("rmsnorm", "x gamma", "zero_centred casts")
ADD_RMS = _direct("add_rmsnorm", "x residual gamma", "zero_centred casts round_sum")
LAYER = _direct("layernorm", "x gamma beta", "zero_centred")
ADD_LAYER = _direct("add_layernorm", "x residual gamma beta", "zero_centred round_sum")


def rms_norm_quant(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    **keys: Unpack[RmsKeys],
) -> tuple[Tensor, ...]:
    """``q, q_scale`` of ``rms_norm``, with ``y=True`` ``q, q_scale, y``.

    q has the shape of ``input`` and is float8_e4m3fn, float8_e5m2 or int8, as ``quant`` says. q_scale is float32, of
    shape (...) for a scale of each row, and (..., D / block_size) for ``scales="block"``. With ``scales="tensor"`` it
    is the argument ``q_scale``, which has one element, as ``amax_max`` has. The other keys are those of a spec
    (``lngen help quantised``) and of ``rms_norm``. Gradients come through y; q and q_scale have none. Autocast changes
    nothing. RuntimeError for tensors that do not fit, and for one that requires grad without ``y=True``; SpecError for
    keys that do not fit together.
    """
    return _quantised(RMS, normalized_shape, (input, weight), eps, keys)


def add_rms_norm_quant(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    **keys: Unpack[AddRmsKeys],
) -> tuple[Tensor, ...]:
    """``q, q_scale, h`` of ``add_rms_norm``, with ``y=True`` ``q, q_scale, h, y``; the rest as ``rms_norm_quant``.

    Gradients come through h as well.
    """
    return _quantised(ADD_RMS, normalized_shape, (input, residual, weight), eps, keys)


def layer_norm_quant(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **keys: Unpack[Keys],
) -> tuple[Tensor, ...]:
    """``q, q_scale`` of ``layer_norm``, with ``y=True`` ``q, q_scale, y``; the rest as ``rms_norm_quant``."""
    return _quantised(LAYER, normalized_shape, (input, weight, bias), eps, keys)


def add_layer_norm_quant(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **keys: Unpack[AddKeys],
) -> tuple[Tensor, ...]:
    """``q, q_scale, h`` of ``add_layer_norm``, with ``y=True`` ``q, q_scale, h, y``; as ``add_rms_norm_quant``."""
    return _quantised(ADD_LAYER, normalized_shape, (input, residual, weight, bias), eps, keys)


def _quantised(
    direct: Direct, shape: Shape, tensors: Sequence[Tensor | None], eps: float | None, keys: Keys
) -> tuple[Tensor, ...]:
    """The results in the order that the functions promise."""
    said: dict[str, Any] = {"quant": "e4m3", **keys}
    numbers = [_number(said.pop(name, None)) for name in NUMBERS]
    if unknown := [name for name in said if name not in direct.options]:
        near = difflib.get_close_matches(unknown[0], [*direct.options, *NUMBERS], 1) or [", ".join(direct.options)]
        raise TorchTypeError(f"a quantised '{direct.graph}' has no key '{unknown[0]}'; take {near[0]}.")
    if said["quant"] == "no":
        known = ", ".join(map(str, QUANTISED))
        raise TorchError(f"quant is expected to be one of {known}, got no; take the function without it.")
    if (numbers[0] is not None) != (said.get("scales") == "tensor"):
        raise TorchError("q_scale is expected with scales='tensor', and only there; pass both, or neither.")
    defaults = OPS[direct.graph].defaults
    options = tuple([said.get(name, defaults[name]) for name in direct.options])
    results = norm(direct, shape, (*tensors, *numbers, None), eps, options)
    named = dict(zip(outputs_of(direct.graph, keys_of(direct, options)), results, strict=True))
    q, scale = named.pop("q"), named.pop("q_scale", keys.get("q_scale"))
    return (q, scale, *[named[name] for name in ("h", "y") if name in named])


def _number(tensor: Tensor | None) -> Tensor | None:
    """A tensor of one element without dimensions; others are refused later."""
    return tensor.reshape(()) if isinstance(tensor, Tensor) and tensor.numel() == 1 else tensor


def dequantise(q: Tensor, q_scale: Tensor) -> Tensor:
    """``q * q_scale`` in float32, for a scale of each row, of each block of a row, or one for all, as its shape says.

    q         [..., D] of float8_e4m3fn, float8_e5m2 or int8
    q_scale   [...], [..., blocks] or one element, in float32

    RuntimeError for other dtypes and shapes.
    """
    known = [TO_TORCH[dtype] for dtype in QUANTISED]
    if q.dtype not in known or q_scale.dtype != torch.float32:
        raise TorchError(
            f"dequantise expects q of {', '.join(map(str, known))} and q_scale of torch.float32, got {q.dtype} and "
            f"{q_scale.dtype}."
        )
    if q_scale.numel() == 1:
        return q.float() * q_scale.reshape(())
    if q_scale.shape == q.shape[:-1]:
        return q.float() * q_scale.unsqueeze(-1)
    blocks = q_scale.shape[-1] if q_scale.dim() else 0
    if q_scale.shape[:-1] != q.shape[:-1] or not blocks or q.shape[-1] % blocks:
        raise TorchError(
            f"dequantise expects q_scale of one element, of shape {list(q.shape[:-1])}, or of that and a number of "
            f"equal blocks of a row, for q of shape {list(q.shape)}; got {list(q_scale.shape)}."
        )
    return (q.float().unflatten(-1, (blocks, -1)) * q_scale.unsqueeze(-1)).flatten(-2)
