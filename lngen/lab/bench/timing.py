"""Timing launches side by side: cold rotating buffers, one CUDA graph per candidate, shuffled rounds.

The method and its reasons:

- every launch takes the next of several argument sets, which together exceed the L2 cache several times over;
  otherwise the L2 cache is measured
- the launches of a candidate are captured in one CUDA graph, so that no host time is measured
- each round replays all candidates, in an order of its own, so that a drift of the clocks affects all of them alike,
  and none always follows the same other
- a reference among them, the copy, shows whether the clocks drift
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lngen.errors import LngenError

COLD_BYTES = 300_000_000  # at least, and at least L2_FACTOR times the L2 cache
L2_FACTOR = 5
MEMORY_FRACTION = 0.6  # of the free memory, for argument sets
MAX_SETS = 64
REPLAY_US = 8_000.0  # intended duration of one replay
MAX_LAUNCHES = 2_000
ROUNDS = 12
WARM_MS = 150.0
DRIFT = 0.02  # of the reference; rounds with more are doubtful

Launch = Callable[[int, int], None]
"""``launch(stream, index)``: enqueue one call on the stream (a pointer), with the argument set ``index``."""


class Timer(Protocol):
    """Captures launches and times replays: the benchmark's is PyTorch's, the tuner's is CuPy's."""

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        """A replayable graph of one launch per index."""

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        """Replay the graphs in the given order, back to back; milliseconds of each."""


@dataclass(frozen=True)
class Stats:
    """Microseconds per launch over the rounds."""

    median: float
    p10: float
    p90: float
    minimum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats:
        """The statistics of at least one sample."""
        median, p10, p90 = (float(v) for v in np.percentile(samples, (50, 10, 90)))
        return cls(median, p10, p90, float(min(samples)))


@dataclass(frozen=True)
class Timing:
    """The result of ``time_side_by_side``: by candidate, statistics or the reason for their absence.

    drift      how far the reference moved during the rounds that count, relative to its time
    repeats    how often all rounds were repeated because of a larger drift
    """

    stats: dict[str, Stats] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    drift: float = 0.0
    repeats: int = 0

    @property
    def drifted(self) -> bool:
        """True if the reference moved so much between the two halves that the times are doubtful."""
        return self.drift > DRIFT


def cold_bytes(l2_bytes: int) -> int:
    """What has to be touched between two uses of the same memory, so that no cache holds it."""
    return max(COLD_BYTES, L2_FACTOR * l2_bytes)


def set_count(set_bytes: int, l2_bytes: int, free_bytes: int, most: int = MAX_SETS) -> int:
    """The number of argument sets to rotate; LngenError if not even one fits."""
    affordable = int(MEMORY_FRACTION * free_bytes // max(set_bytes, 1))
    if affordable < 1:
        raise LngenError(
            f"One set of arguments takes {set_bytes / 1e9:.1f} GB and at most {MEMORY_FRACTION:.0%} of the "
            f"{free_bytes / 1e9:.1f} GB available may be used; choose fewer rows."
        )
    wanted = math.ceil(cold_bytes(l2_bytes) / max(set_bytes, 1))
    return min(max(wanted, 2), most, affordable)


def launch_count(us: float, sets: int, replay_us: float = REPLAY_US) -> int:
    """Launches per graph for a kernel of ``us``: a replay of about ``replay_us``, each set equally often."""
    wanted = min(max(round(replay_us / max(us, 1e-3)), 1), MAX_LAUNCHES)
    return math.ceil(wanted / sets) * sets


def drift(samples: Sequence[float]) -> float:
    """The distance of the median of the second half from that of the first, relative to the first."""
    half = len(samples) // 2
    if half == 0:
        return 0.0
    first, second = float(np.median(samples[:half])), float(np.median(samples[-half:]))
    return abs(second / first - 1)


def time_side_by_side(
    launches: Mapping[str, Launch],
    sets: int,
    timer: Timer,
    *,
    reference: str | None = None,
    base: str | None = None,
    rounds: int = ROUNDS,
    warm_ms: float = WARM_MS,
    replay_us: float = REPLAY_US,
    repeats: int = 0,
    moved: Callable[[float], None] = lambda drift: None,
) -> Timing:
    """Time every candidate over ``sets`` argument sets; a candidate that cannot be captured fails alone.

    reference  the candidate whose drift is reported; if None or failed, the drift is 0
    base       the candidate whose time in the same round is subtracted from that of all others; LngenError if it fails
    repeats    how often all rounds are repeated at most while the reference drifts; the calmest count
    moved      is called with the drift of rounds that will be repeated
    """
    graphs, counts, failures = _capture_all(timer, launches, sets, replay_us)
    if base in failures:
        raise LngenError(f"{base} cannot be timed: {failures[base]}.")
    if not graphs:
        return Timing(failures=failures)
    warmed = 0.0
    while warmed < warm_ms:
        warmed += sum(timer.elapsed([*graphs.values()]))
    calmest: tuple[float, dict[str, list[float]]] = (math.inf, {})
    for repeat in range(repeats + 1):
        if repeat:
            moved(calmest[0])
        samples = _rounds(timer, graphs, counts, rounds)
        found = drift(samples[reference]) if reference in samples else 0.0
        calmest = min(calmest, (found, samples), key=lambda one: one[0])
        if found <= DRIFT:
            break
    samples = calmest[1]
    if base is not None:
        alone = samples.pop(base)
        samples = {name: [*map(operator.sub, s, alone)] for name, s in samples.items()}
    return Timing({name: Stats.of(s) for name, s in samples.items()}, counts, failures, calmest[0], repeat)


def _capture_all(
    timer: Timer, launches: Mapping[str, Launch], sets: int, replay_us: float
) -> tuple[dict[str, Any], dict[str, int], dict[str, str]]:
    """The graph of every candidate and its number of launches, or the reason why it has none."""
    graphs: dict[str, Any] = {}
    counts: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name, launch in launches.items():
        try:
            graphs[name], counts[name] = _capture(timer, launch, sets, replay_us)
        except Exception as error:  # the other peers continue, whatever one raises
            failures[name] = describe(error)
    return graphs, counts, failures


def _rounds(timer: Timer, graphs: Mapping[str, Any], counts: Mapping[str, int], rounds: int) -> dict[str, list[float]]:
    """Microseconds per launch of every candidate in each of the rounds, whose orders are the same in every run."""
    draw = random.Random(0)
    order = [name for _ in range(rounds) for name in draw.sample([*graphs], len(graphs))]
    # The first replay finds an idle GPU and includes the launch itself, so one more is replayed and not counted.
    ms = timer.elapsed([graphs[order[-1]], *(graphs[name] for name in order)])[1:]
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for name, one in zip(order, ms, strict=True):
        samples[name].append(1e3 * one / counts[name])
    return samples


def fastest(launches: Sequence[Launch], sets: int, timer: Timer, rounds: int = 3) -> Launch:
    """The launch with the least median over interleaved rounds; the first if there is only one."""
    if len(launches) == 1:
        return launches[0]
    graphs = [timer.capture(launch, range(sets)) for launch in launches]
    ms = timer.elapsed(graphs * (rounds + 1))[len(graphs) :]
    medians = [float(np.median(ms[n :: len(graphs)])) for n in range(len(graphs))]
    return launches[medians.index(min(medians))]


def describe(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def _capture(timer: Timer, launch: Launch, sets: int, replay_us: float) -> tuple[Any, int]:
    """The graph to time and its number of launches, which a short graph determines."""
    probe = [i % sets for i in range(max(sets, 8))]
    graph = timer.capture(launch, probe)
    us = 1e3 * timer.elapsed([graph, graph])[1] / len(probe)
    count = launch_count(us, sets, replay_us)
    return timer.capture(launch, [i % sets for i in range(count)]), count
