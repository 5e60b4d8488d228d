"""Launches of a fake driver: what the caller's structures say, what a GPU refuses, and their execution from PTX.

The structures are those of cuda.h (CUlaunchConfig, CUlaunchAttribute), written down here once more on purpose.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from c_calls import number, refuse_if
from fake_images import REGISTERS, Image
from lngen.proof.ptx.batch import Launch
from lngen.proof.ptx.compiler import compile_entry
from lngen.proof.ptx.launch import place_globals, run_blocks
from lngen.proof.ptx.memory import GlobalMemory, size_of
from lngen.proof.ptx.outcome import Finding, Reporter, Stop, Traffic
from lngen.proof.ptx.parser import Entry
from lngen.proof.ptx.program import DTYPES, WARP

# CUlaunchAttributeID
COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6
UNUSED = 0  # CU_LAUNCH_ATTRIBUTE_IGNORE

PLAIN_SHARED = 48 << 10  # bytes of shared memory that a block has without an attribute of its function
PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
THREADS = 1024  # of a block, at most
REGISTER_UNIT = 256  # registers that a warp is given at a time


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Loaded:
    """A loaded module: its image, and its variables in the memory of its device."""

    def __init__(self, image: Image, device: int, memory: GlobalMemory) -> None:
        self.image, self.device, self._memory = image, device, memory
        before = {id(b) for b in memory.buffers}
        self.variables = place_globals(memory, image.module, "workspace")
        self._held = [b for b in memory.buffers if id(b) not in before]

    def unload(self) -> None:
        """Its variables are gone."""
        for buffer in self._held:
            self._memory.remove(buffer)


@dataclass
class Kernel:
    """A function of a module, and its attributes."""

    owner: Loaded
    entry: Entry
    registers: int
    most_shared: int  # bytes that a block may have on this GPU
    allowed_shared: int = 0  # bytes of dynamic shared memory
    any_cluster: bool = False

    def __post_init__(self) -> None:
        self.static = sum(size_of(s) for s in self.entry.symbols if s.space == "shared")
        self.allowed_shared = PLAIN_SHARED - self.static

    @property
    def most_threads(self) -> int:
        """Threads that a block may have."""
        return self.owner.image.most_threads.get(self.entry.name, THREADS)


@dataclass
class Entries:
    """Functions by handle; one handle for a kernel of a module."""

    _kernels: dict[int, Kernel] = field(default_factory=dict)
    _of: dict[tuple[int, str], int] = field(default_factory=dict)

    def handle(
        self, module: int, owner: Loaded, entry: Entry, registers: Mapping[str, int], most: int, new: Iterator[int]
    ) -> int:
        """The handle of a kernel of a module."""
        key = module, entry.name
        if key not in self._of:
            used = owner.image.registers.get(entry.name) or registers.get(entry.name, REGISTERS)
            self._of[key] = next(new)
            self._kernels[self._of[key]] = Kernel(owner, entry, used, most)
        return self._of[key]

    def get(self, handle: int) -> Kernel:
        """The function with that handle; refused if there is none, or its module is unloaded."""
        refuse_if(handle not in self._kernels, "INVALID_HANDLE")
        return self._kernels[handle]

    def drop(self, module: int) -> None:
        """The functions of a module are gone."""
        for key in [key for key in self._of if key[0] == module]:
            del self._kernels[self._of.pop(key)]


@dataclass(frozen=True)
class Launched:
    """What the driver was given: the kernel's name, the bits of its arguments, and the rest; and by which thread.

    ``attributes``: by CUlaunchAttributeID, the first number of each; ``cluster``: blocks along x, y and z.
    """

    kernel: str
    values: tuple[int, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    attributes: dict[int, int]
    cluster: tuple[int, int, int]
    stream: int
    device: int
    thread: int

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        x, y, z = self.grid
        return x * y * z

    @property
    def threads(self) -> int:
        """Threads of a block."""
        x, y, z = self.block
        return x * y * z

    @property
    def cooperative(self) -> bool:
        """True if all blocks are to run at the same time."""
        return bool(self.attributes.get(COOPERATIVE))


def launch_of(
    f: Kernel, config: Any, arguments: Any, limits: Mapping[int, int], capability: tuple[int, int]
) -> Launched:
    """A launch as the caller's structures describe it; refused if the GPU or the function does not allow it."""
    refuse_if(not number(config))
    c = _Config.from_address(number(config))
    listed = (_Attribute * c.count).from_address(c.attributes) if c.count else ()
    given = {a.id: tuple(a.value[:3]) for a in listed if a.id != UNUSED}
    x, y, z = given.get(CLUSTER, (1, 1, 1))
    launched = Launched(
        f.entry.name, _values(f, arguments), tuple(c.grid), tuple(c.block), c.shared,
        {key: value[0] for key, value in given.items()}, (x, y, z), c.stream or 0, f.owner.device,
        threading.get_ident(),
    )  # fmt: skip
    refuse_if(not all(0 < n <= limits[5 + axis] for axis, n in enumerate(launched.grid)))
    refuse_if(not all(0 < n <= limits[2 + axis] for axis, n in enumerate(launched.block)))
    refuse_if(launched.threads > f.most_threads or c.shared > f.allowed_shared)
    refuse_if(capability < (9, 0) and bool(given.keys() & {CLUSTER, PROGRAMMATIC}), "NOT_SUPPORTED")
    refuse_if(x * y * z > (MOST_CLUSTER if f.any_cluster else PORTABLE_CLUSTER), "INVALID_CLUSTER_SIZE")
    refuse_if(0 in (x, y, z) or any(n % m for n, m in zip(launched.grid, (x, y, z), strict=True)))
    own = (*f.entry.cluster, 1, 1, 1)[:3]
    refuse_if(bool(f.entry.cluster) and CLUSTER in given and own != (x, y, z))
    return launched


def _values(f: Kernel, arguments: Any) -> tuple[int, ...]:
    """The bits of the arguments, each behind a pointer, of as many bytes as the kernel's parameter has."""
    params, table = f.entry.params, number(arguments)
    if isinstance(arguments, ctypes.Array):
        have = ctypes.sizeof(arguments) // ctypes.sizeof(ctypes.c_void_p)
        assert have == len(params) or not params, (
            f"'{f.entry.name}' has {len(params)} parameters, and the table of arguments {have} pointers."
        )
    refuse_if(bool(params) and not table)
    pointers = (ctypes.c_void_p * len(params)).from_address(table) if params else ()
    for place, pointer in enumerate(pointers):
        assert pointer, f"'{f.entry.name}': the pointer to argument {place} is null."
    sizes = [DTYPES[kind].itemsize for _, kind in params]
    return tuple(int.from_bytes(ctypes.string_at(p, n), "little") for p, n in zip(pointers, sizes, strict=True))


def occupancy(f: Kernel, block: int, dynamic: int, limits: Mapping[int, int]) -> int:
    """Blocks of ``block`` threads, with ``dynamic`` bytes of shared memory, that a multiprocessor holds at a time."""
    threads, blocks, registers, shared, reserved = (limits[n] for n in (39, 106, 82, 81, 111))
    warps = -(-block // WARP)
    per_warp = -(-f.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_shared = shared // max(1, f.static + dynamic + reserved)
    return min(threads // (warps * WARP), blocks, registers // (per_warp * warps), by_shared)


def runner(f: Kernel, launched: Launched, memory: GlobalMemory, order: int) -> Callable[[], tuple[Finding, ...]]:
    """The execution of a launch, which tells what it finds; PtxError for what the executor cannot run."""
    assert launched.grid[2] == launched.block[1] == launched.block[2] == launched.cluster[2] == 1, (
        f"'{f.entry.name}': the executor runs grids of two dimensions of blocks of one, got {launched}."
    )
    image, names = f.owner.image, [name for name, _ in f.entry.params]
    program = compile_entry(f.entry, tuple(f.owner.variables.items()))

    def run() -> tuple[Finding, ...]:
        reporter = Reporter(image.source, False, image.module.headers)
        launch = Launch(
            f.entry.name, program, dict(zip(names, launched.values, strict=True)), launched.grid[:2],
            launched.threads, memory, reporter, Traffic(), dynamic=launched.shared,
            cluster=launched.cluster[:2] if max(launched.cluster) > 1 else (),
            programmatic=bool(launched.attributes.get(PROGRAMMATIC)),
        )  # fmt: skip
        with suppress(Stop), np.errstate(all="ignore"):
            run_blocks(launch, order)
        return tuple(reporter.findings)

    return run
