"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One thing that was checked. ``what``: oracle, differences, compile or bits; ``detail`` says how close."""

    spec: str
    schedule: str
    rows: int
    what: str
    ok: bool
    detail: str
