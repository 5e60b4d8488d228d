"""The modulated norms of diffusers: a projection of an embedding, whose parts scale and shift a norm of rows.

A class is known by its name and its parts; what it returns, tried with numbers of our own in place of the projection's,
says whether lngen computes the same. The projection stays the module's own, and its parts are read in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lngen.torch.probe import DTYPES, agree
from lngen.torch.torch_functions import ada_layer_norm, ada_rms_norm
from lngen.torch.variants import EPS_NAMES

ROWS, SAMPLES = 64, 2
INSIDE = ("emb", "linear", "norm", "silu")


class Parts(NamedTuple):
    """How a class names the parts of its projection, and what it is called with.

    order    the names of the parts, in order; ``shift`` and ``scale`` modulate the norm, ``shift2`` and ``scale2`` a
             second result, and the others are results, behind the norm's, in this order
    given    rows and the embedding of the arguments of forward
    to_rows  the embedding is cast to the dtype of the rows
    """

    order: str
    given: Callable[..., tuple[Any, Any]]
    to_rows: bool = False


def _classic(module: Any, x: Any, timestep: Any = None, temb: Any = None) -> tuple[Any, Any]:
    return x, temb if module.emb is None else module.emb(timestep)


def _zero(
    module: Any, x: Any, timestep: Any = None, class_labels: Any = None, hidden_dtype: Any = None, emb: Any = None
) -> tuple[Any, Any]:
    return x, emb if module.emb is None else module.emb(timestep, class_labels, hidden_dtype=hidden_dtype)


def _with_emb(module: Any, x: Any, emb: Any = None) -> tuple[Any, Any]:
    return x, emb


def _with_hidden_states(module: Any, hidden_states: Any, emb: Any = None) -> tuple[Any, Any]:
    return hidden_states, emb


def _continuous(module: Any, x: Any, conditioning_embedding: Any) -> tuple[Any, Any]:
    return x, conditioning_embedding


SIX, TWICE = "shift scale gate shift_mlp scale_mlp gate_mlp", "shift2 scale2 gate2"
CLASSES: Mapping[str, Parts] = {
    "AdaLayerNorm": Parts("scale shift", _classic),
    "AdaLayerNormZero": Parts(SIX, _zero),
    "AdaLayerNormZeroSingle": Parts("shift scale gate", _with_emb),
    "SD35AdaLayerNormZeroX": Parts(f"{SIX} {TWICE}", _with_hidden_states),
    "AdaLayerNormContinuous": Parts("scale shift", _continuous, to_rows=True),
    "LuminaRMSNormZero": Parts("scale gate scale_mlp gate_mlp", _with_emb),
}


@dataclass(frozen=True)
class Modulation:
    """What a module of such a class computes, by lngen's kernels.

    kind     ada_layer_norm or ada_rms_norm
    eps      the attribute of the norm inside that holds it
    by_row   the parts are those of the first dimension of the projection, of all rows
    dtypes   those of rows and weights in which results agree

    ``name``: that of the class in ``CLASSES``.
    """

    kind: str
    name: str
    eps: str
    by_row: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}, of its projection"

    def result(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of a forward; None where they are not known to be the module's own."""
        parts = CLASSES[self.name]
        x, embedding = parts.given(module, *args, **kwargs)
        if not isinstance(x, Tensor) or not isinstance(embedding, Tensor) or not self._takes(module, x):
            return None
        activated = module.silu(embedding)
        return self.modulated(module, x, module.linear(activated.to(x.dtype) if parts.to_rows else activated))

    def _takes(self, module: Any, x: Tensor) -> bool:
        strided = x.layout is torch.strided and not x.is_nested and x.device.type in ("cpu", "cuda", "meta")
        if not strided or x.dim() != 3 or x.dtype not in self.dtypes or module.linear.weight.dtype != x.dtype:
            return False
        return x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type)

    def modulated(self, module: Any, x: Tensor, projection: Tensor) -> Any:
        """The results by the projection."""
        names = CLASSES[self.name].order.split()
        names = names[::-1] if self.name == "AdaLayerNorm" and not self.by_row else names
        dim = 0 if self.by_row else 1
        part = dict(zip(names, projection.chunk(len(names), dim=dim), strict=True))
        shift, scale = part.pop("shift", None), part.pop("scale")
        y = self._of(module.norm, x, shift, scale)
        if not part:
            return y
        second = [self._of(module.norm, x, part.pop("shift2"), part.pop("scale2"))] if "scale2" in part else []
        last = [part.pop("gate2")] if second else []
        return (y, *part.values(), *second, *last)

    def _of(self, norm: Any, x: Tensor, shift: Tensor | None, scale: Tensor) -> Any:
        eps = getattr(norm, self.eps)
        if self.kind == "ada_rms_norm":
            return ada_rms_norm(x, shift, scale, weight=norm.weight, eps=eps, casts="eager")
        return ada_layer_norm(x, shift, scale, weight=norm.weight, bias=norm.bias, eps=eps, casts="eager")


def modulation(module: nn.Module) -> Modulation | str:
    """What the module computes by lngen's kernels, or why it is left."""
    name, own = type(module).__name__, vars(module)["_modules"]
    if not {*own} <= {*INSIDE} or not {"linear", "norm"} <= {*own} or module._parameters or module._buffers:
        return "has modules inside"
    linear, norm = (own[part] for part in ("linear", "norm"))
    eps = next((n for n in EPS_NAMES if isinstance(getattr(norm, n, None), float)), None)
    hooked = [m for m in (linear, norm) if m._forward_hooks or m._forward_pre_hooks]
    if eps is None or hooked or not isinstance(linear, nn.Linear) or norm._modules:
        return "has modules inside whose results are not those of a projection and a norm"
    by_row = name == "AdaLayerNorm" and getattr(module, "chunk_dim", 0) == 0
    for kind in ("ada_layer_norm", "ada_rms_norm"):
        found = Modulation(kind, name, eps, by_row)
        try:
            if _agrees(found, module, torch.float32):
                return replace(found, dtypes=tuple(t for t in DTYPES if _agrees(found, module, t)))
        except (RuntimeError, TypeError, AttributeError):  # what this class is not
            continue
    return "computes another function"


def _agrees(found: Modulation, module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether results, in float32 also gradients, are the module's own, for a projection that is given."""
    generator, parts = torch.Generator().manual_seed(0), vars(module)["_modules"]
    features, norm = parts["linear"].out_features, copy.deepcopy(parts["norm"]).cpu().to(dtype)
    d = features // len(CLASSES[found.name].order.split())
    shape = (features,) if found.by_row else (SAMPLES, features)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.no_grad():
        for weight in norm.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        x = torch.randn(SAMPLES, ROWS, d, generator=generator) * torch.logspace(-3, 3, ROWS)[:, None]
        x, projection = (t.to(dtype) for t in (x, torch.randn(shape, generator=generator)))
        stub: Any = object.__new__(type(module))
        given = {"norm": norm, "linear": _Given(projection), "silu": nn.Identity(), "emb": None}
        stub.__dict__ = {**vars(module), "_modules": given}
        arguments = _arguments(found.name, x)
        own, new = type(module).forward(stub, *arguments), found.modulated(stub, x, projection)
    own, new = (r if isinstance(r, tuple) else (r,) for r in (own, new))
    if len(own) != len(new) or not all(agree(a, b) for a, b in zip(own, new, strict=True)):
        return False
    return dtype != torch.float32 or _same_gradients(found, stub, x, projection)


def _arguments(name: str, x: Tensor) -> tuple[Any, ...]:
    """Those of a forward whose projection is given."""
    between = {"AdaLayerNorm": 1, "AdaLayerNormZero": 3}.get(name, 0)
    return x, *(None,) * between, torch.ones(SAMPLES, 1, dtype=x.dtype)


def _same_gradients(found: Modulation, stub: Any, x: Tensor, projection: Tensor) -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        gradients = []
        for run in (lambda x, p: type(stub).forward(stub, *_arguments(found.name, x)), None):
            leaves = [t.clone().requires_grad_() for t in (x, projection)]
            stub.__dict__["_modules"]["linear"] = _Given(leaves[1])
            results = run(*leaves) if run else found.modulated(stub, *leaves)
            y = results[0] if isinstance(results, tuple) else results
            gradients.append(torch.autograd.grad(y.sin().sum(), leaves))
    return all(bool((a - b).norm() <= 2**-10 * b.norm()) for a, b in zip(*gradients, strict=True))


class _Given(nn.Module):  # type: ignore[misc]
    """A projection whose result is given."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, _: Any) -> Tensor:
        return self.result
