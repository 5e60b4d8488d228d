"""If these fail, an example of the README does not run, or its tables name what is not there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lngen.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def lngen(line: str) -> str:
    done = CliRunner().invoke(cli, shlex.split(line)[1:], prog_name="lngen")
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python examples define, after they ran one after the other in an empty folder."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    blocks = fenced("python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), found)
    return found


def test_the_python_examples_run(names: dict[str, Any]) -> None:
    assert names["dx"].shape == names["x"].shape
    assert names["dgamma"].shape == (768,)
    assert "__global__" in names["source"]
    np.testing.assert_array_equal(names["dx"], names["dresidual"])


@pytest.mark.full
def test_the_command_line_examples_run(names: dict[str, Any]) -> None:
    pytest.importorskip("cupy")
    for name in ("x", "gamma", "beta"):
        np.save(f"{name}.npy", names[name])
    (block,) = fenced("sh")
    lines = block.splitlines()
    assert {line.split()[1] for line in lines} == {"show", "build", "run", "check"}
    for line in lines:
        assert line.startswith("lngen ")
        lngen(line)
    assert np.load("y.npy").shape == names["x"].shape
    assert Path("build/manifest.json").is_file()


@pytest.mark.full
def test_the_two_commands_are_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, test = (block.splitlines() for block in fenced(""))
    assert (len(main), len(test)) == (1, 1)
    assert test[0] in [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    install, *rest = main[0].split(" && ")
    assert install == 'pip install ".[cuda13]"'
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    assert [line.split()[1] for line in rest] == ["build", "check"]
    for line in rest:
        lngen(line)


def test_the_table_of_commands_is_complete() -> None:
    assert set(re.findall(r"^\| `lngen (\w+)", TEXT, re.MULTILINE)) == set(COMMANDS)
