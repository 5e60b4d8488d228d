"""If these fail, a call does not pass the eps it is given, or compiles and checks again for another one."""

from typing import Any

import numpy as np
import pytest

import lngen
from fake_arrays import FakeArray
from fake_gpu import FakeGpu
from lngen import D, M
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.spec import parse_spec
from lngen.launch.kernels import Loaded
from lngen.launch.signature import finite
from lngen.proof.check.inputs import mismatches, random_inputs

WIDTH = 64


# ---- NumPy ----


def test_saved_has_the_eps_that_backward_takes() -> None:
    norm = lngen.compile("layernorm", d=WIDTH, eps="run", save="none")
    inputs = random_inputs(norm.spec(), 3, eps=0.25)
    _, saved = norm.forward(*(inputs[v.name] for v in norm.spec().graph().tensors), eps=0.25)
    assert saved.eps == 0.25
    assert "; eps=0.25; " in repr(saved)


def shifted(b: GraphBuilder) -> None:
    """y stands for x: to rebuild it, backward subtracts eps."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    b.output("y", x.sigmoid() * gamma + b.eps())


def test_a_row_that_is_rebuilt_with_eps() -> None:
    results = []
    for eps in ("run", 0.5):
        norm = lngen.compile(shifted, d=WIDTH, eps=eps, save="y")
        x, gamma = (np.linspace(1, 2, n, dtype="f4").reshape(-1, WIDTH) for n in (2 * WIDTH, WIDTH))
        y, saved = norm.forward(x, gamma[0], **({"eps": 0.5} if eps == "run" else {}))
        results.append(norm.backward(y, saved))
    assert "eps" in [v.name for v in lngen.compile(shifted, d=WIDTH, eps="run", save="y").spec("bwd").graph().by_value]
    assert not mismatches(*(dict(zip(("dx", "dgamma"), r, strict=True)) for r in results))


# ---- numbers, and inputs of the same name ----


def test_zero_has_no_sign() -> None:
    assert np.copysign(1, finite(-0.0)) == 1


def named_eps(b: GraphBuilder) -> None:
    b.output("y", b.input("x", M, D) * b.input("eps", D))


def test_an_input_called_eps_is_an_input_as_before() -> None:
    y, _ = lngen.compile(named_eps, d=WIDTH).forward(np.ones((2, WIDTH), "f4"), eps=np.full(WIDTH, 3, "f4"))
    assert (y == 3).all()


# ---- a GPU that writes down what it is asked ----


def on_gpu(gpu: FakeGpu, norm: Any, rows: int = 5) -> list[FakeArray]:
    spec = norm.spec()
    return [gpu.array(str(v.type.dtype), *v.type.shape(rows, spec.d)) for v in spec.graph().tensors]


def test_another_eps_compiles_nothing_and_makes_no_recipe(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = lngen.compile("rmsnorm", d=WIDTH, eps="run")
    arrays = on_gpu(gpu, norm)
    norm.forward(*arrays, eps=1.0)
    loaded = gpu.calls.count("cuModuleLoadDataEx")
    monkeypatch.setattr(type(norm._forward), "recipe", lambda *args: pytest.fail("a recipe is made"))
    monkeypatch.setattr(Loaded, "bind", lambda *args: pytest.fail("kernels are bound"))
    for eps in (2.0, 0.5, 2.0):
        norm.forward(*arrays, eps=eps)
    assert [launched.values["eps"] for launched in gpu.launched] == [0x3F800000, 0x40000000, 0x3F000000, 0x40000000]
    assert gpu.calls.count("cuModuleLoadDataEx") == loaded


def test_a_launch_without_its_number_computes_nan(gpu: FakeGpu) -> None:
    """And not what an eps of 0 would give."""
    norm = lngen.compile("rmsnorm", d=WIDTH, eps="run")
    launcher = norm._forward.launcher(0)
    launcher.bind(3, dict.fromkeys(launcher.tensors, WIDTH))(range(len(launcher.tensors)), 0, 0)
    (launched,) = gpu.launched
    assert np.isnan(np.array(launched.values["eps"] & 0xFFFFFFFF, np.uint32).view(np.float32))


def test_two_backwards_of_one_norm_take_the_eps_of_their_own_forward(gpu: FakeGpu) -> None:
    norm = lngen.compile("rmsnorm", d=WIDTH, eps="run", save="none")
    arrays = on_gpu(gpu, norm)
    saved = [norm.forward(*arrays, eps=eps)[1] for eps in (1.0, 2.0)]
    gpu.launched.clear()
    for one in (*saved, saved[0]):
        norm.backward(arrays[0], one)
    passed = [launched.values["eps"] for launched in gpu.launched if "eps" in launched.values]
    assert passed == [0x3F800000, 0x40000000, 0x3F800000]


def test_a_spec_of_a_norm_has_no_number() -> None:
    norm = lngen.compile("layernorm", d=WIDTH, eps="run")
    assert norm.spec() == parse_spec("layernorm.fwd:d=64,eps=run")
    assert norm.spec("bwd").graph().by_value == ()
