"""If these fail, lngen bench --startup times something else than it says, or cannot say why it does not."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import fails, prints
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError
from lngen.lab.bench import startup
from lngen.lab.bench.startup import PROGRAM, Startup, measure

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

from host_tensors import HostTensors  # noqa: E402
from lngen.launch import arrays  # noqa: E402
from remembering import remembering  # noqa: E402

SPEC = "rmsnorm.fwd:d=64,dtype=f32"
STEPS = {"import torch": 2.0, "first result": 3.0}


def test_the_program_times_every_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cold it compiles three kernels, warm none; each step comes after the one before."""
    process = remembering(monkeypatch, tmp_path / "cache")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, device: zeros(n))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(arrays.Torch, "maker", HostTensors.maker)
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps([0.0, SPEC, 3, 20_000, ""])])
    for count in (3, 0):
        process.forget()
        exec(PROGRAM, {})
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        assert len(process.compiled) == count
        *steps, other = found.values()
        assert steps == sorted(steps)
        assert [*found][-3:] == ["first result", "first gradients", "another class of rows"]
        assert other > 0


def test_every_state_has_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm one has the cache of the cold one before it, which is new."""
    asked: list[tuple[str, bool]] = []

    def process(spec: str, rows: int, pack: str, cache: Path) -> dict[str, float]:
        asked.append((cache.name, bool(pack)))
        return {step: t + len(asked) for step, t in STEPS.items()}

    monkeypatch.setattr(startup, "_process", process)
    monkeypatch.setattr(startup, "_bare", lambda spec, rows: 0.5)
    monkeypatch.setattr(startup, "device_arch", lambda device: "sm_90")
    built: list[Any] = []
    monkeypatch.setattr(startup, "build", lambda *given, **named: built.append((given, named)))
    found = measure(parse_spec(SPEC), 4096)
    assert [str(spec) for spec in built[0][0][0]] == [SPEC, SPEC.replace("fwd", "bwd")]
    assert asked[:6] == [(f"cache{n}", pack) for n in (0, 1) for pack in (False, False, True)]
    assert [times["first result"] for times in found.states.values()] == [10.0, 11.0, 12.0], "medians of five turns"


def test_times_stand_over_those_that_nobody_can_avoid() -> None:
    found = Startup(SPEC, 1, {"cold": {"first result": 3.0}, "warm": STEPS}, 0.5)
    assert found.lines() == [
        ("cold", "first result", 3000.0, 1.5, 6.0),
        ("warm", "import torch", 2000.0, 1.0, 4.0),
        ("warm", "first result", 3000.0, 1.5, 6.0),
    ]


def test_a_process_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "PROGRAM", "raise RuntimeError('no such thing')")
    with pytest.raises(LngenError, match=rf"--startup for '{SPEC}' ended with an error: RuntimeError: no such thing"):
        startup._process(SPEC, 1, "", tmp_path)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line for each step, and one sentence where there is no GPU."""
    assert "needs an NVIDIA GPU" in fails(3, "bench", "--startup")
    monkeypatch.setattr("lngen.lab.bench.torch_gpu.find_gpu", lambda: SimpleNamespace(name="a GPU"))
    asked: list[tuple[str, int]] = []

    def measured(spec: Any, rows: int, progress: Any) -> Startup:
        asked.append((str(spec), rows))
        return Startup(str(spec), rows, {"warm": STEPS}, 0.5)

    monkeypatch.setattr(startup, "measure", measured)
    command = "bench", "--startup", "--graph", "layernorm,softmax", "--dtype", "f32", "--d", "64", "--rows", "8"
    lines = prints(*command).splitlines()
    assert lines[0] == "a GPU, 8 rows"
    assert asked == [("layernorm.fwd:d=64,dtype=f32", 8), ("softmax.fwd:d=64,dtype=f32", 8)]
    assert "first result" in lines[-1]
    assert len(json.loads(prints(*command, "--json"))["startup"]) == 4
