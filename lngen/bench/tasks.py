"""Tasks, which are timed: a spec, or forward and backward as one unit, at a number of rows, in one of two classes."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.errors import SpecError
from lngen.ir import DType
from lngen.spec import Spec, parse_spec

# The ceiling of each direction: it moves the bytes that a norm must, and computes nothing.
CEILINGS = {"fwd": "copy", "bwd": "add", "both": "copy+add"}
OVERLAPPED = "-overlapped"  # after a ceiling's name: calls overlap, by programmatic launch
DIRECTIONS = tuple(CEILINGS)

THROUGHPUT = "throughput"  # cold rotating buffers, GB/s
LATENCY = "latency"  # each launch reads the previous result, warm, us per call
CHAINS = {"fwd": "x", "bwd": "dy"}  # the input that takes the main result of the previous launch


@dataclass(frozen=True)
class Task:
    """Specs launched one after the other as one unit: one spec, or forward and then backward."""

    specs: tuple[Spec, ...]
    rows: int
    kind: str = THROUGHPUT

    def __str__(self) -> str:
        return f"{self.spec} rows={self.rows}{' latency' if self.kind == LATENCY else ''}"

    @property
    def direction(self) -> str:
        """``fwd``, ``bwd`` or ``both``."""
        return self.specs[0].direction if len(self.specs) == 1 else "both"

    @property
    def spec(self) -> str:
        """The spec's text, with the direction ``both`` for two specs."""
        head, _, keys = str(self.specs[0]).partition(":")
        return f"{head.partition('.')[0]}.{self.direction}:{keys}"

    @property
    def graph(self) -> str:
        """The graph's name."""
        return self.specs[0].definition.name

    @property
    def d(self) -> int:
        """Features per row."""
        return self.specs[0].d

    @property
    def dtype(self) -> DType:
        """The dtype of x."""
        return self.specs[0].dtype

    @property
    def ceiling(self) -> str:
        """The name of its ceiling."""
        return CEILINGS[self.direction]


def make_task(graph: str, direction: str, dtype: str, rows: int, d: int, kind: str = THROUGHPUT) -> Task:
    """A task from its text fields; SpecError for a wrong one."""
    if direction not in DIRECTIONS:
        raise SpecError(f"There is no direction '{direction}', expected some of {', '.join(DIRECTIONS)}.")
    halves = ("fwd", "bwd") if direction == "both" else (direction,)
    return Task(tuple(parse_spec(f"{graph}.{half}:d={d},dtype={dtype}") for half in halves), rows, kind)
