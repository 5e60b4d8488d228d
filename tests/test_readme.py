"""If these fail, an example of the README does not run, or does not do what its text says."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commands import prints
from fake_driver import FakeDriver
from host_tensors import pass_for_gpu_tensors
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
    """What the program on a norm of one's own defines, after it ran in an empty folder."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(program("add_rmsnorm"), "README.md", "exec"), found)
    return found


def program(word: str) -> str:
    """The one program that has this word."""
    (found,) = (text for text in fenced("python") if word in text)
    return found


def test_the_norm_of_ones_own_runs(names: dict[str, Any]) -> None:
    x, residual, gamma, dy = (names[n].astype(np.float64) for n in ("x", "residual", "gamma", "dy"))
    h = x + residual
    xhat = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(names["y"], xhat * gamma, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(names["dgamma"], (dy * xhat).sum((0, 1)), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(names["dx"], names["dresidual"])
    assert "__global__" in names["source"]


class Qwen3RMSNorm:
    """Its forward, for a class made of it and ``torch.nn.Module``."""

    def forward(self, x: Any) -> Any:
        h = x.float()
        return self.weight * (h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


@pytest.mark.filterwarnings("ignore:.*CPU:UserWarning")
def test_the_model_is_patched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A small model stands for the one that transformers would load."""
    torch = pytest.importorskip("torch")

    class Norm(Qwen3RMSNorm, torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

    def load(name: str, *, dtype: str, device_map: str) -> Any:
        assert (dtype, device_map) == ("bfloat16", "cuda")
        return torch.nn.Sequential(Norm(), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).bfloat16()

    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=SimpleNamespace(from_pretrained=load))
    )
    found: dict[str, Any] = {}
    exec(compile(program("transformers"), "README.md", "exec"), found)
    assert capsys.readouterr().out.startswith("2 norms patched, 0 left\n")
    x = torch.randn(3, 64).bfloat16()
    mine, own = found["model"][0], Qwen3RMSNorm.forward(found["model"][0], x)
    assert torch.equal(mine(x), own)
    assert type(mine).forward is not Qwen3RMSNorm.forward


def test_the_pack_of_the_command_line_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake GPU, with fewer rows."""
    pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    lngen(fenced("sh")[0].splitlines()[0])
    gpu = FakeDriver(version=20000)
    gpu.knows_pack(tmp_path / "build")
    pass_for_gpu_tensors(monkeypatch, gpu)
    found: dict[str, Any] = {}
    exec(
        compile(program("lngen.load").replace("4096, 8192", "4, 8192").replace('"cuda"', '"cpu"'), "README.md", "exec"),
        found,
    )
    x = found["x"].float()
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert torch.allclose(found["y"].float(), expected, rtol=1e-3, atol=1e-3)
    driver._gpu.cache_clear()


@pytest.mark.full
def test_the_command_line_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    (block,) = fenced("sh")
    lines = block.splitlines()
    assert {line.split()[1] for line in lines} == {"show", "explain", "build", "check"}
    for line in lines:
        assert line.startswith("lngen ")
        lngen(line)
    assert Path("build/manifest.json").is_file()
    assert "</html>" in Path("page.html").read_text(encoding="utf-8")


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
