"""If these fail, a run ends at the first failure, times wrong results, or repeats what it has."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import sampling
from bench_fakes import CpuGpu, bench_record
from lngen.cli.bench import tasks
from lngen.lab.bench import timing
from lngen.lab.bench.argument_sets import Prepared
from lngen.lab.bench.benchmark import LINKS, Hooks, benchmark, covering, doubted
from lngen.lab.bench.peers import LIBRARIES, Torch
from lngen.lab.bench.providers import Ceiling
from lngen.lab.bench.summary import left_out, table, titles
from lngen.lab.bench.tasks import CEILINGS, LATENCY, Task, floor_bytes, make_task
from lngen.lab.bench.torch_gpu import Gpu
from own_graphs import OWN, own

pytest.importorskip("torch")

MB = 1_000_000


class Wrong(Torch):
    """PyTorch with a mistake."""

    def __init__(self, name: str, mistake: str) -> None:
        super().__init__(name)
        self.mistake = mistake

    def left_out(self, spec: Any) -> str:
        return "it is slow" if self.mistake == "left out" else ""

    def prepare(self, case: Any) -> Prepared:
        if self.mistake in ("raises", "left out"):
            raise ValueError("no such kernel")
        right = super().prepare(case)
        return replace(right, results=lambda i: {n: a + 1 for n, a in right.results(i).items()})


def todo(direction: str, *shapes: tuple[int, int], graph: str = "layernorm", dtype: str = "f32") -> list[Any]:
    return tasks([graph], direction, dtype, "design", list(shapes))


def test_a_benchmark_reports_what_fails_and_goes_on(few_sets: None) -> None:
    chosen = [*(Ceiling(d) for d in CEILINGS), Torch(), Wrong("wrong", "values"), Wrong("raising", "raises")]
    seen: list[tuple[int, int, str]] = []
    hooks = Hooks(progress=lambda *a: seen.append(a))
    records = benchmark(todo("fwd,bwd", (64, 32), (3, 32)), chosen, CpuGpu(), hooks=hooks).records
    assert [s[:2] for s in seen] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [r.provider for r in records] == ["copy", "torch", "wrong", "raising"] * 2 + [
        "add", "torch", "wrong", "raising"
    ] * 2  # fmt: skip
    ceiling, torch, wrong, raising = records[:4]
    assert (ceiling.us_median, ceiling.gb_s, ceiling.fraction) == (10.0, 1.6, 1.0)
    assert torch.gb_s == 1.7  # the same time for a few more bytes
    assert (torch.sets, torch.launches, torch.tensor_bytes) == (2, 400, 64 * 32 * 4)
    assert wrong.gb_s is None
    assert wrong.note.startswith("wrong: y is off by")
    assert raising.note == "failed: ValueError: no such kernel"


def test_a_peer_that_is_left_out_says_why(few_sets: None) -> None:
    """It is not prepared, and the others have times; of the libraries it is Liger's loss of class indices."""
    left, torch = benchmark(todo("fwd", (8, 32)), [Wrong("left", "left out"), Torch()], CpuGpu()).records
    assert (left.note, left.us_median) == ("left out: it is slow", None)
    assert torch.us_median == 10.0
    reasons = {(p.name, name) for p in LIBRARIES for name, member in p.members.items() if member.left_out}
    assert reasons == {("liger", f"cross_entropy:target=index{more}") for more in ("", ",x_grad=yes")}
    spec = todo("fwd", (8, 32), graph="cross_entropy:target=index")[0].specs[0]
    assert [p.left_out(spec)[:24] for p in LIBRARIES if p.covers(spec)] == ["it counts the targets on", ""]


@sampling.grid(("name", "direction"), product(OWN, ("fwd", "bwd", "both")), strength=1)
def test_the_whole_way_with_pytorch_as_a_peer(name: str, direction: str, few_sets: None) -> None:
    halves = ("fwd", "bwd") if direction == "both" else (direction,)
    task = Task(tuple(own(name, half) for half in halves), 40)
    chosen = covering(task, [*map(Ceiling, CEILINGS), Torch(), *LIBRARIES])
    ceiling, eager = benchmark([task], chosen, CpuGpu()).records
    assert (ceiling.provider, ceiling.note, ceiling.fraction) == (task.ceiling, "", 1.0)
    assert (eager.provider, eager.note, eager.us_median) == ("torch", "", 10.0)
    assert eager.gb_s == round(sum(floor_bytes(s, 40) for s in task.specs) / 10.0 / 1e3, 1)
    assert (eager.graph, eager.target) == (task.graph, None)


def test_a_case_that_fails_is_reported_in_its_rows(few_sets: None) -> None:
    class Broken(CpuGpu):
        def elapsed(self, graphs: Sequence[Any]) -> list[float]:
            if self.us == 10.0:
                self.us = 20.0
                raise RuntimeError("CUDA error: out of memory")
            return super().elapsed(graphs)

    class TooSmall(CpuGpu):
        def memory(self) -> tuple[int, int]:
            return 14000, 1000  # enough for one set, but not beside the expected results in float64

    cases, chosen = todo("fwd", (8, 32), graph="rmsnorm"), [Ceiling("copy"), Torch()]
    found = {r.provider: r for r in benchmark(cases, chosen, Broken()).records}
    assert found["copy"].note == "failed: RuntimeError: CUDA error: out of memory"
    assert found["torch"].us_median == 20.0
    assert found["torch"].fraction is None
    assert all("choose fewer rows" in r.note for r in benchmark(cases, chosen, TooSmall()).records)


def test_a_small_case_is_said_to_be_warm(few_sets: None) -> None:
    class LargeCache(CpuGpu):
        def memory(self) -> tuple[int, int]:
            return 10**9, 60 * MB

    record = benchmark(todo("fwd", (8, 32), graph="rmsnorm"), [Torch()], LargeCache()).records[0]
    assert record.sets == timing.MAX_SETS
    assert record.note.startswith("warm: 64 sets are only 0 MB")
    assert record.gb_s is not None


def test_a_lost_gpu_ends_the_run_and_keeps_what_there_is(few_sets: None) -> None:
    class Lost(CpuGpu):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

    said: list[str] = []
    kept: list[int] = []
    hooks = Hooks(say=said.append, keep=lambda records: kept.append(len(records)))
    outcome = benchmark(todo("fwd", (8, 32), (9, 32)), [Torch()], Lost(), hooks=hooks)
    assert (outcome.left, kept, len(said)) == (1, [1], 1)
    assert "the GPU no longer answers" in said[0]
    assert "illegal memory access" in outcome.records[0].note


@pytest.mark.parametrize(("held", "releases"), [(0.4, 0), (0.6, 2)])
def test_cached_memory_is_given_back_only_when_much_is_held(held: float, releases: int, few_sets: None) -> None:
    class Caching(CpuGpu):
        asked, released = 0, 0

        def memory(self) -> tuple[int, int]:
            self.asked += 1
            return int(10**9 * (1 - held * (self.asked > 1))), 1000

        def release(self) -> None:
            self.released += 1

    gpu = Caching()
    benchmark(todo("fwd", (8, 32), (9, 32)), [Torch()], gpu)
    assert gpu.released == releases


def test_the_backward_of_both_takes_the_set_of_half_a_turn_ago(few_sets: None) -> None:
    order: list[tuple[str, int]] = []

    class Noting(Torch):
        def prepare(self, case: Any) -> Prepared:
            right = super().prepare(case)

            def launch(stream: int, index: int) -> None:
                order.append((case.spec.direction, index))
                right.launch(stream, index)

            return replace(right, launch=launch)

    (record,) = benchmark(todo("both", (8, 16)), [Noting()], CpuGpu()).records
    assert (record.note, record.sets) == ("", 4)
    assert order[:4] == [("fwd", 0), ("bwd", 2), ("fwd", 1), ("bwd", 3)]
    assert len(order) == 2 * (4 + 2 * 2)  # one turn before the check, and two captures


def test_a_wrong_forward_spoils_no_other_backward(few_sets: None) -> None:
    class Spoiling(Torch):
        def prepare(self, case: Any) -> Prepared:
            case.sets[0]["rstd"].fill_(7.0)
            raise ValueError("after writing nonsense")

    chosen = [Spoiling("spoiling"), Torch()]
    spoiling, torch = benchmark(todo("both", (8, 32)), chosen, CpuGpu()).records
    assert (spoiling.us_median, torch.note, torch.us_median) == (None, "", 10.0)


def test_a_mistake_in_either_half_of_both_is_noticed(few_sets: None) -> None:
    class HalfWrong(Wrong):
        def prepare(self, case: Any) -> Prepared:
            right = Torch.prepare(self, case)
            return right if case.spec.direction == "fwd" else super().prepare(case)

    (record,) = benchmark(todo("both", (8, 32)), [HalfWrong("wrong", "values")], CpuGpu()).records
    assert record.note.startswith("wrong: dx is off by")
    assert record.us_median is None


def test_a_latency_is_a_class_of_its_own() -> None:
    chosen = [*(Ceiling(d) for d in CEILINGS), Torch(), Wrong("wrong", "values")]
    found = [make_task("layernorm", d, "f32", 4, 16, LATENCY) for d in ("fwd", "bwd")]
    forward, backward = (benchmark([t], chosen, CpuGpu()).records for t in found)
    for records, ceiling in ((forward, "copy"), (backward, "add")):
        assert [r.provider for r in records] == [ceiling, "torch", "wrong"]
        assert [r.us_median for r in records] == [10.0, 10.0, None]
        assert {(r.kind, r.gb_s, r.fraction, r.target) for r in records} == {(LATENCY, None, None, None)}
        assert records[1].sets == LINKS
        assert records[2].note.startswith("wrong")
    assert "us per call in a chain of launches" in titles(forward)[0]
    assert [list(c.cells) for c in table(forward).columns] == [["4 x 16"], ["10.00"], ["10.00"]]
    assert left_out(forward).keys() == {"wrong"}


def test_a_graph_without_a_chain_has_no_latency(few_sets: None) -> None:
    task = Task((own("gated", "bwd"),), 4, LATENCY)
    chosen = [*map(Ceiling, CEILINGS), Torch()]
    assert [r.note for r in benchmark([task], chosen, CpuGpu()).records] == ["", ""]
    impossible = Task((own("loss"),), 4, LATENCY)
    for record in benchmark([impossible], chosen, CpuGpu()).records:
        assert "no input of the type of 'loss', f32[M]: leave --latency out." in record.note


def test_each_provider_of_a_latency_begins_with_the_same_input() -> None:
    begins: list[float] = []

    class Spoiling(Torch):
        def prepare(self, case: Any) -> Prepared:
            right = super().prepare(case)

            def launch(stream: int, index: int) -> None:
                begins.append(float(case.sets[0]["x"].sum()))
                right.launch(stream, index)
                case.sets[0]["x"].fill_(7.0)  # as a chain does when it comes round

            return replace(right, launch=launch)

    task = make_task("layernorm", "fwd", "f32", 4, 16, LATENCY)
    records = benchmark([task], [Spoiling("a"), Spoiling("b")], CpuGpu()).records
    assert [r.note for r in records] == ["", ""]
    assert begins[0] == begins[1] != 7.0 * 64


class Restless(CpuGpu):
    """The ceiling, replayed first in each round, moves by 5 % in the first ``times`` sets of rounds."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.rounds = times, 0

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        ms = super().elapsed(graphs)
        if len(graphs) < 10:
            return ms
        self.rounds += 1
        moves = self.rounds <= self.times
        return [one * (1 + 0.05 * (moves and i > len(ms) // 2)) for i, one in enumerate(ms)]


def test_rounds_are_repeated_while_the_ceiling_moves(few_sets: None) -> None:
    chosen = [Ceiling("copy"), Torch()]
    for times, repeats, drifted, sentences in ((0, 0, False, 0), (2, 2, False, 2), (9, 3, True, 3)):
        said: list[str] = []
        gpu = Restless(times)
        found = benchmark(todo("fwd", (8, 32)), chosen, gpu, hooks=Hooks(say=said.append)).records
        assert {(r.repeats, r.drifted) for r in found} == {(repeats, drifted)}
        assert gpu.rounds == repeats + 1
        assert len(said) == sentences
    assert said[0].endswith("copy moved by 5.0%, the GPU is busy or throttling; the rounds are repeated.")


def test_what_is_there_is_not_measured_again(few_sets: None) -> None:
    cases, chosen = todo("fwd", (8, 32), (9, 32), (10, 32)), [Ceiling("copy"), Torch()]
    first = benchmark(cases[:2], chosen, CpuGpu()).records
    first = [replace(r, drifted=r.rows == 9, us_median=1.0) for r in first]
    seen: list[tuple[int, int, str]] = []
    hooks = Hooks(progress=lambda *a: seen.append(a))
    records = benchmark(cases, chosen, CpuGpu(), hooks=hooks, saved=first).records
    assert [(s[0], s[1], s[2][-8:]) for s in seen] == [(1, 3, "2 rows=9"), (2, 3, " rows=10")]  # 9 had drifted
    assert [(r.rows, r.us_median) for r in records] == [
        (8, 1.0), (8, 1.0), (9, 10.0), (9, 10.0), (10, 10.0), (10, 10.0)
    ]  # fmt: skip
    again = benchmark(cases, [*chosen, Wrong("raising", "raises")], CpuGpu(), saved=records).records
    assert [r.provider for r in again] == ["copy", "torch", "raising"] * 3  # one more provider: side by side again


def test_no_task_begins_that_would_end_too_late(few_sets: None) -> None:
    now, ticks = [0.0], CpuGpu()

    class Slow(Torch):
        def prepare(self, case: Any) -> Prepared:
            now[0] += 10.0
            return super().prepare(case)

    def run(seconds: float) -> Any:
        now[0] = 0.0
        cases = todo("fwd", (8, 32), (9, 32), (10, 32))
        return benchmark(cases, [Slow()], ticks, seconds=seconds, clock=lambda: now[0])

    assert [run(seconds).left for seconds in (15.0, 25.0, 30.0)] == [2, 1, 0]


@pytest.mark.parametrize(("provider", "gb_s", "fraction", "note"), [
    ("torch", 3000.0, 1.1, ""),
    ("torch", 3000.0, 1.11, "implausible: faster than the ceiling"),
    ("lngen", 3000.0, 1.2, ""),  # its calls begin while the ceiling's wait
    ("lngen", 4917.0, 1.2, ""),
    ("lngen", 4918.0, 1.0, "implausible: faster than memory, 4917 GB/s"),
])  # fmt: skip
def test_what_is_too_good_to_be_true(provider: str, gb_s: float, fraction: float, note: str) -> None:
    record = doubted(bench_record(provider, gb_s=gb_s, fraction=fraction), 4917.0)
    assert record.note == note
    assert doubted(replace(record, note="warm"), 1.0).note == "warm"


@pytest.mark.parametrize(("khz", "bits", "gb_s"), [(3_201_000, 6144, 4916.736), (0, 6144, math.inf)])
def test_what_memory_can_move_at_most(monkeypatch: pytest.MonkeyPatch, khz: int, bits: int, gb_s: float) -> None:
    """An H200: 3201 MHz, twice a clock, over 6144 bits. Some drivers do not tell the clock."""
    runtime = pytest.importorskip("cupy").cuda.runtime
    told = {runtime.cudaDevAttrMemoryClockRate: khz, runtime.cudaDevAttrGlobalMemoryBusWidth: bits}
    monkeypatch.setattr(runtime, "deviceGetAttribute", lambda attribute, device: told[attribute])
    assert Gpu.peak(CpuGpu()) == pytest.approx(gb_s)
