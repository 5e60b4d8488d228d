"""The text of a manifest: what every program needs is read at once, a kernel set when it is asked for.

A pack of many specs has a manifest of megabytes, of which a program uses few kernel sets. As lngen lays a manifest out,
each of them begins with the same lines, which no string of JSON can hold. Another layout is read as a whole.
"""

from __future__ import annotations

import json
from typing import Any

from .shape import check_name, check_version

_SETS = b'\n "kernel_sets": ['
_AFTER = b'\n ],\n "other_files": '
_SET = b'\n  {\n   "name": '


class Document:
    """The parts of a manifest: ``top``, all of it but the kernel sets, and these by name."""

    def __init__(self, raw: bytes) -> None:
        """ValueError for a text that is no manifest of this version, or whose kernel sets have no names."""
        self._raw = raw
        self._texts: dict[str, tuple[int, int]] = {}
        self._sets: dict[str, Any] = {}
        start, end = raw.find(_SETS), raw.rfind(_AFTER)
        first = start + len(_SETS)
        if 0 <= start < end and raw.startswith(_SET, first):
            self.top = _parsed(raw[:first] + raw[end + 2 :])
            check_version(self.top)
            self._find(first, end)
        else:
            self.top = _parsed(raw)
            check_version(self.top)
            self._sets = {entry["name"]: entry for entry in self.top["kernel_sets"]}

    def _find(self, begin: int, end: int) -> None:
        """Note where the text of each kernel set begins and ends; nothing is copied."""
        raw, places = self._raw, list[int]()
        while 0 <= begin < end:
            places.append(begin + len(_SET))
            begin = raw.find(_SET, begin + 1)
        for place, after in zip(places, [*(p - len(_SET) for p in places[1:]), end]):
            quoted = raw[place : raw.find(b",", place)].decode(errors="replace")
            name = quoted[1:-1] if quoted[:1] == quoted[-1:] == '"' else None
            check_name(name, self._texts)
            self._texts[str(name)] = place, after

    def __contains__(self, name: object) -> bool:
        """True for the name of a kernel set."""
        return name in self._texts or name in self._sets

    def names(self) -> list[str]:
        """The kernel sets."""
        return [*self._texts] or [*self._sets]

    def whole(self) -> Any:
        """The manifest with all its kernel sets."""
        return {**self.top, "kernel_sets": [self.kernel_set(name) for name in self.names()]}

    def kernel_set(self, name: str) -> Any:
        """A kernel set; ValueError if its text is not JSON."""
        if name not in self._sets:
            place, after = self._texts[name]
            self._sets[name] = _parsed(b'{"name": ' + self._raw[place:after].rstrip().rstrip(b","))
        return self._sets[name]


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
