"""A locked schedule is lost, or another one runs, if these fail."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import lngen
from fuzz import fuzzed
from killing import Killed, killed_at, points
from lngen import files
from lngen.compiler import devices
from lngen.compiler.compile import Compilation
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.ir import D, M
from lngen.compiler.problem import Schedule, problem
from lngen.compiler.schedule import row_counts
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError
from lngen.lab.tune import trials, tuner
from lngen.lab.tune.job import Outcome, choose
from lngen.lab.tune.tuner import frozen_choices, incumbents, store_choices
from lngen.launch.runtime.lock_file import Lock, Locked, parse_lock, read_lock
from tune_cases import DEVICE, LOCKED, SCHEDULES, SPEC, TRIALS, during, names, outcome


@pytest.mark.parametrize(("rows", "device", "arch", "want"), [
    (4096, "NVIDIA H200", None, 2),
    (513, "NVIDIA H200", None, 2),  # 8 times away from both, a little less from 4096
    (511, "NVIDIA H200", None, 1),
    (512, "NVIDIA H200", None, 2),  # a tie goes to more rows
    (0, "NVIDIA H200", None, 1),
    (None, "NVIDIA H200", None, 2),
    (10**9, None, "sm_80", 3),
    (10**9, None, "sm_90", 2),
    (64, "NVIDIA B200", None, None),
])  # fmt: skip
def test_the_nearest_rows_are_looked_up(rows: int | None, device: str | None, arch: str | None, want: int) -> None:
    found = Lock().updated(LOCKED).nearest(SPEC, rows, device=device, arch=arch)
    assert (found and found.schedule) == (want and SCHEDULES[want])


def test_storing_keeps_other_choices_and_takes_the_place_of_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a" / "my.lock"
    assert read_lock(path, missing_ok=True).entries == ()
    store_choices(path, [Outcome(SPEC, 4096, DEVICE)])
    assert not path.exists()
    store_choices(path, [Outcome(SPEC, 4096, DEVICE, choice=choose(TRIALS)), Outcome(SPEC, 7, DEVICE)])
    for rank in (1, 0):
        store_choices(path, [outcome(7, rank)])
    lock = read_lock(path, missing_ok=True)
    assert [(e.rows, e.schedule) for e in lock.entries] == [(7, SCHEDULES[0]), (4096, SCHEDULES[2])]
    assert incumbents(lock, parse_spec(SPEC), 4096) == (("NVIDIA H200", SCHEDULES[2]),)
    assert [p.name for p in path.parent.iterdir()] == ["my.lock"]
    first = Locked("G", "sm_90", SPEC, 64, "one")
    for new in (replace(first, schedule="a"), replace(first, schedule="two"), replace(first, arch="sm_80")):
        assert Lock((first,)).updated([new]).entries == (new,)
        assert Lock().updated([first, new]).entries == (new,), "the last of several, too"


def rows_of(path: Path) -> list[int]:
    return [e.rows for e in read_lock(path).entries]


def test_choices_stored_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.lock"
    store_choices(path, [outcome(1)])
    thread = during(monkeypatch, tuner, "read_lock", lambda: store_choices(path, [outcome(2)]))
    store_choices(path, [outcome(3)])
    thread.join()
    assert rows_of(path) == [1, 2, 3]
    assert names(tmp_path) == {"my.lock"}


def test_a_killed_store_leaves_the_old_lock_file_or_the_new_one(tmp_path: Path) -> None:
    store_choices(tmp_path / "whole", [outcome(1)])
    found = []
    for point in range(points(lambda: store_choices(tmp_path / "whole", [outcome(2)]))):
        path = tmp_path / str(point) / "my.lock"
        store_choices(path, [outcome(1)])
        with killed_at(point), pytest.raises(Killed):
            store_choices(path, [outcome(2)])
        found.append(tuple(rows_of(path)))
        store_choices(path, [outcome(3)])
        assert rows_of(path) == [*found[-1], 3]
        assert names(path.parent) == {"my.lock"}
    assert {*found} == {(1,), (1, 2)}


def test_a_file_is_held_by_the_name_its_links_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HELD", 0.05)
    link = tmp_path / "link"
    link.symlink_to("t")
    with files.exclusive(tmp_path, "t"):
        for use in (
            lambda: trials.append(link, TRIALS),
            lambda: trials.merge([], link),
            lambda: store_choices(link, [outcome(1)]),
        ):
            with pytest.raises(LngenError, match=r"another process has held '.*/\.t\.lock'"):
                use()


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


def test_schedules_of_a_graph_that_is_another_now_are_named(tmp_path: Path) -> None:
    def own(b: GraphBuilder) -> None:
        b.output("y", b.input("x", M, D) * 2)

    spec = lngen.compile(own, d=64).spec()
    before = str(spec).replace(spec.digest, "0123abcd")
    (path := tmp_path / "lock.toml").write_text(Lock((Locked("GPU", "sm_90", before, 8, "threads=64"),)).render())
    message = f"'{path}' has schedules for {before}, and the graph is {spec} now: run 'lngen tune' again."
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        lngen.compile(own, d=64, lock=path)
    assert read_lock(path).outdated(str(spec)) == message
    assert read_lock(path).outdated(str(spec.with_direction("bwd"))) is None
    assert Lock((Locked("GPU", "sm_90", str(spec), 8, ""), *read_lock(path).entries)).outdated(str(spec)) is None


def test_a_warm_up_loads_what_is_locked_for_any_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.lock"
    path.write_text(Lock().updated(LOCKED[:2]).render())
    norm = lngen.compile("rmsnorm", d=64, dtype="f32", lock=path)
    gpu = called(LOCKED[0].device)
    monkeypatch.setattr("lngen.launch.runtime.direction.live_gpu", lambda device: gpu)
    facts = problem(parse_spec(SPEC).graph(), 64)
    assert norm._forward.row_counts(0) == [*row_counts(facts, gpu), *sorted(e.rows for e in LOCKED[:2])]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "x" * 253])
def test_a_name_no_file_can_have_is_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for use in (
        lambda: trials.append(path, TRIALS),
        lambda: trials.merge([], path),
        lambda: store_choices(path, [outcome(1)]),
        lambda: [trials.read(path), read_lock(path, missing_ok=True), trials.append(path, TRIALS)],
    ):
        with pytest.raises(LngenError, match=r"(name another file|name a place that can be written to)\.$"):
            use()
    assert names(tmp_path) == set()


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
    assert Lock().updated(reversed(entries)).render() == text


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
