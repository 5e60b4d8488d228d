"""The target of the cases: a NumPy function, a torch function with its autograd, or lngen's own kernels.

A name gives a target: ``module:function``, or a known function with a signature of its own.

A target gets arrays with their memory: a copy, here or on a GPU, keeps strides and offset from an aligned address.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lngen.compiler.ir import RUN, WIDE, DType
from lngen.compiler.ir.numerics import FROM_NUMPY, NUMPY_DTYPE, Array
from lngen.compiler.spec import Spec
from lngen.errors import MissingError, SpecError, short
from lngen.files import load_cupy
from lngen.launch.arrays import torch_dtypes
from lngen.launch.runtime.norm import Norm
from lngen.proof.check.oracles import NormName
from lngen.user_input import imported, is_function

GRADIENTS = ("dx", "dgamma", "dbeta")
Memory = Callable[[], dict[str, Array]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Laid:
    """An array as a window on its memory; strides and offset in elements."""

    memory: Array
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def on(self, memory: Array) -> Array:
        """The same window on other memory of the same size and type."""
        size = memory.itemsize
        strides = tuple(s * size for s in self.strides)
        raw = memory.view(np.uint8)
        return np.ndarray(self.shape, memory.dtype, buffer=raw.data, offset=self.offset * size, strides=strides)


def laid(a: Array) -> Laid:
    """The window that ``a`` is on the array that owns its memory."""
    owner = a
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if a.size == 0 or not owner.flags.c_contiguous:
        whole = np.ascontiguousarray(a)
        return Laid(whole.reshape(-1), 0, a.shape, tuple(s // a.itemsize for s in whole.strides))
    start = int(a.__array_interface__["data"][0]) - int(owner.__array_interface__["data"][0])
    memory = owner.reshape(-1).view(np.uint8).view(a.dtype)
    return Laid(memory, start // a.itemsize, a.shape, tuple(s // a.itemsize for s in a.strides))


def clone(a: Array) -> Array:
    """A copy with the same layout; writing to it leaves ``a`` alone."""
    window = laid(a)
    return window.on(window.memory.copy())


@dataclass(frozen=True)
class Found:
    """How a case passed: a few words, and numbers for programs."""

    detail: str
    measured: dict[str, float] = field(default_factory=dict)


class FailedError(Exception):
    """The case fails; the message gives the size of the error."""

    def __init__(self, detail: str, measured: dict[str, float] | None = None) -> None:
        super().__init__(detail)
        self.found = Found(detail, measured or {})


class RaisedError(Exception):
    """The target raised; the message is the exception's type and first line."""

    def __init__(self, error: BaseException) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        super().__init__(": ".join([type(error).__name__, *lines[:1]]))


@dataclass(frozen=True)
class Ran:
    """The results of a call by name, and access to the memory of its inputs afterwards."""

    results: dict[str, Array]
    memory: Memory


class Target(Protocol):
    """An implementation; ``gradients`` names those that its backward returns, none without a backward."""

    name: str
    gradients: tuple[str, ...]

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        """The outputs of the inputs, by name; with all cotangents also the gradients. It may write to the inputs.

        RaisedError if the implementation raises, FailedError if it returns no arrays.
        """


@contextmanager
def guarded() -> Iterator[None]:
    """An exception of the target becomes a RaisedError; its warnings are ignored, its prints go to stderr.

    A MissingError stays a MissingError.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            yield
        except (FailedError, MissingError, RaisedError):
            raise
        except (Exception, SystemExit) as error:
            raise RaisedError(error) from error


def _named(given: Any, wanted: tuple[str, ...], kind: type[Any], what: str, who: str) -> dict[str, Any]:
    """A tuple by name; FailedError if it is not a tuple, or holds something other than arrays."""
    if not isinstance(given, tuple | list) or len(given) < len(wanted):
        got = f"{len(given)} of them" if isinstance(given, tuple | list) else type(given).__name__
        raise FailedError(f"{who} is expected to return a tuple ({', '.join(wanted)}), got {got}.")
    found = dict(zip(wanted, given, strict=False))
    for name, array in found.items():
        _array(array, kind, what, name)
    return found


def _array(given: Any, kind: type[Any], what: str, name: str) -> Any:
    if not isinstance(given, kind):
        raise FailedError(f"{name} is expected to be a {what}, got {type(given).__name__}.")
    return given


@dataclass(frozen=True)
class Signature:
    """What a function takes before eps, and what it returns; ``gradients`` are those of its backward."""

    takes: tuple[str, ...] = ("x", "gamma", "beta")
    returns: tuple[str, ...] = ("y",)
    gradients: tuple[str, ...] = GRADIENTS

    @classmethod
    def of(cls, spec: Spec) -> Signature:
        """The spec's inputs and outputs in its order; no gradients."""
        return cls(tuple(p.name for p in spec.forward().tensors), spec.definition.outputs(spec.options), ())

    def results(self, given: Any, kind: type[Any], what: str) -> dict[str, Any]:
        """What a forward returns, by name: an array, or a tuple of several; else FailedError."""
        if len(self.returns) == 1:
            return {self.returns[0]: _array(given, kind, what, self.returns[0])}
        return _named(given, self.returns, kind, what, "the function")


LAYERNORM, RMSNORM = Signature(), Signature(gradients=GRADIENTS[:2])


class NumpyTarget:
    """``forward(x, gamma, beta, eps) -> y`` and maybe ``backward(dy, x, gamma, beta, eps) -> (dx, dgamma, dbeta)``.

    RMSNorm is called with beta None, and its backward may omit dbeta. Another ``signature`` has no backward.
    """

    def __init__(
        self,
        name: str,
        forward: Function,
        backward: Function | None = None,
        *,
        eps: float = 1e-5,
        signature: Signature = LAYERNORM,
    ) -> None:
        self.name, self._forward, self._backward, self._eps, self._signature = name, forward, backward, eps, signature
        self.gradients: tuple[str, ...] = () if backward is None else signature.gradients

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        taken = [inputs.get(n) for n in self._signature.takes]
        with guarded():
            results = self._signature.results(self._forward(*taken, self._eps), np.ndarray, "NumPy array")
            if self._backward is not None and "dy" in inputs:
                given = self._backward(inputs["dy"], *taken, self._eps)
                results |= _named(given, self.gradients, np.ndarray, "NumPy array", "backward")
        return Ran(results, lambda: {n: laid(a).memory for n, a in inputs.items()})


class TorchTarget:
    """``forward(x, gamma, beta, eps) -> y`` on torch tensors, of which autograd gives the backward, or another one."""

    def __init__(
        self,
        name: str,
        forward: Function,
        *,
        eps: float = 1e-5,
        device: str = "cpu",
        signature: Signature = LAYERNORM,
    ) -> None:
        import torch

        self.name, self._forward, self._eps, self._device, self._torch = name, forward, eps, device, torch
        self.gradients, self._signature = signature.gradients, signature
        self._called = False
        self._dtypes = {DType(name): own for name, own in torch_dtypes().items()}

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        windows = {n: laid(a) for n, a in inputs.items()}
        results: dict[str, Array] = {}
        with guarded():
            memory = {n: self._send(w.memory) for n, w in windows.items()}
            tensors = {n: memory[n].as_strided(w.shape, w.strides, w.offset) for n, w in windows.items()}
            wanted = tuple(n for n in self.gradients if n[1:] in tensors)
            leaves = [tensors[n[1:]].requires_grad_() for n in wanted]
            given = self._forward(*(tensors.get(n) for n in self._signature.takes), self._eps)
            outputs = self._signature.results(given, self._torch.Tensor, "torch tensor")
            results |= {n: self._fetch(output.detach()) for n, output in outputs.items()}
            y = next(iter(outputs.values()))
            if not (self._called or y.requires_grad):
                self.gradients = wanted = ()
            self._called = True
            if wanted and "dy" in tensors:
                gradients = self._torch.autograd.grad(y, leaves, tensors["dy"])
                results |= {n: self._fetch(g) for n, g in zip(wanted, gradients, strict=True)}
        return Ran(results, lambda: {n: self._fetch(m) for n, m in memory.items()})

    def _send(self, memory: Array) -> Any:
        integers = memory.view(f"i{memory.itemsize}")
        return self._torch.from_numpy(integers).to(self._device).view(self._dtypes[FROM_NUMPY[memory.dtype]])

    def _fetch(self, tensor: Any) -> Array:
        for dtype, own in self._dtypes.items():
            if tensor.dtype == own:
                integers = tensor.contiguous().view(getattr(self._torch, f"int{8 * dtype.size}"))
                return np.array(integers.cpu().numpy()).view(NUMPY_DTYPE[dtype])
        return np.array(tensor.cpu().numpy())


class LngenTarget:
    """lngen's own kernels of a spec at any D, by the interpreter or on a GPU; for f64 inputs, the spec at f64.

    SpecError, before any case, for a spec that ``lngen.compile`` refuses. Where only the interpreter computes its
    graph, a GPU gets a LowerError, and the CPU a warning.
    """

    def __init__(self, spec: Spec, *, gpu: bool) -> None:
        self.name, self._spec, self._gpu = str(spec), spec, gpu
        backward = spec.direction == "bwd"
        self.gradients = tuple(f"d{name}" for name in spec.differentiates) if backward else ()
        self._params = spec.forward().tensors
        self._outputs = spec.definition.outputs(spec.options)
        self._eps = {"eps": spec.eps_or_default} if spec.eps == RUN else {}
        self._norms: dict[tuple[int, bool], Norm] = {}
        self._norm(spec.d, wide=False).compilation(spec.direction).warn()

    def _norm(self, d: int, wide: bool) -> Norm:
        if (d, wide) not in self._norms:
            spec = replace(self._spec, d=d)
            if wide:
                spec = replace(spec, dtype=DType.F64, weight=DType.F64, out=DType.F64)
            self._norms[d, wide] = Norm(spec.with_direction("fwd"), spec.with_direction("bwd"), {}, kernels=self._gpu)
        return self._norms[d, wide]

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        windows = {n: laid(a) for n, a in inputs.items()}
        with guarded():
            memory = {n: self._send(w.memory) for n, w in windows.items()} if self._gpu else {}
            arrays = {n: self._window(memory[n], w) for n, w in windows.items()} if self._gpu else dict(inputs)
            wide = next(p.name for p in self._params if p.type.axes == WIDE)
            norm = self._norm(inputs[wide].shape[1], inputs[wide].dtype == np.float64)
            made, saved = norm.forward(*(arrays[p.name] for p in self._params), **self._eps)
            outputs = made if isinstance(made, tuple) else (made,)
            results = {n: self._fetch(a) for n, a in zip(self._outputs, outputs, strict=True)}
            cotangents = [f"d{name}" for name in self._spec.differentiated]
            if self.gradients and {*cotangents} <= inputs.keys():
                given = norm.backward(tuple(arrays[name] for name in cotangents), saved)
                results |= {n: self._fetch(a) for n, a in zip(self.gradients, given, strict=True)}
        return Ran(
            results,
            lambda: {n: memory[n].get().view(w.memory.dtype) if memory else w.memory for n, w in windows.items()},
        )

    def _send(self, memory: Array) -> Any:
        return load_cupy().asarray(memory.view(np.uint8))

    def _window(self, memory: Any, window: Laid) -> Any:
        cupy = load_cupy()
        dtype = window.memory.dtype
        strides = tuple(s * dtype.itemsize for s in window.strides)
        return cupy.ndarray(window.shape, dtype, memory.data + window.offset * dtype.itemsize, strides)

    def _fetch(self, result: Any) -> Array:
        if not self._gpu:
            return np.asarray(result)
        cupy = load_cupy()
        raw = cupy.ndarray((result.nbytes,), cupy.uint8, result.data).get()
        return np.asarray(raw.view(result.dtype).reshape(result.shape))


# ---- targets by name ----


@dataclass(frozen=True)
class Adapter:
    """A known torch function: where it may be found, and how to call it with (x, gamma, beta, eps)."""

    paths: tuple[str, ...]
    norm: NormName
    device: str
    call: Callable[[Function, Any, Any, Any, float], Any]


def _applied(f: Any) -> Function:
    """An autograd function is called by its ``apply``."""
    function: Function = getattr(f, "apply", f)
    return function


ADAPTERS = {
    "torch-layernorm": Adapter(
        ("torch.nn.functional:layer_norm", "torch:layer_norm"),
        "layernorm",
        "cpu",
        lambda f, x, gamma, beta, eps: f(x, x.shape[-1:], gamma, beta, eps),
    ),
    "torch-rmsnorm": Adapter(
        ("torch.nn.functional:rms_norm", "torch:rms_norm"),
        "rmsnorm",
        "cpu",
        lambda f, x, gamma, beta, eps: f(x, x.shape[-1:], gamma, eps),
    ),
    "liger-layernorm": Adapter(
        (
            "liger_kernel.ops.layer_norm:LigerLayerNormFunction",
            "liger_kernel.ops.layer_norm:LigerLayerNormFunction.apply",
            "liger_kernel.transformers:LigerLayerNormFunction",
            "liger_kernel.transformers:LigerLayerNormFunction.apply",
        ),
        "layernorm",
        "cuda",
        lambda f, x, gamma, beta, eps: _applied(f)(x, gamma, beta, eps),
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
        # The last argument: not in place, or backward would overwrite dy.
        lambda f, x, gamma, beta, eps: _applied(f)(x, gamma, eps, 0.0, "llama", False),
    ),
    "quack-rmsnorm": Adapter(
        ("quack.rmsnorm:rmsnorm", "quack:rmsnorm"),
        "rmsnorm",
        "cuda",
        lambda f, x, gamma, beta, eps: f(x, gamma, eps=eps),
    ),
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
    signature = LAYERNORM if norm == "layernorm" else RMSNORM
    if known is None:
        function = load(name, folder)
        torch = torch or _is_torch(name, function)
    else:
        path = name if name in known.paths else known.paths[0]
        _need(path.partition(".")[0].partition(":")[0], name)
        function = partial(known.call, load(path))
    if known is not None or torch:
        if backward is not None:
            raise SpecError("--backward is for NumPy functions; the backward of a torch function is its autograd.")
        on = _device(device or (known.device if known else "cpu"), name)
        return TorchTarget(name, function, eps=eps, device=on, signature=signature), norm
    _on_cpu(device, name)
    return NumpyTarget(name, function, load(backward, folder) if backward else None, eps=eps, signature=signature), norm


def find_function(
    name: str, spec: Spec, *, torch: bool = False, device: str | None = None, folder: Path | None = None
) -> Target:
    """The target of ``module:function``, which takes the inputs of the spec and eps, and returns its outputs.

    Of NumPy arrays or torch tensors, as in ``find_target``. SpecError for a backward, and as there.
    """
    if name in ADAPTERS:
        raise SpecError(f"'{name}' has a signature of its own; leave the SPEC out, or give module:function.")
    if spec.direction == "bwd":
        raise SpecError(f"a function with a SPEC is expected to be a forward, got '{spec}'; say .fwd.")
    function, eps = load(name, folder), spec.eps_or_default
    if torch or _is_torch(name, function):
        return TorchTarget(name, function, eps=eps, device=_device(device or "cpu", name), signature=Signature.of(spec))
    _on_cpu(device, name)
    return NumpyTarget(name, function, eps=eps, signature=Signature.of(spec))


def _is_torch(name: str, function: Function) -> bool:
    return name.startswith(("torch.", "torch:")) or str(function.__module__).partition(".")[0] == "torch"


def _on_cpu(device: str | None, name: str) -> None:
    if device == "cuda":
        raise SpecError(f"'{name}' is called with NumPy arrays, on the CPU; say --torch if it takes torch tensors.")


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
