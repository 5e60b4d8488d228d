"""The blocks of a launch in batches; one kernel on given arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lngen.errors import PtxError
from lngen.ir.numerics import Array
from lngen.ptx.advance import run
from lngen.ptx.analysis import co_resident, narrowest
from lngen.ptx.batch import Batch, Launch
from lngen.ptx.cluster import order as order_of
from lngen.ptx.compiler import compile_entry
from lngen.ptx.dependent import check_end
from lngen.ptx.memory import Buffer, GlobalMemory
from lngen.ptx.parser import Entry, Module
from lngen.ptx.report import Outcome, Reporter, Stop, Traffic
from lngen.ptx.scratch import size_of
from lngen.ptx.values import DTYPES, immediate

LANES = 1 << 14  # threads of a batch, about
SHARED = 227 << 10  # bytes of shared memory a block may have, on any arch
MOST = 1 << 18  # threads of a launch whose blocks are all resident at once


def run_blocks(launch: Launch, order: int) -> None:
    """Every block: in batches, or all side by side if they may wait for each other."""
    entry = launch.program.entry
    launch.cluster = launch.cluster or entry.cluster
    blocks, size = order_of(launch.grid, launch.cluster)
    static = sum(size_of(s) for s in entry.symbols if s.space == "shared")
    if static + launch.dynamic > SHARED:
        need = f"{static} + {launch.dynamic}" if static else str(launch.dynamic)
        raise PtxError(f"'{launch.kernel}' needs {need} bytes of shared memory; a block has {SHARED} at most.")
    per = max(1, LANES // (launch.block * size)) * size
    launch.order = order
    launch.memory.begin(narrowest(entry, "global"))
    if co_resident(entry):
        if len(blocks) * launch.block > MOST:
            raise PtxError(f"'{launch.kernel}' has blocks that may wait for each other, and more than {MOST} threads.")
        per = max(1, len(blocks))
    elif order:
        blocks = np.random.default_rng(order).permutation(blocks.reshape(-1, size)).reshape(-1)
    try:
        for start in range(0, len(blocks), per):
            batch = Batch(launch, blocks[start : start + per])
            run(batch)
            ran = launch.traffic.segments
            ran[launch.kernel] = max(ran[launch.kernel], batch.ran)
        check_end(launch)
    finally:
        _count(launch)


def _count(launch: Launch) -> None:
    table = launch.traffic.instructions[launch.kernel]
    code = launch.program.entry.instructions
    for begin, times in launch.counts.items():
        segment = launch.program.segments[begin]
        for i in code[begin : segment.end + (segment.control is not None)]:
            table[i.opcode] = table.get(i.opcode, 0) + times


def place_globals(memory: GlobalMemory, module: Module, role: str = "constant") -> dict[str, int]:
    """The module's variables, placed in memory; ``role`` is that of variables that are not constant."""
    places = {}
    for s in module.symbols:
        dtype = DTYPES[s.element]
        size, kind = s.count * dtype.itemsize, role if s.space == "global" else "constant"
        buffer = memory.add(Buffer(s.name, kind, size, dtype.itemsize))
        values = [immediate(text, dtype) for text in s.init] + [dtype.type(0)] * (s.count - len(s.init))
        buffer.data[:size] = np.array(values, dtype).view(np.uint8)
        if buffer.written is not None:
            buffer.written[:size] = 1
        places[s.name] = buffer.start
    return places


def entry_of(module: Module, name: str) -> Entry:
    """The kernel of that name; PtxError if the module has none."""
    if name not in module.entries:
        raise PtxError(f"The kernel '{name}' is expected in the PTX, which has {', '.join(module.entries)}.")
    return module.entries[name]


def run_kernel(
    module: Module,
    name: str,
    grid: int | tuple[int, int],
    block: int,
    arguments: Sequence[Any],
    *,
    source: str = "",
    order: int = 0,
    stop: bool = False,
    dynamic: int = 0,
    cluster: tuple[int, ...] = (),
    programmatic: bool = False,
) -> Outcome:
    """One launch of the kernel ``name`` on ``arguments``: arrays for pointers, numbers for the rest.

    The arrays do not change; the outcome holds copies with the results, by the parameter's number as text. An array
    that is not writeable may only be read. ``source``: the CUDA text, quoted in findings; ``order``: the seed of the
    order in which blocks run; ``dynamic``: bytes of dynamic shared memory of a block; ``cluster``: blocks of a cluster
    along x and y, where the launch and not the kernel gives it; ``programmatic``: the launch may start while the
    previous kernel runs.
    """
    entry = entry_of(module, name)
    if len(entry.params) != len(arguments):
        raise PtxError(f"'{name}' has {len(entry.params)} parameters, got {len(arguments)} arguments.")
    memory, reporter, traffic = GlobalMemory(), Reporter(source, stop), Traffic()
    program = compile_entry(entry, tuple(place_globals(memory, module, "workspace").items()))
    values, buffers = _place_arguments(memory, entry, arguments)
    traffic.open(name)
    shape = (grid, 1) if isinstance(grid, int) else grid
    with suppress(Stop), np.errstate(all="ignore"):
        launch = Launch(
            name, program, values, shape, block, memory, reporter, traffic,
            dynamic=dynamic, cluster=cluster, programmatic=programmatic,
        )  # fmt: skip
        run_blocks(launch, order)
    results = {n: b.data[: a.nbytes].view(a.dtype).reshape(a.shape).copy() for n, (b, a) in buffers.items()}
    return Outcome(results, tuple(reporter.findings), traffic)


def _place_arguments(
    memory: GlobalMemory, entry: Entry, arguments: Sequence[Any]
) -> tuple[dict[str, int], dict[str, tuple[Buffer, Array]]]:
    """The bits of every parameter, and each array with its buffer, by the parameter's number as text."""
    values, buffers = {}, {}
    for n, ((parameter, kind), argument) in enumerate(zip(entry.params, arguments, strict=True)):
        if isinstance(argument, np.ndarray):
            buffers[str(n)] = (memory.add(_buffer(parameter, argument)), argument)
            values[parameter] = buffers[str(n)][0].start
        else:
            values[parameter] = int.from_bytes(DTYPES[kind].type(argument).tobytes(), "little")
    return values, buffers


def _buffer(name: str, array: Array) -> Buffer:
    buffer = Buffer(name, "output" if array.flags.writeable else "input", array.nbytes, array.itemsize)
    buffer.data[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if buffer.written is not None:
        buffer.written[: array.nbytes] = 1
    return buffer
