"""Recorded times of schedules, and how good the choices of table and model are on them.

``python -m lngen.schedule.recorded`` prints the scores of the choices on every GPU with records. ``--leave-out`` fits
the model's constants anew for every D and for every GPU, to the points of all others; ``--fit`` prints a fit to all
points. A choice is made among the schedules that were timed at a point; its score is the shortest time over its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lngen.compiler.devices import Device, named
from lngen.compiler.problem import ANY, Problem, Schedule, is_legal, parse_schedule, problem
from lngen.compiler.schedule.model import MODEL, TERMS, Features, Model, estimates, features, terms
from lngen.compiler.schedule.space import Numbers, Places, Schedules
from lngen.compiler.schedule.table import key_of, measured, rows_of, workload
from lngen.compiler.spec import parse_spec
from lngen.config import data_dir
from lngen.errors import LngenError, ScheduleError, SpecError
from lngen.files import parse_json, read, reason

LARGEST = 2**28  # bytes of a file of records
SURROUNDED = ("in turn", "between GEMMs")  # kinds of bench records whose times do not compare with those of other files


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
    return problem(parsed.graph(), parsed.d, parsed.strides)


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
            yield from (_point(p["spec"], p["rows"], swept(data, p)) for p in data["points"])
        else:
            own = (r for r in benched(data["records"]) if r["provider"] == provider and r.get("schedule"))
            rows = (r for r in own if r.get("kind") not in SURROUNDED)
            yield from (_point(r["spec"], r["rows"], {r["schedule"]: r["us_median"]}) for r in rows if r["us_median"])
    except OSError as error:
        raise LngenError(f"'{path}' cannot be read: {reason(error)}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LngenError(
            f"'{path}' is expected to hold times of schedules (points, records, or a trial a line), but: {error!r}."
        ) from error


def swept(sweep: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds by schedule at a point of a sweep, which may list its schedules once and number them."""
    return {sweep["schedules"][n]: us for n, us in point["us"]} if "schedules" in sweep else point["us"]


def benched(records: Any) -> Iterator[dict[str, Any]]:
    """The records of a bench: packed by point, what its records share and columns for each, or as they are."""
    if not isinstance(records, Mapping):  # an earlier version
        yield from records
        return
    for point in records["points"]:
        shared = {k: v for k, v in point.items() if k != "records"}
        yield from (shared | dict(zip(records["columns"], row, strict=False)) for row in point["records"])


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


# Files of records by GPU; those of a GPU that was not measured are missing.
RECORDED = {"h200": ("bench/h200-sweeps.json", "tuned/h200.jsonl"), "h100": ("bench/h100-sweeps.json",)}
FITTED = tuple(f.name for f in fields(Model))


@dataclass(frozen=True)
class Scores:
    """Scores of choices, one per point: 1 is the best of the schedules timed there."""

    each: Numbers
    where: tuple[str, ...]

    def __str__(self) -> str:
        if not len(self.each):
            return "no points"
        worst = np.argsort(self.each, kind="stable")[:3]
        listed = "; ".join(f"{self.each[n]:.3f} {self.where[n]}" for n in worst)
        mean = float(np.exp(np.log(self.each).mean()))
        return f"{len(self.each)} points, geometric mean {mean:.4f}, least {self.each.min():.3f} ({listed})"

    def at(self, which: Any) -> Scores:
        """The scores at ``which`` points."""
        return Scores(self.each[which], tuple(self.where[n] for n in np.flatnonzero(which)))


class Sample:
    """Points of GPUs as arrays: the features of every schedule that was timed, and the point it belongs to.

    ``actual``: by GPU, the features at the rows of the point; choices are made with those at the most rows of its
    class. ``lengths``, ``gpus``: D and the name of the GPU of each point.
    """

    def __init__(self, chosen: Mapping[Device, Sequence[Point]]) -> None:
        self.points = [p for some in chosen.values() for p in some]
        self.gpus = np.array([device.name for device, some in chosen.items() for _ in some])
        self.lengths = np.array([p.problem.d for p in self.points])
        self.owner = np.repeat(np.arange(len(self.points)), [len(p.times) for p in self.points])
        self.times = np.array([us for p in self.points for us in p.times.values()])
        self.worse = np.log(self.times / np.array([p.best for p in self.points])[self.owner])
        self.actual = {device: _features(some, device, [p.rows for p in some]) for device, some in chosen.items()}
        self._typical = {
            device: _features(some, device, [typical(p, device) for p in some]) for device, some in chosen.items()
        }

    def scores(self, model: Model) -> Scores:
        """The scores of the model's choices for the most rows of each class."""
        times = _estimates(self._typical, model)
        order = np.lexsort((times, self.owner))
        first = order[np.searchsorted(self.owner[order], np.arange(len(self.points)))]
        return Scores(np.exp(-self.worse[first]), tuple(map(_name, self.points)))

    def loss(self, model: Model, which: Any) -> float:
        """The loss that a fit minimises over ``which`` points.

        It has three parts: how much slower the choices are, in the mean and for the worst, where a schedule is the
        likelier the shorter its expected time; the errors of the estimates; and the distance of the constants from
        round values.
        """
        times = _estimates(self.actual, model)
        likely = np.exp(-SHARP * (np.log(times) - _least(np.log(times), self.owner)[self.owner]))
        total = np.bincount(self.owner, likely)
        slower = (np.bincount(self.owner, likely * self.worse) / total)[which]
        off = np.abs(np.log(times / self.times))[which[self.owner]].mean()
        worst = (slower**6).mean() ** (1 / 6)
        return float(slower.mean() + np.sqrt((slower**2).mean()) / 3 + worst / 4 + off / 20 + _moved(model))


@cache
def unfitted() -> Model:
    """Round values, from which a fit that must not know a D starts."""
    return Model(
        bandwidth=0.9, blend=3, launch=500, barrier=50, warp=50, near=300, issue=1, dependent=1.5, atomic=1000,
        uneven=0.03, copy=10, block=1, start=2,
    )  # fmt: skip


SHARP = 40  # times that differ by a fortieth, about their repeatability, are almost equally likely


def fit(sample: Sample, which: Any, steps: int = 3000) -> Model:
    """The constants that suit ``which`` points, by a random walk downhill from round values; deterministic."""
    random = np.random.default_rng(0)
    best, reach = unfitted(), np.full(len(FITTED), 0.2)
    least = sample.loss(best, which)
    for _ in range(steps):
        picked = random.choice(len(FITTED), random.integers(1, 4), replace=False)
        factors = np.exp(reach[picked] * random.standard_normal(len(picked)))
        changes = {FITTED[n]: getattr(best, FITTED[n]) * float(f) for n, f in zip(picked, factors, strict=True)}
        tried = replace(best, **changes)
        loss = sample.loss(tried, which)
        reach[picked] = np.clip(reach[picked] * (1.3 if loss < least else 0.97), 0.03, 0.5)
        if loss < least:
            best, least = tried, loss
    return best


def leave_out(sample: Sample, groups: Any, steps: int = 600) -> Scores:
    """Scores at every point of the model whose constants were fitted to the points of all other ``groups``."""
    each = np.empty(len(groups))
    for one in np.unique(groups):
        out = groups == one
        each[out] = sample.scores(fit(sample, ~out, steps)).each[out]
    return Scores(each, tuple(map(_name, sample.points)))


# ---- how well the model predicts ----

REPEATED = 0.025  # times whose ratio has a smaller natural logarithm do not differ


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted times, as natural logarithms: 0.1 is about a tenth.

    schedules             number of recorded times
    off, off_most         error of a time: median and 90th percentile of |log(predicted / recorded)|
    dominated             median error of a time by the term that is the largest
    apart, apart_most     error of the ratio of two times of a point: median and 90th percentile
    told                  of the pairs that differ, and by more than ``apart_most`` as predicted: fraction ordered right
    """

    schedules: int
    off: float
    off_most: float
    dominated: Mapping[str, float]
    apart: float
    apart_most: float
    told: float


def accuracy(f: Features, device: Device, times: Numbers, point: Places) -> Accuracy:
    """The errors of the model over recorded ``times`` in microseconds; those with one number of a ``point`` compare."""
    off = np.log(estimates(f, device) / times)
    parts = terms(f, device)
    largest = np.argmax([getattr(parts, name) for name in TERMS], axis=0)
    medians = {n: np.median(np.abs(off[largest == k])) for k, n in enumerate(TERMS) if (largest == k).any()}
    places = [np.flatnonzero(point == n) for n in np.unique(point)]
    i, j = np.concatenate([mine[np.array(np.triu_indices(len(mine), 1))] for mine in places], axis=1)
    error, recorded = off[i] - off[j], np.log(times[i] / times[j])
    (median, most), (apart, apart_most) = (np.quantile(np.abs(errors), (0.5, 0.9)) for errors in (off, error))
    expected = error + recorded
    told = (np.abs(recorded) > REPEATED) & (np.abs(expected) > apart_most)
    right = (expected * recorded > 0)[told].mean()
    median, most, apart, apart_most, right = (round(float(n), 3) for n in (median, most, apart, apart_most, right))
    dominated = {name: round(float(n), 3) for name, n in medians.items()}
    return Accuracy(len(off), median, most, dominated, apart, apart_most, right)


# By direction: with column sums (bwd) or without (fwd). Constants, since few installations have the records.
STATED = {
    "fwd": Accuracy(4672, 0.22, 0.452, {"memory": 0.189, "waiting": 0.328, "issuing": 0.235}, 0.121, 0.415, 0.957),
    "bwd": Accuracy(2858, 0.111, 0.292, {"memory": 0.105, "waiting": 0.183, "issuing": 0.358}, 0.064, 0.24, 0.924),
}


def errors_of(chosen: Sequence[Point], device: Device) -> dict[str, Accuracy]:
    """The errors of the model by direction: at the points without column sums (fwd), and at those with them (bwd)."""
    ways = {way: [p for p in chosen if key_of(p.problem).direction == way] for way in ("fwd", "bwd")}
    samples = {way: Sample({device: some}) for way, some in ways.items() if some}
    return {way: accuracy(s.actual[device], device, s.times, s.owner) for way, s in samples.items()}


def with_table(chosen: Iterable[Point], device: Device) -> tuple[Scores, int]:
    """Scores of the table's entries, and the number of points where the entry was not timed or none is near."""
    each, where, others = [], [], 0
    for p in chosen:
        entry = next(measured(p.problem, workload(p.problem, p.rows, device), device), None)
        if entry is not None and entry in p.times:
            each.append(p.best / p.times[entry])
            where.append(_name(p))
        else:
            others += 1
    return Scores(np.array(each), tuple(where)), others


def typical(p: Point, device: Device) -> int:
    """The number of rows for the model at a point: the most of the point's workload class."""
    return max(1, rows_of(p.problem, workload(p.problem, p.rows, device), device))


def _features(chosen: Sequence[Point], device: Device, rows: Sequence[int]) -> Features:
    each = [features(Schedules.of(p.times), p.problem, n, device) for p, n in zip(chosen, rows, strict=True)]
    return Features(*(np.concatenate([getattr(f, n.name) for f in each]) for n in fields(Features)))


def _estimates(parts: Mapping[Device, Features], model: Model) -> Numbers:
    return np.concatenate([estimates(f, device, model) for device, f in parts.items()])


def _least(values: Numbers, owner: Any) -> Numbers:
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    least: Numbers = np.minimum.reduceat(values, starts)
    return least


def _moved(model: Model) -> float:
    """The distance of the constants from round values, and of the bandwidth from that of a memory."""
    distances = [np.log(getattr(model, name) / getattr(unfitted(), name)) ** 2 for name in FITTED]
    return float(0.01 * np.mean(distances) + max(0.0, np.log(model.bandwidth / 0.95)))


def _name(p: Point) -> str:
    return f"{p.spec} rows={p.rows}"


def recorded() -> dict[Device, list[Point]]:
    """The latest points of every GPU with records."""
    folder = data_dir("generated")
    files = {gpu: [path for name in names if (path := folder / name).exists()] for gpu, names in RECORDED.items()}
    return {named(gpu): latest(points(paths)) for gpu, paths in files.items() if paths}


def main(arguments: Sequence[str]) -> None:
    """Print the scores."""
    found = recorded()
    sample = Sample(found)

    def show(what: str, scores: Scores) -> None:
        for device in found:
            print(f"{device.name}, {what}: {scores.at(sample.gpus == device.name)}")

    for device, some in found.items():
        scores, others = with_table(some, device)
        print(f"{device.name}, with the table: {scores}; at {others} more the entry was not timed")
        for direction, errors in errors_of(some, device).items():
            print(f"{device.name}, model, {direction}: {errors}")
    show("model alone", sample.scores(MODEL))
    if "--fit" in arguments:
        model = fit(sample, np.ones(len(sample.points), dtype=bool))
        print(f"fitted: {model}")
        show("fitted", sample.scores(model))
    if "--leave-out" in arguments:
        show("model alone, each D left out of the fit", leave_out(sample, sample.lengths))
        if len(found) > 1:
            show("model alone, each GPU left out of the fit", leave_out(sample, sample.gpus))


if __name__ == "__main__":
    main(sys.argv[1:])
