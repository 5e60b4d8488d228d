"""The lock file: the chosen schedules, by device, spec and number of rows.

TOML for people to read and reviews to compare; the same choices give the same bytes:

    version = 1

    ["NVIDIA H200"]
    arch = "sm_90"

    ["NVIDIA H200"."layernorm.fwd:d=4096,dtype=bf16"]
    4096 = "form=registers,threads=128,rows_per_block=1,vec=8,blocks_per_sm=6,prefetch=no"
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lngen.compiler.compile import Compilation
from lngen.compiler.problem import ANY, Schedule, check, parse_schedule
from lngen.errors import LngenError, ScheduleError
from lngen.files import read, reason, shown

VERSION = 1
LARGEST = 2**21  # bytes of a lock file: some 10,000 choices
WIDEST = 1000  # characters of a line
HEAD = "# Schedules chosen by lngen tune: device, spec, number of rows. They change speed and never a bit.\n"


@dataclass(frozen=True, order=True)
class Locked:
    """One choice: ``schedule`` is the fastest for ``spec`` with ``rows`` rows on ``device``, of ``arch``."""

    device: str
    arch: str
    spec: str
    rows: int
    schedule: str


@dataclass(frozen=True)
class Lock:
    """The choices of a file. ``path`` is its name in messages."""

    entries: tuple[Locked, ...] = ()
    path: str = "the lock file"

    def candidates(self, spec: str, *, device: str | None = None, arch: str | None = None) -> list[Locked]:
        """The choices for a spec on a device, or on the first device of an arch; None is any."""
        found = [e for e in self.entries if e.spec == spec and device in (None, e.device) and arch in (None, e.arch)]
        return [e for e in found if e.device == found[0].device]

    def nearest(
        self, spec: str, rows: int | None = None, *, device: str | None = None, arch: str | None = None
    ) -> Locked | None:
        """The choice for the number of rows nearest to ``rows`` by ratio; of two equally near the one with more rows.

        ``rows`` None: the choice for the most rows. The result is None if the spec is not locked there.
        """
        found = self.candidates(spec, device=device, arch=arch)
        if not found:
            return None
        if rows is None:
            return max(found, key=lambda e: e.rows)
        return min(found, key=lambda e: (abs(math.log(max(e.rows, 1) / max(rows, 1))), -e.rows))

    def outdated(self, spec: str) -> str | None:
        """What to say of a spec that is not locked, where another graph of its name is: other equations, or names."""
        known, wanted = {e.spec for e in self.entries}, _without_digest(spec)
        other = min((s for s in known if s != spec and _without_digest(s) == wanted), default=None)
        if other is None or spec in known:
            return None
        return f"'{self.path}' has schedules for {other}, and the graph is {spec} now: run 'lngen tune' again."

    def schedule(
        self, compilation: Compilation, rows: int | None = None, *, device: str | None = None, arch: str | None = None
    ) -> Schedule | None:
        """The nearest choice as a schedule; LngenError if it is invalid, or no longer legal for the spec."""
        entry = self.nearest(str(compilation.spec), rows, device=device, arch=arch)
        if entry is None:
            return None
        try:
            found = parse_schedule(entry.schedule, ANY)
            check(found, compilation.problem)
        except ScheduleError as error:
            where = f"'{self.path}', {entry.spec} with {entry.rows} rows on {entry.device}"
            raise LngenError(f"{where}: {error} Tune it again, or remove the line.") from error
        return found

    def updated(self, entries: Iterable[Locked]) -> Lock:
        """This lock with more choices; each replaces the one for the same device, spec and rows."""
        kept = {(e.device, e.spec, e.rows): e for e in (*self.entries, *entries)}
        return Lock(tuple(sorted(kept.values())), self.path)

    def render(self) -> str:
        """The file: devices, specs and rows in order."""
        parts = [HEAD, f"version = {VERSION}\n"]
        for device in sorted({e.device for e in self.entries}):
            own = sorted(e for e in self.entries if e.device == device)
            parts.append(f"\n[{_quoted(device)}]\narch = {_quoted(own[0].arch)}\n")
            for spec in sorted({e.spec for e in own}):
                parts.append(f"\n[{_quoted(device)}.{_quoted(spec)}]\n")
                parts += [f"{e.rows} = {_quoted(e.schedule)}\n" for e in own if e.spec == spec]
        return "".join(parts)


def _without_digest(spec: str) -> str:
    return re.sub(r"@[0-9a-f]{8}\.", ".", spec, count=1)


def parse_lock(text: str, path: str = "the lock file") -> Lock:
    """The choices that ``render`` wrote; LngenError for anything else."""
    try:
        content = _toml(text)
    except ValueError as error:
        raise LngenError(f"'{path}' is not a lock file: {error}; remove it, or tune again.") from error
    version = content.pop("version", None)
    if version != VERSION:
        raise LngenError(f"'{path}' is expected to be a lock file of version {VERSION}, got version {shown(version)}.")
    entries: list[Locked] = []
    for device, specs in content.items():
        where = f"'{path}', {shown(device)}"
        arch = _table(specs, where).pop("arch", None)
        if not isinstance(arch, str):
            raise LngenError(f'{where}: expected an arch such as "sm_90", got {shown(arch)}.')
        for spec, choices in specs.items():
            at = f"{where}, {shown(spec)}"
            entries += [_entry(at, device, arch, spec, *choice) for choice in _table(choices, at).items()]
    return Lock(tuple(sorted(entries)), path)


def _toml(text: str) -> dict[str, Any]:
    """The content of a TOML text; ValueError for anything else."""
    # The standard parser takes quadratic time for a key of many parts, which is always on one line.
    if max(map(len, text.split("\n"))) > WIDEST:
        raise ValueError(f"a line is longer than {WIDEST} characters")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_lock(path: Path | str, *, missing_ok: bool = False) -> Lock:
    """The lock file at ``path``; LngenError if it cannot be read or is invalid.

    A missing file is an error, or with ``missing_ok`` an empty lock file.
    """
    try:
        text = read(path, LARGEST).decode()
    except FileNotFoundError as error:
        if missing_ok:
            return Lock(path=str(path))
        raise LngenError(f"there is no lock file '{path}'; 'lngen tune SPEC --lock {path}' writes one.") from error
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LngenError(f"the lock file '{path}' cannot be read: {why}; name another file.") from error
    return parse_lock(text, str(path))


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LngenError(f"{where}: expected a table, got {shown(value)}.")
    return value


def _entry(where: str, device: str, arch: str, spec: str, rows: str, schedule: Any) -> Locked:
    if not (re.fullmatch(r"0|[1-9]\d{0,17}", rows, re.ASCII) and isinstance(schedule, str)):
        got = f"{shown(rows)} = {shown(schedule)}"
        raise LngenError(f'{where}: expected a line such as 4096 = "threads=128", got {got}.')
    return Locked(device, arch, spec, int(rows), schedule)


def _quoted(text: str) -> str:
    """A TOML string: as in JSON, except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
