"""Trials are lost, doubled or misread, also under many writers and after a kill, or shown wrongly, if these fail."""

import json
import math
import os
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import JSON, fuzzed
from killing import Killed, killed_at, points
from lngen import files
from lngen.compiler.problem import Schedule, parse_schedule
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError, MissingError
from lngen.lab.tune import trials
from lngen.lab.tune.job import Outcome, choose
from lngen.lab.tune.trials import STATUSES, Trial, from_json, latest
from lngen.lab.tune.views import FORMATS, _origin, against_default, export, plot, report_remarks
from lngen.version import __version__
from tune_cases import DEVICE, SCHEDULES, SPEC, TRIALS, during, names, trial


def test_the_last_of_most_rounds_counts_and_a_failure_is_final() -> None:
    brief, again, final = trial(us=11.0, rounds=4), trial(us=12.0, rounds=4), trial(us=10.0)
    assert latest([brief, again]) == [again]
    assert latest([final, brief]) == [final]
    failed = trial(us=None, status="runtime", reason="x")
    assert latest([final, failed, final]) == [failed]
    assert latest([trial(2), trial(0)]) == [trial(0), trial(2)]


def test_trials_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "trials.jsonl"
    assert trials.read(path) == trials.Content()
    trials.append(path, TRIALS[:3])
    before = path.read_bytes()
    trials.append(path, [])
    trials.append(path, TRIALS[3:])
    assert path.read_bytes().startswith(before)
    assert trials.read(path) == trials.Content(tuple(TRIALS))
    assert {t.status for t in TRIALS} == set(STATUSES)
    assert b"us_median" not in trials.line(TRIALS[1])


def test_shards_merge_to_their_union_in_any_order(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    trials.append(a, TRIALS[:5])
    trials.append(b, [*TRIALS[3:], *TRIALS[3:]])
    with b.open("ab") as file:
        file.write(b"{\n")
    count, complaints = trials.merge([a, b], c)
    assert count == len(TRIALS)
    assert complaints == [f"line 11 of '{b}' is skipped, it is not a trial: it is not JSON."]
    assert sorted(trials.read(c).trials, key=repr) == sorted(TRIALS, key=repr)
    merged = c.read_bytes()
    c.unlink()
    trials.merge([b, a, b], c)
    assert c.read_bytes() == merged
    trials.merge([a], c)  # what was there stays
    assert c.read_bytes() == merged
    with pytest.raises(LngenError):
        trials.merge([a, tmp_path / "none"], c)
    assert c.read_bytes() == merged


def test_after_a_merge_the_same_trial_wins_in_any_order(tmp_path: Path) -> None:
    """Most rounds; of equally many the same one whatever the order of the shards; a failure is final."""
    brief, long = trial(us=9.0, rounds=4), trial(us=10.0, rounds=12)
    tied, failed = trial(us=11.0, rounds=12), trial(1, None, status="runtime", reason="x")
    for order in ([brief, long, trial(1), tied, failed], [failed, tied, trial(1), long, brief]):
        merged = tmp_path / order[0].status
        for n, one in enumerate(order):
            trials.append(tmp_path / f"{order[0].status}{n}", [one])
        trials.merge([tmp_path / f"{order[0].status}{n}" for n in range(len(order))], merged)
        assert trials.read(merged).trials == (brief, long, tied, failed, trial(1))
        assert latest(trials.read(merged).trials) == [tied, failed]


def test_the_newest_kernel_of_a_schedule_is_the_one_shown(tmp_path: Path) -> None:
    old, new = trial(us=1.0, kernel="old", rounds=12), trial(us=5.0, rounds=4)
    assert trials.of([old, new], SPEC, 4096, DEVICE.name) == [new]
    assert trials.of([new, old], SPEC, 4096, DEVICE.name) == [old]
    assert trials.of([old, trial(1), replace(new, rows=1)], SPEC, 4096, DEVICE.name) == [old, trial(1)]


def test_trials_of_elsewhere_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t"
    others = [trial(device="NVIDIA A100"), trial(1, device="NVIDIA A100"), trial(compiler="NVRTC 12.9")]
    assert trials.foreign(TRIALS, [DEVICE], path) == []
    assert trials.foreign([*TRIALS, *others], [DEVICE], path) == [
        f"3 lines of '{path}' are ignored, measured on NVIDIA A100 with NVRTC 13.4, NVIDIA H200 with NVRTC 12.9."
    ]


def test_what_is_appended_during_a_merge_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shard = tmp_path / "t", tmp_path / "shard"
    trials.append(path, TRIALS[:2])
    trials.append(shard, TRIALS[2:4])
    thread = during(monkeypatch, trials, "read", lambda: trials.append(path, TRIALS[4:5]))
    trials.merge([shard], path)
    thread.join()
    assert {*trials.read(path).trials} == {*TRIALS[:5]}


def test_a_link_and_its_database_are_one(tmp_path: Path) -> None:
    path, link = tmp_path / "t", tmp_path / "link"
    trials.append(path, TRIALS[:2])
    link.symlink_to("t")
    trials.merge([link], link)
    trials.append(link, TRIALS[2:3])
    assert link.is_symlink()
    assert {*trials.read(path).trials} == {*TRIALS[:3]}


def test_the_lock_of_a_file_is_that_file_alone(tmp_path: Path) -> None:
    """Two databases of one folder do not wait for each other."""
    with files.exclusive(tmp_path, "a"):
        trials.append(tmp_path / "b", TRIALS[:1])


def test_a_killed_append_loses_its_own_line_at_most(tmp_path: Path) -> None:
    trials.append(tmp_path / "whole", TRIALS[:1])
    for point in range(points(lambda: trials.append(tmp_path / "whole", TRIALS[1:2]))):
        path = tmp_path / str(point) / "t"
        trials.append(path, TRIALS[:1])
        with killed_at(point), pytest.raises(Killed):
            trials.append(path, TRIALS[1:2])
        trials.append(path, TRIALS[2:3])
        found = trials.read(path)
        assert found.trials in ((TRIALS[0], TRIALS[2]), tuple(TRIALS[:3]))
        assert len(found.complaints) <= 1
        assert names(path.parent) == {"t"}


def test_a_killed_merge_leaves_the_old_database_or_the_new_one(tmp_path: Path) -> None:
    shard = tmp_path / "shard"
    trials.append(shard, TRIALS[2:])
    trials.append(tmp_path / "whole", TRIALS[:2])
    old = (tmp_path / "whole").read_bytes()
    count = points(lambda: trials.merge([shard], tmp_path / "whole"))
    new = (tmp_path / "whole").read_bytes()
    found = []
    for point in range(count):
        path = tmp_path / str(point) / "t"
        trials.append(path, TRIALS[:2])
        with killed_at(point), pytest.raises(Killed):
            trials.merge([shard], path)
        found.append(path.read_bytes())
        trials.merge([shard], path)
        assert path.read_bytes() == new
        assert names(path.parent) == {"t"}
    assert {*found} == {old, new}


def test_a_fifo_is_not_appended_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(LngenError, match=r"^the database '.*' cannot be written: .*; name a place that can be"):
        trials.append(tmp_path / "x", TRIALS[:1])


def test_a_line_may_be_as_long_as_its_bound(tmp_path: Path) -> None:
    room = trials.LONGEST - len(trials.line(replace(TRIALS[1], reason="")))
    for more, count in ((0, 1), (1, 0)):
        path = tmp_path / str(more)
        trials.append(path, [replace(TRIALS[1], reason="a" * (room - len(', "reason": ""') + more))])
        assert len(trials.read(path).trials) == count


def test_not_every_line_of_another_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a,b\n" * 1000 + "\n" * 1000)
    found = trials.read(tmp_path / "t")
    assert len(found.complaints) == trials.COMPLAINTS + 1
    assert found.complaints[-1] == f"{1000 - trials.COMPLAINTS} more lines of '{tmp_path / 't'}' are skipped."


KEYS = st.sampled_from([f.name for f in fields(Trial)]) | st.text(max_size=4)
ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=9)
)
CHANGED = st.dictionaries(KEYS, ANY | st.lists(ANY, max_size=2), max_size=4)
LINES = CHANGED.map(lambda change: json.dumps({**TRIALS[0].to_json(), **change}).encode())


@fuzzed
@given(st.lists(LINES | JSON | st.binary(), max_size=4))
def test_any_database_is_read_with_a_sentence_for_each_wrong_line(tmp_path: Path, lines: list[bytes]) -> None:
    path, merged = tmp_path / "t", tmp_path / "merged"
    path.write_bytes(b"\n".join(lines))
    merged.unlink(missing_ok=True)
    found = trials.read(path)
    assert len(found.trials) + len(found.complaints) <= path.read_bytes().count(b"\n") + 1
    assert all(from_json(json.loads(trials.line(t))) == t for t in found.trials)
    assert all(math.isfinite(t.ratio) or not t.timed for t in found.trials)
    assert trials.merge([path], merged)[0] == len({trials.line(t) for t in found.trials})
    assert {*trials.read(merged).trials} == {*found.trials}
    for form in FORMATS:
        try:
            export(found.trials, form)
        except LngenError:
            continue


# ---- reports, exports and pictures ----


def test_the_defaults_are_held_against_what_tuning_found() -> None:
    tuned = Outcome(SPEC, 4096, DEVICE, tuple(TRIALS), choice=choose(TRIALS))
    untuned = replace(tuned, choice=choose(TRIALS[:1]))
    share = 10.0 / 12.0
    assert against_default([tuned]) == ""
    expected = f"The defaults reach {share**0.5:.3f} of the tuned speed on geometric mean, {share:.3f} at least."
    assert against_default([tuned, untuned]) == expected


def test_a_budget_too_short_to_compare_is_said() -> None:
    one = Outcome(SPEC, 4096, DEVICE, (TRIALS[0],), choice=choose(TRIALS[:1]))
    (text,) = report_remarks([one])
    assert text.endswith("ended before a second schedule was timed, so nothing is compared; give a larger --budget.")
    (text,) = report_remarks([replace(one, trials=tuple(TRIALS))])
    assert "run it again to try the candidates that are left" in text
    assert not [*report_remarks([replace(one, complete=True)])]


def test_t4_is_what_its_schema_asks_for() -> None:
    content = json.loads(export(TRIALS, "t4"))
    assert content["schema_version"] == "1.0.0"
    assert len(content["results"]) == len(TRIALS)
    for t, r in zip(TRIALS, content["results"], strict=True):
        assert {"configuration", "times", "invalidity", "correctness"} <= r.keys()
        assert r["invalidity"] == t.status
        assert r["correctness"] == (t.status == "correct")
        assert all(isinstance(v, (int, float)) for k, v in r["times"].items() if k != "runtimes")
        assert isinstance(r["times"]["runtimes"], list)
        assert all(isinstance(m["value"], (int, float)) and m["name"] for m in r["measurements"])
    first = content["results"][0]
    assert parse_schedule(SCHEDULES[0], Schedule("multipass", 32, 1, 1)) == Schedule(**first["configuration"])
    assert first["times"]["compilation_time"] == 80.5
    assert {"name": "time", "value": 0.012, "unit": "ms"} in first["measurements"]


def test_a_kernel_tuner_cache_has_its_layout() -> None:
    text = export(TRIALS, "kernel-tuner")
    assert text.endswith("}\n}")  # else Kernel Tuner takes it for torn
    content = json.loads(text)
    assert content["device_name"] == DEVICE.name
    assert content["kernel_name"] == parse_spec(SPEC).slug
    assert content["problem_size"] == [4096]
    keys = content["tune_params_keys"]
    assert keys == [*content["tune_params"]]
    assert len(content["cache"]) == len(TRIALS)
    needed = {"time", "compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"}
    for t, (key, entry) in zip(TRIALS, content["cache"].items(), strict=True):
        assert key == ",".join(str(entry[k]) for k in keys)
        assert all(entry[k] in content["tune_params"][k] for k in keys)
        assert needed | {"timestamp"} <= entry.keys()
        if t.timed:
            assert entry["time"] == pytest.approx(t.us_median / 1e3)  # type: ignore[operator]
        else:
            assert entry["time"] in ("InvalidConfig", "CompilationFailedConfig", "RuntimeFailedConfig")
    assert [e["time"] for e in content["cache"].values()][1:5:3] == ["CompilationFailedConfig", "InvalidConfig"]


def test_a_plot_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    plot(TRIALS, choose(TRIALS), picture)
    plot(TRIALS, None, tmp_path / "c.png")
    with pytest.raises(LngenError, match=r"cannot write '.*a\.svg.c.*': (Not a directory|File exists)"):
        plot(TRIALS, None, picture / "c.svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "c.png"]
    assert "chosen" in picture.read_text()


def test_the_plot_says_where_its_trials_come_from() -> None:
    made = [trial(device="NVIDIA H200", compiler="NVRTC 13.0", date=d) for d in ("2026-01-02", "", "2026-01-01")]
    assert _origin(made) == f"NVIDIA H200, NVRTC 13.0, lngen {__version__}, 2026-01-02"
    assert _origin([]) == ""


def test_a_plot_of_another_kind_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"\.\[plot\]"):
        plot(TRIALS, None, tmp_path / "a.png")
