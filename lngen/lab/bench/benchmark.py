"""The benchmark: tasks one after the other, each result saved at once, within a time limit.

Of a task all providers are prepared, their results checked, and then all are timed side by side.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lngen.lab.bench import few_rows, timing
from lngen.lab.bench.argument_sets import (
    Case,
    Prepared,
    Provider,
    Tensors,
    complaint,
    expected,
    make_cases,
    poison,
    set_bytes,
)
from lngen.lab.bench.records import Point, Record, blank, grouped, judge, point_of
from lngen.lab.bench.tasks import (
    FEW_ROWS,
    IN_TURN,
    LATENCY,
    OVERLAPPED,
    THROUGHPUT,
    Task,
    ceiling_bytes,
    floor_bytes,
    gb_s,
)
from lngen.lab.bench.timing import Launch, describe
from lngen.lab.bench.torch_gpu import Gpu

IMPLAUSIBLE = 1.1  # times the ceiling, whose calls, like a peer's, do not overlap
LINKS = 64  # of the chain of a latency, before the chain restarts


@dataclass(frozen=True)
class Method:
    """The method of timing. With the defaults a task of five providers takes about a second.

    rounds      each replays every provider once, in an order of its own
    warm_ms     replays before the first round
    replay_us   intended duration of a replay; latency_us: for a latency and few rows
    repeats     how often rounds are repeated at most when the ceiling has moved
    """

    rounds: int = timing.ROUNDS
    warm_ms: float = 60.0
    replay_us: float = 4_000.0
    latency_us: float = 1_000.0
    repeats: int = 3

    def __str__(self) -> str:
        return (
            f"{self.rounds} shuffled rounds of CUDA graphs of {self.replay_us / 1e3:g} ms, "
            f"{self.warm_ms:g} ms warm-up, rotating buffers, each call waits for the end of the last, "
            "except where a provider's name says overlapped; "
            f"latency: chains of {LINKS} dependent launches; "
            "few rows: in turn behind a kernel of one element, or between GEMMs of width "
            f"{few_rows.WIDTH}, whose time alone is subtracted"
        )


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a benchmark.

    progress  before a task: tasks done, tasks in all, and the task as text
    say       a sentence for the user
    keep      all records so far, after every task
    """

    progress: Callable[[int, int, str], None] = lambda done, total, text: None
    say: Callable[[str], None] = lambda text: None
    keep: Callable[[list[Record]], object] = lambda records: None


@dataclass(frozen=True)
class Outcome:
    """All records, with those that already existed first, and the number of tasks left."""

    records: list[Record] = field(default_factory=list)
    left: int = 0


def benchmark(
    tasks: Sequence[Task],
    providers: Sequence[Provider],
    gpu: Gpu,
    method: Method | None = None,
    *,
    hooks: Hooks | None = None,
    saved: Sequence[Record] = (),
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Time the providers on every task, side by side per task.

    A failure of a provider or a task becomes a record with a note and the run continues, unless the GPU itself is
    lost. Tasks of which ``saved`` has calm records for all these providers are not measured again. A task is not
    started if it would end after ``seconds``, should it take as long as the longest so far.
    """
    method, hooks = method or Method(), hooks or Hooks()
    points = grouped(saved, lambda r: r.point)
    todo = [task for task in tasks if not _finished(points.get(point_of(task), []), covering(task, providers))]
    begin, longest, done = clock(), 0.0, 0
    enough = gpu.memory()[0] // 2
    with _quiet_collector():
        for task in todo:
            start = clock()
            if seconds is not None and start - begin + longest > seconds:
                break
            hooks.progress(len(tasks) - len(todo) + done, len(tasks), str(task))
            points[point_of(task)] = _measured(task, covering(task, providers), gpu, method, hooks.say)
            done += 1
            hooks.keep(_flat(points))
            if not _alive(gpu):
                hooks.say(f"{task}: the GPU no longer answers after this task; the run ends here.")
                break
            gc.collect()  # reference cycles of the task
            if gpu.memory()[0] < enough:  # not always, since allocation is slow
                gpu.release()
            longest = max(longest, clock() - start)
    return Outcome(_flat(points), len(todo) - done)


def _measured(
    task: Task, providers: Sequence[Provider], gpu: Gpu, method: Method, say: Callable[[str], None]
) -> list[Record]:
    """As ``measure``; an error of the GPU ends the task and is the note of its records."""
    try:
        with gpu.active():
            return measure(task, providers, gpu, method, say)
    except Exception as error:
        return [blank(task, p.name, f"failed: {describe(error)}") for p in providers]


def _finished(found: Sequence[Record], providers: Sequence[Provider]) -> bool:
    """True if every provider has a record and the GPU was calm."""
    return {p.name for p in providers} <= {r.provider for r in found} and not any(r.drifted for r in found)


def _flat(points: dict[Point, list[Record]]) -> list[Record]:
    return [r for group in points.values() for r in group]


def _alive(gpu: Gpu) -> bool:
    try:
        gpu.synchronize()
    except Exception:  # after an illegal access, for example, this process cannot use the device
        return False
    return True


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Excludes all existing objects from garbage collection after each task: PyTorch alone has a million of them."""
    gc.collect()
    frozen = gc.get_freeze_count()  # by the caller, and to stay so
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


# ---- one task ----


def covering(task: Task, providers: Sequence[Provider]) -> list[Provider]:
    """The providers that can do the whole task; of the ceilings the task's, and for chains not the overlapped one."""
    ceilings = [task.ceiling, *([] if task.kind == LATENCY else [task.ceiling + OVERLAPPED])]
    able = [p for p in providers if p.checked or p.name in ceilings]
    return [p for p in able if all(p.covers(spec) for spec in task.specs)]


def measure(
    task: Task, providers: Sequence[Provider], gpu: Gpu, method: Method, say: Callable[[str], None]
) -> list[Record]:
    """A judged record per provider; a provider that fails or computes a wrong result has a note and no time."""
    count, floor = _set_count(task, providers, gpu)
    cases = make_cases(task, count, gpu)
    prepared, notes = _prepare_all(providers, cases)
    launches = {name: _unit(halves, count) for name, halves in prepared.items() if name not in notes}
    base = few_rows.ALONE if task.kind in FEW_ROWS else None
    reference = base or task.ceiling
    if base:
        around = few_rows.surroundings(task, cases[0], floor)
        launches = {base: around(None), **{name: around(prepared[name][0]) for name in launches}}

    def moved(drift: float) -> None:
        say(f"{task}: {reference} moved by {drift:.1%}, the GPU is busy or throttling; the rounds are repeated.")

    found = timing.time_side_by_side(
        launches,
        count,
        gpu,
        reference=reference,
        base=base,
        rounds=method.rounds,
        warm_ms=method.warm_ms,
        replay_us=method.replay_us if task.kind == THROUGHPUT else method.latency_us,
        repeats=method.repeats,
        moved=moved,
    )
    notes |= {name: f"failed: {reason}" for name, reason in found.failures.items()}
    held = count * (floor + few_rows.surrounding_bytes(task))
    cold = task.kind in (LATENCY, IN_TURN) or held >= 2 * gpu.memory()[1]
    warm = "" if cold else f"warm: {count} sets are only {held / 1e6:.0f} MB"
    ceiling = sum(ceiling_bytes(c.spec, c.rows) for c in cases)
    records = []
    for provider in providers:
        name = provider.name
        schedule = "; ".join(dict.fromkeys(half.schedule for half in prepared.get(name, []) if half.schedule))
        record = blank(task, name, notes.get(name, warm))
        record = replace(record, sets=count, drifted=found.drifted, repeats=found.repeats, schedule=schedule)
        if name in found.stats:
            record = _timed(record, found.stats[name], found.launches[name])
        if record.us_median is not None and task.kind != LATENCY:
            record = _rated(record, floor if provider.checked else ceiling, found.stats.get(task.ceiling), ceiling)
            record = doubted(record, gpu.peak())
        records.append(record)
    return judge(records)


def _set_count(task: Task, providers: Sequence[Provider], gpu: Gpu) -> tuple[int, int]:
    """How many argument sets to rotate, and the bytes of one."""
    floor = sum(floor_bytes(spec, task.rows) for spec in task.specs)
    if task.kind == LATENCY:
        return LINKS, floor
    free, l2 = gpu.memory()
    # The expected results are float64, and so are the intermediate ones. Some providers allocate results of
    # their own, one per set: each may take as much as the sets do.
    free -= 2 * 8 * sum(math.prod(r.type.shape(task.rows, task.d)) for s in task.specs for r in s.graph().results)
    # A set may hold more than a call moves: inputs that the backward of a peer needs and lngen's does not.
    free = free // (1 + len(providers)) * floor // set_bytes(task)
    return timing.set_count(floor + few_rows.surrounding_bytes(task), l2, free), floor


def _prepare_all(
    providers: Sequence[Provider], cases: Sequence[Case]
) -> tuple[dict[str, list[Prepared]], dict[str, str]]:
    """Each provider ready for every case, and notes on those that fail or are wrong."""
    prepared: dict[str, list[Prepared]] = {}
    notes: dict[str, str] = {}
    wanted = [expected(case) for case in cases]
    start = cases[0].sets[0][cases[0].chain].clone() if cases[0].chain else None
    for provider in providers:
        if reason := provider.left_out(cases[0].spec):
            notes[provider.name] = f"left out: {reason}"
            continue
        try:
            if start is not None:  # an earlier provider's chain overwrote the input of the first set
                cases[0].sets[0][cases[0].chain].copy_(start)
            prepared[provider.name], note = _prepare(provider, cases, wanted)
            notes |= {provider.name: note} if note else {}
        except Exception as error:  # the other peers continue, whatever one raises
            notes[provider.name] = f"failed: {describe(error)}"
    return prepared, notes


def _prepare(provider: Provider, cases: Sequence[Case], wanted: Sequence[Tensors]) -> tuple[list[Prepared], str]:
    """Prepare, run on every set, and check the first and the last; of a chain the first link alone."""
    case = cases[0]
    ends = [0] if case.chain else sorted({0, len(case.sets) - 1})
    for index in ends:
        for half in cases:
            poison(half, index)
        for name in {*case.outputs} & {*cases[-1].inputs}:  # a backward may run first, or with its own statistics
            case.sets[index][name][...] = wanted[0][name]
    prepared = [provider.prepare(half) for half in cases]
    unit = _unit(prepared, len(case.sets))
    for index in ends if case.chain else range(len(case.sets)):
        unit(case.gpu.stream(), index)
    case.gpu.synchronize()
    for half, ready, want in zip(cases, prepared, wanted, strict=True):
        for index in ends if provider.checked else []:
            wrong = complaint(half, want, ready.results(index))
            if wrong:
                return prepared, f"wrong: {wrong}"
    return prepared, ""


def _unit(halves: Sequence[Prepared], count: int) -> Launch:
    """One launch of a task.

    In forward and backward, the backward takes the set whose forward is half a cycle earlier: in training other
    layers run between the two, so a backward finds nothing of its forward in the cache.
    """
    if len(halves) == 1:
        return halves[0].launch
    first, second = (half.launch for half in halves)

    def launch(stream: int, index: int) -> None:
        first(stream, index)
        second(stream, (index + count // 2) % count)

    return launch


def _timed(record: Record, stats: timing.Stats, launches: int) -> Record:
    if stats.median <= 0:
        return replace(record, note="noise: with the call the surroundings took no longer than alone")
    if record.kind in FEW_ROWS and stats.p90 - stats.p10 > few_rows.NOISE * stats.median and not record.note:
        record = replace(record, note=f"noisy: the rounds differ by more than {few_rows.NOISE:.0%} of the time")
    median, p10, p90, least = (round(us, 3) for us in (stats.median, stats.p10, stats.p90, stats.minimum))
    return replace(record, us_median=median, us_p10=p10, us_p90=p90, us_min=least, launches=launches)


def _rated(record: Record, nbytes: int, ceiling: timing.Stats | None, ceiling_nbytes: int) -> Record:
    """The record with GB/s and the fraction of the ceiling; of few rows with the fraction alone, unless noisy."""
    assert record.us_median is not None
    if record.kind in FEW_ROWS:
        calm = not record.note and ceiling is not None and ceiling.p10 > 0
        return replace(record, fraction=round(ceiling.median / record.us_median, 4)) if calm and ceiling else record
    speed = gb_s(nbytes, record.us_median)
    fraction = None if ceiling is None else round(speed / gb_s(ceiling_nbytes, ceiling.median), 4)
    return replace(record, gb_s=round(speed, 1), fraction=fraction)


def doubted(record: Record, peak: float) -> Record:
    """The record, with a note if it is implausible: faster than memory (``peak`` GB/s), or a peer than the ceiling."""
    if record.note or record.gb_s is None:
        return record
    if record.gb_s > peak:
        return replace(record, note=f"implausible: faster than memory, {peak:.0f} GB/s")
    if (record.fraction or 0) > IMPLAUSIBLE and not (record.is_lngen or record.is_ceiling):
        return replace(record, note="implausible: faster than the ceiling")
    return record
