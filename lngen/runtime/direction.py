"""One direction of a norm: arrays are checked once per layout, then only their addresses change from call to call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lngen.compile import Compilation, KernelSet
from lngen.devices import Device, device_for
from lngen.errors import ArrayError
from lngen.ir import WIDE, D, M, Value
from lngen.ir.numerics import Array
from lngen.problem import Schedule, is_legal, parse_schedule
from lngen.runtime.array_rules import Extent, Near, check_layout, leading, near, replaced, row_stride
from lngen.runtime.arrays import Layout, Library, library_of
from lngen.runtime.launcher import Bound, Launcher, Workspaces, device_arch, live_gpu
from lngen.runtime.lock_file import Lock, Locked
from lngen.runtime.numpy_arrays import run_on_host
from lngen.schedule import row_counts, workload
from lngen.spec import Spec

WIDEST = 16  # bytes of the widest memory access; arrays aligned to it fit every plan


@dataclass
class Recipe:
    """What a call needs for arrays of one layout, in addition to their addresses.

    makers       allocate the results that are not given
    alignments   for each array, the bytes of which its address has to be a multiple in the plan for aligned arrays
    vec          the widest access, in elements, that the strides allow; None if the strides suit that plan
    narrow       the widest access if an address is not such a multiple
    near         pairs of arrays that are checked when their addresses are close
    extents      the memory of each array, None for a new one
    bounds       launches that only lack the addresses, by width of access
    """

    device: int
    rows: int
    strides: dict[str, int]
    makers: tuple[Callable[[], Any], ...]
    alignments: tuple[int, ...]
    vec: int | None
    narrow: int
    near: tuple[Near, ...]
    extents: tuple[Extent | None, ...]
    bounds: dict[int | None, Bound] = field(default_factory=dict)


class Call:
    """Runs one spec on the arrays it is given.

    ``takes`` are the parameters that a call has arrays for; ``plain``: so many positional inputs need no arranging.
    """

    def __init__(self, spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> None:
        self.spec, self._schedule, self._lock, self._overlap = spec, schedule, lock, overlap
        self.compilation = Compilation(spec)
        self.graph, self._problem = self.compilation.graph, self.compilation.problem
        self.inputs, self.outputs = self.graph.tensors, self.graph.results
        self.takes, self.plain = self.graph.params, len(self.inputs)
        self.names = tuple(v.name for v in (*self.inputs, *self.outputs))
        self._leader = self._leading_input()
        self._schedules: dict[tuple[str, Device | None, int, Locked | None], Schedule] = {}
        self._launchers: dict[tuple[int, Schedule], Launcher] = {}
        self._workspaces = Workspaces()
        self._loading = threading.Lock()
        self._local = threading.local()

    def _leading_input(self) -> int:
        """The input that gives rows, library and device: if possible one that forward has checked."""
        forward = self.spec.forward()
        known = {v.name for v in (*forward.params, *forward.results)}
        rated = enumerate(self.inputs)
        return max(rated, key=lambda e: (M in e[1].type.axes, e[1].name in known, D in e[1].type.axes, -e[0]))[0]

    # ---- planning ----

    def kernels(
        self, arch: str, vec: int | None = None, rows: int | None = None, gpu: Device | None = None
    ) -> KernelSet:
        """The kernels for ``arch`` and about ``rows`` rows (None: many).

        ``vec`` is the widest access, in elements, for arrays that do not suit the default. The lock file may have a
        schedule for about as many rows on the ``gpu`` (None: any GPU of that arch).
        """
        device = gpu.name if gpu else None
        each = workload(self._problem, rows, gpu or device_for(arch))
        locked = self._lock.nearest(str(self.spec), rows, device=device, arch=arch) if self._lock else None
        if (arch, gpu, each, locked) not in self._schedules:
            base = self._lock.schedule(self.compilation, rows, device=device, arch=arch) if self._lock else None
            base = base or self.compilation.schedule(arch, rows=rows, device=gpu)
            self._schedules[arch, gpu, each, locked] = parse_schedule(self._schedule, base)
        schedule = self._schedules[arch, gpu, each, locked]
        if vec is not None and (vec < schedule.vec or schedule.form == "tma_unaligned"):
            narrow = replace(schedule, vec=min(vec, schedule.vec))
            # A form that needs wide accesses or contiguous rows is replaced by the best form that does not.
            legal = schedule.form != "tma_unaligned" and is_legal(narrow, self._problem)
            schedule = narrow if legal else self.compilation.schedule(arch, vec=vec, rows=rows, device=gpu)
        return self.compilation.kernels(schedule)

    def launcher(self, device: int, vec: int | None = None, rows: int | None = None) -> Launcher:
        """The kernels loaded on a device."""
        arch = device_arch(device)
        with self._loading:
            kernels = self.kernels(arch, vec, rows, live_gpu(device))
            key = device, kernels.plan.schedule
            if key not in self._launchers:
                self._launchers[key] = Launcher(kernels.plan, kernels.cubin(arch).image, device, self._overlap)
            return self._launchers[key]

    def warm(self, device: int, rows: int | None = None) -> None:
        """Load the kernels for about that many rows on a device, or (None) for any number of rows."""
        gpu = live_gpu(device)
        locked = self._lock.candidates(str(self.spec), device=gpu.name) if self._lock else []
        every = [*row_counts(self._problem, gpu), *(e.rows for e in locked)]
        for count in every if rows is None else [rows]:
            self.launcher(device, rows=count)

    # ---- calling ----

    def arrange(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """Positional and named inputs in the graph's order; ArrayError if one is missing or too many."""
        names = [v.name for v in self.inputs]
        given = dict(zip(names, inputs, strict=False))
        unknown = [n for n in named if n not in names or n in given]
        if unknown == ["eps"] and self.spec.definition.builder(self.spec.options).takes_eps:
            raise ArrayError(
                f"'{self.spec}' has eps={self.spec.eps} built in, got eps= in a call; compile with eps=\"run\" to give "
                "it in every call."
            )
        if len(inputs) > len(names) or unknown:
            got = [*(f"{len(inputs)} by position" for _ in inputs[:1]), *unknown]
            raise ArrayError(f"'{self.spec}' takes {', '.join(names)}, each once; got {', '.join(got)}.")
        given |= named
        return [self._present(n, given.get(n)) for n in names]

    def _present(self, name: str, array: Any) -> Any:
        """The array of an input; ArrayError if there is none."""
        if array is not None:
            return array
        optional = name in self.spec.definition.builder(self.spec.options).declared
        hint = f"; for a norm without it, compile with {name}=False ({name}=no in a spec)" if optional else ""
        raise ArrayError(f"'{self.spec}' expects the input '{name}', which is missing{hint}.")

    def __call__(self, arrays: Sequence[Any], out: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results, new or from ``out``, and the names of the inputs that they overwrite.

        ``arrays`` are in the graph's order. This runs on every call and host time counts: hence the list
        comprehensions, and one remembered recipe per thread.
        """
        given = out if type(out) is tuple else self._given(out)
        first = arrays[self._leader]
        if isinstance(first, np.ndarray):
            arrays = [self._present(v.name, a) for v, a in zip(self.inputs, arrays, strict=True)]
            return self._on_host(arrays, self._given(given))
        library = library_of(first, self.inputs[self._leader].name)
        absent = tuple([a is None for a in given])
        tensors = [*arrays, *given]
        if True in absent:
            tensors = [*arrays, *[a for a in given if a is not None]]
        try:
            pointers, layouts = library.describe(tensors)
        except (AttributeError, RuntimeError):  # an array of another library is viewed, or refused
            pointers, layouts = library.describe(self._views(library, arrays, given))
        last = self._local.__dict__.get("last")
        if last is not None and last[0] == layouts and last[1] == absent and last[2] is library:
            recipe: Recipe = last[3]
        else:
            recipe = self._recall(library, layouts, tuple([a is None for a in self._given(given)]))
            self._local.last = layouts, absent, library, recipe
        if True in absent:
            given, pointers = self._fill(library, recipe, given, pointers)
        return given, self._launch(library, recipe, pointers)

    def _on_host(self, arrays: list[Any], given: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[str, ...]]:
        return run_on_host(self.graph, self.spec.d, self._leader, arrays, given)

    def _given(self, out: Any) -> tuple[Any, ...]:
        """The arrays to write, None for a new array."""
        count = len(self.outputs)
        if out is None:
            return (None,) * count
        if not isinstance(out, tuple | list):
            return (out, *((None,) * (count - 1)))
        if len(out) != count:
            names = ", ".join(v.name for v in self.outputs)
            raise ArrayError(f"out= is expected to be one array or {count} ({names}), got {len(out)}.")
        return tuple(out)

    def _fill(
        self, library: Library, recipe: Recipe, given: tuple[Any, ...], pointers: list[int]
    ) -> tuple[tuple[Any, ...], list[int]]:
        """New arrays where none was given, and the addresses of all."""
        results = tuple([make() if a is None else a for make, a in zip(recipe.makers, given, strict=True)])
        return results, pointers[: len(self.inputs)] + library.describe(results)[0]

    def _views(self, library: Library, arrays: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        inputs = [self._view(library, self._present(v.name, a), v) for a, v in zip(arrays, self.inputs, strict=True)]
        results = zip(self._given(given), self.outputs, strict=True)
        return inputs + [self._view(library, a, v, written=True) for a, v in results if a is not None]

    def _view(self, library: Library, array: Any, value: Value, *, written: bool = False) -> Any:
        kind = f"{type(array).__module__}.{type(array).__name__}"
        if isinstance(array, np.ndarray) or library_of(array, value.name) is not library:
            raise ArrayError(
                f"'{value.name}' is expected to be an array of the same library as "
                f"'{self.inputs[self._leader].name}', got {kind}."
            )
        try:
            return library.view(array, written=written)
        except (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise ArrayError(f"'{value.name}', of {kind}, is not an array that can be used: {e}.") from e

    def _launch(self, library: Library, recipe: Recipe, pointers: list[int]) -> tuple[str, ...]:
        """Enqueue the kernels that suit these addresses; names of the inputs that a result overwrites."""
        together = 0
        for pointer in pointers:
            together |= pointer
        vec = recipe.vec if together % WIDEST == 0 else self._vec_for(recipe, pointers)
        bound = recipe.bounds.get(vec)
        if bound is None:
            bound = recipe.bounds[vec] = self._bind(recipe, vec)
        overwritten: tuple[str, ...] = ()
        for i, j, low, high in recipe.near:
            if low < pointers[i] - pointers[j] < high:  # one hit suffices: all arrays are examined
                overwritten = self._overwritten(recipe, pointers, bound)
                break
        stream = library.stream(recipe.device)
        if not bound.workspace_bytes:
            bound(pointers, 0, stream)
            return overwritten
        workspace = self._workspaces.of(recipe.device, stream, bound.name)
        with workspace.lock:
            bound(pointers, workspace.fit(library, recipe.device, stream, bound), stream)
        return overwritten

    def _bind(self, recipe: Recipe, vec: int | None) -> Bound:
        """The launch of the kernels whose accesses are up to ``vec`` elements wide."""
        return self.launcher(recipe.device, vec, recipe.rows).bind(recipe.rows, recipe.strides)

    def _overwritten(self, recipe: Recipe, pointers: list[int], bound: Bound) -> tuple[str, ...]:
        """The inputs that a result overwrites; ArrayError where arrays share memory in any other way."""
        arrays = [extent.at(p) if extent else None for extent, p in zip(recipe.extents, pointers, strict=True)]
        return replaced((*self.inputs, *self.outputs), arrays, len(self.inputs), bound.reads_again)

    # ---- once per layout ----

    def _recall(self, library: Library, layouts: list[Layout], absent: tuple[bool, ...]) -> Recipe:
        """The recipe for these layouts and for the outputs that are ``absent``; made if it is new to this thread."""
        local = self._local
        if not hasattr(local, "recipes"):
            local.recipes = {}
        key = library, absent, tuple(layouts)
        if key not in local.recipes:
            inputs, rest = layouts[: len(self.inputs)], iter(layouts[len(self.inputs) :])
            outs = [None if missing else next(rest) for missing in absent]
            local.recipes[key] = self._recipe(library, inputs, outs)
        recipe: Recipe = local.recipes[key]
        return recipe

    def _recipe(self, library: Library, layouts: list[Layout], outs: list[Layout | None]) -> Recipe:
        """Check every layout, before any GPU work."""
        layouts = [library.in_elements(layout) for layout in layouts]
        outs = [layout and library.in_elements(layout) for layout in outs]
        d = self.spec.d
        rows = leading(self.inputs[self._leader], layouts[self._leader][1], d)
        device = layouts[self._leader][3]
        count = math.prod(rows)
        values = (*self.inputs, *self.outputs)
        strides = {}
        extents: list[Extent | None] = []
        for value, layout in zip(values, (*layouts, *outs), strict=True):
            if layout is None:
                strides[value.name] = d
                extents.append(None)
                continue
            check_layout(value, layout, library.dtype(layout[0]), rows, d, device)
            strides[value.name] = row_stride(value, layout, written=value in self.outputs)
            extents.append(Extent.of(value, count, d, strides[value.name]))
        plan = self.launcher(device, rows=count).plan
        alignments = tuple(plan.alignment(v) if D in v.type.axes else v.type.dtype.size for v in values)
        rated = zip(values, alignments, strict=True)
        wide = [(strides[v.name], v.type.dtype.size, n) for v, n in rated if v.type.axes == WIDE]
        whole = all(stride == d if plan.contiguous else stride * size % n == 0 for stride, size, n in wide)
        # Bulk copies take accesses of a whole chunk: rows with other strides are read half a chunk at a time, or less.
        narrow = self._problem.chunk // 2 if plan.schedule.form in ("tma", "tma_unaligned") else plan.schedule.vec
        while any(stride % narrow for stride, _, _ in wide):
            narrow //= 2
        makers = tuple(library.maker(v.type.shape(rows, d), v.type.dtype, device) for v in self.outputs)
        close = near(extents, len(self.inputs))
        vec = None if whole else narrow
        return Recipe(device, count, strides, makers, alignments, vec, narrow, close, tuple(extents))

    def _vec_for(self, recipe: Recipe, pointers: list[int]) -> int | None:
        """The widest access for which every pointer is aligned; None: that of the plan for aligned arrays."""
        if recipe.vec is None and not any(pointer % n for pointer, n in zip(pointers, recipe.alignments, strict=True)):
            return None
        vec, values = recipe.narrow, (*self.inputs, *self.outputs)
        for value, pointer in zip(values, pointers, strict=True):
            size = value.type.dtype.size
            if pointer % size:
                raise ArrayError(
                    f"'{value.name}' is expected at an address that is a multiple of its element size, {size} bytes, "
                    f"got one {pointer % size} bytes past such an address; copy it to a new array."
                )
            while D in value.type.axes and pointer % min(vec * size, WIDEST):
                vec //= 2
        return vec
