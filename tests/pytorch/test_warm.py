"""If these fail, kernels that were to be compiled while a model loads are compiled at a call, or an error is lost."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

import lngen  # noqa: E402
import lngen.torch as L  # noqa: E402
from direct_tensors import forget, map_direct_tensors  # noqa: E402
from host_tensors import pass_for_gpu_tensors  # noqa: E402
from lngen.errors import CompileError, LngenError  # noqa: E402
from lngen.launch import direct  # noqa: E402
from lngen.launch.runtime import warming  # noqa: E402
from lngen.launch.runtime.launcher import live_gpu  # noqa: E402
from lngen.torch import patching  # noqa: E402
from lngen.torch.variants import Variant  # noqa: E402
from remembering import Remembering, remembering  # noqa: E402

D = 64


class Held(Executor):
    """Jobs that wait until a test runs them."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def submit(self, job: Any, /, *given: Any, **named: Any) -> Any:
        self.jobs.append(lambda: job(*given, **named))
        return Future()

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Remembering:
    """A GPU whose tensors are those of the CPU, for the direct way."""
    found = remembering(monkeypatch, tmp_path / "cache")
    map_direct_tensors(monkeypatch, pass_for_gpu_tensors(monkeypatch, found.gpu))
    monkeypatch.setattr(direct, "on_gpu", lambda tensor: True)
    forget()
    return found


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(warming, "_background", lambda: held)
    return held


def patched(model: Any, *, warm: bool = True) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*on the CPU, where parameters")
        L.patch(model, warm=warm)
    return model


def step(model: Any) -> list[Any]:
    """Results and gradients of a call."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *filter(needed, model.parameters())])]


def needed(parameter: Any) -> bool:
    return bool(parameter.requires_grad)


def frozen(module: Any) -> Any:
    return module.requires_grad_(False)


class Gate(torch.nn.Module):
    """One that was patched before: to try its norm would compile kernels of all gates on this GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(D, eps=1e-6)
        exact = ((torch.float32, torch.float32),)
        gated = Variant("gated_rms_norm", "eps", act="silu", taken=("x", "gate"), pairs=exact)
        self.norm.__class__ = patching._subclass(torch.nn.RMSNorm, gated)

    def forward(self, x: Any) -> Any:
        return self.norm(x, x.flip(0))


class Heads(torch.nn.Module):
    """One of two heads, with weights of their own, that was patched before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm((2, D // 2))
        of_heads = Variant("head_layer_norm", "eps", pairs=((torch.float32, torch.float32),))
        self.norm.__class__ = patching._subclass(torch.nn.LayerNorm, of_heads)

    def forward(self, x: Any) -> Any:
        return self.norm(x.unflatten(-1, (2, -1))).flatten(-2)


MODELS: dict[str, Callable[[], Any]] = {
    "heads": Heads,
    "alike": lambda: torch.nn.Sequential(torch.nn.RMSNorm(D, eps=1e-6), torch.nn.RMSNorm(D, eps=1e-6)),
    "bfloat16": lambda: torch.nn.RMSNorm(D, eps=1e-6, dtype=torch.bfloat16),
    "gate": Gate,
    "frozen": lambda: frozen(torch.nn.LayerNorm(D)),
    "no bias": lambda: torch.nn.LayerNorm(D, bias=False),
    "no weights": lambda: torch.nn.LayerNorm(D, elementwise_affine=False),
    "two dimensions": lambda: torch.nn.Sequential(torch.nn.Unflatten(1, (8, 8)), torch.nn.LayerNorm((8, 8))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_finds_all_that_it_takes(process: Remembering, background: Held, name: str) -> None:
    """What is alike is compiled once."""
    model = patched(MODELS[name]())
    assert process.compiled == [], "nobody waits"
    background.run()
    count = len({*process.compiled})
    process.forget()
    step(model)
    assert process.idle
    assert count >= 3, "forward, forward without statistics, and backward"


def test_an_error_of_the_background_is_that_of_the_call(process: Remembering, background: Held) -> None:
    def refuse(name: str) -> None:
        raise CompileError(f"NVRTC refused {name}")

    process.before = refuse
    model = patched(torch.nn.LayerNorm(D))
    background.run()
    with pytest.raises(LngenError, match=r"^NVRTC refused layernorm_fwd__f32_d64"):
        step(model)
    process.before = lambda name: None
    assert len(step(model)) == 4


def test_kernels_are_loaded_beside_a_capture(process: Remembering, background: Held) -> None:
    """Of another thread; this one's own stays whole."""
    model = patched(torch.nn.LayerNorm(D))
    process.gpu.captures[7] = 1
    background.run()
    step(model)
    process.gpu.captures[7] = 0


def test_without_a_gpu_nothing_begins(monkeypatch: pytest.MonkeyPatch, background: Held) -> None:
    monkeypatch.setattr("lngen.torch.warm_norms.device_count", lambda: 0)
    patched(torch.nn.LayerNorm(D))
    assert background.jobs == []


def test_the_end_of_the_program_waits_for_nothing_that_has_not_begun(
    process: Remembering, background: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(torch.nn.LayerNorm(D))
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    background.run()
    assert process.idle


def test_a_call_waits_for_its_own_kernels_alone(process: Remembering) -> None:
    """While a warm-up compiles those for many rows, which end later."""
    norm, x = lngen.compile("softmax", d=D), torch.ones(5, D)
    call = lngen.compile("softmax", d=D)._forward
    few, many = (call.kernels("sm_90", rows=rows, gpu=live_gpu(0)).plan.name for rows in (5, 10**6))
    assert few != many
    process.forget()
    begun, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == f"{many}.cu":
            begun.set()
            assert go_on.wait(60)

    process.before = hold
    thread = threading.Thread(target=norm.warmup)
    thread.start()
    assert begun.wait(60)
    y, saved = norm.forward(x)
    assert f"{many}.cu" not in process.compiled
    go_on.set()
    thread.join()
    assert f"{many}.cu" in process.compiled
    process.forget()
    norm.backward(y, saved)
    assert process.idle
