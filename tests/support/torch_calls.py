"""Calls of every function of lngen.torch on a tensor [B, S, D] and two weights, with PyTorch's own beside them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

import lngen.torch as L

D = 8
Function = Callable[[Any, Any, Any], Any]

CALLS: dict[str, Function] = {
    "layer_norm": lambda x, w, b: L.layer_norm(x, (D,), w, b),
    "layer_norm of two": lambda x, w, b: L.layer_norm(x, (3, D), w.expand(3, D), b.expand(3, D)),
    "rms_norm": lambda x, w, b: L.rms_norm(x, (D,), w),
    "add_layer_norm": lambda x, w, b: torch.cat(L.add_layer_norm(x, x * 2, (D,), w, b), -1),
    "add_rms_norm": lambda x, w, b: torch.cat(L.add_rms_norm(x, x * 2, (D,), w, 1e-6), -1),
    "gated_layer_norm": lambda x, w, b: L.gated_layer_norm(x, x * 2, (D,), w, b, act="gelu"),
    "gated_rms_norm": lambda x, w, b: L.gated_rms_norm(x, x * 2, (D,), w, 1e-6, gate_first=True),
    "layer_norm_act": lambda x, w, b: L.layer_norm_act(x, (D,), w, b, act="relu"),
    "rms_norm_act": lambda x, w, b: L.rms_norm_act(x, (D,), w, 1e-6),
    "dyt": lambda x, w, b: L.dyt(x, b[:1], w, b),
    "l2_norm": lambda x, w, b: L.l2_norm(x),
    "softmax": lambda x, w, b: L.softmax(x, -1),
    "log_softmax": lambda x, w, b: L.log_softmax(x, -1),
}
THEIRS: dict[str, Function] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (D,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (D,), w),
    "l2_norm": lambda x, w, b: F.normalize(x, dim=-1),
    "softmax": lambda x, w, b: F.softmax(x, -1),
    "log_softmax": lambda x, w, b: F.log_softmax(x, -1),
}
FORMULAS: dict[str, Function] = THEIRS | {
    "layer_norm of two": lambda x, w, b: F.layer_norm(x, (3, D), w.expand(3, D), b.expand(3, D)),
    "add_layer_norm": lambda x, w, b: torch.cat([F.layer_norm(x * 3, (D,), w, b), x * 3], -1),
    "add_rms_norm": lambda x, w, b: torch.cat([F.rms_norm(x * 3, (D,), w, 1e-6), x * 3], -1),
    "gated_layer_norm": lambda x, w, b: F.layer_norm(x, (D,), w, b) * F.gelu(x * 2),
    "gated_rms_norm": lambda x, w, b: F.rms_norm(x * F.silu(x * 2), (D,), w, 1e-6),
    "layer_norm_act": lambda x, w, b: F.relu(F.layer_norm(x, (D,), w, b)),
    "rms_norm_act": lambda x, w, b: F.silu(F.rms_norm(x, (D,), w, 1e-6)),
    "dyt": lambda x, w, b: torch.tanh(b[0] * x) * w + b,
}


def leaves(dtype: torch.dtype = torch.float32, rows: Sequence[int] = (2, 3)) -> list[Any]:
    """x and two weights that require gradients: the same numbers in every call."""
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((*rows, D), (D,), (D,))]


def gradients(y: Any, inputs: Sequence[Any]) -> list[Any]:
    """Of all inputs, None for those that y does not depend on; the cotangent is no constant."""
    dy = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    return list(torch.autograd.grad(y, inputs, dy, allow_unused=True))


def same_bits(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """True if all are equal, also None to None."""
    pairs = list(zip(found, wanted, strict=True))
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
