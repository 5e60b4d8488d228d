"""Named grids of shapes, pairs of rows and D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lngen.bench.targets import DTYPES, FRACTIONS, MB
from lngen.ir import DType

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
    "targets": Grid(f"{len(WIDTHS)} widths from 64 to 131072 at 8 to 256 MB", DTYPES, sized(WIDTHS, sorted(FRACTIONS))),
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
