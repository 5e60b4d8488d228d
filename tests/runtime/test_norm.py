"""If these fail, ``lngen.compile`` gives wrong results on NumPy arrays, or a wrong request gets no sentence."""

import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lngen.runtime as runtime
from lngen.errors import ArrayError, DerivativeError, LowerError, ScheduleError, SpecError, VerifyError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import F16, D, M
from own_graphs import only_statistics
from test_passes import gated


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
    assert norm.forward(x, beta=beta, gamma=gamma)[0].tobytes() == y.tobytes()


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


@pytest.mark.parametrize(("describe", "why"), [
    (widest, "graph @widest_bwd: the row result '%dx' depends on a maximum over rows; that takes two graphs"),
    (detached, "'mean_x' is detached, but its effects on 'y' do not cancel"),
    (taken, "the gradient of 'x' is expected to be called 'dx', but another value is"),
    (constant, "graph @constant_fwd: no input has a gradient, so that there is no backward."),
])  # fmt: skip
def test_a_graph_without_a_backward_compiles_and_says_so_when_backward_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, arrays: tuple[Any, Any, Any], describe: Any, why: str
) -> None:
    norm = pickle.loads(pickle.dumps(runtime.compile(describe, d=64)))
    y, saved = norm.forward(arrays[0])
    assert "__global__" in norm.source("fwd")
    assert str(norm.spec("bwd")) in f"{norm!r}, {norm._repr_html_()}"
    loaded: list[int | None] = []
    monkeypatch.setattr(norm._forward, "warm", lambda device, rows: loaded.append(rows))
    assert norm.warmup(rows=7) is norm
    assert loaded == [7]
    for ask in (lambda: norm.backward(y, saved), lambda: norm.source("bwd"), lambda: norm.compilation("bwd")):
        with pytest.raises((DerivativeError, LowerError, VerifyError), match=re.escape(why)):
            ask()


def test_options_reach_the_spec() -> None:
    norm = runtime.compile("rmsnorm", d=8, dtype="bf16", weight="f32", beta=True, wrt=("x",), save="none", eps=0.25)
    assert str(norm.spec()) == "rmsnorm.fwd:d=8,dtype=bf16,weight=f32,beta=yes,eps=0.25,save=none"
    assert str(norm.spec("bwd")).endswith("save=none,wrt=x")
    assert [v.name for v in norm.plan("bwd").outputs] == ["dx"]


# ---- what forward saves ----


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
        "y float32[2, 3, 64], mean float32[2, 3], rstd float32[2, 3]; 3632 bytes on cpu>"
    )
    norm = runtime.compile("rmsnorm", d=64)
    x = arrays[0].copy()
    saved = norm.forward(x, arrays[1], out=x)[1]
    assert repr(saved).endswith("rstd float32[2, 3]; 3352 bytes on cpu; overwritten: x>")
    bare = replace(saved, names=("x",), arrays=(SimpleNamespace(),), overwritten=())
    assert repr(bare) == "<Saved by rmsnorm.fwd:d=64,dtype=f32: x types.SimpleNamespace>"


# ---- wrong arrays, options and requests ----


@pytest.mark.parametrize(("inputs", "message"), [
    (lambda x, g, b: (x, g),
     r"the input 'beta', which is missing; for a norm without it, compile with beta=False \(beta=no in a spec\)"),
    (lambda x, g, b: (x, None, b), "the input 'gamma', which is missing; for a norm without it, compile"),
    (lambda x, g, b: (x, g, b, b), "takes x, gamma, beta, each once; got 4 by position"),
    (lambda x, g, b: (None, g, b), "'x' is expected to be an array .*got NoneType"),
    (lambda x, g, b: (3.0, g, b), "'x' is expected to be an array .*got float"),
    (lambda x, g, b: (x, [1.0], b), "'gamma' is expected to be a NumPy array like 'x', got builtins.list"),
    (lambda x, g, b: (np.ma.masked_less(x, 0), g, b), r"'x' is a masked array, .* pass array.filled\(\)"),
    (lambda x, g, b: (x.astype(">f4"), g, b), "'x' is expected to be f32, got >f4; cast it"),
    (lambda x, g, b: (x.astype(object), g, b), "'x' is expected to be f32, got object; cast it"),
    (lambda x, g, b: (x.astype(np.float64), g, b), "'x' is expected to be f32, got float64; cast it"),
    (lambda x, g, b: (x[0, 0, 0, ...], g, b), r"'x' is expected to have shape \(..., 64\), .*got \(\)"),
    (lambda x, g, b: (x[..., :60], g, b), r"'x' is expected to have shape \(..., 64\), .*got \(2, 3, 60\)"),
    (lambda x, g, b: (x, g[:3], b), r"'gamma' is expected to have shape \(64,\), got \(3,\)"),
])  # fmt: skip
def test_wrong_inputs(arrays: tuple[Any, Any, Any], inputs: Any, message: str) -> None:
    with pytest.raises(ArrayError, match=message):
        runtime.compile("layernorm", d=64).forward(*inputs(*arrays))


def test_wrong_names_and_out(arrays: tuple[Any, Any, Any]) -> None:
    norm, x = runtime.compile("layernorm", d=64), arrays[0]
    with pytest.raises(ArrayError, match="takes x, gamma, beta, each once; got 1 by position, weight"):
        norm.forward(x, weight=arrays[1])
    with pytest.raises(ArrayError, match=r"out= is expected to be one array or 3 \(y, mean, rstd\), got 2"):
        norm.forward(*arrays, out=(x, x))
    with pytest.raises(ArrayError, match="'y' is expected to be f32, got float64"):
        norm.forward(*arrays, out=x.astype(np.float64))


@pytest.mark.parametrize(("options", "message"), [
    ({"graph": "layernrom"}, "There is no graph 'layernrom', expected one of layernorm, rmsnorm"),
    ({"epss": 1.0}, "there is no key 'epss'.*did you mean 'eps'"),
    ({"schedule": {"forward": ""}}, "schedule= takes the directions fwd and bwd"),
    ({"schedule": "threads=32"},
     'schedule= is expected to be a text for each direction, such as {"fwd": "threads=256", "bwd": ""}, got'),
    ({"schedule": {"fwd": 32}}, "schedule= is expected to be a text for each"),
    ({"lock": 5}, "lock= is expected to be the path of a lock file, got int"),
    ({"overlap": "yes"}, r"^overlap= is expected to be True or False, got yes\.$"),
    ({"gamma": np.ones(4)}, r"there is no gamma '\[1. 1. 1. 1.\]', expected one of yes"),
    ({"dtype": int}, "there is no dtype '<class 'int'>', expected one of f16, bf16"),
])  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        runtime.compile(**{"graph": "layernorm", "d": 4, **options})


@pytest.mark.parametrize(("call", "message"), [
    (lambda n: n.plan(arch=90), "arch= is expected to be an arch such as sm_90, got int"),
    (lambda n: n.source(rows="many"), "rows= is expected to be a whole number from 0 on, got many"),
    (lambda n: n.source(rows=-1), "rows= is expected to be a whole number from 0 on, got -1"),
    (lambda n: n.warmup(device=1.5), "device= is expected to be a whole number from 0 on, got 1.5"),
    (lambda n: n.source("back"), "There is no direction 'back', expected fwd or bwd"),
    (lambda n: n.source(), "threads is a power of two, got 48"),
])  # fmt: skip
def test_wrong_requests(call: Any, message: str) -> None:
    with pytest.raises((SpecError, ScheduleError), match=message):
        call(runtime.compile("layernorm", d=64, schedule={"fwd": "threads=48"}))


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


@pytest.mark.parametrize(("graph", "message"), [
    (lambda b: scaled(b), "got '<lambda>'; name it: lngen.Definition(name, describe)."),
    (Scaled(), "needs a name for a test_norm.Scaled: use lngen.Definition(name, describe)."),
    (5j, "a function that describes one, or a Definition; got a builtins.complex. The function gets"),
    (Definition("empty", lambda b: None), "graph 'empty' has no result; call b.output"),
    (None, "or a Definition; got a builtins.NoneType."),
])  # fmt: skip
def test_what_does_not_describe_a_graph(graph: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        runtime.compile(graph, d=4)
    if not callable(graph) and not isinstance(graph, Definition):
        with pytest.raises(SpecError, match=r"graph 'own' is expected to be described by a function, got "):
            Definition("own", graph)
