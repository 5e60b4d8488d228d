"""Two runs measure on one GPU, or a worker is started needlessly or left behind, if these fail."""

import os
import queue
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

import tune_fakes
from lngen.compile import Compilation
from lngen.spec import parse_spec
from lngen.tune import workers
from lngen.tune.candidates import build_all, candidates
from lngen.tune.workers import Answer, Limits, Setup, Stopped, Worker, Workers, take, visible_devices
from tune_cases import AMPLE, SPEC, Fake


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
    code = "from lngen.tune.workers import take\nprint(take(('0',)), take(('0', '2')).gpu)"
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
