"""Records: one provider on one task, the verdict on it, and a summary of many."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lngen.compiler.ir import DType
from lngen.lab.bench.tasks import (
    FEW_ROWS,
    RATIO_EACH,
    RATIO_FEW_ROWS,
    RATIO_MEAN,
    TARGETED,
    THROUGHPUT,
    Task,
    is_ceiling,
    target_fraction,
)

WORST = 5  # points that a summary names
MOST_DIGITS = 9  # behind the point
COMMON = range(768, 16384 + 1, 256)  # widths of models
OWN, VARIANT = "lngen", "lngen:"  # lngen; another schedule
SERIAL = "lngen-serial"  # of earlier versions: lngen's calls in turn, in files where "lngen" overlaps them

Key = TypeVar("Key", bound=Hashable)
Point = tuple[str, str, int]
"""The records that are timed side by side: class, spec, rows."""


@dataclass(frozen=True)
class Record:
    """One provider on one task. Without a time, ``note`` has the reason.

    graph         the graph's name, with its digest if it is a program's own, and its keys but d and dtype
    gb_s          floor bytes over the median time; a ceiling's own bytes for a ceiling; none of the other kinds
    fraction      gb_s over that of the ceiling, timed in the same rounds; for few rows the ceiling's time over this one
    launches      per replayed graph
    sets          argument sets rotated
    drifted       the time of the ceiling moved by more than 2 %, in spite of repeated rounds
    repeats       how often the rounds were repeated for that reason
    kind          ``throughput``: cold rotating buffers; ``latency``: a chain of dependent launches, warm;
                  ``in turn``: behind a kernel that triggers no programmatic launch, cold; ``between GEMMs``;
                  of the last two the time is what a call adds
    tensor_bytes  of one [M, D] tensor of the spec's dtype
    target        the fraction of the ceiling that lngen has to reach; None: no target
    met           whether lngen reached it; None for other providers
    best_peer     the fastest of the others, and ``ratio``, its time over lngen's; for lngen alone
    """

    spec: str
    graph: str
    direction: str
    rows: int
    d: int
    dtype: str
    provider: str
    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    us_min: float | None = None
    gb_s: float | None = None
    fraction: float | None = None
    launches: int = 0
    sets: int = 0
    schedule: str = ""
    drifted: bool = False
    note: str = ""
    kind: str = THROUGHPUT
    tensor_bytes: int = 0
    target: float | None = None
    met: bool | None = None
    best_peer: str = ""
    ratio: float | None = None
    repeats: int = 0

    @property
    def point(self) -> Point:
        """Records of one point were timed side by side."""
        return self.kind, self.spec, self.rows

    @property
    def is_lngen(self) -> bool:
        """True for lngen's own kernels."""
        return self.provider.startswith(OWN)

    @property
    def is_ceiling(self) -> bool:
        """True for a ceiling, overlapped or not."""
        return is_ceiling(self.provider)


def blank(task: Task, provider: str, note: str = "") -> Record:
    """A record of a task without a time, and perhaps the reason."""
    names = task.spec, task.graph, task.direction
    nbytes = task.rows * task.d * task.dtype.size
    return Record(*names, task.rows, task.d, str(task.dtype), provider, note=note, kind=task.kind, tensor_bytes=nbytes)


def point_of(task: Task) -> Point:
    """The point of the task's records."""
    return task.kind, task.spec, task.rows


def grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Records by a key, in order of appearance."""
    groups: dict[Key, list[Record]] = {}
    for r in records:
        groups.setdefault(key(r), []).append(r)
    return groups


def graph_key(r: Record) -> tuple[str, str, str]:
    """What a table or a figure is of: graph, direction and dtype."""
    return r.graph, r.direction, r.dtype


@dataclass(frozen=True)
class HostRecord:
    """Microseconds of host time per call; without a time, ``note`` has the reason."""

    spec: str
    rows: int
    call: str
    arrays: str
    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    note: str = ""


# ---- the verdict: targets met or missed, and the ratio to the best peer ----


def judge(records: Sequence[Record]) -> list[Record]:
    """The records with size and target and, for lngen, verdict and best peer."""
    peers: dict[Point, tuple[float, str]] = {}
    for r in records:
        fair = not (r.is_lngen or r.is_ceiling or r.note.startswith("implausible"))
        if fair and r.us_median is not None:
            peers[r.point] = min(peers.get(r.point, (math.inf, "")), (r.us_median, r.provider))
    return [_judged(r, peers.get(r.point)) for r in records]


def _judged(r: Record, peer: tuple[float, str] | None) -> Record:
    nbytes = r.rows * r.d * DType(r.dtype).size
    aimed = r.kind == THROUGHPUT and r.graph in TARGETED
    target = target_fraction(r.direction, r.dtype, nbytes, r.d) if aimed else None
    r = replace(r, tensor_bytes=nbytes, target=target, met=None, best_peer="", ratio=None)
    if not r.is_lngen:
        return r
    if target is not None and r.fraction is not None:
        r = replace(r, met=r.fraction >= target)
    if peer is not None and r.us_median is not None:
        r = replace(r, best_peer=peer[1], ratio=round(peer[0] / r.us_median, 4))
    return r


@dataclass(frozen=True)
class Summary:
    """lngen over all points of a class, a graph and a direction; ``worst`` and ``slower`` are points as text.

    provider     the way to call lngen
    ratio        geometric mean of the ratios to the best peer; ratio_target: its target
    ratio_common the same over the widths of models, D a multiple of 256 from 768 to 16384: at wide and odd rows some
                 peers collapse, which raises ``ratio``
    compared     points that have a ratio; ahead: those with a ratio of 1 or more
    worst        the points farthest below their target
    slower       the points with the smallest ratio below 1
    """

    kind: str
    graph: str
    direction: str
    provider: str
    points: int
    met: int
    missed: int
    failed: int
    ratio: float | None
    ratio_common: float | None
    ratio_target: float | None
    compared: int
    ahead: int
    worst: tuple[str, ...]
    slower: tuple[str, ...]


def summarise(records: Sequence[Record]) -> list[Summary]:
    """A summary per class, graph, direction and way to call lngen, in order of appearance."""
    groups = grouped((r for r in records if r.is_lngen), lambda r: (r.kind, r.graph, r.direction, r.provider))
    return [_summary(*key, group) for key, group in groups.items()]


def _summary(kind: str, graph: str, direction: str, provider: str, group: Sequence[Record]) -> Summary:
    ratios = [(r.d, r.ratio) for r in group if r.ratio is not None]
    missed = sorted((r for r in group if r.met is False), key=lambda r: (r.fraction or 0) / (r.target or 1))
    slower = sorted((r for r in group if r.ratio is not None and r.ratio < RATIO_EACH), key=lambda r: r.ratio or 0)
    return Summary(
        kind,
        graph,
        direction,
        provider,
        points=len(group),
        met=sum(r.met is True for r in group),
        missed=len(missed),
        failed=sum(r.us_median is None for r in group),
        ratio=geometric_mean([ratio for _, ratio in ratios]) if ratios else None,
        ratio_common=geometric_mean(common) if (common := [ratio for d, ratio in ratios if d in COMMON]) else None,
        ratio_target=_ratio_target(kind, graph, direction),
        compared=len(ratios),
        ahead=len(ratios) - len(slower),
        worst=tuple(f"{_shape(r)} {' < '.join(unlike(r.fraction or 0, r.target or 1, 3))}" for r in missed[:WORST]),
        slower=tuple(f"{_shape(r)} {unlike(r.ratio or 0, RATIO_EACH, 2)[0]} x {r.best_peer}" for r in slower[:WORST]),
    )


def _ratio_target(kind: str, graph: str, direction: str) -> float | None:
    if kind in FEW_ROWS:
        return RATIO_FEW_ROWS.get(direction)
    return RATIO_MEAN.get(direction) if kind == THROUGHPUT and graph in TARGETED else None


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean to four digits, of at least one ratio."""
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)


def unlike(less: float, more: float, digits: int) -> tuple[str, str]:
    """Two numbers with so many decimals, or with as many as make them differ."""
    while f"{less:.{digits}f}" == f"{more:.{digits}f}" and digits < MOST_DIGITS:
        digits += 1
    return f"{less:.{digits}f}", f"{more:.{digits}f}"


def _shape(r: Record) -> str:
    return f"{r.rows} x {r.d} {r.dtype}"
