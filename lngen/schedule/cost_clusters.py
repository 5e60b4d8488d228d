"""What rows without column sums are expected to cost in clusters: several blocks have a piece of a row each.

As in ``cost``, the numbers are fitted to the points that were swept on H200s (generated/bench/h200-sweeps.json).
"""

from __future__ import annotations

from lngen.schedule.legal import MAX_CLUSTER, rows_ahead
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import Schedule
from lngen.schedule.shares import HALF, MANY, SOME, STAGE, off, power, row_bytes

# A row of more bytes is shared by a cluster; a somewhat shorter one, too, if it has many elements or there are some
# more; one of many elements up to PAIR_ROW bytes by two blocks if a multiprocessor has no room for two such rows, as it
# has up to ROOMY_ROW, or if they are endless. Bytes that a block takes; of many rows of four bytes an element, whose
# registers do not fall short, twice as many rather than the largest clusters, of which only seven fit a GPU.
WIDE_ROW, PAIR_ROW, WIDE_SOME, WIDE_ELEMENTS = 32 * 1024, 28 * 1024, 24 * 1024, 12288
ROOMY_ROW, PIECE, SMALL_CLUSTER = 27 * 1024, 16 * 1024, 4

# Bytes that the blocks of a multiprocessor work on: of two bytes an element, whose registers are scarce, fewer,
# and still fewer in the smallest clusters and the largest and of many rows; of large pieces more.
WORK, WORK_HALVES, WORK_LESS, WORK_LARGE = 48 * 1024, 40 * 1024, 35_300, 64 * 1024
ELEMENTS, LEAST_THREADS = 70, 64  # of a thread at most, threads of a row group at least
ROWS_AHEAD, ROWS_AHEAD_SOME = 3, 4  # on their way to a row group; few of two bytes an element
WORK_SIZE, THREADS_SIZE, AHEAD_SIZE, APART_SIZE = 1.0, 0.5, 0.3, 0.6


def is_wide(p: Problem, there: int) -> bool:
    """True if a row is so long that several blocks share it."""
    row = row_bytes(p)
    return row > WIDE_ROW or (row >= WIDE_SOME and (there > SOME or p.d >= WIDE_ELEMENTS))


def is_for_pairs(p: Problem, there: int) -> bool:
    """True if two blocks share a row: one has no room for two, nor enough to do with one."""
    row, many = row_bytes(p), p.run == p.chunk and p.d > WIDE_ELEMENTS
    return many and (WIDE_SOME if there > MANY else ROOMY_ROW) < row <= PAIR_ROW


def wanted_cluster(p: Problem, there: int) -> int:
    """How many blocks share a row best."""
    cluster = min(MAX_CLUSTER, power(row_bytes(p) / PIECE)) if is_wide(p, there) else 1
    spare = cluster == MAX_CLUSTER and row_bytes(p) <= MAX_CLUSTER * PIECE
    return cluster // 2 if spare and HALF < there <= MANY and p.element > 2 else cluster


def clusters_cost(s: Schedule, p: Problem, there: int) -> tuple[float, ...]:
    """What ranks the schedules of clusters, smaller first."""
    part = row_bytes(p) / s.cluster
    claim = _worth_claiming(s, p, part, there)
    apart = _is_apart(s, p, part, claim, there)
    together, others = (s.resident, s.rows) if apart else (s.rows, s.resident)
    more = (claim and apart) or (p.element == 2 and there <= SOME and not apart)
    ahead = ROWS_AHEAD_SOME if more else ROWS_AHEAD
    shortcomings = (
        WORK_SIZE * off(together * part, _work(p, part, claim, apart, apart or s.cluster == 2 or there > STAGE))
        + APART_SIZE * (others - 1)
        + THREADS_SIZE * off(s.threads, max(LEAST_THREADS, power(p.d / s.cluster / ELEMENTS)))
        + AHEAD_SIZE * abs(rows_ahead(s) - ahead)
    )
    return (not s.keep, not s.hold, s.bulk_store, s.claim != claim, round(shortcomings, 6), not s.soon)


def _is_apart(s: Schedule, p: Problem, part: float, claim: bool, there: int) -> bool:
    """True if row groups are a block each.

    In the largest clusters, of which only few fit a GPU, so that they differ more in speed, those that do not claim
    their rows, of four bytes an element only few; in smaller ones of two bytes those that claim endless rows, and in
    clusters of four if rows are few. Of pieces less than whole there is room for more in a block.
    """
    largest, whole = s.cluster == MAX_CLUSTER, part == PIECE
    if p.element > 2:
        return largest and whole and there <= HALF and not claim
    if claim:
        return whole and not largest and there > MANY
    return largest or (whole and s.cluster == SMALL_CLUSTER and there <= SOME)


def _work(p: Problem, part: float, claim: bool, apart: bool, less: bool) -> int:
    """Bytes that the blocks of a multiprocessor work on best, in pieces of so many."""
    if part > PIECE:
        return WORK_LARGE
    if not apart and (claim or p.element > 2):
        return WORK
    return WORK_LESS if less else WORK_HALVES


def _worth_claiming(s: Schedule, p: Problem, part: float, there: int) -> bool:
    """True if clusters claim their rows, of which there are many rounds.

    Of two bytes an element the largest gain by it where rows are endless alone.
    """
    if p.element > 2:
        return there > (HALF if part > PIECE else STAGE)
    return there > (MANY if s.cluster == MAX_CLUSTER else STAGE)
