"""lngen's norms as the norm of a model may be one: with the attributes that it has, for the calls that it gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from lngen.compiler.graphs.norms import GATES
from lngen.torch.graph_way import Direct
from lngen.torch.torch_functions import LAYER, gated_layer_norm, gated_rms_norm, layer_norm, norm, rms_norm

Pair = tuple[torch.dtype, torch.dtype | None]
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
USUAL_EPS = (1e-5, 1e-6)  # where a module has no attribute for it
KEYS = ("head", "head_weights", "zero_centred", "casts")
OF_HEADS = {
    "head_layer_norm": Direct("qk_layernorm", LAYER, KEYS),
    "head_rms_norm": Direct("qk_rmsnorm", LAYER[:2], KEYS),
}


@dataclass(frozen=True)
class Variant:
    """One of lngen's norms, for modules of a class.

    eps    the attribute that holds it, or the number
    act    the function of the gate, which is the forward's second argument; empty without one
    taken  the names of the arguments of the module's forward
    pairs  the dtypes of rows and weight for which it was verified; None: all
    fixed  the attributes that the module's forward reads and lngen does not: it was verified for their values

    ``channels_first``: rows are the features of a pixel of images [N, C, H, W]. ``head_norm``, of ``layernorm`` or
    ``rmsnorm``: rows are the heads of a token, [..., heads, features].
    """

    kind: str
    eps: str | float | None
    casts: str = "once"
    zero_centred: bool = False
    act: str = ""
    gate_first: bool = False
    channels_first: bool = False
    taken: tuple[str, ...] = ("input",)
    pairs: tuple[Pair, ...] | None = None
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = {"casts": ("once", self.casts), "act": (self.act and "silu", self.act)}
        words = [f"{name}={value}" for name, (usual, value) in named.items() if value != usual]
        words += [name for name in ("zero_centred", "gate_first", "channels_first") if getattr(self, name)]
        return ", ".join([self.kind, *words])

    def takes(self, module: nn.Module, x: Any, gate: Any = None) -> bool:
        """True if the result for x is known to be the module's own; autocast changes that of 16-bit rows."""
        if self.pairs is None and type(x) is Tensor and x.is_cuda and x.layout is torch.strided:  # what is usual
            return True
        if not _dense(x):
            return False
        if self.pairs is None:
            return True
        if self.act and not (_dense(gate) and gate.dtype == x.dtype and gate.shape == x.shape):
            return False
        if self.channels_first and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
            return False  # its own forward may store the result otherwise, too
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if x.dtype != torch.float32 and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            return False
        if weight is None:
            return (x.dtype, None) in self.pairs
        features = x.shape[1:2] if self.channels_first else x.shape[-weight.dim() :]
        if self.kind in OF_HEADS and not (x.dim() > 1 and _side_by_side(x)):
            return False
        fits = features == weight.shape and (bias is None or bias.dtype == weight.dtype)
        return fits and (x.dtype, weight.dtype) in self.pairs

    def __call__(self, module: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if self.channels_first:
            return self._of_rows(module, x.permute(0, 2, 3, 1), gate).permute(0, 3, 1, 2)
        return self._of_rows(module, x, gate)

    def _of_rows(self, module: nn.Module, x: Tensor, gate: Any) -> Tensor:
        weight, bias = _weight(module, "weight"), _weight(module, "bias")
        eps: Any = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        dims = getattr(module, "normalized_shape", x.shape[-1:]) if weight is None else weight.shape
        if self.kind in OF_HEADS:
            direct = OF_HEADS[self.kind]
            given = (t if t is None else t.flatten(-2) for t in (x, weight, bias)[: len(direct.names) - 1])
            options = dims[-1], "own", self.zero_centred, self.casts
            return norm(direct, None, (*given, None), eps, options)[0].unflatten(-1, tuple(dims))
        if self.kind == "layer_norm":
            return layer_norm(x, dims, weight, bias, eps, zero_centred=self.zero_centred, casts=self.casts)
        if self.kind == "rms_norm":
            return rms_norm(x, dims, weight, eps, zero_centred=self.zero_centred, casts=self.casts)
        act, first = self.act, self.gate_first
        if self.kind == "gated_layer_norm":
            return gated_layer_norm(x, gate, dims, weight, bias, eps, act=act, gate_first=first)
        return gated_rms_norm(x, gate, dims, weight, eps, act=act, gate_first=first, casts=self.casts)


def _side_by_side(x: Tensor) -> bool:
    """Whether the heads of a row are a row of all heads without a copy."""
    return x.stride(-1) == 1 and bool(x.shape[-2] == 1 or x.stride(-2) == x.shape[-1])


def _dense(x: Any) -> bool:
    """Whether it is a tensor that lngen's functions take."""
    strided = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested
    return strided and x.device.type in ("cpu", "cuda", "meta")


def _weight(module: nn.Module, name: str) -> Any:
    own = module._parameters  # getattr would look elsewhere first
    return own[name] if name in own else getattr(module, name, None)


def eps_name(module: nn.Module) -> str | None:
    """The attribute that holds the module's eps; nn.RMSNorm's may be None."""
    for name in EPS_NAMES:
        if isinstance(getattr(module, name, ""), int | float | None):
            return name
    return None


def heads_of(module: nn.Module) -> tuple[int, ...]:
    """Heads, and the features of each, of a weight of two dimensions; nothing for others."""
    weight = module._parameters.get("weight")
    return () if weight is None or weight.dim() != 2 else tuple(weight.shape)


def candidates(module: nn.Module, gated: bool = False, channels_first: bool = False) -> Iterator[Variant]:
    """lngen's norms with the weights that the module has; those that are the same for all dtypes once."""
    name = eps_name(module)
    weighted, biased = (module._parameters.get(n) is not None for n in ("weight", "bias"))
    for eps in USUAL_EPS if name is None else (name,):
        every = _gated if gated else _of_each_head if heads_of(module) else _plain
        for variant in every(eps, weighted, biased):
            yield replace(variant, channels_first=channels_first)


def _plain(eps: str | float, weighted: bool, biased: bool) -> Iterator[Variant]:
    yield Variant("layer_norm", eps)
    if weighted:
        yield Variant("layer_norm", eps, zero_centred=True)
        yield Variant("layer_norm", eps, "nemotron")
    if biased:
        return
    yield Variant("rms_norm", eps)
    if weighted:
        for casts in ("t5", "llama"):  # on a tie the first: T5 gives fewer pairs a dtype that lngen has
            yield Variant("rms_norm", eps, casts)
            yield Variant("rms_norm", eps, casts, zero_centred=True)
        yield Variant("rms_norm", eps, "gemma")


def _of_each_head(eps: str | float, weighted: bool, biased: bool) -> Iterator[Variant]:
    yield Variant("head_layer_norm", eps)
    yield Variant("head_layer_norm", eps, "eager")
    if not biased:
        for casts in ("once", "t5", "llama"):
            yield Variant("head_rms_norm", eps, casts)


def _gated(eps: str | float, weighted: bool, biased: bool) -> Iterator[Variant]:
    for act, gate_first in product(GATES, (False, True)):
        yield Variant("gated_layer_norm", eps, act=act, gate_first=gate_first)
        if biased:
            continue
        for casts in ("once", "t5", "llama") if weighted else ("once",):
            yield Variant("gated_rms_norm", eps, casts, act=act, gate_first=gate_first)
