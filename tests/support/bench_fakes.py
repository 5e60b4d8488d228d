"""A benchmark without a GPU: PyTorch on the CPU with a clock of its own, cases, and records that nobody measured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lngen.compiler.interpret import interpret
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.spec import parse_spec
from lngen.lab.bench import store, timing, torch_gpu
from lngen.lab.bench.argument_sets import Case, make_cases
from lngen.lab.bench.records import Record, judge
from lngen.lab.bench.tasks import FEW_ROWS, Task, make_task
from lngen.lab.bench.timing import Launch
from lngen.lab.bench.torch_gpu import Gpu
from own_graphs import own


class FakeTimer:
    """Replays take what is said; remembers what was captured and replayed."""

    def __init__(self, us: dict[str, Any]) -> None:
        self.us, self.captured, self.replayed = us, [], []
        self.name = ""

    def launch(self, name: str) -> Launch:
        def run(stream: int, index: int) -> None:
            self.name = name
            if self.us[name] is None:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")

        return run

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        for index in indices:
            launch(7, index)
        self.captured.append((self.name, list(indices)))
        return self.name, len(indices)

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        self.replayed.append([name for name, _ in graphs])
        return [self.us[name] * count / 1e3 for name, count in graphs]


class CpuGpu(Gpu):
    """PyTorch on the CPU with a clock of its own: everything of a benchmark but the GPU."""

    number, name = 0, "a CPU"

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.device = self.torch.device("cpu")
        self.us = 10.0

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return 10**9, 1000

    def peak(self) -> float:
        return 10**6

    def release(self) -> None:
        pass

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        for index in indices[:2]:  # two, so that a chain has a link
            launch(0, index)
        return len(indices)

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        return [count * self.us / 1e3 for count in graphs]


def quick(patch: Any) -> None:
    """Collect no garbage for a case, which here takes longer than the case; the tests froze what there is."""
    nothing = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None, get_freeze_count=int)
    patch.setattr("lngen.lab.bench.benchmark.gc", nothing)


def use(patch: Any, gpu: Gpu | None = None) -> None:
    """Let the command measure on the CPU, with few sets of arguments."""
    found = gpu or CpuGpu()
    quick(patch)
    patch.setattr(timing, "COLD_BYTES", 10_000)
    patch.setattr(torch_gpu, "find_gpu", lambda: found)
    patch.setattr(store, "conditions", lambda device, method, settings: {"rounds": method.split()[0]})


def one_case(text: str, rows: int, count: int = 1) -> Case:
    """The case of one spec."""
    head, _, keys = text.partition(":")
    task = make_task(*head.split("."), "f32", rows, 8)
    (case,) = make_cases(replace(task, specs=(parse_spec(f"{head}:{keys}"),)), count, CpuGpu())
    return case


def cases(name: str, direction: str, rows: int = 5, count: int = 2, **keys: object) -> list[Case]:
    """The cases of a graph of ``own_graphs``."""
    halves = ("fwd", "bwd") if direction == "both" else (direction,)
    return make_cases(Task(tuple(own(name, half, **keys) for half in halves), rows), count, CpuGpu())


def interpreted(case: Case) -> dict[str, Any]:
    """What the interpreter makes of the first set, in float64."""
    import torch

    inputs = {v.name: case.sets[0][v.name].double().numpy() for v in case.graph.params}
    stored = {v.name: inputs[v.name].astype(NUMPY_DTYPE[v.type.dtype]) for v in case.graph.params}
    return {n: torch.from_numpy(a.astype(np.float64)) for n, a in interpret(case.graph, stored).items()}


def bench_record(provider: str, rows: int = 4096, d: int = 1024, **values: Any) -> Record:
    """A record of layernorm forward in bf16."""
    values = {"graph": "layernorm", **values}
    return Record(f"layernorm.fwd:d={d},dtype=bf16", values.pop("graph"), "fwd", rows, d, "bf16", provider, **values)


RECORDS = judge(
    [
        bench_record("copy", us_median=5.6, gb_s=2995.0, fraction=1.0, launches=1400, sets=18, drifted=True),
        bench_record("lngen", us_median=6.1, gb_s=2750.4, fraction=0.918, schedule="threads=32", drifted=True),
        bench_record("torch", note="wrong: y is off by 2.0e+00 of its size", drifted=True),
        bench_record("copy", d=4096, us_median=18.4, gb_s=3650.0, fraction=1.0),
        bench_record("lngen", d=4096, us_median=19.2, gb_s=3490.0, fraction=0.956),
        bench_record("torch", d=4096, us_median=24.0, gb_s=2800.0, fraction=0.767),
        bench_record("copy", rows=32768, us_median=34.3, gb_s=3908.0, fraction=1.0),
        bench_record("lngen", rows=32768, us_median=35.6, gb_s=3765.0, fraction=0.96, note="implausible: x"),
        bench_record("torch", rows=32768, note="wrong: y is off by 2.0e+00 of its size"),
    ]
)


def few_rows_records() -> list[Record]:
    """Both classes at two lengths, with a peer that has failed."""
    times = {"copy": 1.0, "lngen": 2.0, "liger": 2.2, "quack": None}
    return judge(
        [
            bench_record(name, 16, d, kind=kind, us_median=us, sets=64, note="" if us else "failed: no such D")
            for d in (1024, 4096)
            for kind in FEW_ROWS
            for name, us in times.items()
        ]
    )


def drawn(picture: Any) -> Any:
    """The picture, drawn in a figure of matplotlib's."""
    from matplotlib.figure import Figure

    figure = Figure()
    picture.draw(figure)
    return figure
