"""A stand-in for vLLM's IR: the part of its interface that a provider meets, written after its documentation.

It is not vLLM. It has the two operators with vLLM's semantics, the checks of a registration, the choice by priority and
``supports_args``, and the trace by which the chosen function takes the place of an operator in a graph. It has none of
vLLM's passes, and no operator of its own in PyTorch's dispatcher.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import infer_schema


class Impl(NamedTuple):
    function: Callable[..., Any]
    supported: bool
    supports_args: Callable[..., bool] | None


class Op:
    def __init__(self, native: Callable[..., Any]) -> None:
        self.native, self.priority = native, ["native"]
        self.impls = {"native": Impl(native, True, None)}

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Impl]:
        def add(function: Callable[..., Any]) -> Impl:
            assert provider not in (*self.impls, "native", "unfused")
            if infer_schema(function, mutates_args=[]) != infer_schema(self.native, mutates_args=[]):
                raise ValueError(f"the schema of {provider} is not that of the native function")
            if supports_args is not None:
                given = [inspect.signature(f).parameters.values() for f in (supports_args, self.native)]
                ours, theirs = ([(p.name, p.default) for p in parameters] for parameters in given)
                if ours != theirs or any(p.kind is p.KEYWORD_ONLY for p in given[0]):
                    raise ValueError(f"supports_args of {provider} has other parameters than the native function")
            self.impls[provider] = Impl(function, supported, supports_args)
            return self.impls[provider]

        return add

    def set_default(self, priority: list[str]) -> None:
        assert all(name in self.impls for name in priority)
        self.priority = [name for name in priority if self.impls[name].supported]

    def dispatch(self, *args: Any) -> str:
        """The provider that a call gets."""
        for name in self.priority:
            supports = self.impls[name].supports_args
            if supports is None or supports(*args):
                return name
        return "native"

    def __call__(self, *args: Any) -> Any:
        return self.impls[self.dispatch(*args)].function(*args)

    def lower(self, *args: Any) -> tuple[str, torch.fx.GraphModule]:
        """The provider that tensors without content get, and its graph."""
        bound = inspect.signature(self.native).bind(*args)
        bound.apply_defaults()
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in bound.args]
            provider = self.dispatch(*fake)
            return provider, make_fx(self.impls[provider].function)(*fake)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return _norm(x.float(), x.dtype, weight, epsilon, variance_size)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x.float() + x_residual.float()
    return _norm(total, x.dtype, weight, epsilon, variance_size), total.to(x.dtype)


def _norm(x: Tensor, dtype: torch.dtype, weight: Tensor | None, epsilon: float, size: int | None) -> Tensor:
    y = x * torch.rsqrt(x[..., :size].square().mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(dtype)


def install(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, without: str = "") -> SimpleNamespace:
    """Make ``vllm`` importable, with new operators; returns them."""
    ops = SimpleNamespace(**{f.__name__: Op(f) for f in (rms_norm, fused_add_rms_norm) if f.__name__ != without})
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"ir": SimpleNamespace(ops=ops)},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: cuda)},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return ops
