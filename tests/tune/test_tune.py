"""The tuner's records: trials, database, lock file, choice, exports, plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen
from lngen import devices
from lngen.compile import Compilation, KernelSet
from lngen.errors import LngenError, LockError, MissingError
from lngen.runtime import lock_file
from lngen.runtime.lock_file import Lock, Locked, parse_lock, read_lock
from lngen.schedule import Schedule, parse_schedule, problem, row_counts
from lngen.spec import parse_spec
from lngen.tune import candidates, trials, workers
from lngen.tune.job import choose, finalists, noise
from lngen.tune.trials import STATUSES, Device, Trial, from_json, latest
from lngen.tune.tuner import frozen_choices, incumbents, store_choices
from lngen.tune.views import FORMATS, _origin, export, plot
from lngen.version import __version__

SPEC = "rmsnorm.fwd:d=64,dtype=f32"
DEVICE = Device("NVIDIA H200", "sm_90", "NVRTC 13.4")
SCHEDULES = [str(s) for s in candidates.candidates(Compilation(parse_spec(SPEC)), 4096, "sm_90")[:8]]


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


# ---- trials and the database ----


def test_a_trial_survives_its_line() -> None:
    for t in TRIALS:
        assert from_json(json.loads(trials.line(t))) == t
    assert b"us_median" not in trials.line(TRIALS[1])
    assert {t.status for t in TRIALS} == set(STATUSES)


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


def test_a_corrupt_line_is_reported_with_its_number_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    wrong = [
        b'{"spec": "half a li\n',
        b"[1]\n",
        b'{"spec": "a"}\n',
        trials.line(trial()).replace(b'"correct"', b'"splendid"'),
        trials.line(trial()).replace(b'"rows": 4096', b'"rows": "many"'),
        b"\xff\xfe\n",
    ]
    path.write_bytes(trials.line(TRIALS[0]) + b"".join(wrong) + b"\n" + trials.line(TRIALS[1]))
    found = trials.read(path)
    assert found.trials == tuple(TRIALS[:2])
    assert [c.partition(" of ")[0] for c in found.complaints] == [f"line {n}" for n in range(2, 8)]
    assert found.complaints[0] == f"line 2 of '{path}' is skipped, it is not a trial: it is not JSON."
    assert "an object, got list" in found.complaints[1]
    assert "missing" in found.complaints[2]
    assert "one of constraints, compile, runtime, correctness, timeout, correct, got 'splendid'" in found.complaints[3]
    assert "'rows' is expected to be a int, got 'many'" in found.complaints[4]


def test_a_half_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trials.append(path, TRIALS[:1])
    with path.open("ab") as file:
        file.write(trials.line(TRIALS[1])[:40])
    trials.append(path, TRIALS[2:3])
    found = trials.read(path)
    assert found.trials == (TRIALS[0], TRIALS[2])
    assert [c.split(" of")[0] for c in found.complaints] == ["line 2"]


def test_many_writers_leave_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: trials.append(path, [trial(n % 8, 1.0 + n)] * 3), range(64)))
    found = trials.read(path)
    assert (len(found.trials), found.complaints) == (192, ())


def test_a_database_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LngenError, match=r"cannot write '.*t\.jsonl.*': File exists; name a place"):
        trials.append(tmp_path / "file" / "t.jsonl", TRIALS)
    with pytest.raises(LngenError, match="cannot be read: Is a directory; name another file"):
        trials.read(tmp_path)


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
    with pytest.raises(LngenError, match=r"there is no database '.*none' to merge"):
        trials.merge([a, tmp_path / "none"], c)
    assert c.read_bytes() == merged


def test_trials_of_elsewhere_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t"
    others = [trial(device="NVIDIA A100"), trial(1, device="NVIDIA A100"), trial(compiler="NVRTC 12.9")]
    assert trials.foreign(TRIALS, [DEVICE], path) == []
    assert trials.foreign([*TRIALS, *others], [DEVICE], path) == [
        f"3 lines of '{path}' are ignored, measured on NVIDIA A100 with NVRTC 13.4, NVIDIA H200 with NVRTC 12.9."
    ]


# ---- the choice ----


def test_a_tie_goes_to_the_first_in_order() -> None:
    found = choose(TRIALS)
    assert found is not None
    assert found.trial == TRIALS[2]
    assert found.ties == (TRIALS[2], TRIALS[5])
    assert choose([TRIALS[5], replace(TRIALS[2], us_median=10.2), TRIALS[0]]).trial == TRIALS[5]  # type: ignore[union-attr]
    assert choose(TRIALS, incumbent=SCHEDULES[5]).trial == TRIALS[5]  # type: ignore[union-attr]
    assert choose(TRIALS, incumbent=SCHEDULES[0]).trial == TRIALS[2]  # type: ignore[union-attr]
    assert choose([t for t in TRIALS if not t.timed]) is None


def test_only_the_most_rounds_decide_and_only_relative_to_their_reference() -> None:
    assert choose([trial(0, 9.0, rounds=4), trial(1, 10.0)]).trial.rank == 1  # type: ignore[union-attr]
    assert choose([trial(0, 10.0, reference=8.0), trial(1, 10.5, reference=9.0)]).trial.rank == 1  # type: ignore[union-attr]


def test_noise_is_the_spread_within_bounds() -> None:
    assert noise(trial()) == 0.01
    assert noise(trial(us_p10=9.8, us_p90=10.2)) == pytest.approx(0.02)
    assert noise(trial(us_p10=5.0, us_p90=20.0)) == 0.03


# Levels of true time 6 % apart, and a measurement that is off by less than half of what counts as a tie.
levels = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(levels, st.integers(0, 2**32), st.integers(0, 2**32))
def test_two_noisy_runs_choose_the_same(level: list[int], seed: int, other: int) -> None:
    import random

    def run(n: int) -> Sequence[Trial]:
        rng = random.Random(n)
        found = [trial(rank, 10 * 1.06**v * (1 + rng.uniform(-0.0045, 0.0045))) for rank, v in enumerate(level)]
        return rng.sample(found, len(found))

    a, b = choose(run(seed)), choose(run(other))
    assert a is not None
    assert b is not None
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


# ---- what is tried ----


@pytest.mark.parametrize("text", ["layernorm.bwd:d=1024,dtype=bf16", "layernorm.fwd:d=4096,dtype=bf16", SPEC])
def test_the_best_of_every_kind_is_tried_early(text: str) -> None:
    """In turn with the ranking, so that a model that is wrong about a kind does not keep it from being tried."""
    spec = parse_spec(text)
    listed, tried = candidates.ranking(spec, 4096, "sm_90"), candidates.candidates(Compilation(spec), 4096, "sm_90")
    assert tried[0] == Compilation(spec).schedule("sm_90", rows=4096)
    assert sorted(tried) == sorted(listed)
    assert len(set(tried)) == len(tried)
    assert tried == candidates.candidates(Compilation(spec), 4096, "sm_90")
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
    monkeypatch.setattr(
        candidates, "ranked", lambda *of, **rows: [*same[:4], small, streamed, *same[4:], kept, default]
    )
    monkeypatch.setattr(Compilation, "schedule", lambda *of, **rows: default)
    found = candidates.candidates(Compilation(parse_spec(SPEC)), 4096, "sm_90")
    expected = [default, same[0], same[1], streamed, same[2], kept, same[3], small, same[4], same[5], same[6]]
    assert sorted(found) == sorted(expected)
    assert [s for s in found if s in (streamed, kept)] == [streamed, kept]
    assert found[:6] == expected[:6]


# ---- the lock file ----

LOCKED = [
    Locked("NVIDIA H200", "sm_90", SPEC, 4096, SCHEDULES[2]),
    Locked("NVIDIA H200", "sm_90", SPEC, 64, SCHEDULES[1]),
    Locked("NVIDIA H200", "sm_90", "layernorm.bwd:d=8,eps=1e-06", 1, SCHEDULES[0]),
    Locked('A "quoted" GPU', "sm_80", SPEC, 4096, SCHEDULES[3]),
]


def test_the_lock_file_reads_as_it_was_written(tmp_path: Path) -> None:
    lock = Lock().updated(LOCKED)
    text = lock.render()
    assert text == Lock().updated(reversed(LOCKED)).render()
    assert parse_lock(text).entries == lock.entries
    assert text.splitlines()[:6] == [
        lock_file.HEAD.strip(),
        "version = 1",
        "",
        '["A \\"quoted\\" GPU"]',
        'arch = "sm_80"',
        "",
    ]
    assert f'["NVIDIA H200"."{SPEC}"]\n64 = "{SCHEDULES[1]}"\n4096 = "{SCHEDULES[2]}"\n' in text
    changed = lock.updated([replace(LOCKED[0], schedule="other")])
    assert len(changed.entries) == 4
    assert parse_lock(Lock().render()).entries == ()


@pytest.mark.parametrize(
    ("rows", "device", "arch", "want"),
    [
        (4096, "NVIDIA H200", None, 2),
        (513, "NVIDIA H200", None, 2),  # 8 times away from both, a little less from 4096
        (511, "NVIDIA H200", None, 1),
        (512, "NVIDIA H200", None, 2),  # a tie goes to more rows
        (0, "NVIDIA H200", None, 1),
        (None, "NVIDIA H200", None, 2),
        (10**9, None, "sm_80", 3),
        (10**9, None, "sm_90", 2),
        (64, "NVIDIA B200", None, None),
    ],
)
def test_the_nearest_rows_are_looked_up(rows: int | None, device: str | None, arch: str | None, want: int) -> None:
    found = Lock().updated(LOCKED).nearest(SPEC, rows, device=device, arch=arch)
    assert (found and found.schedule) == (want and SCHEDULES[want])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = x", "is not a lock file: .*line 1"),
        ("version = 2", "expected to be a lock file of version 1, got version 2"),
        ("version = 1\nx = 1", "'x': expected a table, got 1"),
        ("version = 1\n[x]\n", 'expected an arch such as "sm_90", got None'),
        ('version = 1\n[x]\narch = "sm_90"\ny = 3', "'x', 'y': expected a table, got 3"),
        (
            'version = 1\n[x]\narch = "sm_90"\n[x.y]\nmany = "a"',
            "expected a line such as 4096 = \"threads=128\", got 'many'",
        ),
        ('version = 1\n[x]\narch = "sm_90"\n[x.y]\n12 = 5', "got '12' = 5"),
    ],
)
def test_a_wrong_lock_file_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(LngenError, match=message):
        parse_lock(text, "my.lock")


def test_a_lock_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LngenError, match=r"there is no lock file '.*none'; 'lngen tune SPEC"):
        read_lock(tmp_path / "none")
    with pytest.raises(LngenError, match="cannot be read: Is a directory"):
        read_lock(tmp_path)
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(LngenError, match="cannot be read: it is not UTF-8 text"):
        read_lock(tmp_path / "x")


@pytest.mark.parametrize("schedule", ["threads=7", "colour=red"])
def test_a_locked_schedule_that_is_not_legal_any_more_names_its_line(schedule: str) -> None:
    lock = Lock((replace(LOCKED[0], schedule=schedule),), "my.lock")
    with pytest.raises(LngenError, match=rf"'my.lock', {SPEC} with 4096 rows on NVIDIA H200: .* Tune it again"):
        lock.schedule(Compilation(parse_spec(SPEC)), 4096)


def test_frozen_names_what_is_missing() -> None:
    lock, spec = Lock(path="my.lock").updated(LOCKED), parse_spec(SPEC)
    assert [e.schedule for e in frozen_choices(lock, [spec], [64, 4096], "NVIDIA H200")] == [SCHEDULES[1], SCHEDULES[2]]
    assert frozen_choices(lock, [spec], [4096], None)[0].device == 'A "quoted" GPU'
    with pytest.raises(LockError, match=r"'my.lock' is frozen and holds no schedule for rmsnorm.* on A100; run") as e:
        frozen_choices(lock, [spec], [64], "A100")
    assert e.value.exit_code == 1


def called(name: str, arch: str = "sm_90") -> devices.Device:
    """A GPU of that name."""
    return replace(devices.device_for(arch), name=name)


def test_frozen_and_compile_choose_the_same_entry(tmp_path: Path) -> None:
    """Whatever the number of rows, locked or not, on every device."""
    path, spec = tmp_path / "my.lock", parse_spec(SPEC)
    lock = Lock(path=str(path)).updated(LOCKED)
    path.write_text(lock.render())
    call = lngen.compile("rmsnorm", d=64, dtype="f32", lock=path)._forward
    devices = {(e.device, e.arch) for e in lock.entries if e.spec == SPEC}
    assert len(devices) > 1
    chosen = set()
    for device, arch in devices:
        for rows in (1, 63, 64, 65, 500, 513, 4096, 10**6):
            (entry,) = frozen_choices(lock, [spec], [rows], device)
            assert str(call.kernels(arch, rows=rows, gpu=called(device, arch)).plan.schedule) == entry.schedule
            chosen.add(entry)
    assert len(chosen) > 2
    (entry,) = frozen_choices(lock, [spec], [65], None)
    assert str(call.kernels(entry.arch, rows=65).plan.schedule) == entry.schedule


def test_compile_takes_the_locked_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.lock"
    path.write_text(Lock().updated(LOCKED[:2]).render())
    norm = lngen.compile("rmsnorm", d=64, dtype="f32", lock=path)
    assert str(norm.plan("fwd").schedule) == SCHEDULES[2]
    call = norm._forward
    assert str(call.kernels("sm_90", None, 100, called("NVIDIA H200")).plan.schedule) == SCHEDULES[1]
    default = Schedule("registers", 2, 64, 4)
    monkeypatch.setattr(Compilation, "schedule", lambda *of, **rows: default)
    assert call.kernels("sm_90", None, 100, called("another GPU")).plan.schedule == default
    assert call.kernels("sm_80").plan.schedule == default
    changed = lngen.compile("rmsnorm", d=64, dtype="f32", lock=path, schedule={"fwd": "blocks_per_sm=1"})
    assert changed.plan("fwd").schedule == replace(norm.plan("fwd").schedule, blocks_per_sm=1)
    with pytest.raises(LngenError, match="there is no lock file"):
        lngen.compile("rmsnorm", d=64, lock=tmp_path / "none")


def test_a_warm_up_loads_what_is_locked_for_any_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.lock"
    path.write_text(Lock().updated(LOCKED[:2]).render())
    norm = lngen.compile("rmsnorm", d=64, dtype="f32", lock=path)
    asked: list[int | None] = []
    gpu = called(LOCKED[0].device)
    monkeypatch.setattr("lngen.runtime.direction.live_gpu", lambda device: gpu)
    monkeypatch.setattr(norm._forward, "launcher", lambda device, rows: asked.append(rows))
    norm._forward.warm(0)
    facts = problem(parse_spec(SPEC).graph(), 64)
    assert asked == [*row_counts(facts, gpu), *sorted(e.rows for e in LOCKED[:2])]


def test_a_gpu_is_asked_for_the_schedule_of_its_name_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from lngen.runtime import direction as calls

    made: list[tuple[str, int]] = []

    class Launcher:
        def __init__(self, plan: object, image: bytes, device: int, overlap: bool) -> None:
            self.plan = plan
            made.append((str(plan.schedule), device))  # type: ignore[attr-defined]

    monkeypatch.setattr(calls, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(calls, "live_gpu", lambda device: called("NVIDIA H200"))
    monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: SimpleNamespace(image=b"", resources={}))
    monkeypatch.setattr(calls, "Launcher", Launcher)
    call = calls.Call(parse_spec(SPEC), "", Lock().updated(LOCKED))
    for rows in (64, 80, 4096, 64):
        call.launcher(0, rows=rows)
    assert made == [(SCHEDULES[1], 0), (SCHEDULES[2], 0)]
    assert call.launcher(0, 1, 64).plan.schedule.vec == 1


def test_storing_keeps_other_choices(tmp_path: Path) -> None:
    from lngen.tune.job import Outcome

    path = tmp_path / "a" / "my.lock"
    assert read_lock(path, missing_ok=True).entries == ()
    store_choices(path, [Outcome(SPEC, 4096, DEVICE)])
    assert not path.exists()
    store_choices(path, [Outcome(SPEC, 4096, DEVICE, choice=choose(TRIALS)), Outcome(SPEC, 7, DEVICE)])
    store_choices(path, [Outcome(SPEC, 7, DEVICE, choice=choose(TRIALS[:1]))])
    lock = read_lock(path, missing_ok=True)
    assert [(e.rows, e.schedule) for e in lock.entries] == [(7, SCHEDULES[0]), (4096, SCHEDULES[2])]
    assert incumbents(lock, parse_spec(SPEC), 4096) == (("NVIDIA H200", SCHEDULES[2]),)
    assert [p.name for p in path.parent.iterdir()] == ["my.lock"]


# ---- exports and the plot ----


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


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_is_of_one_job(form: str) -> None:
    assert export(TRIALS, form) == export(TRIALS, form)
    with pytest.raises(LngenError, match="one spec at one number of rows, got 2"):
        export([*TRIALS, trial(rows=1)], form)
    with pytest.raises(LngenError, match="got 0"):
        export([], form)
    with pytest.raises(LngenError, match=r"cannot be exported: .* no key 'colour'"):
        export([trial(schedule="colour=red")], form)
    with pytest.raises(LngenError, match="no export format 'csv', expected one of t4, kernel-tuner"):
        export(TRIALS, "csv")


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_plot_shows_every_trial_and_is_the_same_every_time(tmp_path: Path, ending: str) -> None:
    a, b = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    plot(TRIALS, choose(TRIALS), a)
    plot(TRIALS, choose(TRIALS), b)
    assert a.read_bytes() == b.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [a.name, b.name]
    plot(TRIALS, None, b)
    assert a.read_bytes() != b.read_bytes()
    with pytest.raises(LngenError, match=r"cannot write '.*a\.(svg|png).c.*': (Not a directory|File exists)"):
        plot(TRIALS, None, a / f"c.{ending}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [a.name, b.name]


def test_the_plot_says_where_its_trials_come_from() -> None:
    made = [trial(device="NVIDIA H200", compiler="NVRTC 13.0", date=d) for d in ("2026-01-02", "", "2026-01-01")]
    assert _origin(made) == f"NVIDIA H200, NVRTC 13.0, lngen {__version__}, 2026-01-02"
    assert _origin([]) == ""


def test_a_plot_of_another_kind_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LngenError, match=r"expected to end in \.png or \.svg"):
        plot(TRIALS, None, tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"\.\[plot\]"):
        plot(TRIALS, None, tmp_path / "a.png")


# ---- leases ----


def test_visible_gpus_are_named_as_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers.visible_devices() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert workers.visible_devices() == ("5", "GPU-abc")
    monkeypatch.setattr(workers, "device_count", lambda: 0)
    assert workers.visible_devices() == ()


def test_a_gpu_is_leased_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    a, b = workers.take(("0", "1")), workers.take(("0", "1"))
    assert a is not None
    assert b is not None
    assert (a.gpu, b.gpu) == ("0", "1")
    assert workers.take(("0", "1")) is None
    code = "from lngen.tune.workers import take\nprint(take(('0',)), take(('0', '2')).gpu)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "2"]
    b.close()
    c = workers.take(("0", "1"))
    assert c is not None
    assert c.gpu == "1"
    a.close()
    c.close()
