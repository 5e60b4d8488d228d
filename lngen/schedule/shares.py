"""How many rows there are, as far as schedules differ in it."""

from __future__ import annotations

import math

from lngen.schedule.problem import Problem

MULTIPROCESSORS = 132  # of an H200

# How many rows there are, in bytes of them for each of THREADS threads of every multiprocessor: up to EACH they are
# few, and threads have less to do than they could; up to HALF, long ones up to STAGE, enough of them fit shared memory
# at a time; up to MANY they are many, which is what is expected of rows nobody has counted; then they are endless.
THREADS, LEAST, EACH, SOME, HALF, STAGE, MANY, ENDLESS = 512, 16, 64, 128, 256, 512, 2048, 4096
SHARES = (LEAST, 32, EACH, SOME, HALF, STAGE, MANY)
COLUMN_SHARES = (LEAST, HALF, 1024, MANY)


def share(p: Problem, rows: int | None) -> int:
    """How many ``rows`` there are (None: many), as the model tells them apart.

    The bytes of all rows for each of THREADS threads of every multiprocessor, as the least of SHARES, with column sums
    of COLUMN_SHARES, that is as many; ENDLESS for more.
    """
    if rows is None:
        return MANY
    there = rows * row_bytes(p) / (MULTIPROCESSORS * THREADS)
    return next((each for each in _shares(p) if there <= each), ENDLESS)


def row_counts(p: Problem) -> list[int | None]:
    """Numbers of rows, one for each ``share``; None for many."""
    most = (each * MULTIPROCESSORS * THREADS // row_bytes(p) for each in (*_shares(p), ENDLESS))
    found = {share(p, rows): rows for rows in most if rows > 0}
    return [*(rows for each, rows in found.items() if each != MANY), None]


def _shares(p: Problem) -> tuple[int, ...]:
    return COLUMN_SHARES if p.column_sums else SHARES


def row_bytes(p: Problem) -> int:
    """Bytes of the inputs of a row; nothing has rows: any schedule will do to be told so."""
    return p.d * (sum(p.input_sizes) or 4)


def off(value: float, wanted: float) -> float:
    """How many times too large or too small, in doublings."""
    return abs(math.log2(value / wanted))


def power(n: float) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << max(0, math.ceil(math.log2(n)))
