"""Programmatic dependent launch: griddepcontrol, and what must not come before its wait.

PTX ISA, Parallel Synchronization and Communication Instructions: griddepcontrol. Without .wait a kernel launched so
may run beside the one before it: whatever it reads or writes there may still change. A kernel that never waits also
ends too early for the one behind it, which waits for it alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lngen.ptx.parser import Entry, Instruction
from lngen.ptx.program import Program, Step, unknown

if TYPE_CHECKING:
    from lngen.ir.numerics import Array
    from lngen.ptx.batch import Batch, Launch
    from lngen.ptx.lanes import Lanes
    from lngen.ptx.memory import Buffer

WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@lru_cache(maxsize=64)
def waits(entry: Entry) -> bool:
    """True if the kernel waits for the one before it: until then it may not touch global memory."""
    return any(i.opcode == WAIT for i in entry.instructions)


def control_step(program: Program, i: Instruction) -> Step:
    """griddepcontrol: values stay; a wait is an event that barriers hand on like any write."""
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
    """A finding for threads that neither waited nor met one that did; constants of the module need no wait."""
    if not batch.dependent or buffer.role == "constant":
        return
    early = np.ones(len(who), np.bool_) if batch.order is None else ~batch.order.has_waited(who)
    if early.any():
        text = f"A global access before griddepcontrol.wait, to '{buffer.name}'."
        batch.report("early-access", text, i, who[early], address[early])


def check_end(launch: Launch) -> None:
    """A finding for a kernel that may run beside the one before it and has ended without a wait."""
    if launch.programmatic and not launch.waited:
        text = "The kernel is launched while the one before it may run, and no thread of it executes " + WAIT + "."
        launch.reporter.add("early-access", text, launch.kernel)
