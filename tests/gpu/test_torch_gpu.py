"""If these fail, lngen.torch gives other bits on a GPU than on the CPU, or mishandles its streams, graphs and modes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import lngen.torch as L  # noqa: E402
from torch_calls import CALLS, THEIRS, D, leaves, same_bits  # noqa: E402

pytestmark = pytest.mark.gpu
WIDE = 1024


def results(call: Callable[..., Any], inputs: Any) -> list[Any]:
    """The result, and the gradients of all inputs for a cotangent that is no constant; on the CPU."""
    y = call(*inputs)
    dy = torch.linspace(-1, 2, y.numel()).to(y.dtype).reshape(y.shape).to(y.device)
    found = [y, *torch.autograd.grad(y, inputs, dy, allow_unused=True)]
    return [t if t is None else t.detach().cpu() for t in found]


def moved(inputs: Any) -> list[Any]:
    return [t.detach().cuda().requires_grad_() for t in inputs]


def drawn(rows: int = 64, dtype: Any = torch.bfloat16) -> list[Any]:
    torch.manual_seed(1)
    shapes = (rows, WIDE), (WIDE,), (WIDE,)
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def norm(x: Any, w: Any, b: Any) -> Any:
    return L.layer_norm(x, (WIDE,), w, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_bits_are_those_of_the_cpu(name: str, dtype: Any) -> None:
    inputs = leaves(dtype)
    wanted = results(CALLS[name], inputs)
    there = moved(inputs)
    for _ in range(3):  # prepared, then direct
        assert same_bits(results(CALLS[name], there), wanted)


@pytest.mark.parametrize("rows", [1, 3, 64, 700])
def test_bits_of_more_rows_and_with_f32_weights(rows: int) -> None:
    inputs = drawn(rows)
    for dtype in (torch.bfloat16, torch.float32):
        mixed = [inputs[0], *(t.detach().to(dtype).requires_grad_() for t in inputs[1:])]
        wanted = results(norm, mixed)
        there = moved(mixed)
        for _ in range(2):
            assert same_bits(results(norm, there), wanted)


def test_views_of_any_alignment_and_stride() -> None:
    x, w, b = drawn(32, torch.float32)
    wanted = results(norm, (x, w, b))
    x, w, b = moved((x, w, b))
    apart = torch.zeros(32, WIDE + 8, device="cuda")
    odd = torch.zeros(32 * WIDE + 1, device="cuda")
    for other in (apart[:, :WIDE], odd[1:].view(32, WIDE), torch.zeros(WIDE, 32, device="cuda").t()):
        with torch.no_grad():
            other.copy_(x)
        for _ in range(2):
            assert same_bits(results(norm, (other.detach().requires_grad_(), w, b)), wanted)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", THEIRS)
def test_autocast_gives_the_dtype_of_pytorch(name: str) -> None:
    inputs = moved(leaves(torch.bfloat16))
    inputs[1:] = [t.detach().float().requires_grad_() for t in inputs[1:]]
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = CALLS[name](*inputs), THEIRS[name](*inputs)
    assert y.dtype == torch.float32
    wide = expected.dtype == torch.float32  # some versions of PyTorch do not list rms_norm
    torch.testing.assert_close(y.to(expected.dtype), expected, rtol=1e-5 if wide else 2e-2, atol=1e-5 if wide else 1e-2)
    ours, theirs = (torch.autograd.grad(t.sum(), inputs, allow_unused=True) for t in (y, expected))
    for found, wanted in zip(ours, theirs, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or found.dtype == wanted.dtype


def test_a_graph_of_forward_and_backward_replays() -> None:
    x, w, b = moved(drawn())
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(norm(x, w, b), (x, w, b), dy)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warms up
        torch.autograd.grad(norm(x, w, b), (x, w, b), dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm(x, w, b)
        found = torch.autograd.grad(y, (x, w, b), dy)
    for t in (y, *found):
        t.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits([y.detach(), *found], [norm(x, w, b).detach(), *wanted])


def test_a_first_call_in_a_capture_is_captured() -> None:
    x, graph = torch.randn(5, 968, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = L.rms_norm(x, (968,))
    y.zero_()
    graph.replay()
    assert torch.equal(y, L.rms_norm(x, (968,)))


def test_the_stream_of_forward_is_that_of_backward() -> None:
    inputs = drawn()
    wanted, there = results(norm, inputs), moved(inputs)
    free = torch.cuda.Stream()
    free.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(2 * 10**9)  # on the current stream, where nothing may be launched
    with torch.cuda.stream(free):
        y = norm(*there)
        dy = torch.linspace(-1, 2, y.numel()).to(y.dtype).reshape(y.shape).cuda(non_blocking=True)
        found = torch.autograd.grad(y, there, dy)
        free.synchronize()
    assert same_bits([t.detach().cpu() for t in (y, *found)], wanted)


def test_threads_that_never_used_the_gpu() -> None:
    inputs = drawn()
    wanted, there = results(norm, inputs), moved(inputs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda n: results(norm, there), range(16)):
            assert same_bits(found, wanted)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_has_the_same_bits() -> None:
    inputs = drawn()
    wanted, there = results(norm, inputs), moved(inputs)
    assert same_bits(results(torch.compile(norm, fullgraph=True), there), wanted)


def test_a_patched_model_trains_and_is_stored() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(D, WIDE), torch.nn.LayerNorm(WIDE), torch.nn.RMSNorm(WIDE)).cuda()
    other = copy.deepcopy(model)
    assert len(L.patch(model).patched) == 2
    x = torch.randn(32, D, device="cuda")
    for m in (model, other):
        m(x).pow(3).sum().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3 * float(q.grad.abs().max()))
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(model), buffer)
    assert type(pickle.loads(pickle.dumps(model))[1]) is torch.nn.LayerNorm


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    inputs = drawn()
    wanted = results(norm, inputs)
    for device in (1, 0, 1):
        there = [t.detach().to(f"cuda:{device}").requires_grad_() for t in inputs]
        for _ in range(2):
            assert same_bits(results(norm, there), wanted)
            with torch.cuda.device(1 - device):
                assert same_bits(results(norm, there), wanted)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        norm(inputs[0].detach().to("cuda:0"), inputs[1].detach().to("cuda:1"), None)


QUANTISED: list[dict[str, Any]] = [
    {}, {"quant": "int8", "apply": "mul"}, {"quant": "e5m2", "scales": "block", "block_size": 64, "scale_pow2": "up"},
    {"scales": "tensor", "q_scale": torch.tensor(0.0371)}, {"amax_max": torch.tensor(2.5), "quantised": "y"},
]  # fmt: skip


@pytest.mark.parametrize("keys", QUANTISED, ids=str)
def test_bytes_of_quantised_results_are_those_of_the_cpu(keys: dict[str, Any]) -> None:
    """Direct under no_grad, by the dispatcher with gradients."""
    x, *weights = drawn()
    there = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in keys.items()}
    wanted = L.add_layer_norm_quant(x, x, (WIDE,), *weights, y=True, **keys)
    for enabled in (False, True, False):
        with torch.set_grad_enabled(enabled):
            y, *others = moved((x, *weights))
            found = L.add_layer_norm_quant(y, y, (WIDE,), *others, y=True, **there)
        assert all(torch.equal(a.float().cpu(), b.float()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_kernels_write_where_an_operator_of_vllm_does(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lngen.torch import for_vllm, peer_specs

    x, weight, _ = (t.detach() for t in drawn())
    wanted = [torch.zeros(64, WIDE, dtype=dtype), torch.zeros(64, WIDE // 128), x * 2]
    for_vllm.rms_norm_per_block_quant(wanted[0], x, weight, wanted[1], 1e-6, None, wanted[2], 128, False)
    found = [torch.zeros(64, WIDE, dtype=dtype).cuda(), torch.zeros(64, WIDE // 128).cuda(), (x * 2).cuda()]
    monkeypatch.delattr(peer_specs, "dispatched")  # by which new tensors would come
    for_vllm.rms_norm_per_block_quant(found[0], x.cuda(), weight.cuda(), found[1], 1e-6, None, found[2], 128, False)
    assert all(torch.equal(a.float().cpu(), b.float()) for a, b in zip(found, wanted, strict=True))
