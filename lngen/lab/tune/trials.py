"""Trials: what became of one schedule of one spec, and the database of all, one line of JSON each, append-only.

A line is written in one call and flushed to disk, so a killed run loses at most the line that it was writing; such an
incomplete line is reported with its number and skipped.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lngen import files
from lngen.errors import LngenError
from lngen.files import parse_json, shown

# The last stage that a candidate reached, in the words of the T4 format.
STATUSES = ("constraints", "compile", "runtime", "correctness", "timeout", "correct")
LARGEST = 2**28  # bytes of a database: half a million trials
LONGEST = 2**16  # bytes of a line
COMPLAINTS = 20


# ---- one trial ----


@dataclass(frozen=True)
class Device:
    """A GPU and its compiler. ``arch``: sm_90; ``compiler``: NVRTC 13.4."""

    name: str
    arch: str
    compiler: str


@dataclass(frozen=True)
class Trial:
    """One line of the database.

    kernel     hash of the emitted CUDA, since another version emits another kernel; empty if there is none
    rank       place in the model's order, from 0
    status     constraints (illegal), compile (refused, or spills), runtime, correctness, timeout, or correct
    reason     the reason of a failure
    us_*       microseconds a launch: median, 10th and 90th percentile over ``rounds`` interleaved rounds
    reference  microseconds of the copy (or addition) in the same rounds
    drifted    the reference moved by more than 2 %, also when the rounds were repeated
    registers  per thread, the most of the plan's kernels; shared: bytes per block, likewise
    compile_ms milliseconds to compile it, or to find it in the cache
    date       the day of the trial (UTC), 2026-01-31; empty in databases of earlier versions
    in_turn    each launch waited for the end of the last; in databases of earlier versions launches overlap
    """

    spec: str
    rows: int
    device: str
    compiler: str
    schedule: str
    kernel: str
    rank: int
    status: str
    reason: str = ""
    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    reference: float | None = None
    rounds: int = 0
    drifted: bool = False
    registers: int = 0
    shared: int = 0
    compile_ms: float = 0.0
    date: str = ""
    in_turn: bool = False

    @property
    def identity(self) -> tuple[str, int, str, str, str, str, bool]:
        """The identity of the trial: trials of one identity measure the same thing."""
        return self.spec, self.rows, self.device, self.compiler, self.schedule, self.kernel, self.in_turn

    @property
    def timed(self) -> bool:
        """True if the trial is correct and has a time."""
        return self.status == "correct" and self.us_median is not None

    @property
    def ratio(self) -> float:
        """The time over that of the reference in the same rounds, so that a drift of the clocks cancels out."""
        if self.us_median is None:
            return float("inf")
        return self.us_median / self.reference if self.reference else self.us_median

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without those at their default."""
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}


def from_json(data: Any) -> Trial:
    """The trial that ``to_json`` gave; LngenError for anything else. Unknown keys are dropped."""
    if not isinstance(data, dict):
        raise LngenError(f"a trial is expected to be an object, got {type(data).__name__}")
    known = {f.name: _KINDS[str(f.type)] for f in fields(Trial)}
    given = {k: v for k, v in data.items() if k in known}
    for key, value in given.items():
        if not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
            raise LngenError(f"'{key}' is expected to be of type {known[key][0].__name__}, got {shown(value)}")
        if isinstance(value, int | float) and value < 0:
            raise LngenError(f"'{key}' is expected to be at least 0, got {shown(value)}")
    try:
        trial = Trial(**given)
    except TypeError as error:
        missing = str(error).partition("argument")[2].lstrip("s: ")
        raise LngenError(f"{missing or 'a key'} is missing") from error
    if trial.status not in STATUSES:
        raise LngenError(f"'status' is expected to be one of {', '.join(STATUSES)}, got {shown(trial.status)}")
    return trial


def latest(trials: Iterable[Trial]) -> list[Trial]:
    """One trial per identity, in rank order: a failure, which is final, or else the last with the most rounds."""
    found: dict[tuple[Any, ...], Trial] = {}
    for trial in trials:
        before = found.get(trial.identity)
        if before is None or _weight(trial) >= _weight(before):
            found[trial.identity] = trial
    return sorted(found.values(), key=lambda t: (t.rank, t.identity))


def _weight(trial: Trial) -> tuple[bool, int]:
    return trial.status != "correct", trial.rounds


# ---- the database ----


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
