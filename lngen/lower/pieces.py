"""What row kernels of different forms have in common: their piece of a row, and the clusters that share one."""

from __future__ import annotations

from dataclasses import replace

from lngen.lower.constants import is_exact
from lngen.lower.plan import Kernel
from lngen.schedule import Problem, Schedule, met_numbers

# How a phase gets its [D] inputs: from those that are kept, or from memory.
HELD_COLUMNS = "_held_columns.cuh.jinja"
COPIED, LOADED = "_copy_columns.cuh.jinja", "_load_columns.cuh.jinja"
PACKED = "_copy_packed_columns.cuh.jinja"
WIDENED = "_copy_wide_columns.cuh.jinja"


def in_pieces(kernel: Kernel, s: Schedule, p: Problem) -> Kernel:
    """A row kernel with the names of where its piece of a row starts and ends, and how a cluster shares the row."""
    named = replace(
        kernel,
        start="start",
        length="length" if s.form == "bulk" or s.cluster > 1 else "D",
        bound="BOUND" if is_exact(s, p) else "D",
    )
    if s.cluster == 1:
        return named
    return replace(
        named,
        cluster=s.cluster,
        exchanged=met_numbers(s, p),
        owner="blockIdx.x / CLUSTER",
        first_column="cluster_rank() * PIECE",
        writer="live && lane == 0 && start == 0",
    )


def fold(meets: bool) -> str:
    """The partial that ends a phase: row sums of a block, or of a cluster whose blocks meet."""
    return "_cluster_sums.cuh.jinja" if meets else "_row_sums.cuh.jinja"


def files(*names: str) -> tuple[str, ...]:
    """The files of partials."""
    return tuple(f"{name}.cuh.jinja" for name in names)
