"""Records: one provider on one task, and the point at which records are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lngen.bench.tasks import CEILINGS, LATENCY, OVERLAPPED, THROUGHPUT, Task

OWN, VARIANT = "lngen", "lngen:"  # lngen; another schedule

Point = tuple[str, str, int]
"""The records that are timed side by side: class, spec, rows."""


def is_ceiling(provider: str) -> bool:
    """True for a ceiling, overlapped or not."""
    return provider.removesuffix(OVERLAPPED) in CEILINGS


@dataclass(frozen=True)
class Record:
    """One provider on one task. Without a time, ``note`` has the reason.

    graph         the graph's name, with its digest if it is a program's own, and its keys but d and dtype
    gb_s          floor bytes over the median time; a ceiling's own bytes for a ceiling; none for a latency
    fraction      gb_s over that of the ceiling, timed in the same rounds
    launches      per replayed graph
    sets          argument sets rotated
    drifted       the time of the ceiling moved by more than 2 %, in spite of repeated rounds
    repeats       how often the rounds were repeated for that reason
    kind          ``throughput``: cold rotating buffers; ``latency``: a chain of dependent launches, warm
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


def latencies(records: Sequence[Record]) -> list[Record]:
    """Those of the latency class."""
    return [r for r in records if r.kind == LATENCY]


def throughputs(records: Sequence[Record]) -> list[Record]:
    """Those of the throughput class."""
    return [r for r in records if r.kind == THROUGHPUT]
