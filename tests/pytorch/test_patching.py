"""If these fail, patch() changes what a model computes, what it stores, or what training it sees."""

import copy
import pickle
import pickletools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

import lngen.torch as L
from lngen.torch import patching
from lngen.torch.probe import ELEMENTS, F32_UNITS, SHARE, UNITS, agree
from lngen.torch.variants import Variant

D = 48
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """Float32 rows whose root mean square is 1."""
    wide = x.float()
    return wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)


class Weighted(nn.Module):
    def __init__(self, d: int = D, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 + torch.arange(d) / d)
        self.eps = eps


class LlamaStyle(nn.Module):
    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 + torch.arange(d) / d)
        self.variance_epsilon = 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * unit_rows(hidden, self.variance_epsilon).to(hidden.dtype)


class OnceStyle(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return (unit_rows(x, self.eps) * self.weight.float()).to(x.dtype)


class GemmaStyle(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return (unit_rows(x, self.eps) * (self.weight.float() + 1.0)).to(x.dtype)


class T5Style(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        rows = unit_rows(x, self.eps)
        return self.weight * (rows.to(self.weight.dtype) if self.weight.dtype in HALVES else rows)


class ZeroCentredLayerStyle(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        rows = unit_rows(wide - wide.mean(dim=-1, keepdim=True), self.eps)
        return (rows * (1.0 + self.weight.float()) + self.bias.float()).to(x.dtype)


class NemotronStyle(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(D)
        nn.init.uniform_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class WeightlessLayerNorm(nn.Module):
    """It has no attribute for eps, as OLMo's."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (D,)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return unit_rows(wide - wide.mean(dim=-1, keepdim=True), 1e-5).to(x.dtype)


class Mamba2Style(Weighted):
    """The gate comes first; the norm is of groups of features."""

    def __init__(self, group_size: int = D) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, hidden, gate=None):  # type: ignore[no-untyped-def]  # as transformers has it
        wide = hidden.float() if gate is None else hidden.float() * nn.functional.silu(gate.float())
        rows = unit_rows(wide.unflatten(-1, (-1, self.group_size)), self.eps).flatten(-2)
        return self.weight * rows.to(hidden.dtype)


class Qwen3NextStyle(Weighted):
    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight * unit_rows(hidden, self.eps).to(hidden.dtype)
        return (normed * nn.functional.silu(gate.float())).to(hidden.dtype)


class KimiStyle(Weighted):
    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight.float() * unit_rows(hidden, self.eps)
        return (normed * torch.sigmoid(gate.float())).to(hidden.dtype)


class GatedLayerStyle(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(D)

    def forward(self, input: Tensor, z: Tensor) -> Tensor:
        gated = input.float() * nn.functional.gelu(z.float())
        weights = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(gated, (D,), *weights, self.eps).to(input.dtype)


GATED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mamba 2": (Mamba2Style, "gated_rms_norm, casts=llama, gate_first"),
    "qwen 3 next": (Qwen3NextStyle, "gated_rms_norm, casts=llama"),
    "kimi": (KimiStyle, "gated_rms_norm, act=sigmoid"),
    "LayerNorm": (GatedLayerStyle, "gated_layer_norm, act=gelu, gate_first"),
}


class ConvNextStyle(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (LlamaStyle, "rms_norm, casts=llama"),
    "once": (OnceStyle, "rms_norm"),
    "gemma": (GemmaStyle, "rms_norm, casts=gemma"),
    "t5": (T5Style, "rms_norm, casts=t5"),
    "1 + weight": (ZeroCentredLayerStyle, "layer_norm, zero_centred"),
    "rounded 1 + weight": (NemotronStyle, "layer_norm, casts=nemotron"),
    "no weight": (WeightlessLayerNorm, "layer_norm"),
    "LayerNorm": (partial(nn.LayerNorm, D), "layer_norm"),
    "LayerNorm without bias": (partial(nn.LayerNorm, D, bias=False), "layer_norm"),
    "LayerNorm without weights": (partial(nn.LayerNorm, D, elementwise_affine=False), "layer_norm"),
    "LayerNorm of two dims": (partial(nn.LayerNorm, (3, D)), "layer_norm"),
    "RMSNorm": (partial(nn.RMSNorm, D), "rms_norm"),
    "RMSNorm without weights": (partial(nn.RMSNorm, D, eps=1e-3, elementwise_affine=False), "rms_norm"),
}


class DivisorLessOne(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


class EpsOutside(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class WithoutEps(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * unit_rows(x, 0.0).to(x.dtype)


class Summed(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.nn.functional.normalize(x, dim=-1)


class BufferedNorm(LlamaStyle):
    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.ones(D))


class OfColumns(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * unit_rows(x.transpose(0, 1), self.eps).transpose(0, 1).cumsum(1).to(x.dtype)


class ConstantStatistic(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.eps)


class GatedByNumber(Weighted):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.weight * unit_rows(x if gate is None else x * gate, self.eps).to(x.dtype)


class ResponseGRN(nn.Module):
    """ConvNeXt V2's, of all pixels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)


class SummedImages(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RaisingNorm(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("only on a GPU")


class RoundedWeightNorm(Weighted):
    """1 + weight in the dtype of weight: float32 agrees, 16 bits do not."""

    def forward(self, x: Tensor) -> Tensor:
        return (unit_rows(x, self.eps) * (self.weight + 1).float()).to(x.dtype)


class InFloat32(Weighted):
    """It takes images, too, which are not the reason."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x
        return nn.functional.rms_norm(x.float(), (D,), self.weight.view(torch.float32), self.eps).to(x.dtype)


def own_forward() -> nn.Module:
    module = nn.LayerNorm(D)
    module.forward = lambda x: x
    return module


def parametrised() -> nn.Module:
    return parametrize.register_parametrization(nn.LayerNorm(D), "weight", nn.Identity())


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.LayerNorm(D))


def quantised() -> nn.Module:
    module = LlamaStyle()
    module.weight = nn.Parameter(torch.ones(D, dtype=torch.int8), requires_grad=False)
    return module


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "D - 1": (DivisorLessOne, "computes another function"),
    "eps outside": (EpsOutside, "computes another function"),
    "no eps": (WithoutEps, "computes another function"),
    "sum of squares": (Summed, "computes another function"),
    "columns": (OfColumns, "computes another function"),
    "1 + weight in 16 bits": (lambda: RoundedWeightNorm().bfloat16(), "computes another function in bfloat16"),
    "a derivative of its own": (ConstantStatistic, "has gradients of its own"),
    "gate without a function": (
        GatedByNumber,
        "its forward takes x: torch.Tensor, gate: ",
    ),
    "groups of features": (lambda: Mamba2Style(D // 4), "its forward takes hidden, gate=None; normalises groups"),
    "images": (lambda: SummedImages(D), "takes images [N, C, H, W]; computes another function"),
    "GRN": (ResponseGRN, "its weight has 4 dimensions"),
    "TorchScript": (scripted, "is TorchScript; patch before that"),
    "raises in 16 bits": (lambda: InFloat32().bfloat16(), "cannot be tried on the CPU: "),
    "raises": (RaisingNorm, "cannot be tried on the CPU: NotImplementedError: only on a GPU"),
    "own forward": (own_forward, "its instance has a forward of its own"),
    "parametrised": (parametrised, "its weights are parametrised; patch before that"),
    "weight in a buffer": (BufferedNorm, "its weight is no parameter"),
    "int8": (quantised, "its weight is int8"),
    "float64": (lambda: LlamaStyle().double(), "its weight is float64"),
    "lngen's": (lambda: L.RMSNorm(D), "is lngen's already"),
    "GroupNorm": (lambda: nn.GroupNorm(2, D), "normalises no rows"),
    "BatchNorm": (lambda: nn.BatchNorm1d(D), "normalises no rows"),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(D), "normalises no rows"),
}


@pytest.fixture(autouse=True)
def _no_warning_of_the_cpu() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lngen.torch.patch")
        yield


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn((256, 3, D), generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)


def uses_lngen(module: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a call reaches lngen's function."""
    calls: list[Tensor] = []
    call = Variant.__call__
    with monkeypatch.context() as m:
        m.setattr(Variant, "__call__", lambda self, module, x: calls.append(x) or call(self, module, x))
        module(x)
    return bool(calls)


# ---- what is patched ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_norm_becomes_the_variant_that_computes_the_same(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = FAMILIES[name]
    model = nn.Sequential(make()).to(dtype)
    x, dy = rows(dtype).requires_grad_(), rows(dtype).flip(0)
    wanted = model(x)
    gradients = torch.autograd.grad(wanted, [x, *model.parameters()], dy)
    assert L.patch(model).patched == {"0": expected} or (expected[-2:] == "t5" and dtype != torch.float32)
    assert uses_lngen(model, x, monkeypatch)
    y = model(x)
    assert agree(wanted, y)
    for own, found in zip(gradients, torch.autograd.grad(y, [x, *model.parameters()], dy), strict=True):
        assert (own - found).norm() <= 8 * torch.finfo(dtype).eps * own.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATED)
def test_a_second_argument_is_found_to_be_a_gate(name: str, dtype: torch.dtype) -> None:
    make, expected = GATED[name]
    model = make().to(dtype)
    x, gate, dy = rows(dtype).requires_grad_(), rows(dtype).flip(1).requires_grad_(), rows(dtype).flip(0)
    wanted = model(x, gate)
    gradients = torch.autograd.grad(wanted, [x, gate, *model.parameters()], dy)
    assert L.patch(model).patched == {"": expected}
    y = model(x, gate)
    assert agree(wanted, y)
    for own, found in zip(gradients, torch.autograd.grad(y, [x, gate, *model.parameters()], dy), strict=True):
        assert (own - found).norm() <= 8 * torch.finfo(dtype).eps * own.norm()


def test_a_gate_that_was_not_verified_runs_the_norms_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, x, gate = Mamba2Style(), Mamba2Style(), rows(), rows().flip(1)
    L.patch(model)
    run = Variant.__call__
    calls: list[int] = []
    monkeypatch.setattr(Variant, "__call__", lambda *args: calls.append(1) or run(*args))
    for given in ((x,), (x, None), (x, gate[:, :1]), (x, gate.bfloat16())):
        assert torch.equal(model(*given), own(*given))
    assert calls == []
    for args, named in (((x, gate), {}), ((x,), {"gate": gate}), ((), {"gate": gate, "hidden": x})):
        assert agree(own(*args, **named), model(*args, **named))
    assert calls == [1, 1, 1]
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(x, z=gate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_are_taken_where_features_lie_side_by_side(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = ConvNextStyle().to(dtype), ConvNextStyle().to(dtype)
    assert L.patch(model).patched == {"": "layer_norm, channels_first"}
    images = rows(dtype).view(4, 16, 12, D).permute(0, 3, 1, 2)
    for x, taken in ((images, True), (images.contiguous(), False), (images[:, :, ::2], False)):
        given = x.detach().requires_grad_()
        y, wanted = model(given), own(given)
        assert agree(wanted, y)
        assert y.stride() == wanted.stride()
        assert uses_lngen(model, x, monkeypatch) is taken
        dx, expected = (torch.autograd.grad(out, given, x.flip(1))[0] for out in (y, wanted))
        assert (dx - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_as_they_are_with_the_reason(name: str) -> None:
    make, reason = LEFT[name]
    model = nn.Sequential(make())
    before = type(model[0])
    found = L.patch(model)
    assert not found.patched
    assert found.left["0"].startswith(reason)
    assert type(model[0]) is before


def test_a_module_that_is_no_norm_is_not_mentioned() -> None:
    found = L.patch(nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Conv1d(4, 4, 1)))
    assert (found.patched, found.left) == ({}, {})


def test_what_two_norms_share_is_patched_and_counted_once() -> None:
    norm = LlamaStyle()
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    assert list(L.patch(model).patched) == ["a"]
    assert L.unpatch(model) == 1


def test_dtypes_that_were_not_verified_run_the_norms_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaStyle()
    wanted = model(rows(torch.bfloat16))
    L.patch(model)
    y = model(rows(torch.bfloat16))
    assert y.dtype == torch.float32  # as float32 weights make it, which lngen has not
    assert torch.equal(y, wanted)
    assert not uses_lngen(model, rows(torch.bfloat16), monkeypatch)
    assert uses_lngen(model.bfloat16(), rows(torch.bfloat16), monkeypatch)


def test_autocast_runs_the_own_forward_for_rows_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaStyle().bfloat16()
    L.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not uses_lngen(model, rows(torch.bfloat16), monkeypatch)
    assert uses_lngen(model, rows(torch.bfloat16), monkeypatch)


def test_arguments_by_name_and_too_many_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaStyle()
    L.patch(model)
    assert torch.equal(model(hidden=rows()), model(rows()))
    with pytest.raises(TypeError, match="positional argument"):
        model(rows(), rows())


def test_eps_is_read_at_each_call() -> None:
    model, other = LlamaStyle(), LlamaStyle()
    L.patch(model)
    model.variance_epsilon = other.variance_epsilon = 0.25
    assert agree(other(rows()), model(rows()))


def test_weights_without_content_are_no_obstacle() -> None:
    with torch.device("meta"):
        model = nn.Sequential(LlamaStyle(), nn.LayerNorm(D))
    assert list(L.patch(model).patched) == ["0", "1"]
    assert model(torch.empty(2, D, device="meta")).shape == (2, D)
    assert model[0].weight.is_meta


# ---- the probe ----


def test_the_probe_leaves_no_trace() -> None:
    model = LlamaStyle().train()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    weight, value = model.weight, model.weight.clone()
    state = torch.get_rng_state()
    L.patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert (calls, model.training, model.weight is weight, model.weight.grad) == ([], True, True, None)
    assert torch.equal(model.weight, value)
    model(rows())
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_probe_is_the_same_under_other_defaults_of_pytorch(dtype: torch.dtype) -> None:
    model = LlamaStyle()
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert L.patch(model).patched
    finally:
        torch.set_default_dtype(usual)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_bounds_lie_between_right_and_wrong_orders_of_roundings(dtype: torch.dtype) -> None:
    x, weight = rows(dtype)[:114].reshape(-1, D), (0.1 + torch.arange(D) / D).to(dtype)
    assert x.numel() >= ELEMENTS
    own = weight * unit_rows(x, 1e-6).to(dtype)
    right, wrong = (L.rms_norm(x, D, weight, 1e-6, casts=casts) for casts in ("llama", "once"))
    assert (own != right).double().mean() < SHARE / 4 < SHARE * 16 < (own != wrong).double().mean()
    assert agree(own, right)
    assert not agree(own, wrong)


@pytest.mark.parametrize(("dtype", "units", "elements", "same"), [
    (torch.float32, F32_UNITS, 1000, True),
    (torch.float32, F32_UNITS + 1, 1, False),
    (torch.bfloat16, UNITS, 3, True),
    (torch.bfloat16, UNITS + 1, 1, False),
    (torch.float16, 1, 1 + int(SHARE * 1000), False),
])  # fmt: skip
def test_results_agree_up_to_the_bounds(dtype: torch.dtype, units: int, elements: int, same: bool) -> None:
    y = torch.ones(1000, dtype=dtype)
    own = y.clone()
    own[:elements] += units * torch.finfo(dtype).eps
    assert agree(own, y) is same
    assert not agree(own.double(), y)
    assert not agree((own, y), y)


def test_several_variants_with_different_bits_are_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.torch.probe.SHARE", 1.0)
    assert L.patch(LlamaStyle().bfloat16()).left[""].startswith("ambiguous")


def test_layers_of_one_configuration_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    probe = patching.probe
    monkeypatch.setattr(patching, "probe", lambda module: tried.append(module) or probe(module))
    model = nn.ModuleList([LlamaStyle(), LlamaStyle(), LlamaStyle(D + 1), OnceStyle(), OnceStyle(eps=1e-3)])
    assert len(L.patch(model).patched) == 5
    assert [list(model).index(module) for module in tried] == [0, 2, 3, 4]


# ---- what stays ----


def test_the_module_its_parameters_and_its_state_stay() -> None:
    model = nn.Sequential(LlamaStyle(), nn.LayerNorm(D)).eval()
    modules, parameters, state = list(model), list(model.parameters()), model.state_dict()
    L.patch(model)
    assert all(a is b for a, b in zip(model, modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    assert isinstance(model[0], LlamaStyle)
    assert isinstance(model[1], nn.LayerNorm)
    assert not model[0].training
    assert repr(model[0]) == "LlamaStyle(lngen: rms_norm, casts=llama)"
    model.load_state_dict(state)


def test_unpatch_puts_the_classes_back_and_patch_twice_changes_nothing() -> None:
    model = nn.Sequential(LlamaStyle(), nn.LayerNorm(D), nn.Linear(D, D))
    L.patch(model)
    classes = [type(module) for module in model]
    again = L.patch(model)
    assert (again.patched, again.left) == ({}, {})
    assert str(again).splitlines() == [
        "0 norms patched, 2 already patched, 0 left",
        "0  LlamaStyle  already patched: rms_norm, casts=llama",
        "1  LayerNorm   already patched: layer_norm",
    ]
    assert [type(module) for module in model] == classes
    assert (L.unpatch(model), L.unpatch(model)) == (2, 0)
    assert [type(module) for module in model] == [LlamaStyle, nn.LayerNorm, nn.Linear]


def test_unpatch_goes_through_classes_that_were_built_on_a_patched_one() -> None:
    model = nn.LayerNorm(D)
    L.patch(model)
    parametrize.register_parametrization(model, "weight", nn.Identity())  # fully_shard makes a subclass, too
    assert L.unpatch(model) == 1
    assert isinstance(model, nn.LayerNorm)
    assert torch.equal(model(rows()), nn.LayerNorm(D)(rows()))
    parametrize.remove_parametrizations(model, "weight")
    assert type(model) is nn.LayerNorm


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("patch_first", [False, True])
def test_fully_shard_goes_before_and_after_patch(patch_first: bool) -> None:
    model, mesh = nn.Sequential(LlamaStyle(), nn.LayerNorm(D)), dist.init_device_mesh("cpu", (1,))
    texts = L.patch(model).patched if patch_first else {}
    for module in model:
        fully_shard(module, mesh=mesh)
    texts = texts or L.patch(model).patched
    assert texts == {"0": "rms_norm, casts=llama", "1": "layer_norm"}
    assert all(isinstance(module, patching.PatchedNorm) and isinstance(module, FSDPModule) for module in model)
    assert L.unpatch(model) == 2
    assert not any(isinstance(module, patching.PatchedNorm) for module in model)
    assert all(isinstance(module, FSDPModule) for module in model)
    assert model(rows()).shape == rows().shape


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_keep_the_patch(copied: Callable[[Any], Any]) -> None:
    model = LlamaStyle()
    L.patch(model)
    other = copied(model)
    assert type(other) is type(model)
    assert (other.weight is model.weight) is (copied is copy.copy)
    assert torch.equal(other(rows()), model(rows()))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_stores_the_original_class(protocol: int) -> None:
    model = nn.Sequential(LlamaStyle(), nn.LayerNorm(D))
    L.patch(model)
    text = pickle.dumps(model, protocol)
    assert not [arg for _, arg, _ in pickletools.genops(text) if isinstance(arg, str) and "lngen" in arg]
    assert [type(module) for module in pickle.loads(text)] == [LlamaStyle, nn.LayerNorm]


# ---- training and torch.compile ----


@pytest.mark.parametrize("make", [LlamaStyle, partial(nn.LayerNorm, D)])
def test_compile_takes_the_whole_of_a_patched_model(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make())
    L.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, dy = rows().requires_grad_(), rows().flip(0)
    y = compiled(x)
    assert torch.equal(y, model(x))
    own, found = (torch.autograd.grad(m(x), [x, *model.parameters()], dy) for m in (model, compiled))
    assert all(torch.equal(a, b) for a, b in zip(own, found, strict=True))


def test_compile_takes_gates_and_images() -> None:
    x, images = rows(), rows().view(4, 16, 12, D).permute(0, 3, 1, 2)
    for make, given in ((Mamba2Style, (x, x.flip(1))), (ConvNextStyle, (images,))):
        model = make()
        L.patch(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given), model(*given))


def test_patch_reaches_into_a_compiled_model() -> None:
    model = torch.compile(nn.Sequential(LlamaStyle()), fullgraph=True, backend="aot_eager")
    wanted = model(rows())
    assert L.patch(model).patched == {"_orig_mod.0": "rms_norm, casts=llama"}
    assert agree(wanted, model(rows()))
    assert torch.equal(model(rows()), model._orig_mod(rows()))


# ---- what is said ----


def test_the_table_has_a_line_for_layers_that_differ_in_their_number() -> None:
    layers = [nn.ModuleDict({"norm": LlamaStyle(), "group": nn.GroupNorm(2, D)}) for _ in range(12)]
    found = L.patch(nn.ModuleDict({"layers": nn.ModuleList(layers), "last": nn.LayerNorm(D)}))
    assert str(found).splitlines() == [
        "13 norms patched, 12 left",
        "layers.0..11.norm x12   LlamaStyle  rms_norm, casts=llama",
        "last                    LayerNorm   layer_norm",
        "layers.0..11.group x12  GroupNorm   left: normalises no rows",
    ]


def test_the_root_has_a_line_and_nothing_gives_none() -> None:
    assert str(L.patch(nn.LayerNorm(D))).endswith("(the model)  LayerNorm  layer_norm")
    assert str(L.patch(nn.Linear(2, 2))) == "0 norms patched, 0 left"


def test_a_warning_says_that_the_cpu_is_slow_where_patch_was_called() -> None:
    with pytest.warns(UserWarning, match="50 to 300 times slower") as caught:
        L.patch(nn.LayerNorm(D))
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        L.patch(nn.LayerNorm(D, device="meta"))
        L.patch(nn.Linear(2, 2))
