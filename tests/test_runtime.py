"""lngen.compile without a GPU: NumPy arrays run the interpreter; every wrong array gets its sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lngen.runtime as runtime
from lngen.errors import ArrayError, MissingError, ScheduleError, SpecError
from lngen.graphs import Definition
from lngen.interpret import interpret
from lngen.ir import F32, D, M, Type, Value
from lngen.runtime import launch
from lngen.runtime.arrays import Layout, library_of
from lngen.runtime.shapes import check_layout, row_stride
from test_passes import gated

X, GAMMA, MEAN = (
    Value("x", Type(F32, (M, D))),
    Value("gamma", Type(F32, (D,))),
    Value("mean", Type(F32, (M,))),
)


@pytest.fixture
def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((2, 3, 64), (64,), (64,)))


def test_forward_and_backward_are_the_interpreter(arrays: tuple[Any, Any, Any]) -> None:
    x, gamma, beta = arrays
    norm = runtime.compile("layernorm", d=64)
    y, saved = norm.forward(x, gamma, beta)
    want = interpret(norm.spec().graph(), {"x": x.reshape(6, 64), "gamma": gamma, "beta": beta})
    assert y.shape == x.shape
    assert y.tobytes() == want["y"].tobytes()
    assert saved["mean"].shape == (2, 3)
    dx, dgamma, dbeta = norm.backward(y, saved)
    assert dx.shape == x.shape
    assert dgamma.shape == dbeta.shape == (64,)
    assert dbeta.tobytes() != dgamma.tobytes()


def test_inputs_by_name(arrays: tuple[Any, Any, Any]) -> None:
    x, gamma, beta = arrays
    norm = runtime.compile("layernorm", d=64)
    assert norm.forward(x, beta=beta, gamma=gamma)[0].tobytes() == norm.forward(x, gamma, beta)[0].tobytes()


def test_out_is_written(arrays: tuple[Any, Any, Any]) -> None:
    x, gamma, beta = arrays
    norm = runtime.compile("layernorm", d=64)
    want, _ = norm.forward(x, gamma, beta)
    y = np.full_like(x, np.nan)
    got, _ = norm.forward(x, gamma, beta, out=y)
    assert got is y
    assert y.tobytes() == want.tobytes()


def test_options_reach_the_spec() -> None:
    norm = runtime.compile("rmsnorm", d=8, dtype="bf16", weight="f32", beta=True, wrt=("x",), save="none", eps=0.25)
    assert str(norm.spec()) == "rmsnorm.fwd:d=8,dtype=bf16,weight=f32,beta=yes,eps=0.25,save=none"
    assert str(norm.spec("bwd")).endswith("save=none,wrt=x")
    assert [v.name for v in norm.plan("bwd").outputs] == ["dx"]


def test_a_graph_of_ones_own(arrays: tuple[Any, Any, Any]) -> None:
    x, gamma, _ = arrays
    norm = runtime.compile(gated, d=64)
    y, saved = norm.forward(x, x, gamma)
    h = x.astype(np.float64) ** 2
    want = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * gamma
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    dx, dz, dgamma = norm.backward(y, saved)
    assert dx.tobytes() == dz.tobytes()  # both factors are x
    assert dgamma.shape == (64,)
    assert "__global__" in norm.source("bwd")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda x, g, b: (x, g), "expects the input 'beta', which is missing"),
        (lambda x, g, b: (x, g, b, b), "takes x, gamma, beta, each once; got 4 by position"),
        (
            lambda x, g, b: (x[..., :60], g, b),
            r"'x' is expected to have shape \(..., 64\), .*got \(2, 3, 60\)",
        ),
        (lambda x, g, b: (x, g[:3], b), r"'gamma' is expected to have shape \(64,\), got \(3,\)"),
        (lambda x, g, b: (x.astype(np.float64), g, b), "'x' is expected to be f32, got float64; cast it"),
        (
            lambda x, g, b: (x, [1.0], b),
            "'gamma' is expected to be a NumPy array like the first input, got builtins.list",
        ),
        (lambda x, g, b: (3.0, g, b), r"'x' is expected to be an array .*got float"),
    ],
)
def test_wrong_inputs(arrays: tuple[Any, Any, Any], inputs: Any, message: str) -> None:
    with pytest.raises(ArrayError, match=message):
        runtime.compile("layernorm", d=64).forward(*inputs(*arrays))


def test_wrong_out(arrays: tuple[Any, Any, Any]) -> None:
    norm = runtime.compile("layernorm", d=64)
    with pytest.raises(ArrayError, match=r"out= is expected to be one array or 3 \(y, mean, rstd\), got 2"):
        norm.forward(*arrays, out=(arrays[0], arrays[0]))
    with pytest.raises(ArrayError, match="'y' is expected to be f32, got float64"):
        norm.forward(*arrays, out=arrays[0].astype(np.float64))


def test_wrong_name_in_keywords(arrays: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ArrayError, match="takes x, gamma, beta, each once; got 1 by position, weight"):
        runtime.compile("layernorm", d=64).forward(arrays[0], weight=arrays[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": "layernrom", "d": 4}, "There is no graph 'layernrom', expected one of layernorm, rmsnorm"),
        ({"graph": "layernorm", "d": 0}, "'d' is expected to be a whole number from 1"),
        ({"graph": "layernorm", "d": 4, "epss": 1.0}, "there is no key 'epss'.*did you mean 'eps'"),
        (
            {"graph": "layernorm", "d": 4, "schedule": {"forward": ""}},
            "schedule= takes the directions fwd and bwd",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        runtime.compile(**options)


def test_wrong_direction() -> None:
    with pytest.raises(SpecError, match="There is no direction 'back', expected fwd or bwd"):
        runtime.compile("layernorm", d=4).source("back")


def test_an_illegal_schedule_names_its_rule() -> None:
    norm = runtime.compile("layernorm", d=64, schedule={"fwd": "threads=48"})
    with pytest.raises(ScheduleError, match="threads is a power of two, got 48"):
        norm.source()


def test_a_graph_without_a_result() -> None:
    with pytest.raises(SpecError, match=r"graph 'empty' has no result; call b.output"):
        runtime.compile(Definition("empty", lambda b: None), d=4)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_count", lambda: 0)
    with pytest.raises(MissingError, match="GPU 0 is expected, but 0 are found; NumPy arrays run the interpreter"):
        runtime.compile("layernorm", d=64).warmup()


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    with pytest.raises(MissingError, match=r"needs CuPy; install it with: pip install \"lngen\[cuda13\]\""):
        launch.driver()


# ---- layouts, as a GPU array would have them ----


def layout(shape: tuple[int, ...], strides: tuple[int, ...], device: int = 0) -> Layout:
    return ("float32", shape, strides, device)


@pytest.mark.parametrize(
    ("value", "shape", "strides", "expected"),
    [
        (X, (5, 8), (8, 1), 8),
        (X, (5, 8), (24, 1), 24),
        (X, (2, 5, 8), (80, 16, 1), 16),
        (X, (2, 1, 8), (16, 999, 1), 16),
        (X, (1, 8), (999, 1), 8),
        (X, (5, 1), (3, 7), 3),
        (X, (0, 8), (8, 1), 8),
        (X, (5, 8), (0, 1), 0),
        (MEAN, (5,), (1,), 1),
        (MEAN, (2, 5), (5, 1), 1),
        (GAMMA, (8,), (1,), 8),
    ],
)
def test_row_stride(value: Value, shape: tuple[int, ...], strides: tuple[int, ...], expected: int) -> None:
    assert row_stride(value, layout(shape, strides), written=False) == expected


@pytest.mark.parametrize(
    ("value", "shape", "strides", "written", "message"),
    [
        (X, (5, 8), (16, 2), False, "contiguous rows"),
        (X, (2, 5, 8), (100, 8, 1), False, "rows at one distance"),
        (X, (5, 8), (4, 1), True, "its rows overlap: row stride 4, row length 8"),
        (MEAN, (5,), (2,), False, "'mean' is expected to be contiguous"),
        (GAMMA, (8,), (2,), False, "contiguous rows"),
    ],
)
def test_wrong_strides(
    value: Value, shape: tuple[int, ...], strides: tuple[int, ...], written: bool, message: str
) -> None:
    with pytest.raises(ArrayError, match=message):
        row_stride(value, layout(shape, strides), written=written)


def test_wrong_device() -> None:
    with pytest.raises(ArrayError, match="'x' is expected on GPU 0, but lies on the CPU; move it there"):
        check_layout(X, layout((5, 8), (8, 1), -1), F32, (5,), 8, 0)
    with pytest.raises(ArrayError, match="'x' is expected on GPU 0, where the first input lies, got GPU 1"):
        check_layout(X, layout((5, 8), (8, 1), 1), F32, (5,), 8, 0)


def test_a_torch_tensor_on_the_cpu_is_told_to_move() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArrayError, match=r"'x' .*lies on the CPU; move it there, or pass NumPy arrays"):
        runtime.compile("layernorm", d=8).forward(*(torch.ones(s) for s in ((2, 8), (8,), (8,))))


def test_library_of_names_the_input() -> None:
    with pytest.raises(ArrayError, match=r"'gamma' is expected to be an array .*got str"):
        library_of("text", "gamma")
