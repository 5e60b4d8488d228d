"""If these fail, ``lngen.compile`` gives wrong results on NumPy arrays, or takes a graph for another one."""

import inspect
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lngen.launch.runtime as runtime
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import F16, D, M
from lngen.compiler.spec.parse import KEYS
from lngen.errors import DerivativeError, LowerError, ScheduleError, SpecError, VerifyError
from lngen.launch.array_norm import Saved
from own_graphs import gated


@pytest.fixture
def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((2, 3, 64), (64,), (64,)))


def test_what_numpy_derives_from_an_array(arrays: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """A memmap, read or written; other strides; the bits are the same. Inputs may be named."""
    x, gamma, beta = arrays
    norm = runtime.compile("layernorm", d=64)
    want, _ = norm.forward(x, beta=beta, gamma=gamma)
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


def test_a_backward_of_nothing_but_the_cotangent(arrays: tuple[Any, Any, Any]) -> None:
    def scaled(b: GraphBuilder) -> None:
        b.output("y", b.mul("scaled", b.input("x", M, D), b.input("gamma", D)))

    x, gamma, _ = arrays
    norm = runtime.compile(scaled, d=64, wrt="x")
    y, saved = norm.forward(x, gamma)
    assert norm.backward(y, saved)[0].tobytes() == (y * gamma).tobytes()


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


def detached(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", (x - b.mean(x).detach()) * 2.0)


def taken(b: GraphBuilder) -> None:
    b.output("y", b.neg("dx", b.input("x", M, D)))


def constant(b: GraphBuilder) -> None:
    b.output("y", b.input("x", M, D, differentiable=False) * 2.0)


def widest(b: GraphBuilder) -> None:
    b.output("most", b.reduce_max("widest", b.input("x", M, D), axis=M))


@pytest.mark.parametrize("describe", [widest, detached, taken, constant])
def test_a_graph_without_a_backward_compiles_and_says_so_when_backward_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, arrays: tuple[Any, Any, Any], describe: Any
) -> None:
    norm = pickle.loads(pickle.dumps(runtime.compile(describe, d=64)))
    y, saved = norm.forward(arrays[0])
    assert "__global__" in norm.source("fwd")
    assert str(norm.spec("bwd")) in f"{norm!r}, {norm._repr_html_()}"
    loaded: list[int | None] = []
    monkeypatch.setattr(norm._forward, "launcher", lambda device, rows: loaded.append(rows))
    assert norm.warmup(rows=7) is norm
    assert loaded == [7]
    for ask in (lambda: norm.backward(y, saved), lambda: norm.source("bwd"), lambda: norm.compilation("bwd")):
        with pytest.raises((DerivativeError, LowerError, VerifyError)):
            ask()


def test_options_reach_the_spec() -> None:
    norm = runtime.compile("rmsnorm", d=8, dtype="bf16", weight="f32", beta=True, wrt=("x",), save="none", eps=0.25)
    assert str(norm.spec()) == "rmsnorm.fwd:d=8,dtype=bf16,weight=f32,beta=yes,eps=0.25,save=none"
    assert str(norm.spec("bwd")).endswith("save=none,wrt=x")
    assert [v.name for v in norm.plan("bwd").outputs] == ["dx"]


# ---- what forward saves ----


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
        "y float32[2, 3, 64], mean float32[2, 3], rstd float32[2, 3]; 3632 bytes on cpu>"
    )
    norm = runtime.compile("rmsnorm", d=64)
    x = arrays[0].copy()
    saved = norm.forward(x, arrays[1], out=x)[1]
    assert repr(saved).endswith("rstd float32[2, 3]; 3352 bytes on cpu; overwritten: x>")
    bare = Saved(saved.spec, ("x",), (SimpleNamespace(),))
    assert repr(bare) == "<Saved by rmsnorm.fwd:d=64,dtype=f32: x types.SimpleNamespace>"


# ---- options ----


def test_a_graph_has_no_option_of_the_name_of_an_argument() -> None:
    """It would get the argument's value, or never any."""
    named = {*inspect.signature(runtime.compile).parameters} - {"graph", "options"}
    assert named <= {*KEYS}

    def doubled(b: GraphBuilder) -> None:
        b.output("y", b.input("x", M, D) * (2.0 if b.flag("overlap", False) else 1.0))

    with pytest.raises(SpecError, match="overlap"):
        runtime.compile(doubled, d=4, overlap=True)


def test_no_outputs_named_are_all_of_them() -> None:
    assert str(runtime.compile("layernorm", d=4, of=None).spec("bwd")) == "layernorm.bwd:d=4,dtype=f32"


def test_a_wrong_schedule_is_refused_where_it_is_used() -> None:
    norm = runtime.compile("layernorm", d=64, schedule={"fwd": "threads=48"})
    with pytest.raises(ScheduleError, match="threads is a power of two, got 48"):
        norm.source()


@pytest.mark.parametrize(
    "dtype", ["f16", "float16", np.float16, np.dtype("float16"), SimpleNamespace(name="float16"), F16]
)
def test_dtypes_and_numbers_by_any_name(dtype: Any) -> None:
    norm = runtime.compile("layernorm", d=np.int64(4), dtype="bf16", weight=dtype, out="bfloat16")
    assert str(norm.spec()) == "layernorm.fwd:d=4,dtype=bf16,weight=f16"


def test_the_dtypes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    norm = runtime.compile("layernorm", d=4, dtype=torch.bfloat16, weight=torch.float32)
    assert str(norm.spec()) == "layernorm.fwd:d=4,dtype=bf16,weight=f32"


def test_no_rows_are_a_number_of_rows() -> None:
    norm = runtime.compile("layernorm", d=4)
    assert norm.plan(rows=0) == norm.plan(rows=np.int64(1))


# ---- what describes a graph ----


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


@pytest.mark.parametrize(("graph", "name", "factor"), [
    (scaled, "scaled", 1),
    (partial(partial(scaled), by=2.0), "scaled", 2),
    (Definition("four", Scaled()), "four", 4),
    (Definition("three", lambda b: scaled(b, 3.0)), "three", 3),
])  # fmt: skip
def test_what_may_describe_a_graph(graph: Any, name: str, factor: float) -> None:
    norm = runtime.compile(graph, d=4)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y, saved = norm.forward(x)
    assert y.tolist() == (factor * x).tolist()
    assert norm.backward(np.ones_like(x), saved)[0].tolist() == [[factor] * 4] * 2
    assert norm.spec().definition.name == name
