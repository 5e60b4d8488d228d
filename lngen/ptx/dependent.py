"""Programmatic dependent launch: griddepcontrol, and the accesses that must not precede its wait.

PTX ISA, Parallel Synchronization and Communication Instructions: griddepcontrol. Before .wait, a kernel launched this
way may run beside the previous kernel, which may still change memory. A kernel that never waits may also end before
the previous kernel does; the next kernel, which waits for this one alone, then starts too early.
"""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.analysis import WAIT
from lngen.ptx.batch import Batch, Launch
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Buffer
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown

LAUNCH = "griddepcontrol.launch_dependents"


def control_step(program: Program, i: Instruction) -> Step:
    """griddepcontrol: values do not change; barriers hand a wait on like a write."""
    if i.opcode not in (WAIT, LAUNCH) or i.operands:
        raise unknown(i)
    if i.opcode == LAUNCH:
        return lambda batch, lanes: None

    def step(batch: Batch, lanes: Lanes) -> None:
        assert batch.order is not None
        batch.launch.waited = True
        batch.order.waited(lanes.index)

    return step


def check(batch: Batch, i: Instruction, buffer: Buffer, who: Array, address: Array) -> None:
    """A finding for threads that precede every wait; constants of the module need no wait."""
    if not batch.dependent or buffer.role == "constant":
        return
    early = np.ones(len(who), np.bool_) if batch.order is None else ~batch.order.has_waited(who)
    if early.any():
        text = f"A global access before griddepcontrol.wait, to '{buffer.name}'."
        batch.report("early-access", text, i, who[early], address[early])


def check_end(launch: Launch) -> None:
    """A finding for a kernel that may run beside the previous one and has ended without a wait."""
    if launch.programmatic and not launch.waited:
        text = "The kernel may start before the previous one ends, and none of its threads executes " + WAIT + "."
        launch.reporter.add("early-access", text, launch.kernel)
