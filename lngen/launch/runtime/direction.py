"""One direction of a norm that compiles: its kernels for an arch, rows and a layout, and the eps that a call gives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import Device, device_for
from lngen.compiler.ir import ByValue, D, M, bits_of, values_of
from lngen.compiler.passes import accumulated
from lngen.compiler.problem import Schedule, is_legal, parse_schedule
from lngen.compiler.schedule import row_counts, workload
from lngen.compiler.spec import Spec
from lngen.errors import ArrayError
from lngen.launch.array_call import ArrayCall
from lngen.launch.array_rules import given_eps
from lngen.launch.kernels import NO_VALUES, Described
from lngen.launch.runtime.launcher import Launcher, device_arch, live_gpu
from lngen.launch.runtime.lock_file import Lock, Locked
from lngen.launch.runtime.numpy_arrays import run_on_host, tensor_of


class Call(ArrayCall):
    """Runs one spec on the arrays it is given.

    ``takes`` are the parameters that a call has arrays for; ``plain``: so many positional inputs need no arranging.
    """

    host_type = np.ndarray
    host = ", or pass NumPy arrays"

    def __init__(self, spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> None:
        self.spec, self._schedule, self._lock, self._overlap = spec, schedule, lock, overlap
        self.compilation = Compilation(spec)
        self.graph, self._problem = self.compilation.graph, self.compilation.problem
        inputs, outputs = self.graph.tensors, self.graph.results
        added = {v.name: accumulated(v.name) for v in outputs}
        tensors = [tensor_of(v, spec.d) for v in inputs], [tensor_of(v, spec.d) for v in outputs]
        super().__init__(str(spec), *tensors, spec.d, spec.strides, self._leading_input(), added)
        self.takes, self.plain = self.graph.params, len(inputs)
        self.names = tuple(t.name for t in self.tensors)
        self._schedules: dict[tuple[str, Device | None, int, Locked | None], Schedule] = {}
        self._launchers: dict[tuple[int, Schedule], Launcher] = {}
        self._loading = threading.Lock()

    def _leading_input(self) -> int:
        """The input that gives rows, library and device: if possible one that forward has checked."""
        forward = self.spec.forward()
        known = {v.name for v in (*forward.params, *forward.results)}
        rated = enumerate(self.graph.tensors)
        return max(rated, key=lambda e: (M in e[1].type.axes, e[1].name in known, D in e[1].type.axes, -e[0]))[0]

    # ---- planning ----

    def __str__(self) -> str:
        """The spec, and the schedules that were chosen so far, a line each."""
        chosen = dict.fromkeys(f"{arch}: {schedule}" for (arch, *_), schedule in self._schedules.items())
        return "\n  ".join([str(self.spec), *(chosen or [f"schedule chosen at first use {self._schedule}".rstrip()])])

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
        """As of ``ArrayCall``; ArrayError also for an eps that is built in."""
        if "eps" in named and self.spec.definition.builder(self.spec.options).takes_eps:
            raise ArrayError(
                f"'{self.spec}' has eps={self.spec.eps} built in, got eps= in a call; compile with eps=\"run\" to give "
                "it in every call."
            )
        return super().arrange(inputs, named)

    def loaded(self, device: int, vec: int | None, rows: int) -> Launcher:
        """As ``launcher``."""
        return self.launcher(device, vec, rows)

    def narrower(self, described: Described) -> int:
        """Bulk copies take accesses of a whole chunk: other rows are read half a chunk at a time, or less."""
        bulk = described["schedule"]["form"] in ("tma", "tma_unaligned")
        return self._problem.chunk // 2 if bulk else int(described["schedule"]["vec"])

    def about(self, name: str) -> str:
        """The option of the graph that leaves an input out, or adds it."""
        return about_input(self.spec, name)

    def on_host(
        self, arrays: Sequence[Any], given: tuple[Any, ...], values: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results of the interpreter."""
        return run_on_host(self.graph, self.d, self.leader, arrays, given)


def about_input(spec: Spec, name: str) -> str:
    """What to do about an input that is missing or that the spec lacks, if the graph has an option of its name."""
    option = spec.definition.builder(spec.options).declared.get(name)
    if option is None or not isinstance(option.default, bool):
        return ""
    if dict(spec.chosen).get(name, option.default):
        return f"; for a norm without it, compile with {name}=False ({name}=no in a spec)"
    return f"; for a norm with it, compile with {name}=True ({name}=yes in a spec)"


LAST = 16  # values of eps whose numbers are kept


def call_of(spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> Call:
    """The call of a direction, which takes numbers by value if its graph does."""
    return (ValueCall if spec.graph().by_value else Call)(spec, schedule, lock, overlap)


class ValueCall(Call):
    """A call that takes, among its arrays, a NumPy array of shape () for each number that is passed by value."""

    def __init__(self, spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> None:
        super().__init__(spec, schedule, lock, overlap)
        self._local = threading.local()
        self.takes, self.plain = self.graph.params, -1
        self.names = (*(v.name for v in self.graph.params), *(t.name for t in self.outputs))
        self._places = {v.name: place for place, v in enumerate(self.graph.params) if isinstance(v, ByValue)}
        self._values_of = lru_cache(LAST)(partial(values_of, self.graph))

    def arrange(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """As of ``Call``, with the numbers that follow from the eps among ``named``; ArrayError for a wrong eps."""
        if len(inputs) != len(self.inputs) or len(named) > 1:
            inputs = super().arrange(inputs, {name: a for name, a in named.items() if name != "eps"})
        values, arrays = self._values_of(given_eps(self.text, named.get("eps"))), list(inputs)
        for name, place in self._places.items():
            arrays.insert(place, values[name])
        return arrays

    def __call__(
        self, arrays: Sequence[Any], out: Any, values: Mapping[str, int] = NO_VALUES
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """As of ``Call``; ``arrays`` has the numbers as well, in the order of the graph's parameters."""
        tensors, numbers = list(arrays), {}
        for name, place in reversed(self._places.items()):
            numbers[name] = tensors.pop(place)
        self._local.numbers = numbers
        return super().__call__(tensors, out, {name: bits_of(number) for name, number in numbers.items()})

    def on_host(
        self, arrays: Sequence[Any], given: tuple[Any, ...], values: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results of the interpreter."""
        return run_on_host(self.graph, self.d, self.leader, arrays, given, self._local.numbers)
