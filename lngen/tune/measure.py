"""The measurer of a worker process with a GPU: loads cubins, compares bits, times side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lngen.bench import timing
from lngen.bench.tasks import floor_bytes
from lngen.check.inputs import POISON
from lngen.compile import Compilation
from lngen.errors import LngenError
from lngen.ir import WIDE
from lngen.runtime.launcher import Launcher, device_arch
from lngen.spec import Spec
from lngen.toolchain import nvrtc_version
from lngen.tune.bits import Bits
from lngen.tune.build import Candidate
from lngen.tune.cupy_timer import CupyTimer
from lngen.tune.serve import Timed
from lngen.tune.trial import Device

REFERENCE = "reference"
LOADED = 64  # launchers kept
REPEATS = 2  # repetitions of rounds in which the reference moved
BRIEF_REPLAY_US = timing.REPLAY_US / 2  # for fewer rounds than the benchmark's
FIRST_WARM_MS, WARM_MS = timing.WARM_MS, 20.0


class GpuMeasurer:
    """Measures on the only GPU visible to this process.

    timer  copies, captures and times; ``xp``, CuPy, is the module of its arrays
    """

    overlap = False  # each call waits for the end of the last

    def __init__(self, timer: CupyTimer | None = None, xp: Any = None) -> None:
        if xp is None:
            import cupy

            xp = cupy
        self._timer, self._xp = timer or CupyTimer(), xp
        self._loaded: dict[str, Launcher] = {}
        self._warm = False

    def device(self) -> Device:
        """The GPU and its compiler; MissingError without one."""
        arch = device_arch(0)
        return Device(self._timer.name(), arch, f"NVRTC {'.'.join(map(str, nvrtc_version()))}")

    def healthy(self) -> bool:
        """True while the CUDA context accepts commands."""
        self._timer.synchronize()
        return True

    def open(self, spec: Spec, rows: int) -> None:
        """Inputs and expected bits, then as many argument sets as needed to keep the caches cold."""
        self._loaded, self._sets, self._references = {}, [], []
        self.__dict__.pop("_bits", None)  # frees the memory of the previous spec
        self._timer.release()
        with self._timer.active():
            self._bits, self._compilation = Bits(spec, rows, self._xp), Compilation(spec)
            free, l2 = self._timer.memory()
            count = timing.set_count(floor_bytes(spec, rows) + self._reference_bytes(), l2, free)
            self._sets = [self._bits.inputs | self._bits.empty(rows)]
            for _ in range(count - 1):
                self._sets.append({n: a.copy() for n, a in self._sets[0].items()})
            self._references = [self._reference(s) for s in self._sets]
            self._timer.synchronize()

    def check(self, candidate: Candidate) -> str:
        """One launch per number of rows on poisoned results and workspace, each compared bit by bit."""
        bits = self._bits
        with self._timer.active():
            launcher = self._launcher(candidate)
            for rows in bits.checked_rows:
                results = bits.empty(rows)
                bound = launcher.bind(rows, dict.fromkeys(launcher.tensors, bits.spec.d))
                workspace = self._xp.full(max(1, bound.workspace_bytes), POISON, "u1")
                arrays = bits.inputs | results
                address = self._timer.pointer(workspace)
                bound.prepare(address, self._timer.stream())
                bound([self._timer.pointer(arrays[n]) for n in launcher.tensors], address, self._timer.stream())
                self._timer.synchronize()
                wrong = bits.complaint(rows, results)
                if wrong:
                    return wrong
        return ""

    def time(self, candidates: Sequence[Candidate], rounds: int) -> Timed:
        """Interleaved rounds of every candidate and the reference, cold; repeated while the reference moves."""
        with self._timer.active():
            launches = {REFERENCE: self._references_launch, **{str(c.rank): self._launch(c) for c in candidates}}
            for launch in launches.values():  # a first launch loads code, which is not allowed during a capture
                launch(self._timer.stream(), 0)
            self._timer.synchronize()
            warm = WARM_MS if self._warm else FIRST_WARM_MS
            replay_us = timing.REPLAY_US if rounds >= timing.ROUNDS else BRIEF_REPLAY_US
            moved: list[float] = []
            found = timing.time_side_by_side(
                launches,
                len(self._sets),
                self._timer,
                reference=REFERENCE,
                rounds=rounds,
                warm_ms=warm,
                replay_us=replay_us,
                repeats=REPEATS,
                moved=moved.append,
            )
        self._warm = True
        reference = found.stats.get(REFERENCE)
        stats = tuple(found.stats.get(str(c.rank)) or found.failures[str(c.rank)] for c in candidates)
        return Timed(stats, reference.median if reference else None, found.drift, tuple(moved))

    # ---- launches ----

    def _launcher(self, candidate: Candidate) -> Launcher:
        if candidate.kernel not in self._loaded:
            while len(self._loaded) >= LOADED:
                self._loaded.pop(next(iter(self._loaded)))
            plan = self._compilation.kernels(candidate.schedule).plan
            self._loaded[candidate.kernel] = Launcher(plan, candidate.image, 0, self.overlap)
        return self._loaded[candidate.kernel]

    def _launch(self, candidate: Candidate) -> timing.Launch:
        launcher = self._launcher(candidate)
        bound = launcher.bind(self._bits.rows, dict.fromkeys(launcher.tensors, self._bits.spec.d))
        # One workspace: in use it is equally warm.
        workspace = self._xp.empty(max(1, -(-bound.workspace_bytes // 8)))
        address = self._timer.pointer(workspace)
        bound.prepare(address, self._timer.stream())
        pointers = [[self._timer.pointer(s[n]) for n in launcher.tensors] for s in self._sets]

        def launch(stream: int, index: int, keep: Any = (launcher, workspace)) -> None:
            bound(pointers[index], address, stream)

        return launch

    # ---- the reference: a copy, or the sum of two inputs of one size ----

    def _wide(self) -> list[str]:
        """One or two of the graph's [M, D] inputs of one size."""
        wide = [v for v in self._bits.graph.params if v.type.axes == WIDE]
        if not wide:
            raise LngenError(f"'{self._bits.spec}' has no input of rows and features, so there is nothing to time.")
        return [v.name for v in wide if v.type.dtype.size == wide[0].type.dtype.size][:2]

    def _reference_bytes(self) -> int:
        return int(self._bits.inputs[self._wide()[0]].nbytes)

    def _reference(self, tensors: dict[str, Any]) -> tuple[Any, ...]:
        """The array to write, which is no result, and the arrays to read."""
        read = [tensors[n] for n in self._wide()]
        return read[0].copy(), *read

    def _references_launch(self, stream: int, index: int) -> None:
        out, *read = self._references[index]
        (self._timer.copy if len(read) == 1 else self._timer.add)(out, *read)


class OverlappingMeasurer(GpuMeasurer):
    """The same with calls that start while the last one drains."""

    overlap = True
