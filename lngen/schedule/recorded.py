"""Recorded times of schedules: sweeps, trials of the tuner, results of the bench, as points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lngen.errors import LngenError, ScheduleError, SpecError
from lngen.files import parse_json, read, reason
from lngen.schedule.legal import is_legal
from lngen.schedule.problem import Problem, problem
from lngen.schedule.schedule import ANY, Schedule, parse_schedule
from lngen.spec import parse_spec

LARGEST = 2**28  # bytes of a file of records


@dataclass(frozen=True)
class Point:
    """A spec at a number of rows, with microseconds by schedule, of one run."""

    spec: str
    rows: int
    times: Mapping[Schedule, float]

    @property
    def problem(self) -> Problem:
        """The facts about the spec's graph."""
        return facts(self.spec)

    @property
    def best(self) -> float:
        """The shortest time."""
        return min(self.times.values())


@cache
def facts(spec: str) -> Problem:
    """The facts about the graph of a spec."""
    parsed = parse_spec(spec)
    return problem(parsed.graph(), parsed.d)


def points(paths: Sequence[Path], provider: str = "lngen") -> list[Point]:
    """The points of files in order: a sweep (.json with points), a bench (.json with records), trials (.jsonl).

    Of several trials of a schedule in a file the one with the most rounds counts, and of these the last. Schedules that
    are no longer legal or valid are left out. LngenError for a file that is none of these.
    """
    return [p for path in paths for p in _points(path, provider) if p.times]


def latest(found: Sequence[Point]) -> list[Point]:
    """The last point that compares schedules for every spec and number of rows; earlier ones are of older kernels."""
    return list({(p.spec, p.rows): p for p in found if len(p.times) > 1}.values())


def _points(path: Path, provider: str) -> Iterator[Point]:
    try:
        raw = read(path, LARGEST)
        if path.suffix == ".jsonl":
            yield from _trials([parse_json(line) for line in raw.splitlines() if line.strip()])
            return
        data = parse_json(raw)
        if "points" in data:
            yield from (_point(p["spec"], p["rows"], p["us"]) for p in data["points"])
        else:
            rows = (r for r in data["records"] if r["provider"] == provider and r["schedule"] and r["us_median"])
            yield from (_point(r["spec"], r["rows"], {r["schedule"]: r["us_median"]}) for r in rows)
    except OSError as error:
        raise LngenError(f"'{path}' cannot be read: {reason(error)}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LngenError(
            f"'{path}' is expected to hold times of schedules (points, records, or a trial a line), but: {error!r}."
        ) from error


def _trials(trials: Sequence[Any]) -> Iterator[Point]:
    """A point for each job; trials without a time are left out."""
    found: dict[tuple[str, int], dict[str, tuple[int, float]]] = {}
    for t in trials:
        if t["status"] == "correct" and t.get("us_median"):
            times = found.setdefault((t["spec"], t["rows"]), {})
            rounds = t.get("rounds", 0)
            if rounds >= times.get(t["schedule"], (0, 0.0))[0]:
                times[t["schedule"]] = rounds, t["us_median"]
    for (spec, rows), times in found.items():
        yield _point(spec, rows, {schedule: us for schedule, (_, us) in times.items()})


def _point(spec: str, rows: int, times: Mapping[str, float]) -> Point:
    """A point with the schedules that are legal."""
    kept: dict[Schedule, float] = {}
    for text, us in times.items():
        try:
            s = parse_schedule(text, ANY)
            if is_legal(s, facts(spec)):
                kept[s] = us
        except (ScheduleError, SpecError):
            continue
    return Point(spec, rows, kept)
