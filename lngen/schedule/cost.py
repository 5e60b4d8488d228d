"""What a schedule is expected to cost.

Normalisation moves bytes and little else, so a schedule is good if it keeps enough bytes on their way (Little's law)
and lets few threads hold many elements: fewer threads fold faster. The numbers are fitted: with them the first
choice comes closest to the fastest of each point that was swept on H200s (generated/bench/h200-sweeps.json). What is
worth a few percent between neighbours, such as whether a fifth or a sixth block fits, only measuring tells:
``lngen tune``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lngen.schedule.cost_clusters import ROOMY_ROW, WIDE_ELEMENTS, WIDE_ROW, clusters_cost, is_for_pairs, wanted_cluster
from lngen.schedule.cost_columns import FEW_BLOCK, columns_cost
from lngen.schedule.legal import MAX_CLUSTER, rows_ahead, slots
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import Schedule
from lngen.schedule.shares import EACH, HALF, MANY, MULTIPROCESSORS, SOME, STAGE, THREADS, off, power, row_bytes

# What follows are weights of a schedule's shortcomings, each in doublings, and what is best. Threads without elements:
IDLE = 1.3

# Few rows in registers, in blocks of FEW_BLOCK threads at most: clusters and blocks and shares of threads of another
# size than the best, weights that are asked for after the row.
CLUSTER_SIZE, BLOCK_SIZE, EACH_SIZE, LATE = 0.3, 0.05, 0.25, 0.2


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
# bytes on, so short that late weights are near enough, or, where rows are many, that a warp has several, and weights
# at once; clusters, whose start takes long.
MANY_ROWS = {
    2: Many(48_000, 1.65, 0.11, 98, 0.41, 0, 0.245, 63, 0.235, 0.4),
    4: Many(42_000, 1.3, 0.78, 88, 0.5, 0.85, 0.5, 24, 0.45, 0.06),
}
LINE, BROKEN = 128, 0.31
SMALL_BLOCK, MOST_BLOCK, SHORT_BYTES, MANY_CLUSTER = 64, 256, 1024, 1.0
WARP_ELEMENTS, WARP_BLOCK, WARP_EACH = 512, 32, 128  # of such a warp: elements of a row, threads, bytes of a thread

# Staged rows without column sums that no cluster shares: bytes that the threads of a multiprocessor work on, bytes of a
# thread, and elements of it at most, threads of a block (other numbers for some rows and for ragged ones), and bytes on
# their way: more of a row group that has nobody to work while it waits; two stages are few; from so many bytes on a row
# is worth a bulk copy, or is long.
WORK, WORK_SIZE = 41_500, 1.36
STAGED_EACH, STAGED_ELEMENTS, STAGED_THREADS, STAGED_THREADS_SIZE, RAGGED_THREADS_SIZE = 70, 70, 128, 0.27, 0.9
STAGED_BLOCK, SOME_BLOCK, RAGGED_BLOCK, STAGED_BLOCK_SIZE = 331, 122, 512, 0.19
FLIGHT, FLIGHT_SIZE, ALONE, TWO_STAGES = 88_000, 2.35, 1.32, 0.85
BULK_ROW, LONG_ROW = 512, 12 * 1024

# Staged rows that are claimed: of how many bytes they are (the longest are ragged, which no cluster shares, and those
# of more elements endless); endless ones of more than how many elements, but those of so many bytes, of which blocks
# that come and go do as well; bytes that the threads of a multiprocessor work on, at least two rows, but of the
# longest one; threads of a row, and of the longest; stages, and for rows from how many bytes on they follow from the
# bytes on their way, and lie between which; elements of a thread at most, if somebody works while it waits; and the
# weights of more row groups a block, of another number of stages, and of too many bytes on their way.
CLAIMED_ROW, CLAIMED_MOST, MOST_ELEMENTS, ENDLESS_ELEMENTS = 7680, 64 * 1024, 16384, 4096
ENDLESS_FROM, ENDLESS_TO = 16 * 1024, 28 * 1024
CLAIMED_WORK, CLAIMED_THREADS, CLAIMED_BLOCK, CLAIMED_STAGES = 37_000, 128, 256, 3
CLAIMED_DEEP, CLAIMED_WAY, DEEP_STAGES = 16 * 1024, 128 * 1024, (2, 4)
CLAIMED_ELEMENTS, CLAIMED_FLIGHT, CLAIMED_GROUP, CLAIMED_STAGE, CLAIMED_FULL = 112, 200 * 1024, 0.1, 0.3, 4.0


def cost(s: Schedule, p: Problem, there: int) -> tuple[float, ...]:
    """What ranks a schedule, smaller first; the terms in order of importance. ``there``: the ``share`` of the rows."""
    idle = slots(s, p) * s.threads * s.cluster * p.chunk * (p.segments if s.form == "stream" else 1) / p.d
    if s.form == "stream":
        return (3, abs(s.threads - 512), abs(s.resident - 2))
    return columns_cost(s, p, idle, there) if p.column_sums else _rows_cost(s, p, idle, there)


def _rows_cost(s: Schedule, p: Problem, idle: float, there: int) -> tuple[float, ...]:
    """Rows that all fit shared memory are asked for at once, and wide ones ahead; others wait in registers."""
    row, few = row_bytes(p), there <= EACH
    if s.claim and s.cluster == 1:
        # There is somebody to work while a row group waits, if rows are not long; nobody waits for weights.
        busy = _is_alone(s, p, row) or (s.resident * s.rows > 1 and slots(s, p) * p.chunk <= CLAIMED_ELEMENTS)
        busy = busy and (s.keep or not p.column_sizes)
        return (-1 if busy and _worth_claiming(s, p, row, there) else 4, *_claimed_cost(s, p, row))
    staged = not few and (
        row > WIDE_ROW or is_for_pairs(p, there) or (row >= BULK_ROW and there <= (STAGE if row >= LONG_ROW else HALF))
    )
    order = {"ragged": 0, "bulk": 0 if staged else 1, "registers": 1 if staged else 0, "async": 2}[s.form]
    each = slots(s, p) * p.chunk * row / p.d
    if s.form == "registers":
        shortcomings = _few_cost(s, p, each, there) if few else _many_cost(s, p, each, there)
        return (order, round(shortcomings + IDLE * off(idle, 1), 6))
    return (order, *_staged_cost(s, p, each, there))


def _worth_claiming(s: Schedule, p: Problem, row: int, there: int) -> bool:
    """True if blocks claim rows of so many bytes rather than share them out: long ones of which there are many rounds.

    Of endless rows in registers, blocks come and go in as good an order; only of long ones is the wait for them longer.
    """
    if is_for_pairs(p, there):
        return False
    if there > MANY and s.form == "bulk" and (p.d <= ENDLESS_ELEMENTS or ENDLESS_FROM < row < ENDLESS_TO):
        return False
    least = MANY if p.d > MOST_ELEMENTS else STAGE if p.d >= WIDE_ELEMENTS else HALF
    return there > least and CLAIMED_ROW <= row <= (WIDE_ROW if s.form == "bulk" else CLAIMED_MOST)


def _is_alone(s: Schedule, p: Problem, row: int) -> bool:
    """True if a claimed row of so many bytes is enough for a multiprocessor, or all that its registers hold."""
    return row >= WIDE_ROW or (s.form == "bulk" and p.d > WIDE_ELEMENTS and row > ROOMY_ROW)


def _claimed_cost(s: Schedule, p: Problem, row: int) -> tuple[float, ...]:
    """Rows of so many bytes in shared memory that are claimed: two or more at a time, or one if they are long."""
    work, long = s.resident * s.rows * row, _is_alone(s, p, row)
    most_elements = CLAIMED_ELEMENTS if p.d > WIDE_ELEMENTS else STAGED_ELEMENTS
    threads = CLAIMED_BLOCK if long else max(CLAIMED_THREADS, power(p.d / most_elements))
    least, most = DEEP_STAGES
    alone = s.resident * s.rows == 1
    deep = s.form == "bulk" and row >= CLAIMED_DEEP and (long or p.d <= WIDE_ELEMENTS)
    stages = max(least + alone, min(most, round(CLAIMED_WAY / work))) if deep else CLAIMED_STAGES
    shortcomings = (
        WORK_SIZE * off(work, row if long else max(CLAIMED_WORK, 2 * row))
        + STAGED_THREADS_SIZE * off(s.threads, threads)
        + CLAIMED_GROUP * (s.rows - 1)
        + CLAIMED_STAGE * abs(rows_ahead(s) - stages)
        + CLAIMED_FULL * max(0.0, math.log2(rows_ahead(s) * work / CLAIMED_FLIGHT))
    )
    return (not s.keep, s.form == "bulk" and s.bulk_store, round(shortcomings, 6), not s.hold, not s.soon)


def _few_cost(s: Schedule, p: Problem, each: float, there: int) -> float:
    """Few rows in registers, ``each`` bytes a thread: one wave of blocks, as many for a row as there is room for."""
    row = row_bytes(p)
    rows = there * MULTIPROCESSORS * THREADS / row
    cluster = min(MAX_CLUSTER, max(1, power(MULTIPROCESSORS / rows) // 2))
    block = max(SMALL_BLOCK, min(FEW_BLOCK, row / s.cluster / there))
    return (
        CLUSTER_SIZE * off(s.cluster, cluster)
        + BLOCK_SIZE * off(s.block, block)
        + EACH_SIZE * off(each, max(there, row / s.cluster / block))
        + LATE * (bool(p.column_sizes) and not s.keep)
    )


def _many_cost(s: Schedule, p: Problem, each: float, there: int) -> float:
    """Rows in registers, ``each`` bytes a thread: the blocks that come and go keep enough bytes on their way."""
    row = row_bytes(p)
    short = BULK_ROW <= row <= SHORT_BYTES
    want = MANY_ROWS[min(p.element, 4)]
    # Of many blocks, about one of a multiprocessor is done loading at any time, or not yet there.
    way = max(s.resident - 1, 0.25) * s.block * each
    together = s.threads * min(s.vec, p.chunk) * row / p.d  # bytes of neighbouring threads' accesses
    block = want.block * (row / 8192) ** want.growth * 2 ** (want.even * (row == power(row)))
    block = max(SMALL_BLOCK, min(MOST_BLOCK, block))
    best = want.each
    if there >= MANY and row >= BULK_ROW and p.d <= WARP_ELEMENTS:
        block, best, short = WARP_BLOCK, WARP_EACH, False
    return (
        want.few * max(0.0, math.log2(want.way / way))
        + want.much * max(0.0, math.log2(way / want.way))
        + BROKEN * max(0.0, math.log2(min(LINE, each * s.threads) / together)) ** 2
        + want.block_size * off(s.block, block)
        + want.each_size * off(each, best)
        + want.late * (bool(p.column_sizes) and not s.keep and not short)
        + MANY_CLUSTER * off(s.cluster, 1)
    )


def _staged_cost(s: Schedule, p: Problem, each: float, there: int) -> tuple[float, ...]:
    """Rows in shared memory, ``each`` bytes a thread: enough of them on their way, few threads with much to do."""
    cluster = wanted_cluster(p, there)
    if s.cluster > 1:
        return (off(s.cluster, cluster), *clusters_cost(s, p, there))
    row, ragged = row_bytes(p), s.form == "ragged"
    # Few threads have more to do, if they are more than a small block.
    threads = max(
        min(power(row / min(there, STAGED_EACH)), STAGED_THREADS), power(p.d / min(there / 2, STAGED_ELEMENTS))
    )
    block = RAGGED_BLOCK if ragged else SOME_BLOCK if there <= SOME else STAGED_BLOCK
    flight = FLIGHT + ALONE * row * (s.resident * s.rows == 1)
    shortcomings = (
        WORK_SIZE * off(s.resident * s.block * each, min(WORK, there * THREADS))
        + (RAGGED_THREADS_SIZE if ragged else STAGED_THREADS_SIZE) * off(s.threads, threads)
        + STAGED_BLOCK_SIZE * off(s.block, max(threads, block))
        + FLIGHT_SIZE * off(s.resident * s.rows * rows_ahead(s) * row, flight)
        + TWO_STAGES * (rows_ahead(s) == 2)
    )
    return (
        off(1, cluster), not s.keep, not s.hold, s.bulk_store, round(shortcomings, 6), s.resident, not s.soon
    )  # fmt: skip
