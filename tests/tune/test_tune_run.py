"""Tuning without a GPU: real worker processes with a fake measurer, which crash, hang and are killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tune_fakes
from lngen.cli import cli
from lngen.compile import Compilation, KernelSet
from lngen.errors import CompileError, LngenError, LowerError, MissingError
from lngen.runtime.lock_file import read_lock
from lngen.schedule import Schedule
from lngen.spec import parse_spec
from lngen.toolchain import Binary, Resources
from lngen.tune import candidates as builds
from lngen.tune import job, trials
from lngen.tune.candidates import Candidate, build, build_all, candidates, ranking
from lngen.tune.job import BRIEF_ROUNDS, FINAL_ROUNDS, Choice, Job, Listener, Outcome, run_job
from lngen.tune.trials import Device, Trial
from lngen.tune.tuner import tune
from lngen.tune.views import against_default
from lngen.tune.workers import Failure, Limits, Setup, Stopped, Worker, Workers, take
from paths import SEARCH, TESTS

SPEC = "rmsnorm.fwd:d=64,dtype=f32"
TRIALS = 6
SCHEDULES = [str(s) for s in candidates(Compilation(parse_spec(SPEC)), 4096, "sm_90")[:TRIALS]]
AMPLE = 300.0  # seconds, more than a busy machine takes: a longer wait is for what does not come


@pytest.fixture(autouse=True)
def private_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a compiler; leases of their own, so that tests side by side do not wait for each other."""
    pytest.importorskip("cupy")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@dataclass
class Fake:
    """Says what the fake measurer does, and what it was asked."""

    patch: pytest.MonkeyPatch
    log: Path

    def __call__(self, **say: Any) -> Fake:
        self.patch.setenv("FAKE_TUNE", json.dumps({"log": str(self.log), **say}))
        return self

    def asked(self, what: str = "") -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" gpu=")[0] for line in lines if line.startswith(what)]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch, tmp_path / "asked.log")()


def make_job(**values: Any) -> Job:
    made = Job(parse_spec(SPEC), 4096, AMPLE, TRIALS, measurer=tune_fakes.NAME, devices=("3",))
    return replace(made, **values)


def statuses(outcome: Outcome) -> dict[int, str]:
    return {t.rank: t.status for t in outcome.trials}


def chosen(outcome: Outcome) -> str:
    assert outcome.choice is not None
    return outcome.choice.trial.schedule


class Heard(Listener):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.texts: list[str] = []
        self.steps: list[tuple[int, int, int | None]] = []
        self.stop_at: int | None = None

    def stopped(self) -> bool:
        return self.stop_at is not None and len(self.trials) >= self.stop_at

    def recorded(self, trials: Sequence[Trial]) -> None:
        self.trials += trials

    def progress(self, job: Job, done: int, total: int, best: Trial | None) -> None:
        self.steps.append((done, total, best and best.rank))

    def message(self, text: str) -> None:
        self.texts.append(text)


# ---- one job ----


def test_every_candidate_is_checked_then_timed_and_the_best_again(fake: Fake) -> None:
    heard = Heard()
    found = run_job(make_job(), heard)
    assert fake.asked() == [
        f"open {SPEC} 4096",
        *(f"check {n}" for n in range(TRIALS)),
        f"time 0,1,2,3,4,5 {BRIEF_ROUNDS}",
        f"time 0,2,3,4 {FINAL_ROUNDS}",
    ]
    assert chosen(found) == SCHEDULES[2]
    assert [t.rank for t in found.choice.ties] == [2, 4]  # type: ignore[union-attr]
    assert found.complete
    assert found.device == tune_fakes.DEVICE
    assert heard.trials == [*found.new]
    assert [(t.rank, t.rounds) for t in found.new] == [(n, 4) for n in range(6)] + [(n, 12) for n in (0, 2, 3, 4)]
    best = found.choice.trial  # type: ignore[union-attr]
    assert best.us_median == pytest.approx(10.0, rel=0.01)
    assert best.reference == tune_fakes.REFERENCE_US
    assert best.registers > 0
    assert len(best.kernel) == 16
    assert heard.steps[-1] == (6, 6, best.rank)
    assert "gpu=3" in fake.log.read_text()


def test_repeated_runs_choose_the_same(fake: Fake) -> None:
    for seed in range(4):
        fake(seed=seed)
        assert chosen(run_job(make_job())) == SCHEDULES[2]
    assert chosen(run_job(make_job(incumbents=(("Fake GPU", SCHEDULES[4]),)))) == SCHEDULES[4]
    assert chosen(run_job(make_job(incumbents=(("Other GPU", SCHEDULES[4]),)))) == SCHEDULES[2]


def test_a_crash_a_hang_an_error_and_wrong_bits_cost_their_candidate_only(fake: Fake) -> None:
    fake(crash=[0], hang=[1], fail=[3], wrong=[5])
    found = run_job(make_job(limits=Limits(check=5.0)))
    assert statuses(found) == {
        0: "runtime", 1: "timeout", 2: "correct", 3: "runtime", 4: "correct", 5: "correctness"
    }  # fmt: skip
    reasons = [t.reason for t in found.trials]
    assert reasons[0] == "the worker process died (exit code 5): an illegal instruction"
    assert reasons[1] == "no answer within 5 s; its process was killed"
    assert reasons[3] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert reasons[5] == "y: 3 numbers differ with 1 rows"
    assert chosen(found) == SCHEDULES[2]
    assert found.complete
    # Three processes were lost; each new one was prepared anew.
    assert len(fake.asked("open")) == 4
    pids = {line.rpartition("pid=")[2] for line in fake.log.read_text().splitlines()}
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_crash_while_timing_is_blamed_on_the_one_that_does_it_alone(fake: Fake) -> None:
    fake(time_crash=[2], uncaptured=[4])
    found = run_job(make_job())
    assert statuses(found) == {0: "correct", 1: "correct", 2: "runtime", 3: "correct", 4: "runtime", 5: "correct"}
    assert found.trials[2].reason.startswith("the worker process died (SIGSEGV)")
    assert found.trials[4].reason == "RuntimeError: operation not permitted"
    assert chosen(found) == SCHEDULES[3]


def test_rounds_in_which_the_reference_moved_are_said(fake: Fake) -> None:
    heard = Heard()
    fake(moved=[0.05])
    found = run_job(make_job(), heard)
    assert [t.drifted for t in found.trials] == [False] * TRIALS
    sentence = (
        f"{SPEC} rows=4096: the reference moved by 5.0%, the GPU is busy or throttling; these rounds were repeated."
    )
    assert heard.texts == [*found.messages] == [sentence] * 2  # brief and final
    fake(drift=0.03)
    assert all(t.drifted for t in run_job(make_job()).trials)


def test_a_launch_that_the_driver_refuses_costs_its_candidate_only(fake: Fake) -> None:
    fake(refuse=[2])
    found = run_job(make_job())
    assert statuses(found)[2] == "runtime"
    assert found.trials[2].reason == "The driver refuses the launch of 'rows': CUDA_ERROR_INVALID_VALUE (1)."
    assert chosen(found) == SCHEDULES[4]


def test_a_worker_that_cannot_start_is_an_error_of_the_job(fake: Fake, tmp_path: Path) -> None:
    fake(no_device=True)
    with pytest.raises(LngenError, match=r"cannot measure on GPU 3: the worker process died \(exit code 9\); 'lngen d"):
        run_job(make_job())
    with pytest.raises(LngenError, match="cannot measure on GPU 3: ModuleNotFoundError: No module named 'nowhere'"):
        run_job(make_job(measurer="nowhere:Measurer"))
    fake(too_large=True)
    report = tune([make_job(), make_job(rows=8)], tmp_path / "t")
    assert [o.error for o in report.outcomes] == ["choose fewer rows."] * 2
    with pytest.raises(MissingError, match=r"found no GPU that CuPy can use.*--ranking"):
        run_job(make_job(devices=()))


def test_the_budget_ends_the_brief_rounds_and_the_best_is_timed_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(pause=0.3)
    monkeypatch.setattr(job, "GROUP", 2)
    monkeypatch.setattr(job, "BUILD_SHARE", 20.0)
    found = run_job(make_job(seconds=1.0))
    assert not found.complete
    assert len(found.trials) < TRIALS
    assert fake.asked("time")[-1].endswith(f" {FINAL_ROUNDS}")
    assert found.choice is not None


def test_a_job_that_is_stopped_keeps_what_it_knows(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "GROUP", 2)
    heard = Heard()
    heard.stop_at = 4
    found = run_job(make_job(), heard)
    assert not found.complete
    assert len(found.trials) == 4
    assert chosen(found) == SCHEDULES[2]


def test_the_defaults_are_held_against_what_tuning_found(fake: Fake) -> None:
    found = run_job(make_job())
    assert found.choice is not None
    default = next(t for t in found.trials if t.schedule == SCHEDULES[0])
    untuned = replace(found, choice=Choice(default, (default,)))
    share = found.choice.trial.ratio / default.ratio
    assert share < 1
    assert against_default([found]) == ""
    expected = f"The defaults reach {share**0.5:.3f} of the tuned speed on geometric mean, {share:.3f} at least."
    assert against_default([found, untuned]) == expected


# ---- the worker ----


def test_a_worker_is_stopped_while_it_hangs(fake: Fake) -> None:
    fake(hang=[0])
    stopped = lambda: bool(fake.asked("check"))  # noqa: E731
    compilation = Compilation(parse_spec(SPEC))
    (candidate,) = build_all(compilation, [(0, candidates(compilation, 1, "sm_90")[0])], "sm_90")
    with Worker(tune_fakes.NAME, "0", Limits(check=AMPLE), stopped) as worker, pytest.raises(Stopped):
        worker.check(candidate)
    with Worker(tune_fakes.NAME, "0", Limits(check=0.5)) as worker:
        with pytest.raises(Failure) as caught:
            worker.check(candidate)
        assert caught.value.status == "timeout"
        assert worker.starts == 1


def test_workers_are_kept_for_jobs_that_want_the_same(fake: Fake) -> None:
    one, other = Setup(tune_fakes.NAME, ("1", "2"), Limits()), Setup(tune_fakes.NAME, ("2",), Limits())
    with Workers() as pool:
        with pool.worker(one) as a, pool.worker(one) as b:
            assert a.device() == b.device() == tune_fakes.DEVICE
        with pool.worker(one) as c, pool.worker(one) as d:
            assert {c, d} == {a, b}
            assert (c.starts, d.starts) == (1, 1)
        with pool.worker(other) as e:  # whose GPU an idle worker held
            assert e not in (a, b)
            assert take(("2",)) is None
    lease = take(("2",))
    assert lease is not None
    asked = iter([False, False, True])
    with Workers(lambda: next(asked)) as pool, pytest.raises(Stopped), pool.worker(other):
        pass
    lease.close()


def test_gpus_of_two_kinds_get_kernels_of_their_own(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "device", lambda self, setup: Device("Another GPU", "sm_80", "NVRTC 1.2"))
    heard = Heard()
    found = run_job(make_job(), heard)
    assert found.device == tune_fakes.DEVICE
    assert {t.device for t in found.trials} == {"Fake GPU"}
    assert chosen(found) == SCHEDULES[2]


# ---- building ----


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
    assert (spilling.registers, spilling.shared) == (255, 128)

    def no_structure(*_: Any) -> Any:
        raise LowerError("no structure carries it.")

    monkeypatch.setattr(import_module("lngen.compile"), "lower", no_structure)
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


# ---- runs: the database, executors, Ctrl-C ----


def test_what_is_in_the_database_is_not_repeated(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    fake(crash=[0], wrong=[1])
    first = tune([make_job()], path).outcomes[0]
    lines = path.read_bytes()
    fake.log.unlink()
    known = trials.read(path).trials
    again = tune([make_job(known=known)], path).outcomes[0]
    assert fake.asked() == []  # not even prepared
    assert (again.new, path.read_bytes()) == ((), lines)
    assert (chosen(again), again.trials) == (chosen(first), first.trials)
    ranked_otherwise = tuple(replace(t, rank=50 - t.rank) for t in known)
    assert run_job(make_job(known=ranked_otherwise)).trials == first.trials
    assert fake.asked() == []
    # A killed run lacks lines at the end: only what they told is measured.
    cut = tuple(t for t in known if t.rank != 4 and t.rounds < FINAL_ROUNDS)
    fake(wrong=[1])
    resumed = tune([make_job(known=cut)], path).outcomes[0]
    assert fake.asked("check") == ["check 4"]
    assert fake.asked("time") == [f"time 4 {BRIEF_ROUNDS}", f"time 2,3,4 {FINAL_ROUNDS}"]
    assert chosen(resumed) == SCHEDULES[2]


def test_trials_of_another_device_compiler_or_kernel_do_not_count(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    tune([make_job()], path)
    known = trials.read(path).trials
    for change in ({"device": "NVIDIA A100"}, {"compiler": "NVRTC 0.1"}, {"kernel": "of another lngen"}, {"rows": 1}):
        fake.log.unlink()
        run_job(make_job(known=tuple(replace(t, **change) for t in known)))
        assert len(fake.asked("check")) == TRIALS


def test_jobs_run_side_by_side_one_process_per_gpu(fake: Fake, tmp_path: Path) -> None:
    fake(pause=0.1)
    jobs = [make_job(rows=m, devices=("4", "9")) for m in (1, 2, 3, 4)]
    report = tune(jobs, tmp_path / "t")
    assert [o.rows for o in report.outcomes] == [1, 2, 3, 4]
    assert not report.interrupted
    asked = [line.split() for line in fake.log.read_text().splitlines()]
    processes = {(line[-2], line[-1]) for line in asked}
    assert sorted(gpu for gpu, _ in processes) == ["gpu=4", "gpu=9"]
    assert len([line for line in asked if line[0] == "open"]) == 4
    assert len(trials.read(tmp_path / "t").trials) == 4 * 10


def test_any_executor_runs_jobs_and_their_trials_are_kept(fake: Fake, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        heard = Heard()
        report = tune([make_job(), make_job(rows=7)], tmp_path / "t", executor=pool, listener=heard)
    assert [chosen(o) for o in report.outcomes] == [SCHEDULES[2]] * 2
    assert len(trials.read(tmp_path / "t").trials) == len(heard.trials) == 20


def test_an_error_that_is_no_candidates_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.tune.tuner.visible_devices", lambda: ())
    with pytest.raises(MissingError, match="needs an NVIDIA GPU"):
        tune([make_job(devices=None)], tmp_path / "t")
    monkeypatch.setattr("lngen.tune.job.candidates", lambda *a: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        tune([make_job(), make_job()], tmp_path / "t")


# ---- the command ----


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["tune", *map(str, args)], prog_name="lngen")


@pytest.fixture
def command(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The command with one fake GPU, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    tune_fakes.use(monkeypatch, "7")
    return fake


def few(*args: str) -> tuple[str, ...]:
    return (SPEC, "--trials", str(TRIALS), "--budget", f"{AMPLE:.0f}s", "--database", "t.jsonl", *args)


def test_tune_prints_locks_draws_and_exports(command: Fake) -> None:
    done = call(*few("--plot", "a.svg", "--export", "t4", "t4.json"))
    assert done.exit_code == 0, done.output
    assert SCHEDULES[2] in done.stdout
    cells = [cell.strip() for cell in done.stdout.splitlines()[2].split("|")]
    assert float(cells[4]) == pytest.approx(0.8, abs=0.01)  # of the reference
    assert float(cells[5]) == pytest.approx(1.2, abs=0.01)  # over the default
    (entry,) = read_lock("lngen.lock.toml").entries
    assert (entry.device, entry.arch, entry.spec, entry.rows) == ("Fake GPU", "sm_90", SPEC, 4096)
    assert entry.schedule == SCHEDULES[2]
    locked = Path("lngen.lock.toml").read_bytes()
    assert Path("a.svg").read_text().startswith("<?xml")
    assert len(json.loads(Path("t4.json").read_text())["results"]) == TRIALS
    # Everything is known now: the same again, without a question, in JSON.
    command.log.unlink()
    done = call(*few("--json", "--export", "kernel-tuner", "kt.json"))
    assert done.exit_code == 0, done.output
    (tuned,) = json.loads(done.stdout)["tuned"]
    assert tuned["chosen"]["schedule"] == SCHEDULES[2]
    assert tuned["statuses"] == {"correct": TRIALS}
    assert tuned["complete"] is True
    assert len(tuned["trials"]) == TRIALS
    assert command.asked() == []
    assert Path("lngen.lock.toml").read_bytes() == locked
    assert Path("kt.json").read_text().endswith("}\n}")


def test_overlapping_calls_are_timed_and_recorded_apart(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.tune.job.OVERLAPPING", "tune_fakes:FakeMeasurer", raising=True)
    monkeypatch.setattr("lngen.tune.job.GPU", "tune_fakes:SameFake")
    for more, in_turn in (((), {True}), (("--overlap",), {True, False})):
        assert call(*few(*more)).exit_code == 0
        found = trials.read(Path("t.jsonl")).trials
        assert {t.in_turn for t in found} == in_turn
        assert len(found) == 10 * len(in_turn)  # nothing of the one passes for the other
    shown = trials.of(found, SPEC, 4096, "Fake GPU")
    assert {t.in_turn for t in shown} == {False}  # the last attempt


def test_tune_says_what_it_ignores(command: Fake) -> None:
    assert call(*few()).exit_code == 0
    path = Path("t.jsonl")
    elsewhere = [replace(t, device="NVIDIA A100") for t in trials.read(path).trials]
    trials.append(path, elsewhere)
    with path.open("a") as file:
        file.write("{torn\n")
    done = call(*few())
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "line 21 of 't.jsonl' is skipped, it is not a trial: it is not JSON.",
        "10 lines of 't.jsonl' are ignored, measured on NVIDIA A100 with NVRTC 1.2.",
    ]


def test_without_a_correct_candidate_it_fails_with_the_reasons(command: Fake) -> None:
    command(wrong=[*range(TRIALS)])
    done = call(*few())
    assert done.exit_code == 1
    assert f"{SPEC} rows=4096: no candidate is correct and timed." in done.stderr
    assert f"  {SCHEDULES[0]}: correctness: y: 3 numbers differ with 1 rows" in done.stderr
    assert not Path("lngen.lock.toml").exists()
    command(too_large=True)
    done = call(*few("--database", "u.jsonl", "--rows", "1,2"))
    assert done.exit_code == 1
    assert f"{SPEC} rows=2: choose fewer rows." in done.stderr


def test_frozen_tunes_nothing(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(SPEC, "--frozen")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "'lngen.lock.toml' is frozen and holds no schedule for rmsnorm.fwd:d=64,dtype=f32; run" in done.stderr
    assert command.asked() == []
    assert call(*few()).exit_code == 0
    done = call(SPEC, "--frozen")
    assert done.exit_code == 0, done.output
    assert SCHEDULES[2] in done.stdout
    done = call(SPEC, "--frozen", "--json")
    assert json.loads(done.stdout)["locked"][0]["schedule"] == SCHEDULES[2]
    listed = json.loads(call(SPEC, "--frozen", "--rows", "4096,1", "--json").stdout)["locked"]
    assert [(e["rows"], e["locked_rows"], e["schedule"]) for e in listed] == [
        (4096, 4096, SCHEDULES[2]),
        (1, 4096, SCHEDULES[2]),
    ]
    monkeypatch.setattr("lngen.runtime.launcher.device_count", lambda: 1)
    monkeypatch.setattr("lngen.runtime.launcher.device_name", lambda device: "NVIDIA A100")
    done = call(SPEC, "--frozen")
    assert done.exit_code == 1
    assert "dtype=f32 on NVIDIA A100; run" in done.stderr


def test_frozen_shows_the_trials_of_the_database(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked: the choice of the lock file among the trials kept, as a picture and in another's format."""
    assert call(*few("--export", "t4", "then.json")).exit_code == 0
    kept = [t for t in trials.read(Path("t.jsonl")).trials if t.schedule == SCHEDULES[2]]
    # The same on another device, and before it with a kernel of long ago, are not of it.
    trials.append(Path("u.jsonl"), [replace(t, kernel="old", us_median=1.0) for t in kept])
    trials.append(Path("u.jsonl"), [replace(t, device="NVIDIA A100") for t in kept])
    trials.append(Path("u.jsonl"), trials.read(Path("t.jsonl")).trials)
    command.log.unlink()
    for name in ("t", "u"):
        done = call(SPEC, "--frozen", "--database", f"{name}.jsonl", "--export", "t4", f"{name}.json")
        assert done.exit_code == 0, done.output
        assert Path(f"{name}.json").read_bytes() == Path("then.json").read_bytes()
    assert command.asked() == []
    done = call(SPEC, "--frozen", "--database", "none.jsonl", "--export", "t4", "a.json")
    assert done.exit_code == 2
    assert f"'none.jsonl' holds no trials of {SPEC} with 4096 rows on Fake GPU; name the database" in done.stderr
    assert not Path("a.json").exists()


def test_frozen_shows_the_database_without_a_lock_file(command: Fake) -> None:
    assert call(*few("--export", "t4", "then.json")).exit_code == 0
    Path("lngen.lock.toml").unlink()
    done = call(*few("--frozen", "--export", "t4", "now.json"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "is frozen and holds no schedule" in done.stderr
    assert Path("now.json").read_bytes() == Path("then.json").read_bytes()
    done = call(*few("--frozen", "--rows", "2", "--export", "t4", "no.json"))
    assert done.exit_code == 2
    assert "'t.jsonl' holds no trials of" in done.stderr


def test_frozen_draws_the_choice(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(*few("--plot", "then.svg")).exit_code == 0
    assert call(*few("--frozen", "--plot", "now.svg")).exit_code == 0
    assert Path("now.svg").read_bytes() == Path("then.svg").read_bytes()
    assert "chosen" in Path("now.svg").read_text()


def test_the_ranking_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("job", "tuner"):
        monkeypatch.setattr(f"lngen.tune.{module}.visible_devices", lambda: ())
    done = call(SPEC, "--ranking", "--json")
    assert done.exit_code == 0
    listed = json.loads(done.stdout)["ranking"]
    assert [line["schedule"] for line in listed] == [str(s) for s in ranking(parse_spec(SPEC), 4096, "sm_90")]
    assert [line["rank"] for line in listed] == [*range(len(listed))]
    assert SCHEDULES[0] in call(SPEC, "--ranking").stdout
    done = call(SPEC)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "found no GPU" in done.stderr
    assert "'lngen tune SPEC --ranking'" in done.stderr


def test_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = Trial(SPEC, 1, "a", "b", "c", "d", 0, "timeout")
    trials.append(Path("a"), [line])
    trials.append(Path("b"), [line, replace(line, rows=2)])
    with Path("b").open("a") as file:
        file.write("?\n")
    done = call("--merge", "a", "--merge", "b", "--database", "all.jsonl")
    assert (done.exit_code, done.stdout) == (0, "2 trials in all.jsonl\n")
    assert done.stderr == "line 3 of 'b' is skipped, it is not a trial: it is not JSON.\n"
    done = call("--merge", "a", "--database", "all.jsonl", "--json")
    assert json.loads(done.stdout) == {"database": "all.jsonl", "trials": 2}
    assert call("--merge", "none", "--database", "all.jsonl").exit_code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "tune takes SPECs, with --frozen or --ranking or neither, or else --merge alone"),
        ([SPEC, "--merge", "a"], "or else --merge alone"),
        ([SPEC, "--frozen", "--ranking"], "or neither"),
        ([SPEC, "--rows", "1,2", "--plot", "a.png"], "show one SPEC at one number of rows"),
        ([SPEC, "--frozen", "--rows", "1,2", "--plot", "a.png"], "show one SPEC at one number of rows"),
        ([SPEC, "--ranking", "--plot", "a.png"], "show trials, but --merge and --ranking have none"),
        (["--merge", "a", "--export", "t4", "b"], "show trials, but --merge and --ranking have none"),
        ([SPEC, "--rows", "1,x"], "expected whole numbers, separated by commas, each from 1"),
        ([SPEC, "--rows", ","], "expected whole numbers, separated by commas"),
        ([SPEC, "--budget", "soon"], "expected a time such as 60s or 2m, got 'soon'"),
        ([SPEC, "--budget", "0"], "got '0'"),
        ([SPEC, "--trials", "0"], "expected a whole number from 1"),
        ([SPEC, "--export", "csv", "a"], "'csv' is not one of 't4', 'kernel-tuner'"),
        ([SPEC, "--plot", "a.pdf"], "expected to end in .png or .svg"),
        (["layernrm.fwd:d=1"], "did you mean 'layernorm'"),
    ],
)
def test_a_wrong_request_is_one_sentence(command: Fake, args: list[str], message: str) -> None:
    done = call(*args)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in Path().iterdir() if "lngen-gpus" not in p.name] == []


def test_budgets_are_times() -> None:
    from lngen.cli.tune import parse_budget

    assert [parse_budget(None, None, t) for t in ("90", "90s", "2m")] == [90.0, 90.0, 120.0]  # type: ignore[arg-type]


def test_build_takes_locked_schedules(command: Fake) -> None:
    assert call(*few()).exit_code == 0
    args = ["build", SPEC, "rmsnorm.bwd:d=64", "--emit", "cu", "--lock", "lngen.lock.toml"]
    done = CliRunner().invoke(cli, [*args, "--out", "out"])
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        "rmsnorm.bwd:d=64,dtype=f32 is not in 'lngen.lock.toml' for sm_90; its default schedule is built.\n"
    )
    sets = json.loads(Path("out/manifest.json").read_text())["kernel_sets"]
    texts = {e["name"].partition("__")[0]: e["schedule"]["text"] for e in sets}
    assert texts["rmsnorm_fwd"] == SCHEDULES[2]
    done = CliRunner().invoke(cli, [*args, "--out", "two", "--rows", "3", "--schedule", "blocks_per_sm=1"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", ["my.graph", "doubling:doubled"])
def test_graphs_of_ones_own_are_tuned_locked_and_built(command: Fake, name: str) -> None:
    """The worker, in another folder, has the graph; the lock file knows it by its digest."""
    Path("my.graph").write_text(str(parse_spec("rmsnorm.fwd:d=64").trace()["build"]))
    doubled = "from lngen import D, M\n\n\ndef doubled(b):\n    b.output('y', b.input('x', M, D) * 2)\n"
    Path("doubling.py").write_text(doubled)
    spec = f"{name}.fwd:d=64"
    done = call(spec, "--trials", "2", "--database", "t.jsonl")
    assert done.exit_code == 0, done.output
    assert len(command.asked("open")) == 1
    (entry,) = read_lock("lngen.lock.toml").entries
    assert entry.spec == str(parse_spec(spec))
    done = CliRunner().invoke(cli, ["build", spec, "--emit", "cu", "--lock", "lngen.lock.toml", "--out", "out"])
    assert (done.exit_code, done.stderr) == (0, "")
    (made,) = json.loads(Path("out/manifest.json").read_text())["kernel_sets"]
    assert made["schedule"]["text"] == entry.schedule


# ---- whole processes that are interrupted and killed ----


def start(*args: str, cwd: Path, stderr: int = subprocess.PIPE, **say: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "tune_fakes.py"), "tune", *few(*args)],
        cwd=cwd,
        env={
            **os.environ,
            "FAKE_TUNE": json.dumps(say),
            "TERM": "xterm",
            "PYTHONPATH": SEARCH,
        },
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def wait_for(holds: Any) -> None:
    end = time.monotonic() + AMPLE
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """The process has ended; one that waits for a parent that was killed counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def pids(log: Path) -> set[int]:
    return {int(line.rpartition("pid=")[2]) for line in log.read_text().splitlines()}


def test_after_a_kill_only_the_rest_is_measured(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "t.jsonl"
    process = start(cwd=tmp_path, log=str(log), crash=[0, 1], hang=[3])
    wait_for(lambda: log.exists() and "check 3" in log.read_text())
    process.kill()
    process.communicate()
    wait_for(lambda: all(gone(p) for p in pids(log)))  # nobody is left behind, not even one that hangs
    assert [t.rank for t in trials.read(path).trials] == [0, 1]
    log.unlink()
    process = start("--json", cwd=tmp_path, log=str(log))
    stdout, stderr = process.communicate(timeout=AMPLE)
    assert process.returncode == 0, stderr
    checked = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("check")]
    assert checked == ["2", "3", "4", "5"]
    (tuned,) = json.loads(stdout)["tuned"]
    assert tuned["statuses"] == {"runtime": 2, "correct": 4}
    assert tuned["chosen"]["schedule"] == SCHEDULES[2]


def test_a_terminal_shows_the_live_best(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(cwd=tmp_path, stderr=theirs, pause=0.1, moved=[0.05])
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal whose other side is closed ends
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    stdout, _ = process.communicate(timeout=AMPLE)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "")
    assert f"{SPEC} rows=4096: 6/6, best " in text
    assert "the reference moved by 5.0%" in text
    assert "\x1b" not in stdout


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    log = tmp_path / "log"
    seven = candidates(Compilation(parse_spec(SPEC)), 4096, "sm_90")[:12]
    assert len(seven) == 12
    process = start("--trials", "12", "--json", cwd=tmp_path, log=str(log), hang=[9])
    wait_for(lambda: log.exists() and "check 9" in log.read_text())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, the worker process included
    stdout, stderr = process.communicate(timeout=AMPLE)
    assert process.returncode == 130, stderr
    found = json.loads(stdout)
    assert found["interrupted"] is True
    assert found["tuned"][0]["complete"] is False
    assert found["tuned"][0]["chosen"]["schedule"] == SCHEDULES[2]
    assert read_lock(tmp_path / "lngen.lock.toml").entries[0].schedule == SCHEDULES[2]
    assert "Traceback" not in stderr
    assert "ended early; run it again" in stderr
    # The worker process does not heed Ctrl-C: nobody is blamed for it.
    assert {t.status for t in trials.read(tmp_path / "t.jsonl").trials} == {"correct"}
    wait_for(lambda: all(gone(p) for p in pids(log)))


def test_a_worker_imports_nothing_from_the_current_folder(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its search path is that of the process that starts it, no more."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("queue", "signal", "cupy", "numpy", "lngen"):
        (folder / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    with Worker(tune_fakes.NAME, "7") as worker:
        assert worker.device().name == "Fake GPU"
    assert [*folder.glob("imported-*")] == []
