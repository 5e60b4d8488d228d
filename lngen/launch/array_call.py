"""A call on arrays: they are checked once per layout, then only their addresses change from call to call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from ..errors import ArrayError
from ..rules import Distance
from .array_rules import (
    Near,
    Sets,
    Span,
    arranged,
    check_layout,
    check_rows,
    column_stride,
    leading,
    near,
    present,
    replaced,
    row_stride,
    set_stride,
    span_of,
    two_distances,
)
from .arrays import Layout, Library, library_of
from .kernels import NO_BITS, Bound, Described, Loaded, Workspaces
from .signature import NO_VALUES, Signature, Tensor, Values

WIDEST = 16  # bytes of the widest memory access; arrays aligned to it fit every plan


# What calls have launched stays loaded: a CUDA graph may have the kernels, and outlive whoever captured it.
LAUNCHED: set[Loaded] = set()


class NoHostArrays:
    """The type of host arrays for calls that take none: nothing is an instance."""


class Recipe(NamedTuple):
    """What a call needs for arrays of one layout, in addition to their addresses.

    strides      elements from row to row of each array, or from column to column of a given one; inner: the number of
                 rows before the outer distance
    makers       allocate the results that are not given
    alignments   for each array, the bytes of which its address has to be a multiple in the kernels for aligned arrays
    vec          the widest access, in elements, that the strides allow; None if the strides suit those kernels
    narrow       the widest access if an address is not such a multiple
    near         pairs of arrays that are checked when their addresses are close
    spans        the memory of each array, None for a new one
    bounds       launches that only lack the addresses, by width of access
    overlaps     the inputs that kernels overwrite, by kernels and by addresses relative to the first
    last         the addresses of the last call, its launch, and the inputs that it overwrote
    """

    device: int
    rows: int
    strides: dict[str, Distance]
    inner: int
    makers: tuple[Callable[[], Any], ...]
    alignments: tuple[int, ...]
    vec: int | None
    narrow: int
    near: tuple[Near, ...]
    spans: tuple[Span | None, ...]
    bounds: dict[int | None, Bound]
    overlaps: dict[tuple[str, tuple[int, ...]], tuple[str, ...]]
    last: list[Any]


class _Thread:
    """What a thread remembers: its recipes, and the last call's layouts, absent results, library and recipe.

    It is found by the number of the thread, not through threading.local: a thread that C++ made, such as autograd's,
    may get a new Python state for each call, and with it nothing of what it had.
    """

    __slots__ = ("last", "recipes")

    def __init__(self) -> None:
        self.last: tuple[list[Layout], tuple[bool, ...], Library, Recipe] | None = None
        self.recipes: dict[Any, Recipe] = {}


class ArrayCall(ABC):
    """Runs the kernels of one spec on the arrays it is given.

    signature   what it takes and returns
    tensors     inputs, then outputs; ``names``: theirs
    """

    host_type: type[Any] = NoHostArrays  # of arrays that ``on_host`` takes
    host = ""  # what messages say of them
    about_eps = ""  # what to do about a built-in eps, the end of a sentence

    def __init__(self, signature: Signature) -> None:
        self.signature = s = signature
        self.text, self.d, self.strides, self.leader, self.added = s.text, s.d, s.strides, s.leader, s.added
        self.inputs, self.outputs = s.inputs, s.outputs
        self.tensors = (*self.inputs, *self.outputs)
        self.names = tuple([t.name for t in self.tensors])
        self.workspaces = Workspaces()
        self._threads: dict[int, _Thread] = {}

    # ---- what differs between a norm that compiles and a pack ----

    @abstractmethod
    def loaded(self, device: int, vec: int | None, rows: int) -> Loaded:
        """The kernels for about that many rows on a device; ``vec``: their accesses are at most that many elements."""

    @abstractmethod
    def narrower(self, described: Described) -> int:
        """The widest access, in elements, for arrays that do not suit these kernels."""

    @abstractmethod
    def about(self, name: str) -> str:
        """What to do about an input that is missing, or that the spec does not have, the end of a sentence."""

    def on_host(
        self, arrays: Sequence[Any], given: tuple[Any, ...], values: Values
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results for arrays of ``host_type``."""
        raise AssertionError("there are no instances of host_type")

    # ---- calling ----

    def arrange(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """Positional and named inputs in order; ArrayError if one is missing or too many."""
        return arranged(self.text, [t.name for t in self.inputs], inputs, named, self.about)

    def values(self, eps: object) -> Values:
        """The numbers that a call with this eps passes by value; ArrayError if it is missing, or not wanted."""
        return self.signature.values(eps, self.about_eps)

    def lead(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The dimensions that count rows, from the shapes of the inputs; ArrayError for features of another length."""
        return leading(self.inputs[self.leader], shapes[self.leader], self.d)

    def made(self, shapes: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The shapes and strides of new outputs, from the shapes of the inputs."""
        rows, d = self.lead(shapes), self.d
        sets = Sets.among([*zip(self.inputs, shapes)], rows, d)
        own = sets.lead if sets else 0
        return [(t.shape(rows, d, own), t.strides(rows, d, own)) for t in self.outputs]

    def _present(self, name: str, array: Any) -> Any:
        return present(self.text, name, array, self.about)

    def __call__(
        self, arrays: Sequence[Any], out: Any, values: Values = NO_VALUES
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results, new or from ``out``, and the names of the inputs that they overwrite.

        ``arrays`` are in order, ``values`` the numbers that are passed by value. This runs on every
        call and host time counts: hence the list comprehensions, and one remembered recipe per thread.
        """
        given = out if type(out) is tuple else self._given(out)
        first = arrays[self.leader]
        if isinstance(first, self.host_type):
            arrays = [self._present(t.name, a) for t, a in zip(self.inputs, arrays)]
            return self.on_host(arrays, self._given(given), values)
        library = library_of(first, self.inputs[self.leader].name)
        absent = tuple([a is None for a in given])
        tensors = [*arrays, *given]
        if True in absent:
            tensors = [*arrays, *[a for a in given if a is not None]]
        try:
            pointers, layouts = library.describe(tensors)
        except (AttributeError, RuntimeError):  # an array of another library is viewed, or refused
            pointers, layouts = library.describe(self._views(library, arrays, given))
        thread = self._threads.get(get_ident()) or self._threads.setdefault(get_ident(), _Thread())
        last = thread.last
        if last is not None and last[0] == layouts and last[1] == absent and last[2] is library:
            recipe: Recipe = last[3]
        else:
            recipe = self._recall(thread, library, layouts, tuple([a is None for a in self._given(given)]))
            thread.last = layouts, absent, library, recipe
        if True in absent:
            given, pointers = self._fill(library, recipe, given, pointers)
        return given, self.launch(library, recipe, pointers, values.bits)

    def _given(self, out: Any) -> tuple[Any, ...]:
        """The arrays to write, None for a new array."""
        count = len(self.outputs)
        if out is None:
            return (None,) * count
        if not isinstance(out, (tuple, list)):
            return (out, *((None,) * (count - 1)))
        if len(out) != count:
            names = ", ".join(t.name for t in self.outputs)
            raise ArrayError(f"out= is expected to be one array or {count} ({names}), got {len(out)}.")
        return tuple(out)

    def _fill(
        self, library: Library, recipe: Recipe, given: tuple[Any, ...], pointers: list[int]
    ) -> tuple[tuple[Any, ...], list[int]]:
        """New arrays where none was given, and the addresses of all."""
        new = [make() for make, a in zip(recipe.makers, given) if a is None]
        arrays, made, known = iter(new), iter(library.describe(new)[0]), iter(pointers[len(self.inputs) :])
        results = tuple([next(arrays) if a is None else a for a in given])
        return results, pointers[: len(self.inputs)] + [next(made) if a is None else next(known) for a in given]

    def _views(self, library: Library, arrays: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        inputs = [self._view(library, self._present(t.name, a), t) for a, t in zip(arrays, self.inputs)]
        results = zip(self._given(given), self.outputs)
        return inputs + [self._view(library, a, t, written=True) for a, t in results if a is not None]

    def _view(self, library: Library, array: Any, tensor: Tensor, *, written: bool = False) -> Any:
        kind = f"{type(array).__module__}.{type(array).__name__}"
        if isinstance(array, self.host_type) or library_of(array, tensor.name) is not library:
            raise ArrayError(
                f"'{tensor.name}' is expected to be an array of the same library as "
                f"'{self.inputs[self.leader].name}', got {kind}."
            )
        try:
            return library.view(array, written=written)
        except (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise ArrayError(f"'{tensor.name}', of {kind}, is not an array that can be used: {e}.") from e

    def launch(
        self, library: Library, recipe: Recipe, pointers: list[int], bits: Mapping[str, int] = NO_BITS
    ) -> tuple[str, ...]:
        """Enqueue the kernels that suit these addresses; names of the inputs that a result overwrites.

        ``bits``: of the numbers that are passed by value, by name.
        """
        bound: Bound
        overwritten: tuple[str, ...]
        known, bound, overwritten = recipe.last
        if known != pointers:
            bound, overwritten = self._bound(recipe, pointers)
            recipe.last[:] = pointers, bound, overwritten
        if bits:
            bound.give(bits)
        stream = library.stream(recipe.device)
        if not bound.workspace_bytes:
            bound(pointers, 0, stream)
            return overwritten
        workspace = self.workspaces.of(recipe.device, stream, bound.name)
        with workspace.lock:
            bound(pointers, workspace.fit(library, recipe.device, stream, bound), stream)
        return overwritten

    def _bound(self, recipe: Recipe, pointers: list[int]) -> tuple[Bound, tuple[str, ...]]:
        """The launch that suits these addresses, and the inputs that it overwrites."""
        together = 0
        for pointer in pointers:
            together |= pointer
        vec = recipe.vec if together % WIDEST == 0 else self._vec_for(recipe, pointers)
        bound = recipe.bounds.get(vec)
        if bound is None:
            recipe.bounds[vec] = bound = self.bind(recipe, vec)
        for i, j, low, high in recipe.near:
            if low < pointers[i] - pointers[j] < high:  # one hit suffices: all arrays are examined
                return bound, self._overwritten(recipe, pointers, bound)
        return bound, ()

    def bind(self, recipe: Recipe, vec: int | None) -> Bound:
        """The kernels for that width of access, without addresses. They stay loaded when the call is gone."""
        loaded = self.loaded(recipe.device, vec, recipe.rows)
        LAUNCHED.add(loaded)
        return loaded.bind(recipe.rows, recipe.strides, recipe.inner)

    def _overwritten(self, recipe: Recipe, pointers: list[int], bound: Bound) -> tuple[str, ...]:
        """The inputs that a result overwrites; ArrayError where arrays share memory in any other way."""
        key = bound.name, tuple([p - pointers[0] for p in pointers])
        if key not in recipe.overlaps:
            places = [(p, span) if span else None for p, span in zip(pointers, recipe.spans)]
            count = len(self.inputs)
            if len(recipe.overlaps) >= MOST_OVERLAPS:
                recipe.overlaps.clear()
            recipe.overlaps[key] = replaced(self.tensors, places, count, bound.reads_again, self.added)
        return recipe.overlaps[key]

    # ---- once per layout ----

    def _recall(self, thread: _Thread, library: Library, layouts: list[Layout], absent: tuple[bool, ...]) -> Recipe:
        """The recipe for these layouts and for the outputs that are ``absent``; made if it is new to the thread."""
        key = library, absent, tuple(layouts)
        if key not in thread.recipes:
            inputs, rest = layouts[: len(self.inputs)], iter(layouts[len(self.inputs) :])
            outs = [None if missing else next(rest) for missing in absent]
            thread.recipes[key] = self.recipe(library, inputs, outs)
        return thread.recipes[key]

    def recipe(self, library: Library, layouts: Sequence[Layout], outs: Sequence[Layout | None]) -> Recipe:
        """What a call needs for arrays of these layouts, which it checks; ``outs``: None for a new output.

        One thread at a time may launch with it.
        """
        layouts = [library.in_elements(layout) for layout in layouts]
        outs = [layout and library.in_elements(layout) for layout in outs]
        d = self.d
        rows = self.lead([layout[1] for layout in layouts])
        device, count = layouts[self.leader][3], math.prod(rows)
        given = [*zip(self.tensors, (*layouts, *outs))]
        for tensor, layout in given:
            if layout is not None:
                check_layout(tensor, layout, library.dtype(layout[0]), rows, d, device, self.host)
        there = [(t, layout) for t, layout in given if layout is not None]
        sets = Sets.among([(t, layout[1]) for t, layout in there], rows, d)
        strides, inner = self._distances(there, rows, sets)
        spans = [
            None
            if layout is None
            else Span.of(layout[1], [s * t.size for s in layout[2]], t.size)
            if t.of_table
            else span_of(t, count, d, strides[t.name], inner)
            for t, layout in given
        ]
        described = self.loaded(device, None, count).described
        asked = {t["name"]: t for t in described["tensors"]}
        alignments = tuple([asked[t.name]["alignment"] for t in self.tensors])
        strided = [t for t in self.tensors if t.wide or t.of_sets or t.of_table]
        wide = [(step, asked[t.name]) for t in strided for step in _steps(strides[t.name])]
        whole = all([step == d if t["strides"][0] == "D" else step % t["stride_multiple"] == 0 for step, t in wide])
        narrow = self.narrower(described)
        while any(step % narrow for step, _ in wide):
            narrow //= 2
        made = self.made([layout[1] for layout in layouts])
        makers = tuple([library.maker(shape, t.dtype, device, steps) for t, (shape, steps) in zip(self.outputs, made)])
        close = near(spans, len(self.inputs))
        return Recipe(
            device,
            count,
            strides,
            inner,
            makers,
            alignments,
            None if whole else narrow,
            narrow,
            close,
            tuple(spans),
            {},
            {},
            [None, None, ()],
        )

    def _distances(
        self, arrays: Sequence[tuple[Tensor, Layout]], rows: tuple[int, ...], sets: Sets | None
    ) -> tuple[dict[str, Distance], int]:
        """Elements from row to row by name, or from column to column of a given array, and the number of inner rows.

        Those of a set are inner rows.

        ArrayError if rows lie otherwise, or overlap in an array that is written.
        """
        strides: dict[str, Distance] = {
            t.name: (self.d, 0) if t.of_sets else self.d for t in self.outputs if not t.by_columns
        }
        two: list[tuple[Tensor, Layout]] = []
        for tensor, layout in arrays:
            if self.strides == 2 and tensor.wide:
                check_rows(tensor, layout)
                two.append((tensor, sets.split(layout) if sets else layout))
            elif tensor.of_sets:
                strides[tensor.name] = set_stride(tensor, layout, written=tensor in self.outputs), 0
            elif tensor.by_columns:
                strides[tensor.name] = column_stride(tensor, layout)
            else:
                strides[tensor.name] = row_stride(tensor, layout, written=tensor in self.outputs)
        cut = sets.cut if sets else None
        found, inner = two_distances(two, sets.rows if sets else rows, self.outputs, cut)
        strides.update({t.name: one for (t, _), one in zip(two, found)})
        return strides, inner

    def _vec_for(self, recipe: Recipe, pointers: list[int]) -> int | None:
        """The widest access for which every pointer is aligned; None: that of the kernels for aligned arrays."""
        if recipe.vec is None and not any([pointer % n for pointer, n in zip(pointers, recipe.alignments)]):
            return None
        vec = recipe.narrow
        for tensor, pointer in zip(self.tensors, pointers):
            size = tensor.size
            if pointer % size:
                raise ArrayError(
                    f"'{tensor.name}' is expected at an address that is a multiple of its element size, {size} bytes, "
                    f"got one {pointer % size} bytes past such an address; copy it to a new array."
                )
            while tensor.features and pointer % min(vec * size, WIDEST):
                vec //= 2
        return vec


MOST_OVERLAPS = 64  # sets of addresses that a recipe remembers


def _steps(distance: Distance) -> tuple[int, ...]:
    """The distances of rows, one or two."""
    return distance if isinstance(distance, tuple) else (distance,)
