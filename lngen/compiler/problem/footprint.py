"""What a kernel takes under a schedule: its layout of rows over threads, its registers and its shared memory."""

from __future__ import annotations

from lngen.compiler.devices import Device, default_device
from lngen.compiler.problem.facts import MAX_STATIC, WARP, Problem
from lngen.compiler.problem.schedule import STAGED, Schedule, exists

# The kernel that only adds columns: threads of a block, and the fewest of a row group, which has neighbouring vectors.
COLUMN_THREADS, LEAST_COLUMN_THREADS = 128, 4

MAX_REGISTERS = 255  # per thread: PTX ISA
MAX_SHARED = 227 * 1024  # bytes of shared memory of a block that any GPU has
BULK = 16  # bytes: addresses and sizes of bulk copies are multiples of it
NAMED_BARRIERS = 15  # per block, without the barrier of all its threads

# Fitted to the registers and spills of compile logs. Registers: addresses, counters and scalars of any kernel; per word
# that stays live from row to row, since some words are copied before use; per word that a later phase uses again, of
# which the compiler keeps some and recomputes others.
BASE_REGISTERS, LIVE_REGISTERS, REUSED_REGISTERS = 23, 1.2, 0.52

PARTITIONS = 4  # of a multiprocessor, each with an equal share of its registers: CUDA C++ Programming Guide

# Weights of two bytes are kept packed in registers where widening them would leave a staged kernel fewer registers than
# it needs: this many besides its elements, 12 more for f64, in nine tenths of the limit if elements are accessed one by
# one or there are column sums.
PACKED_BASE, PACKED_F64, PACKED_LESS = 34, 12, 0.9


def segments_held(s: Schedule, p: Problem) -> int:
    """Segments of a row that a block holds at a time: its share of them, or one in form multipass."""
    return 1 if s.form == "multipass" else -(-p.segments // s.cluster)


def vector_chunks(s: Schedule, p: Problem) -> int:
    """Chunks of a thread vector: one, or one of each half of a head, so that half as many threads fold a head."""
    return 2 if p.halved and s.form in ("registers", "tma", "cp_async") else 1


def are_alike(s: Schedule, p: Problem, period: int) -> bool:
    """True if all vectors of a thread have the same columns of those that repeat along a row, such as a head's.

    ``load_row`` of vector.cuh has the same rule; it then keeps one vector in registers.
    """
    return s.threads * p.chunk * vector_chunks(s, p) % period == 0 and p.segment % period == 0


def vectors_per_thread(s: Schedule, p: Problem) -> int:
    """Chunks that a thread holds at a time: of its block's share of a row, or of one segment in multipass."""
    return segments_held(s, p) * _chunks_of_a_segment(s, p)


def _chunks_of_a_segment(s: Schedule, p: Problem) -> int:
    """Chunks that a thread has of a segment, at most: those of whole vectors."""
    together = vector_chunks(s, p)
    return -(-p.segment_chunks // (s.threads * together)) * together


def cluster_tile(s: Schedule, p: Problem) -> int:
    """Elements of a row that one block of a cluster works on; the last block may have fewer."""
    return segments_held(s, p) * p.segment


def scratch_numbers(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory for row sums: two buffers, used in turn, of those of the threads of a block."""
    return 2 * p.row_sums * segments_held(s, p) * s.block if s.threads > WARP else 0


def met_numbers(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory for those of vectors that meet."""
    return s.rows_per_block * p.block_numbers // s.cluster


def row_numbers(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory that the threads of rows share, without those that a cluster exchanges."""
    return scratch_numbers(s, p) + met_numbers(s, p)


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
    # In dynamic memory each sum has its own place, in static memory, and beside stages that fill, they take turns.
    together = p.column_sums if s.form in STAGED and not p.stretch else 1
    return together * s.rows_per_block * -(-cluster_tile(s, p) // 8) * 8


def rows_of_a_block(p: Problem) -> tuple[int, ...]:
    """The row groups that column sums allow: those of the graph side by side, or one of them for long rows.

    A stretch has all of them.
    """
    return (p.groups, 1) if p.cluster > 1 and p.groups > 1 and not p.stretch else (p.groups,)


def whole_groups(s: Schedule, p: Problem) -> bool:
    """True unless a cluster adds column sums without all row groups of the graph side by side."""
    return s.cluster == 1 or not p.column_sums or s.rows_per_block == p.groups


def unit(p: Problem) -> int:
    """Column sums in 16 bytes, if vectors are whole units."""
    count = 16 // p.real_size
    return count if p.chunk % count == 0 else 1


def leading_dimension(p: Problem) -> int:
    """The leading dimension of partial sums, in numbers: whole units."""
    return -(-p.d // unit(p)) * unit(p)


def is_exact(s: Schedule, p: Problem) -> bool:
    """True if the vectors of all threads cover a row exactly."""
    return p.segments * _chunks_of_a_segment(s, p) * s.threads * p.chunk == p.d


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


def row_blocks(s: Schedule, p: Problem) -> int:
    """Blocks, or clusters, of a persistent grid that adds column sums; those of sets take any number of stretches."""
    return (s.grid or p.blocks * s.blocks_per_sm) if p.stretch else partial_rows(s, p)


def has_grid(s: Schedule, p: Problem) -> bool:
    """True if the number of blocks of a persistent grid is free: the graph's order of sums does not fix it."""
    return s.form != "multipass" and p.stretch is not None if p.column_sums else s.form in STAGED


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
    numbers = row_numbers(s, p) + (p.segment_values * p.segments if s.form == "multipass" else 0)
    exchanged = 2 * s.rows_per_block * exchanged_values(s, p)
    barriers = s.rows_per_block * (s.stages + 2) if s.form in STAGED or exchanged else 0
    # The row number of each stage, and in a cluster the broadcast row, of 8 bytes like a barrier.
    taken = s.rows_per_block * (s.stages + 2 * s.broadcast) if s.dynamic else 0
    if s.form not in STAGED:
        numbers = max(numbers, partial_values(s, p))
    return (numbers + exchanged) * p.real_size + 8 * (barriers + taken)


def dynamic_shared(s: Schedule, p: Problem) -> int:
    """Dynamic shared memory in bytes: that of stages, and behind it the elements of rotated heads that meet."""
    return ring_shared(s, p) + turned_shared(s, p)


def turned_shared(s: Schedule, p: Problem) -> int:
    """Bytes of the elements of rotated heads that meet in a block."""
    return sum(met_bytes(size, s, p) for size in p.turned_sizes)


def met_bytes(size: int, s: Schedule, p: Problem) -> int:
    """Those of one rotation, of elements of ``size`` bytes."""
    return s.rows_per_block * p.met_elements // s.cluster * size


def ring_shared(s: Schedule, p: Problem) -> int:
    """Bytes of the stages, or at the end of the kernel of the column sums; of stretches both."""
    if s.form not in STAGED:
        return 0
    stages, sums = s.stages * s.rows_per_block * stage_bytes(s, p), partial_values(s, p) * p.real_size
    return stages + sums if p.stretch else max(stages, sums)


def registers(s: Schedule, p: Problem) -> int:
    """Registers per thread below which the kernel is expected to spill.

    The count has the words that stay live from row to row or from phase to phase: column sums, cached [D] inputs, and
    the inputs of a row in registers, each in its own width. It adds a fitted fraction of the values that a later phase
    uses again, of weights that are loaded where they are used, and of a row in flight.
    """
    elements = vectors_per_thread(s, p) * p.chunk
    real = p.real_size / 4
    inputs = sum(max(size, 4 if p.run == 1 else 0) for size in p.input_sizes) / 4
    weights = sum(p.kept_sizes) / 4
    if s.form == "multipass":
        return round(BASE_REGISTERS + 2 * p.chunk * len(p.input_sizes) * real)
    held = s.form not in STAGED or s.row_in_registers
    live = p.column_sums * real + inputs * held + weights * s.cached_weights
    reused = (p.live if held else 1) * real + inputs * s.prefetch
    return round(BASE_REGISTERS + elements * (LIVE_REGISTERS * live + REUSED_REGISTERS * reused))


def stay_packed(s: Schedule, p: Problem) -> bool:
    """True if the [D] inputs that a staged kernel caches have to keep their 16-bit width in registers."""
    return widened_registers(s, p) > register_limit(s)


def widened_registers(s: Schedule, p: Problem) -> float:
    """Registers per thread that a staged kernel needs if it widens the 16-bit [D] inputs that it caches, else 0.

    The compiler widens cached values before the row loop if it can, and not in each row. With column sums this matters
    only to rows in registers.
    """
    if s.form not in STAGED or not s.cached_weights or (p.column_sums and p.run > 1 and not s.early_release):
        return 0
    widened = sum(4 - size for size in p.kept_sizes if size < 4) / 4
    held = sum(max(size, 4 if p.run == 1 else 0) for size in p.input_sizes) / 4 * s.row_in_registers
    words = p.column_sums * p.real_size / 4 + sum(p.kept_sizes) / 4 + held
    own = PACKED_BASE + PACKED_F64 * (p.real_size > 4) + 2 * p.chunk
    room = PACKED_LESS if p.run == 1 or p.column_sums else 1
    return (own + vectors_per_thread(s, p) * p.chunk * (words + widened)) / room if widened else 0


def register_limit(s: Schedule, device: Device | None = None) -> int:
    """Registers available to a thread: every partition holds equally many warps, plus one for the remainder."""
    per_sm = (device or default_device()).registers
    group = PARTITIONS * WARP
    return min(per_sm // (-(-s.blocks_per_sm * s.block // group) * group) // 8 * 8, MAX_REGISTERS)


def fits(s: Schedule, p: Problem, device: Device | None = None) -> bool:
    """True if the GPU has the instructions and room for the blocks, and no spills are expected."""
    device = device or default_device()
    return has_room(s, p, device) and registers(s, p) <= register_limit(s, device)


def has_room(s: Schedule, p: Problem, device: Device) -> bool:
    """True if the GPU has the instructions, and its multiprocessors the threads, memory and barriers for the blocks."""
    return s.blocks_per_sm <= most_blocks(s, p, device)


def most_blocks(s: Schedule, p: Problem, device: Device) -> int:
    """Blocks for which a multiprocessor has the threads, memory and barriers, whatever ``blocks_per_sm`` is.

    0 if the GPU lacks the instructions or one block is too large.
    """
    static = static_shared(s, p)
    shared = static + dynamic_shared(s, p)
    if not exists(s, device.capability) or static > MAX_STATIC:
        return 0
    if shared > min(device.shared_block_kib * 1024, MAX_SHARED):
        return 0
    if s.cluster > device.largest_cluster:  # of the weakest GPU that runs an arch's kernels it is not the arch's
        return 0
    # A block whose row groups each have a named barrier uses all barriers of a block. The number on a multiprocessor is
    # not documented: of five such blocks four run at a time on an H200.
    barriers = NAMED_BARRIERS + 1 if s.rows_per_block > 1 and s.threads > WARP else 1
    by_barriers = device.barriers // barriers if device.barriers else device.blocks
    each = shared + device.shared_reserved_kib * 1024
    by_shared = device.shared_kib * 1024 // each if each else device.blocks
    return min(device.threads // s.block, device.blocks, by_barriers, by_shared)


def least_shared(s: Schedule, p: Problem, device: Device | None = None) -> int:
    """Dynamic shared memory in bytes that a launch has to request at least, 0 if the kernel's own use suffices.

    Persistent blocks request so much that a multiprocessor holds no more of them than the schedule intends: while the
    previous kernel ends, the first free multiprocessors would otherwise take the blocks of others.
    """
    if s.form not in STAGED:
        return 0
    each = _barely_shared_by if p.column_sums else shared_by
    return (each(s.blocks_per_sm, device or default_device()) - static_shared(s, p)) // BULK * BULK


def shared_by(blocks: int, device: Device) -> int:
    """Bytes of shared memory per block of which a multiprocessor holds exactly that many blocks.

    The size is halfway between the shares of that many blocks and of one more, since static shared memory is not exact.
    """
    return 2 * device.shared_kib * 1024 // (2 * blocks + 1) - device.shared_reserved_kib * 1024


def _barely_shared_by(blocks: int, device: Device) -> int:
    """As ``shared_by``, but only a sixteenth above the share of one more block.

    For rows with column sums, which the finish follows: more would delay the finish of long runs (h200-tried.txt, 51).
    """
    least = device.shared_kib * 1024 // (blocks + 1)
    return least + least // 16 - device.shared_reserved_kib * 1024


def occupancy(block: int, registers: int, shared: int, barriers: int, device: Device) -> int:
    """Blocks of a kernel that a multiprocessor holds at a time, without regard to clusters.

    ``block``: threads; ``registers``: per thread; ``shared``: bytes per block, static and dynamic; ``barriers``: per
    block. Registers are allocated to warps in units of 256, in four partitions. Agrees with cuda_occupancy.h.
    """
    warps = -(-block // WARP)
    per_warp = max(-(-registers // 8), 1) * 8 * WARP
    by_registers = PARTITIONS * (device.registers // PARTITIONS // per_warp) // warps
    each = -(-shared // device.shared_unit) * device.shared_unit + device.shared_reserved_kib * 1024
    by_shared = device.shared_kib * 1024 // each if each else device.blocks
    by_barriers = device.barriers // max(1, barriers) if device.barriers else device.blocks
    return min(device.threads // WARP // warps, device.blocks, by_registers, by_shared, by_barriers)
