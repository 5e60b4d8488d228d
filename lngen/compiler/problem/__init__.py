"""What scheduling and lowering both need: the facts about a graph, schedules as values, and what follows from both.

The layout of rows, and what a kernel takes of a GPU, are in ``lngen.compiler.problem.footprint``.
"""

from lngen.compiler.problem.facts import Problem, problem
from lngen.compiler.problem.footprint import fits
from lngen.compiler.problem.legal import check, is_legal
from lngen.compiler.problem.schedule import (
    ANY,
    OVERLAP_ARCH,
    STAGED,
    Schedule,
    check_arch,
    complete,
    minimum_arch,
    parse_schedule,
)
