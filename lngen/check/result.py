"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One check. ``what``: oracle, float64, differences, compile, bits or ptx; ``detail`` gives the errors.

    ``rows`` is None for a compilation, which is of no number of rows.
    """

    spec: str
    schedule: str
    rows: int | None
    what: str
    ok: bool
    detail: str
