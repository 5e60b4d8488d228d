"""What the arrays of a call have to be: dtype, shape, strides, device, and which may share memory.

All of it is checked before any GPU work. Inputs may share memory. A result may take the place of exactly one input.

Rows may lie at two distances. The heads of q in a packed projection, ``qkv.view(T, 3, H, D)[:, 0]``, have the strides
(3 * H * D, D, 1): H rows are D elements apart, and the H rows after them begin 3 * H * D elements further on. The
leading dimensions of all [M, D] arrays of a call are cut at one place into outer and inner ones. On each side of the
cut an array has one distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from ..dtypes import BYTES
from ..errors import ArrayError
from ..rules import PADDED, Distance, padded
from .arrays import Layout
from .signature import Tensor


def arranged(
    text: str, names: Sequence[str], inputs: Sequence[Any], named: Mapping[str, Any], about: Callable[[str], str]
) -> list[Any]:
    """Positional and named inputs in the order of ``names``; ArrayError if one is missing or too many.

    ``about``: what to do about an input that is missing, or is not among the names, the end of a sentence.
    """
    given = dict(zip(names, inputs))
    unknown = [n for n in named if n not in names or n in given]
    if len(inputs) > len(names) or unknown:
        got = ", ".join([*(f"{len(inputs)} by position" for _ in inputs[:1]), *unknown])
        hints = [about(n) for n in unknown if n not in names]
        raise ArrayError(f"'{text}' takes {', '.join(names)}, each once; got {got}{''.join(hints[:1])}.")
    given.update(named)
    return [present(text, n, given.get(n), about) for n in names]


def present(text: str, name: str, array: Any, about: Callable[[str], str]) -> Any:
    """The array of an input; ArrayError if there is none. ``about`` as of ``arranged``."""
    if array is not None:
        return array
    raise ArrayError(f"'{text}' expects the input '{name}', which is missing{about(name)}.")


def leading(value: Tensor, shape: Sequence[int], d: int) -> tuple[int, ...]:
    """The dimensions that count rows: all but the last of an array [..., D], all of one with a number per row.

    Of angles by row they are all but the last, too.
    """
    if value.of_table:
        return tuple(shape[:-1])
    if "D" not in value.axes:
        return tuple(shape)
    if len(shape) < 1 or shape[-1] != d:
        raise ArrayError(f"'{value.name}' is expected to have shape (..., {d}), the spec's D last, got {tuple(shape)}.")
    return tuple(shape[:-1])


def check_layout(
    value: Tensor, layout: Layout, dtype: str | None, rows: tuple[int, ...], d: int, device: int, host: str = ""
) -> None:
    """ArrayError if an array does not have the dtype, shape or device that ``value`` requires.

    ``host``: what else may be passed for arrays on the CPU, the end of a sentence.
    """
    own, shape, _, where = layout
    if dtype != value.dtype and not are_bytes(value, own):
        raise ArrayError(
            f"'{value.name}' is expected to be {value.dtype}, got {own}; cast it, or compile for its dtype."
        )
    if value.by_position:
        check_table(value, shape)
    elif not value.of_sets and tuple(shape) != (expected := value.shape(rows, d)):
        raise ArrayError(f"'{value.name}' is expected to have shape {expected}, got {tuple(shape)}.")
    if where < 0:
        raise ArrayError(
            f"'{value.name}' is expected on {'a GPU' if device < 0 else f'GPU {device}'}, but lies on the CPU; move it "
            f"there{host}."
        )
    if where != device:
        raise ArrayError(f"'{value.name}' is expected on GPU {device}, where other arrays lie, got GPU {where}.")


def check_table(value: Tensor, shape: Sequence[int]) -> None:
    """ArrayError if a table has other columns than its spec says."""
    if len(shape) != 2 or str(shape[1]) != value.lengths[1]:
        raise ArrayError(
            f"'{value.name}' is expected to be a table of {value.lengths[1]} columns, got shape {tuple(shape)}."
        )


def are_bytes(value: Tensor, own: Any) -> bool:
    """True for NumPy's uint8, also CuPy's, where floats of 8 bits are expected."""
    return value.dtype in BYTES and str(own) == "uint8"


def check_rows(value: Tensor, layout: Layout) -> None:
    """ArrayError if a row is not contiguous."""
    _, shape, strides, _ = layout
    if math.prod(shape) and value.features and shape[-1] > 1 and strides[-1] != 1:
        raise ArrayError(
            f"'{value.name}' is expected to have contiguous rows (last stride 1), got strides {tuple(strides)} in "
            "elements; call .contiguous() or ascontiguousarray first."
        )


def row_stride(value: Tensor, layout: Layout, *, written: bool) -> int:
    """Elements from one row to the next; ArrayError if rows are not evenly spaced or a row is not contiguous."""
    _, shape, strides, _ = layout
    if math.prod(shape) == 0:
        return shape[-1]
    check_rows(value, layout)
    outer = [(n, s) for n, s in zip(shape, strides)][: -1 if value.features else None]
    stride = _one_stride(value, [(n, s) for n, s in outer if n > 1], layout)
    if stride is None:
        return shape[-1] if value.features else 1
    least = shape[-1] if value.features else 1
    if written and abs(stride) < least:
        raise ArrayError(
            f"'{value.name}' is written to, but its rows overlap: row stride {stride}, row length {least}."
        )
    if not value.features and stride != 1:
        raise ArrayError(
            f"'{value.name}' is expected to be contiguous, got strides {tuple(strides)} in elements; pass a copy."
        )
    return stride


def column_stride(value: Tensor, layout: Layout) -> int:
    """Elements from one column to the next; ArrayError if columns do not lie so that a kernel can write to them."""
    _, shape, strides, _ = layout
    rows = math.prod(shape[1:])
    wanted = [math.prod(shape[place + 1 :]) for place in range(1, len(shape))]
    dense = all(n == 1 or found == step for n, found, step in zip(shape[1:], strides[1:], wanted))
    apart = strides[0] if shape[0] > 1 and rows else padded(rows)
    if rows and not (dense and apart >= rows and apart % PADDED == 0):
        raise ArrayError(
            f"'{value.name}' is expected to have strides ({', '.join(map(str, ['A', *wanted]))}) in elements, A a "
            f"multiple of {PADDED} from {rows} on, got {tuple(strides)}; pass a slice of a larger array."
        )
    return apart


def _one_stride(value: Tensor, dims: list[tuple[int, int]], layout: Layout) -> int | None:
    """The stride of the flattened outer dimensions, None if there is at most one row."""
    for (_, outer), (n, inner) in zip(dims, dims[1:]):
        if outer != n * inner:
            two = value.wide and fits(layout)
            raise ArrayError(
                f"'{value.name}' is expected to have rows at one distance, got strides {tuple(layout[2])} in elements; "
                f"{AGAIN}{', or compile with strides=2, for rows at two distances' if two else ''}."
            )
    return dims[-1][1] if dims else None


# ---- memory that arrays share ----

NONE_ADDED: Mapping[str, str] = MappingProxyType({})

# Two arrays of a call by number, of which the first is written, and two bounds: the arrays may share memory if the
# first address minus the second, in bytes, lies between the bounds, both excluded.
Near = tuple[int, int, int, int]


class Span(NamedTuple):
    """The memory of an array, relative to its address, in bytes.

    dims     length and stride of each dimension longer than 1, in order
    levels   the same without strides of 0, signs and contiguous dimensions, the longest stride first
    length   the contiguous bytes at each place
    first    the offset of the first byte, below 0 with a negative stride
    size     of an element
    """

    dims: tuple[tuple[int, int], ...]
    levels: tuple[tuple[int, int], ...]
    length: int
    first: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], size: int) -> Span | None:
        """The memory of an array with strides in bytes; None without elements."""
        if 0 in shape:
            return None
        dims = [(n, step) for n, step in zip(shape, strides) if n > 1]
        length, levels = size, []
        for step, n in sorted((abs(step), n) for n, step in dims if step):
            if step == length:
                length *= n
            else:
                levels.append((n, step))
        first = sum(min(0, (n - 1) * step) for n, step in dims)
        return cls(tuple(dims), tuple(reversed(levels)), length, first, size)

    @property
    def reach(self) -> int:
        """Bytes from the first to the last."""
        return sum((n - 1) * step for n, step in self.levels) + self.length

    @property
    def overlaps(self) -> bool:
        """True if two of its places share a byte."""
        if not self.levels:
            return any(step == 0 for _, step in self.dims)
        n, step = self.levels[0]
        _, one = self.places(step)
        return one.overlaps or any(meet(one, one, apart) for apart in range(step, min(n * step, one.reach), step))

    def places(self, step: int) -> tuple[int, Span]:
        """How many places have that distance, if it is the longest, and the memory at each of them."""
        if not self.levels or self.levels[0][1] != step:
            return 1, self
        return self.levels[0][0], self._replace(levels=self.levels[1:])


Placed = Optional[tuple[int, Optional[Span]]]  # an address and the memory there; None for a new array


def span_of(value: Tensor, rows: int, d: int, stride: Distance, inner: int = 1) -> Span | None:
    """The memory of ``value`` with ``rows`` rows, ``stride`` elements from one row, or one column, to the next.

    Of rows at two distances, ``inner`` are side by side, and ``rows`` is a multiple of that.
    """
    shape, strides = value.shape(rows, d), value.strides(rows, d)
    if value.of_sets and isinstance(stride, tuple):
        shape, strides = (rows // inner, d), (stride[0], 1)
    elif value.wide and isinstance(stride, tuple):
        shape, strides = (rows // inner, inner, d), (*stride, 1)
    elif (value.wide or value.by_columns) and isinstance(stride, int):
        strides = (stride, 1)
    return Span.of(shape, [step * value.size for step in strides], value.size)


def meet(a: Span, b: Span, apart: int) -> bool:
    """True if two arrays share a byte; ``apart``: the first byte of ``a`` less that of ``b``.

    Of the longest stride, places that lie too far from the other array to meet it are skipped. If both arrays have that
    stride, only the difference of two places counts.
    """
    if not -a.reach < apart < b.reach:
        return False
    step = max([span.levels[0][1] for span in (a, b) if span.levels], default=0)
    if not step:
        return True
    (n, one), (others, other) = a.places(step), b.places(step)
    least = max(1 - others, -((apart + one.reach - 1) // step))
    most = min(n - 1, (other.reach - 1 - apart) // step)
    return any(meet(one, other, apart + place * step) for place in range(least, most + 1))


def near(spans: Sequence[Span | None], inputs: int) -> tuple[Near, ...]:
    """Pairs of each result with each input and each earlier result, without those that are None: new, or empty."""
    found = []
    for i, result in enumerate(spans[inputs:], inputs):
        for j, other in enumerate(spans[:i]):
            if result is not None and other is not None:
                shift = other.first - result.first
                found.append((i, j, shift - result.reach, shift + other.reach))
    return tuple(found)


def replaced(
    values: Sequence[Tensor],
    places: Sequence[Placed],
    inputs: int,
    again: str = "",
    added: Mapping[str, str] = NONE_ADDED,
) -> tuple[str, ...]:
    """Names of the inputs of which a result takes the exact place; ArrayError if a result shares memory otherwise.

    The first ``inputs`` values are the inputs. ``again`` is the part of a schedule that reads inputs after results are
    stored; with it, no result may take an input's place. ``added`` maps a result to the input it
    is added to. The result may always overwrite that input, whose name then is not returned.
    """
    found = []
    for i, result in enumerate(places[inputs:], inputs):
        for j, other in enumerate(places[:i]):
            if not _share(result, other):
                continue
            what, with_what = values[i].name, values[j].name
            if j >= inputs:
                raise ArrayError(
                    f"'{what}' and '{with_what}' are both written to, but share memory; pass one array each."
                )
            if with_what == added.get(what) and result == other:
                continue
            if not (values[i].wide and values[j].wide and result == other):
                raise ArrayError(
                    f"'{what}' is written to, but shares memory with '{with_what}'; pass an array of its own, or "
                    "exactly an [M, D] input of its layout and element size."
                )
            if again:
                raise ArrayError(
                    f"'{what}' takes the place of '{with_what}', which kernels with {again} read again after they have "
                    "written to it; pass an array of its own, or compile with another schedule."
                )
            found.append(with_what)
    return tuple(found)


def _share(a: Placed, b: Placed) -> bool:
    """True if two arrays share a byte."""
    if a is None or b is None or a[1] is None or b[1] is None:
        return False
    return meet(a[1], b[1], a[0] + a[1].first - b[0] - b[1].first)


# ---- rows at two distances ----

Pair = tuple[Tensor, Layout]
Sides = tuple[Optional[int], Optional[int]]  # the outer and the inner distance, None where a side has one row

AGAIN = "call .contiguous() or ascontiguousarray first"


def two_distances(
    arrays: Sequence[Pair], rows: Sequence[int], written: Collection[Tensor], cut: Optional[int] = None
) -> tuple[list[Distance], int]:
    """The distances of each [M, D] array, in elements, and the number of inner rows; ``rows``: the leading dimensions.

    Rows at one distance are all inner ones, unless the ``cut`` is given. ArrayError for an array that has more than two
    distances, for two arrays that have no cut in common, or if rows of an array in ``written`` overlap.
    """
    if math.prod(rows) == 0:
        return [layout[1][-1] for _, layout in arrays], 1
    cuts = _cuts(arrays, len(rows)) if cut is None else [_known_cut(arrays, cut)]
    inner_rows = math.prod(rows[cuts[0] :])
    found: list[Distance] = []
    for value, layout in arrays:
        d = layout[1][-1]
        outer, inner = sides(layout, cuts[0]) or (None, None)
        inner = inner if inner is not None else d if outer is None else outer
        outer = inner * inner_rows if outer is None else outer
        span = Span.of(layout[1], layout[2], 1)
        if value in written and span is not None and span.overlaps:
            raise ArrayError(
                f"'{value.name}' is written to, but its rows overlap: strides {tuple(layout[2])} in elements for shape "
                f"{tuple(layout[1])}; pass a contiguous array."
            )
        found.append((outer, inner))
    return found, inner_rows


def _known_cut(arrays: Sequence[Pair], cut: int) -> int:
    """The cut; ArrayError for an array whose rows lie otherwise on one side of it."""
    for value, layout in arrays:
        if sides(layout, cut) is None:
            raise ArrayError(
                f"'{value.name}' is expected to have the rows of a sample at one distance, and samples at another, got "
                f"strides {tuple(layout[2])} in elements for shape {tuple(layout[1])}; {AGAIN}."
            )
    return cut


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


# ---- sets of rows, such as the tokens of a sample ----


class Sets(NamedTuple):
    """The sets of a call's rows, all of one length.

    lead   the leading dimensions of an array with a row for each set
    rows   those that count rows, and ``cut``: the number of them that count sets
    """

    lead: tuple[int, ...]
    rows: tuple[int, ...]
    cut: int

    @classmethod
    def among(cls, shapes: Sequence[tuple[Tensor, Sequence[int]]], rows: tuple[int, ...], d: int) -> Sets | None:
        """The sets that the arrays of sets agree on, None without one; ``rows``: the leading dimensions of others.

        An array of sets has the first of these dimensions, and behind them 1 or nothing: [B, D] or [B, 1, D] beside
        [B, T, D]. Beside [M, D] it has [N, D], and N divides M. ArrayError for another shape.
        """
        found: Sets | None = None
        for value, shape in (pair for pair in shapes if pair[0].of_sets):
            own = _sets(value, tuple(shape), rows, d)
            if found is not None and own.number != found.number:
                raise ArrayError(f"'{value.name}' has {own.number} samples, and another array {found.number}.")
            found = found or own
        return found

    @property
    def number(self) -> int:
        """How many there are."""
        return math.prod(self.lead)

    def split(self, layout: Layout) -> Layout:
        """An array with rows in one dimension, as one with a dimension of sets before it."""
        dtype, shape, strides, device = layout
        if len(shape) > len(self.rows):
            return layout
        step = strides[0]
        return dtype, (*self.rows, *shape[1:]), (self.rows[1] * step, step, *strides[1:]), device


def _sets(value: Tensor, shape: tuple[int, ...], rows: tuple[int, ...], d: int) -> Sets:
    """The sets of one array."""
    lead, cuts = shape[:-1], range(len(rows) + 1)
    whole = (*lead, *[1] * (len(rows) - len(lead)))
    cut = next((n for n in cuts if whole == (*rows[:n], *[1] * (len(rows) - n))), None)
    if len(rows) == len(lead) == 1 and cut is None and lead[0] and rows[0] % lead[0] == 0:
        rows, cut = (lead[0], rows[0] // lead[0]), 1
    if cut is None or shape[-1:] != (d,):
        which = "N divides the rows" if len(rows) == 1 else "N is one of the first dimensions, or several of them"
        raise ArrayError(
            f"'{value.name}' is expected to have a row for each sample, (N, {d}) beside ({', '.join(map(str, rows))}, "
            f"{d}), where {which}; got {shape}."
        )
    found = Sets(lead, rows, cut)
    if found.number and not math.prod(rows):
        raise ArrayError(f"'{value.name}' has {found.number} samples, which are expected to have rows, got none.")
    return found


def set_stride(value: Tensor, layout: Layout, *, written: bool) -> int:
    """Elements from one set to the next; ArrayError if they lie at several distances, or overlap in what is written."""
    _, shape, strides, _ = layout
    check_rows(value, layout)
    outer = _collapsed([(n, s) for n, s in zip(shape[:-1], strides[:-1]) if n > 1])
    if len(outer) > 1:
        raise ArrayError(
            f"'{value.name}' is expected to have samples at one distance, got strides {tuple(strides)} in elements for "
            f"shape {tuple(shape)}; {AGAIN}."
        )
    if written and outer and abs(outer[0]) < shape[-1]:
        raise ArrayError(f"'{value.name}' is written to, but its samples overlap: distance {outer[0]} in elements.")
    return outer[0] if outer else int(shape[-1])
