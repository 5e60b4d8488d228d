"""If these fail, a backward with ``dx_quant`` does not write dx over its scale, as ``lngen help quantised`` says."""

import numpy as np
import pytest

from float8 import nearest
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DType
from lngen.compiler.spec import parse_spec
from lngen.errors import SpecError
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from plans import plan_of_each_form

GRAPHS = ["rmsnorm", "layernorm", "add_rmsnorm", "gated_rmsnorm", "softmax", "parallel_layernorm"]


@pytest.mark.parametrize("scales", ["tensor", "block"])
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_dx_is_that_of_the_backward_over_its_scale(graph: str, dtype: str, scales: str) -> None:
    """In f32, where dx itself is not rounded; the other results stay as they are."""
    plain, spec = (
        parse_spec(f"{graph}.bwd:d=256,dtype=f32{keys}") for keys in ("", f",dx_quant={dtype},dx_scales={scales}")
    )
    inputs = random_inputs(spec, 5)
    inputs["x" if "x" in inputs else "h"][2] = 0
    inputs["dy"][1] *= np.float32(1e30)
    if "dx_scale" in inputs:
        inputs["dx_scale"] = np.array(0.0123, np.float32)
    found, want = interpret(spec.graph(), inputs), interpret(plain.graph(), inputs)
    dx, of = want.pop("dx"), DType(dtype)
    with np.errstate(all="ignore"):
        if scales == "tensor":
            scaled = dx / inputs["dx_scale"]
        else:
            blocks = dx.reshape(5, 2, 128)
            scale = np.maximum(np.abs(blocks).max(2) / np.float32(of.largest), np.float32(2.0**-126))
            assert np.array_equal(found["dx_scale"], scale)
            scaled = (blocks / scale[..., None]).reshape(5, 256)
    assert np.array_equal(found["dx"].view(np.uint8), nearest(scaled, of))
    assert mismatches({n: found[n] for n in want if n in found}, {n: want[n] for n in want if n in found}) == []
    assert {*found} == {*want, "dx", *(["dx_scale"] if scales == "block" else [])} | ({*found} & {"dresidual"})


@pytest.mark.parametrize("scales", ["tensor", "block"])
@pytest.mark.parametrize(("graph", "dtype"), [("rmsnorm", "bf16"), ("layernorm", "f16"), ("add_rmsnorm", "bf16")])
def test_kernels_have_the_interpreters_bits(graph: str, dtype: str, scales: str) -> None:
    spec = parse_spec(f"{graph}.bwd:d=256,dtype={dtype},dx_quant=e5m2,dx_scales={scales}")
    inputs = random_inputs(spec, 7)
    want = interpret(spec.graph(), inputs)
    for plan in plan_of_each_form(spec):
        outcome = run_plan(plan, inputs)
        assert mismatches(outcome.results, want) == [], plan
        assert outcome.findings == ()


@pytest.mark.parametrize(("keys", "why"), [
    ("dx_quant=int8", "no dx_quant 'int8'"), ("dx_scales=block", "needs 'dx_quant'"),
    ("dx_quant=e4m3,dx_scales=row", "no dx_scales 'row'"), ("dx_quant=e4m3,wrt=gamma", "leave one of them out"),
    ("dx_quant=e4m3,accumulate=x", "leave one of them out"),
])  # fmt: skip
def test_keys_that_do_not_fit_are_refused(keys: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse_spec(f"rmsnorm.bwd:d=64,{keys}")


def test_a_forward_has_no_such_key() -> None:
    with pytest.raises(SpecError, match="no key 'dx_quant'"):
        parse_spec("rmsnorm.fwd:d=64,dx_quant=e4m3")
    spec = parse_spec("rmsnorm.bwd:d=256,dx_quant=e4m3,dx_scales=block")
    assert spec.with_direction("fwd") == parse_spec("rmsnorm.fwd:d=256")
    assert parse_spec(str(spec)) == spec
    assert spec.slug == "rmsnorm_bwd__f32_d256_dxe4m3_byblock"
