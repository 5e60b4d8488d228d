"""The benchmark: all tasks, each result saved at once, within a time limit."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lngen.bench.engines import Engine
from lngen.bench.measure import Method, covering, measure
from lngen.bench.providers import Provider
from lngen.bench.records import Point, Record, blank, point_of
from lngen.bench.tasks import Task
from lngen.bench.timing import describe


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
    engine: Engine,
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
    points: dict[Point, list[Record]] = {}
    for r in saved:
        points.setdefault(r.point, []).append(r)
    todo = [task for task in tasks if not _finished(points.get(point_of(task), []), covering(task, providers))]
    begin, longest, done = clock(), 0.0, 0
    enough = engine.memory()[0] // 2
    with _quiet_collector():
        for task in todo:
            start = clock()
            if seconds is not None and start - begin + longest > seconds:
                break
            hooks.progress(len(tasks) - len(todo) + done, len(tasks), str(task))
            points[point_of(task)] = _records(task, covering(task, providers), engine, method, hooks.say)
            done += 1
            hooks.keep(_flat(points))
            if not _alive(engine):
                hooks.say(f"{task}: the GPU no longer answers after this task; the run ends here.")
                break
            _tidy(engine, enough)
            longest = max(longest, clock() - start)
    return Outcome(_flat(points), len(todo) - done)


def _records(
    task: Task, providers: Sequence[Provider], engine: Engine, method: Method, say: Callable[[str], None]
) -> list[Record]:
    try:
        with engine.active():
            return measure(task, providers, engine, method, say)
    except Exception as error:  # a GPU error ends a task and is reported in its rows
        return [blank(task, p.name, f"failed: {describe(error)}") for p in providers]


def _finished(found: Sequence[Record], providers: Sequence[Provider]) -> bool:
    """True if every provider has a record and the GPU was calm."""
    return {p.name for p in providers} <= {r.provider for r in found} and not any(r.drifted for r in found)


def _flat(points: dict[Point, list[Record]]) -> list[Record]:
    return [r for group in points.values() for r in group]


def _alive(engine: Engine) -> bool:
    try:
        engine.synchronize()
    except Exception:  # after an illegal access, for example, this process cannot use the device
        return False
    return True


def _tidy(engine: Engine, enough: int) -> None:
    """Free reference cycles of a task, and cached memory only if it is large, since allocation is slow."""
    gc.collect()
    if engine.memory()[0] < enough:
        engine.release()


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Excludes all existing objects from garbage collection after each task: PyTorch alone has a million of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
