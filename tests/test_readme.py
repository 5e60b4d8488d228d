"""If these fail, an example of the README does not run, or its tables name what is not there."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import prints
from fake_driver import FakeDriver
from host_tensors import pass_for_gpu_tensors
from lngen.cli import COMMANDS
from lngen.launch import driver
from paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def lngen(line: str) -> str:
    return prints(*shlex.split(line)[1:])


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python examples define, after they ran one after the other in an empty folder."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    _, *blocks = fenced("python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), found)
    return found


def test_the_python_examples_run(names: dict[str, Any]) -> None:
    assert names["dx"].shape == names["x"].shape
    assert names["dgamma"].shape == (768,)
    assert "__global__" in names["source"]
    np.testing.assert_array_equal(names["dx"], names["dresidual"])


def test_the_pack_of_the_command_line_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake GPU, with fewer rows."""
    pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    build, (program, *_) = fenced("sh")[0].splitlines()[0], fenced("python")
    lngen(build)
    gpu = FakeDriver(version=20000)
    gpu.knows_pack(tmp_path / "build")
    pass_for_gpu_tensors(monkeypatch, gpu)
    found: dict[str, Any] = {}
    exec(compile(program.replace("4096, 8192", "4, 8192").replace('"cuda"', '"cpu"'), "README.md", "exec"), found)
    x = found["x"].float()
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert torch.allclose(found["y"].float(), expected, rtol=1e-3, atol=1e-3)
    driver._gpu.cache_clear()


@pytest.mark.full
def test_the_command_line_examples_run(names: dict[str, Any]) -> None:
    pytest.importorskip("cupy")
    for name in ("x", "gamma", "beta"):
        np.save(f"{name}.npy", names[name])
    (block,) = fenced("sh")
    lines = block.splitlines()
    assert {line.split()[1] for line in lines} == {"show", "explain", "build", "pack", "run", "check"}
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
    first_cells = "\n".join(re.findall(r"^\| (`lngen .*?`) \| ", TEXT, re.MULTILINE))
    assert set(re.findall(r"`lngen (\w+)", first_cells)) == set(COMMANDS)
