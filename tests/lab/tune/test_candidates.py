"""Schedules are tried in another order, or kernels that cannot run are measured, if these fail."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.problem import Schedule, parse_schedule
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import Binary, Resources
from lngen.errors import CompileError, LowerError
from lngen.lab.tune import candidates as builds
from lngen.lab.tune.candidates import Candidate, build, build_all, build_trials, candidates, ranking
from tune_cases import (
    AMPLE,
    SPEC,
)

pytestmark = pytest.mark.usefixtures("private_gpus")


@pytest.mark.parametrize("text", ["layernorm.bwd:d=1024,dtype=bf16", "layernorm.fwd:d=4096,dtype=bf16", SPEC])
def test_the_best_of_every_kind_is_tried_early(text: str) -> None:
    """In turn with the ranking, so that a model that is wrong about a kind does not keep it from being tried."""
    spec = parse_spec(text)
    rows = 2**20  # more than any grid
    listed, tried = ranking(spec, rows, "sm_90"), candidates(Compilation(spec), rows, "sm_90")
    assert tried[0] == Compilation(spec).schedule("sm_90", rows=rows)
    assert sorted(tried) == sorted(listed)
    assert len(set(tried)) == len(tried)
    assert tried == candidates(Compilation(spec), rows, "sm_90")
    first = tried[:64]
    for kind in ("form", "single_launch", "row_in_registers", "cached_weights"):
        assert {getattr(s, kind) for s in first} == {getattr(s, kind) for s in listed}, kind
    assert set(listed[:24]) <= set(first)


def test_ranks_and_kinds_take_turns_after_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by rank, then the best of the next kind: kinds of structures first, of blocks after those."""
    first = parse_schedule("form=registers,threads=32,rows_per_block=1,vec=1", Schedule("registers", 32, 1, 1))
    same = [replace(first, blocks_per_sm=n) for n in range(1, 8)]
    kept, streamed, small = (
        replace(first, cached_weights=True),
        replace(first, form="multipass"),
        replace(first, threads=16),
    )
    default = replace(first, blocks_per_sm=9)
    monkeypatch.setattr(builds, "ranked", lambda *of, **rows: [*same[:4], small, streamed, *same[4:], kept, default])
    monkeypatch.setattr(Compilation, "schedule", lambda *of, **rows: default)
    found = candidates(Compilation(parse_spec(SPEC)), 4096, "sm_90")
    expected = [default, same[0], same[1], streamed, same[2], kept, same[3], small, same[4], same[5], same[6]]
    assert sorted(found) == sorted(expected)
    assert [s for s in found if s in (streamed, kept)] == [streamed, kept]
    assert found[:6] == expected[:6]


@pytest.mark.parametrize("rows", [16, 200])
def test_no_grid_is_tried_that_is_no_smaller_than_the_work(rows: int) -> None:
    """132 blocks or more with 16 rows: no block takes a second row group, as those of a persistent grid should."""
    compilation = Compilation(parse_spec("rmsnorm.fwd:d=640,dtype=f32"))
    listed, tried = ranking(compilation.spec, rows, "sm_90"), candidates(compilation, rows, "sm_90")
    assert {*tried} == {s for s in listed if s.grid * s.rows_per_block < rows} < {*listed}
    assert any(s.grid for s in tried) == (rows == 200)


def test_the_default_stays_whatever_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Schedule("tma", 32, 2, 4, stages=2, grid=132, row_in_registers=True)
    default = replace(small, blocks_per_sm=2, stages=3, grid=264, dynamic=True)
    monkeypatch.setattr(builds, "ranked", lambda *of, **rows: [small, default, replace(small, stages=4)])
    monkeypatch.setattr(Compilation, "schedule", lambda *of, **rows: default)
    compilation = Compilation(parse_spec(SPEC))
    assert candidates(compilation, 16, "sm_90") == [default]
    assert candidates(compilation, 300, "sm_90") == [default, small, replace(small, stages=4)]


def spilling(monkeypatch: pytest.MonkeyPatch, bytes_of: dict[Schedule, int]) -> list[Schedule]:
    """Building tells what spills, and is remembered."""
    built: list[Schedule] = []

    def fake(compilation: Compilation, s: Schedule, rank: int, arch: str) -> Candidate:
        built.append(s)
        spilled = bytes_of.get(s, 0)
        return Candidate(s, rank, "compile" if spilled else "correct", spilled=spilled)

    monkeypatch.setattr(builds, "build", fake)
    return built


def test_what_spills_is_no_trial_and_others_like_it_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(parse_spec(SPEC))
    wide = Schedule("tma", 32, 4, 8, stages=2, grid=132, cached_weights=True)  # 255 registers
    narrow = replace(wide, blocks_per_sm=5)  # 96 registers
    clean = [replace(wide, form="cp_async", stages=n) for n in range(2, 2 + builds.WAVE)]
    like_narrow = [replace(narrow, stages=3), replace(narrow, blocks_per_sm=6), replace(narrow, dynamic=True)]
    other = replace(narrow, cached_weights=False)
    listed = [*clean[:8], narrow, *clean[8:], *like_narrow, wide, other, replace(wide, stages=7)]
    built = spilling(monkeypatch, {narrow: 100})
    found = build_trials(compilation, listed, "sm_90", 18)
    assert [c.schedule for c in found.candidates] == [s for s in listed[:-1] if s not in like_narrow]
    assert {*built} == {c.schedule for c in found.candidates}
    assert [c.rank for c in found.candidates] == [listed.index(c.schedule) for c in found.candidates]
    assert (found.skipped, found.left) == (3, 0)
    # A few bytes say nothing about others, and neither does a schedule of its own kind.
    spilling(monkeypatch, {narrow: builds.CERTAIN})
    assert build_trials(compilation, listed, "sm_90", 99).skipped == 0


def test_trials_that_there_was_no_time_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation(parse_spec(SPEC))
    listed = candidates(compilation, 4096, "sm_90")[:40]
    spilling(monkeypatch, dict.fromkeys(listed, 8))
    assert build_trials(compilation, listed, "sm_90", 30).left == 0
    found = build_trials(compilation, listed, "sm_90", 30, seconds=-1.0)
    assert 1 <= len(found.candidates) <= builds.WAVE
    assert found.left == min(30, 40 - len(found.candidates))
    assert build_trials(compilation, [], "sm_90", 30) == builds.Built(())


def test_candidates_are_built_on_any_executor_in_rank_order() -> None:
    spec = parse_spec(SPEC)
    ranked = [*enumerate(candidates(Compilation(spec), 1, "sm_90")[:4])]
    here = build_all(Compilation(spec), ranked, "sm_90")
    with ThreadPoolExecutor(1) as pool:
        there = build_all(Compilation(spec), ranked[::-1], "sm_90", executor=pool)
    assert [c.rank for c in here] == [c.rank for c in there] == [0, 1, 2, 3]
    assert [(c.kernel, c.image) for c in here] == [(c.kernel, c.image) for c in there]
    assert len({c.kernel for c in here}) == 4
    assert all(c.status == "correct" and c.image and c.registers for c in here)


def test_an_illegal_a_refused_and_a_spilling_candidate_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(SPEC)
    good = candidates(Compilation(spec), 1, "sm_90")[0]
    illegal = build(Compilation(spec), replace(good, threads=3), 1, "sm_90")
    assert (illegal.status, illegal.kernel) == ("constraints", "")
    assert "threads is a power of two, got 3" in illegal.reason

    def refuse(kernels: Any, arch: str) -> Binary:
        raise CompileError("NVRTC refused it:\n  line 3")

    monkeypatch.setattr(KernelSet, "cubin", refuse)
    refused = build(Compilation(spec), good, 0, "sm_90")
    assert (refused.status, refused.reason, refused.image) == ("compile", "NVRTC refused it: line 3", b"")
    assert refused.kernel
    used = {"rows": Resources(255, 16, 24, 8, 0, None, 1), "finish": Resources(30, 0, 0, 0, 128, None, 1)}
    monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: Binary(arch, b"elf", "", used))
    spilling = build(Compilation(spec), good, 0, "sm_90")
    assert (spilling.status, spilling.image) == ("compile", b"")
    assert spilling.reason == "spills, in bytes a thread: rows 48"
    assert (spilling.registers, spilling.shared, spilling.spilled) == (255, 128, 48)

    def no_structure(*_: Any) -> Any:
        raise LowerError("no structure carries it.")

    monkeypatch.setattr(import_module("lngen.compiler.compile"), "lower", no_structure)
    assert build(Compilation(spec), good, 0, "sm_90").status == "constraints"


def test_building_stops_when_time_is_over_but_not_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(SPEC)
    ranked = [*enumerate(candidates(Compilation(spec), 1, "sm_90")[:12])]
    real, over = builds.build, threading.Event()

    def slow(compilation: Compilation, schedule: Schedule, rank: int, arch: str) -> Candidate:
        """The first takes longer than there is time for, the second until building has stopped."""
        over.wait(AMPLE if rank else 0.2)
        return real(compilation, schedule, rank, arch)

    monkeypatch.setattr(builds, "build", slow)
    with ThreadPoolExecutor(1) as pool:
        built = build_all(Compilation(spec), ranked, "sm_90", executor=pool, seconds=0.05)
        over.set()
    assert [c.rank for c in built] == [0]
    monkeypatch.setattr(builds, "build", lambda *a: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        build_all(Compilation(spec), ranked, "sm_90")
