"""If these fail, a norm with a quantised result has other bytes in PyTorch than its spec, or another gradient."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import lngen  # noqa: E402
import lngen.torch as L  # noqa: E402
from direct_tensors import forget, go_the_direct_way  # noqa: E402
from lngen.errors import LngenError  # noqa: E402
from lngen.torch.graph_ops import OPS  # noqa: E402
from torch_calls import same_bits  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

D = 64
BF16, F32 = torch.bfloat16, torch.float32
NUMBER = torch.tensor([0.0371])
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # with what has the same gradients
    "rmsnorm": (L.rms_norm_quant, L.rms_norm),
    "add_rmsnorm": (L.add_rms_norm_quant, L.add_rms_norm),
    "layernorm": (L.layer_norm_quant, L.layer_norm),
    "add_layernorm": (L.add_layer_norm_quant, L.add_layer_norm),
}
RULES: dict[str, dict[str, Any]] = {
    "rows": {},
    "int8": {"quant": "int8", "apply": "mul", "scale_min": 2.0**-23},
    "blocks": {"scales": "block", "block_size": 16, "scale_pow2": "up", "y": True},
    "columns": {"scales": "block", "block_size": 16, "scale_layout": "columns", "y": True},
    "so far": {"amax": NUMBER, "y": True},
    "bounded": {"quant": "e5m2", "amax_max": NUMBER, "amax_min": 1e-10, "y": True},
    "a given scale": {"scales": "tensor", "q_scale": NUMBER, "apply": "mul"},
    "a given factor": {"scales": "tensor", "q_scale": NUMBER, "tensor_scale": "multiply", "y": True},
    "what is stored": {"quantised": "y", "apply": "ratio"},
}
CASES = [*itertools.product(FUNCTIONS, RULES)]


def tensors(graph: str, dtype: Any = F32, rows: Sequence[int] = (2, 3)) -> list[Any]:
    """Inputs with rows, and weights, that require gradients."""
    torch.manual_seed(0)
    wide, narrow = (2 if "add" in graph else 1), (2 if "layer" in graph else 1)
    shapes = [(*rows, D)] * wide + [(D,)] * narrow
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def called(function: Callable[..., Any], given: Sequence[Any], **keys: Any) -> Any:
    """``function`` on tensors with rows, a normalised shape, and weights."""
    wide = [t for t in given if t.dim() > 1]
    return function(*wide, (D,), *given[len(wide) :], 1e-5, **keys)


def of_spec(graph: str, given: Sequence[Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Results by name, of NumPy arrays."""
    of = {"q_scale": "q_scale", "amax_max": "amax_max", "amax": "amax_in"}
    numbers = {name: keys[n].numpy().reshape(()) for n, name in of.items() if n in keys}
    said = {n: str(v) if n == "block_size" else v for n, v in keys.items() if n != "q_scale"}
    said |= {name: True for name in ("amax_max", "amax") if name in keys}
    norm = lngen.compile(graph, d=D, dtype="f32", eps=1e-5, **{"quant": "e4m3", **said})
    results, _ = norm.forward(*[t.detach().numpy() for t in given], **numbers)
    names = norm.spec().differentiated
    return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=False))


def bits(tensor: Any) -> Any:
    return tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return same_bits([bits(t) for t in found], [bits(t) for t in wanted])


@pytest.mark.parametrize(("graph", "rule"), CASES)
def test_results_are_those_of_the_spec_and_gradients_those_of_the_plain_norm(graph: str, rule: str) -> None:
    given, keys = tensors(graph), RULES[rule]
    wanted = of_spec(graph, given, keys)
    ours, plain = FUNCTIONS[graph]
    differentiable = "add" in graph or keys.get("y")
    q, scale, *others = called(ours, given if differentiable else [t.detach() for t in given], **keys)
    names = [*["h"] * ("add" in graph), *["y"] * keys.get("y", False)]
    if "amax" in keys:
        assert others.pop() == wanted["amax"]
    if rule == "columns":
        assert scale.stride() == (3, 1, 8)
        wanted["q_scale"] = np.moveaxis(wanted["q_scale"], 0, -1)
    assert q.view(torch.uint8).numpy().tobytes() == wanted["q"].tobytes()
    if "q_scale" in wanted:
        assert scale.numpy().tobytes() == wanted["q_scale"].tobytes()
        assert scale.shape == (2, 3, D // 16)[: 3 if "scales" in keys else 2]
    else:
        assert scale is NUMBER
    for name, t in zip(names, others, strict=True):
        assert np.array_equal(t.detach().numpy(), wanted[name])
        assert t.requires_grad
    assert [t.requires_grad for t in (q, scale)] == [False, False]
    if differentiable:
        found = dict(zip(names, others, strict=True))
        expected = called(plain, given)
        pairs = dict(zip(("y", "h"), expected if isinstance(expected, tuple) else (expected,), strict=False))
        for name, t in found.items():
            dy = torch.linspace(-1, 2, t.numel()).reshape(t.shape)
            gradients = [torch.autograd.grad(v, given, dy, True, allow_unused=True) for v in (t, pairs[name])]
            assert same_bits(*gradients), name


# ---- PyTorch's ways to call an operator ----


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("graph", "rule"), [("layernorm", "a given factor"), ("add_rmsnorm", "blocks"), ("rmsnorm", "columns")]
)
def test_one_compiled_graph_has_the_bytes_of_eager_and_its_gradients(graph: str, rule: str) -> None:
    backend = CompileCounterWithBackend("aot_eager")
    function = partial(called, FUNCTIONS[graph][0], **RULES[rule])
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for rows in (2, 5):
        given = tensors(graph, rows=(rows, 3))
        for t in given:
            if t.dim() > 1:
                torch._dynamo.mark_dynamic(t, 0)
        found, wanted = compiled(given), function(given)
        assert alike(found, wanted)
        both = [torch.autograd.grad(results[-1].square().sum(), given) for results in (found, wanted)]
        assert same_bits(*both)
    assert backend.frame_count == 1


class Quantising(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any, scale: Any) -> Any:
        y = L.rms_norm_quant(x, (D,), scales="block", block_size=32, y=True)
        return *y, *L.layer_norm_quant(x, (D,), scales="tensor", q_scale=scale)[:1]


def test_an_exported_program_takes_any_number_of_rows_and_decomposes() -> None:
    dims = {"x": {0: torch.export.Dim("rows", min=1)}, "scale": None}
    x = torch.randn(4, 3, D)
    program = torch.export.export(Quantising(), (x, NUMBER), dynamic_shapes=dims)
    names = {str(node.target) for node in program.graph.nodes}
    assert {"lngen.rmsnorm_fwd.default", "lngen.layernorm_fwd.default"} <= names
    own = program.run_decompositions({**torch.export.default_decompositions(), **L.decompositions()})
    assert not any(str(node.target).startswith("lngen.") for node in own.graph.nodes)
    for rows in (1, 9):
        x = torch.randn(rows, 3, D)
        wanted = Quantising()(x, NUMBER)
        assert alike(program.module()(x, NUMBER), wanted)
        for found, expected in zip(own.module()(x, NUMBER), wanted, strict=True):  # one step of e4m3 is an eighth
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.13, atol=1e-6)


OPERATOR_KEYS = {
    "quant=e4m3,y=yes": (), "quant=int8,scales=block,block_size=32,y=yes": (),
    "quant=int8,scales=block,block_size=32,scale_layout=columns,y=yes": (),
    "quant=e5m2,scales=tensor,y=yes": ("q_scale",), "quant=e4m3,quantised=y,y=yes": ("amax_max",),
}  # fmt: skip


@pytest.mark.parametrize("keys", OPERATOR_KEYS)
@pytest.mark.parametrize("graph", ["rmsnorm", "add_layernorm"])
def test_an_operator_with_the_keys_passes_pytorchs_own_checks(graph: str, keys: str) -> None:
    given = tensors(graph)
    named = dict(zip([n for n in ("x", "residual", "gamma", "beta") if n in signature(graph)], given, strict=True))
    named |= dict.fromkeys(OPERATOR_KEYS[keys], NUMBER.reshape(()))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # a fourth sums results, also those of fp8
    torch.library.opcheck(
        OPS[graph].fwd, tuple(named.get(n) for n in OPS[graph].inputs), {"eps": 1e-5, "keys": keys}, test_utils=tests
    )


def signature(graph: str) -> tuple[str, ...]:
    """The tensors that its function takes."""
    return tuple(n for n in OPS[graph].inputs if n in ("x", "residual", "gamma") or (n == "beta" and "layer" in graph))


def test_the_operators_of_before_take_what_they_took() -> None:
    """The numbers of a quantised result may be left out, with gradients and without."""
    x, gamma = tensors("rmsnorm")
    y, _ = torch.ops.lngen.rmsnorm_fwd(x, gamma, None, eps=1e-5)
    assert torch.equal(y, L.rms_norm(x, (D,), gamma, 1e-5))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape
    q, *_ = torch.ops.lngen.rmsnorm_fwd(
        x.detach(), gamma.detach(), None, q_scale=NUMBER[0], eps=1e-5, keys="quant=e4m3,scales=tensor"
    )
    assert alike([q], L.rms_norm_quant(x.detach(), D, gamma.detach(), 1e-5, scales="tensor", q_scale=NUMBER)[:1])


@pytest.mark.parametrize("rule", ["rows", "blocks", "a given scale"])
def test_other_layouts(rule: str) -> None:
    """Several normalised dimensions, leading ones that broadcast, jagged rows, and torch.func's vmap."""
    x, keys = torch.randn(3, 2, D), RULES[rule]
    plain = L.rms_norm_quant(x.reshape(3, 2 * D), (2 * D,), **keys)
    q, scale, *y = L.rms_norm_quant(x, (2, D), **keys)
    assert alike([q.reshape(3, 2 * D), scale, *[t.reshape(3, 2 * D) for t in y]], plain)

    both = L.add_rms_norm_quant(x, x[:1], (D,), **keys)
    assert alike(both, L.add_rms_norm_quant(x, x[:1].expand(3, 2, D).contiguous(), (D,), **keys))

    rows = [torch.randn(2, D), torch.randn(3, D)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found, wanted = L.rms_norm_quant(jagged, (D,), **keys), L.rms_norm_quant(torch.cat(rows), (D,), **keys)
    assert alike([t.values() if t.is_nested else t for t in found], wanted)

    found = torch.func.vmap(lambda row: L.rms_norm_quant(row, (D,), **keys)[0].float())(x)
    torch.testing.assert_close(found, L.rms_norm_quant(x, (D,), **keys)[0].float(), rtol=0.13, atol=1e-6)


def test_the_direct_way_has_the_bytes_of_the_dispatchers(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("rmsnorm", "rows"), ("add_layernorm", "a given scale"), ("layernorm", "blocks"), ("rmsnorm", "columns")]
    given = {graph: tensors(graph, BF16) for graph, _ in cases}
    with torch.no_grad():
        wanted = [called(FUNCTIONS[graph][0], given[graph], **RULES[rule]) for graph, rule in cases]
        gpu = go_the_direct_way(monkeypatch)
        for (graph, rule), expected in zip(cases, wanted, strict=True):
            for _ in range(2):
                before = len(gpu.launched)
                found = called(FUNCTIONS[graph][0], given[graph], **RULES[rule])
                assert alike(found, expected)
                assert len(gpu.launched) > before
        assert found[1].stride() == (3, 1, 8)  # of the columns, which have zeros behind the rows
        assert not found[1].as_strided((D // 16, 2), (8, 1), 6).count_nonzero()
    before = len(gpu.launched)
    assert called(L.layer_norm_quant, given["layernorm"], **RULES["blocks"])[2].requires_grad
    assert len(gpu.launched) == before
    forget()


def test_autocast_changes_nothing() -> None:
    x, gamma = (t.detach() for t in tensors("rmsnorm", BF16))
    with torch.autocast("cpu", dtype=BF16):
        found = L.rms_norm_quant(x, (D,), gamma, 1e-5, y=True)
    assert found[2].dtype == BF16
    assert alike(found, L.rms_norm_quant(x, D, gamma, 1e-5, y=True))


# ---- what is refused ----

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt key": ({"blocksize": 64}, "has no key 'blocksize'; take block_size."),
    "another graph's key": ({"round_sum": True}, "has no key 'round_sum'"),
    "nothing quantised": (
        {"quant": "no"},
        "expected to be a dtype of 8 bits, got no; take",
    ),
    "no scale": ({"scales": "tensor"}, "q_scale is expected with scales='tensor'"),
    "a scale too many": ({"q_scale": NUMBER}, "q_scale is expected with scales='tensor'"),
    "three scales": ({"scales": "tensor", "q_scale": torch.ones(3)}, r"'q_scale' is expected to have shape \[\], got"),
    "a number": ({"amax_max": 2.0}, "'amax_max' must be Tensor, not float"),
    "a wide scale": ({"scales": "tensor", "q_scale": NUMBER.double()}, "'q_scale' is Double; cast it"),
    "another dtype": (
        {"quant": "e4m4"},
        "spec 'rmsnorm.fwd:quant=e4m4': there is no quant 'e4m4'.*; did you mean 'e4m3'",
    ),
    "keys apart": ({"block_size": 64}, "block_size needs scales=block, got scales=row"),
    "blocks that do not fit": ({"scales": "block", "block_size": 128}, "multiple of 128 for B, got d=64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_key_is_refused_in_one_sentence(case: str) -> None:
    keys, why = REFUSED[case]
    with pytest.raises(LngenError, match=why) as raised:
        L.rms_norm_quant(torch.randn(2, D), (D,), **keys)
    assert "\n" not in str(raised.value)


def test_an_input_that_requires_grad_needs_a_result_that_has_one() -> None:
    x = torch.randn(2, D, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"make the value that is quantised a result, too \(y=True of a norm\)"):
        L.rms_norm_quant(x, (D,))
    with torch.no_grad():
        assert not L.rms_norm_quant(x, (D,))[0].requires_grad
    scale = NUMBER.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="'q_scale' requires grad, but the graph 'rmsnorm' has no gradient for it"):
        L.rms_norm_quant(x, (D,), scales="tensor", q_scale=scale, y=True)


# ---- and back ----


@pytest.mark.parametrize("rule", ["rows", "int8", "blocks", "a given scale"])
def test_dequantised_numbers_are_the_values_within_half_a_step(rule: str) -> None:
    x = torch.randn(2, 3, D)
    q, scale, y = L.rms_norm_quant(x, (D,), **{**RULES[rule], "y": True})
    found = L.dequantise(q, scale)
    assert (found.shape, found.dtype) == (x.shape, F32)
    product = q.float() * (scale.repeat_interleave(16, -1) if rule == "blocks" else scale[..., None])
    assert torch.equal(found, product)
    largest = scale.max() * (0.51 if rule == "int8" else 16.1)  # half a step, of e4m3 that of its largest numbers
    assert (found - y).abs().max() <= largest


@pytest.mark.parametrize(("shape", "dtype", "scale", "of"), [
    ((4, D), torch.int8, (3,), F32), ((4, D), torch.int8, (4, 3), F32), ((4, D), torch.int8, (4, 0), F32),
    ((4, D), torch.int8, (2, 4), F32), ((4, D), torch.int8, (4,), torch.float64), ((4, D), F32, (4,), F32),
])  # fmt: skip
def test_what_does_not_fit_is_not_dequantised(shape: Any, dtype: Any, scale: Any, of: Any) -> None:
    with pytest.raises(LngenError, match="dequantise expects q"):
        L.dequantise(torch.zeros(shape, dtype=dtype), torch.ones(scale, dtype=of))


@pytest.mark.parametrize("keys", [{"scales": "tensor"}, {"amax_max": True}], ids=str)
def test_a_function_of_a_named_graph_takes_the_number_as_an_input(keys: dict[str, Any]) -> None:
    """In its place behind the weight; under vmap it has the results of its keys, too."""
    x, gamma = (t.detach() for t in tensors("rmsnorm"))
    function = L.function("rmsnorm", quant="e4m3", **keys)
    given = {"scales": "tensor", "q_scale": NUMBER} if "scales" in keys else {"amax_max": NUMBER}
    wanted = L.rms_norm_quant(x, (D,), gamma, 1e-5, **given)
    found = function(x, gamma, NUMBER[0], eps=1e-5)
    results = found if isinstance(found, tuple) else (found,)
    assert alike(results, wanted[: len(results)])
    each = torch.func.vmap(lambda row: _first(function(row, gamma, NUMBER[0], eps=1e-5)).float())(x)
    torch.testing.assert_close(each, wanted[0].float(), rtol=0.13, atol=1e-6)


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found
