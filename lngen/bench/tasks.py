"""Tasks: specs, rows, and the class of measurement; and the ceiling that a task is compared with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from lngen.bench.floor import write_share
from lngen.errors import SpecError, short
from lngen.graphs import GRAPH_ENDING, GRAPHS
from lngen.ir import DType
from lngen.spec import BACKWARD_KEYS, Spec, parse_spec

# The ceilings: the tensors that a call reads, beside the one it writes. They compute nothing worth counting.
MOVES = {"copy": 1, "add": 2}
# Of forward and backward as one unit, a ceiling for each.
CEILINGS = (*MOVES, *("+".join(pair) for pair in product(MOVES, repeat=2)))
OVERLAPPED = "-overlapped"  # after a ceiling's name: calls overlap, by programmatic launch
HALVES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
DIRECTIONS = tuple(HALVES)

THROUGHPUT = "throughput"  # cold rotating buffers, GB/s
LATENCY = "latency"  # each launch reads the previous result, warm, us per call

ELSEWHERE = {"d": "--shapes, --d or --grid", "dtype": "--dtype"}  # keys of a spec that are options of their own
ANY_D = 256  # the tensors of a graph do not depend on D


def ceiling_of(spec: Spec) -> str:
    """``copy`` or ``add``: the one whose share of writes is the nearer to that of the spec's [M, D] tensors.

    A copy reads one tensor and writes one, an addition reads two and writes one: memory is slower with more writes.
    Both move as many bytes as the spec's tensors have (``lngen.bench.ceilings``), so other ratios have a fair ceiling
    too: two tensors read and two written, a copy of twice the bytes; three read and two written, an addition.
    """
    return _ceiling(replace(spec, d=ANY_D))


@lru_cache(maxsize=256)
def _ceiling(spec: Spec) -> str:
    share = write_share(spec.forward() if spec.direction == "fwd" else spec.graph())
    return min(MOVES, key=lambda name: abs(share - 1 / (1 + MOVES[name])))


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
        head, _, keys = str(self.specs[-1]).partition(":")
        return f"{head.partition('.')[0]}.{self.direction}:{keys}"

    @property
    def graph(self) -> str:
        """The graph's name and its keys: ``rmsnorm``, ``rmsnorm:weight=f32``, ``add_rmsnorm@1a2b3c4d``."""
        spec = self.specs[-1]
        keys = [k for k in str(spec).partition(":")[2].split(",") if k.partition("=")[0] not in ELSEWHERE]
        return ":".join([spec.graph_name, *([",".join(keys)] if keys else [])])

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
        return "+".join(ceiling_of(spec) for spec in self.specs)


def split_graphs(texts: Sequence[str]) -> list[str]:
    """The graphs that ``--graph`` names; names without keys may share a text, separated by commas."""
    several = [t for text in texts for t in ([text] if ":" in text or text.endswith(GRAPH_ENDING) else text.split(","))]
    return [text.strip() for text in several if text.strip()]


def _split(text: str) -> tuple[str, list[str]]:
    """Name and keys of ``NAME``, ``my.graph`` or ``module:function``, each with ``:key=value,...`` or without."""
    if found := re.fullmatch(rf"(.+?{re.escape(GRAPH_ENDING)})(?::(.*))?", text):
        name, keys = found[1], found[2] or ""
    else:
        name, _, keys = text.partition(":")
        if keys and name not in GRAPHS and "=" not in keys.partition(":")[0]:
            function, _, keys = keys.partition(":")
            name = f"{name}:{function}"
    if name.rpartition(".")[2] in ("fwd", "bwd"):
        raise SpecError(
            f"--graph '{short(text)}': a graph is expected without its direction; give that with --direction."
        )
    return name, list(filter(None, keys.split(",")))


def _spec(graph: str, direction: str, d: int, dtype: str) -> Spec:
    """The spec of a graph as ``--graph`` names it; SpecError for a wrong name or key."""
    name, keys = _split(graph)
    for key in (k.partition("=")[0] for k in keys):
        if key in ELSEWHERE:
            raise SpecError(
                f"--graph '{short(graph)}': the key '{key}' is not part of a graph here; give {ELSEWHERE[key]}."
            )
    if direction == "fwd":
        keys = [k for k in keys if k.partition("=")[0] not in BACKWARD_KEYS]
    given = [f"d={d}", *([f"dtype={dtype}"] if dtype else []), *keys]
    return parse_spec(f"{name}.{direction}:{','.join(given)}")


def declared_dtype(graph: str) -> str:
    """The dtype of a graph that is given with its dtypes; an empty text for any other."""
    declared = _spec(graph, "bwd", 1, "").definition.declared
    return str(declared[0]) if declared else ""


def make_task(graph: str, direction: str, dtype: str, rows: int, d: int, kind: str = THROUGHPUT) -> Task:
    """A task from its text fields; SpecError for a wrong one.

    ``graph``: a name, a file ``my.graph`` or ``module:function``, and perhaps ``:key=value,...``, the keys of a spec
    but d and dtype.
    """
    if direction not in DIRECTIONS:
        raise SpecError(f"There is no direction '{direction}', expected some of {', '.join(DIRECTIONS)}.")
    return Task(tuple(_spec(graph, half, d, dtype) for half in HALVES[direction]), rows, kind)
