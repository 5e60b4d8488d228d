"""What a worker process does on its GPU: compares the bits of candidates with the interpreter's, and times them.

The interpreter is too slow for the largest arrays and does not need them: the bits of a row depend on that row alone,
those of a column sum on its column alone. So the inputs repeat a block of rows, row results are compared with those of
the block, and column sums of large arrays on a sample of columns, summed over all rows. A column sum that depends on
row sums does not have this property: then fewer rows are compared, and all of them. Sets of rows, whose sums depend on
their own rows alone, are repeated whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import (
    WIDE,
    D,
    Graph,
    M,
    Value,
    bits_of,
    is_number_fold,
    is_of_set,
    is_row_fold,
    values_of,
)
from lngen.compiler.ir.numerics import Array
from lngen.compiler.ir.places import extract
from lngen.compiler.ir.types import derived_axes, sets_in
from lngen.compiler.passes.instance import lengths
from lngen.compiler.spec import Spec
from lngen.compiler.toolchain import nvrtc_version
from lngen.errors import LngenError
from lngen.files import load_cupy
from lngen.lab.bench import timing
from lngen.lab.bench.tasks import floor_bytes
from lngen.lab.bench.timing import Launch
from lngen.lab.tune.candidates import Candidate
from lngen.lab.tune.trials import Device
from lngen.lab.tune.workers import Timed
from lngen.launch.runtime.launcher import Launcher, device_arch
from lngen.launch.runtime.numpy_arrays import raw
from lngen.proof.check.inputs import POISON, differing_rows, random_inputs

BLOCK_ELEMENTS = 2**20  # of the block of rows that the interpreter computes
COLUMN_ELEMENTS = 2**22  # of the columns that the interpreter sums over all rows
LEAST_SETS = 3  # in the block, where there are as many
MOST_COLUMNS, LEAST_COLUMNS = 192, 4
EDGE_ROWS = (1, 133)  # checked besides all rows: one row, and one more than the multiprocessors of an H200
REFERENCE = "reference"
LOADED = 64  # launchers kept
REPEATS = 2  # repetitions of rounds in which the reference moved
BRIEF_REPLAY_US = timing.REPLAY_US / 2  # for fewer rounds than the benchmark's
FIRST_WARM_MS, WARM_MS = timing.WARM_MS, 20.0


# ---- the expected bits ----


class Bits:
    """Inputs on the device, and the expected results.

    xp  cupy, or numpy: the module of the arrays. Numbers are stored as unsigned integers of their size, so that
        equal means equal bits; the inputs have no NaN.
    """

    def __init__(self, spec: Spec, rows: int, xp: Any) -> None:
        self.spec, self.rows, self._xp = spec, rows, xp
        self.graph = spec.graph()
        self.inner = rows // sets_in(rows) if spec.by_sets and rows else 1
        block = max(1, min(rows, BLOCK_ELEMENTS // spec.d) // self.inner)
        if spec.by_sets:
            block = min(max(block, LEAST_SETS), rows // self.inner)
        # Its rows, or sets, are odd, so that a kernel that reads one a power of two away cannot be right by accident.
        self._sets = block - 1 if block % 2 == 0 else block
        self.block = self._sets * self.inner
        self._rows_graph, self._columns_graph = self._part(True), self._part(False)
        derives = any(axis.base is D for axis in derived_axes(self._columns_graph))  # heads, or blocks of features
        sliceable = not derives and not any(is_row_fold(e) or is_number_fold(e) for e in self._columns_graph.eqns)
        self.whole = not self._columns_graph.results or sliceable
        affordable = rows if self.whole else max(self.block, 4 * BLOCK_ELEMENTS // spec.d)
        edges = {self.block} if spec.by_sets else {m for m in EDGE_ROWS if m < rows and m <= affordable}
        self.checked_rows = tuple(sorted({*edges, rows if self.whole else self.block}))
        self._inputs = random_inputs(spec, self.block, sets=self._sets)
        wanted = interpret(self._rows_graph, self._only(self._rows_graph))
        self._wanted = {n: xp.asarray(raw(a)) for n, a in wanted.items()}
        self._columns: dict[int, tuple[Any, dict[str, Any]]] = {m: self._column_sums(m) for m in self.checked_rows}
        self.inputs = {v.name: self._repeated(xp.asarray(raw(self._inputs[v.name])), v) for v in self.graph.tensors}
        self.values = values_of(self.graph, spec.eps_or_default)
        self.passed = {name: bits_of(number) for name, number in self.values.items()}

    def empty(self, rows: int) -> dict[str, Any]:
        """Results full of poison."""
        out = {}
        for v in self.graph.results:
            shape = v.type.shape_of(lengths(self.spec.forward(), rows, self.spec.d, rows // self.inner))
            out[v.name] = self._xp.empty(shape, f"u{v.type.dtype.size}")
            out[v.name].fill(int.from_bytes([POISON] * v.type.dtype.size, "little"))
        return out

    def complaint(self, rows: int, results: Mapping[str, Any]) -> str:
        """By result, how many numbers of a launch with ``rows`` rows differ; an empty text if none does."""
        wrong = {}
        for value in self._rows_graph.results:
            per = self.inner if is_of_set(value) else 1
            found = results[value.name], self._wanted[value.name]
            wrong[value.name] = differing_rows(value, *found, self.block // per, rows // per)
        index, sums = self._columns[rows]
        for name, column in sums.items():
            got = results[name]
            wrong[name] = int(((got[index] if got.ndim else got) != column).sum())
        return "; ".join(f"{name}: {count} numbers differ with {rows} rows" for name, count in wrong.items() if count)

    def _part(self, by_row: bool) -> Graph:
        results = tuple(r for r in self.graph.results if (M in r.type.axes or is_of_set(r)) is by_row)
        return extract(self.graph, self.graph.name, self.graph.params, results)

    def _only(self, graph: Graph) -> dict[str, Array]:
        return {p.name: self._inputs[p.name] for p in graph.params}

    def _column_sums(self, rows: int) -> tuple[Any, dict[str, Any]]:
        """Where the columns that are compared are in a sum, and their sums over the first ``rows`` rows."""
        d = self.spec.d
        count = min(max(COLUMN_ELEMENTS // max(rows, 1), LEAST_COLUMNS), MOST_COLUMNS)
        columns: Any = slice(None)
        if self.whole and d > count and rows * d > BLOCK_ELEMENTS:
            inner = np.random.default_rng(d).choice(d, count - 2, replace=False)
            columns = np.unique([0, d - 1, *inner])
        there = columns if isinstance(columns, slice) else self._xp.asarray(columns)
        if not self._columns_graph.results:
            return there, {}
        repeat, of_sets, sliced = np.arange(rows) % self.block, np.arange(rows // self.inner) % self._sets, {}
        for p in self._columns_graph.params:
            a = self._inputs[p.name]
            a = a[..., columns] if D in p.type.axes else a
            sliced[p.name] = a[repeat] if M in p.type.axes else a[of_sets] if is_of_set(p) else a
        found = interpret(self._columns_graph, sliced)
        return there, {n: self._xp.asarray(raw(a)) for n, a in found.items()}

    def _repeated(self, block: Any, value: Value) -> Any:
        """The rows of an input, or those of sets, repeated as often as needed."""
        if not (M in value.type.axes or is_of_set(value)) or self.rows <= self.block:
            return block
        per = self.inner if is_of_set(value) else 1
        whole = self._xp.empty((self.rows // per, *block.shape[1:]), block.dtype)
        for start in range(0, len(whole), self.block // per):
            part = whole[start : start + self.block // per]
            part[...] = block[: len(part)]
        return whole


# ---- the timer ----


class CupyTimer:
    """Copies, captures and times. All work is on one stream, inside ``active()``."""

    def __init__(self) -> None:
        self._cupy = cupy = load_cupy()
        self._side = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the stream CuPy's current one."""
        with self._side:
            yield

    def stream(self) -> int:
        """CuPy's current stream, as a pointer."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def synchronize(self) -> None:
        """Wait for all work."""
        self._cupy.cuda.runtime.deviceSynchronize()

    def _properties(self) -> dict[str, Any]:
        runtime = self._cupy.cuda.runtime
        properties: dict[str, Any] = runtime.getDeviceProperties(runtime.getDevice())
        return properties

    def name(self) -> str:
        """As the driver names the GPU."""
        return str(self._properties()["name"].decode())

    def memory(self) -> tuple[int, int]:
        """Free bytes, and bytes of the L2 cache."""
        free = int(self._cupy.cuda.runtime.memGetInfo()[0])
        return free, int(self._properties().get("l2CacheSize", 64 << 20))

    def release(self) -> None:
        """Return cached memory."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def pointer(self, array: Any) -> int:
        """The address."""
        return int(array.data.ptr)

    def copy(self, out: Any, x: Any) -> None:
        """``out = x``, by the driver's copy."""
        self._cupy.copyto(out, x)

    def add(self, out: Any, x: Any, y: Any) -> None:
        """``out = x + y`` as a time: 16 bytes are one element, as PyTorch's kernels move them, so numbers differ."""
        self._cupy.add(_words(x), _words(y), out=_words(out))

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        """A replayable graph of one launch per index."""
        with self._side:
            self._side.begin_capture()
            try:
                for index in indices:
                    launch(self._side.ptr, index)
            finally:
                graph = self._side.end_capture()
        return graph

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        """Replay the graphs in the given order, back to back; milliseconds of each."""
        event = self._cupy.cuda.Event
        pairs = [(event(), event()) for _ in graphs]
        for graph, (start, end) in zip(graphs, pairs, strict=True):
            start.record(self._side)
            graph.launch(self._side)
            end.record(self._side)
        self.synchronize()
        return [float(self._cupy.cuda.get_elapsed_time(start, end)) for start, end in pairs]


def _words(array: Any) -> Any:
    """The same memory as elements of 16 bytes, if its size is a multiple of 16."""
    flat = array.reshape(-1)
    return flat.view(np.complex128) if flat.nbytes % 16 == 0 else flat


# ---- the measurer ----


class GpuMeasurer:
    """Measures on the only GPU visible to this process.

    timer  copies, captures and times; ``xp``, CuPy, is the module of its arrays
    """

    overlap = False  # each call waits for the end of the last

    def __init__(self, timer: CupyTimer | None = None, xp: Any = None) -> None:
        self._timer, self._xp = timer or CupyTimer(), load_cupy() if xp is None else xp
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
                bound = launcher.bind(rows, launcher.contiguous(rows), bits.inner)
                bound.give(bits.passed)
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

    def _launcher(self, candidate: Candidate) -> Launcher:
        if candidate.kernel not in self._loaded:
            while len(self._loaded) >= LOADED:
                self._loaded.pop(next(iter(self._loaded)))
            plan = self._compilation.kernels(candidate.schedule).plan
            self._loaded[candidate.kernel] = Launcher(plan, candidate.image, 0, self.overlap)
        return self._loaded[candidate.kernel]

    def _launch(self, candidate: Candidate) -> timing.Launch:
        launcher = self._launcher(candidate)
        bound = launcher.bind(self._bits.rows, launcher.contiguous(self._bits.rows), self._bits.inner)
        bound.give(self._bits.passed)
        # One workspace: in use it is equally warm.
        workspace = self._xp.empty(max(1, -(-bound.workspace_bytes // 8)))
        address = self._timer.pointer(workspace)
        bound.prepare(address, self._timer.stream())
        pointers = [[self._timer.pointer(s[n]) for n in launcher.tensors] for s in self._sets]

        def launch(stream: int, index: int, keep: Any = (launcher, workspace)) -> None:
            bound(pointers[index], address, stream)

        return launch

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
