"""The lanes of a warp together: shfl.sync, votes, elect.sync, activemask and bar.warp.sync."""

from __future__ import annotations

from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.batch import Batch
from lngen.ptx.computing import write
from lngen.ptx.parser import Instruction, Operand
from lngen.ptx.program import BOOL, UNSIGNED, WARP, Lanes, Program, Step, unknown

MODES = ("bfly", "up", "down", "idx")
VOTES = ("vote.sync.all.pred", "vote.sync.any.pred", "vote.sync.uni.pred", "vote.sync.ballot.b32")
ALL = 0xFFFFFFFF
Bound = tuple[list[tuple[int, Any]], list[tuple[int, Any]]]


def bind(program: Program, i: Instruction) -> Bound:
    """Slots of the sources a, b, c, mask and of the results."""
    parts = i.opcode.split(".")
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in MODES or parts[3] != "b32" or len(i.operands) != 5:
        raise unknown(i)
    sources = [program.source(o, UNSIGNED[4], i) for o in i.operands[1:]]
    first = i.operands[0]
    names: tuple[Operand, ...] = first.items if first.kind == "pair" else (first,)
    targets = [program.target(o, t, i) for o, t in zip(names, (UNSIGNED[4], BOOL), strict=False)]
    return sources, targets


def step(batch: Batch, i: Instruction, pc: int, lanes: Lanes) -> None:
    """Exchanges values in the warps that are complete; the lanes of the others wait at ``pc``."""
    sources, targets = batch.program.shuffles[i.line]
    a, b, c, members = (batch.R[s] if f is None else f(batch.R[s]) for s, f in sources)
    if lanes.array is not None or np.ndim(members) or int(members) != ALL:
        lanes = _complete(batch, i, pc, lanes, members)
        if not lanes.count:
            return
    lane = batch.thread % WARP
    source, inside = _source(i.opcode.split(".")[2], lane, b, c)
    start = np.arange(batch.total) - lane
    origin = start + source
    if lanes.array is not None:
        mask = lanes.mask
        bad = np.flatnonzero(mask & ~mask[origin])
        if bad.size and not batch.launch.reporter.reported("inactive-shuffle", batch.launch.kernel, i):
            text = f"The shuffle reads lane {int(source[bad[0]])} of the warp, which does not take part."
            batch.report("inactive-shuffle", text, i, bad)
    value = a if np.ndim(a) == 0 else np.asarray(a)[origin]
    for (slot, convert), result in zip(targets, (value, inside), strict=False):
        write(batch, slot, convert(result) if convert else result, lanes)
    batch.push(pc + 1, lanes)


def bind_warp(program: Program, i: Instruction) -> Bound:
    """As ``bind``, for vote.sync and bar.warp.sync: the mask is the last source."""
    voting = i.opcode in VOTES
    if i.opcode == "elect.sync" and len(i.operands) == 2 and i.operands[0].kind == "pair":
        kinds = zip(i.operands[0].items, (UNSIGNED[4], BOOL), strict=True)
        return [program.source(i.operands[1], UNSIGNED[4], i)], [program.target(o, t, i) for o, t in kinds]
    if len(i.operands) != (3 if voting else 1) or not (voting or i.opcode == "bar.warp.sync"):
        raise unknown(i)
    sources = [program.source(i.operands[-1], UNSIGNED[4], i)]
    if not voting:
        return sources, []
    result = UNSIGNED[4] if i.opcode.endswith("b32") else BOOL
    return [program.source(i.operands[1], BOOL, i), *sources], [program.target(i.operands[0], result, i)]


def warp(batch: Batch, i: Instruction, pc: int, lanes: Lanes) -> None:
    """A vote or a warp barrier in the warps that are complete; the lanes of the others wait at ``pc``."""
    sources, targets = batch.program.shuffles[i.line]
    *votes, members = (batch.R[s] if f is None else f(batch.R[s]) for s, f in sources)
    lanes = _complete(batch, i, pc, lanes, members)
    if not lanes.count:
        return
    if i.opcode == "bar.warp.sync" and batch.order is not None:
        batch.order.synchronise(lanes.index, lanes.index // WARP)
    here = np.repeat(lanes.bits(), WARP)
    if i.opcode == "elect.sync":
        lowest = np.argmax(lanes.mask.reshape(-1, WARP), axis=1).astype(np.uint32).repeat(WARP)
        for (slot, convert), found in zip(targets, (lowest, lowest == batch.thread % WARP), strict=True):
            write(batch, slot, convert(found) if convert else found, lanes)
        targets = []
    for vote, (slot, convert) in zip(votes, targets, strict=True):
        ayes = np.repeat(lanes.narrow(np.broadcast_to(vote, batch.total)).bits(), WARP)
        result = {"all": ayes == here, "any": ayes != 0, "uni": (ayes == 0) | (ayes == here), "ballot": ayes}[
            i.opcode.split(".")[2]
        ]
        write(batch, slot, convert(result) if convert else result, lanes)
    batch.touched()
    batch.push(pc + 1, lanes)


def _source(mode: str, lane: Array, b: Any, c: Any) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether it lies in the segment; the lane itself if not."""
    b, clamp = np.asarray(b).astype(np.int64) & 31, np.asarray(c).astype(np.int64)
    segment = clamp >> 8 & 31
    top = (lane & segment) | (clamp & 31 & ~segment)
    bottom = lane & segment
    match mode:
        case "bfly":
            wanted = lane ^ b
            inside = wanted <= top
        case "up":
            wanted = lane - b
            inside = wanted >= top
        case "down":
            wanted = lane + b
            inside = wanted <= top
        case _:
            wanted = bottom | (b & ~segment)
            inside = wanted <= top
    return np.where(inside, wanted, lane), inside


def _complete(batch: Batch, i: Instruction, pc: int, lanes: Lanes, members: Any) -> Lanes:
    """The lanes of warps whose named threads have all arrived. Others wait, unless no further thread can arrive."""
    here, alive = np.repeat(lanes.bits(), WARP), np.repeat(batch.alive.bits(), WARP)
    missing = np.where(lanes.mask, np.asarray(members, np.uint32) & ~here, np.uint32(0))
    own = np.uint32(1) << (batch.thread % WARP).astype(np.uint32)
    outside = np.flatnonzero(lanes.mask & ((np.asarray(members, np.uint32) & own) == 0))
    if outside.size:
        text = f"The {_noun(i)} is executed by a thread that its member mask does not name."
        batch.report("inactive-shuffle", text, i, outside)
    gone = np.flatnonzero(missing & ~alive)
    if gone.size:
        first = int(gone[0])
        text = f"The {_noun(i)} names threads {_named(int((missing & ~alive)[first]))} of the warp, which have ended."
        batch.report("inactive-shuffle", text, i, gone)
    coming = missing & alive
    if not coming.any():
        return lanes
    if batch.forced:
        late = np.flatnonzero(coming)
        text = f"The {_noun(i)} names threads {_named(int(coming[late[0]]))} of the warp, which never execute it."
        batch.report("inactive-shuffle", text, i, late)
        return lanes
    incomplete = np.repeat((coming != 0).reshape(-1, WARP).any(axis=1), WARP)
    wait = lanes.narrow(incomplete)
    batch.held[pc] = wait.union(batch.held.pop(pc)) if pc in batch.held else wait
    return lanes.without(wait)


def _noun(i: Instruction) -> str:
    return {"shfl": "shuffle", "vote": "vote", "elect": "election"}.get(
        i.opcode.split(".", 1)[0], "barrier of the warp"
    )


def _named(bits: int) -> str:
    listed = [str(n) for n in range(WARP) if bits >> n & 1]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def active_step(program: Program, i: Instruction) -> Step:
    """activemask: the threads of the warp that execute this instruction together."""
    if i.opcode != "activemask.b32" or len(i.operands) != 1:
        raise unknown(i)
    slot, convert = program.target(i.operands[0], UNSIGNED[4], i)

    def step(batch: Batch, lanes: Lanes) -> None:
        value = np.repeat(lanes.bits(), WARP)
        write(batch, slot, convert(value) if convert else value, lanes)

    return step
