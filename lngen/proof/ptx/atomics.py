"""Instructions that order threads without a wait for each other: atom, red, fences, griddepcontrol.

PTX ISA, Parallel Synchronization and Communication Instructions: griddepcontrol. Before .wait, a kernel launched this
way may run beside the previous kernel, which may still change memory. A kernel that never waits may also end before
the previous kernel does; the next kernel, which waits for this one alone, then starts too early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.accesses import (
    check_waited,
    look,
    misaligned,
    note_global,
    note_shared,
    parts_of,
    picked,
    place,
)
from lngen.proof.ptx.batch import Batch
from lngen.proof.ptx.mbarriers import fence_mbarriers
from lngen.proof.ptx.opcodes import LEVELS, PROXY_SPACES, WAIT, Atomic, Semantics, atomic, fence
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import DTYPES, Lanes, Program, Step, Value, unknown

PROXIES = tuple(
    f"{name}.proxy.{kind}"
    for name in ("fence", "membar")
    for kind in ("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster")
)
_MEANING: dict[str, Callable[..., Any]] = {
    "add": lambda old, a: old + a,
    "inc": lambda old, a: old.dtype.type(0) if old >= a else old + old.dtype.type(1),
    "dec": lambda old, a: a if old == 0 or old > a else old - old.dtype.type(1),
    "min": min,
    "max": max,
    "exch": lambda old, a: a,
    "or": lambda old, a: old | a,
    "and": lambda old, a: old & a,
    "xor": lambda old, a: old ^ a,
    "cas": lambda old, a, b: b if old == a else old,
}


def _add_flushed(old: Value, a: Value) -> Value:
    """atom.add.f32 in global memory flushes subnormal operands and results to zero; in shared memory it keeps them."""
    return _flushed(_flushed(old) + _flushed(a))


def _flushed(a: Value) -> Value:
    return np.copysign(np.float32(0), a) if abs(a) < np.finfo(np.float32).tiny else a


def atomic_step(program: Program, i: Instruction) -> Step:
    """The step of a read-modify-write: the threads execute it one after the other."""
    form = atomic(i.opcode)
    has_result = i.opcode.startswith("atom")
    if form is None or len(i.operands) != 2 + has_result + (form.does == "cas"):
        raise unknown(i)
    memory, *rest = i.operands[1:] if has_result else i.operands
    dtype = DTYPES[form.kind]
    address_of, readers = program.address(memory, i), [program.reader(o, dtype, i) for o in rest]
    write = program.writer(i.operands[0], dtype, i) if has_result else None
    change = _MEANING[form.does]

    def step(batch: Batch, lanes: Lanes) -> None:
        address = address_of(batch.R, lanes)
        values = [lanes.each(read(batch.R)) for read in readers]
        result = np.zeros(batch.total, dtype)
        for name, inner, who, part in parts_of(form.space, address, lanes):
            flushes = name == "global" and (form.does, form.kind) == ("add", "f32")
            mine, does = picked(values, part), _add_flushed if flushes else change
            _modify(batch, i, form, name, inner, who, mine, result, does)
        if write is not None:
            write(batch.R, result, lanes)

    return step


def _modify(
    batch: Batch, i: Instruction, form: Atomic, space: str, address: Array, lanes: Lanes, values: list[Array],
    result: Array, change: Callable[..., Any],
) -> None:  # fmt: skip
    width, how = result.dtype.itemsize, form.how
    if space == "global":
        what = f"An atomic access of {width} bytes:"
        for buffer, at, who, part in batch.buffers(i, address, lanes.index, width, what):
            mine = picked(values, part)
            check_waited(batch, i, buffer, who, at)
            if not buffer.tracked:
                batch.report("out-of-bounds", f"A write to '{buffer.name}', which may only be read.", i, who, at)
            elif not misaligned(batch, i, who, at, width, f"'{buffer.name}'"):
                start = at.astype(np.int64) - buffer.base
                _apply(
                    batch, i, buffer.data, buffer.written, start, who, mine, result, change, how, at.astype(np.int64)
                )
                note_global(batch, i, buffer, at, who, width, "write")
        return
    scratch = batch.scratch(space)
    at, who, part = place(batch, i, lanes, scratch, address, width, own=form.own)
    look(batch, i, scratch, at, who, width, "write")
    _apply(batch, i, scratch.data, scratch.written, at, who, picked(values, part), result, change, how, -1 - at)
    note_shared(batch, i, scratch, at, who, width, "write")


def _apply(
    batch: Batch, i: Instruction, data: Array, written: Array | None, start: Array, who: Array, values: list[Array],
    result: Array, change: Callable[..., Any], how: Semantics, flags: Array,
) -> None:  # fmt: skip
    """Read, change and write, thread by thread."""
    width = result.dtype.itemsize
    assert written is not None
    blank = [n for n, at in enumerate(start.tolist()) if not written[at : at + width].all()]
    if blank:
        batch.report("uninitialised", "An atomic access to bytes that nothing wrote.", i, who[blank])
    for n, (lane, at) in enumerate(zip(who.tolist(), start.tolist(), strict=True)):
        place = data[at : at + width].view(result.dtype)
        old = place[0]
        new = change(old, *(v[n] for v in values))
        if new != old:
            batch.touched()
        place[0], result[lane] = new, old
        written[at : at + width] = 1
        if batch.order is not None:
            batch.order.flag_read(int(flags[n]), lane, how)
            batch.order.flag_written(int(flags[n]), lane, how, True)


def fence_step(program: Program, i: Instruction) -> Step:
    """Orders accesses before the fence with those after it. A fence for shared memory alone is taken as one for all."""
    if i.operands:
        raise unknown(i)
    if i.opcode == "fence.mbarrier_init.release.cluster":
        return lambda batch, lanes: fence_mbarriers(batch, lanes.index)
    if i.opcode in PROXIES:
        return _proxy(fenced_spaces(i)) if "async" in i.opcode else lambda batch, lanes: None
    form = fence(i.opcode)
    if form is None:
        raise unknown(i)
    level = LEVELS[form.scope]

    def step(batch: Batch, lanes: Lanes) -> None:
        if batch.order is not None:
            batch.order.fence(lanes.index, level, form.acquire, form.release, form.restricted)

    return step


def _proxy(spaces: tuple[str, ...]) -> Step:
    def step(batch: Batch, lanes: Lanes) -> None:
        if batch.order is not None:
            batch.order.proxy_fence(lanes.index, spaces)

    return step


def nothing_step(program: Program, i: Instruction) -> Step:
    """nanosleep."""
    if i.opcode != "nanosleep.u32" or len(i.operands) != 1:
        raise unknown(i)
    return lambda batch, lanes: None


def fenced_spaces(i: Instruction) -> tuple[str, ...]:
    """The memories that a fence.proxy.async applies to."""
    return ("shared",) if ".shared::" in i.opcode else ("global",) if ".global" in i.opcode else PROXY_SPACES


_LAUNCH = "griddepcontrol.launch_dependents"


def control_step(program: Program, i: Instruction) -> Step:
    """griddepcontrol: values do not change; barriers hand a wait on like a write."""
    if i.opcode not in (WAIT, _LAUNCH) or i.operands:
        raise unknown(i)
    if i.opcode == _LAUNCH:
        return lambda batch, lanes: None

    def step(batch: Batch, lanes: Lanes) -> None:
        assert batch.order is not None
        batch.launch.waited = True
        batch.order.waited(lanes.index)

    return step
