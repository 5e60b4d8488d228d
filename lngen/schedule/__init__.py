"""Schedules: their keys, their legality, their space and the default."""

from lngen.devices import capability
from lngen.schedule.arch import MINIMUM_ARCH, OVERLAP_ARCH, check_arch, exists, minimum_arch
from lngen.schedule.choose import choose, spill_text
from lngen.schedule.layout import (
    COLUMN_THREADS,
    blocks_per_partial,
    cluster_tile,
    column_block,
    column_threads,
    dynamic_shared,
    exchanged_values,
    groups_of_a_block,
    partial_rows,
    partial_values,
    rows_ahead,
    scratch_numbers,
    segments_held,
    stage_bytes,
    stage_share,
    static_shared,
    vectors_per_thread,
)
from lngen.schedule.legal import BULK, check, is_legal
from lngen.schedule.phases import Folds, depths, folds, operand_depth, segment_sums_of
from lngen.schedule.problem import Problem, problem
from lngen.schedule.ranking import candidates, estimated, ranked
from lngen.schedule.resources import (
    fits,
    least_shared,
    occupancy,
    register_limit,
    registers,
    shared_by,
    stay_packed,
)
from lngen.schedule.schedule import ANY, STAGED, Schedule, complete, parse_schedule
from lngen.schedule.space import space
from lngen.schedule.workload import row_counts, workload

__all__ = [
    "ANY",
    "BULK",
    "COLUMN_THREADS",
    "MINIMUM_ARCH",
    "OVERLAP_ARCH",
    "STAGED",
    "Folds",
    "Problem",
    "Schedule",
    "blocks_per_partial",
    "candidates",
    "capability",
    "check",
    "check_arch",
    "choose",
    "cluster_tile",
    "column_block",
    "column_threads",
    "complete",
    "depths",
    "dynamic_shared",
    "estimated",
    "exchanged_values",
    "exists",
    "fits",
    "folds",
    "groups_of_a_block",
    "is_legal",
    "least_shared",
    "minimum_arch",
    "occupancy",
    "operand_depth",
    "parse_schedule",
    "partial_rows",
    "partial_values",
    "problem",
    "ranked",
    "register_limit",
    "registers",
    "row_counts",
    "rows_ahead",
    "scratch_numbers",
    "segment_sums_of",
    "segments_held",
    "shared_by",
    "space",
    "spill_text",
    "stage_bytes",
    "stage_share",
    "static_shared",
    "stay_packed",
    "vectors_per_thread",
    "workload",
]  # fmt: skip
