"""The computation of an instruction: the dtypes of its operands and results, and the function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lngen.ptx.opcodes import Opcode
from lngen.ptx.values import DT


@dataclass(frozen=True)
class Pure:
    """A function from operands to a result (a tuple if there are several ``outs``)."""

    outs: tuple[DT, ...]
    ins: tuple[DT, ...]
    fn: Callable[..., Any]


Maker = Callable[[Opcode], Pure | None]  # None: the modifiers exclude each other
