"""lngen and the ceilings as providers, and the choice among all providers.

A ceiling copies or adds as many bytes as the [M, D] tensors of a call have, and computes nothing. Each call of a plain
one waits for the end of the previous call, as other people's kernels do. Calls of an overlapped one start while the
previous call drains, as lngen's may, so that lngen's overlapped times are compared under the same rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lngen.compiler.compile import Compilation
from lngen.compiler.ir import DType, bits_of, values_of
from lngen.compiler.ir.types import sets_in
from lngen.compiler.problem import OVERLAP_ARCH, Schedule, parse_schedule
from lngen.compiler.spec import Spec
from lngen.compiler.toolchain import compile_cubin
from lngen.errors import LngenError, MissingError, one_of
from lngen.files import load_cupy
from lngen.lab.bench import timing
from lngen.lab.bench.argument_sets import MEAN, Case, Prepared, Provider
from lngen.lab.bench.peers import LIBRARIES, Torch
from lngen.lab.bench.records import OWN, VARIANT
from lngen.lab.bench.tasks import CEILINGS, MOVES, OVERLAPPED, ceiling_bytes, ceiling_of
from lngen.lab.bench.torch_gpu import Array
from lngen.launch.driver import PROGRAMMATIC_STREAM_SERIALIZATION, Launch
from lngen.launch.runtime.launcher import Launcher, device_arch, device_count

ANY = Schedule("registers", threads=32, rows_per_block=1, vec=1)  # a schedule for variants to change
OVERLAPPING = OWN + OVERLAPPED
ON_REQUEST = (OVERLAPPING, "compile")  # not among the default providers


def known(schedules: Sequence[str] = ()) -> dict[str, Provider]:
    """Every provider by name, the ceilings first; lngen with the default schedule and with each of ``schedules``."""
    ceilings: list[Provider] = [*map(Ceiling, CEILINGS), *map(OverlappedCeiling, MOVES)]
    peers: list[Provider] = [Torch(), Torch("compile", compiled=True), *LIBRARIES]
    variants = [Lngen(VARIANT + text, text) for text in schedules]
    own: list[Provider] = [Lngen(), *variants, Lngen(OVERLAPPING, overlap=True)]
    return {p.name: p for p in (*ceilings, *own, *peers)}


def select(
    names: Sequence[str] = (), *, compiled: bool = False, overlap: bool = False, schedules: Sequence[str] = ()
) -> list[Provider]:
    """The named providers after the ceilings and lngen's variants; by default all that are available but ON_REQUEST.

    ``compiled`` and ``overlap`` add those. Ceilings whose calls overlap are there if lngen's calls overlap.
    LngenError for an unknown name, ScheduleError for a text that is not a schedule, MissingError for a named provider
    that is not installed.
    """
    for text in schedules:
        parse_schedule(text, ANY)
    providers = known(schedules)
    asked = [*([OVERLAPPING] if overlap else []), *(["compile"] if compiled else [])]
    for name in (*names, *asked):
        if name not in providers:
            raise LngenError(f"There is no provider '{name}', {one_of(name, providers, 'expected some of')}")
        if not providers[name].available():
            needs = providers[name].needs
            raise MissingError(f"The provider '{name}' needs {needs}, which is not installed.")
    in_turn = OVERLAPPING not in (*names, *asked)
    own = [VARIANT + text for text in schedules]

    def wanted(name: str, provider: Provider) -> bool:
        if name in (*names, *asked, *own):
            return True
        if provider.checked:
            return not names and name not in ON_REQUEST and provider.available()
        return provider.available() and not (in_turn and name.endswith(OVERLAPPED))

    return [p for name, p in providers.items() if wanted(name, p)]


def _inner(case: Case) -> int:
    """Rows of a set, of a graph that has sets."""
    return case.rows // sets_in(case.rows) if case.spec.by_sets else 1


class Lngen(Provider):
    """lngen's own kernels, with the default schedule or one that ``schedule`` changes.

    Each call waits for the end of the previous one; with ``overlap`` it starts while the previous one drains, where the
    GPU supports it.
    """

    def __init__(self, name: str = "lngen", schedule: str = "", overlap: bool = False) -> None:
        self.name, self._schedule, self._overlap = name, schedule, overlap
        calls = "each call begins while the one before ends" if overlap else "each call waits for the end of the last"
        self.settings = f"{schedule or 'default schedule'}, {calls}"

    def prepare(self, case: Case) -> Prepared:
        gpu, device = case.gpu, case.gpu.number
        arch = device_arch(device)
        # The only place that chooses a schedule.
        kernels = Compilation(case.spec).changed(self._schedule, arch, rows=case.rows)
        schedule = str(kernels.plan.schedule)
        launcher = Launcher(kernels.plan, kernels.cubin(arch).image, device, self._overlap)
        bound = launcher.bind(case.rows, launcher.contiguous(case.rows), _inner(case))
        numbers = values_of(case.graph, case.spec.eps_or_default)
        bound.give({name: bits_of(number) for name, number in numbers.items()})
        # One workspace: in use it is equally warm.
        workspace = gpu.empty((max(1, -(-bound.workspace_bytes // 8)),), DType.F64)
        address = workspace.data_ptr()
        bound.prepare(address, gpu.stream())
        pointers = [[s[name].data_ptr() for name in launcher.tensors] for s in case.sets]

        def launch(stream: int, index: int, keep: Any = (launcher, workspace)) -> None:
            bound(pointers[index], address, stream)

        return Prepared(launch, lambda index: {n: case.sets[index][n] for n in case.outputs}, schedule)


# ---- ceilings whose calls are in turn ----


def buffers(case: Case) -> list[list[Array]]:
    """For each set the array that the case's ceiling writes, and those it reads, all of one length.

    Together they have the bytes of the case's [M, D] tensors, up to an element each. They hold what inputs hold, since
    the power that memory takes depends on its bits. Of a chain, each launch reads what the one before wrote.
    """
    gpu, dtype = case.gpu, case.spec.dtype
    arrays = 1 + MOVES[ceiling_of(case.spec)]
    length = max(1, -(-ceiling_bytes(case.spec, case.rows) // (arrays * dtype.size)))
    first = [gpu.normal((length,), dtype, MEAN, seed) for seed in range(arrays)]
    if case.chain:
        other = [first[1], first[0], *first[2:]]
        return [other if i % 2 else first for i in range(len(case.sets))]
    return [first, *([a.clone() for a in first] for _ in case.sets[1:])]


def _ends(case: Case, arrays: Sequence[Sequence[Array]]) -> Callable[[int], tuple[Array, Array]]:
    """For each set the first [M, D] that the ceiling reads, and that it writes."""
    shape, length = (case.rows, case.spec.d), case.rows * case.spec.d

    def ends(index: int) -> tuple[Array, Array]:
        written, read, *_ = (a[:length].view(shape) for a in arrays[index])
        return read, written

    return ends


class Ceiling(Provider):
    """A copy or an addition, by its name, or one after the other for forward and backward as one unit (``copy+add``).

    The driver's copy takes twice as long for some sizes, an elementwise kernel does not: the faster one is used.
    """

    checked = False
    settings = "the library's own; of the driver's copy and an elementwise one the faster"

    def __init__(self, name: str) -> None:
        self.name = name

    def covers(self, spec: Spec) -> bool:
        return ceiling_of(spec) in self.name.split("+")

    def prepare(self, case: Case) -> Prepared:
        import torch

        arrays = buffers(case)
        copies = ceiling_of(case.spec) == "copy"

        def by_driver(stream: int, index: int) -> None:
            out, x = arrays[index]
            out.copy_(x)

        def elementwise(stream: int, index: int) -> None:
            out, *read = arrays[index]
            if copies:
                torch.mul(*read, 1, out=out)
            else:
                torch.add(*read, out=out)

        ways = [by_driver, elementwise] if copies else [elementwise]
        return Prepared(timing.fastest(ways, len(arrays), case.gpu), lambda index: {}, ends=_ends(case, arrays))


# ---- ceilings whose calls overlap ----

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
    uint4* out, const uint4* a{second}, long long bytes) {{
    stream<{template}>(out, a, {b}, bytes);
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
        second, b = (", const uint4* b", "b") if self.inputs == 2 else ("", "a")
        template = f"{self.inputs}, {self.words}, {str(self.early).lower()}"
        return KERNEL.format(name=self.name, second=second, template=template, b=b)


def variants(move: str) -> list[Variant]:
    """The kernels of a ceiling, ``copy`` or ``add``."""
    return [Variant(MOVES[move], words, early) for words in WORDS for early in (False, True)]


def source(move: str) -> str:
    """The CUDA text of a ceiling's kernels."""
    return f"constexpr int THREADS = {THREADS};\n\n{SOURCE}{''.join(map(str, variants(move)))}"


def launched_early(device: int) -> bool:
    """True if the GPU lets a kernel start before the previous one has ended."""
    return int(device_arch(device).removeprefix("sm_")) >= OVERLAP_ARCH


class OverlappedCeiling(Provider):
    """A copy or an addition of the bytes of the [M, D] tensors, launched programmatically.

    The addition is of 32-bit integers: only the bytes moved are those of a sum of tensors.
    """

    needs = "a GPU of sm_90 or later"
    checked = False
    settings = "own kernels, programmatic launch, with and without prefetch to L2 before the wait; the fastest"

    def __init__(self, move: str) -> None:
        self.name, self._move = move + OVERLAPPED, move

    def available(self) -> bool:
        return device_count() > 0 and launched_early(0)

    def covers(self, spec: Spec) -> bool:
        return ceiling_of(spec) == self._move

    def prepare(self, case: Case) -> Prepared:
        """Compile and bind one launch per set; MissingError on an older GPU."""
        cupy = load_cupy()
        device = case.gpu.number
        if not launched_early(device):
            raise MissingError(f"'{self.name}' needs {self.needs}, got {device_arch(device)}.")
        with cupy.cuda.Device(device):
            module = cupy.cuda.function.Module()
            module.load(compile_cubin(source(self._move), device_arch(device), name=f"{self.name}.cu").image)
        arrays = buffers(case)
        nbytes = len(arrays[0][0]) * case.spec.dtype.size
        launches = [_early_launch(module, variant, arrays, nbytes, self.name) for variant in variants(self._move)]
        launch = timing.fastest(launches, len(case.sets), case.gpu)
        return Prepared(launch, lambda index: {}, ends=_ends(case, arrays))


def _early_launch(
    module: Any, variant: Variant, arrays: Sequence[Sequence[Array]], nbytes: int, name: str
) -> timing.Launch:
    """A kernel of the module with the arguments of each set, all of 8 bytes; keeps alive what the kernel uses."""
    function, early = module.get_function(variant.name).ptr, {PROGRAMMATIC_STREAM_SERIALIZATION: 1}
    calls, held = [], []
    for each in arrays:
        values = (ctypes.c_longlong * (len(each) + 1))(*(a.data_ptr() for a in each), nbytes)
        base = ctypes.addressof(values)
        table = (ctypes.c_void_p * len(values))(*range(base, base + 8 * len(values), 8))
        held.append((values, each))  # the table points into the values
        calls.append(Launch(function, (variant.blocks(nbytes), 1), THREADS, 0, early, table, name))

    def launch(stream: int, index: int, keep: Any = (module, held)) -> None:
        calls[index](stream)

    return launch
