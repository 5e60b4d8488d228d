"""A launch: its blocks in batches, and the order in which the threads of a batch advance.

Threads with the same next instruction form a group. The group at the lowest instruction runs until it splits, waits or
reaches another group. Threads at a barrier or a shuffle wait until the other threads that it needs arrive. In a loop
that waits, a thread pauses after each round, so that the threads it waits for advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.errors import PtxError
from lngen.proof.ptx import barriers, clusters
from lngen.proof.ptx.async_copies import finish
from lngen.proof.ptx.batch import Batch, Launch, cluster_order
from lngen.proof.ptx.clusters import check_exits
from lngen.proof.ptx.compiler import compile_entry
from lngen.proof.ptx.mbarriers import complete_copies
from lngen.proof.ptx.memory import Allocation, GlobalMemory, size_of
from lngen.proof.ptx.opcodes import WAIT, co_resident, narrowest
from lngen.proof.ptx.outcome import Outcome, Reporter, Stop, Traffic
from lngen.proof.ptx.parser import Entry, Instruction, Module
from lngen.proof.ptx.program import DTYPES, Lanes, Segment, immediate

LANES = 1 << 14  # threads of a batch, about
SHARED = 227 << 10  # bytes of shared memory a block may have, on any arch
RESIDENT = 1 << 18  # threads of a launch whose blocks are all resident at once


def run_blocks(launch: Launch, order: int) -> None:
    """Every block: in batches, or all side by side if they may wait for each other."""
    entry = launch.program.entry
    launch.cluster = launch.cluster or entry.cluster
    blocks, size = cluster_order(launch.grid, launch.cluster)
    static = sum(size_of(s) for s in entry.symbols if s.space == "shared")
    if static + launch.dynamic > SHARED:
        need = f"{static} + {launch.dynamic}" if static else str(launch.dynamic)
        raise PtxError(f"'{launch.kernel}' needs {need} bytes of shared memory; a block has {SHARED} at most.")
    per = max(1, LANES // (launch.block * size)) * size
    launch.order = order
    launch.traffic.open(launch.kernel)
    launch.memory.begin(narrowest(entry, "global"))
    if co_resident(entry):
        if len(blocks) * launch.block > RESIDENT:
            raise PtxError(
                f"'{launch.kernel}' has blocks that may wait for each other, and more than {RESIDENT} threads."
            )
        per = max(1, len(blocks))
    elif order:
        blocks = np.random.default_rng(order).permutation(blocks.reshape(-1, size)).reshape(-1)
    try:
        for start in range(0, len(blocks), per):
            batch = Batch(launch, blocks[start : start + per])
            _run_batch(batch)
            ran = launch.traffic.segments
            ran[launch.kernel] = max(ran[launch.kernel], batch.ran)
        _check_waited_at_end(launch)
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
        buffer = memory.add(Allocation(s.name, kind, size, dtype.itemsize))
        values = [immediate(text, dtype) for text in s.init] + [dtype.type(0)] * (s.count - len(s.init))
        buffer.fill(np.array(values, dtype))
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
    memory, reporter, traffic = GlobalMemory(), Reporter(source, stop, module.headers), Traffic()
    program = compile_entry(entry, tuple(place_globals(memory, module, "workspace").items()))
    values, buffers = _place_arguments(memory, entry, arguments)
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
) -> tuple[dict[str, int], dict[str, tuple[Allocation, Array]]]:
    """The bits of every parameter, and each array with its buffer, by the parameter's number as text."""
    values, buffers = {}, {}
    for n, ((parameter, kind), argument) in enumerate(zip(entry.params, arguments, strict=True)):
        if isinstance(argument, np.ndarray):
            buffers[str(n)] = (memory.add(_buffer(parameter, argument)), argument)
            values[parameter] = buffers[str(n)][0].start
        else:
            values[parameter] = int.from_bytes(DTYPES[kind].type(argument).tobytes(), "little")
    return values, buffers


def _buffer(name: str, array: Array) -> Allocation:
    buffer = Allocation(name, "output" if array.flags.writeable else "input", array.nbytes, array.itemsize)
    buffer.fill(array)
    return buffer


def _run_batch(batch: Batch) -> None:
    """Runs every thread to its end."""
    late = _waves(batch)
    batch.push(0, late.pop())
    while True:
        if batch.groups:
            _run_group(batch, min(batch.groups))
        elif _released(batch) or (batch.yielded and _again(batch, 2 if late else _ROUNDS)):
            continue
        elif late:
            batch.push(0, late.pop())
            batch.touched()
        elif batch.held:
            batch.forced = True
            pc = min(batch.held)
            batch.groups[pc] = batch.held.pop(pc)
            _run_group(batch, pc)
            batch.forced = False
        else:
            finish(batch)
            _report_spins(batch)
            clusters.deadlock(batch)
            if batch.waiting:
                barriers.deadlock(batch)
            check_exits(batch)
            return


def _released(batch: Batch) -> bool:
    if (batch.waiting and barriers.release(batch)) or clusters.release(batch):
        batch.touched()
        return True
    return False


def _run_group(batch: Batch, pc: int) -> None:
    """Run the group at ``pc`` until it splits, waits, ends or is no longer the lowest."""
    segments, counts = batch.program.segments, batch.launch.counts
    lanes = batch.groups.pop(pc)
    while True:
        segment = segments[pc]
        counts[pc] = counts.get(pc, 0) + lanes.warps
        batch.ran += 1
        if batch.ran > batch.launch.most:
            code = batch.program.entry.instructions
            text = f"The kernel does not end: {batch.launch.most} segments of straight code have run."
            batch.report("deadlock", text, code[min(pc, len(code) - 1)], lanes.index)
            raise Stop
        for step in segment.steps:
            step(batch, lanes)
        after: int | None = segment.end
        if segment.control is not None:
            after = _jump(batch, segment, segment.control, lanes)
        if after is None:
            return
        if after in batch.held or (batch.groups and min(batch.groups) <= after):
            batch.push(after, lanes)
            return
        pc = after


def _jump(batch: Batch, segment: Segment, i: Instruction, lanes: Lanes) -> int | None:
    """The instruction that ends a segment; the pc at which all of ``lanes`` continue, None if they part."""
    pc, taken = segment.end, batch.obeys(i, lanes)
    if not taken.count:
        return pc + 1
    if segment.jump is not None:
        segment.jump(batch, pc, taken)
    elif pc in batch.spins:
        batch.yielded[pc] = taken.union(batch.yielded[pc]) if pc in batch.yielded else taken  # until no other can go on
    else:
        target: int = batch.program.entry.labels[i.operands[0].text]
        if taken is lanes:
            return target
        batch.push(target, taken)
    if taken is not lanes:
        batch.push(pc + 1, lanes.without(taken))
    return None


_ROUNDS = 256  # without a change, after which spinning threads count as deadlocked


def _waves(batch: Batch) -> list[Lanes]:
    """The threads that start together, last first: the next start when the others can only wait.

    Of blocks that may wait for each other the last starts late; with a seed, random ones start in three waves.
    """
    if batch.order is None or batch.slots < 2 or (batch.order.cluster_only and batch.clusters is None):
        return [batch.alive]
    wave = np.arange(batch.slots) == batch.slots - 1
    if batch.launch.order:
        wave = np.random.default_rng(batch.launch.order).integers(0, 3, batch.slots)
    found = [batch.alive.narrow(wave[batch.slot_of] == n) for n in np.unique(wave)]
    return found[::-1]


def _again(batch: Batch, most: int) -> bool:
    """Another round for the paused threads; False after ``most`` rounds without a change."""
    if batch.progress != batch.last:
        batch.last, batch.rounds = batch.progress, 0
    elif complete_copies(batch):
        batch.rounds = 0
    batch.rounds += 1
    if batch.rounds > most:
        return False
    resting, batch.yielded = batch.yielded, {}
    for pc, lanes in resting.items():
        batch.push(batch.spins[pc], lanes)
    return True


def _report_spins(batch: Batch) -> None:
    """Findings about loops that never end."""
    for pc, lanes in batch.yielded.items():
        i = batch.program.entry.instructions[pc]
        batch.report("deadlock", "A thread waits for ever in a loop for a value that no thread writes.", i, lanes.index)


def _check_waited_at_end(launch: Launch) -> None:
    """A finding for a kernel that may run beside the previous one and has ended without a wait."""
    if launch.programmatic and not launch.waited:
        text = "The kernel may start before the previous one ends, and none of its threads executes " + WAIT + "."
        launch.reporter.add("early-access", text, launch.kernel)
