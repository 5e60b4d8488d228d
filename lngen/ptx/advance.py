"""The order in which the threads of a batch advance.

Threads with the same next instruction form a group. The group at the lowest instruction runs until it splits, waits or
reaches another group. Threads at a barrier or a shuffle wait until the other threads that it needs arrive.
"""

from __future__ import annotations

from lngen.ptx import barriers, clusters, flights, remote, shuffle, spin
from lngen.ptx.batch import Batch
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import unknown
from lngen.ptx.report import Stop


def run(batch: Batch) -> None:
    """Runs every thread to its end."""
    late = spin.waves(batch)
    batch.push(0, late.pop())
    while True:
        if batch.groups:
            _advance(batch, min(batch.groups))
        elif _released(batch) or (batch.yielded and spin.again(batch, 2 if late else spin.ROUNDS)):
            continue
        elif late:
            batch.push(0, late.pop())
            batch.touched()
        elif batch.held:
            batch.forced = True
            pc = min(batch.held)
            batch.groups[pc] = batch.held.pop(pc)
            _advance(batch, pc)
            batch.forced = False
        else:
            flights.finish(batch)
            spin.deadlock(batch)
            clusters.deadlock(batch)
            if batch.waiting:
                barriers.deadlock(batch)
            remote.check(batch)
            return


def _released(batch: Batch) -> bool:
    if (batch.waiting and barriers.release(batch)) or clusters.release(batch):
        batch.touched()
        return True
    return False


def _advance(batch: Batch, pc: int) -> None:
    """Run the group at ``pc`` until it splits, waits, ends or is no longer the lowest."""
    segments, counts = batch.program.segments, batch.launch.counts
    lanes = batch.groups.pop(pc)
    while True:
        segment = segments[pc]
        counts[pc] = counts.get(pc, 0) + lanes.warps
        batch.ran += 1
        if batch.ran > batch.launch.most:
            raise _no_end(batch, pc, lanes)
        for step in segment.steps:
            step(batch, lanes)
        after: int | None = segment.end
        if segment.control is not None:
            after = _control(batch, segment.control, segment.end, lanes)
        if after is None:
            return
        if after in batch.held or (batch.groups and min(batch.groups) <= after):
            batch.push(after, lanes)
            return
        pc = after


def _no_end(batch: Batch, pc: int, lanes: Lanes) -> Stop:
    code = batch.program.entry.instructions
    text = f"The kernel does not end: {batch.launch.most} segments of straight code have run."
    batch.report("deadlock", text, code[min(pc, len(code) - 1)], lanes.index)
    return Stop()


def _control(batch: Batch, i: Instruction, pc: int, lanes: Lanes) -> int | None:
    """The instruction that ends a segment; the pc at which all of ``lanes`` continue, None if they part."""
    name = i.opcode.split(".", 1)[0]
    taken = lanes
    if i.predicate:
        p = batch.R[batch.program.slots[i.predicate]]
        taken = lanes.narrow(~p if i.negated else p)
        if not taken.count:
            return pc + 1
    match name:
        case "bra" if pc in batch.spins:
            spin.rest(batch, pc, taken)
        case "bra":
            target = batch.program.entry.labels[i.operands[0].text]
            if taken is lanes:
                return target
            batch.push(target, taken)
        case "ret" | "exit":
            batch.alive = batch.alive.without(taken)
            batch.touched()
        case "bar" | "vote" | "elect" if i.opcode.startswith(("bar.warp", "vote", "elect")):
            shuffle.warp(batch, i, pc, taken)
        case "barrier" if i.opcode.startswith("barrier.cluster"):
            clusters.come(batch, i, pc, taken)
        case "bar" | "barrier":
            barriers.arrive(batch, i, pc, taken)
        case "shfl":
            shuffle.step(batch, i, pc, taken)
        case _:
            raise unknown(i)
    if taken is not lanes:
        batch.push(pc + 1, lanes.without(taken))
    return None
