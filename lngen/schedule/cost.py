"""What a schedule is expected to cost, and how many rows there are as far as that differs.

Normalisation moves bytes and little else, so a schedule is good if it keeps enough bytes on their way (Little's law)
and lets few threads hold many elements: fewer threads fold faster. The numbers are fitted: with them the first
choice comes closest to the fastest of each point that was swept on H200s (generated/bench/h200-sweeps.json). What is
worth a few percent between neighbours, such as whether a fifth or a sixth block fits, only measuring tells:
``lngen tune``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lngen.schedule.legal import MAX_CLUSTER, piece, slots
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import Schedule

MULTIPROCESSORS = 132  # of an H200

# How many rows there are, in bytes of them for each of THREADS threads of every multiprocessor: up to EACH they are
# few, and threads have less to do than they could; up to HALF, long ones up to STAGE, enough of them fit shared memory
# at a time; up to MANY they are many, which is what is expected of rows nobody has counted; then they are endless.
THREADS, LEAST, EACH, SOME, HALF, STAGE, MANY, ENDLESS = 512, 16, 64, 128, 256, 512, 2048, 4096
SHARES = (LEAST, 32, EACH, SOME, HALF, STAGE, MANY)
COLUMN_SHARES = (LEAST, HALF, 1024, MANY)

# What follows are weights of a schedule's shortcomings, each in doublings, and what is best. Threads without elements:
IDLE = 1.3

# Few rows in registers: threads of a block; clusters and blocks and shares of threads of another size than the best,
# weights that are asked for after the row.
FEW_BLOCK, CLUSTER_SIZE, BLOCK_SIZE, EACH_SIZE, LATE = 256, 0.3, 0.05, 0.25, 0.2


class Many(NamedTuple):
    """Of many rows in registers: what is best, and the weights of what is not.

    way     bytes on their way to a multiprocessor; ``few`` and ``much`` weigh less and more of them
    block   threads of a block for rows of 8 KiB; ``growth`` says how that grows with rows, ``even`` how many doublings
            more they are for rows of a power of two bytes, which all begin in the same places of memory
    each    bytes of a thread
    late    the weight of weights that are asked for after the row
    """

    way: float
    few: float
    much: float
    block: float
    growth: float
    even: float
    block_size: float
    each: float
    each_size: float
    late: float


# By bytes of an element. Besides: accesses of less than a line; the least block and the largest; rows, from BULK_ROW
# bytes on, so short that late weights are near enough; clusters, whose start takes long.
MANY_ROWS = {
    2: Many(48_000, 1.65, 0.11, 98, 0.41, 0, 0.245, 63, 0.235, 0.4),
    4: Many(42_000, 1.3, 0.78, 88, 0.5, 0.85, 0.5, 24, 0.45, 0.06),
}
LINE, BROKEN = 128, 0.31
SMALL_BLOCK, MOST_BLOCK, SHORT_BYTES, MANY_CLUSTER = 64, 256, 1024, 1.0

# Staged rows without column sums: bytes that the threads of a multiprocessor work on, bytes of a thread, and elements
# of it at most, threads of a block (other numbers for some rows, for ragged ones and for clusters), and bytes on their
# way: more of a row group that has nobody to work while it waits; two stages are few; from so many bytes on a row is
# worth a bulk copy, or is long.
WORK, WORK_SIZE = 41_500, 1.36
STAGED_EACH, STAGED_ELEMENTS, STAGED_THREADS, STAGED_THREADS_SIZE = 70, 70, 128, 0.27
STAGED_BLOCK, SOME_BLOCK, RAGGED_BLOCK, SHARED_BLOCK, STAGED_BLOCK_SIZE = 331, 122, 512, 207, 0.19
FLIGHT, FLIGHT_SHARED, FLIGHT_SIZE, ALONE, TWO_STAGES = 88_000, 84_000, 2.35, 1.32, 0.85
BULK_ROW, LONG_ROW = 512, 12 * 1024

# A row of more bytes is shared by a cluster, of which each block takes so many; a somewhat shorter one, too, if it has
# many elements or there are some more. Endless rows of so many elements still go to registers.
WIDE_ROW, WIDE_SOME, WIDE_ELEMENTS, PIECE, REGISTER_ELEMENTS = 32 * 1024, 24 * 1024, 12288, 16 * 1024, 16384


class Columns(NamedTuple):
    """Of rows with column sums: what is best.

    held    elements of a row up to which it is held in registers; ``many`` if there are many rows
    early   how many rows there are at least where the next is asked for early, if a thread has few elements
    ahead   bytes on their way; ``most`` stages for them, ``alone`` more for a row group that has nobody to work while
            it waits
    short   elements of a row up to which blocks are larger
    """

    held: int
    many: int
    early: int
    ahead: int
    most: int
    alone: int
    short: int


# By bytes of an element. Rows held in registers: so many elements if they are few; threads of a block for tiny ones;
# elements of a thread up to which the next row is asked for early.
COLUMN_ROWS = {
    2: Columns(768, 255, HALF, 96 * 1024, 3, 1, 1536),
    4: Columns(512, 512, LEAST, 112 * 1024, 4, 0, 768),
    8: Columns(2048, 255, LEAST, 112 * 1024, 4, 0, 768),
}
FEW_ROW, TINY_ROW, TINY_BLOCK, PREFETCHED = 1024, 255, 1024, 16

# Staged ones: threads of a block for short rows and for longer ones; for endless ones between THIN_ROW and SHORT_ROW
# elements; for rows up to ALONE_ROW that a block works on one by one; the weight of another size than the best, to that
# of a stage; elements of a thread at most if rows are endless; bytes of a stage, few of which fill shared memory.
SHORT_BLOCK, LONG_BLOCK, THIN_ROW, SHORT_ROW, ALONE_BLOCK, ALONE_ROW = 512, 256, 512, 1536, 128, 6144
COLUMN_BLOCK_SIZE, ENDLESS_EACH, FULL_STAGE = 1.2, 32, 48 * 1024


def share(p: Problem, rows: int | None) -> int:
    """How many ``rows`` there are (None: many), as the model tells them apart.

    The bytes of all rows for each of THREADS threads of every multiprocessor, as the least of SHARES, with column sums
    of COLUMN_SHARES, that is as many; ENDLESS for more.
    """
    if rows is None:
        return MANY
    there = rows * _row_bytes(p) / (MULTIPROCESSORS * THREADS)
    return next((each for each in _shares(p) if there <= each), ENDLESS)


def row_counts(p: Problem) -> list[int | None]:
    """Numbers of rows, one for each ``share``; None for many."""
    most = (each * MULTIPROCESSORS * THREADS // _row_bytes(p) for each in (*_shares(p), ENDLESS))
    found = {share(p, rows): rows for rows in most if rows > 0}
    return [*(rows for each, rows in found.items() if each != MANY), None]


def _shares(p: Problem) -> tuple[int, ...]:
    return COLUMN_SHARES if p.column_sums else SHARES


def _row_bytes(p: Problem) -> int:
    """Bytes of the inputs of a row; nothing has rows: any schedule will do to be told so."""
    return p.d * (sum(p.input_sizes) or 4)


def cost(s: Schedule, p: Problem, there: int) -> tuple[float, ...]:
    """What ranks a schedule, smaller first; the terms in order of importance. ``there``: the ``share`` of the rows."""
    idle = slots(s, p) * s.threads * s.cluster * p.chunk * (p.segments if s.form == "stream" else 1) / p.d
    if s.form == "stream":
        return (3, abs(s.threads - 512), abs(s.resident - 2))
    return _columns_cost(s, p, idle, there) if p.column_sums else _rows_cost(s, p, idle, there)


def _columns_cost(s: Schedule, p: Problem, idle: float, there: int) -> tuple[float, ...]:
    """One block per multiprocessor, few threads, rows read from shared memory once."""
    size = max(2, min(p.input_sizes, default=4))
    want, few, endless = COLUMN_ROWS[size], there <= LEAST, there > MANY
    held = p.d <= (FEW_ROW if few else want.many if there >= MANY else want.held)
    order = {"bulk": 1, "ragged": 1, "async": 2, "registers": 0 if held else 3}[s.form]
    each = slots(s, p) * p.chunk
    if s.form == "registers":
        prefetch = each <= PREFETCHED and there > want.early
        block = FEW_BLOCK if few else TINY_BLOCK if p.d <= TINY_ROW else SHORT_BLOCK
        layout = round(_off(s.block, block) + _off(idle, 1), 3)
        return (order, s.one_launch, s.resident, s.prefetch != prefetch, layout)
    block = _columns_block(s, p, size, endless)
    shortcomings = abs(s.stages - _columns_stages(s, p, size, there)) + COLUMN_BLOCK_SIZE * (
        _off(s.block, block) + (max(0, each - ENDLESS_EACH) if endless else 0)
    )
    hold = size == 2 or (s.cluster == 1 and (endless or _stage(s, p, p.groups) < FULL_STAGE))
    return (
        order, _off(s.cluster, p.cluster), s.resident, s.one_launch, not s.keep, round(shortcomings, 3),
        s.hold != hold, s.bulk_store, round(idle, 3),
    )  # fmt: skip


def _stage(s: Schedule, p: Problem, rows: int) -> int:
    """Bytes of the inputs of so many pieces of rows."""
    return rows * piece(s, p) * _row_bytes(p) // p.d


def _columns_block(s: Schedule, p: Problem, size: int, endless: bool) -> int:
    """Threads of a block, for staged rows with column sums."""
    if s.rows == 1 and size > 2 and piece(s, p) <= ALONE_ROW:
        much = endless and s.cluster == 1 and piece(s, p) > ENDLESS_EACH * ALONE_BLOCK
        return SHORT_BLOCK if much else ALONE_BLOCK
    least, most = (THIN_ROW, SHORT_ROW) if endless else (0, COLUMN_ROWS[size].short)
    return SHORT_BLOCK if least < p.d <= most else LONG_BLOCK


def _columns_stages(s: Schedule, p: Problem, size: int, there: int) -> int:
    """Stages for rows with column sums: as many bytes on their way as are worth it.

    A row group that has nobody to work while it waits has more of them than it needs, as have the blocks of a cluster,
    which wait for each other, unless there are few rows anyway.
    """
    alone, shared, endless, want = s.rows == 1, s.cluster > 1, there > MANY, COLUMN_ROWS[size]
    stage = _stage(s, p, s.rows)
    ahead = math.ceil(want.ahead / stage)
    if there <= HALF and (shared or size == 2):
        return 3 if alone else min(3, max(2, ahead))
    if endless and stage >= FULL_STAGE and not (alone or shared):
        return 2
    wanted = min(ahead, 3 if s.form == "ragged" else want.most) + want.alone * alone
    more = endless and shared and size == 2 and stage < FULL_STAGE
    return min(4, max(3 if alone or shared else 2, wanted) + more)


def _rows_cost(s: Schedule, p: Problem, idle: float, there: int) -> tuple[float, ...]:
    """Rows that all fit shared memory are asked for at once, and wide ones ahead; others wait in registers."""
    row, few = _row_bytes(p), there <= EACH
    wide = row > WIDE_ROW and not (there > MANY and p.d <= REGISTER_ELEMENTS)
    staged = not few and (wide or (row >= BULK_ROW and there <= (STAGE if row >= LONG_ROW else HALF)))
    order = {"ragged": 0, "bulk": 0 if staged else 1, "registers": 1 if staged else 0, "async": 2}[s.form]
    each = slots(s, p) * p.chunk * row / p.d
    if s.form == "registers":
        shortcomings = _few_cost(s, p, each, there) if few else _many_cost(s, p, each)
        return (order, round(shortcomings + IDLE * _off(idle, 1), 6))
    return (order, *_staged_cost(s, p, each, there))


def _few_cost(s: Schedule, p: Problem, each: float, there: int) -> float:
    """Few rows in registers, ``each`` bytes a thread: one wave of blocks, as many for a row as there is room for."""
    row = _row_bytes(p)
    rows = there * MULTIPROCESSORS * THREADS / row
    cluster = min(MAX_CLUSTER, max(1, _power(MULTIPROCESSORS / rows) // 2))
    block = max(SMALL_BLOCK, min(FEW_BLOCK, row / s.cluster / there))
    return (
        CLUSTER_SIZE * _off(s.cluster, cluster)
        + BLOCK_SIZE * _off(s.block, block)
        + EACH_SIZE * _off(each, max(there, row / s.cluster / block))
        + LATE * (bool(p.column_sizes) and not s.keep)
    )


def _many_cost(s: Schedule, p: Problem, each: float) -> float:
    """Rows in registers, ``each`` bytes a thread: the blocks that come and go keep enough bytes on their way."""
    row = _row_bytes(p)
    short = BULK_ROW <= row <= SHORT_BYTES
    want = MANY_ROWS[min((*p.input_sizes, 4))]
    # Of many blocks, about one of a multiprocessor is done loading at any time, or not yet there.
    way = max(s.resident - 1, 0.25) * s.block * each
    together = s.threads * min(s.vec, p.chunk) * row / p.d  # bytes of neighbouring threads' accesses
    block = want.block * (row / 8192) ** want.growth * 2 ** (want.even * (row == _power(row)))
    block = max(SMALL_BLOCK, min(MOST_BLOCK, block))
    return (
        want.few * max(0.0, math.log2(want.way / way))
        + want.much * max(0.0, math.log2(way / want.way))
        + BROKEN * max(0.0, math.log2(min(LINE, each * s.threads) / together)) ** 2
        + want.block_size * _off(s.block, block)
        + want.each_size * _off(each, want.each)
        + want.late * (bool(p.column_sizes) and not s.keep and not short)
        + MANY_CLUSTER * _off(s.cluster, 1)
    )


def _staged_cost(s: Schedule, p: Problem, each: float, there: int) -> tuple[float, ...]:
    """Rows in shared memory, ``each`` bytes a thread: enough of them on their way, few threads with much to do."""
    row = _row_bytes(p)
    wide = row > WIDE_ROW or (row >= WIDE_SOME and (there > SOME or p.d >= WIDE_ELEMENTS))
    cluster = min(MAX_CLUSTER, _power(row / PIECE)) if wide else 1
    part = row / cluster
    # Few threads have more to do, if they are more than a small block.
    threads = max(
        min(_power(part / min(there, STAGED_EACH)), STAGED_THREADS),
        _power(p.d / cluster / min(there / 2, STAGED_ELEMENTS)),
    )
    flight = (FLIGHT_SHARED if wide else FLIGHT) + ALONE * part * (s.resident * s.rows == 1)
    some = there <= (STAGE if s.form == "ragged" else SOME)
    many = RAGGED_BLOCK if s.form == "ragged" else STAGED_BLOCK
    block = SHARED_BLOCK if wide else SOME_BLOCK if some else many
    shortcomings = (
        WORK_SIZE * _off(s.resident * s.block * each, min(WORK, there * THREADS))
        + STAGED_THREADS_SIZE * _off(s.threads, threads)
        + STAGED_BLOCK_SIZE * _off(s.block, max(threads, block))
        + FLIGHT_SIZE * _off(s.resident * s.rows * s.stages * part, flight)
        + TWO_STAGES * (s.stages == 2)
    )
    return (_off(s.cluster, cluster), not s.keep, not s.hold, s.bulk_store, round(shortcomings, 6), s.resident)


def _off(value: float, wanted: float) -> float:
    """How many times too large or too small, in doublings."""
    return abs(math.log2(value / wanted))


def _power(n: float) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << max(0, math.ceil(math.log2(n)))
