"""``lngen.compile``: a callable norm, on the GPU or, for NumPy arrays, by the interpreter."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder, definition_from, is_source
from lngen.compiler.ir import DType, Graph, preformatted, values_of
from lngen.compiler.lower import Plan
from lngen.compiler.spec import BACKWARD_KEYS, Spec, make_spec
from lngen.errors import LngenError, SpecError, one_of, short
from lngen.files import shown
from lngen.launch.array_norm import ArrayNorm, Gradients
from lngen.launch.arrays import library_of
from lngen.launch.driver import capture_of
from lngen.launch.runtime.direction import Call
from lngen.launch.runtime.lock_file import Lock, read_lock
from lngen.launch.runtime.numpy_arrays import host_copy
from lngen.launch.runtime.rebuilt import Rebuilt
from lngen.launch.runtime.warming import THREADS, begun
from lngen.launch.signature import Values


def compile(
    graph: str | Definition | Graph | Callable[[GraphBuilder], None],
    *,
    d: int,
    dtype: str | DType | None = None,
    schedule: Mapping[str, str] | None = None,
    lock: str | Path | None = None,
    overlap: bool = False,
    **options: Any,
) -> Norm:
    """A norm specialised on D, dtypes and options; no backward is derived, and nothing compiled, before its first use.

    graph     a name (``layernorm``, ``rmsnorm``); a function that describes a forward graph, which gets its name; a
              Definition, which names any callable; a forward Graph; a file with the text of one (``my.graph``); or
              ``module:function``
    dtype     f32 by default, or what the graph declares
    schedule  changes of the default schedule, per direction: ``{"fwd": "threads=256", "bwd": ""}``
    lock      a file that ``lngen tune`` wrote: on a GPU in that file, the schedule tuned for the nearest number of rows
              replaces the default; it changes no bit
    overlap   on sm_90 and newer, a call may start while the kernel before it on the stream drains. In the capture of a
              CUDA graph it does where that gains time; ``lngen.overlap_captured`` says where, and when not to use it.
              Otherwise it gains time only behind a kernel that allows it (griddepcontrol.launch_dependents), such as
              some GEMMs and another norm of lngen, and costs time behind all others.
    options   the spec's keys: weight, out, eps, save, wrt, of, grad, accumulate, blocks, strides, and those of the
              graph, such as gamma and beta (``lngen list``); with ``eps="run"`` every call of forward gives eps

    SpecError for a wrong option, LowerError for a graph that no kernels compute, ScheduleError (at first use) for an
    illegal schedule, LngenError for a lock file that cannot be read.
    """
    definition = definition_of(graph)
    backward: dict[str, Any] = {key: options.pop(key) for key in BACKWARD_KEYS if key in options}
    keys = {"d": d, **({} if dtype is None else {"dtype": dtype}), **options}
    forward = make_spec(definition, "fwd", keys)
    specs, locked = (forward, make_spec(definition, "bwd", {**keys, **backward})), _lock(lock)
    for said in filter(None, [locked.outdated(str(spec)) for spec in specs] if locked else []):
        warnings.warn(said, stacklevel=2)
    return Norm(*specs, _schedules(schedule), locked, _switch("overlap", overlap))


def definition_of(graph: str | Definition | Graph | Callable[[GraphBuilder], None]) -> Definition:
    """The definition of whatever ``compile`` takes; SpecError for anything else."""
    if isinstance(graph, Definition):
        return graph
    if isinstance(graph, Graph):
        return Definition.from_graph(graph)
    if isinstance(graph, str):
        if is_source(graph):
            return definition_from(graph)
        if graph not in GRAPHS:
            raise SpecError(f"There is no graph '{short(graph)}', {one_of(graph, GRAPHS)}")
        return GRAPHS[graph]
    if not callable(graph):
        raise SpecError(
            f"compile takes a graph's name, a Graph, a function that describes one, or a Definition; got "
            f"{_kind(graph)}. The function gets a GraphBuilder, which knows the dtypes."
        )
    described: Any = graph
    while isinstance(described, partial):
        described = described.func
    name = getattr(described, "__name__", None)
    if name is None:
        raise SpecError(f"compile needs a name for {_kind(graph)}: use lngen.Definition(name, describe).")
    return Definition(name, graph)


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _schedules(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
        raise SpecError(
            'schedule= is expected to be a text for each direction, such as {"fwd": "threads=256", "bwd": ""}, got '
            f"{shown(given)}."
        )
    return dict(given)


def _lock(path: Any) -> Lock | None:
    if path is not None and not isinstance(path, str | Path):
        raise SpecError(f"lock= is expected to be the path of a lock file, got {type(path).__name__}.")
    return None if path is None else read_lock(Path(path))


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{key}= is expected to be True or False, got {short(value)}.")
    return value


def _count(key: str, value: Any) -> int:
    if not isinstance(value, SupportsIndex) or index(value) < 0:
        raise SpecError(f"{key}= is expected to be a whole number from 0 on, got {short(value)}.")
    return index(value)


def _checked(direction: str) -> str:
    if not isinstance(direction, str) or direction not in ("fwd", "bwd"):
        raise SpecError(f"There is no direction '{short(direction)}', expected fwd or bwd.")
    return direction


class Norm(ArrayNorm[Call]):
    """A forward and a backward kernel set for one spec. It can be copied and pickled, whatever describes its graph.

    The backward is derived when it is first asked for, or at once if forward saves a result from which it rebuilds x.
    LowerError, then too, for a graph that no kernels compute; without ``kernels`` only the interpreter has to.
    """

    def __init__(
        self,
        forward: Spec,
        backward: Spec,
        schedules: Mapping[str, str],
        lock: Lock | None = None,
        overlap: bool = False,
        kernels: bool = True,
    ) -> None:
        for key in schedules:
            if key not in ("fwd", "bwd"):
                raise SpecError(f"schedule= takes the directions fwd and bwd, got '{short(key)}'.")
        self._made_from = forward, backward, dict(schedules), lock, overlap, kernels
        self._set_up(self._call_of(forward))
        self._backward_spec = backward
        self._cotangents = tuple(f"d{name}" for name in backward.differentiated)
        returned, added = ([f"d{n}" for n in names] for names in (backward.differentiates, backward.accumulate))
        self._gradients = Gradients(str(backward), tuple(returned), tuple(added))
        rebuilt = Rebuilt.of(backward) if backward.definition.demanded(backward.options) else None
        if rebuilt is not None:
            self._before = partial(self._check_weights, rebuilt)
        self._checked: set[tuple[int, ...]] = set()  # addresses of weights on a GPU
        self._making = threading.Lock()

    def __repr__(self) -> str:
        """The specs; what was chosen so far is in the HTML."""
        return f"<Norm {self._forward.spec}, {self._backward_spec}>"

    def _repr_html_(self) -> str:
        backward = self._backwards.get(self._cotangents, f"{self._backward_spec}\n  derived at first use")
        return preformatted(f"{self._forward}\n{backward}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as what it was made from; a copy loads kernels of its own at its first use."""
        return type(self), self._made_from

    def spec(self, direction: str = "fwd") -> Spec:
        """The spec of a direction, ``fwd`` or ``bwd``."""
        return self._backward_spec if _checked(direction) == "bwd" else self._forward.spec

    def compilation(self, direction: str = "fwd") -> Compilation:
        """The way from the spec of a direction to its kernels, under any schedule."""
        return self._call(direction).compilation

    def plan(self, direction: str = "fwd", arch: str = DEFAULT_ARCH, rows: int | None = None) -> Plan:
        """The plan on ``arch`` for aligned arrays of about ``rows`` rows (None: many)."""
        return self.kernels(direction, arch, rows).plan

    def kernels(self, direction: str = "fwd", arch: str = DEFAULT_ARCH, rows: int | None = None) -> KernelSet:
        """The same with its text and binaries, as ``lngen.packs.build`` takes it."""
        if not isinstance(arch, str):
            raise SpecError(f"arch= is expected to be an arch such as sm_90, got {type(arch).__name__}.")
        return self._call(direction).kernels(arch, rows=None if rows is None else _count("rows", rows))

    def source(
        self, direction: str = "fwd", arch: str = DEFAULT_ARCH, rows: int | None = None, *, bundle: bool = False
    ) -> str:
        """The CUDA source of a direction, for about ``rows`` rows (None: many).

        It includes lngen's device headers; ``bundle``: they are in it, so that the file stands alone.
        """
        return self.kernels(direction, arch, rows).file(arch, bundle=bundle)

    def warmup(self, device: int = 0, rows: int | None = None) -> Norm:
        """Compile and load both directions on a GPU, so that later calls with aligned arrays do not have to.

        ``rows``: about the number of rows in calls; None: any number. Few rows may have kernels of their own. A graph
        without a backward has its forward loaded. Threads compile side by side; a call of another thread waits for
        its own kernels alone.
        """
        device, rows = _count("device", device), None if rows is None else _count("rows", rows)

        def backward() -> Call | None:
            with suppress(LngenError):  # which a call of backward raises
                return self._backward
            return None

        with ThreadPoolExecutor(THREADS) as pool:
            for loaded in begun(pool, (lambda: self._forward, backward), device, rows):
                loaded.result()
        return self

    def _check_weights(self, rebuilt: Rebuilt, arrays: Sequence[Any], values: Values) -> None:
        """ArrayError for weights with which backward cannot rebuild its row; see ``forward``."""
        weights = {v.name: v for v in rebuilt.weights}
        found = zip(self._forward.inputs, arrays, strict=True)
        given = [(weights[t.name], a) for t, a in found if t.name in weights]
        numbers = {} if values.eps is None else values_of(rebuilt.graph, values.eps)
        if all(isinstance(a, np.ndarray) for _, a in given):
            rebuilt.check({v.name: a for v, a in given}, numbers)
            return
        library = library_of(given[0][1], given[0][0].name)
        addresses, layouts = library.describe([library.view(a, written=False) for _, a in given])
        key, device = (*addresses, *values.bits.values()), layouts[0][3]
        if key in self._checked or capture_of(library.stream(device)):
            return
        copies = {
            v.name: host_copy(v, at, self._forward.spec.d, device) for (v, _), at in zip(given, addresses, strict=True)
        }
        rebuilt.check(copies, numbers)
        self._checked.add(key)

    def _backward_of(self, cotangents: tuple[str, ...]) -> Call:
        """The backward for these cotangents alone; it is made once."""
        with self._making:
            if cotangents in self._backwards:
                return self._backwards[cotangents]
            of = tuple(name.removeprefix("d") for name in cotangents)
            spec = self._backward_spec if cotangents == self._cotangents else replace(self._backward_spec, of=of)
            self._backwards[cotangents] = made = self._call_of(spec)
            return made

    def _call_of(self, spec: Spec) -> Call:
        _, _, schedules, lock, overlap, kernels = self._made_from
        made = Call(spec, schedules.get(spec.direction, ""), lock, overlap)
        if kernels:
            made.check()
        return made

    def _call(self, direction: str) -> Call:
        return self._forward if _checked(direction) == "fwd" else self._backward

    @property
    def _backward(self) -> Call:
        return self._backward_of(self._cotangents)
