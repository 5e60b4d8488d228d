"""A run repeats what is known, loses results when it is killed, or leaves a worker behind, if these fail."""

import contextlib
import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

import tune_fakes
from commands import call, prints
from lngen.compiler.compile import Compilation
from lngen.compiler.spec import parse_spec
from lngen.errors import MissingError
from lngen.lab.tune import trials, workers
from lngen.lab.tune.candidates import build_all, candidates
from lngen.lab.tune.job import BRIEF_ROUNDS, FINAL_ROUNDS, run_job
from lngen.lab.tune.tuner import tune
from lngen.lab.tune.workers import Answer, Limits, Setup, Stopped, Worker, Workers, take, visible_devices
from lngen.launch.runtime.lock_file import read_lock
from paths import SEARCH, TESTS
from tune_cases import AMPLE, SCHEDULES, SPEC, Fake, Heard, chosen, few, make_job

pytestmark = pytest.mark.usefixtures("private_gpus")


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
        report = tune([make_job(), make_job(rows=4097)], tmp_path / "t", executor=pool, listener=heard)
    assert [chosen(o) for o in report.outcomes] == [SCHEDULES[2]] * 2
    assert len(trials.read(tmp_path / "t").trials) == len(heard.trials) == 20


def test_an_error_that_is_no_candidates_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.lab.tune.tuner.visible_devices", lambda: ())
    with pytest.raises(MissingError, match="needs an NVIDIA GPU"):
        tune([make_job(devices=None)], tmp_path / "t")
    monkeypatch.setattr("lngen.lab.tune.job.candidates", lambda *a: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        tune([make_job(), make_job()], tmp_path / "t")


def start(*args: str, cwd: Path, stderr: int = subprocess.PIPE, **say: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "tune_fakes.py"), *few(*args)],
        cwd=cwd,
        env={**os.environ, "FAKE_TUNE": json.dumps(say), "TERM": "xterm", "PYTHONPATH": SEARCH},
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
    process = start(cwd=tmp_path, log=str(log), wrong=[0, 1], hang=[3])
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
    assert tuned["statuses"] == {"correctness": 2, "correct": 4}
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


# ---- the command ----


def test_overlapping_calls_are_timed_and_recorded_apart(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.lab.tune.job.OVERLAPPING", "tune_fakes:FakeMeasurer", raising=True)
    monkeypatch.setattr("lngen.lab.tune.job.GPU", "tune_fakes:SameFake")
    for more, in_turn in (((), {True}), (("--overlap",), {True, False})):
        prints(*few(*more))
        found = trials.read(Path("t.jsonl")).trials
        assert {t.in_turn for t in found} == in_turn
        assert len(found) == 10 * len(in_turn)  # nothing of the one passes for the other
    shown = trials.of(found, SPEC, 4096, "Fake GPU")
    assert {t.in_turn for t in shown} == {False}  # the last attempt


@pytest.mark.parametrize("name", ["my.graph", "doubling:doubled"])
def test_graphs_of_ones_own_are_tuned_locked_and_built(command: Fake, name: str) -> None:
    """The worker, in another folder, has the graph; the lock file knows it by its digest."""
    Path("my.graph").write_text(str(parse_spec("rmsnorm.fwd:d=64").trace()["build"]))
    doubled = "from lngen import D, M\n\n\ndef doubled(b):\n    b.output('y', b.input('x', M, D) * 2)\n"
    Path("doubling.py").write_text(doubled)
    spec = f"{name}.fwd:d=64"
    done = call("tune", spec, "--trials", "2", "--database", "t.jsonl")
    assert done.exit_code == 0, done.output
    assert len(command.asked("open")) == 1
    (entry,) = read_lock("lngen.lock.toml").entries
    assert entry.spec == str(parse_spec(spec))
    done = call("build", spec, "--emit", "cu", "--lock", "lngen.lock.toml", "--out", "out")
    assert (done.exit_code, done.stderr) == (0, "")
    (made,) = json.loads(Path("out/manifest.json").read_text())["kernel_sets"]
    assert made["schedule"]["text"] == entry.schedule


# ---- workers ----


def test_visible_gpus_are_named_as_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert visible_devices() == ("5", "GPU-abc")
    monkeypatch.setattr(workers, "device_count", lambda: 0)
    assert visible_devices() == ()


def test_a_gpu_is_leased_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    a, b = take(("0", "1")), take(("0", "1"))
    assert (a.gpu, b.gpu) == ("0", "1")
    assert take(("0", "1")) is None
    code = "from lngen.lab.tune.workers import take\nprint(take(('0',)), take(('0', '2')).gpu)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "2"]
    b.close()
    c = take(("0", "1"))
    assert c.gpu == "1"
    a.close()
    c.close()


def test_a_worker_is_stopped_while_it_hangs(fake: Fake) -> None:
    fake(hang=[0])
    stopped = lambda: bool(fake.asked("check"))  # noqa: E731
    compilation = Compilation(parse_spec(SPEC))
    (candidate,) = build_all(compilation, [(0, candidates(compilation, 1, "sm_90")[0])], "sm_90")
    with Worker(tune_fakes.NAME, "0", Limits(check=AMPLE), stopped) as worker, pytest.raises(Stopped):
        worker.check(candidate)


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
    asked = iter([False, False, True])
    with Workers(lambda: next(asked)) as pool, pytest.raises(Stopped), pool.worker(other):
        pass
    lease.close()


def test_a_worker_imports_nothing_from_the_current_folder(
    private_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


class Ended(Exception):
    """A worker process would end."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would end this process, or change how it takes Ctrl-C, does not."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(workers.os, "_exit", end)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)


def test_a_worker_answers_until_its_measurer_is_not_healthy(ends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    asked = [("device", ()), ("open", (parse_spec(SPEC), 4)), ("no_such", ()), ("device", ()), None]
    healthy, answers = iter([True, False]), list[Answer]()
    monkeypatch.setattr(workers, "_listen", lambda _, questions: [questions.put(one) for one in asked])
    monkeypatch.setenv("FAKE_TUNE", '{"too_large": true}')
    monkeypatch.setattr(tune_fakes.FakeMeasurer, "healthy", lambda _: next(healthy))
    with pytest.raises(Ended):
        workers.serve(str(os.dup(theirs.fileno())), tune_fakes.NAME)
    while ours.poll():
        answers.append(ours.recv())
    device, refused, failed = answers
    assert device == Answer(tune_fakes.DEVICE)
    assert (str(refused.error), refused.healthy) == ("choose fewer rows.", True)
    assert failed.failure == "AttributeError: 'FakeMeasurer' object has no attribute 'no_such'"
    assert not failed.healthy


def test_a_worker_ends_when_nobody_asks_any_more(ends: None) -> None:
    ours, theirs = Pipe()
    ours.send(("device", ()))
    ours.close()
    questions = queue.SimpleQueue[tuple[str, tuple[object, ...]]]()
    with pytest.raises(Ended):
        workers._listen(theirs, questions)
    assert questions.get() == ("device", ())
    assert questions.empty()
