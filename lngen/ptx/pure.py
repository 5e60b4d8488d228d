"""What an instruction computes: dtypes in which operands are read, those of the results, and the function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lngen.ptx.opcodes import Opcode
from lngen.ptx.values import DT


@dataclass(frozen=True)
class Pure:
    """A result (a tuple if there are several ``outs``) from operands."""

    outs: tuple[DT, ...]
    ins: tuple[DT, ...]
    fn: Callable[..., Any]


Maker = Callable[[Opcode], Pure | None]  # None: it does not know these modifiers together
