"""What an instruction computes: dtypes in which operands are read, those of the results, and the function."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lngen.ptx.values import DT


@dataclass(frozen=True)
class Pure:
    """A result (a tuple if there are several ``outs``) from operands."""

    outs: tuple[DT, ...]
    ins: tuple[DT, ...]
    fn: Callable[..., Any]


Maker = Callable[[re.Match[str]], Pure]
