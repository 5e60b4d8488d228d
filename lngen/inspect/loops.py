"""The control flow of a kernel's machine code: what its start reaches, and its loops.

A compiler moves rare paths behind the code that they interrupt, so that a backward branch alone is no loop. It is one
if every path from the start to the branch passes its target (natural loops; Aho, Lam, Sethi, Ullman: Compilers, section
9.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lngen.inspect.sass import Instruction

Flow = Mapping[int, set[int]]


def target(one: Instruction) -> int | None:
    """The address that an instruction of control flow names, such as a branch; None for all others."""
    names = one.opcode.startswith(("BRA", "BSSY", "WARPSYNC.COLLECTIVE"))
    found = re.search(r"\b0x[0-9a-f]+$", one.text) if names else None
    return int(found[0], 16) if found else None


def reached(code: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that a kernel's start reaches: not the padding, nor the functions that it calls."""
    return [code[at] for at in sorted(_reached(0, _flow(code)[1]))]


def loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The natural loops of a kernel, the largest first: their instructions in order, with those of inner loops."""
    jumps, after = _flow(code)
    before: dict[int, set[int]] = {at: set() for at in after}
    for at, following in after.items():
        for to in following:
            before[to].add(at)
    known = _reached(0, after)
    bodies: dict[int, set[int]] = {}
    for at, head in jumps.items():
        if head <= at and at in known and at not in _reached(0, after, head):
            bodies.setdefault(head, {head}).update(_reached(at, before, head) & known)
    return sorted(([code[at] for at in sorted(body)] for body in bodies.values()), key=len, reverse=True)


def _flow(code: Sequence[Instruction]) -> tuple[dict[int, int], Flow]:
    """By number of an instruction: the one that it jumps to, and all that may follow it. A call returns."""
    numbers = {one.address: at for at, one in enumerate(code)}
    branches = [(at, target(one)) for at, one in enumerate(code) if one.opcode.startswith("BRA")]
    jumps = {at: numbers[to] for at, to in branches if to in numbers}
    last = len(code) - 1
    after = {at: {at + 1} if at < last and _goes_on(one) else set() for at, one in enumerate(code)}
    return jumps, {at: following | ({jumps[at]} if at in jumps else set()) for at, following in after.items()}


def _goes_on(one: Instruction) -> bool:
    """True unless it jumps without a condition, which is a predicate, an operand, or a suffix of the branch."""
    if one.opcode.partition(".")[0] not in ("BRA", "BRX", "EXIT", "RET"):
        return True
    return one.text.startswith("@") or (target(one) is not None and (one.opcode != "BRA" or "," in one.text))


def _reached(start: int, flow: Flow, without: int | None = None) -> set[int]:
    """What is reached from ``start``, itself included, on paths that avoid ``without``."""
    found, waiting = {start} - {without}, [start] if start != without else []
    while waiting:
        new = flow[waiting.pop()] - found - {without}
        found |= new
        waiting += new
    return found
