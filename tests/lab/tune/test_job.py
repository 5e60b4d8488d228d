"""A job chooses another schedule, or one bad candidate ends it, if these fail."""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tune_fakes
from lngen.compiler.compile import Compilation
from lngen.compiler.problem import Schedule
from lngen.errors import LngenError, MissingError
from lngen.lab.tune import candidates as builds
from lngen.lab.tune import job
from lngen.lab.tune.candidates import Candidate
from lngen.lab.tune.job import BRIEF_ROUNDS, FINAL_ROUNDS, Outcome, choose, finalists, noise, run_job
from lngen.lab.tune.trials import Device, Trial
from lngen.lab.tune.tuner import tune
from lngen.lab.tune.workers import Limits, Workers
from tune_cases import SCHEDULES, SPEC, TRIALS, TRIED, Fake, Heard, chosen, make_job, trial


def test_a_tie_goes_to_the_first_in_order() -> None:
    """Only the most rounds decide, and only relative to their reference."""
    found = choose(TRIALS)
    assert (found.trial, found.ties) == (TRIALS[2], (TRIALS[2], TRIALS[5]))
    for trials, incumbent, best in (
        ([TRIALS[5], replace(TRIALS[2], us_median=10.2), TRIALS[0]], "", 5),
        (TRIALS, SCHEDULES[5], 5),
        (TRIALS, SCHEDULES[0], 2),
        ([trial(0, 9.0, rounds=4), trial(1, 10.0)], "", 1),
        ([trial(0, 10.0, reference=8.0), trial(1, 10.5, reference=9.0)], "", 1),
    ):
        assert choose(trials, incumbent=incumbent).trial.rank == best  # type: ignore[union-attr]
    assert choose([t for t in TRIALS if not t.timed]) is None


def test_noise_is_the_spread_within_bounds() -> None:
    assert noise(trial()) == 0.01
    assert noise(trial(us_p10=9.8, us_p90=10.2)) == pytest.approx(0.02)
    assert noise(trial(us_p10=5.0, us_p90=20.0)) == 0.03


# Levels of true time 6 % apart, and a measurement that is off by less than half of what counts as a tie.
levels = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(levels, st.integers(0, 2**32), st.integers(0, 2**32))
def test_two_noisy_runs_choose_the_same(level: list[int], seed: int, other: int) -> None:
    def run(n: int) -> Sequence[Trial]:
        rng = random.Random(n)
        found = [trial(rank, 10 * 1.06**v * (1 + rng.uniform(-0.0045, 0.0045))) for rank, v in enumerate(level)]
        return rng.sample(found, len(found))

    a, b = choose(run(seed)), choose(run(other))
    assert a.trial.schedule == b.trial.schedule == SCHEDULES[level.index(min(level))]
    assert a.trial.rank in {t.rank for t in finalists(run(other))}


def test_finalists_are_the_fastest_and_the_first_of_those_near() -> None:
    def ranked(rank: int, us: float) -> Trial:
        return replace(trial(us=us), rank=rank, kernel=f"k{rank}", schedule=f"s{rank:02}")

    near = [ranked(n, 10.0 + 0.001 * ((n * 7) % 20)) for n in range(20)]
    found = [t.rank for t in finalists([*near, ranked(30, 9.99), ranked(31, 15.0)])]
    assert found == [0, 1, 2, 3, 4, 5, 6, 30]
    # The default, the fastest three, and of the others those within 5 % of the fastest.
    slow = [ranked(n, us) for n, us in enumerate((9.0, 5.24, 8.0, 5.26, 7.0, 5.0, 5.01, 5.02))]
    assert [t.rank for t in finalists(slow)] == [0, 1, 5, 6, 7]
    assert finalists([]) == []
    assert [t.rank for t in finalists([ranked(n, 20.0 / 2**n) for n in range(6)])] == [0, 3, 4, 5]


def statuses(outcome: Outcome) -> dict[int, str]:
    return {t.rank: t.status for t in outcome.trials}


def test_every_candidate_is_checked_then_timed_and_the_best_again(fake: Fake) -> None:
    heard = Heard()
    found = run_job(make_job(), heard)
    assert fake.asked() == [
        f"open {SPEC} 4096", *(f"check {n}" for n in range(TRIED)), f"time 0,1,2,3,4,5 {BRIEF_ROUNDS}",
        f"time 0,2,3,4 {FINAL_ROUNDS}",
    ]  # fmt: skip
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
    fake(seed=1)
    assert chosen(run_job(make_job(incumbents=(("Other GPU", SCHEDULES[4]),)))) == SCHEDULES[2]
    assert chosen(run_job(make_job(incumbents=(("Fake GPU", SCHEDULES[4]),)))) == SCHEDULES[4]


def test_a_crash_a_hang_an_error_and_wrong_bits_cost_their_candidate_only(fake: Fake) -> None:
    fake(crash=[0], hang=[1], fail=[3], refuse=[4], wrong=[5])
    found = run_job(make_job(limits=Limits(check=5.0)))
    assert statuses(found) == {
        0: "runtime", 1: "timeout", 2: "correct", 3: "runtime", 4: "runtime", 5: "correctness"
    }  # fmt: skip
    reasons = [t.reason for t in found.trials]
    assert reasons[0] == "the worker process died (exit code 5): an illegal instruction"
    assert reasons[1] == "no answer within 5 s; its process was killed"
    assert reasons[3] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert reasons[4] == "The driver refuses the launch of 'rows': CUDA_ERROR_INVALID_VALUE (1)."
    assert reasons[5] == "y: 3 numbers differ with 1 rows"
    assert chosen(found) == SCHEDULES[2]
    assert found.complete
    # Four processes were lost; each new one was prepared anew.
    assert len(fake.asked("open")) == 5
    pids = {line.rpartition("pid=")[2] for line in fake.log.read_text().splitlines()}
    assert len(pids) == 5
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
    assert [t.drifted for t in found.trials] == [False] * TRIED
    sentence = (
        f"{SPEC} rows=4096: the reference moved by 5.0%, the GPU is busy or throttling; these rounds were repeated."
    )
    assert heard.texts == [*found.messages] == [sentence] * 2  # brief and final
    fake(drift=0.03)
    assert all(t.drifted for t in run_job(make_job()).trials)


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
    found = run_job(make_job(seconds=0.5))
    assert not found.complete
    assert len(found.trials) < TRIED
    assert fake.asked("time")[-1].endswith(f" {FINAL_ROUNDS}")
    assert found.choice is not None


def test_the_budget_counts_from_the_first_measured_trial(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(start=2.0)
    monkeypatch.setattr(job, "GROUP", 2)
    monkeypatch.setattr(job, "BUILD_SHARE", 20.0)
    found = run_job(make_job(seconds=2.0))
    assert (found.complete, len(found.trials)) == (True, TRIED)


def test_a_job_that_is_stopped_keeps_what_it_knows(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "GROUP", 2)
    heard = Heard()
    heard.stop_at = 4
    found = run_job(make_job(), heard)
    assert not found.complete
    assert len(found.trials) == 4
    assert chosen(found) == SCHEDULES[2]


def test_gpus_of_two_kinds_get_kernels_of_their_own(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "device", lambda self, setup: Device("Another GPU", "sm_80", "NVRTC 1.2"))
    heard = Heard()
    found = run_job(make_job(), heard)
    assert found.device == tune_fakes.DEVICE
    assert {t.device for t in found.trials} == {"Fake GPU"}
    assert chosen(found) == SCHEDULES[2]


def test_trials_of_another_device_compiler_or_kernel_do_not_count(fake: Fake) -> None:
    known = run_job(make_job()).trials
    fake.log.unlink()
    changes = {"device": "NVIDIA A100"}, {"compiler": "NVRTC 0.1"}, {"kernel": "of another lngen"}, {"rows": 1}
    run_job(make_job(known=tuple(replace(t, **change) for change in changes for t in known)))  # type: ignore[arg-type]
    assert len(fake.asked("check")) == TRIED


def test_what_spills_is_recorded_and_no_trial(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job measures as many candidates as it may, and the others like the one that spills are counted."""
    real = builds.build

    def build(compilation: Compilation, schedule: Schedule, rank: int, arch: str) -> Candidate:
        made = real(compilation, schedule, rank, arch)
        return replace(made, status="compile", reason="spills", image=b"", spilled=99) if rank == 1 else made

    monkeypatch.setattr(builds, "build", build)
    monkeypatch.setattr(builds, "WAVE", 2)
    found = run_job(make_job())
    assert [t.rank for t in found.trials if t.status == "compile"] == [1]
    tried = [t.rank for t in found.trials if t.status == "correct"]
    assert len(tried) == TRIED
    assert found.skipped == len({*range(tried[-1] + 1)} - {1, *tried}) > 0
    assert found.complete
    assert fake.asked("check") == [f"check {rank}" for rank in tried]
