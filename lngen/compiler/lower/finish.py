"""The finish of partial column sums: a second kernel, or the end of the first kernel after a grid barrier.

Blocks of a finish go to the first free multiprocessors, as many as fit, while the kernel before it ends. So a launch
requests shared memory that limits a multiprocessor to its share of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lngen.compiler.devices import Device
from lngen.compiler.ir import DType
from lngen.compiler.lower.arguments import workspace
from lngen.compiler.lower.cuda.column_text import ColumnKernel, Finish
from lngen.compiler.lower.cuda.fragments import Statement, Sum
from lngen.compiler.lower.cuda.policies import column_types
from lngen.compiler.lower.plan import Kernel, Plan
from lngen.compiler.problem import Problem, Schedule
from lngen.compiler.problem.footprint import (
    blocks_per_partial,
    groups_of_a_block,
    leading_dimension,
    least_shared,
    partial_rows,
    partial_values,
    row_numbers,
    shared_by,
    unit,
)
from lngen.rules import Extent

COLUMN_ROWS = 4  # that a block of the kernel that only adds columns loads at a time, at least

# Columns that a block of the finish completes at a time. A thread for each column and interleaved sum may be more
# threads than run at once: each thread then has 16 bytes of neighbouring columns.
FINISH_COLUMNS = 32
MANY_THREADS, FINISH_THREADS = 2**17, 128
TOTALS_BYTES = 24 * 2**10  # half of a block's static shared memory; the rest is for the other arrays of a single launch
BATCH_NUMBERS = 16  # numbers that a thread of the finish loads at a time
MANY_ROWS = 2**40


def column_kernel(s: Schedule, p: Problem) -> ColumnKernel:
    """The shape of the kernel that only adds columns."""
    groups = groups_of_a_block(s, p)
    return ColumnKernel(
        groups=groups,
        row_step=groups if p.stretch else partial_rows(s, p) * groups,
        unroll=max(COLUMN_ROWS // groups, 1),
        leading=leading_dimension(p),
        stored_bytes=min(16, s.vec * p.real_size),
        types=column_types(s, p),
    )


def columns_per_thread(s: Schedule, p: Problem) -> int:
    """Columns that a thread of the finish adds side by side: a unit, if rows are whole units."""
    many = p.d * p.interleave >= MANY_THREADS and not s.single_launch
    return unit(p) if many and p.d % unit(p) == 0 else 1


def columns_of_a_tile(s: Schedule, p: Problem) -> int:
    """Columns that a block of the finish completes at a time; fewer where the totals of many sums would not fit."""
    each = columns_per_thread(s, p)
    columns = FINISH_COLUMNS if each == 1 else FINISH_THREADS // p.interleave * each
    while columns > each and p.column_sums * p.interleave * columns * p.real_size > TOTALS_BYTES:
        columns //= 2
    return columns


def finish_of(s: Schedule, p: Problem, sums: tuple[Sum, ...], statements: tuple[Statement, ...]) -> Finish:
    """The plan of the finish: how the partial sums of all blocks are added, and the results of the totals."""
    each = columns_per_thread(s, p)
    rows_per_term = blocks_per_partial(s, p)
    return Finish(
        d=p.d,
        accumulators=sums,
        statements=statements,
        leading=leading_dimension(p),
        partials=partial_rows(s, p),
        rows_per_block=groups_of_a_block(s, p),
        rows_per_term=rows_per_term,
        interleave=p.interleave,
        columns=columns_of_a_tile(s, p),
        columns_per_thread=each,
        batch=max(1, min(-(-p.blocks // p.interleave), BATCH_NUMBERS // (p.column_sums * rows_per_term))),
    )


def set_threads(interleave: int) -> int:
    """Threads of a column that complete the sum of a set: one for each of few partial sums, or for all of them."""
    return interleave // 4 if interleave in (8, 16, 32) else 1


def columns_of_a_set(p: Problem, threads: int) -> int:
    """Neighbouring columns that a thread adds of a set: 8 bytes of them, each with a thread that completes it."""
    each = min(threads, 8 // p.real_size)
    return each if p.d % each == 0 else 1


# Blocks of the finish of sets at most, about twice those that run together. How many sets there are only a call knows.
SET_FINISH_BLOCKS = 1024


def grid_of_sets(p: Problem, columns: int) -> tuple[Extent, Extent]:
    """Blocks by tiles of columns, and by sets, which blocks take in turn."""
    tiles = -(-p.d // columns)
    return Extent(tiles), Extent(per=1, limit=-(-SET_FINISH_BLOCKS // tiles))


def in_single_launch(rows: Kernel, finish: Kernel, p: Problem) -> Kernel:
    """The row kernel with the finish after a grid barrier; the finish uses the shared memory of the rows."""
    assert rows.row is not None
    assert isinstance(finish.finish, Finish)
    named = {a.name for a in rows.arguments}
    grid, tiles = rows.grid[0], finish.grid[0](0)
    # A few rows have few blocks, but the finish has work for one block per tile.
    least = min(grid(MANY_ROWS), -(-tiles // rows.cluster) * rows.cluster)
    staged, numbers = rows.row.staged, finish.finish.shared
    s = rows.row.schedule
    shared = max(partial_values(s, p), row_numbers(s, p), numbers)
    return replace(
        rows,
        # The finish reads results of other blocks, so nothing in the workspace is constant.
        arguments=(
            *(replace(a, const=a.const and a.kind != "workspace") for a in rows.arguments),
            *(a for a in finish.arguments if a.name not in named),
            replace(workspace("arrivals_", DType.F32), ctype="unsigned"),
        ),
        finish=replace(
            finish.finish,
            shares="stages" if staged else "sums",
            scalars=tuple(t for t in finish.inputs.launch if t not in rows.inputs.launch),
            uniform=tuple(u for u in finish.uniform if u.note not in {v.note for v in rows.uniform}),
        ),
        grid=(grid._replace(least=least), rows.grid[1]),
        cooperative=True,
        always=True,
        dynamic=max(rows.dynamic, numbers * p.real_size * staged),
        row=rows.row if staged else replace(rows.row, shared=shared),
    )


# ---- the shared memory that launches request ----


# Fractions of the multiprocessors over which the finish is spread, with one block per row and with clusters, which
# start only where several multiprocessors are free; the others take the first blocks of the next kernel. A large
# finish is spread over all. Both fractions are measured.
OVER, OVER_CLUSTERS = 0.85, 0.485
SET_BLOCKS = 8  # of the finish of sets, whose blocks are as many as there are sets: enough loads in flight


def requested_shared(plan: Plan, registers: Mapping[str, int], device: Device) -> dict[str, int]:
    """Bytes of dynamic shared memory to launch each kernel with, by name and in launch order.

    ``registers``: per thread of each kernel, as compiled for that GPU.
    """
    s, p = plan.schedule, plan.problem
    requested = {k.name: max(k.dynamic, least_shared(s, p, device)) if k.dynamic else 0 for k in plan.kernels}
    # Multipass blocks are not persistent. Persistent blocks of other forms are followed by the finish: where both fit
    # side by side, the finish is spread in any case, and the next call's rows fit beside it.
    follows = s.form != "multipass" and device.pdl
    finish = next((k for k in plan.kernels[1:] if follows and k.role in ("finish", "elementwise")), None)
    if finish and sum(_registers(k, registers) for k in (plan.kernels[0], finish)) > device.registers:
        shared = finish.finish.shared if finish.finish else 0
        blocks = SET_BLOCKS if p.stretch else -(-finish.grid[0](0) // _over(s, p, device))
        share = shared_by(blocks, device)
        requested[finish.name] = max(0, share - shared * p.real_size)
    return requested


def _registers(kernel: Kernel, registers: Mapping[str, int]) -> int:
    """Registers of a kernel's blocks on a multiprocessor; they are allocated eight per thread at a time."""
    return kernel.blocks_per_sm * kernel.block * -(-registers[kernel.name] // 8) * 8


def _over(s: Schedule, p: Problem, device: Device) -> int:
    """The number of multiprocessors over which the finish is spread."""
    if columns_per_thread(s, p) > 1:
        return device.multiprocessors
    return round((OVER if s.cluster == 1 else OVER_CLUSTERS) * device.multiprocessors)
