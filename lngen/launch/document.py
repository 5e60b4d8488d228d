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
        head, found, rest = raw.partition(_SETS)
        body, after, tail = rest.partition(_AFTER)
        first, *texts = body.split(_SET)
        self._texts: dict[str, bytes] = {}
        self._sets: dict[str, Any] = {}
        if found and after and not first:
            self.top = _parsed(head + _SETS + _AFTER[2:] + tail)
            check_version(self.top)
            for text in texts:
                name = _parsed(text[: text.find(b",")])
                check_name(name, self._texts)
                self._texts[name] = text.rstrip().rstrip(b",")
        else:
            self.top = _parsed(raw)
            check_version(self.top)
            self._sets = {entry["name"]: entry for entry in self.top["kernel_sets"]}

    def __contains__(self, name: object) -> bool:
        """True for the name of a kernel set."""
        return name in self._texts or name in self._sets

    def names(self) -> list[str]:
        """The kernel sets."""
        return [*self._texts] or [*self._sets]

    def kernel_set(self, name: str) -> Any:
        """A kernel set; ValueError if its text is not JSON."""
        if name not in self._sets:
            self._sets[name] = _parsed(b'{"name": ' + self._texts[name])
        return self._sets[name]


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
