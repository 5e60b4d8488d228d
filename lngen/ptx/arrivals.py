"""Threads at barriers of their block: those that wait, and those that arrived without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lngen.ir.numerics import Array
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction


@dataclass(frozen=True)
class Wait:
    """Lanes that wait at the barrier instruction at ``pc``; identity and thread count are a number or one per lane."""

    pc: int
    instruction: Instruction
    identity: Any
    expected: Any
    lanes: Lanes


@dataclass
class Came:
    """Threads that arrived at a barrier without waiting, the count they gave, and the accesses visible to them."""

    expected: int
    lanes: list[Array] = field(default_factory=list)
    visible: list[Array] = field(default_factory=list)
