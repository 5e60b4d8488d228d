"""Schedules: what they are, which are legal, which is the default."""

from lngen.schedule.arch import MINIMUM_ARCH, OVERLAP_ARCH, capability, check_arch, exists, minimum_arch
from lngen.schedule.legal import (
    BULK,
    apart,
    check,
    dynamic_shared,
    is_legal,
    met_numbers,
    partial_numbers,
    partial_rows,
    piece,
    rows_ahead,
    scratch_numbers,
    segments_held,
    slots,
    stage_bytes,
    stage_share,
    static_shared,
)
from lngen.schedule.model import ranked, space
from lngen.schedule.problem import Folds, Problem, depths, folds, operand_depth, problem
from lngen.schedule.resources import (
    REGISTERS_PER_SM,
    fits,
    least_shared,
    occupancy,
    registers,
    shared_by,
    stay_packed,
)
from lngen.schedule.schedule import STAGED, Schedule, parse_schedule
from lngen.schedule.shares import MULTIPROCESSORS, row_counts, share

__all__ = [
    "BULK", "MINIMUM_ARCH", "MULTIPROCESSORS", "OVERLAP_ARCH", "REGISTERS_PER_SM", "STAGED", "Folds", "Problem",
    "Schedule", "apart", "capability", "check", "check_arch", "depths", "dynamic_shared", "exists", "fits", "folds",
    "is_legal", "least_shared", "met_numbers", "minimum_arch", "occupancy", "operand_depth", "parse_schedule",
    "partial_numbers", "partial_rows", "piece", "problem", "ranked", "registers", "row_counts", "rows_ahead",
    "scratch_numbers", "segments_held", "share", "shared_by", "slots", "space", "stage_bytes", "stage_share",
    "static_shared", "stay_packed",
]  # fmt: skip
