"""If these fail, a member rounds elsewhere than the models whose weights were trained with it.

The models are those of Hugging Face Transformers: the forwards of LlamaRMSNorm, GemmaRMSNorm, T5LayerNorm and of three
gated norms, written out. Their reciprocal roots and sums are torch's, so a row's factor may differ by a unit in the
last place of f32, and few results by one of their own.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DType
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import parse_spec
from lngen.proof.check.inputs import random_inputs

D, ROWS = 4096, 16
EPS = 1e-6
MOSTLY = 0.999
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
Forward = Callable[[Tensor, Tensor], Tensor]


def llama(x: Tensor, gamma: Tensor) -> Tensor:
    stored = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return gamma * x.to(stored)


def gemma(x: Tensor, gamma: Tensor) -> Tensor:
    x32 = x.float()
    output = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    output = output * (1.0 + gamma.float())
    return output.type_as(x)


def t5(x: Tensor, gamma: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    if gamma.dtype in (torch.float16, torch.bfloat16):
        x = x.to(gamma.dtype)
    return gamma * x


def once(x: Tensor, gamma: Tensor) -> Tensor:
    return llama(x.float(), gamma.float()).to(x.dtype)


MODELS: dict[str, Forward] = {"llama": llama, "gemma": gemma, "t5": t5, "once": once}


def to_torch(array: Array, dtype: str) -> Tensor:
    """The same numbers; torch knows no bfloat16 of NumPy."""
    return torch.tensor(array.astype(np.float32)).to(TORCH[dtype])


def steps(got: Array, want: Tensor, dtype: str) -> Array:
    """How many numbers of the dtype each of ``got`` is away from that of ``want``, which have the same sign."""
    other = want.float().numpy().astype(NUMPY_DTYPE[DType(dtype)])
    whole = [a.view(f"i{a.dtype.itemsize}").astype(np.int64) for a in (got, other)]
    assert (np.signbit(got) == np.signbit(other)).all()
    return np.asarray(abs(whole[0] - whole[1]))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("casts", MODELS)
def test_the_bits_are_the_model_s(casts: str, dtype: str) -> None:
    spec = parse_spec(f"rmsnorm.fwd:d={D},dtype={dtype},casts={casts},eps={EPS}")
    inputs = random_inputs(spec, ROWS)
    x, gamma = (to_torch(inputs[n], dtype) for n in ("x", "gamma"))
    away = steps(interpret(spec.graph(), inputs)["y"], MODELS[casts](x, gamma), dtype)
    if dtype == "f32":
        assert away.max() <= 4  # no storage rounding hides the last bit of a sum
    else:
        assert away.max() <= 1
        assert (away == 0).mean() > MOSTLY


def qwen3_next(x: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    return (llama(x, gamma) * torch.nn.functional.silu(z.float())).to(x.dtype)


def mamba2(x: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    wide = x.float() * torch.nn.functional.silu(z.float())
    return gamma * once(wide, torch.ones_like(gamma)).to(x.dtype)


def kimi_linear(x: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    return (once(x.float(), gamma) * torch.sigmoid(z.float())).to(x.dtype)


GATED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "casts=llama": qwen3_next,
    "casts=llama,gate_first=yes": mamba2,
    "act=sigmoid": kimi_linear,
}


@pytest.mark.parametrize("weight", ["", "f32"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("keys", GATED)
def test_gated_norms_round_where_the_models_do(keys: str, dtype: str, weight: str) -> None:
    """A weight of f32 beside 16-bit rows leaves the product before the gate unrounded; Mamba 2's result is f32 then."""
    spec = parse_spec(f"gated_rmsnorm.fwd:d={D},dtype={dtype},eps={EPS},weight={weight or dtype},{keys}")
    inputs = random_inputs(spec, ROWS)
    x, z = (to_torch(inputs[n], dtype) for n in ("x", "z"))
    want = GATED[keys](x, z, to_torch(inputs["gamma"], weight or dtype)).to(x.dtype)
    away = steps(interpret(spec.graph(), inputs)["y"], want, dtype)
    if dtype == "f32":
        assert away.max() <= 8  # of a sum and an exp
    else:
        assert away.max() <= 2
        assert (away == 0).mean() > MOSTLY


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_nemotron_rounds_one_and_its_weight_to_the_dtype_of_the_weight(dtype: str) -> None:
    spec = parse_spec(f"layernorm.fwd:d={D},dtype={dtype},casts=nemotron,beta=no,eps={EPS}")
    inputs = random_inputs(spec, ROWS)
    x, gamma = (to_torch(inputs[n], dtype) for n in ("x", "gamma"))
    want = torch.nn.functional.layer_norm(x, (D,), gamma + 1.0, None, EPS)
    assert (to_torch(interpret(spec.graph(), inputs)["y"], dtype) == want).double().mean() > MOSTLY
    unrounded = parse_spec(f"layernorm.fwd:d={D},dtype={dtype},zero_centred=yes,beta=no,eps={EPS}")
    assert (to_torch(interpret(unrounded.graph(), inputs)["y"], dtype) != want).double().mean() > 0.1


def test_chameleon_rounds_the_norm_its_product_and_its_sum() -> None:
    """In bf16, of heads with a weight and a bias of their own."""
    spec = parse_spec(f"qk_layernorm.fwd:d=512,dtype=bf16,head=64,head_weights=own,casts=eager,eps={EPS}")
    inputs = random_inputs(spec, ROWS)
    x, gamma, beta = (to_torch(inputs[n], "bf16").unflatten(-1, (8, 64)) for n in ("x", "gamma", "beta"))
    want = (torch.nn.functional.layer_norm(x, (64,), None, None, EPS) * gamma + beta).flatten(-2)
    assert (to_torch(interpret(spec.graph(), inputs)["y"], "bf16") == want).double().mean() > MOSTLY
    once_rounded = parse_spec(str(spec).replace("casts=eager,", ""))
    assert (to_torch(interpret(once_rounded.graph(), inputs)["y"], "bf16") != want).double().mean() > 0.1


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_orders_differ(dtype: str) -> None:
    """Each profile is told from the others by more bits than its own model's arithmetic explains."""
    inputs = random_inputs(parse_spec(f"rmsnorm.fwd:d={D},dtype={dtype}"), ROWS)
    x, gamma = (to_torch(inputs[n], dtype) for n in ("x", "gamma"))
    found = {}
    for casts in ("once", "llama", "gemma"):
        spec = parse_spec(f"rmsnorm.fwd:d={D},dtype={dtype},casts={casts},eps={EPS}")
        found[casts] = interpret(spec.graph(), inputs)["y"]
    assert 0.2 < (steps(found["llama"], once(x, gamma), dtype) > 0).mean() < 0.35
    assert (found["gemma"] != found["once"]).mean() > 0.9


def test_t5_rounds_to_the_dtype_of_its_weights() -> None:
    """bf16 weights over f32 rows: rounded before the product, which is of f32 and bf16 numbers no more."""
    spec = parse_spec(f"rmsnorm.fwd:d={D},dtype=f32,weight=bf16,out=bf16,casts=t5,eps={EPS}")
    inputs = random_inputs(spec, ROWS)
    got = interpret(spec.graph(), inputs)["y"]
    away = steps(got, t5(to_torch(inputs["x"], "f32"), to_torch(inputs["gamma"], "bf16")), "bf16")
    assert away.max() <= 1
    assert (away == 0).mean() > MOSTLY
    once_rounded = parse_spec(f"rmsnorm.fwd:d={D},dtype=f32,weight=bf16,out=bf16,eps={EPS}")
    assert (interpret(once_rounded.graph(), inputs)["y"] != got).mean() > 0.2


@pytest.mark.parametrize(("keys", "stored"), [("", "bf16"), ("residual_dtype=f32", "f32")])
@pytest.mark.parametrize("rounds", [False, True])
def test_the_sum_is_rounded_where_the_key_says(keys: str, stored: str, rounds: bool) -> None:
    """h is x + residual in the residual's dtype; the norm is of h (Liger, vLLM) or of the sum in f32."""
    more = ",".join(filter(None, (keys, "" if rounds else "round_sum=no")))
    spec = parse_spec(f"add_rmsnorm.fwd:d={D},dtype=bf16,eps={EPS}" + f",{more}" * bool(more))
    inputs = random_inputs(spec, ROWS)
    x, gamma = (to_torch(inputs[n], "bf16") for n in ("x", "gamma"))
    total = x.float() + to_torch(inputs["residual"], stored).float()
    h = total.to(TORCH[stored])
    got = interpret(spec.graph(), inputs)
    assert (steps(got["h"], h, stored) == 0).all()
    want = once(h.float() if rounds else total, gamma.float()).to(torch.bfloat16)
    away = steps(got["y"], want, "bf16")
    assert away.max() <= 1
    assert (away == 0).mean() > MOSTLY
    if stored == "bf16":
        other = once(total if rounds else h.float(), gamma.float()).to(torch.bfloat16)
        assert (steps(got["y"], other, "bf16") > 0).mean() > 0.05


def test_zero_centred_weights_are_added_in_f32() -> None:
    """1 + gamma of small bf16 weights: a sum in bf16 would lose them (Transformer Engine and Quack add in f32, too)."""
    spec = parse_spec(f"layernorm.fwd:d={D},dtype=bf16,zero_centred=yes,out=f32")
    inputs = random_inputs(spec, ROWS)
    inputs["gamma"] = (inputs["gamma"].astype(np.float32) * 1e-3).astype(inputs["gamma"].dtype)
    x, gamma, beta = (inputs[n].astype(np.float64) for n in ("x", "gamma", "beta"))
    xhat = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    got = interpret(spec.graph(), inputs)["y"]
    np.testing.assert_allclose(got, xhat * (1 + gamma) + beta, rtol=1e-5, atol=1e-5)
    assert np.abs(got - (xhat + beta)).max() > 1e-3
