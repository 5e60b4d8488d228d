"""An opcode's modifiers, by the names its pattern gives them: one that nobody asks for was not executed."""

from __future__ import annotations

import re
from typing import Any


class Opcode:
    """What ``pattern`` finds in ``text``. Whatever may vary in an opcode has a name, else nobody could ask for it."""

    def __init__(self, found: re.Match[str]) -> None:
        self.text = found.string
        self._parts: dict[str, Any] = found.groupdict()
        self._left = {name for name, part in self._parts.items() if part is not None}

    def __getitem__(self, name: str) -> Any:
        """The modifier of that name, None if there is none."""
        self._left.discard(name)
        return self._parts[name]

    def hints(self, *names: str) -> None:
        """Modifiers that change no value and no order: the executor does without them."""
        self._left.difference_update(names)

    @property
    def left(self) -> tuple[str, ...]:
        """Modifiers that nobody has asked for."""
        return tuple(sorted(self._parts[name] for name in self._left))


def read(pattern: re.Pattern[str], text: str) -> Opcode | None:
    """The modifiers of an opcode; None if it is none of the pattern's."""
    found = pattern.fullmatch(text)
    return Opcode(found) if found else None
