"""The measurement of one task: providers are prepared, their results checked, then all are timed side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lngen.bench import timing
from lngen.bench.cases import Case, Tensors
from lngen.bench.engines import Engine
from lngen.bench.floor import ceiling_bytes, floor_bytes, gb_s
from lngen.bench.formulas import complaint, expected
from lngen.bench.providers import Prepared, Provider
from lngen.bench.records import Record, blank
from lngen.bench.sets import make_cases, poison, set_bytes
from lngen.bench.tasks import LATENCY, OVERLAPPED, Task
from lngen.bench.timing import Launch
from lngen.bench.verdict import judge

IMPLAUSIBLE = 1.1  # times the ceiling, whose calls, like a peer's, do not overlap
LINKS = 64  # of the chain of a latency, before the chain restarts


@dataclass(frozen=True)
class Method:
    """The method of timing. With the defaults a task of five providers takes about a second.

    rounds      interleaved rounds
    warm_ms     replays before the first round
    replay_us   intended duration of a replay; latency_us: for a latency
    repeats     how often rounds are repeated at most when the ceiling has moved
    """

    rounds: int = timing.ROUNDS
    warm_ms: float = 60.0
    replay_us: float = 4_000.0
    latency_us: float = 1_000.0
    repeats: int = 3

    def __str__(self) -> str:
        return (
            f"{self.rounds} interleaved rounds of CUDA graphs of {self.replay_us / 1e3:g} ms, "
            f"{self.warm_ms:g} ms warm-up, rotating buffers, each call waits for the end of the last, "
            "except where a provider's name says overlapped; "
            f"latency: chains of {LINKS} dependent launches"
        )


def covering(task: Task, providers: Sequence[Provider]) -> list[Provider]:
    """The providers that can do the whole task; of the ceilings the task's, and for chains not the overlapped one."""
    ceilings = [task.ceiling, *([] if task.kind == LATENCY else [task.ceiling + OVERLAPPED])]
    able = [p for p in providers if p.checked or p.name in ceilings]
    return [p for p in able if all(p.covers(spec) for spec in task.specs)]


def measure(
    task: Task, providers: Sequence[Provider], engine: Engine, method: Method, say: Callable[[str], None]
) -> list[Record]:
    """A judged record per provider; a provider that fails or computes a wrong result has a note and no time."""
    count, floor = _set_count(task, providers, engine)
    cases = make_cases(task, count, engine)
    prepared, notes = _prepare_all(providers, cases)
    launches = {name: _unit(halves, count) for name, halves in prepared.items() if name not in notes}
    found = _time(task, launches, count, engine, method, say)
    latency = task.kind == LATENCY
    notes |= {name: f"failed: {reason}" for name, reason in found.failures.items()}
    cold = latency or count * floor >= 2 * engine.memory()[1]
    warm = "" if cold else f"warm: {count} sets are only {count * floor / 1e6:.0f} MB"
    ceiling = sum(ceiling_bytes(c.spec, c.rows, c.graph) for c in cases)
    records = []
    for provider in providers:
        name = provider.name
        record = blank(task, name, notes.get(name, warm))
        record = replace(record, sets=count, drifted=found.drifted, repeats=found.repeats)
        if name in prepared:
            schedules = dict.fromkeys(half.schedule for half in prepared[name])
            record = replace(record, schedule="; ".join(filter(None, schedules)))
        if name in found.stats:
            record = replace(_timed(record, found.stats[name]), launches=found.launches[name])
            if not latency:
                record = _rated(record, floor if provider.checked else ceiling, found.stats.get(task.ceiling), ceiling)
                record = doubted(record, engine.peak())
        records.append(record)
    return judge(records)


def _time(
    task: Task, launches: dict[str, Launch], count: int, engine: Engine, method: Method, say: Callable[[str], None]
) -> timing.Timing:
    """The launches of a task timed by the method, with the ceiling as the reference."""

    def moved(drift: float) -> None:
        say(f"{task}: {task.ceiling} moved by {drift:.1%}, the GPU is busy or throttling; the rounds are repeated.")

    return timing.time_side_by_side(
        launches,
        count,
        engine,
        reference=task.ceiling,
        rounds=method.rounds,
        warm_ms=method.warm_ms,
        replay_us=method.latency_us if task.kind == LATENCY else method.replay_us,
        repeats=method.repeats,
        moved=moved,
    )


def _set_count(task: Task, providers: Sequence[Provider], engine: Engine) -> tuple[int, int]:
    """How many argument sets to rotate, and the bytes of one."""
    floor = sum(floor_bytes(spec, task.rows) for spec in task.specs)
    if task.kind == LATENCY:
        return LINKS, floor
    free, l2 = engine.memory()
    # The expected results are float64, and so are the intermediate ones. Some providers allocate results of
    # their own, one per set: each may take as much as the sets do.
    free -= 2 * 8 * sum(math.prod(r.type.shape(task.rows, task.d)) for s in task.specs for r in s.graph().results)
    # A set may hold more than a call moves: inputs that the backward of a peer needs and lngen's does not.
    return timing.set_count(floor, l2, free // (1 + len(providers)) * floor // set_bytes(task)), floor


def _prepare_all(
    providers: Sequence[Provider], cases: Sequence[Case]
) -> tuple[dict[str, list[Prepared]], dict[str, str]]:
    """Each provider ready for every case, and notes on those that fail or are wrong."""
    prepared: dict[str, list[Prepared]] = {}
    notes: dict[str, str] = {}
    wanted = [expected(case) for case in cases]
    start = cases[0].engine.clone(cases[0].sets[0][cases[0].chain]) if cases[0].chain else None
    for provider in providers:
        try:
            if start is not None:  # an earlier provider's chain overwrote the input of the first set
                cases[0].engine.copy(cases[0].sets[0][cases[0].chain], start)
            prepared[provider.name], note = _prepare(provider, cases, wanted)
            notes |= {provider.name: note} if note else {}
        except Exception as error:  # the other peers continue, whatever one raises
            notes[provider.name] = f"failed: {timing.describe(error)}"
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
        unit(case.engine.stream(), index)
    case.engine.synchronize()
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


def _timed(record: Record, stats: timing.Stats) -> Record:
    median, p10, p90, least = (round(us, 3) for us in (stats.median, stats.p10, stats.p90, stats.minimum))
    return replace(record, us_median=median, us_p10=p10, us_p90=p90, us_min=least)


def _rated(record: Record, nbytes: int, ceiling: timing.Stats | None, ceiling_nbytes: int) -> Record:
    """The record with GB/s and the fraction of the ceiling."""
    assert record.us_median is not None
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
