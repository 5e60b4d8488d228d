"""If these fail, a command prints no JSON, writes another file, or notices too late that it cannot write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import tune_fakes
from bench_fakes import RECORDS
from commands import call
from lngen.aot.build import build
from lngen.bench import store
from lngen.check import matrix
from lngen.check.spec_checks import Result as Checked
from lngen.cli import COMMANDS, cli
from lngen.cli.output import unwritable

FWD = "rmsnorm.fwd:d=64,dtype=f32"
ALL_KEYS = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"
SHOW = ("show", FWD, "--stage")
# Every command line that shows a table, and every one that shows a stage.
TABLES: dict[str, tuple[str, ...]] = {
    "list": ("list",),
    "resources": (*SHOW, "resources", "--schedule", ALL_KEYS),
    "traffic": (*SHOW, "traffic", "--schedule", ALL_KEYS, "--rows", "3"),
    "explain": ("explain", FWD, "--only", "cost", "--schedule", ALL_KEYS),
    "check": ("check", FWD),
    "matrix": ("check", "--matrix"),
    "conform": ("conform", FWD, "--cases", "ordinary", "--device", "cpu"),
    "tune": ("tune", FWD, "--trials", "4", "--database", "t.jsonl"),
    "frozen": ("tune", FWD, "--frozen"),
    "ranking": ("tune", "rmsnorm.fwd:d=1,dtype=f32", "--ranking"),  # which has few schedules
    "merge": ("tune", "--merge", "t.jsonl", "--database", "u.jsonl"),
    "bench": ("bench", "--from", "b.json"),
    "generated": ("generated", "--check"),
    "verify": ("verify", "pack"),
    "pack": ("pack", "list", "pack"),
    "doctor": ("doctor",),
    "help": ("help",),
}
STAGES: dict[str, tuple[str, ...]] = {
    "graph": (*SHOW, "graph"),
    "after": (*SHOW, "graph", "--after", "all"),
    "plan": (*SHOW, "plan", "--schedule", ALL_KEYS),
    "cuda": (*SHOW, "cuda", "--schedule", ALL_KEYS),
    "ptx": (*SHOW, "ptx", "--schedule", ALL_KEYS),
    "diff": (*SHOW, "plan", "--schedule", ALL_KEYS, "--diff", "vec=2"),
    "repro": ("repro", FWD, "--rows", "3"),
}
FOLDER_OR_ARRAYS = {"build": "folder", "run": "outputs"}  # what their --out is


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder in which every command works: one fake GPU, records, and checks that take no time."""
    monkeypatch.chdir(tmp_path)
    tune_fakes.use(monkeypatch, "7")
    monkeypatch.setattr(
        "lngen.cli.verification.check_spec", lambda spec, **_: [Checked(str(spec), "", 1, "oracle", True, "")]
    )
    entry = matrix.Entry(FWD, ["a"], [1], 64)
    monkeypatch.setattr(matrix, "conditions", lambda: {"device": "none"})
    monkeypatch.setattr(matrix, "run_matrix", lambda listed, **_: iter([entry]))
    store.write_json(Path("b.json"), store.Saved(RECORDS, {"device": "none"}))
    monkeypatch.setattr("lngen.cli.generation.differences", lambda folder: {})
    build([FWD], Path("pack"), emit="cu", schedule=ALL_KEYS)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_text_or_json_and_its_file_is_json(name: str) -> None:
    if name in ("resources", "traffic", "tune", "frozen", "merge"):
        pytest.importorskip("cupy")
    args = TABLES[name]
    if name in ("frozen", "merge"):
        assert call(*TABLES["tune"]).exit_code == 0
    text = call(*args)
    assert text.exit_code == 0, text.output
    assert text.stdout
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.stdout)
    printed = call(*args, "--json")
    assert isinstance(json.loads(printed.stdout), dict)
    written = call(*args, "--out", "new/out.json")
    assert written.exit_code == 0
    assert without_seconds(written.stdout) == without_seconds(text.stdout)
    assert without_seconds(Path("new/out.json").read_text()) == without_seconds(printed.stdout)
    assert [*Path("new").iterdir()] == [Path("new/out.json")]


def without_seconds(text: str) -> str:
    """``text`` without what a clock says: lines with seconds, and of a tuner's table, which has a column of them."""
    return "\n".join(line for line in text.splitlines() if '"seconds"' not in line and "| rmsnorm" not in line)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_text_or_json_and_its_file_is_the_text(name: str) -> None:
    if name in ("ptx", "repro"):
        pytest.importorskip("cupy")
    args = STAGES[name]
    text = call(*args).stdout
    data = json.loads(call(*args, "--json").stdout)
    assert data["text"] == text
    assert data["spec"] == FWD
    for more, wanted in (((), text), (("--json",), call(*args, "--json").stdout)):
        done = call(*args, *more, "--out", "stage")
        assert (done.exit_code, done.stdout) == (0, "")
        assert Path("stage").read_text() == wanted


def test_every_command_keeps_to_it() -> None:
    """--json is a flag everywhere, --out a file, but for the folder of build and the arrays of run."""
    shown = {args[0] for args in (*TABLES.values(), *STAGES.values())}
    assert shown | set(FOLDER_OR_ARRAYS) == set(COMMANDS)
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(cli), "list")
        options = {opt: p for p in command.params for opt in p.opts}
        json_flag: Any = options.get("--json")
        assert (json_flag is not None and json_flag.is_flag) or name == "run"
        assert options["--out"].name == FOLDER_OR_ARRAYS.get(name, "out_file")


@pytest.mark.parametrize("name", [*TABLES, *STAGES])
def test_a_dash_is_no_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = {**TABLES, **STAGES}[name]
    commands = 1 + (words[0] == "pack")  # a group, and a command of it
    done = call(*words[:commands], "--out", "-", *words[commands:])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected a file, got '-'" in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("make", "name", "why"), [
    (lambda p: p.mkdir(), "a", "it is a folder"),
    (lambda p: p.touch(), "a/b", "Not a directory"),
    (lambda p: None, "a" * 300, "File name too long"),
    (lambda p: None, "a\0", "no file can have this name"),
    (lambda p: None, "\ud800", "no file can have this name"),
    (lambda p: None, "/dev/null", "it is not a regular file"),
])  # fmt: skip
def test_a_place_that_cannot_be_written_to_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lngen.cli.inspection._described", lambda *_: pytest.fail("something was done"))
    make(tmp_path / "a")
    assert unwritable(Path(name)) == why
    done = call("list", "--out", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in done.stderr


def test_the_help_of_out_says_what_the_command_prints() -> None:
    for name in ("list", "doctor", "check", "bench"):
        assert "Also write the table to this file, as JSON." in " ".join(call(name, "--help").output.split())
    for name in ("show", "help"):
        assert "Write to this file instead; a table is also printed" in " ".join(call(name, "--help").output.split())
