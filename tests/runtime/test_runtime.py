"""lngen.compile without a GPU: NumPy arrays run the interpreter; every wrong array gets its sentence."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lngen
import lngen.runtime as runtime
from fake_gpu import FakeGpu
from lngen.compile import KernelSet
from lngen.devices import default_device, described
from lngen.errors import ArrayError, LngenError, MissingError, ScheduleError, SpecError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import BF16, F16, F32, D, M, Type, Value
from lngen.ir.numerics import NUMPY_DTYPE
from lngen.lower import Plan, lower
from lngen.runtime import call as calls
from lngen.runtime import driver, launch
from lngen.runtime.array_rules import check_layout, row_stride
from lngen.runtime.arrays import CuPy, Layout, library_of
from lngen.schedule import Schedule, parse_schedule
from lngen.spec import parse_spec
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


def test_what_numpy_derives_from_an_array(arrays: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """A memmap, read or written; other strides; the bits are the same."""
    x, gamma, beta = arrays
    norm = runtime.compile("layernorm", d=64)
    want, _ = norm.forward(x, gamma, beta)
    x.tofile(tmp_path / "x")
    stored = np.memmap(tmp_path / "x", np.float32, "r", shape=x.shape)
    y = np.memmap(tmp_path / "y", np.float32, "w+", shape=x.shape)
    got, saved = norm.forward(stored, gamma, beta, out=y)
    assert got is y
    assert np.fromfile(tmp_path / "y", np.float32).tobytes() == want.tobytes()
    assert norm.backward(y, saved)[0].shape == x.shape
    backwards = x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]
    for same in (np.asfortranarray(x), backwards, x.view(np.recarray)):
        assert norm.forward(same, gamma[::-1].copy()[::-1], beta)[0].tobytes() == want.tobytes()


def test_a_wrong_cotangent_is_named(arrays: tuple[Any, Any, Any]) -> None:
    """Not what forward has saved, though it comes first."""
    norm = runtime.compile("layernorm", d=64)
    y, saved = norm.forward(*arrays)
    with pytest.raises(ArrayError, match=r"'dy' is expected to have shape \(2, 3, 64\), got \(2, 64\)"):
        norm.backward(y[:, 0], saved)
    with pytest.raises(ArrayError, match=r"'dy' is expected to have shape \(2, 3, 64\), got \(\)"):
        norm.backward(np.zeros((), np.float32), saved)
    with pytest.raises(ArrayError, match=r"'dy' is expected to be a NumPy array like 'x', got builtins.float"):
        norm.backward(1.5, saved)
    shifted = runtime.compile(only_statistics, d=64)
    y, saved = shifted.forward(arrays[0])
    with pytest.raises(ArrayError, match=r"'dy' is expected to have shape \(2, 3, 64\), got \(5, 64\)"):
        shifted.backward(np.ones((5, 64), np.float32), saved)


def test_a_backward_of_nothing_but_the_cotangent(arrays: tuple[Any, Any, Any]) -> None:
    def scaled(b: GraphBuilder) -> None:
        b.output("y", b.mul("scaled", b.input("x", M, D), b.input("gamma", D)))

    x, gamma, _ = arrays
    norm = runtime.compile(scaled, d=64, wrt="x")
    y, saved = norm.forward(x, gamma)
    assert norm.backward(y, saved)[0].tobytes() == (y * gamma).tobytes()


def only_statistics(b: GraphBuilder) -> None:
    """y = mean(x)^2 at every column: backward needs the mean, and no [M, D] array but dy."""
    x = b.input("x", M, D)
    mean = b.statistic(b.reduce_mean("mean", x, axis=D))
    b.output("y", b.add("sum", b.sub("zero", x, x), b.mul("square", mean, mean)))


def test_what_was_saved(arrays: tuple[Any, Any, Any]) -> None:
    norm = runtime.compile("layernorm", d=64)
    y, saved = norm.forward(*arrays)
    with pytest.raises(ArrayError, match="forward saved x, gamma, beta, y, mean, rstd, and no 'foo'"):
        saved["foo"]
    for wrong in (arrays, None, {"x": arrays[0]}):
        with pytest.raises(ArrayError, match="saved is expected to be what forward returned beside y, got"):
            norm.backward(y, wrong)


def test_what_a_norm_of_another_spec_saved_is_refused(arrays: tuple[Any, Any, Any]) -> None:
    """All that rmsnorm needs is in what layernorm saved, of another row; the dtypes of rstd are the same."""
    y, saved = runtime.compile("layernorm", d=64).forward(*arrays)
    for graph, keys in (
        ("rmsnorm", {}),
        ("layernorm", {"eps": 1e-6}),
        ("layernorm", {"zero_centred": True}),
        ("layernorm", {"save": "none"}),
        ("layernorm", {"out": "bf16"}),
        (own_layernorm, {}),
    ):
        norm = runtime.compile(graph, d=64, **keys)
        with pytest.raises(ArrayError) as error:
            norm.backward(y, saved)
        assert str(error.value) == (
            f"saved is expected to be what the forward of '{norm.spec()}' returned beside y, got that of "
            "'layernorm.fwd:d=64,dtype=f32'; pass it to the backward of its own norm."
        )


def own_layernorm(b: GraphBuilder) -> None:
    """Another graph with the names of layernorm."""
    x, gamma, beta = b.input("x", M, D), b.input("gamma", D), b.input("beta", D)
    mean, rstd = b.reduce_mean("mean", x, axis=D), b.reduce_max("rstd", x, axis=D)
    b.output("y", b.statistic(rstd) * (x - b.statistic(mean)) * gamma + beta)


def test_what_a_norm_of_the_same_forward_saved_is_accepted(arrays: tuple[Any, Any, Any]) -> None:
    """Keys of backward alone, and schedules, change nothing that forward saves; nor does another function object."""
    y, saved = runtime.compile("layernorm", d=64).forward(*arrays)
    (dx, *_) = runtime.compile("layernorm", d=64).backward(y, saved)
    others = runtime.compile("layernorm", d=64, wrt="x", blocks=2, grad="f32", schedule={"bwd": "threads=64"})
    assert others.backward(y, saved)[0].tobytes() == dx.tobytes()

    def made() -> Any:
        return Definition("own", lambda b: own_layernorm(b))

    y, saved = runtime.compile(made(), d=64).forward(*arrays)
    assert runtime.compile(made(), d=64).backward(y, saved)[0].shape == y.shape


def test_the_text_of_what_was_saved(arrays: tuple[Any, Any, Any]) -> None:
    """Names, dtypes and shapes; no numbers."""
    saved = runtime.compile("layernorm", d=64).forward(*arrays)[1]
    assert repr(saved) == (
        "<Saved by layernorm.fwd:d=64,dtype=f32: x float32[2, 3, 64], gamma float32[64], beta float32[64], "
        "y float32[2, 3, 64], mean float32[2, 3], rstd float32[2, 3]>"
    )
    norm = runtime.compile("rmsnorm", d=64)
    x = arrays[0].copy()
    saved = norm.forward(x, arrays[1], out=x)[1]
    assert repr(saved).endswith("rstd float32[2, 3]; overwritten: x>")
    bare = replace(saved, names=("x",), arrays=(SimpleNamespace(),), overwritten=())
    assert repr(bare) == "<Saved by rmsnorm.fwd:d=64,dtype=f32: x types.SimpleNamespace>"


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
        (
            lambda x, g, b: (x, g),
            r"the input 'beta', which is missing; for a norm without it, compile with beta=False \(beta=no in a spec\)",
        ),
        (
            lambda x, g, b: (x, None, b),
            "the input 'gamma', which is missing; for a norm without it, compile with gamma",
        ),
        (lambda x, g, b: (None, g, b), "'x' is expected to be an array .*got NoneType"),
        (lambda x, g, b: (np.ma.masked_less(x, 0), g, b), r"'x' is a masked array, .* pass array.filled\(\)"),
        (lambda x, g, b: (x.astype(">f4"), g, b), "'x' is expected to be f32, got >f4; cast it"),
        (lambda x, g, b: (x.astype(object), g, b), "'x' is expected to be f32, got object; cast it"),
        (lambda x, g, b: (x[0, 0, 0, ...], g, b), r"'x' is expected to have shape \(..., 64\), .*got \(\)"),
        (lambda x, g, b: (x, g, b, b), "takes x, gamma, beta, each once; got 4 by position"),
        (
            lambda x, g, b: (x[..., :60], g, b),
            r"'x' is expected to have shape \(..., 64\), .*got \(2, 3, 60\)",
        ),
        (lambda x, g, b: (x, g[:3], b), r"'gamma' is expected to have shape \(64,\), got \(3,\)"),
        (lambda x, g, b: (x.astype(np.float64), g, b), "'x' is expected to be f32, got float64; cast it"),
        (
            lambda x, g, b: (x, [1.0], b),
            "'gamma' is expected to be a NumPy array like 'x', got builtins.list",
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
        (
            {"graph": "layernorm", "d": 4, "schedule": "threads=32"},
            'schedule= is expected to be a text for each direction, such as {"fwd": "threads=256", "bwd": ""}, got',
        ),
        ({"graph": "layernorm", "d": 4, "schedule": {"fwd": 32}}, "schedule= is expected to be a text for each"),
        ({"graph": "layernorm", "d": 4, "lock": 5}, "lock= is expected to be the path of a lock file, got int"),
        (
            {"graph": "layernorm", "d": 4, "gamma": None},
            "'gamma' is expected to be yes or no, got None; gamma=no leaves",
        ),
        (
            {"graph": "layernorm", "d": 4, "gamma": np.ones(4)},
            r"there is no gamma '\[1. 1. 1. 1.\]', expected one of yes",
        ),
        ({"graph": "layernorm", "d": 4, "dtype": int}, "there is no dtype '<class 'int'>', expected one of f16, bf16"),
        ({"graph": "layernorm", "d": float("inf")}, "'d' is expected to be a whole number from 1 to .*, got 'inf'"),
        ({"graph": "layernorm", "d": "9" * 400}, r"d=9+\.\.\..*got '9{197}\.\.\.'"),
        ({"graph": "layernorm", "d": 4, "eps": 10**400}, "'eps' is expected to be a number from 0 to 1"),
        ({"graph": "layernorm", "d": 4, "wrt": ()}, "'wrt' is expected to be one of x, gamma, beta at least, got none"),
        ({"graph": "layernorm", "d": 4, "wrt": 5}, "there is no wrt '5', expected one of x, gamma, beta"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        runtime.compile(**options)


@pytest.mark.parametrize(
    "dtype", ["f16", "float16", np.float16, np.dtype("float16"), SimpleNamespace(name="float16"), F16]
)
def test_a_dtype_by_any_name(dtype: Any) -> None:
    norm = runtime.compile("layernorm", d=4, dtype="bf16", weight=dtype, out="bfloat16")
    assert str(norm.spec()) == "layernorm.fwd:d=4,dtype=bf16,weight=f16"


def test_the_dtypes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    norm = runtime.compile("layernorm", d=4, dtype=torch.bfloat16, weight=torch.float32)
    assert str(norm.spec()) == "layernorm.fwd:d=4,dtype=bf16,weight=f32"


def test_numbers_of_numpy() -> None:
    assert runtime.compile("layernorm", d=np.int64(4096)).spec() == runtime.compile("layernorm", d=4096).spec()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n: n.plan(arch=90), "arch= is expected to be an arch such as sm_90, got int"),
        (lambda n: n.source(rows="many"), "rows= is expected to be a whole number from 0 on, got many"),
        (lambda n: n.source(rows=-1), "rows= is expected to be a whole number from 0 on, got -1"),
        (lambda n: n.warmup(device=1.5), "device= is expected to be a whole number from 0 on, got 1.5"),
    ],
)
def test_wrong_numbers(call: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        call(runtime.compile("layernorm", d=4))


def test_no_rows_are_a_number_of_rows() -> None:
    norm = runtime.compile("layernorm", d=4)
    assert norm.plan(rows=0) == norm.plan(rows=np.int64(1))


def test_a_device_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_count", lambda: 1)
    for device in (-1, 1):
        with pytest.raises(MissingError, match=f"GPU {device} is expected, but 1 are found"):
            launch.device_arch(device)


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


def scaled(b: GraphBuilder, by: float = 1.0) -> None:
    """A multiple of x."""
    b.output("y", b.mul("h", b.input("x", M, D), b.number("factor", by)))


class Scaled:
    """A description that is an object; one that cannot be hashed."""

    by = 4.0

    def __call__(self, b: GraphBuilder) -> None:
        scaled(b, self.by)

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize(
    ("graph", "name", "factor"),
    [
        (scaled, "scaled", 1),
        (partial(partial(scaled), by=2.0), "scaled", 2),
        (Definition("four", Scaled()), "four", 4),
        (Definition("three", lambda b: scaled(b, 3.0)), "three", 3),
    ],
)
def test_what_may_describe_a_graph(graph: Any, name: str, factor: float) -> None:
    norm = runtime.compile(graph, d=4)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y, saved = norm.forward(x)
    assert y.tolist() == (factor * x).tolist()
    assert norm.backward(np.ones_like(x), saved)[0].tolist() == [[factor] * 4] * 2
    assert norm.spec().definition.name == name


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda b: scaled(b), "got '<lambda>'; name it: lngen.Definition(name, describe)."),
        (Scaled(), "needs a name for a test_runtime.Scaled: use lngen.Definition(name, describe)."),
        (
            parse_spec("layernorm.fwd:d=4"),
            "a function that describes one, or a Definition; got a lngen.spec.spec.Spec. The function gets",
        ),
        (None, "or a Definition; got a builtins.NoneType."),
    ],
)
def test_what_does_not_describe_a_graph(graph: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        runtime.compile(graph, d=4)
    if not callable(graph):
        with pytest.raises(SpecError, match=r"graph 'own' is expected to be described by a function, got "):
            Definition("own", graph)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_count", lambda: 0)
    with pytest.raises(MissingError, match="GPU 0 is expected, but 0 are found; NumPy arrays run the interpreter"):
        runtime.compile("layernorm", d=64).warmup()


def test_a_warm_up_is_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.runtime.call.live_gpu", lambda device: default_device())
    norm = runtime.compile("layernorm", d=4096, dtype="bf16")
    asked: list[int | None] = []
    for call in (norm._forward, norm._backward):
        monkeypatch.setattr(call, "launcher", lambda device, rows: asked.append(rows))
    norm.warmup(0, rows=7)
    assert asked == [7, 7]
    norm.warmup()
    assert asked[2:] == [132, 264, 528, 1056, 2112, 4224, 33792, None, 66, 1056, 4224, 16896, None]


def test_gpus_of_one_arch_have_schedules_of_their_own() -> None:
    """Also where a number of rows is of the same workload class on both."""
    call = runtime.compile("layernorm", d=8192, dtype="bf16")._forward
    whole = next(device for device in described().values() if device.arch == "sm_80")
    half = whole.completed({"multiProcessorCount": whole.multiprocessors // 2})
    differ = 0
    for rows in (16, 32, 64, 128, 256, 512, 1024, 2048):
        chosen = [call.kernels("sm_80", rows=rows, gpu=gpu).plan.schedule for gpu in (whole, half)]
        assert chosen == [call.compilation.schedule("sm_80", rows=rows, device=gpu) for gpu in (whole, half)]
        differ += chosen[0] != chosen[1]
    assert differ > 0


def test_a_plan_for_few_rows() -> None:
    norm = runtime.compile("rmsnorm", d=1024, dtype="bf16")
    few, many = norm.plan(rows=1), norm.plan()
    assert few.schedule.form == "registers"
    assert few != many
    assert norm.plan(rows=2) == few
    assert norm.plan(rows=10**6) == many
    assert "__launch_bounds__(128, " in norm.source(rows=1)
    back = [norm.plan("bwd", rows=rows) for rows in (1, None)]
    assert back[0].schedule != back[1].schedule
    assert back[0].workspace == back[1].workspace, "the same partial rows, so the same bits"


# ---- the driver, without one ----


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver.library.cache_clear()
    with pytest.raises(MissingError, match=r"needs an NVIDIA driver, and libcuda.so.1 cannot be loaded \(libcuda"):
        driver.library()


class FakeDriver:
    """Notes what it is asked; ``status`` is its answer."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launches: list[tuple[object, ...]] = []
        self.attributes: list[tuple[int, int]] = []

    def cuLaunchKernelEx(self, config: Any, function: ctypes.c_void_p, arguments: object, extra: None) -> int:
        c = ctypes.cast(config, ctypes.POINTER(driver._Config)).contents
        listed = ctypes.cast(c.attributes, ctypes.POINTER(driver._Attribute))
        attributes = {listed[n].id: tuple(listed[n].value[:3]) for n in range(c.count)}
        self.launches.append((tuple(c.grid), tuple(c.block), c.shared, c.stream, attributes, function.value))
        return self.status

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return self.status

    def cuStreamGetCaptureInfo_v2(self, stream: ctypes.c_void_p, status: Any, number: Any, *others: None) -> int:
        """Streams of 64 and more are being captured, their number is the capture's; 63 has failed."""
        assert others == (None, None, None)
        at = stream.value or 0
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = int(at >= 64)
        ctypes.cast(number, ctypes.POINTER(ctypes.c_uint64))[0] = at
        return 901 if at == 63 else self.status

    def cuGetErrorName(self, status: int, text: Any) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"
        return 0


def test_the_structures_are_those_of_the_driver() -> None:
    """cuda.h: 8 bytes and a union of 64; three dimensions twice, then pointers from a multiple of 8 on."""
    assert ctypes.sizeof(driver._Attribute) == 72
    assert driver._Attribute.value.offset == 8
    assert ctypes.sizeof(driver._Config) == 56
    assert (driver._Config.shared.offset, driver._Config.stream.offset, driver._Config.attributes.offset) == (
        24,
        32,
        40,
    )


def test_a_launch_asks_for_what_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    arguments = (ctypes.c_void_p * 1)()
    made = driver.Launch(77, (6, 2), 96, 1024, {driver.CLUSTER_DIMENSION: 4, driver.COOPERATIVE: 1}, arguments, "k")
    made(123)
    made(0)
    attributes = {4: (4, 1, 1), 2: (1, 1, 1)}
    assert fake.launches[0] == ((6, 2, 1), (96, 1, 1), 1024, 123, attributes, 77)
    assert fake.launches[1][3] is None
    driver.Launch(77, (1, 1), 32, 0, {}, arguments, "k")(5)
    assert fake.launches[2][4] == {}


def test_what_the_driver_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(status=1)
    monkeypatch.setattr(driver, "library", lambda: fake)
    with pytest.raises(LngenError, match=r"refuses the launch of 'k': CUDA_ERROR_INVALID_VALUE \(1\)\.$"):
        driver.Launch(77, (1, 1), 32, 0, {}, (ctypes.c_void_p * 1)(), "k")(5)
    with pytest.raises(LngenError, match="cannot give a block 99 bytes of dynamic shared memory: CUDA_ERROR_INVALID"):
        driver.allow_shared(77, 99)
    with pytest.raises(LngenError, match="no clusters of 16 blocks: CUDA_ERROR_INVALID_VALUE"):
        driver.allow_cluster(77, 16)


def test_only_what_is_beyond_the_ordinary_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    driver.allow_shared(77, 0)
    driver.allow_cluster(77, 8)
    assert fake.attributes == []
    driver.allow_shared(77, 1000)
    driver.allow_cluster(77, 16)
    assert fake.attributes == [(8, 1000), (14, 1)]


def test_a_capture_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", FakeDriver)
    assert [driver.capture_of(stream) for stream in (0, 1, 2, 63, 64, 1 << 33)] == [0, 0, 0, 0, 64, 1 << 33]


@pytest.mark.parametrize("dependent", [False, True])
def test_the_arguments_and_attributes_of_a_plan_s_kernels(monkeypatch: pytest.MonkeyPatch, dependent: bool) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    text = "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cached_weights=yes,cluster=2,single_launch=yes"
    spec = parse_spec("layernorm.bwd:d=16384,dtype=bf16")
    plan = lower(spec, parse_schedule(text, Schedule("registers", 32, 1, 1)))
    (kernel,) = plan.kernels
    tensors = [v.name for v in (*plan.inputs, *plan.outputs)]
    offsets = plan.workspace_offsets(5)
    held = launch._Arguments(kernel, 7, 5, tensors, dict.fromkeys(tensors, 20000), offsets, 99328, dependent)
    held.launch(9)
    grid, block, shared, stream, attributes, _ = fake.launches[0]
    assert (grid, block, shared, stream) == ((120, 1, 1), (256, 1, 1), 99328, 9)
    wanted = {2: (1, 1, 1), 4: (2, 1, 1)} | ({6: (1, 1, 1)} if dependent else {})
    assert attributes == wanted
    kinds = [a.kind for a in kernel.arguments]
    assert held.values[0] == 5
    assert [held.values[n] for n, kind in enumerate(kinds) if kind == "stride"] == [20000] * kinds.count("stride")
    assert [kinds[n] for n, _ in held.buffers] == ["workspace"] * len(plan.workspace)
    assert {tensors[n] for _, n in held.tensors} == set(tensors)


def test_only_the_arrivals_are_zeroed() -> None:
    """At the start of the workspace, whatever the rows: one that has grown or shrunk keeps them where they are."""
    spec = parse_spec("layernorm.bwd:d=64,dtype=f32")
    text = "form=registers,threads=8,rows_per_block=64,vec=4,single_launch=yes"
    plan = lower(spec, parse_schedule(text, Schedule("registers", 32, 1, 1)))
    assert [b.name for b in plan.workspace if b.zeroed] == ["arrivals_"]
    assert {plan.workspace_offsets(rows)["arrivals_"] for rows in (0, 1, 7, 4096)} == {0}


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
    with pytest.raises(ArrayError, match="'x' is expected on GPU 0, where other arrays lie, got GPU 1"):
        check_layout(X, layout((5, 8), (8, 1), 1), F32, (5,), 8, 0)


def test_a_torch_tensor_on_the_cpu_is_told_to_move() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        ArrayError, match=r"'x' is expected on a GPU, but lies on the CPU; move it there, or pass NumPy"
    ):
        runtime.compile("layernorm", d=8).forward(*(torch.ones(s) for s in ((2, 8), (8,), (8,))))


def test_a_tensor_without_an_address() -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.ones(2, 8), torch.ones(8)
    for given, name in (((x.to_sparse(), weight, weight), "x"), ((x, weight.to_sparse(), weight), "gamma")):
        with pytest.raises(
            ArrayError, match=f"'{name}', of torch.Tensor, is not an array that can be used: Cannot access data"
        ):
            runtime.compile("layernorm", d=8).forward(*given)


def test_a_view_that_may_not_be_written() -> None:
    pytest.importorskip("cupy")
    interface = {"data": (1 << 20, True), "typestr": "<f4", "shape": (8,), "version": 3}
    with pytest.raises(ValueError, match="it is written to, but read-only"):
        CuPy().view(SimpleNamespace(__cuda_array_interface__=interface), written=True)


class Recorded(SimpleNamespace):
    """CuPy, as much of it as makes an array out of an interface; current stream 7."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        stream = SimpleNamespace(ptr=7, wait_event=lambda event: self.waited.append(event.ptr))
        runtime = SimpleNamespace(getDevice=lambda: 0, eventRecord=lambda event, on: self.waited.append((event, on)))
        self.cuda = SimpleNamespace(
            runtime=runtime, get_current_stream=lambda: stream, Event=lambda disable_timing: SimpleNamespace(ptr=9),
            UnownedMemory=lambda pointer, size, owner: (pointer, size), MemoryPointer=lambda memory, at: (*memory, at),
        )  # fmt: skip
        self.ndarray = type("ndarray", (), {"__init__": lambda array, *what: setattr(array, "what", what)})


@pytest.mark.parametrize(
    ("shape", "strides", "size"), [((3, 4), None, 24), ((3, 4), (20, 2), 48), ((0, 4), (8, 2), 2), ((4,), (0,), 2)]
)
@pytest.mark.parametrize(("stream", "waits"), [(None, []), (7, []), (1, [(9, 1), 9])])
def test_an_array_that_is_only_an_interface(
    monkeypatch: pytest.MonkeyPatch, shape: Any, strides: Any, size: int, stream: int | None, waits: list[Any]
) -> None:
    """The memory it spans; the current stream waits for another one that it names."""
    cupy = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    interface = {"data": (4096, False), "typestr": "<V2", "shape": shape, "strides": strides, "stream": stream}
    view = CuPy().view(SimpleNamespace(__cuda_array_interface__=interface), written=True)
    assert view.what == (shape, NUMPY_DTYPE[BF16], (4096, size, 0), strides)
    assert cupy.waited == waits


def test_strides_of_cupy_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Recorded())
    layout = np.dtype("float32"), (3, 8), (64, 4), 1
    assert CuPy().in_elements(layout) == (np.dtype("float32"), (3, 8), (16, 1), 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_an_input_that_is_none_on_a_gpu(gpu: FakeGpu) -> None:
    norm, x, weight = runtime.compile("layernorm", d=8), gpu.array("f32", 2, 8), gpu.array("f32", 8)
    for out in (None, x, (x, None, None)):
        with pytest.raises(ArrayError, match="expects the input 'gamma', which is missing; for a norm without it"):
            norm.forward(x, None, weight, out=out)
    assert gpu.launched == []


def test_a_wrong_cotangent_is_named_on_a_gpu(gpu: FakeGpu) -> None:
    for graph in (gated, only_statistics):
        norm = runtime.compile(graph, d=8)
        x, weight = gpu.array("f32", 2, 8), gpu.array("f32", 8)
        _, saved = norm.forward(*((x, x, weight) if graph is gated else (x,)))
        with pytest.raises(ArrayError, match=r"'dy' is expected to have shape \(2, 8\), got \(3, 8\)"):
            norm.backward(gpu.array("f32", 3, 8), saved)
        if graph is gated:
            with pytest.raises(ArrayError, match="'dy' is expected on GPU 0, where other arrays lie, got GPU 1"):
                norm.backward(replace(gpu.array("f32", 2, 8), device=1), saved)
            with pytest.raises(
                ArrayError, match="'dy' is expected to be an array of the same library as 'x', got numpy"
            ):
                norm.backward(np.ones((2, 8), np.float32), saved)


@pytest.mark.parametrize(
    ("stride", "shift", "vec"),
    [
        *((1024, shift, vec) for shift, vec in ((0, 8), (16, 8), (8, 4), (4, 2), (12, 2), (2, 1), (6, 1))),
        *((stride, 0, vec) for stride, vec in ((1032, 8), (1028, 4), (1026, 2), (1025, 1), (-1028, 4), (-1026, 2))),
        (1028, 4, 2),
        (1026, 8, 2),
    ],
)
@pytest.mark.parametrize("array", ["x", "y"])
def test_accesses_as_wide_as_arrays_allow(gpu: FakeGpu, stride: int, shift: int, vec: int, array: str) -> None:
    """16 bytes where every row of every array begins at a multiple of them, else as many as divide all."""
    norm = runtime.compile(
        "layernorm", d=1024, dtype="bf16", schedule={"fwd": "form=registers,threads=128,rows_per_block=1,vec=8"}
    )
    odd = gpu.array("bf16", 5, 1024, strides=(stride, 1), address=(1 << 40) + shift)
    even, weight = gpu.array("bf16", 5, 1024), gpu.array("bf16", 1024)
    x, y = (odd, even) if array == "x" else (even, odd)
    norm.forward(x, weight, weight, out=y)
    assert gpu.launched[-1].plan.schedule.vec == vec


@pytest.mark.parametrize(("shift", "vec"), [(0, 4), (16, 4), (8, 2), (4, 1)])
def test_accesses_as_wide_as_the_address_of_gamma_allows(gpu: FakeGpu, shift: int, vec: int) -> None:
    """x is of two bytes an element, gamma of four: 16 bytes hold half as many; [M] results do not count."""
    schedule = {"fwd": "form=registers,threads=128,rows_per_block=1,vec=4"}
    norm = runtime.compile("layernorm", d=1024, dtype="bf16", weight="f32", schedule=schedule)
    x, beta, mean = gpu.array("bf16", 5, 1024), gpu.array("f32", 1024), gpu.array("f32", 5, address=(1 << 41) + 4)
    norm.forward(x, gpu.array("f32", 1024, address=(1 << 40) + shift), beta, out=(None, mean, None))
    assert gpu.launched[-1].plan.schedule.vec == vec


@pytest.mark.parametrize(("stride", "vec"), [(1032, 8), (1028, 4), (1026, 2), (1025, 1)])
def test_rows_that_no_bulk_copy_fits(gpu: FakeGpu, stride: int, vec: int) -> None:
    schedule = {"fwd": "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=128"}
    norm = runtime.compile("layernorm", d=1024, dtype="bf16", schedule=schedule)
    weight = gpu.array("bf16", 1024)
    norm.forward(gpu.array("bf16", 5, 1024, strides=(stride, 1)), weight, weight)
    found = gpu.launched[-1].plan.schedule
    assert (found.form == "tma", found.vec) == (vec == 8, vec)


def test_library_of_names_the_input() -> None:
    with pytest.raises(ArrayError, match=r"'gamma' is expected to be an array .*got str"):
        library_of("text", "gamma")


# ---- calls that overlap ----


@pytest.mark.parametrize("keys", [{}, {"overlap": True}, {"overlap": False}])
def test_every_kernel_set_of_a_norm_is_loaded_for_calls_that_overlap_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, bool]
) -> None:
    """Those of forward, of backward and of a backward without one of the cotangents."""
    loaded: list[tuple[str, bool]] = []

    def load(plan: Plan, image: bytes, device: int, overlap: bool) -> Any:
        loaded.append((str(plan.spec), overlap))
        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(calls, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(calls, "live_gpu", lambda device: None)
    monkeypatch.setattr(calls, "Launcher", load)
    monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: SimpleNamespace(image=b"", resources={}))
    norm = lngen.compile("add_rmsnorm", d=64, dtype="f16", **keys)
    for made in (norm._forward, norm._backward, norm._backward_of(("dy",))):
        made.launcher(0, rows=16)
    assert len({text for text, _ in loaded}) == 3
    assert {overlap for _, overlap in loaded} == {keys.get("overlap", False)}


def test_overlap_is_yes_or_no() -> None:
    with pytest.raises(SpecError) as error:
        lngen.compile("rmsnorm", d=8, overlap="yes")  # type: ignore[arg-type]
    assert str(error.value) == "overlap= is expected to be True or False, got yes."
