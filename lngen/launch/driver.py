"""The CUDA driver through ctypes: devices, contexts, modules, and launches with attributes.

Structures and numbers are those of cuda.h, the driver's stable ABI. A context is a device's primary one, which CuPy and
PyTorch use as well.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from ..errors import LngenError, MissingError

# CUlaunchAttributeID
COOPERATIVE = 2
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6

# CUresult
INVALID_CONTEXT, CONTEXT_IS_DESTROYED, INVALID_HANDLE = 201, 709, 400
COOPERATIVE_LAUNCH_TOO_LARGE = 720
STREAM_CAPTURE_UNSUPPORTED = 900
CAPTURE_HINT = "; load kernels before a capture, with prepare() of a pack or warmup() of a compiled norm"

# CUstreamCaptureStatus
CAPTURE_ACTIVE = 1
CAPTURE_MODE_THREAD_LOCAL = 1  # CUstreamCaptureMode
DEFAULT_STREAMS = (0, 1)  # null and CU_STREAM_LEGACY, which cannot be captured
PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD

# CUuserObject_flags, CUuserObjectRetain_flags
NO_DESTRUCTOR_SYNC = 1
MOVE = 1

SEMAPHORE_BYTES = 32  # of sem_t on Linux, on 64 bits

# CUfunction_attribute
NUM_REGS, PTX_VERSION = 4, 5
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
PORTABLE_CLUSTER = 8

# CUjit_option
JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6
LOG_BYTES = 4096

# CUdevice_attribute, by the names of cudaDeviceProp
PROPERTIES = {
    "multiProcessorCount": 16,
    "l2CacheSize": 38,
    "maxThreadsPerMultiProcessor": 39,
    "sharedMemPerMultiprocessor": 81,
    "regsPerMultiprocessor": 82,
    "sharedMemPerBlockOptin": 97,
    "maxBlocksPerMultiProcessor": 106,
    "reservedSharedMemPerBlock": 111,
}
CAPABILITY = (75, 76)  # major, minor
NAME_BYTES = 256


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
    """The driver's shared library, initialised; MissingError without a driver."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise MissingError(
            f"Launching a kernel needs an NVIDIA driver, and libcuda.so.1 cannot be loaded ({e})."
        ) from e
    if status := found.cuInit(0):
        raise MissingError(f"The NVIDIA driver cannot be used: {_error_name(found, status)}.")
    return found


def error_name(status: int) -> str:
    """The name of a CUresult."""
    return _error_name(library(), status)


def _error_name(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"error").decode() + f" ({status})"


def _check(status: int, what: str) -> None:
    if status:
        raise LngenError(f"{what}: {error_name(status)}.")


# ---- devices ----


class Gpu(NamedTuple):
    """A device of this process.

    number           of the device
    name             as the driver reports it
    capability       (major, minor)
    cuda             the newest CUDA that the driver supports, 13000 for 13.0
    properties       limits by the names of cudaDeviceProp
    context          its primary context, a pointer
    """

    number: int
    name: str
    capability: tuple[int, int]
    cuda: int
    properties: Mapping[str, int]
    context: int

    @property
    def arch(self) -> str:
        """``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def multiprocessors(self) -> int:
        """Their number."""
        return self.properties["multiProcessorCount"]

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block can have at most."""
        return self.properties["sharedMemPerBlockOptin"]


def device_count() -> int:
    """Devices that the driver shows; 0 without a driver."""
    count = ctypes.c_int()
    try:
        return 0 if library().cuDeviceGetCount(ctypes.byref(count)) else count.value
    except MissingError:
        return 0


def gpu(index: int) -> Gpu:
    """The device of that number; MissingError if there is none."""
    count = device_count()
    if not 0 <= index < count:
        raise MissingError(f"GPU {index} is expected, but {count} are found; NumPy arrays run the interpreter instead.")
    return _gpu(library(), index)


@cache
def _gpu(cuda: Any, index: int) -> Gpu:
    device, version, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    name = ctypes.create_string_buffer(NAME_BYTES)
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), f"GPU {index} cannot be opened")
    _check(cuda.cuDeviceGetName(name, NAME_BYTES, device), f"GPU {index} does not report its name")
    _check(cuda.cuDriverGetVersion(ctypes.byref(version)), "The driver does not report its version")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"GPU {index} has no context")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device), f"GPU {index} does not report itself")
        return value.value

    properties = {key: attribute(number) for key, number in PROPERTIES.items()}
    capability = attribute(CAPABILITY[0]), attribute(CAPABILITY[1])
    return Gpu(index, name.value.decode(), capability, version.value, properties, context.value or 0)


def current_context() -> int:
    """The context of this thread, a pointer; 0 if it has none."""
    here = ctypes.c_void_p()
    library().cuCtxGetCurrent(ctypes.byref(here))
    return here.value or 0


@contextmanager
def on(context: int) -> Iterator[None]:
    """Make a context current in this thread; at the end, the one before it again."""
    before = current_context()
    if before != context:
        _check(library().cuCtxSetCurrent(ctypes.c_void_p(context)), "The GPU cannot be used in this thread")
    try:
        yield
    finally:
        if before not in (0, context):
            library().cuCtxSetCurrent(ctypes.c_void_p(before))


# ---- modules and functions, in the context of this thread ----


class Module:
    """Kernels that are loaded on the current device, from a cubin, a fatbin or PTX."""

    def __init__(self, image: bytes, name: str) -> None:
        """``name``: of the image, in messages. LngenError with the driver's log if it refuses the image."""
        self._cuda, self.handle, self._context = library(), ctypes.c_void_p(), current_context()
        log = ctypes.create_string_buffer(LOG_BYTES)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
        loaded = ctypes.byref(self.handle)
        status = self._cuda.cuModuleLoadDataEx(loaded, ctypes.c_char_p(image), 2, options, values)
        if status:
            said = " ".join(log.value.decode(errors="replace").split())
            hint = CAPTURE_HINT if status == STREAM_CAPTURE_UNSUPPORTED else ""
            raise LngenError(f"The driver refuses '{name}': {error_name(status)}{': ' * bool(said)}{said}{hint}.")

    def function(self, name: str) -> int:
        """A kernel by its name, as a pointer; LngenError if there is none."""
        found = ctypes.c_void_p()
        status = self._cuda.cuModuleGetFunction(ctypes.byref(found), self.handle, name.encode())
        _check(status, f"There is no kernel '{name}'")
        return found.value or 0

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """The functions must not be used any more. At exit, when globals may be gone, the driver is left alone."""
        if not exiting() and getattr(self, "handle", None):
            before = ctypes.c_void_p()
            self._cuda.cuCtxGetCurrent(ctypes.byref(before))
            self._cuda.cuCtxSetCurrent(ctypes.c_void_p(self._context))
            self._cuda.cuModuleUnload(self.handle)
            self._cuda.cuCtxSetCurrent(before)


def registers(function: int) -> int:
    """Registers per thread of a function."""
    return _reported(function, NUM_REGS, "registers")


def virtual_arch(function: int) -> int:
    """The arch of the PTX that a function was made from, 90 for sm_90; 0 if its code does not say."""
    return _reported(function, PTX_VERSION, "PTX version")


def _reported(function: int, key: int, name: str) -> int:
    number = ctypes.c_int()
    status = library().cuFuncGetAttribute(ctypes.byref(number), key, ctypes.c_void_p(function))
    _check(status, f"The driver does not report the {name} of a kernel")
    return number.value


def resident_blocks(function: int, block: int, shared: int) -> int:
    """Blocks of ``block`` threads, with ``shared`` bytes of dynamic shared memory, that a multiprocessor can hold."""
    number = ctypes.c_int()
    given = ctypes.byref(number), ctypes.c_void_p(function), block, ctypes.c_size_t(shared)
    status = library().cuOccupancyMaxActiveBlocksPerMultiprocessor(*given)
    _check(status, "The driver does not report how many blocks of a kernel fit")
    return number.value


def allow_shared(function: int, size: int) -> None:
    """Allow a function ``size`` bytes of dynamic shared memory; LngenError if the GPU has less."""
    if size:
        status = library().cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        _check(status, f"The GPU cannot give a block {size} bytes of dynamic shared memory")


def allow_cluster(function: int, blocks: int) -> None:
    """Allow a function clusters of ``blocks`` blocks; LngenError if the GPU does not support them."""
    if blocks > PORTABLE_CLUSTER:
        status = library().cuFuncSetAttribute(ctypes.c_void_p(function), NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        _check(status, f"The GPU has no clusters of {blocks} blocks")


def zero(address: int, size: int, stream: int) -> None:
    """Enqueue on ``stream``: ``size`` bytes from an address become zero."""
    status = library().cuMemsetD8Async(ctypes.c_uint64(address), 0, ctypes.c_size_t(size), ctypes.c_void_p(stream))
    _check(status, "The driver does not clear a workspace")


class OtherContextError(LngenError):
    """A launch in a thread whose context is not that of the kernel, or none."""


class Launch:
    """One kernel's launch: ``call(*given)``, with the stream in ``config``, returns the driver's status."""

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
        self.attributes = (_Attribute * max(1, len(attributes)))()
        for slot, (key, value) in zip(self.attributes, attributes.items()):
            slot.id = key
            slot.value[:3] = (value, 1, 1)
        self.config = _Config(
            (*grid, 1), (block, 1, 1), shared, None, ctypes.addressof(self.attributes), len(attributes)
        )
        self.call: Callable[..., int] = library().cuLaunchKernelEx
        self.given = ctypes.byref(self.config), ctypes.c_void_p(function), arguments, None
        self._name = name

    def __call__(self, stream: int) -> None:
        """Enqueue on ``stream``, a pointer; LngenError if the driver refuses."""
        self.config.stream = stream
        status = self.call(*self.given)
        if status == COOPERATIVE_LAUNCH_TOO_LARGE:
            x, y, _ = self.config.grid
            raise LngenError(
                f"'{self._name}' needs its {x * y} blocks to run at the same time, and this GPU cannot hold so many; "
                "choose a schedule with single_launch=no."
            )
        if status in (INVALID_CONTEXT, CONTEXT_IS_DESTROYED, INVALID_HANDLE):
            raise OtherContextError(f"The driver refuses the launch of '{self._name}': {error_name(status)}.")
        if status:
            raise LngenError(f"The driver refuses the launch of '{self._name}': {error_name(status)}.")


# ---- captures ----


def capture_of(stream: int) -> int:
    """The number of the capture in progress on ``stream``, a pointer; 0 if there is none."""
    if stream in DEFAULT_STREAMS:
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = ctypes.byref(status), ctypes.byref(number)
    failed = library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *found, None, None, None)
    return number.value if not failed and status.value == CAPTURE_ACTIVE else 0


@contextmanager
def beside_captures() -> Iterator[None]:
    """Within it, this thread may load kernels while another one captures a stream, whose capture stays whole."""
    mode = ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


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
