"""The members of the family as formulas in torch, float64: an oracle of lngen's graphs that shares nothing with them.

A formula takes tensors by name, those that a spec leaves out being absent, and the options of the spec; it gives the
results by name, outputs and statistics alike. Gradients are those of torch's autograd. Nothing here rounds to a storage
dtype: ``tests/compiler/family/test_family_casts.py`` compares the roundings with those of the models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]
Results = dict[str, Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "sigmoid": torch.sigmoid, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """The keys of a spec that a formula depends on, with their defaults."""

    eps: float = 1e-5
    zero_centred: bool = False
    casts: str = "once"
    guard: str = "add"
    gate_first: bool = False
    act: str = "silu"
    scale: float = 1.0
    target: str = "distribution"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "none"
    head: int = 128
    k_heads: int = 0
    rotate: str = "no"
    rotary: int = 0


Formula = Callable[[Tensors, Keys], Results]


# ---- parts ----


def standardised(h: Tensor, keys: Keys) -> tuple[Tensor, Results]:
    """LayerNorm without weights, and its statistics."""
    statistics = {"mean": h.mean(-1), "rstd": (h.var(-1, unbiased=False) + keys.eps).rsqrt()}
    return F.layer_norm(h, h.shape[-1:], eps=keys.eps), statistics


def scaled(h: Tensor, keys: Keys) -> tuple[Tensor, Results]:
    """RMSNorm without weights, and its statistic."""
    return F.rms_norm(h, h.shape[-1:], eps=keys.eps), {"rstd": (h.pow(2).mean(-1) + keys.eps).rsqrt()}


def weighted(xhat: Tensor, t: Tensors, keys: Keys, suffix: str = "") -> Tensor:
    """Rows times gamma, or 1 + gamma, plus beta, as far as they are there."""
    gamma, beta = t.get(f"gamma{suffix}"), t.get(f"beta{suffix}")
    if gamma is not None:
        xhat = xhat * (1 + gamma if keys.zero_centred or keys.casts in ("gemma", "nemotron") else gamma)
    return xhat if beta is None else xhat + beta


def summed(t: Tensors) -> Tensor:
    """x, by the factor of its row and that of each feature, plus the other terms that are there."""
    h = t["x"]
    if "rowscale" in t:
        h = h * t["rowscale"].unsqueeze(-1)
    if "colscale" in t:
        h = h * t["colscale"]
    for name in ("x1", "residual"):
        if name in t:
            h = h + t[name]
    return h


# ---- members ----


def member(name: str) -> Formula:
    """A norm of x or of a sum, with what its name says before it and behind it."""
    norm = standardised if "layernorm" in name else scaled

    def formula(t: Tensors, keys: Keys) -> Results:
        h = summed(t) if name.startswith(("add_", "parallel_")) else t["x"]
        gate = ACTIVATIONS[keys.act](t["z"]) if name.startswith("gated_") else None
        xhat, found = norm(h * gate if gate is not None and keys.gate_first else h, keys)
        y = weighted(xhat, t, keys)
        if gate is not None and not keys.gate_first:
            y = y * gate
        if name.endswith("_act"):
            y = ACTIVATIONS[keys.act](y)
        if name.endswith("_sigmoid_mul"):
            y = t["x"] * torch.sigmoid(y)
        found |= {"y": y, "h": h}
        return found | {"y1": weighted(xhat, t, keys, "1")} if name.startswith("parallel_") else found

    return formula


def of_heads(norm: Callable[[Tensor, Keys], tuple[Tensor, Results]]) -> Formula:
    """A norm of each head of a row, the last of which are those of k: weights of every head, [D], or of one."""

    def every(t: Tensors, name: str, heads: int, keys: Keys) -> Tensor | None:
        given = t.get(name)
        if given is not None and keys.k_heads:
            return torch.cat([*[given] * (heads - keys.k_heads), *[t[f"{name}_k"]] * keys.k_heads])
        return given if given is None else given.repeat(heads * keys.head // len(given))

    def formula(t: Tensors, keys: Keys) -> Results:
        x = t["x"].unflatten(-1, (-1, keys.head))
        weights = {name: every(t, name, x.shape[-2], keys) for name in ("gamma", "beta")}
        xhat = norm(x, keys)[0].flatten(-2)
        y = weighted(xhat, {n: w for n, w in weights.items() if w is not None}, keys)
        return {"y": y if keys.rotate == "no" else turned(y, t, keys)}

    return formula


def modulated(name: str) -> Formula:
    """AdaLN: the norm of residual + gate * x, times 1 + scale, plus shift, of which consecutive rows share a row."""
    norm = standardised if "layernorm" in name else scaled

    def formula(t: Tensors, keys: Keys) -> Results:
        rows, h = len(t["x"]), t["x"]
        by_row = {n: t[n].repeat_interleave(rows // len(t[n]), 0) for n in ("scale", "shift", "gate") if n in t}
        h = h * by_row["gate"] if "gate" in t else h
        h = h + t["residual"] if "residual" in t else h
        xhat, found = norm(h, keys)
        y = weighted(xhat, t, keys) * (1 + by_row["scale"])
        return found | {"y": y + by_row["shift"] if "shift" in t else y, "h": h}

    return formula


def turned(y: Tensor, t: Tensors, keys: Keys) -> Tensor:
    """Planes of each head as complex numbers, times those of their angles."""
    planes = [t[name][t["positions"].long()] if "positions" in t else t[name] for name in ("cos", "sin")]
    angles = torch.complex(*planes).unsqueeze(-2)
    width, heads = keys.rotary or keys.head, y.unflatten(-1, (-1, keys.head))
    turning, still = heads[..., :width], heads[..., width:]
    pairs = turning.unflatten(-1, (-1, 2)) if keys.rotate == "pairs" else turning.unflatten(-1, (2, -1)).mT
    found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    return torch.cat([(found if keys.rotate == "pairs" else found.mT).flatten(-2), still], -1).flatten(-2)


def rope(t: Tensors, keys: Keys) -> Results:
    return {"y": turned(t["x"], t, replace(keys, rotate="halves" if keys.rotate == "no" else keys.rotate))}


def dyt(t: Tensors, keys: Keys) -> Results:
    return {"y": weighted(torch.tanh(t["alpha"] * t["x"]), t, keys)}


def l2norm(t: Tensors, keys: Keys) -> Results:
    x = t["x"]
    if keys.guard == "max":
        return {"y": F.normalize(x, dim=-1, eps=keys.eps), "rnorm": 1 / x.norm(dim=-1).clamp_min(keys.eps)}
    root = torch.sqrt(x.pow(2).sum(-1) + keys.eps)
    return {"y": x / root.unsqueeze(-1), "rnorm": 1 / root}


def row_statistics(x: Tensor) -> Results:
    """The maximum of a row, and the sum of the powers of what is left without it."""
    top = x.amax(-1)
    return {"rowmax": top, "rowsum": torch.exp(x - top.unsqueeze(-1)).sum(-1)}


def softmax(t: Tensors, keys: Keys) -> Results:
    x = keys.scale * t["x"]
    return {"y": F.softmax(x, dim=-1), **row_statistics(x)}


def log_softmax(t: Tensors, keys: Keys) -> Results:
    x = keys.scale * t["x"]
    return {"y": F.log_softmax(x, dim=-1), **row_statistics(x)}


def cross_entropy(t: Tensors, keys: Keys) -> Results:
    x = keys.scale * t["x"]
    if keys.target == "index":
        return loss_of_classes(keys.softcap * torch.tanh(x / keys.softcap) if keys.softcap else x, t, keys)
    return {"loss": F.cross_entropy(x, t["target"], reduction="none"), **row_statistics(x)}


def loss_of_classes(z: Tensor, t: Tensors, keys: Keys) -> Results:
    """PyTorch's, with z_loss and lse; a row that is ignored is one of zeros, but for its statistics."""
    target, weight = t["target"].long(), t.get("class_weight")
    kept, statistics = target != keys.ignore_index, row_statistics(z)
    z = torch.where(kept.unsqueeze(-1), z, 0.0)
    lse = torch.logsumexp(z, -1)
    smoothing: Any = {"label_smoothing": keys.label_smoothing, "ignore_index": keys.ignore_index}
    loss = F.cross_entropy(z, target, weight, reduction="none", **smoothing) + keys.z_loss * lse**2 * kept
    counted = (torch.ones_like(z[0]) if weight is None else weight)[target.clamp(0, z.shape[-1] - 1)] * kept
    reduced = {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counted.sum()}[keys.reduction]
    return {"loss": reduced, "lse": lse * kept, "weight_sum": counted.sum(), **statistics}


PREFIXES, ENDS = ("", "add_", "parallel_", "gated_"), ("", "_sigmoid_mul", "_act")
NORMS = ("layernorm", "rmsnorm")
FORMULAS: dict[str, Formula] = {
    **{f"{prefix}{norm}": member(f"{prefix}{norm}") for prefix in PREFIXES for norm in NORMS},
    **{f"{norm}{end}": member(f"{norm}{end}") for end in ENDS for norm in NORMS},
    "qk_layernorm": of_heads(standardised),
    "qk_rmsnorm": of_heads(scaled),
    **{name: modulated(name) for name in ("ada_layernorm", "ada_rmsnorm")},
    **{f.__name__: f for f in (rope, l2norm, dyt, softmax, log_softmax, cross_entropy)},
}

# Inputs that have no gradient.
ANGLES = ("cos", "sin", "positions")
CONSTANTS = {"cross_entropy": ("target", "class_weight"), "rope": ANGLES}


def keys_of(given: Mapping[str, Any]) -> Keys:
    """The keys of a spec's text that formulas know; what else is given decides which inputs there are."""
    read = {
        "eps": float,
        "ignore_index": lambda number: int(float(number)),
        **dict.fromkeys(("head", "k_heads", "rotary"), lambda number: int(float(number))),
        **dict.fromkeys(("scale", "label_smoothing", "z_loss", "softcap"), float),
        **dict.fromkeys(("zero_centred", "gate_first"), lambda text: text == "yes"),
        **dict.fromkeys(("casts", "guard", "act", "target", "reduction", "rotate"), str),
    }
    return Keys(**{name: read[name](value) for name, value in given.items() if name in read})


def results(graph: str, keys: Keys, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The results by name, NumPy float64, for inputs by name."""
    tensors = {name: torch.tensor(a, dtype=torch.float64) for name, a in inputs.items()}
    return {name: r.numpy() for name, r in FORMULAS[graph](tensors, keys).items()}


def gradients(
    graph: str, keys: Keys, inputs: Mapping[str, Any], cotangents: Mapping[str, Any], wrt: tuple[str, ...]
) -> dict[str, Any]:
    """The gradients ``dx``, ... of the inputs ``wrt``, for cotangents of results by the names of these."""
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=n in wrt) for n, a in inputs.items()}
    found = FORMULAS[graph](leaves, keys)
    total = sum((found[n] * torch.tensor(a, dtype=torch.float64)).sum() for n, a in cotangents.items())
    got = torch.autograd.grad(total, [leaves[n] for n in wrt], allow_unused=True)
    return {f"d{n}": (torch.zeros_like(leaves[n]) if g is None else g).numpy() for n, g in zip(wrt, got, strict=True)}
