"""Rows at two distances: which arrays have them, and what a kernel is told of them.

The heads of q in a packed projection, ``qkv.view(T, 3, H, D)[:, 0]``, have the strides (3 * H * D, D, 1): H rows are D
elements apart, and the H rows after them begin 3 * H * D elements further on. The leading dimensions of all [M, D]
arrays of a call are cut at one place into outer and inner ones. On each side of the cut an array has one distance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Optional

from ..errors import ArrayError
from .arrays import Layout
from .kernels import Distance
from .tensors import Tensor

Pair = tuple[Tensor, Layout]
Sides = tuple[Optional[int], Optional[int]]  # the outer and the inner distance, None where a side has one row

AGAIN = "call .contiguous() or ascontiguousarray first"


def two_distances(
    arrays: Sequence[Pair], rows: Sequence[int], written: Collection[Tensor]
) -> tuple[list[Distance], int]:
    """The distances of each [M, D] array, in elements, and the number of inner rows; ``rows``: the leading dimensions.

    Rows at one distance are all inner ones. ArrayError for an array that has more than two distances, for two arrays
    that have no cut in common, or if rows of an array in ``written`` overlap.
    """
    if math.prod(rows) == 0:
        return [layout[1][-1] for _, layout in arrays], 1
    cuts = _cuts(arrays, len(rows))
    outer_rows, inner_rows = math.prod(rows[: cuts[0]]), math.prod(rows[cuts[0] :])
    found: list[Distance] = []
    for value, layout in arrays:
        d = layout[1][-1]
        outer, inner = sides(layout, cuts[0]) or (None, None)
        inner = inner if inner is not None else d if outer is None else outer
        outer = inner * inner_rows if outer is None else outer
        if value in written:
            _check_apart(value, layout, [(abs(inner), inner_rows), (abs(outer), outer_rows)])
        found.append((outer, inner))
    return found, inner_rows


def sides(layout: Layout, cut: int) -> Sides | None:
    """The distances on both sides of a cut before that dimension; None if a side has several."""
    _, shape, strides, _ = layout
    dims = [*zip(shape[:-1], strides[:-1])]
    found = [_collapsed([(n, s) for n, s in side if n > 1]) for side in (dims[:cut], dims[cut:])]
    return None if any(len(one) > 1 for one in found) else (_only(found[0]), _only(found[1]))


def fits(layout: Layout) -> bool:
    """True if the rows of an [M, D] array lie at two distances at most."""
    return any(sides(layout, cut) for cut in range(len(layout[1])))


def _collapsed(dims: list[tuple[int, int]]) -> list[int]:
    """The distances of rows in these dimensions: the last stride, and every one that does not continue the next."""
    return [s for (_, s), (n, step) in zip(dims, dims[1:]) if s != n * step] + [s for _, s in dims[-1:]]


def _only(distances: list[int]) -> int | None:
    return distances[0] if distances else None


def _cuts(arrays: Sequence[Pair], dimensions: int) -> list[int]:
    """The cuts that all arrays have, the outermost first; ArrayError if there is none."""
    fitting: list[tuple[Pair, set[int]]] = []
    for value, layout in arrays:
        _, shape, strides, _ = layout
        cuts = {cut for cut in range(dimensions + 1) if sides(layout, cut)}
        if not cuts:
            raise ArrayError(
                f"'{value.name}' is expected to have rows at two distances at most, got strides {tuple(strides)} in "
                f"elements for shape {tuple(shape)}; {AGAIN}."
            )
        for (other, (_, _, others, _)), known in fitting:
            if not cuts & known:
                raise ArrayError(
                    f"'{value.name}' is expected to have rows at two distances that change at the same dimension as "
                    f"those of '{other.name}', got strides {tuple(strides)} and {tuple(others)} in elements for shape "
                    f"{tuple(shape)}; for one of them {AGAIN}."
                )
        fitting.append(((value, layout), cuts))
    common = set(range(dimensions + 1)).intersection(*(cuts for _, cuts in fitting))
    return sorted(common)


def _check_apart(value: Tensor, layout: Layout, steps: Sequence[tuple[int, int]]) -> None:
    """ArrayError if rows overlap: a distance, from the nearest on, is less than what lies within it."""
    reach = layout[1][-1]
    for step, count in sorted(steps):
        if count > 1 and step < reach:
            raise ArrayError(
                f"'{value.name}' is written to, but its rows overlap or interleave: strides {tuple(layout[2])} in "
                f"elements for shape {tuple(layout[1])}; pass a contiguous array."
            )
        reach += (count - 1) * step
