"""The layout of rows under a schedule: elements, numbers and bytes of a thread, a block and a cluster."""

from __future__ import annotations

from lngen.schedule.problem import Problem
from lngen.schedule.schedule import STAGED, Schedule

WARP = 32  # threads

# The kernel that only adds columns: threads of a block, and the fewest of a row group, which has neighbouring vectors.
COLUMN_THREADS, LEAST_COLUMN_THREADS = 128, 4


def segments_held(s: Schedule, p: Problem) -> int:
    """Segments of a row that a block holds at a time: its share of them, or one in form multipass."""
    return 1 if s.form == "multipass" else -(-p.segments // s.cluster)


def vectors_per_thread(s: Schedule, p: Problem) -> int:
    """Thread vectors that a thread holds at a time: of its block's share of a row, or of one segment in multipass."""
    return segments_held(s, p) * -(-p.segment_chunks // s.threads)


def cluster_tile(s: Schedule, p: Problem) -> int:
    """Elements of a row that one block of a cluster works on; the last block may have fewer."""
    return segments_held(s, p) * p.segment


def scratch_numbers(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory for row sums: two buffers, used in turn, of those of the threads of a block."""
    return 2 * p.row_sums * segments_held(s, p) * s.block if s.threads > WARP else 0


def exchanged_values(s: Schedule, p: Problem) -> int:
    """Numbers that the blocks of a cluster exchange for a row."""
    return p.exchanged_sums * p.segments if s.cluster > 1 else 0


def rows_ahead(s: Schedule) -> int:
    """Rows that a row group holds at a time: the current one, in registers or a stage, and those in flight."""
    return s.stages + s.early_release


def partial_values(s: Schedule, p: Problem) -> int:
    """Numbers of shared memory through which column sums are stored: in order, after the tree over row groups."""
    if s.form == "multipass" or not p.column_sums or (s.rows_per_block == 1 and s.form not in STAGED):
        return 0
    # In dynamic memory each sum has its own place, in static memory they take turns.
    together = p.column_sums if s.form in STAGED else 1
    return together * s.rows_per_block * -(-cluster_tile(s, p) // 8) * 8


def rows_of_a_block(p: Problem) -> tuple[int, ...]:
    """The row groups that column sums allow: those of the graph side by side, or one of them for long rows."""
    return (p.groups, 1) if p.cluster > 1 and p.groups > 1 else (p.groups,)


def groups_of_a_block(s: Schedule, p: Problem) -> int:
    """Row groups side by side in a block that adds column sums: with form multipass in the kernel that only does so."""
    return min(rows_of_a_block(p)) if s.form == "multipass" else s.rows_per_block


def column_threads(s: Schedule, p: Problem) -> int:
    """Threads of a row group in the kernel that only adds columns, each with a vector of columns."""
    return max(COLUMN_THREADS // groups_of_a_block(s, p), LEAST_COLUMN_THREADS)


def column_block(s: Schedule, p: Problem) -> int:
    """Threads of a block in the kernel that only adds columns."""
    return column_threads(s, p) * groups_of_a_block(s, p)


def blocks_per_partial(s: Schedule, p: Problem) -> int:
    """Blocks for the row groups that share a block in the graph; for column sums."""
    return p.groups // groups_of_a_block(s, p)


def partial_rows(s: Schedule, p: Problem) -> int:
    """Blocks, or clusters, that share the rows; each stores one row of partial sums per column sum."""
    return p.blocks * blocks_per_partial(s, p)


def stage_bytes(s: Schedule, p: Problem) -> int:
    """Shared memory of one row of one group; each tensor starts at a multiple of 128 bytes."""
    if s.form not in STAGED:
        return 0
    # A result takes the place of an input of its size, as long as there is one.
    free = list(p.input_sizes) if s.form != "tma_unaligned" else []
    extra = []
    for size in p.output_sizes if s.tma_store else ():
        free.remove(size) if size in free else extra.append(size)
    return sum(stage_share(size, s, p) for size in (*p.input_sizes, *extra))


def stage_share(size: int, s: Schedule, p: Problem) -> int:
    """Bytes of a stage for one tensor of elements of ``size`` bytes: whole lines of 128."""
    neighbours = 32 if s.form == "tma_unaligned" else 0  # room for the 16-byte units at both ends of an unaligned row
    return -(-(cluster_tile(s, p) * size + neighbours) // 128) * 128


def static_shared(s: Schedule, p: Problem) -> int:
    """Static shared memory in bytes."""
    numbers = scratch_numbers(s, p) + (p.segment_values * p.segments if s.form == "multipass" else 0)
    exchanged = 2 * s.rows_per_block * exchanged_values(s, p)
    barriers = s.rows_per_block * (s.stages + 2) if s.form in STAGED or exchanged else 0
    # The row number of each stage, and in a cluster the broadcast row, of 8 bytes like a barrier.
    taken = s.rows_per_block * (s.stages + 2 * s.broadcast) if s.dynamic else 0
    if s.form not in STAGED:
        numbers = max(numbers, partial_values(s, p))
    return (numbers + exchanged) * p.real_size + 8 * (barriers + taken)


def dynamic_shared(s: Schedule, p: Problem) -> int:
    """Dynamic shared memory in bytes: the stages, or at the end of the kernel the column sums."""
    if s.form not in STAGED:
        return 0
    return max(s.stages * s.rows_per_block * stage_bytes(s, p), partial_values(s, p) * p.real_size)
