"""``cuLaunchKernelEx`` of the CUDA driver: a launch with attributes, which CuPy's binding lacks.

The structures are those of cuda.h (CUlaunchConfig, CUlaunchAttribute); they are part of the driver's stable ABI.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from lngen.errors import LngenError, MissingError

# CUlaunchAttributeID
COOPERATIVE = 2
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6

# CUresult
COOPERATIVE_LAUNCH_TOO_LARGE = 720

# CUstreamCaptureStatus
CAPTURE_ACTIVE = 1
DEFAULT_STREAMS = (0, 1)  # null and CU_STREAM_LEGACY, which cannot be captured
PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD

# CUuserObject_flags, CUuserObjectRetain_flags
NO_DESTRUCTOR_SYNC = 1
MOVE = 1

SEMAPHORE_BYTES = 32  # of sem_t on Linux, on 64 bits

# CUfunction_attribute
NUM_REGS = 4
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
PORTABLE_CLUSTER = 8


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


@cache
def library() -> Any:
    """The driver's shared library; MissingError without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise MissingError(
            f"Launching a kernel needs an NVIDIA driver, and libcuda.so.1 cannot be loaded ({e})."
        ) from e


class Launch:
    """One kernel's launch without the stream."""

    def __init__(
        self,
        function: int,
        grid: tuple[int, int],
        block: int,
        shared: int,
        attributes: Mapping[int, int],
        arguments: Any,
        name: str,
    ) -> None:
        """``arguments``: a ctypes array of pointers to the arguments, of which the launch keeps a reference."""
        self._listed = (_Attribute * max(1, len(attributes)))()
        for slot, (key, value) in zip(self._listed, attributes.items(), strict=False):
            slot.id = key
            slot.value[:3] = (value, 1, 1)
        self._config = _Config((*grid, 1), (block, 1, 1), shared, None, ctypes.addressof(self._listed), len(attributes))
        self._call: Callable[..., int] = library().cuLaunchKernelEx
        self._given = ctypes.byref(self._config), ctypes.c_void_p(function), arguments, None
        self._name = name

    def __call__(self, stream: int) -> None:
        """Enqueue on ``stream``, a pointer; LngenError if the driver refuses."""
        self._config.stream = stream
        status = self._call(*self._given)
        if status == COOPERATIVE_LAUNCH_TOO_LARGE:
            x, y, _ = self._config.grid
            raise LngenError(
                f"'{self._name}' needs its {x * y} blocks to run at the same time, and this GPU cannot hold so many; "
                "choose a schedule with single_launch=no."
            )
        if status:
            raise LngenError(f"The driver refuses the launch of '{self._name}': {error_name(status)}.")


def registers(function: int) -> int:
    """Registers per thread of a function."""
    number = ctypes.c_int()
    status = library().cuFuncGetAttribute(ctypes.byref(number), NUM_REGS, ctypes.c_void_p(function))
    if status:
        raise LngenError(f"The driver does not report the registers of a kernel: {error_name(status)}.")
    return number.value


def allow_shared(function: int, size: int) -> None:
    """Allow a function ``size`` bytes of dynamic shared memory; LngenError if the GPU has less."""
    if size == 0:
        return
    status = library().cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
    if status:
        raise LngenError(f"The GPU cannot give a block {size} bytes of dynamic shared memory: {error_name(status)}.")


def allow_cluster(function: int, blocks: int) -> None:
    """Allow a function clusters of ``blocks`` blocks; LngenError if the GPU does not support them."""
    if blocks > PORTABLE_CLUSTER:
        status = library().cuFuncSetAttribute(ctypes.c_void_p(function), NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if status:
            raise LngenError(f"The GPU has no clusters of {blocks} blocks: {error_name(status)}.")


def capture_of(stream: int) -> int:
    """The number of the capture in progress on ``stream``, a pointer; 0 if there is none."""
    if stream in DEFAULT_STREAMS:
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = ctypes.byref(status), ctypes.byref(number)
    failed = library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *found, None, None, None)
    return number.value if not failed and status.value == CAPTURE_ACTIVE else 0


class CapturedGraph:
    """The CUDA graph that a stream captures. It tells when the graph and all its instances are gone.

    The graph and each instance keep a user object. The driver calls the destructor of that object in a thread of its
    own, where CUDA may not be called, and at exit no Python may run. So it is ``sem_post`` of the C library.
    """

    def __init__(self, stream: int) -> None:
        self._c = ctypes.CDLL(None)
        self._c.malloc.restype = ctypes.c_void_p
        # Not Python's memory, which is gone at exit, when the driver may still post.
        self._semaphore = ctypes.c_void_p(self._c.malloc(SEMAPHORE_BYTES))
        self._c.sem_init(self._semaphore, 0, 0)
        status, number, graph, kept = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
        found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
        library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *found, None, None)
        post = ctypes.cast(self._c.sem_post, ctypes.c_void_p)
        # If the driver refuses, nothing posts, and the graph counts as existing.
        if not library().cuUserObjectCreate(ctypes.byref(kept), self._semaphore, post, 1, NO_DESTRUCTOR_SYNC):
            library().cuGraphRetainUserObject(graph, kept, 1, MOVE)

    def ended(self) -> bool:
        """True, once, when the graph and its instances are gone."""
        if self._c.sem_trywait(self._semaphore):
            return False
        self._c.free(self._semaphore)
        return True


def error_name(status: int) -> str:
    """The name of a CUresult."""
    text = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"error").decode() + f" ({status})"
