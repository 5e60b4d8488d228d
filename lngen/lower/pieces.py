"""What row kernels of different forms have in common: their piece of a row, and the clusters that share one."""

from __future__ import annotations

from dataclasses import replace

from lngen.lower.constants import is_exact
from lngen.lower.parts import MEETING, Phase
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
        phases=_meeting(named.phases) if met_numbers(s, p) else named.phases,
        cluster=s.cluster,
        exchanged=met_numbers(s, p),
        owner="blockIdx.x / CLUSTER",
        first_column="cluster_rank() * PIECE",
        writer="live && lane == 0 && start == 0",
    )


def _meeting(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Phases at whose ends the blocks of a cluster meet."""
    ends = (tuple(replace(f, part=MEETING.get(f.part, f.part)) for f in phase.folds) for phase in phases)
    return tuple(replace(phase, folds=folds) for phase, folds in zip(phases, ends, strict=True))


def files(*names: str) -> tuple[str, ...]:
    """The files of partials."""
    return tuple(f"{name}.cuh.jinja" for name in names)
