"""The registers and shared memory of a kernel, and the number of its blocks that fit on a multiprocessor."""

from __future__ import annotations

from lngen.devices import Device, default_device
from lngen.schedule.arch import exists
from lngen.schedule.constants import MODEL, Model
from lngen.schedule.layout import WARP, dynamic_shared, static_shared, vectors_per_thread
from lngen.schedule.legal import BULK, NAMED_BARRIERS
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import STAGED, Schedule

MAX_REGISTERS = 255  # per thread: PTX ISA
PARTITIONS = 4  # of a multiprocessor, each with an equal share of its registers: CUDA C++ Programming Guide

# Weights of two bytes are kept packed in registers where widening them would leave a staged kernel fewer registers than
# it needs: this many besides its elements, 12 more for f64, in nine tenths of the limit if elements are accessed one by
# one or there are column sums.
PACKED_BASE, PACKED_F64, PACKED_LESS = 34, 12, 0.9


def registers(s: Schedule, p: Problem, model: Model = MODEL) -> int:
    """Registers per thread below which the kernel is expected to spill.

    These are the words that stay live from row to row or from phase to phase: column sums, cached [D] inputs, the
    inputs of a row in registers, each in its own width; and fractions of the computed values that a later phase uses
    again, of weights that are loaded late, and of a row in flight.
    """
    elements = vectors_per_thread(s, p) * p.chunk
    real = p.real_size / 4
    inputs = sum(max(size, 4 if p.run == 1 else 0) for size in p.input_sizes) / 4
    weights = sum(p.column_sizes) / 4
    if s.form == "multipass":
        return round(model.base_registers + 2 * p.chunk * len(p.input_sizes) * real)
    held = s.form not in STAGED or s.row_in_registers
    live = p.column_sums * real + inputs * held + weights * s.cached_weights
    reused = (p.live if held else 1) * real + inputs * s.prefetch
    return round(model.base_registers + elements * (model.live_registers * live + model.reused_registers * reused))


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
    widened = sum(4 - size for size in p.column_sizes if size < 4) / 4
    held = sum(max(size, 4 if p.run == 1 else 0) for size in p.input_sizes) / 4 * s.row_in_registers
    words = p.column_sums * p.real_size / 4 + sum(p.column_sizes) / 4 + held
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
    shared = static_shared(s, p) + dynamic_shared(s, p)
    if not exists(s, device.capability) or shared > device.shared_block_kib * 1024:
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
