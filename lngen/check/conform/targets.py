"""The target of the cases: a NumPy function, a torch function with its autograd, or lngen's own kernels."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from lngen.check.conform.contract import FailedError, RaisedError
from lngen.check.conform.layout import Laid, laid
from lngen.errors import MissingError
from lngen.ir import WIDE, DType
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.runtime.arrays import FROM_NUMPY, torch_dtypes
from lngen.runtime.norm import Norm
from lngen.spec import Spec

GRADIENTS = ("dx", "dgamma", "dbeta")
Memory = Callable[[], dict[str, Array]]


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


def _named(given: Any, wanted: tuple[str, ...], kind: type[Any], what: str) -> dict[str, Any]:
    """A backward's tuple by name; FailedError if it is not a tuple, or holds something other than arrays."""
    if not isinstance(given, tuple | list) or len(given) < len(wanted):
        got = f"{len(given)} of them" if isinstance(given, tuple | list) else type(given).__name__
        raise FailedError(f"backward is expected to return a tuple ({', '.join(wanted)}), got {got}.")
    found = dict(zip(wanted, given, strict=False))
    for name, array in found.items():
        _array(array, kind, what, name)
    return found


def _array(given: Any, kind: type[Any], what: str, name: str) -> Any:
    if not isinstance(given, kind):
        raise FailedError(f"{name} is expected to be a {what}, got {type(given).__name__}.")
    return given


class NumpyTarget:
    """``forward(x, gamma, beta, eps) -> y`` and maybe ``backward(dy, x, gamma, beta, eps) -> (dx, dgamma, dbeta)``.

    RMSNorm is called with beta None, and its backward may omit dbeta.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        eps: float = 1e-5,
        beta: bool = True,
    ) -> None:
        self.name, self._forward, self._backward, self._eps = name, forward, backward, eps
        self.gradients: tuple[str, ...] = GRADIENTS if beta else GRADIENTS[:2]
        if backward is None:
            self.gradients = ()

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        x, gamma, beta = (inputs.get(n) for n in ("x", "gamma", "beta"))
        with guarded():
            y = self._forward(x, gamma, beta, self._eps)
            results = {"y": _array(y, np.ndarray, "NumPy array", "y")}
            if self._backward is not None and "dy" in inputs:
                given = self._backward(inputs["dy"], x, gamma, beta, self._eps)
                results |= _named(given, self.gradients, np.ndarray, "NumPy array")
        return Ran(results, lambda: {n: laid(a).memory for n, a in inputs.items()})


class TorchTarget:
    """``forward(x, gamma, beta, eps) -> y`` on torch tensors; autograd gives the backward."""

    def __init__(
        self, name: str, forward: Callable[..., Any], *, eps: float = 1e-5, device: str = "cpu", beta: bool = True
    ) -> None:
        import torch

        self.name, self._forward, self._eps, self._device, self._torch = name, forward, eps, device, torch
        self.gradients: tuple[str, ...] = GRADIENTS if beta else GRADIENTS[:2]
        self._called = False
        self._dtypes = torch_dtypes()

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        windows = {n: laid(a) for n, a in inputs.items()}
        results: dict[str, Array] = {}
        with guarded():
            memory = {n: self._send(w.memory) for n, w in windows.items()}
            tensors = {n: memory[n].as_strided(w.shape, w.strides, w.offset) for n, w in windows.items()}
            wanted = tuple(n for n in self.gradients if n[1:] in tensors)
            leaves = [tensors[n[1:]].requires_grad_() for n in wanted]
            given = self._forward(tensors["x"], tensors.get("gamma"), tensors.get("beta"), self._eps)
            y = _array(given, self._torch.Tensor, "torch tensor", "y")
            results["y"] = self._fetch(y.detach())
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

    SpecError, before any case, for a spec that ``lngen.compile`` refuses.
    """

    def __init__(self, spec: Spec, *, gpu: bool) -> None:
        self.name, self._spec, self._gpu = str(spec), spec, gpu
        backward = spec.direction == "bwd"
        self.gradients = tuple(f"d{name}" for name in spec.differentiates) if backward else ()
        self._params = spec.forward().params
        self._outputs = spec.definition.outputs(spec.options)
        self._norms: dict[tuple[int, bool], Norm] = {}
        self._norm(spec.d, wide=False)

    def _norm(self, d: int, wide: bool) -> Norm:
        if (d, wide) not in self._norms:
            spec = replace(self._spec, d=d)
            if wide:
                spec = replace(spec, dtype=DType.F64, weight=DType.F64, out=DType.F64)
            self._norms[d, wide] = Norm(spec.with_direction("fwd"), spec.with_direction("bwd"), {})
        return self._norms[d, wide]

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        windows = {n: laid(a) for n, a in inputs.items()}
        with guarded():
            memory = {n: self._send(w.memory) for n, w in windows.items()} if self._gpu else {}
            arrays = {n: self._window(memory[n], w) for n, w in windows.items()} if self._gpu else dict(inputs)
            wide = next(p.name for p in self._params if p.type.axes == WIDE)
            norm = self._norm(inputs[wide].shape[1], inputs[wide].dtype == np.float64)
            made, saved = norm.forward(*(arrays[p.name] for p in self._params))
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
        import cupy

        return cupy.asarray(memory.view(np.uint8))

    def _window(self, memory: Any, window: Laid) -> Any:
        import cupy

        dtype = window.memory.dtype
        strides = tuple(s * dtype.itemsize for s in window.strides)
        return cupy.ndarray(window.shape, dtype, memory.data + window.offset * dtype.itemsize, strides)

    def _fetch(self, result: Any) -> Array:
        if not self._gpu:
            return np.asarray(result)
        import cupy

        raw = cupy.ndarray((result.nbytes,), cupy.uint8, result.data).get()
        return np.asarray(raw.view(result.dtype).reshape(result.shape))
