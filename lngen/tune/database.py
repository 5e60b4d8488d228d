"""The database: every trial, a line of JSON each, only ever appended to.

A line is written in one piece and flushed to the disk, so a run that is killed loses at most the line it was
writing; such a half line is reported with its number, and skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lngen.errors import LngenError
from lngen.files import write_all
from lngen.tune.trial import Device, Trial, from_json, latest


@dataclass(frozen=True)
class Content:
    """The trials of a file, in its order, and a sentence for each line that is none."""

    trials: tuple[Trial, ...] = ()
    complaints: tuple[str, ...] = ()


def read(path: Path) -> Content:
    """What is in a database; nothing if there is no such file. LngenError if it cannot be read."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Content()
    except OSError as error:
        raise LngenError(f"the database '{path}' cannot be read: {error.strerror}; name another file.") from error
    trials, complaints = [], []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            trials.append(from_json(json.loads(line)))
        except (ValueError, LngenError) as error:
            why = str(error) if isinstance(error, LngenError) else "it is not JSON"
            complaints.append(f"line {number} of '{path}' is skipped, it is no trial: {why}.")
    return Content(tuple(trials), tuple(complaints))


def of(trials: Iterable[Trial], spec: str, rows: int, device: str) -> list[Trial]:
    """Those of one job on a device: one a schedule, of the kernel and the compiler it was tried with last."""
    mine = [t for t in trials if (t.spec, t.rows, t.device) == (spec, rows, device)]
    last = {t.schedule: (t.kernel, t.compiler) for t in mine}
    return latest(t for t in mine if (t.kernel, t.compiler) == last[t.schedule])


def append(path: Path, trials: Sequence[Trial]) -> None:
    """Add trials at the end, in one write; a half line that a killed run left is ended first."""
    if not trials:
        return
    data = b"".join(line(t) for t in trials)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = b"\n" * torn + data
            while data:
                data = data[os.write(handle, data) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise LngenError(
            f"the database '{path}' cannot be written: {error.strerror}; name a place that can be written to."
        ) from error


def line(trial: Trial) -> bytes:
    """A trial as it stands in the file."""
    return json.dumps(trial.to_json(), sort_keys=True, ensure_ascii=False).encode() + b"\n"


def merge(shards: Iterable[Path], path: Path) -> tuple[int, list[str]]:
    """Make ``path`` the union of itself and the shards, sorted; the number of trials, and complaints.

    The order of the shards does not matter. LngenError if a shard is not there; then ``path`` stays as it is.
    """
    lines: set[bytes] = set()
    complaints: list[str] = []
    for shard in (path, *shards):
        if shard != path and not shard.exists():
            raise LngenError(f"there is no database '{shard}' to merge; name a file that 'lngen tune' wrote.")
        content = read(shard)
        lines |= {line(t) for t in content.trials}
        complaints += content.complaints
    trials = sorted(lines, key=_place)
    write_all({path: b"".join(trials)})
    return len(trials), complaints


def _place(raw: bytes) -> tuple[object, ...]:
    trial = from_json(json.loads(raw))
    return trial.spec, trial.rows, trial.device, trial.compiler, trial.rank, trial.schedule, trial.rounds, raw


def foreign(trials: Sequence[Trial], devices: Sequence[Device], path: Path) -> list[str]:
    """One sentence if there are trials of devices or compilers other than these; nothing else."""
    own = {(d.name, d.compiler) for d in devices}
    others = sorted({(t.device, t.compiler) for t in trials} - own)
    count = sum((t.device, t.compiler) not in own for t in trials)
    if not others:
        return []
    named = ", ".join(f"{device} with {compiler}" for device, compiler in others)
    lines = "1 line" if count == 1 else f"{count} lines"
    return [f"{lines} of '{path}' are ignored, measured on {named}."]
