"""Lines of the CUDA source from which instructions come."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOC = re.compile(r"\.loc\s+\d+\s+(\d+)(?:.*inlined_at\s+\d+\s+(\d+))?")
_DEEPEST = 8  # depth of nested calls that is followed


@dataclass(frozen=True, slots=True)
class Loc:
    """A line of the CUDA source, and the line of the kernel into which it was inlined (0: it was not)."""

    line: int = 0
    inlined_at: int = 0


class Callers:
    """Follows inlined lines to the kernel: a .loc of the caller precedes the .loc of the code inlined into it."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def loc(self, statement: str) -> Loc | None:
        """The meaning of a .loc directive; None for another statement."""
        found = _LOC.match(statement)
        if not found:
            return None
        line, caller = int(found[1]), int(found[2] or 0)
        if line != caller:  # else a function inlined into itself
            self._of[line] = caller
        for _ in range(_DEEPEST):
            caller = self._of.get(caller) or caller
        return Loc(line, caller)
