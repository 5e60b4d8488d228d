"""Instructions that change no value: cache policies and prefetches."""

from __future__ import annotations

import re

import numpy as np

from lngen.ptx.access import address_of, base_slot
from lngen.ptx.batch import Batch
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Report
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown
from lngen.ptx.steps import write
from lngen.ptx.values import DTYPES, UNSIGNED

_POLICY = re.compile(
    r"createpolicy\.fractional\.(?P<first>L2::evict_(?:last|normal|first|unchanged))"
    r"(?:\.(?P<second>L2::evict_(?:first|unchanged)))?\.b64"
)
_PREFETCH = re.compile(r"prefetch\.(?P<to>(?:global\.)?L[12]|global\.L2::evict_(?:last|normal))|prefetchu\.L1")
_BULK_PREFETCH = "cp.async.bulk.prefetch.L2.global"
POLICY = 0x12F0000000000000  # any number: hints are passed on and not interpreted


def policy_step(program: Program, i: Instruction) -> Step:
    """createpolicy.fractional: a 64-bit policy for other instructions."""
    if not _POLICY.fullmatch(i.opcode) or not 1 <= len(i.operands) <= 2:
        raise unknown(i)
    if len(i.operands) == 2:
        program.source(i.operands[1], DTYPES["f32"], i)
    slot, convert = program.target(i.operands[0], UNSIGNED[8], i)
    value = np.uint64(POLICY)

    def step(batch: Batch, lanes: Lanes) -> None:
        write(batch, slot, convert(value) if convert else value, lanes)

    return step


def prefetch_step(program: Program, i: Instruction) -> Step:
    """prefetch: changes nothing a kernel can observe, so it may precede any wait; counted and checked for bounds."""
    if not _PREFETCH.fullmatch(i.opcode) or len(i.operands) != 1 or i.operands[0].kind != "mem":
        raise unknown(i)
    base, offset = base_slot(program, i, i.operands[0].text), i.operands[0].offset

    def step(batch: Batch, lanes: Lanes) -> None:
        address = address_of(batch, base, offset, lanes)
        for buffer, part in batch.memory.parts(address, lanes.index, 1, "A prefetch:", batch.reporting(i)):
            batch.prefetched(buffer.name, address.size if part is None else part.size)

    return step


def bulk_prefetch(program: Program, i: Instruction) -> Step | None:
    """cp.async.bulk.prefetch.L2.global [address], size: a read of that many bytes; None for another opcode."""
    if i.opcode.removesuffix(".L2::cache_hint") != _BULK_PREFETCH:
        return None
    if len(i.operands) != 2 + i.opcode.endswith("cache_hint") or i.operands[0].kind != "mem":
        raise unknown(i)
    base, offset = base_slot(program, i, i.operands[0].text), i.operands[0].offset
    slot, read = program.source(i.operands[1], UNSIGNED[4], i)

    def step(batch: Batch, lanes: Lanes) -> None:
        value = batch.R[slot] if read is None else read(batch.R[slot])
        sizes = np.broadcast_to(value, batch.total)[lanes.index]
        report: Report = batch.reporting(i)
        for n, size in enumerate(sizes.tolist()):
            address, who = address_of(batch, base, offset, lanes)[n : n + 1], lanes.index[n : n + 1]
            if size % 16 or int(address[0]) % 16:
                text = "A bulk prefetch: an address and a size that are multiples of 16 are expected."
                batch.report("misaligned", text, i, who, address)
            elif size:
                for buffer, _ in batch.memory.parts(address, who, size, f"A bulk prefetch of {size} bytes:", report):
                    batch.prefetched(buffer.name, 1)

    return step
