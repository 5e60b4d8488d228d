"""The lanes of a warp together: shfl.sync, votes, elect.sync, activemask and bar.warp.sync."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.batch import Batch
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import BOOL, UNSIGNED, WARP, Jump, Lanes, Program, Step, unknown

_SHUFFLE = re.compile(r"shfl\.sync\.(bfly|up|down|idx)\.b32")
_VOTE = re.compile(r"vote\.sync\.(?:(all|any|uni)\.pred|(ballot)\.b32)")
_ALL = 0xFFFFFFFF


def shuffle_jump(program: Program, i: Instruction) -> Jump:
    """shfl.sync: exchanges values in the warps that are complete; the lanes of the others wait."""
    m = _SHUFFLE.fullmatch(i.opcode)
    if m is None or len(i.operands) != 5:
        raise unknown(i)
    a, b, c, members = (program.reader(o, UNSIGNED[4], i) for o in i.operands[1:])
    first = i.operands[0]
    names = first.items if first.kind == "pair" else (first,)
    writers = [program.writer(o, t, i) for o, t in zip(names, (UNSIGNED[4], BOOL), strict=False)]

    def jump(batch: Batch, pc: int, lanes: Lanes) -> None:
        R = batch.R
        named = members(R)
        if lanes.array is not None or np.ndim(named) or int(named) != _ALL:
            lanes = _complete(batch, i, pc, lanes, named)
            if not lanes.count:
                return
        lane = batch.thread % WARP
        source, inside = _source(m[1], lane, b(R), c(R))
        origin = np.arange(batch.total) - lane + source
        if lanes.array is not None:
            bad = np.flatnonzero(lanes.mask & ~lanes.mask[origin])
            if bad.size:
                text = f"The shuffle reads lane {int(source[bad[0]])} of the warp, which does not take part."
                batch.report("inactive-shuffle", text, i, bad)
        value = a(R)
        for write, result in zip(writers, (value if np.ndim(value) == 0 else value[origin], inside), strict=False):
            write(R, result, lanes)
        batch.push(pc + 1, lanes)

    return jump


def together_jump(program: Program, i: Instruction) -> Jump:
    """A vote, an election or a barrier of the warps that are complete; the lanes of the others wait."""
    count, voting = len(i.operands), _VOTE.fullmatch(i.opcode)
    if voting and count == 3:
        step = _vote(program, i, voting[1] or voting[2])
    elif i.opcode == "elect.sync" and count == 2 and i.operands[0].kind == "pair":
        step = _elect(program, i)
    elif i.opcode == "bar.warp.sync" and count == 1:
        step = _synchronise
    else:
        raise unknown(i)
    members = program.reader(i.operands[-1], UNSIGNED[4], i)

    def jump(batch: Batch, pc: int, lanes: Lanes) -> None:
        lanes = _complete(batch, i, pc, lanes, members(batch.R))
        if lanes.count:
            step(batch, lanes)
            batch.touched()
            batch.push(pc + 1, lanes)

    return jump


def _vote(program: Program, i: Instruction, mode: str) -> Step:
    write = program.writer(i.operands[0], UNSIGNED[4] if mode == "ballot" else BOOL, i)
    vote = program.reader(i.operands[1], BOOL, i)

    def step(batch: Batch, lanes: Lanes) -> None:
        here = np.repeat(lanes.bits(), WARP)
        ayes = np.repeat(lanes.narrow(np.broadcast_to(vote(batch.R), batch.total)).bits(), WARP)
        found = {"all": ayes == here, "any": ayes != 0, "uni": (ayes == 0) | (ayes == here), "ballot": ayes}
        write(batch.R, found[mode], lanes)

    return step


def _elect(program: Program, i: Instruction) -> Step:
    kinds = zip(i.operands[0].items, (UNSIGNED[4], BOOL), strict=True)
    writers = [program.writer(o, t, i) for o, t in kinds]

    def step(batch: Batch, lanes: Lanes) -> None:
        lowest = np.argmax(lanes.mask.reshape(-1, WARP), axis=1).astype(np.uint32).repeat(WARP)
        for write, found in zip(writers, (lowest, lowest == batch.thread % WARP), strict=True):
            write(batch.R, found, lanes)

    return step


def _synchronise(batch: Batch, lanes: Lanes) -> None:
    if batch.order is not None:
        batch.order.synchronise(lanes.index, lanes.index // WARP)


def active_step(program: Program, i: Instruction) -> Step:
    """activemask: the threads of the warp that execute this instruction together."""
    if i.opcode != "activemask.b32" or len(i.operands) != 1:
        raise unknown(i)
    write = program.writer(i.operands[0], UNSIGNED[4], i)
    return lambda batch, lanes: write(batch.R, np.repeat(lanes.bits(), WARP), lanes)


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
