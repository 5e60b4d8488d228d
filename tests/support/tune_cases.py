"""What the tests of the tuner share: trials, locked schedules, a job whose measurer is a fake, and races."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tune_fakes
from lngen.compiler.compile import Compilation
from lngen.compiler.problem import Schedule
from lngen.compiler.schedule import attempts
from lngen.compiler.spec import parse_spec
from lngen.lab.tune import job, workers
from lngen.lab.tune.candidates import candidates
from lngen.lab.tune.job import Job, Listener, Outcome, choose
from lngen.lab.tune.trials import Device, Trial
from lngen.launch.runtime.lock_file import Locked
from tune_nursery import Nursery

SPEC = "rmsnorm.fwd:d=64,dtype=f32"
DEVICE = Device("NVIDIA H200", "sm_90", "NVRTC 13.4")


class Uncompiled(Compilation):
    """Takes its first schedule for one that does not spill, so that the tests are collected without a compiler."""

    def schedule(self, *arches: str, **where: Any) -> Schedule:
        return next(attempts(self.problem, arches, **where))


SCHEDULES = [str(s) for s in candidates(Uncompiled(parse_spec(SPEC)), 4096, "sm_90")[:8]]
TRIED = 6  # by a job of ``make_job``
AMPLE = 300.0  # seconds, more than a busy machine takes: a longer wait is for what does not come


def trial(rank: int = 0, us: float | None = 10.0, **values: object) -> Trial:
    status = "correct" if us is not None else "compile"
    made = Trial(SPEC, 4096, DEVICE.name, DEVICE.compiler, SCHEDULES[rank], f"k{rank}", rank, status)
    if us is not None:
        made = replace(made, us_median=us, us_p10=us - 0.01, us_p90=us + 0.01, reference=8.0, rounds=12)
    return replace(made, **values)  # type: ignore[arg-type]


TRIALS = [
    trial(0, 12.0, registers=40, shared=1024, compile_ms=80.5),
    trial(1, None, status="compile", reason="spills, in bytes a thread: rows 16"),
    trial(2, 10.0),
    trial(3, None, status="timeout", reason="no answer within 20 s"),
    trial(4, None, status="constraints", reason="threads is a power of two, got 3", kernel=""),
    trial(5, 10.05),
    trial(6, None, status="correctness", reason="y: 3 numbers differ"),
    trial(7, None, status="runtime", reason="the worker process died (SIGSEGV)"),
]

LOCKED = [
    Locked("NVIDIA H200", "sm_90", SPEC, 4096, SCHEDULES[2]),
    Locked("NVIDIA H200", "sm_90", SPEC, 64, SCHEDULES[1]),
    Locked("NVIDIA H200", "sm_90", "layernorm.bwd:d=8,eps=1e-06", 1, SCHEDULES[0]),
    Locked('A "quoted" GPU', "sm_80", SPEC, 4096, SCHEDULES[3]),
]


def outcome(rows: int, rank: int = 0) -> Outcome:
    return Outcome(SPEC, rows, DEVICE, choice=choose([trial(rank)]))


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, other: Callable[[], object]) -> threading.Thread:
    """Begins ``other`` right after the first call of a function, and gives it time to end if nothing holds it up."""
    real = getattr(owner, name)
    thread = threading.Thread(target=other)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if thread.ident is None:
            thread.start()
            thread.join(0.3)
        return result

    monkeypatch.setattr(owner, name, call)
    return thread


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


_LISTS: dict[tuple[object, ...], Sequence[Schedule]] = {}


def _listed(compilation: Compilation, *where: Any) -> Sequence[Schedule]:
    """The candidates, listed once: jobs of most tests have the same."""
    key = str(compilation.spec), *where
    if key not in _LISTS:
        _LISTS[key] = candidates(compilation, *where)
    return _LISTS[key]


def on_fake_gpu(patch: pytest.MonkeyPatch, folder: Path, nursery: Nursery) -> Fake:
    """One fake GPU, whose workers are forked; leases of its own, so that tests side by side do not wait."""
    patch.setattr("tempfile.tempdir", str(folder))
    patch.setenv("TMPDIR", str(folder))
    used = SimpleNamespace(Popen=nursery.popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr(workers, "subprocess", used)
    patch.setattr(job, "candidates", _listed)
    return Fake(patch, folder / "asked.log")()


def make_job(**values: Any) -> Job:
    made = Job(parse_spec(SPEC), 4096, AMPLE, TRIED, measurer=tune_fakes.NAME, devices=("3",))
    return replace(made, **values)


def chosen(outcome: Outcome) -> str:
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


def few(*args: str) -> tuple[str, ...]:
    return ("tune", SPEC, "--trials", str(TRIED), "--budget", f"{AMPLE:.0f}s", "--database", "t.jsonl", *args)
