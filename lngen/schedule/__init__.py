"""Schedules: what they are, which are legal, which is the default."""

from lngen.schedule.legal import check, is_legal, shared_bytes, slots
from lngen.schedule.model import fits, ranked, registers, space, widest
from lngen.schedule.problem import Problem, depths, is_row_fold, is_sum, problem
from lngen.schedule.schedule import Schedule, parse_schedule

__all__ = [
    "Problem", "Schedule", "check", "depths", "fits", "is_legal", "is_row_fold", "is_sum", "parse_schedule", "problem",
    "ranked", "registers", "shared_bytes", "slots", "space", "widest",
]  # fmt: skip
