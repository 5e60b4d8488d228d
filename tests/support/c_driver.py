"""A fake libcuda as a shared library, for programs in C: its functions are those of a ``FakeDriver``, or do nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fake_driver import FakeDriver

FAILED = 999  # CUDA_ERROR_UNKNOWN
STRICT = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-fPIC")

# The arguments of each function: i an int, q 8 bytes, p a pointer or a handle.
ARGUMENTS = {
    "cuInit": "i", "cuDriverGetVersion": "p", "cuDeviceGetCount": "p", "cuDeviceGet": "pi", "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii", "cuDevicePrimaryCtxRetain": "pi", "cuDevicePrimaryCtxRelease_v2": "i",
    "cuCtxGetCurrent": "p", "cuCtxSetCurrent": "p", "cuCtxPushCurrent_v2": "p", "cuCtxPopCurrent_v2": "p",
    "cuModuleLoadData": "pp", "cuModuleLoadDataEx": "ppipp", "cuModuleUnload": "p", "cuModuleGetFunction": "ppp",
    "cuFuncGetAttribute": "pip", "cuFuncSetAttribute": "pii", "cuMemsetD8Async": "qiqp", "cuGetErrorName": "ip",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "ppiq", "cuPointerGetAttribute": "piq", "cuGetErrorString": "ip",
    "cuLaunchKernelEx": "pppp", "cuStreamGetCaptureInfo_v2": "pppppp", "cuCtxSynchronize": "",
    "cuMemAlloc_v2": "pq", "cuMemFree_v2": "q", "cuMemcpyHtoD_v2": "qpq", "cuMemcpyDtoH_v2": "pqq",
    "cuStreamCreate": "pi", "cuStreamWaitEvent": "ppi", "cuEventCreate": "pi", "cuEventRecord": "pp",
    "cuEventDestroy_v2": "p",
}  # fmt: skip
KINDS: dict[str, Any] = {"i": ctypes.c_int, "q": ctypes.c_uint64, "p": ctypes.c_void_p}

# Integers and pointers are passed in registers of 8 bytes each, so one type of function stands for all.
HEAD = "#include <stdint.h>\n#define SIX uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f\n"
BRIDGE = "int (*to_{0})(SIX);\nint {0}(SIX) {{ return to_{0} ? to_{0}(a, b, c, d, e, f) : 999; }}\n"


def cc(out: Path, sources: Sequence[Path], *flags: str) -> Path:
    """A program or, with ``-shared``, a library of C files, in which every warning is an error; skips without gcc."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    command = ["gcc", *STRICT, *map(str, sources), "-o", str(out), *flags, "-pthread", "-ldl", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def driver(folder: Path, source: Path) -> Path:
    """A libcuda of a C file; without a SONAME, so that nothing else in this process takes it for the driver."""
    return cc(folder / "libcuda.so.1", [source], "-shared")


def no_op(folder: Path) -> Path:
    """The one that does nothing; ``no_op_driver.c`` says what it counts."""
    return driver(folder, Path(__file__).with_name("no_op_driver.c"))


def linked(out: Path, program: Path, pack: Path, cuda: Path, *flags: str) -> tuple[Path, dict[str, str]]:
    """A program of a C file with the C library of a pack and a libcuda; and the environment to run it in."""
    where = f"-I{pack / 'c'}", f'-DLNGEN_PACK_DIR="{pack}"', f"-L{cuda.parent}", f"-l:{cuda.name}"
    made = cc(out, [program, pack / "c/lngen_kernels.c"], *flags, *where)
    return made, {**os.environ, "LD_LIBRARY_PATH": str(cuda.parent)}


class Bridge:
    """The libcuda whose functions are those of the FakeDriver that it is ``behind``, without those in ``lacks``."""

    def __init__(self, folder: Path, lacks: Sequence[str] = ()) -> None:
        self.names = [name for name in ARGUMENTS if name not in lacks]
        source = folder / "bridge.c"
        source.write_text(HEAD + "".join(map(BRIDGE.format, self.names)), encoding="utf-8")
        self.path = driver(folder, source)
        self._library = ctypes.CDLL(str(self.path))

    @contextlib.contextmanager
    def behind(self, gpu: FakeDriver) -> Iterator[None]:
        """Within it, calls go to ``gpu``. At the end, what a call has raised is raised, as C cannot raise it."""
        errors: list[BaseException] = []
        slots = [ctypes.c_void_p.in_dll(self._library, f"to_{name}") for name in self.names]
        kept = [c_callback(getattr(gpu, name), ARGUMENTS[name], errors) for name in self.names]
        for slot, callback in zip(slots, kept, strict=True):
            slot.value = ctypes.cast(callback, ctypes.c_void_p).value
        try:
            yield
        finally:
            for slot in slots:
                slot.value = None
            if errors:
                raise errors[0]


def c_callback(call: Callable[..., int], arguments: str, errors: list[BaseException]) -> Any:
    """A C function which calls Python with the same arguments."""
    kinds = [KINDS[a] for a in arguments]

    def called(*given: Any) -> int:
        try:
            return call(*(kind(value) for kind, value in zip(kinds, given, strict=True)))
        except BaseException as error:
            errors.append(error)
            return FAILED

    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(called)
