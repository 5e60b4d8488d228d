"""``lngen tune`` prints, locks or refuses something else if these fail."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from commands import call, fails, prints
from lngen.runtime.lock_file import read_lock
from lngen.spec import parse_spec
from lngen.tune import trials
from lngen.tune.candidates import ranking
from lngen.tune.trials import Trial
from tune_cases import SCHEDULES, SPEC, TRIED, Fake, few


def test_tune_prints_locks_draws_and_exports(command: Fake) -> None:
    printed = prints(*few("--plot", "a.svg", "--export", "t4", "t4.json"))
    assert SCHEDULES[2] in printed
    assert printed.splitlines()[-1] == (
        "To use these schedules, build with 'lngen build SPEC --lock lngen.lock.toml', or call lngen.compile(..., "
        "lock='lngen.lock.toml')."
    )
    cells = [cell.strip() for cell in printed.splitlines()[2].split("|")]
    assert float(cells[4]) == pytest.approx(0.8, abs=0.01)  # of the reference
    assert float(cells[5]) == pytest.approx(1.2, abs=0.01)  # over the default
    (entry,) = read_lock("lngen.lock.toml").entries
    assert (entry.device, entry.arch, entry.spec, entry.rows) == ("Fake GPU", "sm_90", SPEC, 4096)
    assert entry.schedule == SCHEDULES[2]
    locked = Path("lngen.lock.toml").read_bytes()
    assert Path("a.svg").read_text().startswith("<?xml")
    assert len(json.loads(Path("t4.json").read_text())["results"]) == TRIED
    # Everything is known now: the same again, without a question, in JSON.
    command.log.unlink()
    (tuned,) = json.loads(prints(*few("--json", "--export", "kernel-tuner", "kt.json")))["tuned"]
    assert tuned["chosen"]["schedule"] == SCHEDULES[2]
    assert tuned["statuses"] == {"correct": TRIED}
    assert (tuned["complete"], tuned["skipped"]) == (True, 0)
    assert len(tuned["trials"]) == TRIED
    assert command.asked() == []
    assert Path("lngen.lock.toml").read_bytes() == locked
    assert Path("kt.json").read_text().endswith("}\n}")


def test_each_job_has_its_picture_and_its_export(command: Fake) -> None:
    """Named after what there are several of: SPECs, numbers of rows."""
    other = "softmax.fwd:d=64"
    views = "--plot", "out/a.svg", "--export", "t4", "out/a.json"
    prints(*few("--rows", "64,4096", *views))
    assert {p.name for p in Path("out").iterdir()} == {f"a-{m}.{end}" for m in (64, 4096) for end in ("svg", "json")}
    drawn = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    assert f"{SPEC}, 64 rows" in Path("out/a-64.svg").read_text()
    shutil.rmtree("out")
    prints(*few("--rows", "64,4096", *views, "--frozen"))
    assert {p.name: p.read_bytes() for p in Path("out").iterdir()} == drawn
    shutil.rmtree("out")
    assert "holds no trials of" in fails(2, *few("--rows", "64,2", *views, "--frozen"))
    assert not Path("out").exists()
    prints(*few(other, "--rows", "64", "--plot", "out/a.svg"))
    slugs = {parse_spec(s).slug for s in (SPEC, other)}
    assert {p.name for p in Path("out").iterdir()} == {f"a-{slug}.svg" for slug in slugs}
    command(too_large=True)
    assert call(*few("--database", "u.jsonl", "--rows", "1,2", "--plot", "none.svg")).exit_code == 1
    assert not [*Path().glob("none*")]


def test_overlapping_calls_are_timed_and_recorded_apart(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.tune.job.OVERLAPPING", "tune_fakes:FakeMeasurer", raising=True)
    monkeypatch.setattr("lngen.tune.job.GPU", "tune_fakes:SameFake")
    for more, in_turn in (((), {True}), (("--overlap",), {True, False})):
        prints(*few(*more))
        found = trials.read(Path("t.jsonl")).trials
        assert {t.in_turn for t in found} == in_turn
        assert len(found) == 10 * len(in_turn)  # nothing of the one passes for the other
    shown = trials.of(found, SPEC, 4096, "Fake GPU")
    assert {t.in_turn for t in shown} == {False}  # the last attempt


def test_tune_says_what_it_ignores(command: Fake) -> None:
    prints(*few())
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
    command(wrong=[*range(TRIED)])
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
    said = fails(1, "tune", SPEC, "--frozen")
    assert f"'lngen.lock.toml' is frozen and holds no schedule for {SPEC}; run" in said
    assert command.asked() == []
    prints(*few())
    assert SCHEDULES[2] in prints("tune", SPEC, "--frozen")
    done = call("tune", SPEC, "--frozen", "--json")
    assert json.loads(done.stdout)["locked"][0]["schedule"] == SCHEDULES[2]
    listed = json.loads(call("tune", SPEC, "--frozen", "--rows", "4096,1", "--json").stdout)["locked"]
    assert [(e["rows"], e["locked_rows"], e["schedule"]) for e in listed] == [
        (4096, 4096, SCHEDULES[2]),
        (1, 4096, SCHEDULES[2]),
    ]
    monkeypatch.setattr("lngen.runtime.launcher.device_count", lambda: 1)
    monkeypatch.setattr("lngen.runtime.launcher.device_name", lambda device: "NVIDIA A100")
    done = call("tune", SPEC, "--frozen")
    assert done.exit_code == 1
    assert "dtype=f32 on NVIDIA A100; run" in done.stderr


def test_frozen_shows_the_trials_of_the_database(command: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked: the choice of the lock file among the trials kept, as a picture and in another's format."""
    prints(*few("--export", "t4", "then.json", "--plot", "then.svg"))
    kept = [t for t in trials.read(Path("t.jsonl")).trials if t.schedule == SCHEDULES[2]]
    # The same on another device, and before it with a kernel of long ago, are not of it.
    trials.append(Path("u.jsonl"), [replace(t, kernel="old", us_median=1.0) for t in kept])
    trials.append(Path("u.jsonl"), [replace(t, device="NVIDIA A100") for t in kept])
    trials.append(Path("u.jsonl"), trials.read(Path("t.jsonl")).trials)
    command.log.unlink()
    for name in ("t", "u"):
        views = "--export", "t4", f"{name}.json", "--plot", f"{name}.svg"
        prints("tune", SPEC, "--frozen", "--database", f"{name}.jsonl", *views)
        assert Path(f"{name}.json").read_bytes() == Path("then.json").read_bytes()
        assert Path(f"{name}.svg").read_bytes() == Path("then.svg").read_bytes()
    assert "chosen" in Path("then.svg").read_text()
    assert command.asked() == []
    said = fails(2, "tune", SPEC, "--frozen", "--database", "none.jsonl", "--export", "t4", "a.json")
    assert f"'none.jsonl' holds no trials of {SPEC} with 4096 rows on Fake GPU; name the database" in said
    assert not Path("a.json").exists()


def test_frozen_shows_the_database_without_a_lock_file(command: Fake) -> None:
    prints(*few("--export", "t4", "then.json"))
    Path("lngen.lock.toml").unlink()
    assert "is frozen and holds no schedule" in fails(1, *few("--frozen", "--export", "t4", "now.json"))
    assert Path("now.json").read_bytes() == Path("then.json").read_bytes()
    assert "'t.jsonl' holds no trials of" in fails(2, *few("--frozen", "--rows", "2", "--export", "t4", "no.json"))


def test_the_ranking_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("job", "tuner"):
        monkeypatch.setattr(f"lngen.tune.{module}.visible_devices", lambda: ())
    listed = json.loads(prints("tune", SPEC, "--ranking", "--json"))["ranking"]
    assert [line["schedule"] for line in listed] == [str(s) for s in ranking(parse_spec(SPEC), 4096, "sm_90")]
    assert [line["rank"] for line in listed] == [*range(len(listed))]
    assert SCHEDULES[0] in call("tune", SPEC, "--ranking").stdout
    done = call("tune", SPEC)
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
    done = call("tune", "--merge", "a", "--merge", "b", "--database", "all.jsonl")
    assert (done.exit_code, done.stdout) == (0, "2 trials in all.jsonl\n")
    assert done.stderr == "line 3 of 'b' is skipped, it is not a trial: it is not JSON.\n"
    done = call("tune", "--merge", "a", "--database", "all.jsonl", "--json")
    assert json.loads(done.stdout) == {"database": "all.jsonl", "trials": 2}
    assert call("tune", "--merge", "none", "--database", "all.jsonl").exit_code == 2


def test_budgets_are_times() -> None:
    from lngen.cli.tune import parse_budget

    assert [parse_budget(None, None, t) for t in ("90", "90s", "2m")] == [90.0, 90.0, 120.0]  # type: ignore[arg-type]


def test_build_takes_locked_schedules(command: Fake) -> None:
    prints(*few())
    args = ["build", SPEC, "rmsnorm.bwd:d=64", "--emit", "cu", "--lock", "lngen.lock.toml"]
    done = call(*args, "--out", "out")
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        "rmsnorm.bwd:d=64,dtype=f32 is not in 'lngen.lock.toml' for sm_90; its default schedule is built.\n"
    )
    sets = json.loads(Path("out/manifest.json").read_text())["kernel_sets"]
    texts = {e["name"].partition("__")[0]: e["schedule"]["text"] for e in sets}
    assert texts["rmsnorm_fwd"] == SCHEDULES[2]
    done = call(*args, "--out", "two", "--rows", "3", "--schedule", "blocks_per_sm=1")
    assert done.exit_code == 0, done.output


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
