"""The kernels of patched norms, compiled in the background before the first call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from lngen.launch.runtime.launcher import device_count
from lngen.launch.runtime.warming import begin_unseen
from lngen.torch.graph_ops import OPS
from lngen.torch.graph_way import OfGraph
from lngen.torch.torch_functions import GATED_LAYER_NORM, GATED_RMS_NORM, LAYER_NORM, RMS_NORM, keys_of
from lngen.torch.variants import OF_HEADS, Variant

DIRECT = {
    "layer_norm": LAYER_NORM,
    "rms_norm": RMS_NORM,
    "gated_layer_norm": GATED_LAYER_NORM,
    "gated_rms_norm": GATED_RMS_NORM,
    **OF_HEADS,
}


class Wanted(NamedTuple):
    """What the kernels of a norm depend on; ``weights``: dtype of each that it has, and whether it has a gradient."""

    variant: Variant
    d: int
    dtype: torch.dtype
    weights: tuple[tuple[str, torch.dtype, bool], ...]
    device: int
    head: int = 0  # the last dimension of weights

    @classmethod
    def by(cls, module: Any, dtype: torch.dtype) -> Wanted | None:
        """That of a patched norm, which is to be on GPU 0 if it is on none; without weights its rows have ``dtype``.

        None if only its rows tell their length, and for what is no norm of ``DIRECT``.
        """
        own = {name: module._parameters.get(key) for name, key in (("gamma", "weight"), ("beta", "bias"))}
        there = {name: p for name, p in own.items() if p is not None}
        first = next(iter(there.values()), None)
        shape: Sequence[int] = getattr(module, "normalized_shape", ()) if first is None else first.shape
        at = first.device.index if first is not None and first.device.type == "cuda" else 0
        weights = tuple((name, p.dtype, p.requires_grad) for name, p in there.items())
        rows = dtype if first is None else first.dtype
        known = shape and module.variant.kind in DIRECT
        return cls(module.variant, math.prod(shape), rows, weights, at, shape[-1]) if known else None

    def makers(self) -> list[Callable[[], Any]]:
        """Of the calls that a step may take: without gradients, with them, and backward."""
        own = {**vars(self.variant), "head": self.head, "head_weights": "own"}
        direct = DIRECT[self.variant.kind]
        ops = OPS[direct.graph]
        keys = keys_of(direct, [own[name] for name in direct.options])
        rows = ("x", "z") if self.variant.act else ("x",)
        like = {name: torch.empty((1, self.d), dtype=self.dtype, device="meta") for name in rows}
        like |= {name: torch.empty(self.d, dtype=dtype, device="meta") for name, dtype, _ in self.weights}
        wrt = (*rows, *(name for name, _, differentiated in self.weights if differentiated))
        way = cache(lambda: OfGraph.of(ops, keys, like))
        return [lambda: way().alone, lambda: way().forward, lambda: way().backward(wrt)]


def warm(norms: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Begin to compile what calls of patched norms take, if there is a GPU; alike norms share their kernels."""
    if not device_count():
        return
    for wanted in filter(None, dict.fromkeys(Wanted.by(module, dtype) for module in norms)):
        begin_unseen(wanted.makers(), wanted.device)
