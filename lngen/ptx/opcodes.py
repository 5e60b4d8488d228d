"""An opcode's modifiers, named by its pattern. An opcode with a modifier that no code reads is refused."""

from __future__ import annotations

import re
from typing import Any


class Opcode:
    """The groups of ``pattern`` in ``text``. Every variable part of an opcode has a name, so that code can read it."""

    def __init__(self, found: re.Match[str]) -> None:
        self.text = found.string
        self._parts: dict[str, Any] = found.groupdict()
        self._left = {name for name, part in self._parts.items() if part is not None}

    def __getitem__(self, name: str) -> Any:
        """The modifier of that name, None if there is none."""
        self._left.discard(name)
        return self._parts[name]

    def hints(self, *names: str) -> None:
        """Modifiers that change no value and no order, which the executor ignores."""
        self._left.difference_update(names)

    @property
    def left(self) -> tuple[str, ...]:
        """Modifiers that no code has read."""
        return tuple(sorted(self._parts[name] for name in self._left))


def read(pattern: re.Pattern[str], text: str) -> Opcode | None:
    """The modifiers of an opcode; None if the pattern does not match."""
    found = pattern.fullmatch(text)
    return Opcode(found) if found else None
