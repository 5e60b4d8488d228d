"""A stand-in for FlashInfer's Trace Apply: the part of its interface that a solution meets, written after its source.

It is not FlashInfer. It has four functions with the semantics of their definitions, an epsilon that solutions do not
get, names made of the second axis of the input, and the copies into ``out`` or into the inputs of an in-place function.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    return _norm(input.float(), weight.float(), eps).to(input.dtype)


def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    return _norm(input.float(), weight.float() + 1, eps).to(input.dtype)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    total = input.float() + residual.float()
    input.copy_(_norm(total, weight.float(), eps))
    residual.copy_(total)


def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    x = input.float() - input.float().mean(-1, keepdim=True)
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * gemma + beta).to(input.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


# For each function: what definitions call its inputs, and where results go.
NAMES = {"input": "hidden_states", "gemma": "weight", "beta": "bias"}
ORIGINALS: dict[Callable[..., Any], tuple[str, ...]] = {
    rmsnorm: ("out",), gemma_rmsnorm: ("out",), fused_add_rmsnorm: ("input", "residual"), layernorm: ("",),
}  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make ``flashinfer`` importable; returns it."""
    package, apply = ModuleType("flashinfer"), ModuleType("flashinfer.trace_apply")
    vars(package).update({f.__name__: f for f in ORIGINALS})
    state = SimpleNamespace(stats={})

    def enable_apply(solutions: Mapping[str, Callable[..., Any]]) -> int:
        state.stats = {}
        functions = [f for f in ORIGINALS if any(name.startswith(f"{f.__name__}_") for name in solutions)]
        vars(package).update({f.__name__: _wrapped(f, solutions, state.stats) for f in functions})
        return len(functions)

    vars(apply).update(enable_apply=enable_apply, stats=lambda: state.stats)
    vars(package)["trace_apply"] = apply
    for module in (package, apply):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


def _wrapped(
    original: Callable[..., Any], solutions: Mapping[str, Callable[..., Any]], stats: dict[str, dict[str, int]]
) -> Callable[..., Any]:
    def call(*args: Any, **keys: Any) -> Any:
        given = inspect.signature(original).bind(*args, **keys).arguments
        solution = solutions.get(f"{original.__name__}_h{given['input'].shape[1]}")
        counts = stats.setdefault(f"flashinfer.norm.{original.__name__}", {})
        status = "fallback_no_candidate" if solution is None else "hit"
        counts[status] = counts.get(status, 0) + 1
        if solution is None:
            return original(*args, **keys)
        found = solution(**{NAMES.get(n, n): t for n, t in given.items() if n not in ("eps", "out")})
        values = list(found) if isinstance(found, tuple) else [found]
        for i, place in enumerate(ORIGINALS[original]):
            target = given.get(place)
            if target is not None and values[i].data_ptr() != target.data_ptr():
                values[i] = target.copy_(values[i])
        return None if original is fused_add_rmsnorm else values[0]

    return call
