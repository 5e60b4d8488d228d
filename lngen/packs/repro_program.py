"""What a file of ``lngen repro`` runs: it launches the kernels of a case and compares the bits of every result.

It needs Python 3.9, NumPy and the CUDA driver. Such a file has it in place of its text, with the dtypes written out,
and then the case and the machine code. lngen draws the inputs of a case with it as well.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NoReturn

import numpy as np

from lngen.dtypes import READ

DTYPES = {t.value: (f"u{t.size}", t.digits) for t in READ}  # bits, digits of a significand
SCALES = {"e4m3": 256.0, "e5m2": 1.0}  # with the same bits, f16 numbers are so much smaller
PARTS = 16  # of a result, with a checksum each, which tell where it differs
RUNS, WARM_UP = 100, 10

# cuda.h: CUlaunchAttributeID, CUfunction_attribute, CUdevice_attribute
ATTRIBUTES = {"cooperative": 2, "cluster dimension": 4, "programmatic stream serialization": 6}
MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
L2_CACHE_SIZE, CAPABILITY_MAJOR, CAPABILITY_MINOR = 38, 75, 76


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig; the sizes are those of the grid, then of a block."""

    _fields_ = (("sizes", c_uint * 6), ("shared", c_uint), ("stream", c_void_p), ("at", c_void_p), ("count", c_uint))


def drawn(seed: int, name: str, dtype: str, shape: Sequence[int], low: float, high: float) -> Any:
    """The bits of numbers from about ``low`` to ``high``: SplitMix64 of a counter, so the same on every machine.

    They are cut to the digits of the dtype, so that their conversion rounds nothing (but subnormal numbers of f16).
    """
    kind, digits = DTYPES[dtype]
    first = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    z = (np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(first)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    numbers = low + (high - low) * (z.astype(np.float64) * 2.0**-53)
    if not digits:  # whole numbers, or truth values
        return (numbers > 0.5 if dtype == "bool" else np.rint(numbers).astype(f"i{kind[1]}")).view(kind).reshape(shape)
    numbers = (numbers.view(np.uint64) & np.uint64(2**64 - 2 ** (53 - digits))).view(np.float64)
    if dtype == "bf16":  # the upper half of f32
        return (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(shape)
    if kind == "u1":
        half = (numbers / SCALES[dtype]).astype(np.float16).view(np.uint16)
        return (half >> 8 & 0x80 | half >> 11 - digits & 0x7F).astype(np.uint8).reshape(shape)
    return numbers.astype(f"f{kind[1]}").view(kind).reshape(shape)


def numbers_of(bits: Any, dtype: str) -> Any:
    """What the bits of a result stand for."""
    digits = DTYPES[dtype][1]
    if not digits:
        return bits.view(f"i{bits.itemsize}")
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if bits.itemsize > 1:
        return bits.view(f"f{bits.itemsize}")
    half = bits.astype(np.uint16)
    halves = ((half & 0x80) << 8 | (half & 0x7F) << 11 - digits).view(np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        numbers = halves.astype(np.float32) * np.float32(SCALES[dtype])
    return np.where(half & 0x7F == 0x7F, np.float32(np.nan), numbers)


def identity(bits: Any, dtype: str) -> tuple[str, str]:
    """The sha256 of a result, and the CRC-32 of each of its parts. Every NaN counts as the same one."""
    kind, digits = bits.dtype.type, DTYPES[dtype][1]
    largest = 2 ** (8 * bits.itemsize - 1) - 1
    infinity = largest - 1 if dtype == "e4m3" else largest + 1 - 2 ** (digits - 1)  # or what is next to a NaN
    nan = (bits & kind(largest)) > kind(infinity)
    same = np.where(nan, kind(largest), bits).reshape(-1)
    parts = [f"{zlib.crc32(part.tobytes()):08x}" for part in np.array_split(same, PARTS)]
    return hashlib.sha256(same.tobytes()).hexdigest(), "".join(parts)


def compared(bits: Any, dtype: str, sha256: str, parts: str) -> str:
    """``same bits``, or how a result differs from the expected one, of which there are checksums alone."""
    found, own = identity(bits, dtype)
    if found == sha256:
        return "same bits"
    ends = [f"{p[0]} to {p[-1]}" for p in np.array_split(np.arange(bits.size), PARTS) if p.size]
    where = [end for n, end in enumerate(ends) if own[8 * n : 8 * n + 8] != parts[8 * n : 8 * n + 8]]
    numbers = numbers_of(bits, dtype)
    finite = numbers[np.isfinite(numbers)]
    values = f"{finite.min():g} to {finite.max():g}" if finite.size else "none finite"
    return (
        f"DIFFERS in {len(where)} of {len(ends)} parts, first in elements {', '.join(where[:1])}\n"
        f"  sha256 {found}, expected {sha256}\n  values {values}; {np.isnan(numbers).sum()} NaN"
    )


def ended(code: int, text: str) -> NoReturn:
    """End with a sentence and an exit code."""
    print(text, file=sys.stderr)
    sys.exit(code)


class Gpu:
    """The first device, in its primary context, through the driver."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            ended(3, f"A GPU with an NVIDIA driver is expected, but libcuda.so.1 cannot be loaded: {error}.")
        if status := self.cuda.cuInit(0):
            ended(3, f"A GPU is expected, but the driver finds none that can be used: {self.error(status)}.")
        device, version, context, name = c_int(), c_int(), c_void_p(), ctypes.create_string_buffer(256)
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDeviceGetName", name, 256, device)
        self.call("cuDriverGetVersion", byref(version))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        facts = {L2_CACHE_SIZE: c_int(), CAPABILITY_MAJOR: c_int(), CAPABILITY_MINOR: c_int()}
        for attribute, value in facts.items():
            self.call("cuDeviceGetAttribute", byref(value), attribute, device)
        self.l2, major, minor = (value.value for value in facts.values())
        self.arch = f"sm_{major}{minor}"
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        print(f"GPU {name.value.decode()}, {self.arch}, driver for CUDA {cuda}, NumPy {np.__version__}")

    def error(self, status: int) -> str:
        """The name of a CUresult."""
        text = ctypes.c_char_p()
        self.cuda.cuGetErrorName(status, byref(text))
        return f"{(text.value or b'error').decode()} ({status})"

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; if it fails, the program ends."""
        if status := getattr(self.cuda, name)(*arguments):
            ended(1, f"{name} fails: {self.error(status)}.")

    def memory(self, size: int, byte: int) -> ctypes.c_uint64:
        """The address of so many bytes, all of one value."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        self.call("cuMemsetD8Async", address, byte, c_size_t(size), None)
        return address

    def launch(self, module: c_void_p, kernel: Mapping[str, Any], memory: Mapping[str, Any]) -> Callable[[], None]:
        """A function that enqueues a kernel. Arguments are names of memory, or C types and numbers."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, kernel["name"].encode())
        if kernel["shared"]:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel["shared"])
        if kernel["attributes"].get("cluster dimension", 1) > 8:
            self.call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        values = [memory[a] if isinstance(a, str) else getattr(ctypes, a[0])(a[1]) for a in kernel["arguments"]]
        table = (c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        given = [Attribute(ATTRIBUTES[key], 0, (value, 1, 1)) for key, value in kernel["attributes"].items()]
        listed, sizes = (Attribute * len(ATTRIBUTES))(*given), (*kernel["grid"], 1, kernel["block"], 1, 1)
        config = Config(sizes, kernel["shared"], None, ctypes.addressof(listed), len(given))

        def enqueue(kept: Any = (values, listed)) -> None:
            self.call("cuLaunchKernelEx", byref(config), function, table, None)

        return enqueue

    def times(self, launches: Sequence[Callable[[], None]], runs: int) -> list[float]:
        """Microseconds of each run, sorted, from an event before the first kernel to one behind the last.

        Before each run other data fill the L2 cache, which also gives the host time to enqueue the kernels.
        """
        start, stop, milliseconds, found = c_void_p(), c_void_p(), ctypes.c_float(), []
        for event in (start, stop):
            self.call("cuEventCreate", byref(event), 0)
        other = self.memory(2 * self.l2, 0)
        for _ in range(WARM_UP + runs):
            self.call("cuMemsetD8Async", other, 0, c_size_t(2 * self.l2), None)
            self.call("cuEventRecord", start, None)
            for launch in launches:
                launch()
            self.call("cuEventRecord", stop, None)
            self.call("cuEventSynchronize", stop)
            self.call("cuEventElapsedTime", byref(milliseconds), start, stop)
            found.append(1000 * milliseconds.value)
        return sorted(found[WARM_UP:])


def checked(gpu: Gpu, case: Mapping[str, Any], memory: Mapping[str, Any], count: int) -> bool:
    """Wait for the kernels and compare all results, which are those of the last of ``count`` launches."""
    gpu.call("cuCtxSynchronize")
    right = True
    for name, (dtype, shape, *expected) in case["results"].items():
        bits = np.empty(shape, DTYPES[dtype][0])
        gpu.call("cuMemcpyDtoH_v2", c_void_p(bits.ctypes.data), memory[name], c_size_t(bits.nbytes))
        said = compared(bits, dtype, *expected)
        right = right and said == "same bits"
        print(f"launch {count}: {name} {dtype}{list(shape)} {said}")
    return right


def main(case: Mapping[str, Any], image: str) -> int:
    """Launch, compare, time, and compare again; 0 if all bits are as expected, else 1."""
    runs = int(sys.argv[1]) if sys.argv[1:] else RUNS
    print(f"repro {case['spec']}, {case['rows']} rows, {case['schedule']}")
    gpu, module, memory = Gpu(), c_void_p(), {}
    cubin = ctypes.c_char_p(zlib.decompress(base64.b64decode(image)))
    if status := gpu.cuda.cuModuleLoadData(byref(module), cubin):
        why = f"this driver with a GPU of {gpu.arch} does not load it: {gpu.error(status)}"
        ended(3, f"The machine code is for {case['arch']}, and {why}; make the file again with --arch {gpu.arch}.")
    for name, (dtype, shape, low, high) in case["inputs"].items():
        bits = drawn(case["seed"], name, dtype, shape, low, high)
        memory[name] = gpu.memory(bits.nbytes, 0)
        gpu.call("cuMemcpyHtoD_v2", memory[name], c_void_p(bits.ctypes.data), c_size_t(bits.nbytes))
    for name, (size, byte) in case["buffers"].items():
        memory[name] = gpu.memory(size, byte)
    launches = [gpu.launch(module, kernel, memory) for kernel in case["kernels"]]
    for launch in launches:
        launch()
    right = checked(gpu, case, memory, 1)
    if runs:
        us, moved = gpu.times(launches, runs), case["bytes"]
        median = us[len(us) // 2]
        right = checked(gpu, case, memory, 1 + WARM_UP + runs) and right
        speed = f"{moved / median / 1000:.0f} GB/s of the {moved} bytes that have to move"
        print(f"time {median:.2f} us, the median of {runs} runs ({us[0]:.2f} to {us[-1]:.2f}); {speed}")
    return 0 if right else 1
