"""The ceilings with programmatic dependent launch: a copy and an addition of which each call begins early.

A plain ceiling waits for the end of the call before it, as other people's kernels do. lngen's calls begin while the
call before them ends. These ceilings do the same, so that a kernel which is ahead of the plain one can be held against
what memory allows under the same rules.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Any

from lngen.bench.cases import Case
from lngen.bench.floor import value_bytes
from lngen.bench.providers import Prepared
from lngen.bench.tasks import CEILINGS, OVERLAPPED
from lngen.errors import MissingError
from lngen.ir import WIDE
from lngen.runtime.driver import PROGRAMMATIC_STREAM_SERIALIZATION, Launch
from lngen.runtime.launch import device_arch, device_count
from lngen.schedule import OVERLAP_ARCH
from lngen.spec import Spec
from lngen.toolchain import compile_cubin

THREADS = 256
WORDS = 4  # of 16 bytes that a thread moves, all of them in flight at once

# Before griddepcontrol.wait nothing is read, only brought into L2. The last bytes of an odd tensor move one by one.
SOURCE = """\
template <int INPUTS>
__device__ void stream(uint4* out, const uint4* a, const uint4* b, long long bytes) {
    const long long words = bytes / 16;
    const long long first = (long long)blockIdx.x * (THREADS * WORDS) + threadIdx.x;
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = 0; i < WORDS; ++i) {
        const long long at = first + i * THREADS;
        if (at < words && threadIdx.x % 8 == 0) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(a + at));
            if (INPUTS == 2) asm volatile("prefetch.global.L2 [%0];" :: "l"(b + at));
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    uint4 x[WORDS], y[WORDS];
    for (int i = 0; i < WORDS; ++i) {
        const long long at = first + i * THREADS;
        if (at < words) {
            x[i] = __ldcs(a + at);
            if (INPUTS == 2) y[i] = __ldcs(b + at);
        }
    }
    for (int i = 0; i < WORDS; ++i) {
        const long long at = first + i * THREADS;
        if (at < words) {
            if (INPUTS == 2) x[i] = make_uint4(x[i].x + y[i].x, x[i].y + y[i].y, x[i].z + y[i].z, x[i].w + y[i].w);
            __stcs(out + at, x[i]);
        }
    }
    const long long rest = words * 16 + threadIdx.x;
    if (blockIdx.x == 0 && rest < bytes) {
        const char* s = reinterpret_cast<const char*>(a);
        const char* t = reinterpret_cast<const char*>(b);
        reinterpret_cast<char*>(out)[rest] = INPUTS == 2 ? s[rest] + t[rest] : s[rest];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy(uint4* out, const uint4* a, long long bytes) {
    stream<1>(out, a, a, bytes);
}

extern "C" __global__ void __launch_bounds__(THREADS) add(
    uint4* out, const uint4* a, const uint4* b, long long bytes) {
    stream<2>(out, a, b, bytes);
}
"""
INPUTS = {"fwd": ("x",), "bwd": ("x", "dy")}


def source() -> str:
    """The CUDA text of both kernels."""
    return f"constexpr int THREADS = {THREADS};\nconstexpr int WORDS = {WORDS};\n\n{SOURCE}"


def launched_early(device: int) -> bool:
    """True if the GPU lets a kernel begin before the one before it has ended."""
    return int(device_arch(device).removeprefix("sm_")) >= OVERLAP_ARCH


class OverlappedCeiling:
    """A copy (forward) or an addition (backward) of the bytes of the [M, D] tensors, launched programmatically.

    The addition is of 32-bit integers: the bytes are those of a sum, the numbers are not.
    """

    needs = "a GPU of sm_90 or later"
    checked = False
    settings = "own kernel, 16-byte accesses, prefetch to L2 before griddepcontrol.wait"

    def __init__(self, direction: str) -> None:
        self.name, self._direction = CEILINGS[direction] + OVERLAPPED, direction

    def available(self) -> bool:
        return importlib.util.find_spec("cupy") is not None and device_count() > 0 and launched_early(0)

    def covers(self, spec: Spec) -> bool:
        return spec.direction == self._direction

    def prepare(self, case: Case) -> Prepared:
        """Compile and bind one launch per set; MissingError on an older GPU."""
        import cupy

        engine, device = case.engine, case.engine.device()[0]
        if not launched_early(device):
            raise MissingError(f"'{self.name}' needs {self.needs}, got {device_arch(device)}.")
        with cupy.cuda.Device(device):
            module = cupy.cuda.function.Module()
            module.load(compile_cubin(source(), device_arch(device), name=f"{self.name}.cu").image)
            function = module.get_function(CEILINGS[self._direction])
        names = (case.outputs[0], *INPUTS[self._direction])
        (nbytes,) = {value_bytes(v, case.rows, case.spec.d) for v in case.graph.params if v.type.axes == WIDE}
        blocks = max(1, -(-nbytes // (16 * THREADS * WORDS)))
        calls = [
            _Call(function.ptr, blocks, [*(engine.pointer(arrays[n]) for n in names), nbytes], self.name)
            for arrays in case.sets
        ]

        def launch(stream: int, index: int, keep: Any = module) -> None:
            calls[index].launch(stream)

        return Prepared(launch, lambda index: {})


class _Call:
    """A kernel with all its arguments, of 8 bytes each, filled in."""

    def __init__(self, function: int, blocks: int, values: Sequence[int], name: str) -> None:
        self._values = (ctypes.c_longlong * len(values))(*values)  # the table points into it
        base = ctypes.addressof(self._values)
        table = (ctypes.c_void_p * len(values))(*range(base, base + 8 * len(values), 8))
        early = {PROGRAMMATIC_STREAM_SERIALIZATION: 1}
        self.launch = Launch(function, (blocks, 1), THREADS, 0, early, table, name)
