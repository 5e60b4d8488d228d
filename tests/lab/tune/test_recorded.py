"""Recorded times and what follows from them: scores and fits of the model, and the tables of measured schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lngen.compiler.devices import Device, named
from lngen.compiler.problem import ANY, Schedule, parse_schedule
from lngen.compiler.schedule import workload
from lngen.compiler.schedule.model import MODEL, Model, estimates, features
from lngen.compiler.schedule.space import Schedules
from lngen.compiler.schedule.table import Key, key_of, tables
from lngen.config import data_dir
from lngen.lab.tune.device_table import build, text
from lngen.lab.tune.recorded import (
    RECORDED,
    STATED,
    Point,
    Sample,
    errors_of,
    fit,
    latest,
    leave_out,
    points,
    typical,
    unfitted,
    with_table,
)
from lngen.lab.tune.recorded import recorded as recorded_by_gpu
from plans import FORWARD, H200, ROWS, STAGED, problem_of

# ---- on recorded times ----


@pytest.fixture(scope="module")
def by_gpu() -> dict[Device, list[Point]]:
    return recorded_by_gpu()


@pytest.fixture(scope="module")
def recorded(by_gpu: dict[Device, list[Point]]) -> list[Point]:
    return by_gpu[H200]


def test_the_stated_errors_are_those_of_the_records(recorded: list[Point]) -> None:
    assert errors_of(recorded, H200) == STATED


def test_the_table_is_near_the_best_everywhere(by_gpu: dict[Device, list[Point]]) -> None:
    """A GPU with records (bench/h200-sweeps.json, bench/h100-sweeps.json) and a table chooses from it."""
    for device, found in by_gpu.items():
        assert any(t.device == device.name for t in tables())
        scores, others = with_table(found, device)
        here = device == H200
        assert len(scores.each) > (8 if here else 2) * others
        assert np.exp(np.log(scores.each).mean()) >= (0.99 if here else 0.985)
        assert scores.each.min() >= 0.95 or not here


def test_the_model_alone_is_not_far_from_the_best(by_gpu: dict[Device, list[Point]]) -> None:
    """Two points are below 0.85: rows of 128 elements, and a kernel that was timed before its mean was corrected."""
    sample = Sample(by_gpu)
    scores = sample.scores(MODEL)
    each = {device: scores.at(sample.gpus == device.name).each for device in by_gpu}
    assert all(np.exp(np.log(found).mean()) >= 0.94 for found in each.values())
    assert np.exp(np.log(each[H200]).mean()) >= 0.975
    assert each[H200].min() >= 0.83
    assert (each[H200] < 0.85).sum() <= 2


def test_a_fit_that_does_not_know_a_length_chooses_well_for_it(recorded: list[Point]) -> None:
    """One of those that ``--leave-out`` goes through; round figures alone do worse."""
    known = [p for p in recorded if p.problem.element == 2]
    sample = Sample({H200: known})
    others = sample.lengths != 12288
    model = fit(sample, others, steps=60)
    assert model == fit(sample, others, steps=60)
    assert sample.loss(model, others) < sample.loss(unfitted(), others)
    each = sample.scores(model).at(~others).each
    assert len(each) == (~others).sum() > 5
    assert np.exp(np.log(each).mean()) >= 0.96


def test_what_is_left_out_is_not_fitted(recorded: list[Point], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of points is scored once, by a fit to all others: here two GPUs."""
    h100, seen = named("h100"), list[list[str]]()
    sample = Sample({H200: recorded[::20], h100: recorded[1::20]})

    def fitted_to(sample: Sample, which: np.ndarray, steps: int) -> Model:
        seen.append(sorted({*sample.gpus[which].tolist()}))
        return MODEL if steps == 5 else unfitted()

    monkeypatch.setattr("lngen.lab.tune.recorded.fit", fitted_to)
    assert [*leave_out(sample, sample.gpus, 5).each] == [*sample.scores(MODEL).each]
    assert sorted(seen) == [[h100.name], [H200.name]]
    assert [*leave_out(sample, sample.lengths, 5).each] != [*leave_out(sample, sample.lengths, 6).each]
    assert len(seen) == 2 + 2 * len({*sample.lengths.tolist()})


def test_a_choice_is_scored_against_the_best(recorded: list[Point]) -> None:
    """By hand: the time of the schedule that the model expects to be the fastest, over the least of the point."""
    chosen = recorded[::40]
    scores = Sample({H200: chosen}).scores(MODEL)
    for p, score in zip(chosen, scores.each, strict=True):
        expected = estimates(features(Schedules.of(p.times), p.problem, typical(p, H200), H200), H200)
        first = [*p.times][int(expected.argmin())]
        assert score == pytest.approx(p.best / p.times[first])


# ---- the table ----


TARGETS = tuple(f"bench/h200-targets-{t}.json" for t in ("f16", "f32", "bf16"))


@pytest.mark.parametrize(
    ("gpu", "files"),
    [("h200", (RECORDED["h200"][0], *TARGETS, RECORDED["h200"][1])), ("h100", ("bench/h100-sweeps-best.json",))],
)
def test_the_shipped_table_is_what_the_records_give(gpu: str, files: tuple[str, ...]) -> None:
    """The same records give the same bytes, but for the comment."""
    folder, device = data_dir("generated"), named(gpu)
    found = points([folder / name for name in files])
    made = build(device, latest(found), [p for p in found if len(p.times) == 1])
    table = next(t for t in tables() if t.file == f"{gpu}.toml")
    assert made == table
    shipped = Path(str(data_dir("templates"))).parent / f"lngen/compiler/devices/tables/{gpu}.toml"
    if shipped.exists():
        about = [line for line in shipped.read_text().splitlines() if line.startswith("#")]
        assert shipped.read_text() == text(made, "\n".join(line.removeprefix("# ") for line in about))


def test_of_tied_schedules_the_default_stays() -> None:
    p = replace(Point(FORWARD, 16384, {}), times={ROWS: 10.0, STAGED: 10.1, replace(ROWS, threads=256): 10.3})
    default = Point(FORWARD, 16384, {STAGED: 10.2})
    place = Key("fwd", 2, 4096), workload(problem_of(FORWARD), 16384, H200)

    def entry(*arguments: list[Point]) -> str:
        return str(parse_schedule(build(H200, *arguments).entries[place[0]][place[1]], ANY))

    assert entry([p]) == str(replace(ROWS, vec=1))
    assert entry([p], [default]) == str(replace(STAGED, vec=1, grid=0))
    slower = Point(FORWARD, 16384, {replace(ROWS, threads=256): 10.3})
    assert entry([p], [slower]) == str(replace(ROWS, vec=1)), "3 % are more than noise"
    assert entry([], [default]) == str(replace(STAGED, vec=1, grid=0))


def test_of_tied_schedules_the_most_shared_is_taken() -> None:
    """And one that was timed for each graph, since it may spill where it was not timed."""
    wide, tall = replace(ROWS, threads=256), replace(ROWS, rows_per_block=2)

    def chosen(*found: Point) -> list[Schedule]:
        entries = build(H200, found).entries
        return [parse_schedule(entries[key_of(p.problem)][workload(p.problem, p.rows, H200)], ANY) for p in found]

    many, fewer = (Point(FORWARD, rows, {ROWS: us, wide: 10.0}) for rows, us in ((9000, 9.95), (3000, 10.05)))
    few = Point(FORWARD, 99, {ROWS: 12.0, wide: 10.0})
    assert chosen(many, fewer) == [replace(ROWS, vec=1)] * 2, "0.5 % are no reason for another kernel"
    assert chosen(many, fewer, few) == [replace(wide, vec=1)] * 3
    longer = Point("layernorm.fwd:d=4608,dtype=bf16", 9000, {ROWS: 9.95, wide: 10.0})
    assert chosen(longer, few) == [replace(wide, vec=1)] * 2, "a neighbour"
    other = Point("rmsnorm.fwd:d=4096,dtype=bf16", 9000, {ROWS: 9.93, tall: 9.8})
    assert chosen(replace(many, times={ROWS: 9.93, wide: 9.8}), other) == [replace(ROWS, vec=1)] * 2


def test_few_rows_between_other_kernels_give_no_points() -> None:
    """Their times would be averaged with each other: both kinds have the same spec and number of rows."""
    assert points([data_dir("generated") / "bench/h100-few-rows.json"]) == []
