"""If these fail, vLLM or FlashInfer would refuse lngen's norms, or get something else from them than from their own.

Neither is installed: the tests use stand-ins of their interfaces (fake_vllm.py, fake_flashinfer.py).
"""

import importlib
import tomllib
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fake_flashinfer
import fake_vllm
from lngen.torch import for_flashinfer, for_vllm
from paths import ROOT

M, D = 32, 96
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PAIRS = [(F16, F16), (F16, F32), (F16, None), (BF16, BF16), (BF16, F32), (BF16, None), (F32, F32), (F32, None)]


def tensors(dtype: torch.dtype, weight: torch.dtype | None) -> list[Any]:
    """x, residual and weight."""
    torch.manual_seed(0)
    x, residual, gamma = torch.randn(M, D) * 3, torch.randn(M, D) * 3, torch.randn(D)
    return [x.to(dtype), residual.to(dtype), None if weight is None else gamma.to(weight)]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for the last place of rsqrt: f32 within a few of them, 16 bits in a few elements by one rounding."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if expected.dtype == F32 else 2**-7, atol=1e-6)
    if expected.dtype != F32:
        assert (found != expected).float().mean() < 0.01


# ---- vLLM ----


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's operators on a machine with CUDA and CuPy, lngen first."""
    found = fake_vllm.install(monkeypatch)
    monkeypatch.setattr(for_vllm, "find_spec", lambda name: object())
    for_vllm.register()
    for_vllm.register()  # vLLM may call it more than once
    for op in vars(found).values():
        op.set_default(["lngen", "native"])
    return found


@pytest.mark.parametrize(("dtype", "weight"), PAIRS)
def test_vllm_gets_its_own_numbers(ops: Any, dtype: torch.dtype, weight: torch.dtype | None) -> None:
    x, residual, gamma = tensors(dtype, weight)
    assert ops.rms_norm.dispatch(x, gamma, 1e-5) == ops.fused_add_rms_norm.dispatch(x, residual, gamma, 1e-5) == "lngen"
    assert_near(ops.rms_norm(x, gamma, 1e-5), fake_vllm.rms_norm(x, gamma, 1e-5))
    (y, h), (y0, h0) = (op(x, residual, gamma, 1e-5) for op in (ops.fused_add_rms_norm, fake_vllm.fused_add_rms_norm))
    assert_near(y, y0)
    assert torch.equal(h, h0)


def test_what_vllm_rounds_otherwise_or_lngen_has_not_is_left_to_the_next_provider(ops: Any) -> None:
    x, residual, gamma = tensors(BF16, BF16)
    for args in ((x, gamma, 1e-5, 64), (x, gamma.half(), 1e-5), (x.double(), gamma, 1e-5), (x, gamma[:1], 1e-5)):
        assert ops.rms_norm.dispatch(*args) == "native"
    assert ops.rms_norm.dispatch(x.float(), gamma, 1e-5) == "native"
    assert ops.fused_add_rms_norm.dispatch(x, residual.float(), gamma, 1e-5) == "native"


def test_vllm_lowers_to_lngens_operators(ops: Any) -> None:
    x, residual, gamma = tensors(BF16, BF16)
    for op, args, name in (
        (ops.rms_norm, (x, gamma, 1e-5), "rmsnorm_fwd"),
        (ops.fused_add_rms_norm, (x, residual, gamma, 1e-5), "add_rmsnorm_fwd"),
    ):
        provider, lowered = op.lower(*args)
        called = [node.target for node in lowered.graph.nodes if node.op == "call_function"]
        assert provider == "lngen"
        assert called[0] == getattr(torch.ops.lngen, name).default
        for found, expected in zip(lowered(*args, None), op(*args), strict=True):
            assert torch.equal(found, expected)
    compiled = torch.compile(ops.rms_norm.impls["lngen"].function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, gamma, 1e-5), ops.rms_norm(x, gamma, 1e-5))


def test_rows_of_a_lowered_norm_stay_symbolic_and_features_do_not(ops: Any) -> None:
    x, _, gamma = tensors(BF16, BF16)
    impl, fits = ops.rms_norm.impls["lngen"], []

    def function(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        fits.append(impl.supports_args(x, gamma, 1e-5))
        result: torch.Tensor = impl.function(x, gamma, 1e-5)
        return result

    graph = make_fx(function, tracing_mode="symbolic")(x, gamma)
    assert fits == [False]
    assert torch.equal(graph(x[:5], gamma), impl.function(x[:5], gamma, 1e-5))


@pytest.mark.parametrize(("cuda", "cupy"), [(False, True), (True, False)])
def test_without_cuda_or_cupy_vllm_passes_over_lngen(monkeypatch: pytest.MonkeyPatch, cuda: bool, cupy: bool) -> None:
    ops = fake_vllm.install(monkeypatch, cuda=cuda)
    monkeypatch.setattr(for_vllm, "find_spec", lambda name: object() if cupy else None)
    for_vllm.register()
    ops.rms_norm.set_default(["lngen", "native"])
    assert ops.rms_norm.priority == ["native"]


def test_another_vllm_runs_without_lngen(monkeypatch: pytest.MonkeyPatch) -> None:
    for_vllm.register()  # none is installed, or one without an IR
    ops = fake_vllm.install(monkeypatch, without="fused_add_rms_norm")
    ops.rms_norm.native = fake_vllm.fused_add_rms_norm  # an operator with other parameters
    with pytest.warns(UserWarning, match="does not implement 'rms_norm' of this vLLM: the schema"):
        for_vllm.register()
    assert [*ops.rms_norm.impls] == ["native"]


def test_the_entry_point_is_register() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["lngen"].split(":")
    assert getattr(importlib.import_module(module), name) is for_vllm.register


# ---- FlashInfer ----


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_flashinfer.install(monkeypatch)


def test_flashinfer_gets_its_own_numbers(flashinfer: Any) -> None:
    x, residual, gamma = tensors(BF16, BF16)
    beta, out = torch.randn(D), torch.empty_like(x)
    assert for_flashinfer.enable(D, 2 * D) == 4
    assert_near(flashinfer.rmsnorm(x, gamma), fake_flashinfer.rmsnorm(x, gamma))
    assert flashinfer.rmsnorm(x, gamma, out=out) is out
    assert torch.equal(out, flashinfer.rmsnorm(x, gamma))
    assert_near(flashinfer.gemma_rmsnorm(x, gamma), fake_flashinfer.gemma_rmsnorm(x, gamma))
    assert_near(flashinfer.layernorm(x, gamma.float(), beta), fake_flashinfer.layernorm(x, gamma.float(), beta))
    found, expected = (x.clone(), residual.clone()), (x.clone(), residual.clone())
    flashinfer.fused_add_rmsnorm(*found, gamma)
    fake_flashinfer.fused_add_rmsnorm(*expected, gamma)
    assert_near(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert {api: counts["hit"] for api, counts in flashinfer.trace_apply.stats().items()} == {
        "flashinfer.norm.rmsnorm": 3, "flashinfer.norm.gemma_rmsnorm": 1, "flashinfer.norm.layernorm": 1,
        "flashinfer.norm.fused_add_rmsnorm": 1,
    }  # fmt: skip
    flashinfer.rmsnorm(x[:, :64], gamma[:64])
    assert flashinfer.trace_apply.stats()["flashinfer.norm.rmsnorm"]["fallback_no_candidate"] == 1


def test_a_sum_is_written_where_the_inputs_were_if_they_lie_apart() -> None:
    x, residual, gamma = tensors(BF16, BF16)
    fused = for_flashinfer.solutions(D)[f"fused_add_rmsnorm_h{D}"]
    expected = fused(x[:, None].clone(), residual[:, None].clone(), gamma)  # rows of three dimensions: new tensors
    both = torch.stack([x, residual, x])
    y, h = fused(both[0], both[1], gamma)
    assert (y.data_ptr(), h.data_ptr()) == (both[0].data_ptr(), both[1].data_ptr())
    assert torch.equal(both, torch.stack([expected[0][:, 0], expected[1][:, 0], x]))
    same = x.clone()
    y, h = fused(same, same, gamma)  # both would take one place
    assert torch.equal(same, x)
    assert torch.equal(h, x + x)


def test_flashinfers_epsilon_is_given_once() -> None:
    x, _, gamma = tensors(F32, F32)
    for eps in (1e-6, 0.5):
        found = for_flashinfer.solutions(D, eps=eps)[f"rmsnorm_h{D}"](hidden_states=x, weight=gamma.requires_grad_())
        assert_near(found, fake_flashinfer.rmsnorm(x, gamma, eps).detach())
        assert not found.requires_grad
