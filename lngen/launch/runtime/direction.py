"""One direction of a norm that compiles: its kernels for an arch, rows and a layout, and the eps that a call gives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import Device, device_for
from lngen.compiler.ir import Graph
from lngen.compiler.problem import ANY, Schedule, is_legal, parse_schedule
from lngen.compiler.schedule import row_counts, workload
from lngen.compiler.spec import Spec
from lngen.errors import MissingError
from lngen.launch.array_call import ArrayCall
from lngen.launch.kernels import Described, Loaded
from lngen.launch.pack import Pack
from lngen.launch.runtime.environment_packs import lacking, packs_with
from lngen.launch.runtime.launcher import Launcher, device_arch, live_gpu
from lngen.launch.runtime.lock_file import Lock, Locked
from lngen.launch.runtime.numpy_arrays import check_classes, check_positive, run_on_host
from lngen.launch.runtime.remembered import Choice, Outline
from lngen.launch.signature import Signature, Values

MANY_ROWS = 2**40  # of which a pack has a class


class _Wanted(NamedTuple):
    """What decides a schedule beside the spec: the arch, the GPU (None: any), the workload class, the locked choice."""

    arch: str
    gpu: Device | None
    workload: int
    locked: Locked | None


class Call(ArrayCall):
    """Runs one spec on the arrays it is given.

    Kernels of a pack of LNGEN_PACKS come first, then what an earlier process chose and left in the cache. For neither
    the graph is derived; it is for what has to be compiled, for NumPy arrays, and when it is asked for.
    """

    host_type = np.ndarray
    host = ", or pass NumPy arrays"
    about_eps = '; compile with eps="run" to give it in every call'

    def __init__(self, spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> None:
        self.spec, self._schedule, self._lock, self._overlap = spec, schedule, lock, overlap
        self.compilation = Compilation(spec)
        own = schedule or (lock and lock.candidates(str(spec)))  # which no pack has
        self._packs = () if own else packs_with(self.compilation, overlap)
        described = self._packs[0].described(str(spec)) if self._packs else self._outline.call
        super().__init__(Signature.of(described))
        self._schedules: dict[_Wanted, Schedule] = {}
        self._launchers: dict[tuple[int, _Wanted, int | None], Loaded] = {}
        self._loaded: dict[tuple[int, str], Loaded] = {}
        self._loading: dict[tuple[int, _Wanted, int | None], threading.Lock] = {}

    @cached_property
    def _recalled_outline(self) -> Outline | None:
        return Outline.recalled(self.spec)

    @cached_property
    def _outline(self) -> Outline:
        return self._recalled_outline or Outline.of(self.compilation)

    @property
    def graph(self) -> Graph:
        """The graph that fixes every bit."""
        return self.compilation.graph

    def check(self) -> None:
        """LowerError if no kernels compute the graph; it has some if they were compiled before."""
        if not self._packs and self._recalled_outline is None:
            self.compilation.check()

    # ---- planning ----

    def __str__(self) -> str:
        """The spec, the packs that have it, and the schedules that were chosen so far, a line each."""
        chosen = [f"of the pack '{pack.folder}'" for pack in self._packs]
        chosen += dict.fromkeys(f"{wanted.arch}: {schedule}" for wanted, schedule in self._schedules.items())
        return "\n  ".join([str(self.spec), *(chosen or [f"schedule chosen at first use {self._schedule}".rstrip()])])

    def kernels(
        self, arch: str, vec: int | None = None, rows: int | None = None, gpu: Device | None = None
    ) -> KernelSet:
        """The kernels for ``arch`` and about ``rows`` rows (None: many).

        ``vec`` is the widest access, in elements, for arrays that do not suit the default. The lock file may have a
        schedule for about as many rows on the ``gpu`` (None: any GPU of that arch).
        """
        wanted = self._wanted(arch, rows, gpu)
        if wanted not in self._schedules:
            device = gpu.name if gpu else None
            base = self._lock.schedule(self.compilation, rows, device=device, arch=arch) if self._lock else None
            base = base or self.compilation.schedule(arch, rows=rows, device=gpu)
            self._schedules[wanted] = parse_schedule(self._schedule, base)
        schedule = self._schedules[wanted]
        if vec is not None and (vec < schedule.vec or schedule.form == "tma_unaligned"):
            narrow = replace(schedule, vec=min(vec, schedule.vec))
            # A form that needs wide accesses or contiguous rows is replaced by the best form that does not.
            legal = schedule.form != "tma_unaligned" and is_legal(narrow, self._outline.problem)
            schedule = narrow if legal else self.compilation.schedule(arch, vec=vec, rows=rows, device=gpu)
        return self.compilation.kernels(schedule)

    def _wanted(self, arch: str, rows: int | None, gpu: Device | None) -> _Wanted:
        """What decides the schedule for about that many rows, beside the spec."""
        each = workload(self._outline.problem, rows, gpu or device_for(arch))
        device = gpu.name if gpu else None
        locked = self._lock.nearest(str(self.spec), rows, device=device, arch=arch) if self._lock else None
        return _Wanted(arch, gpu, each, locked)

    def launcher(self, device: int, vec: int | None = None, rows: int | None = None) -> Loaded:
        """The kernels loaded on a device: those of a pack, those that were chosen before, or else compiled now."""
        if vec is None and (pack := self._pack_for(device)):
            return pack.kernels(self.text, device, MANY_ROWS if rows is None else rows)
        arch, gpu = device_arch(device), live_gpu(device)
        key = device, self._wanted(arch, rows, gpu), vec
        with self._loading.setdefault(key, threading.Lock()):  # others may load other kernels meanwhile
            if key not in self._launchers:
                self._launchers[key] = self._recalled(*key) or self._made(*key, rows)
            return self._launchers[key]

    def _pack_for(self, device: int) -> Pack | None:
        """The first pack that has the spec for a device."""
        return next((pack for pack in self._packs if pack.suits(self.text, device)), None)

    def _recalled(self, device: int, wanted: _Wanted, vec: int | None) -> Loaded | None:
        """The kernels that an earlier process chose, loaded; None if there are none."""
        choice = Choice.recalled(self.spec, self._schedule, wanted, vec)
        if choice is None:
            return None
        text = choice.described["schedule"]["text"]
        if vec is None:
            self._schedules[wanted] = parse_schedule(text, ANY)
        given = choice.described, choice.binary.image, device, self._overlap, lambda _: choice.shared
        return self._loaded.get((device, text)) or self._loaded.setdefault((device, text), Loaded(*given))

    def _made(self, device: int, wanted: _Wanted, vec: int | None, rows: int | None) -> Loaded:
        """The kernels compiled and loaded, and left for later processes; MissingError where nothing compiles."""
        kernels = self.kernels(wanted.arch, vec, rows, wanted.gpu)
        place = device, str(kernels.plan.schedule)
        try:
            image = kernels.cubin(wanted.arch).image
        except MissingError as error:
            raise lacking(self.spec, wanted.arch, vec, error) from error
        if place not in self._loaded:
            self._loaded[place] = Launcher(kernels.plan, image, device, self._overlap)
        loaded = self._loaded[place]
        if (binary := kernels.cubins.get(wanted.arch)) is not None:
            self._outline.remember(self.spec)
            Choice(loaded.described, binary, tuple(loaded.shared)).remember(self.spec, self._schedule, wanted, vec)
        return loaded

    def row_counts(self, device: int, rows: int | None = None) -> list[int | None]:
        """Numbers of rows whose kernels are all that calls take: of about that many rows, or (None) of any number."""
        if rows is not None:
            return [rows]
        if pack := self._pack_for(device):
            return [*pack.row_counts(self.text, device)]
        gpu = live_gpu(device)
        locked = self._lock.candidates(str(self.spec), device=gpu.name) if self._lock else []
        return [*row_counts(self._outline.problem, gpu), *(e.rows for e in locked)]

    # ---- calling ----

    def loaded(self, device: int, vec: int | None, rows: int) -> Loaded:
        """As ``launcher``."""
        return self.launcher(device, vec, rows)

    def narrower(self, described: Described) -> int:
        """Bulk copies take accesses of a whole chunk: other rows are read half a chunk at a time, or less."""
        form, vec = described["schedule"]["form"], int(described["schedule"]["vec"])
        if form == "tma_unaligned":
            return self._outline.problem.chunk // 2
        return vec // 2 if form == "tma" else vec

    def about(self, name: str) -> str:
        """The option of the graph that leaves an input out, or adds it."""
        return about_input(self.spec, name)

    def on_host(
        self, arrays: Sequence[Any], given: tuple[Any, ...], values: Values
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results of the interpreter."""
        check_positive(self.spec.positive_numbers, self.inputs, arrays)
        check_classes(self.spec.classes, self.spec.d, self.inputs, arrays)
        return run_on_host(self, self.graph, arrays, given, values.eps)


def about_input(spec: Spec, name: str) -> str:
    """What to do about an input that is missing or that the spec lacks, if the graph has an option of its name."""
    option = spec.definition.builder(spec.options).declared.get(name)
    if option is None or not isinstance(option.default, bool):
        return ""
    if dict(spec.chosen).get(name, option.default):
        return f"; for a norm without it, compile with {name}=False ({name}=no in a spec)"
    return f"; for a norm with it, compile with {name}=True ({name}=yes in a spec)"
