"""LayerNorm and RMSNorm on tensors of a GPU, differentiable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import torch
from torch.autograd.function import once_differentiable

from ._lngen import LngenError, PackNorm, PackSaved
from .choice import Chosen, Wanted, chosen, pack

# The order of roundings of an RMSNorm, the preferred one first; with f32 inputs they are the same.
ONCE = ("once", "llama")  # y is rounded once, as in torch.nn.RMSNorm
LLAMA = ("llama", "once")  # before and after the weight, as in transformers' LlamaRMSNorm

ALIGNMENT = 16  # bytes; the address of a tensor that every kernel takes

Shape = Union[int, Sequence[int]]


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Shape,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """LayerNorm of the last dimensions of ``x``, as torch.nn.functional.layer_norm.

    LngenError if the package has no kernel for these dtypes, this length and this eps; it names the command that
    builds it.
    """
    return _normalised("layernorm", x, normalized_shape, {"gamma": weight, "beta": bias}, eps, ("once",))


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Shape,
    weight: Optional[torch.Tensor] = None,
    eps: Optional[float] = None,
    casts: Sequence[str] = ONCE,
) -> torch.Tensor:
    """RMSNorm of the last dimensions of ``x``, as torch.nn.functional.rms_norm; without eps it is that of torch.

    ``casts``: orders of roundings, of which the first is taken that the package has. LngenError as in ``layer_norm``.
    """
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return _normalised("rmsnorm", x, normalized_shape, {"gamma": weight}, eps, tuple(casts))


def norm(graph: str, **keys: Any) -> PackNorm:
    """A norm of the package: ``y, saved = norm("rmsnorm", d=4096, dtype=x.dtype).forward(x, weight)``.

    ``graph`` is the name of a graph, with keys of its spec, or a whole forward spec. Its backward is
    ``dx, dgamma = norm(...).backward(dy, saved)``.
    """
    return pack().norm(graph, **keys)


def _normalised(
    graph: str,
    x: torch.Tensor,
    shape: Shape,
    weights: Mapping[str, Optional[torch.Tensor]],
    eps: float,
    casts: tuple[str, ...],
) -> torch.Tensor:
    """The norm of the last dimensions of x, of which ``shape`` has the lengths."""
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    given = {name: a for name, a in weights.items() if a is not None}
    for name, a in {"x": x, **given}.items():
        there = tuple(a.shape[-len(dims) :] if name == "x" else a.shape)
        if not dims or there != dims:
            raise LngenError(f"'{name}' is expected to have the last dimensions {dims}, got shape {tuple(a.shape)}.")
    if len(dims) > 1:
        given = {name: a.reshape(-1) for name, a in given.items()}
        y = _normalised(graph, x.flatten(-len(dims)), math.prod(dims), given, eps, casts)
        return y.reshape(x.shape)
    dtypes = tuple([a.dtype for a in given.values()])
    needed: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        needed = tuple([name for name, a in (("x", x), *given.items()) if a.requires_grad])
    found = chosen(Wanted(graph, dims[0], x.dtype, tuple(given), dtypes, float(eps), casts, needed))
    if needed:
        result: torch.Tensor = _Normalised.apply(found, x, *given.values())
        return result
    return found.norm.forward(*map(_suited, (x, *given.values())), eps=found.eps)[0]


class _Normalised(torch.autograd.Function):  # type: ignore[misc]
    """A norm whose backward is that of the package."""

    @staticmethod
    def forward(ctx: Any, found: Chosen, *inputs: torch.Tensor) -> torch.Tensor:
        y, saved = found.norm.forward(*map(_suited, inputs), eps=found.eps)
        ctx.found = found
        ctx.save_for_backward(*[saved[name] for name in found.reads])
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        found: Chosen = ctx.found
        saved = PackSaved(found.norm.spec, dict(zip(found.reads, ctx.saved_tensors)), found.eps)
        gradients = dict(zip(found.wrt, found.norm.backward(_suited(dy), saved)))
        wanted = zip(found.inputs, ctx.needs_input_grad[1:])
        return (None, *[gradients[name] if needed else None for name, needed in wanted])


def _suited(a: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if not every kernel takes it as it lies."""
    if a.is_contiguous() and a.data_ptr() % ALIGNMENT == 0:
        return a
    return a.clone(memory_format=torch.contiguous_format)
