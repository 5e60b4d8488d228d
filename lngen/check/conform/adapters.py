"""From a name to a target: ``module:function``, or a known function with a signature of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lngen.check.conform.targets import NumpyTarget, Target, TorchTarget
from lngen.check.tolerances import NormName
from lngen.errors import MissingError, SpecError, short
from lngen.imports import imported, is_function

Function = Callable[..., Any]


@dataclass(frozen=True)
class Adapter:
    """A known torch function: where it may be found, and how to call it with (x, gamma, beta, eps)."""

    paths: tuple[str, ...]
    norm: NormName
    device: str
    adapt: Callable[[Any], Function]


def _torch_layernorm(f: Any) -> Function:
    return lambda x, gamma, beta, eps: f(x, x.shape[-1:], gamma, beta, eps)


def _torch_rmsnorm(f: Any) -> Function:
    return lambda x, gamma, beta, eps: f(x, x.shape[-1:], gamma, eps)


def _liger_layernorm(f: Any) -> Function:
    apply = getattr(f, "apply", f)
    return lambda x, gamma, beta, eps: apply(x, gamma, beta, eps)


def _liger_rmsnorm(f: Any) -> Function:
    apply = getattr(f, "apply", f)
    # The last argument: not in place, or backward would overwrite dy.
    return lambda x, gamma, beta, eps: apply(x, gamma, eps, 0.0, "llama", False)


def _quack_rmsnorm(f: Any) -> Function:
    return lambda x, gamma, beta, eps: f(x, gamma, eps=eps)


ADAPTERS = {
    "torch-layernorm": Adapter(
        ("torch.nn.functional:layer_norm", "torch:layer_norm"), "layernorm", "cpu", _torch_layernorm
    ),
    "torch-rmsnorm": Adapter(("torch.nn.functional:rms_norm", "torch:rms_norm"), "rmsnorm", "cpu", _torch_rmsnorm),
    "liger-layernorm": Adapter(
        (
            "liger_kernel.ops.layer_norm:LigerLayerNormFunction",
            "liger_kernel.ops.layer_norm:LigerLayerNormFunction.apply",
            "liger_kernel.transformers:LigerLayerNormFunction",
            "liger_kernel.transformers:LigerLayerNormFunction.apply",
        ),
        "layernorm",
        "cuda",
        _liger_layernorm,
    ),
    "liger-rmsnorm": Adapter(
        (
            "liger_kernel.ops.rms_norm:LigerRMSNormFunction",
            "liger_kernel.ops.rms_norm:LigerRMSNormFunction.apply",
            "liger_kernel.transformers:LigerRMSNormFunction",
            "liger_kernel.transformers:LigerRMSNormFunction.apply",
        ),
        "rmsnorm",
        "cuda",
        _liger_rmsnorm,
    ),
    "quack-rmsnorm": Adapter(("quack.rmsnorm:rmsnorm", "quack:rmsnorm"), "rmsnorm", "cuda", _quack_rmsnorm),
}


def find_target(
    name: str,
    *,
    norm: NormName | None = None,
    eps: float = 1e-5,
    backward: str | None = None,
    torch: bool = False,
    device: str | None = None,
    folder: Path | None = None,
) -> tuple[Target, NormName]:
    """The target of ``name``, and its norm (LayerNorm by default).

    ``folder``: searched for the modules of named functions after all other places.
    A function is torch's if its module starts with ``torch`` or if ``torch`` is set, else NumPy's. SpecError
    if it cannot be imported or called, MissingError for a package or a GPU that is missing.
    """
    known = next((a for short, a in ADAPTERS.items() if name == short or name in a.paths), None)
    norm = norm or (known.norm if known else "layernorm")
    beta = norm == "layernorm"
    if known is None:
        function = load(name, folder)
        torch = torch or name.startswith(("torch.", "torch:")) or str(function.__module__).partition(".")[0] == "torch"
    else:
        path = name if name in known.paths else known.paths[0]
        _need(path.partition(".")[0].partition(":")[0], name)
        function = known.adapt(load(path))
    if known is not None or torch:
        if backward is not None:
            raise SpecError("--backward is for NumPy functions; the backward of a torch function is its autograd.")
        return TorchTarget(
            name, function, eps=eps, device=_device(device or (known.device if known else "cpu"), name), beta=beta
        ), norm
    if device == "cuda":
        raise SpecError(f"'{name}' is called with NumPy arrays, on the CPU; say --torch if it takes torch tensors.")
    return NumpyTarget(name, function, load(backward, folder) if backward else None, eps=eps, beta=beta), norm


def load(name: str, folder: Path | None = None) -> Function:
    """The callable at ``module:attribute``; SpecError with the first line of the failure.

    Only during the import, ``folder`` is searched for modules after all other places.
    """
    if not is_function(name):
        raise SpecError(f"expected module:function or one of {', '.join(ADAPTERS)}, got '{short(name)}'.")
    function: Function = imported(name, folder)
    if not callable(function):
        raise SpecError(f"'{name}' is expected to be a function, got {type(function).__name__}.")
    return function


def _need(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise MissingError(f"'{name}' needs the package {package}, which is not installed.")


def _device(device: str, name: str) -> str:
    _need("torch", name)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise MissingError("--device cuda expects a GPU that torch can use; none was found.")
    return device
