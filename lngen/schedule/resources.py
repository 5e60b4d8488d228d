"""What a kernel needs of a multiprocessor, registers and shared memory, and how many of its blocks fit there."""

from __future__ import annotations

from lngen.schedule.arch import exists
from lngen.schedule.legal import (
    BULK,
    WARP,
    dynamic_shared,
    partial_rows,
    slots,
    static_shared,
)
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import STAGED, Schedule

REGISTERS_PER_SM = 65536
SIDE_BY_SIDE = (132, 66, 30, 15, 7)  # clusters of 1, 2, 4, 8, 16 blocks that an H200 runs at a time
MAX_REGISTERS = 255
# Hardware barriers of a multiprocessor; a block whose row groups have one each takes as many as a block can have. The
# number is not documented: on an H200 of five such blocks four run at a time (Nsight Compute calls it a limit, too).
BARRIERS, BARRIERS_OF_GROUPS = 64, 16

# Shared memory in bytes: of a multiprocessor, and at most of a block, by compute capability.
SHARED = {75: (64, 64), 80: (164, 163), 86: (100, 99), 87: (164, 163), 89: (100, 99), 90: (228, 227), 100: (228, 227)}
SMALL_SHARED = (100, 99)
SHARED_UNIT, SHARED_UNIT_75 = 128, 256  # bytes in which it is given to blocks
# Threads, blocks and barriers that a multiprocessor has room for at most, by compute capability, as in the
# cuda_occupancy.h of the CUDA toolkit, which counts barriers from 90 on.
RESIDENT: dict[int, tuple[int, int, int | None]] = {
    75: (1024, 16, None), 80: (2048, 32, None), 86: (1536, 16, None), 87: (1536, 16, None), 89: (1536, 24, None),
    90: (2048, 32, 64), 100: (2048, 32, 64), 103: (2048, 32, 32),
}  # fmt: skip
SMALL_RESIDENT = (1536, 24, 24)  # of all others
RESERVED = 1  # KiB of a multiprocessor's shared memory that each block costs besides its own
CLOSELY = 16  # one part in so many is little

# Registers besides those for elements, fitted to compile logs; of a staged kernel so many more for f64.
ROW_WORDS, ROW_HALVES = (10, 1.0), (-1, 1.35)  # and for each register of elements: two bytes each are unpacked
COLUMN_BASE = 30
STREAM_BASE = 26
STAGED_BASE, STAGED_F64 = 34, 12
# Of the registers there are the compiler finds room for so much, and for less where elements come one by one or there
# are column sums; with weights that stay packed beside those, for a little more than is expected.
PACKED, PACKED_LESS, SPARE = 1.0, 0.9, 1.06


def registers(s: Schedule, p: Problem) -> int:
    """Registers per thread the kernel is expected to need on sm_90.

    A row kernel holds its inputs, and the [D] inputs it keeps, as they come, and a chunk of them widened. One with
    column sums holds its inputs, once more if the next row is prefetched, and one number per column sum. A staged
    kernel holds its column sums, the [D] inputs it keeps, the inputs it holds as they come, and one chunk of everything
    else.
    """
    elements = slots(s, p) * p.chunk
    sums = p.column_sums * p.real_size / 4
    if s.form == "stream":
        return STREAM_BASE + 2 * p.chunk * len(p.input_sizes)
    if s.form in STAGED:
        kept = sum(p.column_sizes) / 4 if s.keep else 0
        # Halves of words that come one by one have a register each.
        held = sum(max(size, 4 if p.run == 1 else 0) for size in p.input_sizes) / 4 if s.hold else 0
        base = STAGED_BASE + STAGED_F64 * (p.real_size > 4)
        return round(base + elements * (sums + kept + held) + 2 * p.chunk)
    if not p.column_sums:
        held = sum(p.input_sizes) + (sum(p.column_sizes) if s.keep else 0)
        base, each = ROW_HALVES if {*p.input_sizes} == {2} else ROW_WORDS
        return round((base + 2 * p.chunk) * p.real_size / 4 + each * elements * held / 4)
    inputs = sum(p.input_sizes) / 4 * (2 if s.prefetch else 1)
    return round(COLUMN_BASE + elements * (inputs + sums + 1))


def stay_packed(s: Schedule, p: Problem) -> bool:
    """True if the [D] inputs a staged kernel keeps have to stay as narrow as they come.

    The compiler widens what is kept before the rows, if it can, rather than in each of them. Of column sums it matters
    to rows that are held.
    """
    if s.form not in STAGED or not s.keep or (p.column_sums and p.run > 1 and not s.soon):
        return False
    widened = sum(4 - size for size in p.column_sizes if size < 4) / 4
    room = PACKED_LESS if p.run == 1 or p.column_sums else PACKED
    return widened > 0 and registers(s, p) + slots(s, p) * p.chunk * widened > room * _limit(s)


def _limit(s: Schedule) -> int:
    """Registers that a thread can have: the four parts of a multiprocessor have equally many, and one a warp more."""
    return min(REGISTERS_PER_SM // (-(-s.resident * s.block // (4 * WARP)) * 4 * WARP) // 8 * 8, MAX_REGISTERS)


def fits(s: Schedule, p: Problem, capability: int = 90) -> bool:
    """True if its instructions exist there, its blocks fit a multiprocessor, and the model expects no spills."""
    spare = SPARE if s.soon and p.column_sums and stay_packed(s, p) else 1
    return has_room(s, p, capability) and registers(s, p) <= spare * _limit(s)


def has_room(s: Schedule, p: Problem, capability: int) -> bool:
    """True if its instructions exist there, and its blocks fit a multiprocessor's shared memory and barriers."""
    sm, block = _shared_limits(capability)
    shared = (static_shared(s, p) + dynamic_shared(s, p)) / 1024
    barriers = BARRIERS_OF_GROUPS if s.rows > 1 and s.threads > WARP else 1
    there = exists(s, capability) and s.resident * barriers <= BARRIERS
    return there and shared <= block and s.resident * (shared + RESERVED) <= sm


def least_shared(s: Schedule, p: Problem, capability: int = 90) -> int:
    """Dynamic shared memory in bytes that a launch has to ask for at least, 0 if what the kernel uses will do.

    Blocks that stay until all rows are done ask for so much that a multiprocessor takes no more of them than the
    schedule counts on: while the kernel before ends, the first that have room would get the blocks of others.
    """
    if s.form not in STAGED:
        return 0
    each = little_shared_by if p.column_sums else shared_by
    return (each(s.resident, capability) - static_shared(s, p)) // BULK * BULK


def occupancy(block: int, registers: int, shared: int, barriers: int, capability: int) -> int:
    """Blocks of a kernel that a multiprocessor holds at a time, without regard to clusters.

    ``block``: threads; ``registers``: of a thread; ``shared``: bytes of a block, static and dynamic; ``barriers``: of a
    block. Registers are given to warps, 256 at a time, in four partitions; shared memory in SHARED_UNIT
    bytes. Agrees with cuda_occupancy.h.
    """
    threads, blocks, room = RESIDENT.get(capability, SMALL_RESIDENT)
    warps = -(-block // WARP)
    by_registers = 4 * (REGISTERS_PER_SM // 4 // (max(-(-registers // 8), 1) * 8 * WARP)) // warps
    unit, reserved = (SHARED_UNIT, RESERVED * 1024) if capability >= 80 else (SHARED_UNIT_75, 0)
    each = -(-shared // unit) * unit + reserved
    by_shared = _shared_limits(capability)[0] * 1024 // each if each else blocks
    by_barriers = room // max(1, barriers) if room else blocks
    return min(threads // WARP // warps, blocks, by_registers, by_shared, by_barriers)


def shared_by(blocks: int, capability: int) -> int:
    """Bytes of shared memory for a block of which a multiprocessor takes so many, and no more.

    Halfway between what so many, and what one more, would share: static shared memory is not known to the byte.
    """
    return 2 * _shared_limits(capability)[0] * 1024 // (2 * blocks + 1) - RESERVED * 1024


def little_shared_by(blocks: int, capability: int) -> int:
    """The same, but little more than one block more would share.

    For rows with column sums, which the finish follows: endless ones lose by asking for more (h200-tried.txt, 51).
    """
    least = _shared_limits(capability)[0] * 1024 // (blocks + 1)
    return least + least // CLOSELY - RESERVED * 1024


def _shared_limits(capability: int) -> tuple[int, int]:
    """KiB of shared memory of a multiprocessor, and at most of a block."""
    large = capability > 100 and capability < 120
    return SHARED.get(capability, SHARED[90] if large else SMALL_SHARED)


def side_by_side(s: Schedule, p: Problem) -> bool:
    """True if all blocks of a persistent grid run at the same time on an H200, as a grid barrier needs it."""
    return partial_rows(s, p) <= SIDE_BY_SIDE[s.cluster.bit_length() - 1] * s.resident and has_room(s, p, 90)
