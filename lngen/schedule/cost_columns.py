"""What a schedule of rows with column sums is expected to cost; fitted as in cost.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from lngen.passes.order import THREE
from lngen.schedule.legal import MIN_STAGES, piece, rows_ahead, slots
from lngen.schedule.problem import Problem
from lngen.schedule.resources import stay_packed
from lngen.schedule.schedule import Schedule
from lngen.schedule.shares import HALF, LEAST, MANY, off, row_bytes


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


# By bytes of an element. Rows held in registers: so many elements, and threads of a block, if they are few; the same
# for tiny ones;
# elements of a thread up to which the next row is asked for early.
COLUMN_ROWS = {
    2: Columns(512, 255, HALF, 96 * 1024, 3, 1, 1536),
    4: Columns(512, 512, LEAST, 112 * 1024, 4, 0, 768),
    8: Columns(2048, 255, LEAST, 112 * 1024, 4, 0, 768),
}
FEW_ROW, FEW_BLOCK, TINY_ROW, TINY_BLOCK, PREFETCHED = 1024, 256, 255, 1024, 16

# Staged ones: threads of a block for short rows and for longer ones, of three pieces side by side; for endless ones
# between THIN_ROW and SHORT_ROW elements; for rows up to ALONE_ROW elements, and pieces of rows up to ALONE_PIECE, that
# a block works on one by one; the weight of another size than the best, to that of a stage; elements of a thread at
# most if rows are endless, and if clusters share them, in full stages or smaller ones; bytes of a stage, few of which
# fill shared memory, and of one of which endless rows have one more; how many rows there are at most where clusters of
# several row groups hold those of four bytes an element, and blocks those of two whose weights have to stay packed.
SHORT_BLOCK, LONG_BLOCK, THIN_ROW, SHORT_ROW, THREE_BLOCK = 512, 256, 512, 1536, 384
ALONE_BLOCK, ALONE_ROW, ALONE_PIECE = 128, 6144, 4096
COLUMN_BLOCK_SIZE, ENDLESS_EACH, SHARED_EACH, SMALL_EACH = 1.2, 32, 40, 48
FULL_STAGE, DEEP_STAGE = 48 * 1024, 32 * 1024
HELD_SOME = 1024

# Endless rows of which clusters wait for shared memory alone: by bytes of a stage, row groups at least and blocks of a
# cluster at most. Of other stages, and of fewer rows, that loses up to 14 % (h200-tried.txt, 49).
RESTRICTED = {40 * 1024: (2, 4), 48 * 1024: (1, 8)}


def columns_cost(s: Schedule, p: Problem, idle: float, there: int) -> tuple[float, ...]:
    """One block per multiprocessor, few threads, rows read from shared memory once."""
    size = max(2, p.element)
    want, few, endless = COLUMN_ROWS[size], there <= LEAST, there > MANY
    held = p.d <= (FEW_ROW if few else want.many if there >= MANY else want.held)
    order = {"bulk": 1, "ragged": 1, "async": 2, "registers": 0 if held else 3}[s.form]
    each = slots(s, p) * p.chunk
    if s.form == "registers":
        prefetch = each <= PREFETCHED and there > want.early
        block = FEW_BLOCK if few else TINY_BLOCK if p.d <= TINY_ROW else SHORT_BLOCK
        layout = round(off(s.block, block) + off(idle, 1), 3)
        return (order, s.one_launch, s.resident, s.prefetch != prefetch, layout)
    stage, shared = _stage(s, p), s.cluster > 1
    most = (SMALL_EACH if stage < FULL_STAGE else SHARED_EACH) if shared else ENDLESS_EACH
    block = _columns_block(s, p, size, endless)
    ahead = max(_columns_stages(s, p, size, there), MIN_STAGES + s.soon)
    shortcomings = abs(rows_ahead(s) - ahead) + COLUMN_BLOCK_SIZE * (
        off(s.block, block) + (max(0, each - most) if endless else 0)
    )
    if size == 2:
        hold = _held_packed(s, p, there)
    else:
        hold = _held_shared(s, stage, there) if shared else endless or stage < FULL_STAGE
    soon = s.hold and (size == 2 or shared or not endless)
    return (
        order, off(s.cluster, p.cluster), s.resident, s.one_launch, not s.keep, round(shortcomings, 3),
        s.hold != hold, s.bulk_store, s.soon != soon, round(idle, 3), s.restrict != (endless and _restricted(s, p)),
    )  # fmt: skip


def _stage(s: Schedule, p: Problem) -> int:
    """Bytes of the inputs of the pieces of rows that a block works on side by side."""
    return s.rows * piece(s, p) * row_bytes(p) // p.d


def _held_packed(s: Schedule, p: Problem, there: int) -> bool:
    """True if rows of two bytes an element are held.

    If the weights would have to stay packed beside them, many are not, nor are endless ones that clusters share in
    full stages.
    """
    few = there <= (MANY if s.cluster > 1 else HELD_SOME) or s.rows == THREE
    small = s.cluster > 1 and _stage(s, p) < FULL_STAGE
    return few or small or p.run == 1 or not stay_packed(replace(s, hold=True, soon=True), p)


def _held_shared(s: Schedule, stage: int, there: int) -> bool:
    """True if the blocks of a cluster hold rows of four bytes an element, whose stage has so many bytes.

    A row group that has nobody to work while it waits does, unless there are few rows, of large stages.
    """
    alone, few = s.rows == 1, there <= HALF
    return (alone and not few) or (there <= HELD_SOME and stage <= FULL_STAGE)


def _restricted(s: Schedule, p: Problem) -> bool:
    """True if clusters wait for shared memory alone where rows are endless."""
    least, most = RESTRICTED.get(_stage(s, p), (1, 1))
    return s.rows >= least and 1 < s.cluster <= most


def _columns_block(s: Schedule, p: Problem, size: int, endless: bool) -> int:
    """Threads of a block, for staged rows with column sums."""
    if s.rows == 1 and size > 2 and piece(s, p) <= (ALONE_PIECE if s.cluster > 1 else ALONE_ROW):
        much = endless and s.cluster == 1 and piece(s, p) > ENDLESS_EACH * ALONE_BLOCK
        return SHORT_BLOCK if much else ALONE_BLOCK
    if s.rows == THREE:
        return THREE_BLOCK
    least, most = (THIN_ROW, SHORT_ROW) if endless else (0, COLUMN_ROWS[size].short)
    return SHORT_BLOCK if least < p.d <= most else LONG_BLOCK


def _columns_stages(s: Schedule, p: Problem, size: int, there: int) -> int:
    """Stages for rows with column sums: as many bytes on their way as are worth it.

    A row group that has nobody to work while it waits has more of them than it needs, as have the blocks of a cluster,
    which wait for each other, unless there are few rows anyway.
    """
    alone, shared, endless, want = s.rows == 1, s.cluster > 1, there > MANY, COLUMN_ROWS[size]
    stage = _stage(s, p)
    ahead = math.ceil(want.ahead / stage)
    if there <= HALF and (size == 2 or s.form == "bulk"):
        return 3 + (shared and stage <= FULL_STAGE) if alone else min(3, max(2, ahead))
    if endless and stage >= FULL_STAGE and not (alone or shared):
        return 2
    wanted = min(ahead, 3 if s.form == "ragged" else want.most) + want.alone * alone
    deep = stage <= DEEP_STAGE if shared else not alone and p.d > SHORT_ROW and stage == DEEP_STAGE
    more = endless and size == 2 and deep and s.form != "ragged"
    return min(4, max(2 + alone + shared, wanted) + more)
