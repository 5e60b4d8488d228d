"""What rows without column sums are expected to cost in clusters: several blocks have a piece of a row each.

As in ``cost``, the numbers are fitted to the points that were swept on H200s (generated/bench/h200-sweeps.json).
"""

from __future__ import annotations

from lngen.schedule.legal import MAX_CLUSTER, rows_ahead
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import Schedule
from lngen.schedule.shares import HALF, MANY, SOME, STAGE, off, power, row_bytes

# A row of more bytes is shared by a cluster; a somewhat shorter one, too, if it has many elements or there are some
# more; one of many elements up to PAIR_ROW bytes by two blocks in any case. Bytes that a block takes; where rows are
# many twice as many rather than the largest clusters, of which only seven fit a GPU, if registers do not fall short: of
# rows of four bytes an element.
WIDE_ROW, PAIR_ROW, WIDE_SOME, WIDE_ELEMENTS = 32 * 1024, 28 * 1024, 24 * 1024, 12288
PIECE = 16 * 1024

# Bytes that the blocks of a multiprocessor work on: of two bytes an element, whose registers are scarce, fewer,
# and still fewer in the smallest clusters and the largest and of many rows; of large pieces more.
WORK, WORK_HALVES, WORK_LESS, WORK_LARGE = 48 * 1024, 40 * 1024, 35_300, 64 * 1024
ELEMENTS, LEAST_THREADS = 70, 64  # of a thread at most, threads of a row group at least
ROWS_AHEAD, ROWS_AHEAD_SOME = 3, 4  # on their way to a row group; few of two bytes an element
ENDLESS_CLUSTER, CLAIMED_PIECE = 8, 12 * 1024  # what large clusters and large pieces are, where claiming is concerned
WORK_SIZE, THREADS_SIZE, AHEAD_SIZE, APART_SIZE = 1.0, 0.5, 0.3, 0.6


def is_wide(p: Problem, there: int) -> bool:
    """True if a row is so long that several blocks share it."""
    row = row_bytes(p)
    return row > WIDE_ROW or (row >= WIDE_SOME and (there > SOME or p.d >= WIDE_ELEMENTS))


def is_for_pairs(p: Problem) -> bool:
    """True if two blocks share a row however many there are: one has no room for two, nor enough to do with one."""
    return p.run == p.chunk and p.d > WIDE_ELEMENTS and WIDE_SOME < row_bytes(p) <= PAIR_ROW


def wanted_cluster(p: Problem, there: int) -> int:
    """How many blocks share a row best."""
    cluster = min(MAX_CLUSTER, power(row_bytes(p) / PIECE)) if is_wide(p, there) else 1
    spare = cluster == MAX_CLUSTER and row_bytes(p) <= MAX_CLUSTER * PIECE
    return cluster // 2 if spare and there > HALF and p.element > 2 else cluster


def clusters_cost(s: Schedule, p: Problem, there: int) -> tuple[float, ...]:
    """What ranks the schedules of clusters, smaller first."""
    part = row_bytes(p) / s.cluster
    claim = _worth_claiming(s, p, part, there)
    # In the largest clusters row groups are a block each: only few fit a GPU, and so they differ more in speed.
    apart = s.cluster == MAX_CLUSTER and (claim or p.element == 2)
    together, others = (s.resident, s.rows) if apart else (s.rows, s.resident)
    ahead = ROWS_AHEAD_SOME if p.element == 2 and there <= SOME and not apart else ROWS_AHEAD
    shortcomings = (
        WORK_SIZE * off(together * part, _work(p, part, claim, apart or s.cluster == 2 or there > STAGE))
        + APART_SIZE * (others - 1)
        + THREADS_SIZE * off(s.threads, max(LEAST_THREADS, power(p.d / s.cluster / ELEMENTS)))
        + AHEAD_SIZE * abs(rows_ahead(s) - ahead)
    )
    return (not s.keep, not s.hold, s.bulk_store, s.claim != claim, round(shortcomings, 6), not s.soon)


def _work(p: Problem, part: float, claim: bool, less: bool) -> int:
    """Bytes that the blocks of a multiprocessor work on best, in pieces of so many."""
    if part > PIECE:
        return WORK_LARGE
    if claim or p.element > 2:
        return WORK
    return WORK_LESS if less else WORK_HALVES


def _worth_claiming(s: Schedule, p: Problem, part: float, there: int) -> bool:
    """True if clusters claim their rows, of which there are many rounds.

    Of two bytes an element large clusters gain by it with large pieces of endless rows alone, and the largest never.
    """
    if p.element > 2:
        return there > (HALF if part > PIECE else STAGE)
    if s.cluster >= ENDLESS_CLUSTER:
        return s.cluster < MAX_CLUSTER and part > CLAIMED_PIECE and there > MANY
    return there > STAGE
