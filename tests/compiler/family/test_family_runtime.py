"""If these fail, a caller of a member gets results in a wrong place or order, or saved values lose bits."""

from typing import Any

import numpy as np
import pytest

import lngen
from fake_gpu import FakeGpu
from family import Keys, gradients, results
from graph_names import HEADS
from lngen.compiler.graphs import GRAPHS, GraphBuilder
from lngen.compiler.ir import D as FEATURES
from lngen.compiler.ir import DType, Lengths, M, sets_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import parse_spec
from lngen.errors import ArrayError
from lngen.launch.array_norm import Saved
from lngen.launch.runtime.norm import Norm
from lngen.proof.check.inputs import draw
from lngen.proof.check.oracles import layernorm_backward

D, ROWS = 24, 5
BF16, F32 = NUMPY_DTYPE[DType.BF16], np.dtype(np.float32)


def norm_of(name: str, **keys: Any) -> Norm:
    return lngen.compile(name, **{"d": D, **keys})


def arrays_for(norm: Norm, seed: int = 1) -> tuple[dict[str, Array], tuple[Array, ...]]:
    """Inputs by name, and a cotangent of every output."""
    rng, forward = np.random.default_rng(seed), norm.spec().forward()
    outputs = norm.spec().definition.outputs(norm.spec().options)
    sets = sets_of(forward)
    sizes = Lengths({M: ROWS, FEATURES: norm.spec().d, **({sets: 1} if sets else {})})
    inputs = {p.name: draw(rng, p, sizes, 0.5) for p in forward.params}
    return inputs, tuple(draw(rng, r, sizes, 0.3) for r in forward.results if r.name in outputs)


def step(norm: Norm, **more: Any) -> tuple[Any, Saved, tuple[Array, ...], tuple[Array, ...]]:
    """Results, what is saved, cotangents and gradients of one forward and one backward."""
    inputs, cotangents = arrays_for(norm)
    y, saved = norm.forward(**inputs)
    return y, saved, cotangents, norm.backward(cotangents if len(cotangents) > 1 else cotangents[0], saved, **more)


# ---- what comes back ----


def test_the_gradients_of_equal_terms_are_one_array() -> None:
    *_, (dx, dresidual, dx1, dgamma) = step(norm_of("add_rmsnorm", x1=True))
    assert dx is dresidual is dx1
    assert dgamma.shape == (D,)
    *_, (dx, dresidual, *_) = step(norm_of("add_layernorm", dtype="bf16", residual_dtype="f32"))
    assert (dx.dtype, dresidual.dtype) == (BF16, F32)
    np.testing.assert_array_equal(dx, dresidual.astype(BF16))
    *_, (dx, dresidual, _, _, _) = step(norm_of("add_layernorm", colscale=True))
    assert dx is not dresidual


def test_a_cotangent_that_is_none_leaves_every_gradient_its_place() -> None:
    """Zeros are not the same result: dgamma1 and dbeta1 may be changed one by one."""
    for keys in ({}, {"colscale": True}):
        norm = norm_of("parallel_layernorm", **keys)
        inputs, (dy, dy1, dh) = arrays_for(norm)
        _, saved = norm.forward(**inputs)
        names = norm.spec("bwd").differentiates
        for of, cotangents in {"y": (dy, None, None), "y1": (None, dy1, None), "h": (None, None, dh)}.items():
            found = dict(zip(names, norm.backward(cotangents, saved), strict=True))
            zero = {n for n, a in found.items() if not a.any()}
            without = {"y": {"gamma1", "beta1"}, "y1": {"gamma", "beta"}}
            assert zero == without.get(of, {"gamma", "beta", "gamma1", "beta1"})
            assert len({id(found[n]) for n in names if n not in ("x", "residual")}) == len(names) - 2
            out = tuple(None if n == "residual" else np.ones_like(found[n]) for n in names)
            norm.backward(cotangents, saved, out=out)
            for n, target in zip(names, out, strict=True):
                if target is not None:
                    np.testing.assert_array_equal(target, found[n])


def test_gradients_that_are_equal_for_some_cotangents_alone() -> None:
    def own(b: GraphBuilder) -> None:
        x, z, w = (b.input(name, M, FEATURES) for name in ("x", "z", "w"))
        b.output("y", b.neg("minus", x))
        b.output("p", b.mul("product", z, w))

    norm = lngen.compile(own, d=D)
    (dx, dz, dw) = step(norm)[-1]
    assert dz is not dw
    inputs, (dy, _) = arrays_for(norm)
    dx, dz, dw = norm.backward((dy, None), norm.forward(**inputs)[1])
    np.testing.assert_array_equal(dx, -dy)
    assert not dz.any()
    assert not dw.any()


# ---- out= ----


def test_out_has_a_place_for_every_gradient() -> None:
    norm = norm_of("add_layernorm", dtype="bf16")
    _, saved, cotangents, found = step(norm)
    target = np.empty_like(found[0])
    for out in ((target, None, None, None), (target, target, None, None)):
        again = norm.backward(cotangents, saved, out=out)
        assert again[0] is again[1] is target
        for a, b in zip(again, found, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- accumulate ----


@pytest.mark.parametrize(("name", "keys", "accumulate"), [
    ("layernorm", {}, "gamma+beta"),
    ("rmsnorm", {"dtype": "bf16"}, "gamma"),
    ("add_rmsnorm", {"dtype": "bf16", "colscale": True}, "colscale+gamma"),
    ("add_layernorm", {"dtype": "bf16"}, "residual"),
    ("gated_rmsnorm", {"dtype": "f16"}, "x+gamma"),
])  # fmt: skip
def test_gradients_are_added_as_a_caller_would_add_them(name: str, keys: dict[str, Any], accumulate: str) -> None:
    """In f32, to the gradient before it is rounded to the weight's dtype."""
    norm = norm_of(name, **keys, accumulate=accumulate)
    names, added = norm.spec("bwd").differentiates, accumulate.split("+")
    alone = norm_of(name, **keys, grad="f32")
    _, _, cotangents, plain = step(alone)
    rng = np.random.default_rng(4)
    out = tuple(rng.normal(size=p.shape).astype(F32) if n in added else None for n, p in zip(names, plain, strict=True))
    before = [None if a is None else a.copy() for a in out]
    inputs, _ = arrays_for(norm)
    given = cotangents if len(cotangents) > 1 else cotangents[0]
    found = norm.backward(given, norm.forward(**inputs)[1], out=out)
    for n, got, target, was, gradient in zip(names, found, out, before, plain, strict=True):
        if n in added:
            assert got is target
            if gradient.dtype == F32:
                np.testing.assert_array_equal(got, was + gradient)
            else:  # a gradient with rows, which grad= does not widen
                assert np.abs(got - was - gradient.astype(F32)).max() < 0.01 * np.abs(gradient.astype(F32)).max()
        elif gradient.dtype == got.dtype:
            np.testing.assert_array_equal(got, gradient)


def test_what_is_added_to_is_not_lost_for_a_second_backward() -> None:
    norm = norm_of("layernorm", accumulate="gamma")
    inputs, (dy,) = arrays_for(norm)
    _, saved = norm.forward(**inputs)
    total = np.zeros(D, F32)
    for _ in range(2):
        norm.backward(dy, saved, out=(None, total, None))
    once = norm_of("layernorm").backward(dy, saved)[1]
    np.testing.assert_array_equal(total, once + once)


def test_a_cotangent_that_is_none_adds_zeros() -> None:
    norm = norm_of("add_rmsnorm", accumulate="gamma")
    inputs, (_, dh) = arrays_for(norm)
    total = np.arange(D, dtype=F32)
    found = norm.backward((None, dh), norm.forward(**inputs)[1], out=(None, None, total))
    assert found[2] is total
    np.testing.assert_array_equal(total, np.arange(D))


# ---- grad ----


@pytest.mark.parametrize(
    "name", [n for n in GRAPHS if n not in HEADS and len(parse_spec(f"{n}.bwd:d=8").differentiates) > 1]
)
def test_the_dtype_of_the_gradients_of_weights(name: str) -> None:
    """With grad=f32 the sums as they are; rounded, they are the bits of the default."""
    plain, wide = step(norm_of(name, dtype="bf16"))[-1], step(norm_of(name, dtype="bf16", grad="f32"))[-1]
    for one, other in zip(plain, wide, strict=True):
        assert other.dtype == (BF16 if one.shape == (ROWS, D) else F32)
        np.testing.assert_array_equal(one, other.astype(BF16))


# ---- a stored sum ----


@pytest.mark.parametrize("mean", [0.0, 10.0, 300.0])
@pytest.mark.parametrize("d", [1, 37, 1024])
@pytest.mark.parametrize("name", ["add_layernorm", "parallel_layernorm"])
def test_backward_of_a_sum_is_that_of_what_is_stored(name: str, d: int, mean: float) -> None:
    """Also where h is rounded by far more than its deviations: dgamma and dbeta are those of the norm of h."""
    rng, bf16 = np.random.default_rng(d), NUMPY_DTYPE[DType.BF16]
    norm = lngen.compile(name, d=d, dtype="bf16", weight="f32")
    x = rng.normal(size=(64, d)).astype(bf16)
    residual = (rng.normal(size=(64, d)) + mean * rng.choice([-1, 1], (64, 1))).astype(bf16)
    weights = [
        rng.uniform(0.5, 2, d).astype(np.float32) for p in norm.spec().forward().params if p.type.axes == (FEATURES,)
    ]
    results, saved = norm.forward(x, residual, *weights)
    dy = rng.normal(0.3, 1, (64, d)).astype(bf16)
    found = norm.backward((dy, *[None] * (len(results) - 1)), saved)
    h = results[-1].astype(np.float64)
    dx, dgamma, dbeta = layernorm_backward(dy.astype(np.float64), h, weights[0].astype(np.float64))
    np.testing.assert_allclose(found[2], dgamma, rtol=0, atol=2e-6 * np.abs(dy).astype(np.float64).sum(axis=0).max())
    np.testing.assert_allclose(found[3], dbeta, rtol=0, atol=2e-6 * np.abs(dy).astype(np.float64).sum(axis=0).max())
    np.testing.assert_allclose(found[0].astype(np.float64), dx, rtol=2**-8, atol=2**-7 * np.abs(dx).mean() + 1e-30)


# ---- save ----


EXACT = [
    ("add_layernorm", "dtype=bf16", "none"),
    ("add_rmsnorm", "dtype=bf16,x1=yes", "none"),
    ("layernorm", "dtype=bf16", "rstd"),
    ("layernorm", "dtype=bf16", "mean"),
    ("softmax", "dtype=bf16", "rowsum"),
]


@pytest.mark.parametrize(("name", "keys", "save"), EXACT)
def test_what_is_computed_again_has_the_bits_of_what_is_saved(name: str, keys: str, save: str) -> None:
    """Also with h, where h is the sum without a rounding, or the norm is of h as it is stored."""
    given = dict(part.split("=") for part in keys.split(",") if part)
    stats, other = norm_of(name, **given), norm_of(name, **given, save=save)
    for one, again in zip(step(stats)[-1], step(other)[-1], strict=True):
        np.testing.assert_array_equal(one, again)
    saved = {p.name for p in other.spec("bwd").graph().params}
    kept = {*other.spec().definition.statistics(other.spec().options)} & saved
    assert kept == ({save} if save != "none" else set())


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_row_rebuilt_from_y_is_off_by_the_rounding_of_y(norm: str, dtype: str) -> None:
    """|error| <= u (|xhat| + |beta / gamma|); dgamma of one row and dy = 1 is that row itself."""
    made = lngen.compile(norm, d=4096, dtype=dtype, save="y", weight="f32", beta=True)
    spec = made.spec("bwd")
    assert {p.name for p in spec.graph().params} == {"dy", "y", "gamma", "beta", "rstd"}
    inputs, _ = arrays_for(made)
    rng = np.random.default_rng(6)
    inputs = {n: a[:1] if n == "x" else a for n, a in inputs.items()}
    inputs["gamma"] = (rng.choice([-1, 1], 4096) * 2.0 ** rng.uniform(-4, 2, 4096)).astype(F32)
    inputs["beta"] = (0.05 * rng.normal(size=4096)).astype(F32)
    y, saved = made.forward(**inputs)
    dgamma = made.backward(np.ones_like(y), saved)[1].astype(np.float64)
    float64 = {n: a.astype(np.float64) for n, a in inputs.items()}
    xhat = results(norm, Keys(), {"x": float64["x"]})["y"][0]
    u = DType(dtype).roundoff
    ratio = np.abs(dgamma - xhat) / (u * (np.abs(xhat) + np.abs(float64["beta"] / float64["gamma"])))
    assert 0.5 < ratio.max() <= 1.05  # the arithmetic in f32 rounds, too
    plain = lngen.compile(norm, d=4096, dtype=dtype, weight="f32", beta=True)
    exact = plain.backward(np.ones_like(y), plain.forward(**inputs)[1])[1]
    assert np.abs(exact - xhat).max() < 1e-5


def test_saved_sums_stand_for_their_terms() -> None:
    """h, and x besides where its factor has a gradient; a factor of 0, as of a row that is dropped, is one like any."""
    for keys, taken in (
        ({}, {"h"}),
        ({"x1": True}, {"h"}),
        ({"h": False}, {"x", "residual"}),
        ({"rowscale": True}, {"h", "x"}),
        ({"rowscale": True, "x1": True, "colscale": True}, {"h", "x"}),
        ({"rowscale": True, "residual": False}, {"x"}),
    ):
        norm = norm_of("add_rmsnorm", **keys)
        wide = {p.name for p in norm.spec("bwd").graph().params if len(p.type.axes) == 2}
        assert wide - {"dy", "dh"} == taken
        inputs, cotangents = arrays_for(norm)
        for name in {"rowscale", "colscale"} & inputs.keys():
            inputs[name][1:3] = 0
        float64 = {n: a.astype(np.float64) for n, a in inputs.items()}
        _, saved = norm.forward(**inputs)
        found = norm.backward(cotangents if len(cotangents) > 1 else cotangents[0], saved)
        given = {n: c.astype(np.float64) for n, c in zip(("y", "h"), cotangents, strict=False)}
        want = gradients("add_rmsnorm", Keys(), float64, given, norm.spec("bwd").differentiates)
        for got, expected in zip(found, want.values(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


# ---- weights with which a row cannot be rebuilt ----


def small(norm: Norm, gamma: float = 1e-3, place: int = 3) -> dict[str, Array]:
    inputs, _ = arrays_for(norm)
    inputs["gamma"] = np.ones_like(inputs["gamma"])
    inputs["gamma"][place] = gamma
    inputs["beta"] = np.ones_like(inputs["beta"])
    return inputs


def test_weights_that_are_large_enough_are_taken() -> None:
    """``tests/messages/outputs.txt`` has those that are not."""
    norm = norm_of("layernorm", dtype="bf16", save="y")
    norm.forward(**small(norm, 2.0**-3))  # up to 0.035
    norm_of("layernorm", dtype="bf16").forward(**small(norm, 0.0))
    norm = norm_of("layernorm", dtype="bf16", save="y", zero_centred=True)
    norm.forward(**small(norm, 0.0))


class Weights:
    """A FakeGpu whose weights can be read: which were copied, one entry a copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
        self.gpu, self.copied, self.held = gpu, [], {}
        monkeypatch.setattr("lngen.launch.runtime.norm.host_copy", self.copy)

    def hold(self, array: Array) -> Any:
        made = self.gpu.array(str(DType.of(array.dtype)), *array.shape)
        self.held[made.address] = array
        return made

    def copy(self, value: Any, address: int, d: int, device: int) -> Array:
        self.copied.append(value.name)
        return self.held[address]


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    return Weights(monkeypatch, FakeGpu(monkeypatch))


def test_small_weights_are_refused_on_a_gpu(weights: Weights) -> None:
    norm = norm_of("layernorm", dtype="bf16", save="y")
    given = [weights.hold(a) for a in small(norm, 2.0**-10).values()]
    for _ in range(2):
        with pytest.raises(ArrayError, match=r"gamma\[3\] is 0.000976562"):
            norm.forward(*given)
    assert weights.copied == ["gamma", "beta"] * 2
    assert weights.gpu.launched == []


def test_weights_are_checked_once_for_each_address(weights: Weights) -> None:
    norm = norm_of("layernorm", dtype="bf16", save="y")
    x, gamma, beta = (weights.hold(a) for a in small(norm, 1.0).values())
    for _ in range(3):
        norm.forward(x, gamma, beta)
    assert weights.copied == ["gamma", "beta"]
    other = weights.hold(weights.held[gamma.address])
    norm.forward(x, other, beta)
    norm.forward(x, gamma, beta)
    assert weights.copied == ["gamma", "beta"] * 2
    assert len(weights.gpu.launched) == 5


def test_weights_are_not_checked_while_a_graph_is_captured(weights: Weights) -> None:
    """A copy would break the capture; the next call outside of it checks them."""
    norm = norm_of("layernorm", dtype="bf16", save="y")
    given = [weights.hold(a) for a in small(norm, 0.0).values()]
    weights.gpu.stream_of = lambda: 77
    weights.gpu.captures[77] = 1
    norm.forward(*given)
    assert weights.copied == []
    weights.gpu.captures.clear()
    with pytest.raises(ArrayError, match=r"gamma\[3\] is 0"):
        norm.forward(*given)


def test_a_norm_that_rebuilds_nothing_checks_no_weights(weights: Weights) -> None:
    for name, keys in (("layernorm", {}), ("add_layernorm", {}), ("layernorm", {"save": "none"})):
        norm = norm_of(name, dtype="bf16", **keys)
        norm.forward(*(weights.hold(a) for a in arrays_for(norm)[0].values()))
    assert weights.copied == []
    assert len(weights.gpu.launched) == 3


def sum_of_two(b: GraphBuilder) -> None:
    """Two products with 1 + weight, in which the two constants are one in backward."""
    h, w, v = (
        b.input("x", M, FEATURES) + b.input("residual", M, FEATURES),
        b.input("w", FEATURES),
        b.input("v", FEATURES),
    )
    b.output("y", h * (w + 1.0))
    b.output("y1", h * (v + 1.0))
    b.output("h", h, save=True)


def product_of_two(b: GraphBuilder) -> None:
    """Two arguments of tanh with a factor that is one constant in backward, one of them with a large weight."""
    x, z, w = b.input("x", M, FEATURES), b.input("z", M, FEATURES), b.input("w", FEATURES)
    b.output("y", (x * 3.0).tanh() * ((z + w) * 3.0).tanh())


@pytest.mark.parametrize(("graph", "keys"), [
    ("parallel_rmsnorm", {"zero_centred": True}), ("parallel_layernorm", {"zero_centred": True}), (sum_of_two, {}),
    (product_of_two, {}),
])  # fmt: skip
def test_what_backward_repeats_is_not_taken_for_rebuilt(graph: Any, keys: dict[str, Any]) -> None:
    """Equal constants of forward are one in backward; a weight of any size is allowed."""
    norm = lngen.compile(graph, d=D, dtype="bf16", **keys)
    inputs, cotangents = arrays_for(norm)
    inputs = {n: np.full_like(a, 40) if a.ndim == 1 else a for n, a in inputs.items()}
    _, saved = norm.forward(**inputs)
    found = norm.backward(cotangents, saved)
    assert all(np.isfinite(a.astype(np.float64)).all() for a in found)
