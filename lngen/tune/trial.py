"""A trial: the outcome of one schedule of one spec, at one number of rows, on one device, with one compiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lngen.errors import LngenError
from lngen.files import shown

# The last stage that a candidate reached, in the words of the T4 format.
STATUSES = ("constraints", "compile", "runtime", "correctness", "timeout", "correct")


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
            raise LngenError(f"'{key}' is expected to be a {known[key][0].__name__}, got {shown(value)}")
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
