"""Tensors of TVM FFI that pass for ones on a GPU: any address by DLPack, and CPU tensors of PyTorch."""

import ctypes
from collections.abc import Sequence
from typing import Any

import tvm_ffi

CUDA = 2  # kDLCUDA
DTYPES = {
    "f16": (2, 16),
    "bf16": (4, 16),
    "f32": (2, 32),
    "f64": (2, 64),
    "u8": (1, 8),
    "int8": (0, 8),
    "i32": (0, 32),
    "i64": (0, 64),
    "e4m3": (10, 8),
    "e5m2": (12, 8),
}  # fmt: skip  (DLDataType: code and bits)

_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device", ctypes.c_int), ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class _Capsule:
    """What gives a capsule."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule


_KEPT: list[Any] = []  # what tensors point to; they have no deleter


def tensor(
    address: int, shape: Sequence[int], dtype: str, strides: Sequence[int] = (), device: int = 0, kind: int = CUDA
) -> Any:
    """A tensor at any address; without strides it is contiguous. It begins 16 bytes after its ``data``."""
    sizes = [(ctypes.c_int64 * len(given))(*given) for given in (shape, strides)]
    shapes = [ctypes.addressof(size) if given else None for size, given in zip(sizes, (shape, strides), strict=True)]
    offset = 16 if address else 0
    made = Managed(address - offset, CUDA, device, len(shape), *DTYPES[dtype], 1, *shapes, offset)
    _KEPT.extend((*sizes, made))
    return tvm_ffi.from_dlpack(_Capsule(_capsule(ctypes.addressof(made), b"dltensor", None)))


def as_on_gpu(cpu: Any) -> Any:
    """A CPU tensor of PyTorch as one of the first GPU, in the same memory."""
    import torch

    capsule = torch.to_dlpack(cpu)
    Managed.from_address(_pointer(capsule, b"dltensor")).device_type = CUDA
    return tvm_ffi.from_dlpack(_Capsule(capsule))
