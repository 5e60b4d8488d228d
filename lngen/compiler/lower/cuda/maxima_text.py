"""Maxima over all rows: the first block stores what they begin with, and every block joins its own to that."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.compiler.lower.cuda.fragments import Statement, Sum, Tensor


@dataclass(frozen=True)
class Maxima:
    """The maxima over all rows that a kernel of rows completes.

    maxima       the maxima, and ``taken_into`` what each thread takes terms into
    taken        the statements at the end of a row, of terms that are numbers of a row
    scalars      the inputs without axes that only the results need
    statements   the equations that follow from the maxima; the first block computes them from the maxima of nothing
    results      the results, and the index of the maximum that is joined to each
    """

    maxima: tuple[Sum, ...]
    taken_into: tuple[str, ...]
    taken: tuple[Statement, ...]
    scalars: tuple[Tensor, ...]
    statements: tuple[Statement, ...]
    results: tuple[tuple[Tensor, int], ...]
