"""What is timed: tasks, the bytes that they must move, their ceilings and targets, and named grids of shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from lngen.compiler.graphs import GRAPH_ENDING, GRAPHS
from lngen.compiler.ir import WIDE, DType, Graph, Value
from lngen.compiler.spec import BACKWARD_KEYS, Spec, parse_spec
from lngen.errors import SpecError, short

# The ceilings: the tensors that a call reads, beside the one it writes. They compute nothing worth counting.
MOVES = {"copy": 1, "add": 2}
# Of forward and backward as one unit, a ceiling for each.
CEILINGS = (*MOVES, *("+".join(pair) for pair in product(MOVES, repeat=2)))
OVERLAPPED = "-overlapped"  # after a ceiling's name: calls overlap, by programmatic launch
HALVES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}
DIRECTIONS = tuple(HALVES)

THROUGHPUT = "throughput"  # cold rotating buffers, GB/s
LATENCY = "latency"  # each launch reads the previous result, warm, us per call
# Few rows, in us: what a call adds behind a kernel that triggers no programmatic launch, and between two GEMMs.
IN_TURN, BETWEEN_GEMMS = "in turn", "between GEMMs"
FEW_ROWS = (IN_TURN, BETWEEN_GEMMS)

ELSEWHERE = {"d": "--shapes, --d or --grid", "dtype": "--dtype"}  # keys of a spec that are options of their own


# ---- bytes: GB/s is always these over the time, never a kernel's own traffic, so that a repeated read lowers it ----


def value_bytes(value: Value, rows: int, d: int) -> int:
    """The bytes of a graph's input or result."""
    return math.prod(value.type.shape(rows, d)) * value.type.dtype.size


def floor_bytes(spec: Spec, rows: int) -> int:
    """What a call with cold caches must move, every input and result once: of a norm 2 units of M*D, backward 3."""
    graph = spec.graph()
    return sum(value_bytes(v, rows, spec.d) for v in (*graph.tensors, *graph.results))


def ceiling_bytes(spec: Spec, rows: int) -> int:
    """The bytes that the ceiling moves: those of the [M, D] arrays alone."""
    graph = spec.graph()
    return sum(value_bytes(v, rows, spec.d) for v in (*graph.tensors, *graph.results) if v.type.axes == WIDE)


def gb_s(nbytes: int, us: float) -> float:
    """10^9 bytes per second."""
    return nbytes / us / 1e3


# ---- ceilings ----


@lru_cache(maxsize=1024)
def ceiling_of(spec: Spec) -> str:
    """``copy`` or ``add``: the one whose share of writes is the nearer to that of the spec's [M, D] tensors.

    A copy reads one tensor and writes one, an addition reads two and writes one: memory is slower with more writes.
    Both move as many bytes as the spec's tensors have, so other ratios have a fair ceiling
    too: two tensors read and two written, a copy of twice the bytes; three read and two written, an addition.
    """
    graph: Graph = spec.forward() if spec.direction == "fwd" else spec.graph()
    read, written = (
        sum(v.type.dtype.size for v in values if v.type.axes == WIDE) for values in (graph.tensors, graph.results)
    )
    share = written / max(read + written, 1)
    return min(MOVES, key=lambda name: abs(share - 1 / (1 + MOVES[name])))


def is_ceiling(provider: str) -> bool:
    """True for a ceiling, overlapped or not."""
    return provider.removesuffix(OVERLAPPED) in CEILINGS


# ---- tasks ----


@dataclass(frozen=True)
class Task:
    """Specs launched one after the other as one unit: one spec, or forward and then backward."""

    specs: tuple[Spec, ...]
    rows: int
    kind: str = THROUGHPUT

    def __str__(self) -> str:
        return f"{self.spec} rows={self.rows}{'' if self.kind == THROUGHPUT else f' {self.kind}'}"

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


# ---- targets of lngen: fractions of the ceiling on an H200 by tensor size, and ratios to the best peer ----

MB = 1 << 20  # bytes; 8 MB are 4096 x 1024 in 16 bits

# By the bytes of one [M, D] tensor: the fraction of the copy (forward), of the addition (backward).
FRACTIONS = {
    8 * MB: {"fwd": 0.94, "bwd": 0.68},
    16 * MB: {"fwd": 0.94, "bwd": 0.76},
    32 * MB: {"fwd": 0.95, "bwd": 0.84},
    64 * MB: {"fwd": 0.97, "bwd": 0.90},
    256 * MB: {"fwd": 0.98, "bwd": 0.95},
}
TARGETED = ("layernorm", "rmsnorm")  # with their default keys: the graphs that have targets
TARGET_DTYPES = ("f16", "bf16", "f32")
IRREGULAR = 0.85  # of the fraction, for rows that are not a multiple of REGULAR
REGULAR = 256
SLACK = 0.97  # whole rows may lie slightly below a size

RATIO_EACH = 1.0  # times the speed of the best peer, at every point
RATIO_MEAN = {"fwd": 1.15, "bwd": 1.4}  # geometric mean over all points
RATIO_FEW_ROWS = {"fwd": 1.05, "bwd": 1.2}  # the same for few rows


def target_fraction(direction: str, dtype: str, tensor_bytes: int, d: int) -> float | None:
    """The fraction of the ceiling to reach; between two sizes of the table, interpolated in log bytes.

    None where there is no target: for tensors below the table, for f64, for forward and backward as one unit.
    """
    sizes = sorted(FRACTIONS)
    if direction not in FRACTIONS[sizes[0]] or dtype not in TARGET_DTYPES or tensor_bytes < SLACK * sizes[0]:
        return None
    logs, fractions = [math.log(size) for size in sizes], [FRACTIONS[size][direction] for size in sizes]
    fraction = float(np.interp(math.log(tensor_bytes), logs, fractions))
    return round(fraction * (1.0 if d % REGULAR == 0 else IRREGULAR), 4)


# ---- named grids of shapes, pairs of rows and D ----

Shapes = list[tuple[int, int]]

POWERS = [1 << n for n in range(8, 18)]  # 256 to 131072
WIDTHS = sorted([64, 128, 1000, 4093, *POWERS, 768, 1536, 3072, 3584, 5120, 7168, 12288])
# The nine shapes for which README.md has results.
DESIGN = [(4096, 1024 << n) for n in range(5)] + [(32768, 1024), (32768, 4096), (2048, 65536), (262144, 256)]


@dataclass(frozen=True)
class Grid:
    """Shapes, which may depend on the dtype, and the dtypes that the grid is intended for."""

    about: str
    dtypes: tuple[str, ...]
    shapes: Callable[[DType], Shapes]


def rows_for(tensor_bytes: int, d: int, dtype: DType) -> int:
    """The number of rows of D that is nearest to ``tensor_bytes``."""
    return max(1, round(tensor_bytes / (d * dtype.size)))


def sized(widths: Sequence[int], sizes: Sequence[int]) -> Callable[[DType], Shapes]:
    """Every width at every size of a tensor in bytes; sizes vary fastest, for peers that compile per width."""
    return lambda dtype: [(rows_for(size, d, dtype), d) for d in widths for size in sizes]


GRIDS = {
    "design": Grid("nine shapes, 4096 x 1024 to 262144 x 256", ("bf16",), lambda dtype: DESIGN),
    "targets": Grid(
        f"{len(WIDTHS)} widths from 64 to 131072 at 8 to 256 MB", TARGET_DTYPES, sized(WIDTHS, sorted(FRACTIONS))
    ),
    "quick": Grid(
        "seven of these widths at 8 and 64 MB",
        ("bf16",),
        sized([256, 768, 1024, 4093, 4096, 16384, 65536], [8 * MB, 64 * MB]),
    ),
    "classic": Grid(
        "4096 rows, D = 1024 to 15872", ("f16",), lambda dtype: [(4096, d) for d in range(1024, 16384, 512)]
    ),
    "none": Grid("no shapes, for --latency or --host alone", ("bf16",), lambda dtype: []),
}

LATENCY_ROWS = (1, 16, 128)
LATENCY_WIDTHS = (1024, 4096, 16384)

# What --few-rows measures unless told otherwise.
FEW_ROWS_GRAPHS = ("rmsnorm", "add_rmsnorm", "layernorm")
FEW_ROWS_ROWS = (1, 4, 16, 64, 128, 256, 1024)
FEW_ROWS_WIDTHS = (1024, 2048, 2560, 4096, 5120, 7168, 8192, 10240, 16384)
