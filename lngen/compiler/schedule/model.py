"""The expected time of a schedule in microseconds: physics, with a few constants; and the order that follows.

A norm is limited by memory traffic. Its time has an overlapping part, the norm of four times: memory bandwidth, the
latency of rows (Little's law: rows in flight over the time of one), instruction issue, and the start of blocks. The
other part does not overlap: the launch, the first row, and atomic operations that all blocks wait for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from lngen.compiler.devices import Device
from lngen.compiler.problem import STAGED, Problem, Schedule
from lngen.compiler.problem.facts import WARP
from lngen.compiler.problem.footprint import (
    MAX_REGISTERS,
    register_limit,
    registers,
    row_blocks,
    rows_ahead,
    vectors_per_thread,
    widened_registers,
)
from lngen.compiler.problem.schedule import BULK_FORMS
from lngen.compiler.schedule.space import Numbers, Schedules, multipass_space, narrowed, roomy_space
from lngen.compiler.schedule.table import rows_of, workload
from lngen.errors import ScheduleError

SMEM_BYTES_PER_CYCLE = 128  # of a multiprocessor, from shared memory or the L1 cache: CUDA C++ Programming Guide
L2_BYTES_PER_CYCLE = 64  # that a multiprocessor reads from the L2 cache: A100 whitepaper
THREAD_INSTRUCTIONS_PER_CYCLE = 128  # of a multiprocessor: four schedulers, a warp each
SHUFFLE_CYCLES = 30  # of a shuffle and the addition after it: arXiv 1903.07486, table of latencies
CP_ASYNC_INSTRUCTIONS = 2  # per vector that a thread copies: cp.async and its address
PREFETCHED_ROWS = 2  # that a row group holds under ``prefetch``: the one that is computed, and the next one
# Fields for Schedules.each: the registers of a thread depend on BLOCK, the part of a row that it holds on SHARE.
BLOCK = ("threads", "rows_per_block", "blocks_per_sm")
SHARE = ("form", "threads", "cluster")


@dataclass(frozen=True)
class Model:
    """The constants that a device's description does not contain.

    bandwidth         fraction of the memory's bandwidth that mixed reads and writes reach
    blend             exponent of the norm that joins overlapping times (memory bandwidth, latency of rows, instruction
                      issue, start of blocks); larger means more overlap
    launch            ns from the start of a block to its first load: launch, addresses, barrier initialisation
    barrier           ns of a barrier among the threads of a row
    warp              ns for each warp whose sums the threads of a row add after the barrier
    near              ns of a round trip to the L2 cache or to another block's shared memory
    issue             warp instructions per equation and element: the arithmetic, and conversions around it
    dependent         cycles per instruction of a warp that depends on the previous one
    atomic            ns of an atomic operation that all blocks wait for: the first rows of a dynamic scheduler, a grid
                      barrier
    uneven            fraction by which the slowest multiprocessor is later under a static scheduler
    copy              ns that a multiprocessor's TMA unit takes for a bulk copy of any size
    block             ns that the GPU takes to start a block of any size
    start             ns for each warp of a block that takes one row group: the block starts when all of them can
    """

    bandwidth: float = 0.95
    blend: float = 2.16
    launch: float = 285
    barrier: float = 64
    warp: float = 42
    near: float = 419
    issue: float = 0.79
    dependent: float = 1.68
    atomic: float = 1315
    uneven: float = 0.033
    copy: float = 11.9
    block: float = 0.747
    start: float = 2


MODEL = Model()


@dataclass(frozen=True)
class Features:
    """The model's inputs: an array per feature, a number per schedule.

    rows            rows of the launch
    row_bytes       bytes of the inputs of a row
    stored_bytes    bytes of the results of a row
    weight_bytes    bytes of all [D] inputs
    elements        elements of a row that a thread computes
    operations      equations per element
    conversions     instructions per element besides the equations: unpacking of 16-bit weights, copies by cp.async
    threads         threads of a row in one block
    groups          row groups of a block
    cluster         blocks that share a row
    clusters        clusters that run at a time
    grid            clusters that share the rows, if they are persistent
    rows_ahead      rows that a row group holds at a time: the current one and those in flight
    reductions      row reductions, each at the end of a phase
    smem_passes     times that a staged row is read from shared memory
    bulk_copies     bulk copies of a row
    global_width    bytes per cycle of loads and stores that bypass the stages: an access of every thread, within limits
    spill_factor    registers needed over those available; 1 without spills
    staged          1 if rows are copied to shared memory ahead of time
    persistent      1 if a block takes many rows
    prefetch        1 if the next row is loaded to registers while one is computed
    late_weights    1 if the [D] inputs are loaded in every row, where they are used
    tma_store       1 if results leave through shared memory
    extra_barriers  barriers of a row besides those of its reductions
    dynamic         1 if rows are taken from a counter
    atomics         atomic operations, one after the other, that all blocks wait for
    multipass       1 if every phase reads the row from global memory
    """

    rows: Numbers
    row_bytes: Numbers
    stored_bytes: Numbers
    weight_bytes: Numbers
    elements: Numbers
    operations: Numbers
    conversions: Numbers
    threads: Numbers
    groups: Numbers
    cluster: Numbers
    clusters: Numbers
    grid: Numbers
    rows_ahead: Numbers
    reductions: Numbers
    smem_passes: Numbers
    bulk_copies: Numbers
    global_width: Numbers
    spill_factor: Numbers
    staged: Numbers
    persistent: Numbers
    prefetch: Numbers
    late_weights: Numbers
    tma_store: Numbers
    extra_barriers: Numbers
    dynamic: Numbers
    atomics: Numbers
    multipass: Numbers


def features(c: Schedules, p: Problem, rows: int, device: Device) -> Features:
    """The features of schedules for ``rows`` rows on a GPU."""
    same = partial(np.full, len(c), dtype=np.float64)
    inputs, staged, cp_async = len(p.input_sizes), c.has_form(*STAGED), c.has_form("cp_async")
    multipass, threads, prefetch = c.has_form("multipass"), c.field("threads"), c.field("prefetch")
    tma_store, dynamic = c.field("tma_store"), c.field("dynamic")
    late_weights = (1 - c.field("cached_weights")) * bool(p.kept_sizes)
    ahead = c.each(rows_ahead, "stages", "early_release")
    clusters = c.each(lambda s: device.resident_clusters(s.cluster), "cluster") * c.field("blocks_per_sm")
    return Features(
        rows=same(rows),
        row_bytes=same(p.d * sum(p.input_sizes)),
        stored_bytes=same(p.d * sum(p.output_sizes)),
        weight_bytes=same(p.d * sum(p.column_sizes)),
        elements=_elements(c, p) * np.where(multipass, p.segments, 1),
        operations=same(p.operations),
        conversions=_unpacked(c, p, late_weights) + CP_ASYNC_INSTRUCTIONS * inputs / c.field("vec") * cp_async,
        threads=threads,
        groups=c.field("rows_per_block"),
        cluster=c.field("cluster"),
        clusters=clusters,
        grid=c.each(lambda s: row_blocks(s, p), "form", "rows_per_block", "blocks_per_sm", "grid")
        if p.column_sums
        else clusters,
        rows_ahead=np.where(staged, ahead, np.where(prefetch, PREFETCHED_ROWS, 1)),
        reductions=same(p.phases - 1),
        smem_passes=1 + (p.phases - 1) * staged * (1 - c.field("row_in_registers")),
        bulk_copies=(inputs + tma_store) * c.has_form(*BULK_FORMS),
        global_width=np.minimum(SMEM_BYTES_PER_CYCLE, threads * c.field("vec") * p.element),
        spill_factor=_spill_factor(c, p, device),
        staged=staged,
        persistent=same(1) if p.column_sums else staged * (1 - dynamic),
        prefetch=prefetch,
        late_weights=late_weights,
        tma_store=tma_store,
        extra_barriers=tma_store + cp_async,
        dynamic=dynamic,
        atomics=dynamic + c.field("single_launch"),
        multipass=multipass,
    )


def _elements(c: Schedules, p: Problem) -> Numbers:
    """Elements that a thread holds at a time."""
    return c.each(lambda s: vectors_per_thread(s, p) * p.chunk, *SHARE)


def _unpacked(c: Schedules, p: Problem, late_weights: Numbers) -> Numbers:
    """[D] inputs that every row unpacks: those of 16 bits that are loaded late or stay packed in registers."""
    options = ("cached_weights", "row_in_registers", "early_release")
    widened = c.each(lambda s: widened_registers(s, p), *SHARE, *options)
    packed = widened > c.each(register_limit, *BLOCK)
    return sum(size < 4 for size in p.kept_sizes) * np.maximum(late_weights, packed)


def _spill_factor(c: Schedules, p: Problem, device: Device) -> Numbers:
    """Registers needed over those available; 1 without spills."""
    needed = c.each(lambda s: registers(s, p), *SHARE, "prefetch", "cached_weights", "row_in_registers")
    factor: Numbers = np.maximum(1, needed / c.each(lambda s: register_limit(s, device), *BLOCK))
    return factor


@dataclass(frozen=True)
class Terms:
    """The parts of the expected times in microseconds: an array per part, a number per schedule.

    The first four overlap: their norm with the exponent ``Model.blend`` counts. The next four are added to it.

    memory          all bytes at the memory's bandwidth
    waiting         rows after the first one of a row group, at the latency of a row
    issuing         instructions, shared memory and bulk copies of a multiprocessor
    starting        blocks that the GPU starts
    latency         of the memory, for the first row
    first           work of the first row after its arrival
    launch          start of the first block
    atomics         atomic operations that all blocks wait for
    spill_factor    by which spills multiply the whole; 1 without spills
    """

    memory: Numbers
    waiting: Numbers
    issuing: Numbers
    starting: Numbers
    latency: Numbers
    first: Numbers
    launch: Numbers
    atomics: Numbers
    spill_factor: Numbers


TERMS = tuple(f.name for f in fields(Terms) if f.name != "spill_factor")


def estimates(f: Features, device: Device, model: Model = MODEL) -> Numbers:
    """Microseconds of each schedule."""
    t = _nanoseconds(f, device, model)
    powers = [part**model.blend for part in (t.memory, t.waiting, t.issuing, t.starting)]
    overlapped = np.add.reduce(powers) ** (1 / model.blend)
    once = t.latency + t.first + t.launch + t.atomics
    result: Numbers = (overlapped + once) * t.spill_factor / 1e3
    return result


def terms(f: Features, device: Device, model: Model = MODEL) -> Terms:
    """What ``estimates`` joins."""
    t = _nanoseconds(f, device, model)
    parts = {field.name: getattr(t, field.name) / 1e3 for field in fields(t)}
    return Terms(**parts | {"spill_factor": t.spill_factor})


def _nanoseconds(f: Features, device: Device, model: Model) -> Terms:
    """The terms in nanoseconds, the unit of the model's constants."""
    ns_per_cycle = 1e3 / device.clock_mhz
    instructions = f.operations + f.conversions
    latency = device.latency_ns * np.where(f.multipass > 0, f.reductions + 1, 1)
    work = _row_work(f, instructions, ns_per_cycle, model)
    stay = (f.staged > 0) | (f.persistent > 0)
    return Terms(
        memory=_memory(f, device, model),
        waiting=(_rounds(f) - 1) / _row_rate(f, work, latency, model),  # the first round is the latency and ``first``
        issuing=_issuing(f, instructions, ns_per_cycle, device, model),
        starting=np.where(stay, 0, f.rows * f.cluster / f.groups * model.block),
        latency=latency,
        # No other row delays the warps of a block.
        first=work - f.reductions * _barriers(f, model) * (f.cluster == 1),
        launch=model.launch + np.where(stay, 0, model.start * f.threads * f.groups / WARP),
        atomics=f.atomics * model.atomic,
        spill_factor=f.spill_factor,
    )


def _row_work(f: Features, instructions: Numbers, ns_per_cycle: float, model: Model) -> Numbers:
    """Ns of a row in its row group, from its arrival to its store; at least a cycle."""
    reduction = np.log2(np.minimum(f.threads, WARP)) * SHUFFLE_CYCLES * ns_per_cycle
    across_warps = _barriers(f, model) + (f.threads > WARP) * model.warp * f.threads / WARP
    reduction = reduction + across_warps + (f.cluster > 1) * model.near
    work = f.reductions * reduction + f.elements * model.issue * instructions * model.dependent * ns_per_cycle
    total: Numbers = work + f.late_weights * model.near + f.extra_barriers * model.barrier + ns_per_cycle
    return total


def _barriers(f: Features, model: Model) -> Any:
    """Ns of the barriers of a reduction over the threads of a row."""
    return (f.threads > WARP) * model.barrier


def _row_rate(f: Features, work: Numbers, latency: Numbers, model: Model) -> Numbers:
    """Rows per ns that a row group completes.

    A stage, or the registers of a prefetched row, are free when its row is done, and full one latency later. Without
    either, a block or a row starts when the previous one has ended.
    """
    wait = latency + f.dynamic * (f.cluster > 1) * model.near
    gap = np.where(f.persistent > 0, 0, model.launch)
    ahead = np.minimum(1 / work, f.rows_ahead / (wait + work))
    rate: Numbers = np.where((f.staged > 0) | (f.prefetch > 0), ahead, 1 / (gap + latency + work))
    return rate


def _rounds(f: Features) -> Numbers:
    """Rows one after the other: those of a row group, times the waves of blocks where a grid does not run at once."""
    waves = np.ceil(f.grid / np.maximum(f.clusters, 1))
    rounds = f.rows / (f.grid * f.groups)
    found: Numbers = np.where(f.persistent > 0, np.ceil(rounds) * waves, np.maximum(rounds, 1))
    return found


def _memory(f: Features, device: Device, model: Model) -> Numbers:
    """Ns for all bytes at the memory's bandwidth, or at the rate that the active multiprocessors can read."""
    passes = np.where(f.multipass > 0, f.reductions + 1, 1)
    uneven = 1 + model.uneven * ((f.staged > 0) & (f.grid == f.clusters) & (f.dynamic == 0))
    moved = f.rows * (f.row_bytes * passes + f.stored_bytes)
    whole = model.bandwidth * device.bandwidth_gb_s * _covered(f, device)
    readable = _active(f, device) * L2_BYTES_PER_CYCLE * device.clock_mhz / 1e3
    total: Numbers = moved / np.minimum(whole, readable) * uneven
    return total


def _active(f: Features, device: Device) -> Any:
    """Multiprocessors that have rows."""
    return np.minimum(device.multiprocessors, np.ceil(f.rows / f.groups) * f.cluster)


def _covered(f: Features, device: Device) -> Any:
    """The fraction of all multiprocessors that clusters of the given size cover."""
    sizes = 1 << np.arange(len(device.clusters))
    covered = np.minimum(1, np.array(device.clusters) * sizes / device.multiprocessors)
    return covered[np.minimum(np.log2(f.cluster).astype(int), len(sizes) - 1)]


def _issuing(f: Features, instructions: Numbers, ns_per_cycle: float, device: Device, model: Model) -> Numbers:
    """Ns of a multiprocessor's schedulers, its shared memory and L1 cache, and its TMA unit."""
    rows = f.rows / _active(f, device)
    arithmetic = f.elements * f.threads * f.cluster * model.issue * instructions / THREAD_INSTRUCTIONS_PER_CYCLE
    staged = f.row_bytes * f.smem_passes * f.staged + f.stored_bytes * f.tma_store
    shared = (staged + f.late_weights * f.weight_bytes) / SMEM_BYTES_PER_CYCLE
    direct = (f.row_bytes * (1 - f.staged) + f.stored_bytes * (1 - f.tma_store)) / f.global_width
    copies = f.bulk_copies * f.cluster * model.copy
    total: Numbers = rows * ((arithmetic + shared + direct) * ns_per_cycle + copies)
    return total


# ---- the fastest first ----

DIGITS = 3  # of a nanosecond, so that rounding on different processors makes no difference


def estimated(p: Problem, device: Device, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """The schedules in the order of the model alone, the fastest first."""
    return list(fastest_first(p, device, vec, rows))


def last_resort(p: Problem, device: Device, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """For a problem whose candidates all spill: form multipass with all registers that a thread can have.

    The fastest schedule for each number of threads, the fastest of them first. The kernel of the rows has no column
    sums, so the model is asked about such a problem.
    """
    found = _sorted(multipass_space(p, device), replace(p, column_sums=0), device, vec, _count(p, device, rows))
    fastest: dict[int, Schedule] = {}
    for s in found:
        if register_limit(s, device) == MAX_REGISTERS:
            fastest.setdefault(s.threads, s)
    return [*fastest.values()]


def fastest_first(p: Problem, device: Device, vec: int | None, rows: int | None) -> Schedules:
    """As ``estimated``, in columns: a default needs no other schedule than the first."""
    return _sorted(roomy_space(p, device), p, device, vec, _count(p, device, rows))


def _count(p: Problem, device: Device, rows: int | None) -> int:
    """The rows for which all numbers of their workload class are ranked."""
    return max(1, rows_of(p, workload(p, rows, device), device))


def _sorted(roomy: Schedules, p: Problem, device: Device, vec: int | None, count: int) -> Schedules:
    """Schedules for whose blocks the GPU has room, the fastest first, without those of which spills are expected."""
    if vec is not None:
        roomy = narrowed(roomy, p, vec)
    if not len(roomy):
        met = ": what meets of blocks, or heads, fills the shared memory of a block; take shorter rows" * p.blocks_meet
        raise ScheduleError(f"no schedule is legal for D={p.d}{met}.")
    inputs = features(roomy, p, count, device)
    clean = inputs.spill_factor <= 1
    # Where the model expects spills of all of them, the compiler decides.
    places = np.flatnonzero(clean if clean.any() else ~clean)
    times = np.round(estimates(inputs, device)[places], DIGITS)
    return roomy.take(places[np.argsort(times, kind="stable")])
