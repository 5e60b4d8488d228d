"""If these fail, PyTorch computes another graph than lngen: a wrong peer, and a wrong float64 reference."""

from typing import Any

import numpy as np
import pytest

from bit_graphs import DEFINITIONS
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import OPS, Axis, Builder, D, DType, Eqn, Graph, M, Type, Value, independent_rows, parse
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.proof.check.inputs import forward_inputs, random_inputs
from lngen.proof.check.oracles import rmsnorm_forward
from lngen.proof.torch_graph import MEANINGS, Call, torch_function
from own_graphs import OWN, own

torch = pytest.importorskip("torch")

ROWS = 5
ALL = [
    *(f"{norm}.fwd:d=24,dtype=f64" for norm in ("layernorm", "rmsnorm")),
    "layernorm.fwd:d=7,dtype=f64,gamma=no,beta=no",
    "rmsnorm.fwd:d=7,dtype=f64,eps=run",
    *OWN,
]


def spec_of(text: str, direction: str = "fwd", dtype: str = "f64") -> Spec:
    if text in OWN:
        return own(text, direction, dtype=dtype)
    return parse_spec(text.replace(".fwd", f".{direction}").replace("f64", dtype))


def tensor(array: Array) -> Any:
    """A copy, bf16 by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def called(graph: Graph, inputs: dict[str, Array], **options: bool) -> dict[str, Any]:
    results = torch_function(graph, **options)(*(tensor(inputs[p.name]) for p in graph.tensors))
    return {r.name: t for r, t in zip(graph.results, results, strict=True)}


def close(got: Any, want: Array, ulps: float) -> None:
    """Within ``ulps`` roundings of the dtype, relative to the largest number."""
    wide = want.astype(np.float64).reshape(got.shape)
    unit = {np.dtype(np.float64): 2.0**-53, np.dtype(np.float32): 2.0**-24}.get(want.dtype, DType.BF16.roundoff)
    error = np.abs(got.detach().double().numpy() - wide).max(initial=0.0)
    assert error <= ulps * unit * max(np.abs(wide).max(initial=0.0), 1e-30)


@pytest.mark.parametrize("name", ["block_scaled", "group_normed", "class_loss", "softmax"])
def test_a_call_hashes_nothing_of_lngens(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch.compile leaves a program for every object of another class that is hashed: the peer would be slow."""
    graph = make_spec({**DEFINITIONS, **GRAPHS}[name], "fwd", {"d": 64, "dtype": "f32"}).forward()
    function = torch_function(graph)
    given = [torch.zeros([{"M": 5, "D": 64}[a.name] for a in p.type.axes]) for p in graph.tensors]
    for kind in (Axis, Value, Eqn, Type):
        monkeypatch.setattr(kind, "__hash__", lambda self: pytest.fail(f"hashed: {self}"))
    assert all(len(result) in (5, 64) for result in function(*given))


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("text", ALL)
def test_results_are_those_of_the_interpreter(text: str, dtype: str) -> None:
    """In the shapes and dtypes of the graph."""
    spec = spec_of(text, dtype=dtype)
    inputs = forward_inputs(spec, ROWS)
    wanted, got = interpret(spec.forward(), inputs), called(spec.forward(), inputs)
    for result in spec.forward().results:
        found = got[result.name]
        assert tuple(found.shape) == result.type.shape(ROWS, spec.d)
        assert DType.of(str(found.dtype)) is result.type.dtype
        close(found, wanted[result.name], 64)


@pytest.mark.parametrize("text", ALL)
def test_autograd_agrees_with_the_derived_backward(text: str) -> None:
    """Cotangents of all outputs at once, all inputs."""
    spec = spec_of(text, "bwd")
    inputs = random_inputs(spec, ROWS) | forward_inputs(spec, ROWS)
    forward = spec.with_direction("fwd").forward()
    leaves = [tensor(inputs[p.name]).requires_grad_() for p in forward.tensors]
    outputs = torch_function(forward, wide=True)(*leaves)[: len(spec.differentiated)]
    gradients = torch.autograd.grad(outputs, leaves, [tensor(inputs[f"d{n}"]) for n in spec.differentiated])
    got = {f"d{p.name}": g for p, g in zip(forward.tensors, gradients, strict=True)}
    wanted = interpret(spec.graph(), {p.name: inputs[p.name] for p in spec.graph().params})
    wanted |= {name: wanted[same] for name, same in spec.graph().shared.items()}  # dresidual is dx
    assert {*got} == {*wanted}
    for name, want in wanted.items():
        assert np.abs(want).max() > 0
        close(got[name], want, 4096)


def test_wide_rounds_nothing() -> None:
    """float64 through a graph of bf16: neither its casts nor its constants round."""
    spec = own("add_rmsnorm", dtype="bf16")
    inputs = {n: a.astype(np.float64) + 1e-9 for n, a in forward_inputs(spec, ROWS).items()}
    h = inputs["x"] + inputs["residual"]
    got = called(spec.forward(), inputs, wide=True)
    close(got["h"], h, 0)
    close(got["y"], rmsnorm_forward(h, inputs["gamma"])[0], 16)
    assert not np.array_equal(called(spec.forward(), forward_inputs(spec, ROWS))["h"].double().numpy(), h)


def test_equal_operands_share_their_cotangent() -> None:
    """As lngen's maxima do."""
    spec = own("larger", dtype="f64")
    x = np.zeros((2, 24))
    leaves = [tensor(x).requires_grad_() for _ in range(2)]
    dx, dz = torch.autograd.grad(torch_function(spec.forward())(*leaves)[0].sum(), leaves)
    assert bool((dz == 0.5).all())
    assert dx[0, 0].item() == pytest.approx(0.5 - 1)  # 24 cotangents of -1, shared by 24 maxima


@pytest.mark.parametrize("text", ["gated", "layernorm.fwd:d=24,dtype=f64"])
def test_a_part_of_the_rows_has_its_results(text: str) -> None:
    assert independent_rows(spec_of(text).forward())
    b = Builder("sums")
    x = b.param("x", DType.F32, M, D)
    assert not independent_rows(b.build(b.reduce_sum("total", x, axis=M)))


def test_all_axes_and_constants() -> None:
    """Sums over either axis, lengths, expansions, and comparisons of constants."""
    text = """graph @axes_fwd(%x: f64[M, D], %w: f64[M]) -> (f64[D], f64[], f64[M, D], f64[M], f64[]) {
        %rows    : f64[] = size {axis=M, dtype=f64}
        %one     : f64[] = const {dtype=f64, value=1}
        %columns : f64[D] = reduce_sum %x {axis=M}
        %number  : f64[] = reduce_sum %w {axis=M}
        %wide    : f64[M, D] = expand %w {axis=D}
        %picked  : f64[M] = select_gt %one, %rows, %w
        %sum     : f64[] = add %rows, %one
        return %columns, %number, %wide, %picked, %sum
    }"""
    graph = parse(text)
    inputs = {"x": np.arange(12.0).reshape(3, 4), "w": np.arange(3.0)}
    wanted, got = interpret(graph, inputs), called(graph, inputs)
    assert [tuple(t.shape) for t in got.values()] == [r.type.shape(3, 4) for r in graph.results]
    for name, want in wanted.items():
        np.testing.assert_array_equal(got[name].numpy(), want.reshape(got[name].shape))


def test_every_op_of_a_forward_graph_has_a_meaning() -> None:
    """Ops without a derivative occur behind the derivation alone."""
    assert {name for name, op in OPS.items() if op.vjp is not None} <= MEANINGS.keys()


X = torch.linspace(0.25, 45.25, 10, dtype=torch.float64)
FORMULAS = {
    "exp": X.exp(), "exp2": 2**X, "log": X.log(), "tanh": (X.exp() - (-X).exp()) / (X.exp() + (-X).exp()),
    "sigmoid": 1 / (1 + (-X).exp()), "erf": torch.special.erf(X), "abs": (X * X).sqrt(),
    "gelu": X / 2 * (1 + torch.special.erf(X / 2**0.5)), "rint": torch.tensor(np.rint(X.numpy())),
    "gelu_tanh": X / 2 * (1 + torch.tanh((2 / np.pi) ** 0.5 * (X + 0.044715 * X**3))),
    "normal_cdf": (1 + torch.special.erf(X / 2**0.5)) / 2,
    "silu": X / (1 + (-X).exp()), "softplus": torch.log1p(X.exp()),
}  # fmt: skip
Y = Value("y", Type(DType.F64))
CALL = Call(torch, {}, {DType.F64: torch.float64}, X)


@pytest.mark.parametrize("op", FORMULAS)
def test_functions_are_their_formulas(op: str) -> None:
    """Also of ops that no graph has yet."""
    torch.testing.assert_close(MEANINGS[op](CALL, Eqn(Y, op), (X,)), FORMULAS[op], rtol=1e-14, atol=0)


def test_choices_are_their_definitions() -> None:
    assert MEANINGS["minimum"](CALL, Eqn(Y, "minimum"), (X, 1.0)).max() == 1
    clamp = Eqn(Y, "clamp", attrs=(("high", 2.0), ("low", 1.0)))
    assert MEANINGS["clamp"](CALL, clamp, (X,)).aminmax() == (1, 2)
    where = MEANINGS["where_gt"](CALL, Eqn(Y, "where_gt"), (X, 9.0, -X, 7.0))
    assert torch.equal(where[0], torch.where(X > 9, -X, 7.0))
    assert not MEANINGS["detach"](CALL, Eqn(Y, "detach"), (X.clone().requires_grad_(),)).requires_grad


def test_torch_compile_takes_the_function() -> None:
    """One graph without a break; dynamo alone, since this needs no compiler."""
    spec = own("gated", dtype="f32")
    function = torch_function(spec.forward())
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    inputs = [tensor(a) for a in forward_inputs(spec, ROWS).values()]
    for got, want in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, want)
