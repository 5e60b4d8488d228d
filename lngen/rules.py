"""Rules of a launch, each written once: grids, stretches, workspaces, distances of rows, numbers that follow from eps.

The compiler plans by them, and a launcher launches by them; a hub package has a copy of this file. ``lngen help
manifest`` has them in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Union

# ---- grids ----

MOST_BLOCKS = 2**31 - 1  # of a grid


class Extent(NamedTuple):
    """A grid dimension in blocks: ``fixed``, or by rows.

    By rows: max(``least``, ``times`` * min(``limit``, ceil(rows / ``per``))); ``times`` is the blocks of a cluster.
    """

    fixed: int = 1
    per: int | None = None
    limit: int | None = None
    times: int = 1
    least: int = 0

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Extent:
        """From its description, in which ``fixed`` is null for an extent by rows."""
        return cls(described["fixed"] or 1, *[described[key] for key in cls._fields[1:]])

    @property
    def described(self) -> dict[str, int | None]:
        """The description."""
        return {**self._asdict(), "fixed": self.fixed if self.per is None else None}

    def __call__(self, rows: int) -> int:
        """Blocks for that many rows."""
        if self.per is None:
            return self.fixed
        needed = -(-rows // self.per)
        blocks = self.times * (needed if self.limit is None else min(self.limit, needed))
        return max(self.least, blocks)

    def __str__(self) -> str:
        if self.per is None:
            return str(self.fixed)
        needed = "M" if self.per == 1 else f"ceil(M / {self.per})"
        blocks = needed if self.limit is None else f"min({self.limit}, {needed})"
        blocks = blocks if self.times == 1 else f"{self.times} * {blocks}"
        return f"max({self.least}, {blocks})" if self.least else blocks


# ---- stretches: the rows of a set that one partial sum adds ----


class Stretch(NamedTuple):
    """How a set of rows is cut into stretches of consecutive rows, of which the last may be shorter.

    A set of ``long`` rows or more has stretches of ``rows``. A quarter of them has half of that, and so on down to
    ``least``. A stretch is raised to whole ``groups``.
    """

    rows: int
    least: int
    long: int
    groups: int

    def of(self, per_set: int) -> int:
        """Rows of a stretch in sets of so many rows."""
        rows, long = self.rows, self.long
        while rows > self.least and per_set < long:
            rows, long = rows // 2, long // 4
        return -(-rows // self.groups) * self.groups

    def stretches(self, per_set: int) -> int:
        """Stretches of a set of so many rows."""
        return -(-per_set // self.of(per_set))


# The length of an axis of sets of consecutive rows: those of a set are the inner ones of rows at two distances.
SETS = "M / inner"

TABLE = "rows of a table"  # the length of an axis that the array alone says

# ---- workspaces ----

ALIGNMENT = 256  # bytes, of a workspace and of the buffers in it


def aligned(size: int) -> int:
    """Bytes, rounded up so that the next buffer is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def laid_out(buffers: Iterable[tuple[str, int]]) -> tuple[dict[str, int], int]:
    """The offset of each buffer, given by name and bytes, and the bytes of all of them."""
    offsets, end = {}, 0
    for name, size in buffers:
        offsets[name] = end
        end += aligned(size)
    return offsets, end


def buffer_elements(fixed: int, per_row: int, per_stretch: int, stretch: Stretch | None, rows: int, inner: int) -> int:
    """Elements of a buffer for so many rows, ``inner`` of them in a set: one number of the first three is not 0."""
    stretches = rows // inner * stretch.stretches(inner) if stretch else 0
    return fixed + per_row * rows + per_stretch * stretches


# ---- rows ----

# Elements from a row to the next. Of rows at two distances, first from one row to the one ``inner`` rows on. Of an
# array that is stored by columns, from a column to the next.
Distance = Union[int, tuple[int, int]]

# Of arguments: how many rows there are, and where they lie.
ROW_KINDS = ("rows", "inner", "stride", "outer_stride", "column_stride", "padded", "table_stride")

PADDED = 4  # the distance of columns is a multiple of that: 16 bytes of f32, as TMA asks for


def padded(rows: int) -> int:
    """The rows of a column, with what is behind them in a new array."""
    return -(-rows // PADDED) * PADDED


def row_argument(kind: str, rows: int, inner: int, distance: Distance) -> int:
    """An argument of one of these kinds; rows at one distance lie at two as well.

    ``distance``: of columns 0 for a new array, which has zeros behind the rows. In a given one the kernel leaves alone
    what is there.
    """
    if kind in ("rows", "inner"):
        return rows if kind == "rows" else inner
    if kind == "padded":
        return rows if distance else padded(rows)
    if kind == "column_stride":
        assert isinstance(distance, int)
        return distance or padded(rows)
    outer, stride = distance if isinstance(distance, tuple) else (inner * distance, distance)
    return outer if kind == "outer_stride" else stride


# ---- numbers that a launch passes by value ----


class Rule(NamedTuple):
    """How a number follows from eps: a line of C over the double ``eps``, with ``max`` as its one function.

    ``of`` is the same in Python. The result is rounded once, to the dtype of the parameter.
    """

    text: str
    of: Callable[[float], float]


RULES = {
    "eps": Rule("eps", lambda eps: eps),
    # The square of a divisor that is eps at least: a square of f32 that is 0 would be no divisor.
    "eps_squared": Rule("max(eps * eps, 0x1p-126)", lambda eps: max(eps * eps, 2.0**-126)),
}
