"""Axes: M rows, D features, and those that a graph derives from them.

``{N = M / n}``: rows belong to samples, n neighbouring ones to each. ``{H = M % h}``: row m to head m % h.
``{B = D / 128}`` are blocks of 128 features, ``{E = D % 64 / 2}`` the pairs of 64 features that repeat. Axes combine
per base, to the finer one: an element of [M, D] uses the number of its sample, its head, its block, and nothing is
broadcast. ``{P = M @ p}`` are the rows of a table, of which ``gather`` reads one for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Axis:
    """A named axis. There is one object for each, so axes are compared by ``is``.

    base     the axis that it is derived from, M or D; None for these two
    by       "/": an element has neighbouring elements of the base; "%": it has every ``number``-th one
             "@": rows of a table, to none of which a row belongs by its number
    number   of "/" the elements of the base that an element has, of "%" its length; or a name: the length of an array
             then says it. 0 for the segments of an order of sums, whose length the sums say; the last may be shorter
    each     of "%": so many neighbours are one element, and the length is ``number`` over it
    """

    _known: ClassVar[dict[tuple[object, ...], Axis]] = {}

    name: str
    base: Axis | None
    by: str
    number: int | str
    each: int

    def __new__(cls, name: str, base: Axis | None = None, by: str = "", number: int | str = 0, each: int = 1) -> Axis:
        if base is None:
            if name not in BUILTIN:
                raise ValueError(f"'{name}' is no axis; there are {', '.join(BUILTIN)} and those derived from M and D")
            return BUILTIN[name]
        key = name, base, by, number, each
        return cls._known.setdefault(key, cls._made(*key))

    @classmethod
    def _made(cls, name: str, base: Axis | None = None, by: str = "", number: int | str = 0, each: int = 1) -> Axis:
        found = super().__new__(cls)
        found.name, found.base, found.by, found.number, found.each = name, base, by, number, each
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Axis, (self.name, self.base, self.by, self.number, self.each)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name if self.base is None else f"Axis({self.declaration})"

    @property
    def root(self) -> Axis:
        """M or D."""
        return self.base or self

    @property
    def declaration(self) -> str:
        """Its text in the head of a graph: ``B = D / 128``."""
        return f"{self.name} = {Derivation(self.root, self.by, self.number, self.each)}"

    def length(self, whole: int) -> int:
        """Its elements, if its base has ``whole``; ValueError if it does not divide that, or an array has to say it."""
        if not isinstance(self.number, int):
            raise ValueError(f"no input says how long {self.declaration} is")
        if whole % self.number:
            raise ValueError(f"{self.declaration}: {whole} elements along {self.base} are not divided by {self.number}")
        return whole // self.number if self.by == "/" else self.number // self.each

    @property
    def of_order(self) -> bool:
        """True for the segments of a row that an order of sums makes."""
        return self.base is not None and self.number == 0

    @property
    def is_declared(self) -> bool:
        """True for an axis that a graph derives."""
        return self.base is not None and not self.of_order

    @property
    def period(self) -> int:
        """Of an axis whose elements repeat along a row, ``D % 128``, their number; 0 for others."""
        return int(self.number) if self.base is D and self.by == "%" else 0

    @property
    def of_table(self) -> bool:
        """True for the rows of a table."""
        return self.by == "@"

    @property
    def key(self) -> tuple[bool, bool, str]:
        """What axes are sorted by: M before D, a base before what is derived from it."""
        return self.root is D, self.base is not None, self.name

    def is_finer(self, other: Axis) -> bool:
        """True if each element belongs to one element of ``other``, or is one."""
        if other is self or other is self.base:
            return other is self
        if other.base is self:
            return not other.of_table
        a, b = (self.number, other.number) if self.by == "/" else (other.number, self.number)
        alike = (self.base, self.by) == (other.base, other.by) and isinstance(a, int) and isinstance(b, int)
        if other.each > 1 or self.each > 1:
            return alike and self.number == other.number and other.each % self.each == 0
        return alike and bool(a) and int(b) % int(a) == 0 and bool(b)

    def __truediv__(self, number: int | str) -> Derivation:
        """``M / 8``: elements of 8 neighbouring rows; ``M / "n"``: of as many as the length of an array says."""
        return Derivation(self, "/", number)

    def __mod__(self, number: int | str) -> Derivation:
        """``M % 8``: every 8th row is one element."""
        return Derivation(self, "%", number)

    def __matmul__(self, number: str) -> Derivation:
        """``M @ "p"``: rows of a table, as many as the length of an array says."""
        return Derivation(self, "@", number)


class Derivation(NamedTuple):
    """What an axis is derived by, ``M / 8``; a graph gives it a name."""

    base: Axis
    by: str
    number: int | str
    each: int = 1

    def __truediv__(self, each: int) -> Derivation:
        """``D % 64 / 2``: pairs of the 64 features that repeat."""
        return self._replace(each=each)

    def __str__(self) -> str:
        return f"{self.base} {self.by} {self.number}{f' / {self.each}' if self.each != 1 else ''}"


BASES = ("M", "D")
M, D = WIDE = tuple(Axis._made(name) for name in BASES)
BUILTIN: dict[str, Axis] = {"M": M, "D": D}
S = BUILTIN["S"] = Axis("S", D, "/")


@cache
def axes_union(*groups: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes along which values over ``groups`` of axes vary together: per base the finer one, M before D."""
    found: dict[Axis, Axis] = {}
    for axis in (a for group in groups for a in group):
        known = found.get(axis.root, axis)
        found[axis.root] = known if known.is_finer(axis) else axis if axis.is_finer(known) else axis.root
    return tuple(found[root] for root in WIDE if root in found)


def along(axes: Iterable[Axis], root: Axis) -> Axis | None:
    """The axis derived from ``root``, or itself, among ``axes``."""
    for axis in axes:
        if axis.root is root:
            return axis
    return None


class Lengths(dict[Axis, int]):
    """The length of every axis, and the elements of a ``segment`` of a row.

    ``rows``: those of a block, whose arrays have no others; None for all.
    """

    def __init__(self, lengths: Mapping[Axis, int], segment: int = 0, rows: range | None = None) -> None:
        super().__init__(lengths)
        self.segment, self.rows = segment, rows

    def __missing__(self, axis: Axis) -> int:
        """That of a derived axis that no array has; ValueError if it does not divide its base."""
        if axis.base is None:
            raise KeyError(axis)
        if axis.of_order:
            return -(-self[axis.base] // self.segment)
        return axis.length(self[axis.base])

    def per(self, axis: Axis, of: Axis) -> int:
        """Elements of ``axis`` that an element of ``of`` has; of the last segment of a row perhaps fewer."""
        return self.segment if of.of_order and axis is D else self[axis] // max(self[of], 1)

    def places(self, axis: Axis) -> NDArray[np.intp]:
        """The elements of ``axis`` that arrays have: all, or the rows of a block."""
        rows = range(self[axis]) if axis is not M or self.rows is None else self.rows
        return np.arange(rows.start, rows.stop)

    def positions(self, axis: Axis, of: Axis) -> NDArray[np.intp]:
        """For each element of ``axis`` that arrays have, that of ``of`` to which it belongs."""
        count = self.places(axis)
        return count % (self[of] * of.each) // of.each if of.by == "%" else count // max(self.per(axis, of), 1)

    def groups(self, axis: Axis, to: Axis) -> NDArray[np.intp]:
        """The elements of ``axis`` that each element of ``to`` has: [to, elements]."""
        return np.argsort(self.positions(axis, to), kind="stable").reshape(self[to], self.per(axis, to))
