"""Schedule: what may change the speed of a kernel and never a bit of its results."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace

from lngen.errors import ScheduleError

FORMS = ("registers", "stream")


@dataclass(frozen=True, order=True)
class Schedule:
    """How rows are laid over threads.

    form      registers: a row's inputs stay in registers from load to store; stream: they are read again in
              every phase, for rows too long to hold
    threads   threads that share a row, a power of two
    rows      rows a block works on side by side; fixed by the graph if it has column sums
    vec       elements per memory access; 1 works for any pointer and stride
    resident  blocks per multiprocessor that the compiler limits registers for
    prefetch  with column sums: load the next row while this one is computed
    """

    form: str
    threads: int
    rows: int
    vec: int
    resident: int = 1
    prefetch: bool = False

    def __str__(self) -> str:
        return ",".join(f"{f.name}={_show(getattr(self, f.name))}" for f in fields(self))

    @property
    def slug(self) -> str:
        """The schedule as part of a C identifier."""
        flags = ["stream"] * (self.form == "stream") + ["prefetch"] * self.prefetch
        return "_".join([f"t{self.threads}", f"r{self.rows}", f"v{self.vec}", f"b{self.resident}", *flags])

    @property
    def block(self) -> int:
        """Threads per block."""
        return self.threads * self.rows


def parse_schedule(text: str, base: Schedule) -> Schedule:
    """``base`` with the ``key=value,...`` of ``text`` put in; ScheduleError names the nearest right word."""
    known = {f.name: getattr(base, f.name) for f in fields(Schedule)}
    changes: dict[str, str | int | bool] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ScheduleError(f"schedule '{text}': expected 'key=value', got '{part}'.")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise ScheduleError(f"schedule '{text}': there is no key '{key}', expected one of {', '.join(known)}{hint}")
        changes[key] = _read(text, key, value, known[key])
    return replace(base, **changes)  # type: ignore[arg-type]


def _show(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read(text: str, key: str, value: str, like: object) -> str | int | bool:
    if isinstance(like, bool):
        if value in ("yes", "no"):
            return value == "yes"
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be yes or no, got '{value}'.")
    if isinstance(like, int):
        if value.isdigit():
            return int(value)
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be a whole number, got '{value}'.")
    if value not in FORMS:
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be one of {', '.join(FORMS)}, got '{value}'.")
    return value
