"""If these fail, an input of whole numbers or truth values is not loaded, converted or passed on as its dtype says."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import lngen
import lngen.torch
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import F32, F64, D, DType, M, Type, Value, parse
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.compiler.lower import lower
from lngen.compiler.passes import orders
from lngen.compiler.problem import problem
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import Spec, make_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from whole_numbers import WHOLE, everywhere


def masked(b: GraphBuilder) -> None:
    """The rows of x where the mask is true, less their means."""
    h = b.where_gt("h", b.input("mask", M, D, dtype="bool"), 0.0, b.input("x", M, D), 0.0)
    b.output("y", h - b.mean(h))


def spec_of(describe: Callable[[GraphBuilder], None], way: str, d: int, dtype: str) -> Spec:
    return make_spec(Definition("own", describe), way, {"d": d, "dtype": dtype})


def extreme(a: Array) -> Array:
    """Half of the whole numbers anywhere in their range."""
    if a.dtype.kind != "i":
        return a
    rng, info = np.random.default_rng(0), np.iinfo(a.dtype)
    return np.where(rng.random(a.shape) < 0.5, rng.integers(info.min, info.max, a.shape, a.dtype, endpoint=True), a)


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize(("way", "d", "x", "form"), [
    ("fwd", 64, "bf16", "tma"), ("fwd", 100, "f32", "registers"), ("bwd", 37, "f64", "registers"),
    ("bwd", 40, "f16", "cp_async"),
], ids=str)  # fmt: skip
def test_kernels_have_the_bits_of_the_interpreter(dtype: DType, way: str, d: int, x: str, form: str) -> None:
    spec = spec_of(everywhere(dtype), way, d, x)
    legal = [s for s in space(problem(spec.graph(), d)) if s.form == form]
    schedule = next(s for s in legal if s.cached_weights or not any(s.cached_weights for s in legal))
    inputs = {name: extreme(a) for name, a in random_inputs(spec, 5).items()}
    outcome = run_plan(lower(spec, schedule), inputs)
    assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == []
    assert outcome.findings == ()


@pytest.mark.parametrize(("d", "forms"), [
    (261, ["multipass", "registers", "tma_unaligned"]), (48, ["cp_async", "multipass", "registers", "tma"]),
], ids=str)  # fmt: skip
def test_a_mask_is_loaded_in_every_form(d: int, forms: list[str]) -> None:
    """D = 261 is loaded byte by byte, D = 48 in words of up to 8 bytes."""
    spec = spec_of(masked, "fwd", d, "bf16")
    found = {s.form: s for s in space(problem(spec.graph(), d))}
    assert sorted(found) == forms
    inputs = random_inputs(spec, 5)
    for schedule in found.values():
        outcome = run_plan(lower(spec, schedule), inputs)
        assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == []
        assert outcome.findings == ()


def test_a_conversion_rounds_once_to_nearest_even() -> None:
    """From i64 also where a step by f64 would meet a tie."""
    numbers = np.array([2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**54 + 2**30 + 1, 2**63 - 1, -(2**63)], np.int64)
    assert round_to(numbers, F32).tolist() == [2.0**24, 2.0**24 + 4, -(2.0**24), 2.0**54 + 2**31, 2.0**63, -(2.0**63)]
    assert round_to(np.array([2**53 + 1, 2**53 + 3], np.int64), F64).tolist() == [2.0**53, 2.0**53 + 4]
    text = "graph @f(%n: i64[M, D]) -> (f32[M, D]) {\n  %y : f32[M, D] = cast %n {to=f32}\n  return %y\n}"
    definition = Definition.from_graph(parse(text))
    plan = lower(spec := make_spec(definition, "fwd", {"d": 6}), next(iter(space(problem(spec.graph(), 6)))))
    found = run_plan(plan, {"n": numbers[None, :]}).results["y"]
    assert found.tolist() == round_to(numbers, F32)[None, :].tolist()


def test_a_mask_changes_no_order() -> None:
    """Chunks are 16 bytes of the numbers with digits; of whole numbers alone, as if one had two bytes at least."""

    def chunk(**dtypes: str) -> int:
        typed = [Value(name, Type(DType(t), (M, D))) for name, t in dtypes.items()]
        b = lngen.ir.Builder("f_fwd", params=tuple(typed))
        b.results.append(b.reduce_sum("s", b.cast("x", typed[0], to=F32), axis=D))
        return orders(b.build(*b.results), 64)[0].chunk

    assert chunk(x="bf16") == chunk(x="bf16", mask="bool") == chunk(n="int8") == 8
    assert chunk(x="f32", mask="bool") == chunk(x="f32", n="i64") == chunk(n="i32") == 4
    assert chunk(n="i64") == 2


def test_a_norm_takes_a_mask_of_numpy_and_of_torch() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(3, 8)).astype(np.float32), rng.random((3, 8)) < 0.5
    want = np.where(mask, x, 0) - np.where(mask, x, 0).mean(1, keepdims=True)
    norm = lngen.compile(masked, d=8)
    y, saved = norm.forward(mask, x)
    assert np.allclose(y, want, atol=1e-6)
    dx = norm.backward(np.ones_like(x), saved)
    assert np.allclose(dx, 0)
    with pytest.raises(lngen.errors.ArrayError, match="'mask' is expected to be bool, got int8; cast it"):
        norm.forward(mask.astype(np.int8), x)
    own = lngen.torch.function(masked)
    given = torch.from_numpy(x).requires_grad_()
    found = own(torch.from_numpy(mask), given)
    assert np.array_equal(found.detach().numpy(), y)
    (gradient,) = torch.autograd.grad(found, given, torch.from_numpy(x))
    (expected,) = torch.autograd.grad(
        (h := given * torch.from_numpy(mask)) - h.mean(1, keepdim=True), given, torch.from_numpy(x)
    )
    assert torch.allclose(gradient, expected, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"'mask' is expected to be one of torch.bool; cast it"):
        own(torch.from_numpy(mask).float(), given)
    with pytest.raises(RuntimeError, match=r"'x' is expected to be one of torch.float16, .*, torch.float64; cast it"):
        own(torch.from_numpy(mask), torch.from_numpy(x).long())


@pytest.mark.parametrize("dtype", WHOLE)
def test_inputs_are_drawn_as_their_dtype_holds_them(dtype: DType) -> None:
    """For checks, for test vectors, and for a repro."""
    from lngen.packs.known_answers import vectors
    from lngen.packs.repro_program import drawn

    spec = spec_of(everywhere(dtype), "fwd", 16, "f32")
    inputs = random_inputs(spec, 5)
    assert {inputs[name].dtype for name in ("n", "row", "column", "number")} == {NUMPY_DTYPE[dtype]}
    assert len(np.unique(inputs["n"])) > 1
    assert any(name.endswith("special/n.bin") for name in vectors(spec.with_direction("bwd")))
    bits = drawn(0, "n", str(dtype), (40, 3), -1.5, 2.5).view(NUMPY_DTYPE[dtype])
    assert bits.shape == (40, 3)
    assert {*np.unique(bits).tolist()} == ({0, 1} if dtype is DType.BOOL else {-1, 0, 1, 2})
