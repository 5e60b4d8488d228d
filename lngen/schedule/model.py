"""The space of legal schedules, and the order in which to try them.

Normalisation moves bytes and little else, so a schedule is good if it keeps enough bytes on their way (Little's law)
and lets few threads hold many elements: fewer threads fold faster. The numbers below are what was fastest on an H200
(generated/bench, generated/tuned).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from lngen.errors import ScheduleError
from lngen.schedule.legal import (
    MAX_CLUSTER,
    MAX_THREADS,
    MAX_THREADS_PER_SM,
    WARP,
    is_legal,
    piece,
    rows_of_a_block,
    slots,
)
from lngen.schedule.problem import Problem
from lngen.schedule.resources import SIDE_BY_SIDE, fits, has_room, side_by_side
from lngen.schedule.schedule import Schedule

MULTIPROCESSORS = 132  # of an H200

# How many rows there are, in bytes of them for each of THREADS threads of every multiprocessor: up to EACH they are
# few, and threads have less to do than they could; up to STAGE most of them fit shared memory at a time; then they are
# many.
THREADS, LEAST, EACH, STAGE, MANY = 512, 16, 64, 512, 1024

# Forward, a row in registers. Of a schedule's shortcomings, each in doublings, how much one costs in time: too few or
# too many bytes on their way, threads without elements, accesses of less than a line, blocks and threads that are not
# of the size that works best; and weights that are asked for after the row.
ON_THE_WAY, LINE, BLOCK = 44_000, 128, 64
TOO_FEW, TOO_MANY, IDLE, BROKEN, BLOCK_SIZE, EACH_SIZE, LATE = 1.2, 0.05, 0.9, 0.3, 0.05, 0.25, 0.2

# Forward, staged: bytes of rows that the threads of a multiprocessor work on, and bytes on their way, one row more for
# a row group that has nobody to work while it waits; threads of a block; from so many bytes on a row is worth a bulk
# copy; and what a doubling of the bytes on their way costs.
WORK, FLIGHT, STAGED_BLOCK, BULK_ROW, FLIGHT_SIZE = 32 * 1024, 104 * 1024, 128, 512, 0.3

# A row of more bytes is shared by a cluster, of which each block takes so many; two rows side by side on a
# multiprocessor hide each other's exchange.
WIDE_ROW, PIECE, WIDE_BLOCK = 32 * 1024, 16 * 1024, 256

# With column sums: rows of so many elements, by bytes of one, are better held in registers than staged; threads of a
# block for these, for staged rows up to SHORT_ROW elements and for longer ones; bytes on their way at least.
REGISTER_ROW = {2: 768, 4: 2048, 8: 2048}
SHORT_BLOCK, SHORT_ROW, LONG_BLOCK, STAGED_BYTES = 512, 1536, 256, 84 * 1024


def space(p: Problem) -> list[Schedule]:
    """Every legal schedule with the widest accesses D allows that may be worth a try, in a fixed order."""
    return list(_space(p))


@cache
def _space(p: Problem) -> tuple[Schedule, ...]:
    legal = (s for base in _bases(p) if is_legal(base, p) for s in _variants(base, p) if is_legal(s, p))
    return tuple(sorted({s for s in legal if not s.one_launch or side_by_side(s, p)}))


def _bases(p: Problem) -> Iterator[Schedule]:
    """Forms and how rows are laid over threads and blocks: what is not legal as it stands is in no variant."""
    vec = widest(p)
    rows = sorted(rows_of_a_block(p) if p.column_sums else (1, 2, 4, 8, 16, 32, 64, 128))
    store = bool(p.output_sizes)
    for threads, r, resident in product([1 << n for n in range(11)], rows, (1, 2, 3, 4, 5, 6, 8, 10, 12)):
        if threads * r > MAX_THREADS or threads * r % WARP or threads * r * resident > MAX_THREADS_PER_SM:
            continue
        yield Schedule("registers", threads, r, vec, resident)
        if r == 1:
            yield Schedule("stream", threads, 1, vec, resident)
        # Five blocks of a row each gained where they fit; of row groups five were no better than four.
        if resident > (5 if r == 1 else 4) or threads * r < 64:
            continue
        for cluster in (1, 2, 4, 8, MAX_CLUSTER):
            if cluster > 1 and p.column_sums and r != p.groups:
                continue  # row groups are a block each where there are no clusters
            owners = 0 if p.column_sums else SIDE_BY_SIDE[cluster.bit_length() - 1] * resident
            yield Schedule("bulk", threads, r, vec, resident, stages=2, cluster=cluster, owners=owners)
            if cluster == 1:
                yield Schedule("async", threads, r, vec, resident, stages=2, owners=owners)
                yield Schedule("ragged", threads, r, vec, resident, stages=2, owners=owners, bulk_store=store)


def _variants(base: Schedule, p: Problem) -> Iterator[Schedule]:
    """The options of a form, its stages among them."""
    no, flags = (False,), (False, True)
    if base.form == "stream":
        yield base
    elif base.form == "registers" and p.column_sums:
        for prefetch, one in product(flags, flags):
            yield replace(base, prefetch=prefetch, one_launch=one)
    elif base.form == "registers":
        for keep in flags:
            yield replace(base, keep=keep)
    else:
        stores = flags if base.form == "bulk" else (base.bulk_store,)
        ones = flags if p.column_sums else no
        for stages, keep, hold, store, one in product((2, 3, 4, 5, 6), flags, flags, stores, ones):
            yield replace(base, stages=stages, keep=keep, hold=hold, bulk_store=store, one_launch=one)


def share(p: Problem, rows: int | None) -> int:
    """How many ``rows`` there are (None: many), as the model tells them apart; with column sums always many.

    The bytes of all rows for each of THREADS threads of every multiprocessor: a power of two from LEAST to EACH,
    then STAGE, then MANY.
    """
    if rows is None or p.column_sums:
        return MANY
    there = max(1.0, rows * _row_bytes(p) / (MULTIPROCESSORS * THREADS))
    if there > EACH:
        return STAGE if there <= STAGE else MANY
    return max(LEAST, _power(there))


def row_counts(p: Problem) -> list[int | None]:
    """Numbers of rows, one for each ``share``; None for many."""
    most = (each * MULTIPROCESSORS * THREADS // _row_bytes(p) for each in (LEAST, 2 * LEAST, EACH, STAGE))
    return [*{share(p, rows): rows for rows in most if rows > 0 and share(p, rows) < MANY}.values(), None]


def widest(p: Problem) -> int:
    """The most elements per access that D allows."""
    vec = p.chunk
    while p.d % vec:
        vec //= 2
    return vec


def ranked(p: Problem, capability: int = 90, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """The schedules worth trying on a GPU, best first: the default is the first that the compiler does not spill.

    ``vec``: the widest access that the arrays allow, whose rows then may lie apart: none are ragged.
    ``rows``: how many there will be, None for many. What is equal in ``share`` is ranked alike.
    """
    roomy = [s for s in space(p) if has_room(s, p, capability)]
    if vec is not None:
        narrow = (replace(s, vec=min(vec, s.vec)) for s in roomy if s.form != "ragged")
        roomy = [s for s in narrow if is_legal(s, p)]
    # Where the model expects spills of all of them, the compiler has the last word.
    found = [s for s in roomy if fits(s, p, capability)] or roomy
    if not found:
        raise ScheduleError(f"no schedule is legal for D={p.d}.")
    there = share(p, rows)
    return sorted(dict.fromkeys(found), key=lambda s: (_cost(s, p, there), s))


def _row_bytes(p: Problem) -> int:
    """Bytes of the inputs of a row; nothing has rows: any schedule will do to be told so."""
    return p.d * (sum(p.input_sizes) or 4)


def _cost(s: Schedule, p: Problem, there: int) -> tuple[float, ...]:
    """Smaller is better; the terms in order of importance. ``there``: the ``share`` of the rows."""
    idle = slots(s, p) * s.threads * s.cluster * p.chunk * (p.segments if s.form == "stream" else 1) / p.d
    if s.form == "stream":
        return (3, abs(s.threads - 512), abs(s.resident - 2))
    return _columns_cost(s, p, idle) if p.column_sums else _rows_cost(s, p, idle, there)


def _columns_cost(s: Schedule, p: Problem, idle: float) -> tuple[float, ...]:
    """One block per multiprocessor, few threads, rows read from shared memory once."""
    size = min(p.input_sizes, default=4)
    held = p.d <= REGISTER_ROW[max(2, size)]
    order = {"bulk": 1, "ragged": 1, "async": 2, "registers": 0 if held else 3}[s.form]
    if s.form == "registers":
        prefetch = s.prefetch == (size == 2 or not held)
        return (order, s.one_launch, s.resident, not prefetch, round(_off(s.block, SHORT_BLOCK) + _off(idle, 1), 3))
    cluster = _off(s.cluster, p.cluster)
    block = _off(s.block, SHORT_BLOCK if p.d <= SHORT_ROW else LONG_BLOCK)
    # A row group that has nobody to work while it waits has one row more on its way.
    bytes_ahead = s.rows * piece(s, p) * (sum(p.input_sizes) or 4)
    least = 3 if s.cluster > 1 else 2  # the blocks of a cluster wait for each other, too
    stages = max(least, -(-STAGED_BYTES // bytes_ahead)) + (s.rows == 1)
    return (
        order, cluster, s.resident, s.one_launch, not s.keep, abs(s.stages - stages), round(block, 3), not s.hold,
        s.bulk_store, round(idle, 3),
    )  # fmt: skip


def _rows_cost(s: Schedule, p: Problem, idle: float, there: int) -> tuple[float, ...]:
    """Rows that all fit shared memory are asked for at once, and wide ones ahead; others wait in registers."""
    row = _row_bytes(p)
    wide = row > WIDE_ROW
    staged = wide or (there == STAGE and row >= BULK_ROW)
    order = {"ragged": 0, "bulk": 0 if staged else 1, "registers": 1 if staged else 0, "async": 2}[s.form]
    each = slots(s, p) * p.chunk * row / p.d
    wanted = min(there, EACH)
    if s.form == "registers":
        few = there <= EACH
        on_the_way = min(ON_THE_WAY, there * THREADS)
        # Of many blocks, about one of a multiprocessor is done loading at any time, or not yet there.
        loading = s.resident if few else max(s.resident - 1, 0.25)
        way = min(loading * s.block * each, there * THREADS if few else math.inf)
        block = max(BLOCK, min(MAX_THREADS, row / wanted)) if few else BLOCK
        together = s.threads * min(s.vec, p.chunk) * row / p.d  # bytes of neighbouring threads' accesses
        cost = (
            TOO_FEW * max(0.0, math.log2(on_the_way / way))
            + TOO_MANY * max(0.0, math.log2(way / on_the_way))
            + IDLE * _off(idle, 1)
            + BROKEN * max(0.0, math.log2(min(LINE, each * s.threads) / together)) ** 2
            + BLOCK_SIZE * _off(s.block, block)
            + EACH_SIZE * _off(each, wanted)
            + LATE * (bool(p.column_sizes) and not s.keep)
        )
        return (order, round(cost, 6))
    cluster = min(MAX_CLUSTER, _power(row / PIECE)) if wide else 1
    part = row / cluster
    # Many rows have as few threads as have twice as much to do at most, if these are more than a small block.
    threads = _power(part / wanted)
    if there > EACH:
        threads = max(min(threads, STAGED_BLOCK), _power(part / (2 * wanted)))
    cost = (
        _off(s.resident * s.block * each, min(WORK, there * THREADS))
        + _off(s.threads, threads)
        + BLOCK_SIZE * _off(s.block, WIDE_BLOCK if wide else max(threads, STAGED_BLOCK))
        + FLIGHT_SIZE * _off(s.resident * s.rows * s.stages * part, FLIGHT + part * (s.resident * s.rows == 1))
    )
    return (order, _off(s.cluster, cluster), not s.keep, not s.hold, s.bulk_store, round(cost, 6), s.resident)


def _off(value: float, wanted: float) -> float:
    """How many times too large or too small, in doublings."""
    return abs(math.log2(value / wanted))


def _power(n: float) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << max(0, math.ceil(math.log2(n)))
