"""What is explained: one spec under one schedule on one GPU, for a number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lngen.compile import Compilation, KernelSet
from lngen.devices import Device
from lngen.lower import Plan
from lngen.problem import Problem, Schedule

ROWS = 4096  # of the numbers, where no number of rows is asked for


@dataclass(frozen=True)
class Subject:
    """A spec on its way to kernels, and the kernels under the schedule that is explained.

    ``expected``   the rows for which the schedule was chosen, None for many
    ``changed``    the text of the user's change to the default schedule, empty for the default
    """

    compilation: Compilation
    kernels: KernelSet
    device: Device
    expected: int | None = None
    changed: str = ""

    @property
    def rows(self) -> int:
        """The rows of all numbers."""
        return self.expected or ROWS

    @property
    def plan(self) -> Plan:
        """The plan of the kernels."""
        return self.kernels.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule that is explained."""
        return self.plan.schedule

    @cached_property
    def problem(self) -> Problem:
        """The facts that a schedule has to fit."""
        return self.compilation.problem
