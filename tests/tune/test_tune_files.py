"""The tuner's files, database and lock file, under many writers, killed writers, and of strangers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_tune import DEVICE, SCHEDULES, SPEC, TRIALS, trial

from fuzz import JSON, fuzzed
from killing import Killed, killed_at, points
from lngen import files
from lngen.errors import LngenError
from lngen.runtime.lock_file import Lock, Locked, parse_lock, read_lock
from lngen.spec import parse_spec
from lngen.tune import trials, tuner
from lngen.tune.job import Outcome, choose
from lngen.tune.trials import Trial, from_json, latest
from lngen.tune.views import FORMATS, export

ROOT = Path(tuner.__file__).parents[2]


def outcome(rows: int, rank: int = 0) -> Outcome:
    return Outcome(SPEC, rows, DEVICE, choice=choose([trial(rank)]))


def rows_of(path: Path) -> list[int]:
    return [e.rows for e in read_lock(path).entries]


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# ---- at once ----


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


def test_what_is_appended_during_a_merge_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shard = tmp_path / "t", tmp_path / "shard"
    trials.append(path, TRIALS[:2])
    trials.append(shard, TRIALS[2:4])
    thread = during(monkeypatch, trials, "read", lambda: trials.append(path, TRIALS[4:5]))
    trials.merge([shard], path)
    thread.join()
    assert {*trials.read(path).trials} == {*TRIALS[:5]}


def test_a_link_and_its_database_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "t", tmp_path / "link"
    trials.append(path, TRIALS[:2])
    link.symlink_to("t")
    thread = during(monkeypatch, trials, "read", lambda: trials.append(path, TRIALS[2:3]))
    trials.merge([link], link)
    thread.join()
    trials.append(link, TRIALS[3:4])
    assert link.is_symlink()
    assert {*trials.read(path).trials} == {*TRIALS[:4]}


def test_a_file_is_held_by_the_name_its_links_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HELD", 0.05)
    link = tmp_path / "link"
    link.symlink_to("t")
    with files.exclusive(tmp_path, "t"):
        for use in (
            lambda: trials.append(link, TRIALS),
            lambda: trials.merge([], link),
            lambda: tuner.store_choices(link, [outcome(1)]),
        ):
            with pytest.raises(LngenError, match=r"another process has held '.*/\.t\.lock'"):
                use()


def test_choices_stored_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.lock"
    tuner.store_choices(path, [outcome(1)])
    thread = during(monkeypatch, tuner, "read_lock", lambda: tuner.store_choices(path, [outcome(2)]))
    tuner.store_choices(path, [outcome(3)])
    thread.join()
    assert rows_of(path) == [1, 2, 3]
    assert names(tmp_path) == {"my.lock"}


def test_processes_append_merge_and_lock_without_a_loss(tmp_path: Path) -> None:
    code = f"""
        import sys
        from dataclasses import replace
        from pathlib import Path
        from lngen.tune import trials, tuner
        from lngen.tune.job import choose
        from lngen.tune.job import Outcome
        from lngen.tune.trials import Device, Trial
        device, one = {DEVICE!r}, {trial()!r}
        own, folder = int(sys.argv[1]), Path(sys.argv[2])
        for n in range(8):
            trials.append(folder / "t", [replace(one, rows=100 * own + n)])
            if n % 3 == own:
                trials.append(folder / f"shard{{own}}", [replace(one, rows=10_000 + 100 * own + n)])
                trials.merge([folder / f"shard{{own}}"], folder / "t")
            tuner.store_choices(folder / "my.lock", [Outcome(one.spec, 100 * own + n, device, choice=choose([one]))])
    """
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(n), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        for n in range(3)
    ]
    for process in running:
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said
    every = [100 * own + n for own in range(3) for n in range(8)]
    assert rows_of(tmp_path / "my.lock") == every
    content = trials.read(tmp_path / "t")
    merged = [10_000 + 100 * own + n for own in range(3) for n in range(8) if n % 3 == own]
    assert (sorted({t.rows for t in content.trials}), content.complaints) == ([*every, *merged], ())
    assert names(tmp_path) == {"t", "my.lock", *(f"shard{own}" for own in range(3))}


# ---- killed ----


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


def test_a_killed_store_leaves_the_old_lock_file_or_the_new_one(tmp_path: Path) -> None:
    tuner.store_choices(tmp_path / "whole", [outcome(1)])
    found = []
    for point in range(points(lambda: tuner.store_choices(tmp_path / "whole", [outcome(2)]))):
        path = tmp_path / str(point) / "my.lock"
        tuner.store_choices(path, [outcome(1)])
        with killed_at(point), pytest.raises(Killed):
            tuner.store_choices(path, [outcome(2)])
        found.append(tuple(rows_of(path)))
        tuner.store_choices(path, [outcome(3)])
        assert rows_of(path) == [*found[-1], 3]
        assert names(path.parent) == {"my.lock"}
    assert {*found} == {(1,), (1, 2)}


# ---- which entry wins ----


def test_a_new_choice_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    first = Locked("G", "sm_90", SPEC, 64, "one")
    for new in (replace(first, schedule="a"), replace(first, schedule="two"), replace(first, arch="sm_80")):
        assert Lock((first,)).updated([new]).entries == (new,)
        assert Lock().updated([first, new]).entries == (new,), "the last of several, too"
    path = tmp_path / "my.lock"
    for rank in (1, 0, 2):
        tuner.store_choices(path, [outcome(64, rank)])
        assert [e.schedule for e in read_lock(path).entries] == [SCHEDULES[rank]]


def test_after_a_merge_the_same_trial_wins_in_any_order(tmp_path: Path) -> None:
    """Most rounds; of equally many the same one whatever the order of the shards; a failure is final."""
    brief, long = trial(us=9.0, rounds=4), trial(us=10.0, rounds=12)
    tied, failed = trial(us=11.0, rounds=12), trial(1, None, status="runtime", reason="x")
    shards = [[brief], [long, trial(1)], [tied], [failed]]
    paths = [tmp_path / str(n) for n in range(len(shards))]
    for path, content in zip(paths, shards, strict=True):
        trials.append(path, content)
    trials.merge(paths, tmp_path / "up")
    trials.merge(paths[::-1], tmp_path / "down")
    assert (tmp_path / "up").read_bytes() == (tmp_path / "down").read_bytes()
    found = trials.read(tmp_path / "up").trials
    assert [(t.rank, t.rounds) for t in found] == [(0, 4), (0, 12), (0, 12), (1, 0), (1, 12)]
    assert latest(found) == [tied, failed]


def test_the_newest_kernel_of_a_schedule_is_the_one_shown(tmp_path: Path) -> None:
    old, new = trial(us=1.0, kernel="old", rounds=12), trial(us=5.0, rounds=4)
    assert trials.of([old, new], SPEC, 4096, DEVICE.name) == [new]
    assert trials.of([new, old], SPEC, 4096, DEVICE.name) == [old]
    assert trials.of([old, trial(1), replace(new, rows=1)], SPEC, 4096, DEVICE.name) == [old, trial(1)]


# ---- files of strangers ----

UNREADABLE: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "it is a FIFO, not a regular file"),
    (lambda path: path.symlink_to("/dev/full"), "it is a device, not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    (Path.mkdir, "Is a directory"),
    (lambda path: (path.touch(), os.truncate(path, 2**40)), r"it is larger than \d+ bytes"),
]


@pytest.mark.parametrize(("make", "message"), UNREADABLE)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(LngenError, match=rf"^the lock file '{path}' cannot be read: {message}; name another file\.$"):
        read_lock(path)
    with pytest.raises(LngenError, match=rf"cannot be read: {message}"):
        tuner.store_choices(path, [outcome(1)])
    with pytest.raises(LngenError, match=rf"^the database '{path}' cannot be read: {message}; name another file\.$"):
        trials.read(path)
    with pytest.raises(LngenError, match=rf"cannot be read: {message}"):
        trials.merge([path], tmp_path / "t")
    assert names(tmp_path) == {"x"}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full"), Path.mkdir])
def test_what_cannot_be_appended_to_is_one_sentence(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "x")
    with pytest.raises(LngenError, match=r"^the database '.*' cannot be written: .*; name a place that can be"):
        trials.append(tmp_path / "x", TRIALS[:1])


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "x" * 253])
def test_a_name_no_file_can_have_is_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for use in (
        lambda: trials.append(path, TRIALS),
        lambda: trials.merge([], path),
        lambda: tuner.store_choices(path, [outcome(1)]),
        lambda: [trials.read(path), read_lock(path, missing_ok=True), trials.append(path, TRIALS)],
    ):
        with pytest.raises(LngenError, match=r"(name another file|name a place that can be written to)\.$"):
            use()
    assert names(tmp_path) == set()


HEAD = 'version = 1\n[x]\narch = "sm_90"\n[x.y]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 10**5, "is not a lock file: a line is longer than 1000 characters; remove it"),
        ("a = " + "[\n" * 10**5, "is not a lock file: it is nested too deeply; remove it"),
        (".".join(["a"] * 10**6) + " = 1", "is not a lock file: a line is longer than 1000 characters; remove it"),
        ("version = 0x" + "f" * 900, "expected to be a lock file of version 1, got version 5104866"),
        ("version = [[[[[[[[[[1]]]]]]]]]]", r"got version \[\[\[\[\[\["),
        ("version = 1\nx" + ".a" * 490 + " = 1", "'x': expected an arch such as \"sm_90\", got None"),
        (HEAD + "1" * 400 + ' = "a"', "got '11111.*11111' = 'a'"),
        (HEAD + '"²" = "a"', "got '²' = 'a'"),
        (HEAD + '007 = "a"', "got '007' = 'a'"),
        (HEAD + '-1 = "a"', "got '-1' = 'a'"),
        (HEAD + "7" + ".a" * 490 + " = 1", r"got '7' = \{'a'"),
        ('version = 1\n["x\\ny"]\n', r"'x\\ny': expected an arch"),
        ('version = "\\ud800"', "is not a lock file"),
    ],
)
def test_a_lock_file_of_a_stranger_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(LngenError, match=message) as caught:
        parse_lock(text, "my.lock")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": "9" * 400}, "a number of more than 64 bits"),
        ({"us_median": "9" * 400}, "a number of more than 64 bits"),
        ({"us_median": "1e999"}, "1e999 is not a finite number"),
        ({"us_median": "NaN"}, "NaN is not a finite number"),
        ({"rows": "-1"}, "'rows' is expected to be at least 0, got -1"),
        ({"us_p10": "-0.5"}, "'us_p10' is expected to be at least 0, got -0.5"),
        ({"spec": '"\\ud800"'}, "it holds half of a surrogate pair"),
        ({"spec": "[" * 10**4}, "it is nested deeper than 32 levels"),
        ({"spec": "[" * 30 + "]" * 30}, r"'spec' is expected to be a str, got \[\[\["),
        ({"spec": '"' + "a" * 10**5 + '"'}, "it is longer than 65536 bytes"),
        ({"status": '"' + "a" * 10**4 + '"'}, "got 'aaa"),
    ],
)
def test_a_line_of_a_stranger_is_skipped_with_one_sentence(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    ((key, value),) = change.items()
    line = json.dumps({**TRIALS[0].to_json(), key: "HERE"}).replace('"HERE"', value)
    (tmp_path / "t").write_text(f"{line}\n{json.dumps(TRIALS[1].to_json())}\n")
    found = trials.read(tmp_path / "t")
    assert found.trials == (TRIALS[1],)
    (said,) = found.complaints
    assert said.startswith(f"line 1 of '{tmp_path / 't'}' is skipped, it is not a trial: ")
    assert message.replace("\\", "") in said
    assert len(said) < 400 + len(str(tmp_path))


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


# ---- anything ----

PRINTED = st.text(st.characters(exclude_categories=["Cs"]))
LOCKS = st.lists(
    st.builds(Locked, PRINTED, PRINTED, PRINTED, st.integers(0, 2**53), PRINTED), max_size=6, unique_by=lambda e: e.rows
)


@fuzzed
@given(LOCKS)
def test_a_lock_file_reads_as_it_was_written_whatever_the_names_are(entries: list[Locked]) -> None:
    entries = [replace(e, arch="sm_90") for e in entries]
    assume(all(e.device != "version" and e.spec != "arch" for e in entries))
    made = Lock().updated(entries)
    text = made.render()
    assume(max(map(len, text.split("\n"))) <= 1000)
    assert parse_lock(text).entries == made.entries


SIGNS = ["[", "]", "[[", "]]", "{", "}", "=", ",", ".", '"', "'", '"""', "\n", " ", "#", "\\", "\\u0000", "\0", "\x7f"]
NUMBERS = ["1", "4096", "0x", "1e400", "inf", "1979-05-27", "9" * 400, "²"]
WORDS = st.sampled_from([*SIGNS, *NUMBERS, "version", "arch", "sm_90", "a", "x.y"])
TOML = st.lists(WORDS | st.text(max_size=3), max_size=30).map("".join)
KEY = st.sampled_from(["x", '"a b"', "arch", "version", "4096", "007", "1.5", '"²"', '"\\u007f"']) | st.text(max_size=3)
VALUE = st.sampled_from(['"sm_90"', '"threads=128"', "1", "{}", "[[]]", "{a={a=[1]}}", "1e400", "true"]) | TOML
SHAPED = st.builds("version = 1\n[{0}]\narch = {1}\n[{0}.{2}]\n{3} = {4}\n".format, KEY, VALUE, KEY, KEY, VALUE)


@fuzzed
@given(TOML | SHAPED | st.text(), st.integers(0, 2**70))
def test_any_lock_file_is_read_or_one_sentence(text: str, rows: int) -> None:
    try:
        found = parse_lock(text, "my.lock")
    except LngenError:
        return
    assert parse_lock(found.render()).entries == tuple({(e.device, e.spec, e.rows): e for e in found.entries}.values())
    for entry in found.entries:
        assert found.nearest(entry.spec, rows) is not None
    found.nearest(SPEC)


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


def test_the_lock_of_a_file_is_that_file_alone(tmp_path: Path) -> None:
    """Two databases of one folder do not wait for each other."""
    with files.exclusive(tmp_path, "a"):
        trials.append(tmp_path / "b", TRIALS[:1])
    assert tuner.incumbents(Lock(), parse_spec(SPEC), 1) == ()
