"""Many schedules as columns: an array for each field, so that thousands of them need no object each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lngen.schedule.schedule import FORMS, Schedule

Numbers = NDArray[np.float64]
Places = NDArray[np.intp]
Row = tuple[int, ...]  # the fields of a schedule in their order, with the number of its form

FIELDS = tuple(f.name for f in fields(Schedule))
FLAG_FIELDS = frozenset(f.name for f in fields(Schedule) if isinstance(f.default, bool))
WORDS = sorted(FORMS)  # of forms; numbered so that rows are in the order of their schedules
FORM_NUMBERS = {word: n for n, word in enumerate(WORDS)}


class Columns:
    """Schedules in a fixed order; their fields are numbers from 0 on.

    A formula is computed once for all schedules that are equal in the few fields on which it depends.
    """

    def __init__(self, table: NDArray[np.int64]) -> None:
        """``table``: an array of [fields, schedules]."""
        self._table = table
        self._groups: dict[tuple[str, ...], tuple[list[Schedule], Places]] = {}

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Columns:
        """Rows in their order."""
        numbers = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        return cls(np.ascontiguousarray(numbers.reshape(-1, len(FIELDS)).T))

    @classmethod
    def of(cls, schedules: Iterable[Schedule]) -> Columns:
        """Schedules in their order."""
        return cls.of_rows((FORM_NUMBERS[s.form], *(getattr(s, name) for name in FIELDS[1:])) for s in schedules)

    def __len__(self) -> int:
        return len(self._table[0])

    def __iter__(self) -> Iterator[Schedule]:
        return (self._schedule(n) for n in range(len(self)))

    def field(self, name: str) -> Numbers:
        """The values of a field other than the form; flags are 0 or 1."""
        return np.array(self._table[FIELDS.index(name)], dtype=np.float64)

    def has_form(self, *forms: str) -> Numbers:
        """1 for each schedule of one of ``forms``, else 0."""
        return self.each(lambda s: s.form in forms, "form")

    def each(self, formula: Callable[[Schedule], float], *names: str) -> Numbers:
        """The value of ``formula`` for each schedule; it depends on no field but ``names``."""
        if names not in self._groups:
            self._groups[names] = self._grouped(names)
        alike, group = self._groups[names]
        return np.array([formula(s) for s in alike], dtype=np.float64)[group]

    def take(self, which: Places | NDArray[np.bool_]) -> Columns:
        """The schedules at places, or where a mask is true."""
        return Columns(self._table[:, which])

    def sorted(self) -> Columns:
        """The schedules in their natural order."""
        return self.take(np.lexsort(self._table[::-1]))

    def narrowed(self, vec: int) -> Columns:
        """The schedules with accesses of at most ``vec`` elements."""
        table = self._table.copy()
        place = FIELDS.index("vec")
        table[place] = np.minimum(table[place], vec)
        return Columns(table)

    def _grouped(self, names: tuple[str, ...]) -> tuple[list[Schedule], Places]:
        """A schedule of each group of equal ``names``, and the group of each schedule."""
        key = np.zeros(len(self), dtype=np.int64)
        for column in (self._table[FIELDS.index(name)] for name in names):
            key = key * (column.max(initial=0) + 1) + column
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        return [self._schedule(n) for n in first.tolist()], group

    def _schedule(self, n: int) -> Schedule:
        form, *others = self._table[:, n].tolist()
        named = zip(FIELDS[1:], others, strict=True)
        return Schedule(WORDS[form], *(bool(value) if name in FLAG_FIELDS else value for name, value in named))
