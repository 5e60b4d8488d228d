"""Kernels launched through the C functions of a driver, as a program in C would do it; and a plan, as lngen does."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.lower import Plan
from lngen.launch.driver import _Attribute, _Config
from lngen.launch.runtime.launcher import Launcher

INT, POINTER, ADDRESS = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64


def checked(status: int) -> None:
    assert status == 0, status


def begin(lib: Any, device: int = 0) -> None:
    """A context of the device, current in this thread."""
    context = POINTER()
    checked(lib.cuInit(0))
    checked(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    checked(lib.cuCtxSetCurrent(context))


def load(lib: Any, image: Any) -> ctypes.c_void_p:
    module = POINTER()
    checked(lib.cuModuleLoadData(ctypes.byref(module), image))
    return module


def function_of(lib: Any, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
    function = POINTER()
    checked(lib.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return function


def allocate(lib: Any, size: int) -> ctypes.c_uint64:
    pointer = ADDRESS()
    checked(lib.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    return pointer


def upload(lib: Any, array: Array) -> int:
    """The address of a copy on the GPU."""
    pointer = allocate(lib, array.nbytes)
    whole = np.ascontiguousarray(array)
    checked(lib.cuMemcpyHtoD_v2(pointer, POINTER(whole.ctypes.data), ctypes.c_size_t(whole.nbytes)))
    return pointer.value


def download(lib: Any, address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    array = np.empty(shape, dtype)
    checked(lib.cuMemcpyDtoH_v2(POINTER(array.ctypes.data), ADDRESS(address), ctypes.c_size_t(array.nbytes)))
    return array


def launch(
    lib: Any,
    function: Any,
    grid: tuple[int, ...],
    block: int,
    values: list[Any],
    *,
    shared: int = 0,
    attributes: Mapping[int, int] | None = None,
    stream: int = 0,
) -> int:
    """The status of a launch; ``values``: ctypes scalars."""
    given = attributes or {}
    listed = (_Attribute * max(1, len(given)))()
    for slot, (key, value) in zip(listed, given.items(), strict=False):
        slot.id, slot.value[:3] = key, (value, 1, 1)
    config = _Config((*grid, 1, 1)[:3], (block, 1, 1), shared, stream, ctypes.addressof(listed), len(given))
    table = (POINTER * len(values))(*map(ctypes.addressof, values))
    return int(lib.cuLaunchKernelEx(ctypes.byref(config), function, table, None))


def run(lib: Any, plan: Plan, image: bytes, inputs: Mapping[str, Array], rows: int, overlap: bool) -> Any:
    """The results by name of one call by lngen, whose driver ``lib`` is, on tensors without gaps on this device."""
    pointers = {v.name: upload(lib, inputs[v.name]) for v in plan.inputs}
    shapes = {v.name: (v.type.shape(rows, plan.spec.d), NUMPY_DTYPE[v.type.dtype]) for v in plan.outputs}
    for name, (shape, dtype) in shapes.items():
        pointers[name] = allocate(lib, int(np.prod(shape)) * np.dtype(dtype).itemsize).value
    workspace = allocate(lib, max(1, plan.workspace_bytes(rows))).value
    launcher = Launcher(plan, image, lib.device, overlap)
    launcher(rows, pointers, launcher.contiguous(rows), workspace, 0)
    return {name: download(lib, pointers[name], *shape) for name, shape in shapes.items()}
