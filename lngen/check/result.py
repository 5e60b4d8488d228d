"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One check. ``what``: oracle, differences, compile or bits; ``detail`` gives the errors."""

    spec: str
    schedule: str
    rows: int
    what: str
    ok: bool
    detail: str
