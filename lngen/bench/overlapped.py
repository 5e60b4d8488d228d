"""The ceilings with programmatic dependent launch: a copy and an addition whose calls overlap.

A call of a plain ceiling waits for the end of the previous call, as other people's kernels do. lngen's calls start
while the previous call drains. These ceilings do the same, so that lngen's overlapped times are compared with what the
memory allows under the same rules.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lngen.bench.cases import Case
from lngen.bench.ceilings import buffers
from lngen.bench.providers import Prepared
from lngen.bench.tasks import MOVES, OVERLAPPED, ceiling_of
from lngen.bench.timing import fastest
from lngen.errors import MissingError
from lngen.runtime.driver import PROGRAMMATIC_STREAM_SERIALIZATION, Launch
from lngen.runtime.launch import device_arch, device_count
from lngen.schedule import OVERLAP_ARCH
from lngen.spec import Spec
from lngen.toolchain import compile_cubin

THREADS = 256
WORDS = (1, 2, 4)  # of 16 bytes that a thread has in flight at once; the best number depends on the size

# Before griddepcontrol.wait nothing is read; data may be prefetched into L2. The last odd bytes move one by one.
SOURCE = """\
template <int INPUTS, int WORDS, bool EARLY>
__device__ void stream(uint4* out, const uint4* a, const uint4* b, long long bytes) {
    const long long words = bytes / 16;
    const long long first = (long long)blockIdx.x * (THREADS * WORDS) + threadIdx.x;
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = 0; EARLY && i < WORDS; ++i) {
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
"""
KERNEL = """
extern "C" __global__ void __launch_bounds__(THREADS) {name}(
    uint4* out, {parameters}, long long bytes) {{
    stream<{inputs}, {words}, {early}>(out, {arguments}, bytes);
}}
"""


@dataclass(frozen=True)
class Variant:
    """One kernel: the number of tensors read, the words per thread, and whether it prefetches before the wait."""

    inputs: int
    words: int
    early: bool

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"move_{self.inputs}_{self.words}{'_early' if self.early else ''}"

    def blocks(self, nbytes: int) -> int:
        """Blocks that move that many bytes."""
        return max(1, -(-nbytes // (16 * THREADS * self.words)))

    def __str__(self) -> str:
        letters = "ab"[: self.inputs]
        return KERNEL.format(
            name=self.name,
            parameters=", ".join(f"const uint4* {c}" for c in letters),
            inputs=self.inputs,
            words=self.words,
            early=str(self.early).lower(),
            arguments=", ".join((letters * 2)[:2]),
        )


def variants(move: str) -> list[Variant]:
    """The kernels of a ceiling, ``copy`` or ``add``."""
    return [Variant(MOVES[move], words, early) for words in WORDS for early in (False, True)]


def source(move: str) -> str:
    """The CUDA text of a ceiling's kernels."""
    return f"constexpr int THREADS = {THREADS};\n\n{SOURCE}{''.join(map(str, variants(move)))}"


def launched_early(device: int) -> bool:
    """True if the GPU lets a kernel start before the previous one has ended."""
    return int(device_arch(device).removeprefix("sm_")) >= OVERLAP_ARCH


class OverlappedCeiling:
    """A copy or an addition of the bytes of the [M, D] tensors, launched programmatically.

    The addition is of 32-bit integers: only the bytes moved are those of a sum of tensors.
    """

    needs = "a GPU of sm_90 or later"
    checked = False
    settings = "own kernels, programmatic launch, with and without prefetch to L2 before the wait; the fastest"

    def __init__(self, move: str) -> None:
        self.name, self._move = move + OVERLAPPED, move

    def available(self) -> bool:
        return importlib.util.find_spec("cupy") is not None and device_count() > 0 and launched_early(0)

    def covers(self, spec: Spec) -> bool:
        return ceiling_of(spec) == self._move

    def prepare(self, case: Case) -> Prepared:
        """Compile and bind one launch per set; MissingError on an older GPU."""
        import cupy

        engine, device = case.engine, case.engine.device()[0]
        if not launched_early(device):
            raise MissingError(f"'{self.name}' needs {self.needs}, got {device_arch(device)}.")
        with cupy.cuda.Device(device):
            module = cupy.cuda.function.Module()
            module.load(compile_cubin(source(self._move), device_arch(device), name=f"{self.name}.cu").image)
        arrays = buffers(case)
        nbytes = len(arrays[0][0]) * case.spec.dtype.size
        values = [[*map(engine.pointer, held), nbytes] for held in arrays]
        launches = []
        for variant in variants(self._move):
            function = module.get_function(variant.name).ptr
            calls = [_Call(function, variant.blocks(nbytes), v, self.name) for v in values]
            launches.append(partial(_launch, module, calls, arrays))
        return Prepared(fastest(launches, len(case.sets), engine), lambda index: {})


def _launch(module: Any, calls: Sequence[_Call], arrays: Sequence[Any], stream: int, index: int) -> None:
    """The launch of a set; keeps ``module`` and ``arrays`` alive, which the kernels use."""
    calls[index].launch(stream)


class _Call:
    """A kernel with all its arguments, of 8 bytes each."""

    def __init__(self, function: int, blocks: int, values: Sequence[int], name: str) -> None:
        self._values = (ctypes.c_longlong * len(values))(*values)  # the table points into it
        base = ctypes.addressof(self._values)
        table = (ctypes.c_void_p * len(values))(*range(base, base + 8 * len(values), 8))
        early = {PROGRAMMATIC_STREAM_SERIALIZATION: 1}
        self.launch = Launch(function, (blocks, 1), THREADS, 0, early, table, name)
