"""The database: all trials, one line of JSON each, append-only.

A line is written in one call and flushed to disk, so a killed run loses at most the line that it was writing; such an
incomplete line is reported with its number and skipped.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lngen import files
from lngen.errors import LngenError
from lngen.files import parse_json
from lngen.tune.trial import Device, Trial, from_json, latest

LARGEST = 2**28  # bytes of a database: half a million trials
LONGEST = 2**16  # bytes of a line
COMPLAINTS = 20


@dataclass(frozen=True)
class Content:
    """The trials of a file, in its order, and a sentence for each invalid line, the first COMPLAINTS of them."""

    trials: tuple[Trial, ...] = ()
    complaints: tuple[str, ...] = ()


def read(path: Path, *, missing_ok: bool = True) -> Content:
    """The content of a database; nothing if there is no such file. LngenError if it cannot be read."""
    try:
        raw = files.read(path, LARGEST)
    except FileNotFoundError as error:
        if missing_ok:
            return Content()
        raise LngenError(f"there is no database '{path}' to merge; name a file that 'lngen tune' wrote.") from error
    except OSError as error:
        raise LngenError(f"the database '{path}' cannot be read: {files.reason(error)}; name another file.") from error
    trials: list[Trial] = []
    complaints: list[str] = []
    wrong = 0
    for number, text in enumerate(io.BytesIO(raw), 1):
        found = _trial(text)
        if isinstance(found, Trial):
            trials.append(found)
        elif found:
            wrong += 1
            if wrong <= COMPLAINTS:
                complaints.append(f"line {number} of '{path}' is skipped, it is not a trial: {found}.")
    if wrong > COMPLAINTS:
        complaints.append(f"{wrong - COMPLAINTS} more lines of '{path}' are skipped.")
    return Content(tuple(trials), tuple(complaints))


def _trial(text: bytes) -> Trial | str:
    """The trial of a line, or the reason why it is invalid; an empty text for an empty line."""
    if len(text) > LONGEST:
        return f"it is longer than {LONGEST} bytes"
    if not text.strip():
        return ""
    try:
        return from_json(parse_json(text))
    except ValueError as error:
        return "it is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
    except LngenError as error:
        return str(error)


def of(trials: Iterable[Trial], spec: str, rows: int, device: str) -> list[Trial]:
    """The trials of one job on a device: one per schedule, measured as the last attempt was."""
    mine = [t for t in trials if (t.spec, t.rows, t.device) == (spec, rows, device)]
    last = {t.schedule: (t.kernel, t.compiler, t.in_turn) for t in mine}
    return latest(t for t in mine if (t.kernel, t.compiler, t.in_turn) == last[t.schedule])


def append(path: Path, trials: Sequence[Trial]) -> None:
    """Add trials at the end, in one write; an incomplete line of a killed run is ended first.

    Any number of processes may append and merge at the same time: each holds a lock on the database.
    """
    if not trials:
        return
    data = b"".join(line(t) for t in trials)
    path = files.resolved(path)
    with files.exclusive(path.parent, path.name):
        try:
            _append(path, data)
        except OSError as error:
            raise LngenError(
                f"the database '{path}' cannot be written: {error.strerror}; name a place that can be written to."
            ) from error


def _append(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = b"\n" * torn + data
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def line(trial: Trial) -> bytes:
    """The line of a trial in the file."""
    return json.dumps(trial.to_json(), sort_keys=True, ensure_ascii=False).encode() + b"\n"


def merge(shards: Iterable[Path], path: Path) -> tuple[int, list[str]]:
    """Make ``path`` the union of itself and the shards, sorted; the number of trials, and complaints.

    Identical lines count once; of several trials of one identity ``latest`` chooses. The order of the shards does not
    matter. LngenError if a shard does not exist; then ``path`` is not changed.
    """
    lines: set[bytes] = set()
    complaints: list[str] = []
    path = files.resolved(path)
    with files.exclusive(path.parent, path.name) as staging:
        for shard in (path, *shards):
            content = read(shard, missing_ok=shard == path)
            lines |= {line(t) for t in content.trials}
            complaints += content.complaints
        trials = sorted(lines, key=_place)
        files.write_in_order([(path, b"".join(trials))], staging)
    return len(trials), complaints


def _place(raw: bytes) -> tuple[object, ...]:
    trial = from_json(json.loads(raw))
    return trial.spec, trial.rows, trial.device, trial.compiler, trial.rank, trial.schedule, trial.rounds, raw


def foreign(trials: Sequence[Trial], devices: Sequence[Device], path: Path) -> list[str]:
    """One sentence if there are trials of devices or compilers other than these; nothing otherwise."""
    own = {(d.name, d.compiler) for d in devices}
    others = sorted({(t.device, t.compiler) for t in trials} - own)
    count = sum((t.device, t.compiler) not in own for t in trials)
    if not others:
        return []
    named = ", ".join(f"{device} with {compiler}" for device, compiler in others)
    lines = "1 line" if count == 1 else f"{count} lines"
    return [f"{lines} of '{path}' are ignored, measured on {named}."]
