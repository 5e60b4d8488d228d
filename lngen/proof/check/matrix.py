"""The bit matrix: every spec of a wide grid, every row count, several schedules, each number compared on a GPU.

The interpreter is too slow for the largest arrays and does not need them: the bits of a row depend on that row alone,
those of a column sum on its column alone. So the inputs repeat a base block of rows, row results are compared with
the repeated results of the block, and column sums of large arrays on a sample of columns, summed over all rows.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, Graph, M, derived_axes, is_number_fold
from lngen.compiler.ir.numerics import Array
from lngen.compiler.ir.places import extract
from lngen.compiler.lower import Plan
from lngen.compiler.spec import Spec, parse_spec
from lngen.compiler.toolchain import nvrtc_version
from lngen.files import load_cupy
from lngen.launch.runtime.launcher import Launcher, device_arch
from lngen.launch.runtime.numpy_arrays import launch_raw, raw
from lngen.proof.check.inputs import POISON, differing_rows, random_inputs
from lngen.proof.check.spec_checks import others
from lngen.version import __version__

FEATURES = (
    1, 2, 3, 8, 31, 64, 96, 128, 255, 256, 768, 1000, 1024, 1536, 2048, 4093, 4096, 5120, 8192, 12288, 16384, 32768,
    65536, 100003,
)  # fmt: skip
ROWS = (0, 1, 2, 3, 17, 133, 1000, 4096)
DTYPES = (
    *(
        f"dtype={x}" + (f",weight={w}" if w != x else "")
        for x in ("f16", "bf16", "f32")
        for w in ("f16", "bf16", "f32")
    ),
    "dtype=f64",
)
BASE_ELEMENTS = 2**20
SAMPLED_COLUMNS = 192
EXTREMES = (
    ("layernorm.fwd:d=4096,dtype=bf16", 2**19 + 5),
    ("layernorm.bwd:d=4096,dtype=bf16", 2**19 + 5),
    ("rmsnorm.fwd:d=262144,dtype=bf16", 133),
    ("layernorm.bwd:d=262147,dtype=f16", 133),
    ("rmsnorm.bwd:d=262144,dtype=f32", 17),
)


@dataclass
class Entry:
    """The outcome of one spec: the launches and numbers compared, and the differences."""

    spec: str
    schedules: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    numbers: int = 0
    differ: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def specs(features: Sequence[int] = FEATURES) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The grid, largest rows first, so that the last process does not run alone for long."""
    for text, rows in EXTREMES:
        yield text, (rows,)
    for d in sorted(features, reverse=True):
        for dtype in DTYPES:
            for direction in ("bwd", "fwd"):
                for graph in ("layernorm", "rmsnorm"):
                    yield f"{graph}.{direction}:d={d},{dtype}", ROWS


def conditions() -> dict[str, Any]:
    """The machine of the matrix; MissingError without a GPU."""
    cupy = load_cupy()
    arch = device_arch(0)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {"device": name, "arch": arch, "nvrtc": list(nvrtc_version()), "lngen": __version__}


def run_matrix(
    listed: Sequence[tuple[str, Sequence[int]]], *, schedules: int = 5, processes: int = 8, budget: float = 480.0
) -> Iterator[Entry]:
    """Entries as they finish; a spec that is not reached within ``budget`` seconds has a note."""
    deadline = time.time() + budget
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        jobs = [pool.submit(check_entry, t, r, schedules, deadline) for t, r in listed]
        for job in as_completed(jobs):
            yield job.result()


def summary(entries: Sequence[Entry]) -> dict[str, Any]:
    """Totals, and the entries in the grid's order."""
    ordered = sorted(entries, key=lambda e: e.spec)
    return {
        "specs": len(ordered),
        "launches": sum(len(e.schedules) * len(e.rows) for e in ordered),
        "numbers_compared": sum(e.numbers for e in ordered),
        "numbers_that_differ": sum(e.differ for e in ordered),
        "not_reached": [e.spec for e in ordered if not e.rows],
        "fewest_schedules": min((len(e.schedules) for e in ordered if e.rows), default=0),
        "entries": [{k: v for k, v in asdict(e).items() if k != "seconds"} for e in ordered],
    }


def to_json(entries: Sequence[Entry], conditions: dict[str, Any]) -> str:
    """The summary with its conditions, one line per entry."""
    data = summary(entries)
    listed = ",\n".join("    " + json.dumps(e, sort_keys=True) for e in data.pop("entries"))
    head = json.dumps({"conditions": conditions, **data}, indent=2, sort_keys=True)
    return head[:-2] + ',\n  "entries": [\n' + listed + "\n  ]\n}\n"


def check_entry(text: str, rows: Sequence[int], schedules: int, deadline: float) -> Entry:
    """One spec under several schedules, for all row counts."""
    entry = Entry(text)
    begin = time.time()
    if begin > deadline:
        entry.notes.append("not reached within the budget")
        return entry
    spec = parse_spec(text)
    try:
        case = _Case(spec, max(rows))
        arch = device_arch(0)
        compilation = Compilation(spec)
        default = compilation.schedule(arch)
        chosen = [default, *(s for s in others(compilation, schedules + 1, arch) if s != default)][:schedules]
        for schedule in dict.fromkeys(chosen):
            kernels = compilation.kernels(schedule)
            launcher = Launcher(kernels.plan, kernels.cubin(arch).image, 0, overlap=True)
            entry.schedules.append(str(schedule))
            for m in rows:
                case.compare(kernels.plan, launcher, m, entry)
        entry.rows = list(rows)
    except Exception as e:  # the matrix continues; the entry reports the error
        entry.notes.append(f"{type(e).__name__}: {e}")
    entry.seconds = time.time() - begin
    _free()
    return entry


def _free() -> None:
    """Frees the memory of the previous spec, since the processes share one GPU."""
    load_cupy().get_default_memory_pool().free_all_blocks()


class _Case:
    """The inputs of one spec on the GPU, and the interpreter's results."""

    def __init__(self, spec: Spec, most: int) -> None:
        self.spec, self.graph = spec, spec.graph()
        self.cupy = cupy = load_cupy()
        self.base = max(1, min(most, BASE_ELEMENTS // spec.d))
        self.inputs = random_inputs(spec, self.base)
        self.row_graph = self._part(M)
        self.column_graph = self._part(D)
        self.wanted_rows = {
            n: cupy.asarray(raw(a)) for n, a in interpret(self.row_graph, self._only(self.row_graph)).items()
        }
        self.columns = self._columns(most)
        self.device = {n: self._repeat(cupy.asarray(raw(a)), most, n) for n, a in self.inputs.items()}
        self.wanted_columns: dict[int, dict[str, Array]] = {}

    def _part(self, axis: Any) -> Graph:
        by_row = axis is M
        results = tuple(r for r in self.graph.results if (M in r.type.axes) is by_row)
        return extract(self.graph, self.graph.name, self.graph.params, results)

    def _only(self, graph: Graph) -> dict[str, Array]:
        return {p.name: self.inputs[p.name] for p in graph.params}

    def _columns(self, most: int) -> Array:
        d = self.spec.d
        # Of what a sample of the columns is no part.
        whole = any(map(is_number_fold, self.column_graph.eqns)) or any(
            a.base is D for a in derived_axes(self.column_graph)
        )
        if whole or most * d <= 4 * BASE_ELEMENTS or d <= SAMPLED_COLUMNS:
            return np.arange(d)
        inner = np.random.default_rng(d).choice(d, SAMPLED_COLUMNS - 2, replace=False)
        return np.unique([0, d - 1, *inner])

    def _repeat(self, block: Any, most: int, name: str) -> Any:
        if M not in self.graph.param(name).type.axes or most <= self.base:
            return block
        whole = self.cupy.empty((most, *block.shape[1:]), block.dtype)
        for start in range(0, most, self.base):
            whole[start : start + self.base] = block[: most - start]
        return whole

    def columns_for(self, m: int) -> dict[str, Array]:
        """The column results for the first ``m`` rows, on the sampled columns."""
        if m not in self.wanted_columns and self.column_graph.results:
            index = np.arange(m) % self.base
            sliced = {}
            for p in self.column_graph.params:
                a = self.inputs[p.name]
                a = a[..., self.columns] if D in p.type.axes else a
                sliced[p.name] = a[index] if M in p.type.axes else a
            self.wanted_columns[m] = {n: raw(a) for n, a in interpret(self.column_graph, sliced).items()}
        return self.wanted_columns.get(m, {})

    def compare(self, plan: Plan, launcher: Launcher, m: int, entry: Entry) -> None:
        """One launch on poisoned outputs; every row result and every sampled column is compared."""
        out = launch_raw(launcher, m, self.device, POISON, self.inputs)
        wrong = {}
        for value in self.row_graph.results:
            got, want = out[value.name], self.wanted_rows[value.name]
            wrong[value.name] = differing_rows(value, got, want, self.base, m)
            entry.numbers += got.size
        of_columns = {r.name for r in self.column_graph.results if D in r.type.axes}
        for name, column in self.columns_for(m).items():
            got = out[name].get()
            wrong[name] = int(((got[self.columns] if name in of_columns else got) != column).sum())
            entry.numbers += column.size
        entry.differ += sum(wrong.values())
        entry.notes += [f"{plan.schedule}, rows={m}: {n}: {c} differ" for n, c in wrong.items() if c]
