"""Hub packages in a test, loaded as Hugging Face ``kernels`` loads them, on CPU tensors that pass for a GPU's."""

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fake_driver import FakeDriver
from host_tensors import HostTensors
from lngen.aot.build import Built, build

VARIANT = Path("build") / "torch-cuda"
D = 64
LAYER = f"d={D},dtype=f32"
LLAMA = f"d={D},dtype=bf16,casts=llama"
SPECS = [
    f"{graph}.{direction}:{keys}"
    for graph, keys in (
        ("layernorm", LAYER), ("rmsnorm", LLAMA), ("rmsnorm", f"d={D},dtype=bf16"),
        ("rmsnorm", f"d={D},dtype=f32,eps=run"),
    )
    for direction in ("fwd", "bwd")
]  # fmt: skip


def made(folder: Path, *specs: str, emit: str | None = "cubin,ptx", arch: str = "sm_90") -> Built:
    """A package, by default of all specs, with PTX for the fake GPU."""
    return build(specs or SPECS, folder, arch=arch, emit=emit, layout="hf-kernel")


def loaded(variant: Path) -> ModuleType:
    """The module of a variant, under the name in its metadata."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, module: ModuleType, pack: Path) -> FakeDriver:
    """A GPU on which the package's kernels run; CPU tensors are its memory, for this package alone."""
    gpu = FakeDriver(version=13050)
    gpu.knows_pack(pack)
    own = f"{module.__name__}._lngen.launch"
    monkeypatch.setattr(sys.modules[f"{own}.driver"], "library", lambda: gpu)
    monkeypatch.setitem(sys.modules[f"{own}.arrays"]._BY_TYPE, torch.Tensor, HostTensors(gpu))
    assert gpu.cuInit(0) == 0
    return gpu


def seen_on(module: ModuleType) -> list[torch.Tensor]:
    """The tensors that the fake GPU of a package keeps alive."""
    seen: list[torch.Tensor] = sys.modules[f"{module.__name__}._lngen.launch.arrays"]._BY_TYPE[torch.Tensor].seen
    return seen


def taken_by(layer: type[Any], model: torch.nn.Module) -> None:
    """Gives a model's layer the forward of a package's, if the rules of ``kernels`` for layers allow it."""
    assert issubclass(layer, torch.nn.Module)
    assert layer.__init__ is torch.nn.Module.__init__
    own = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(torch.nn.Module)}
    assert own <= {"can_torch_compile", "has_backward"}
    mine, theirs = (inspect.signature(c.forward).parameters for c in (layer, type(model)))
    assert [p.kind for p in mine.values()] == [p.kind for p in theirs.values()]
    model.forward = layer.forward.__get__(model)
