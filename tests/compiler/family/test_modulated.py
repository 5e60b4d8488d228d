"""If these fail, AdaLN is another function: other formulas, another order of roundings, or another sample's numbers.

The models are closed forms in NumPy, which share nothing with the IR; the known answers are those of two peers' order.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lngen
from lngen import D as Axes
from lngen import M
from lngen.compiler.compile import Compilation
from lngen.compiler.spec import make_spec, parse_spec
from lngen.errors import LngenError

Array = Any
RNG = np.random.default_rng(49)
B, T, D = 3, 5, 24


def modulated(
    x: Array, t: Array, s: Array, *, gate: Array, residual: Array, gamma: Array, beta: Array, rms: bool
) -> Any:
    """y and h for x [B, T, D] and the others [B, 1, D], [B, T, D] or [D]."""
    h = residual + gate * x
    c = h if rms else h - h.mean(-1, keepdims=True)
    xhat = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-6)
    return (xhat * gamma + beta) * (1 + s) + t, h, xhat


def gradients(dy: Array, dh: Array, x: Array, s: Array, xhat: Array, h: Array, **rest: Any) -> dict[str, Array]:
    """The gradients in closed form: research of the field's kernels, ``lngen help modulated`` has them."""
    gamma, beta, gate, rms = rest["gamma"], rest["beta"], rest["gate"], rest["rms"]
    c = h if rms else h - h.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-6)
    g = dy * (1 + s) * gamma
    mean = 0.0 if rms else g.mean(-1, keepdims=True)
    dz = rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdims=True)) + dh
    per = (lambda a: a) if s.shape == x.shape else (lambda a: a.sum(1, keepdims=True))
    return {
        "dx": dz * gate,
        "dresidual": dz,
        "dshift": per(dy),
        "dscale": per(dy * (xhat * gamma + beta)),
        "dgate": per(dz * x),
        "dgamma": (dy * (1 + s) * xhat).sum((0, 1)),
        "dbeta": (dy * (1 + s)).sum((0, 1)),
    }


OPTIONS = (
    {},
    {"gate": True, "residual": True},
    {"residual": True},
    {"gamma": True, "beta": True},
    {"modulation": "row", "gate": True, "residual": True},
    {"modulation": "row", "gamma": True},
    {"shift": False},
)


@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_and_backward_are_the_closed_form(options: dict[str, Any], rms: bool) -> None:
    """In float64, with a cotangent of h where there is one."""
    shape = (B, T, D) if options.get("modulation") == "row" else (B, 1, D)
    arrays = {name: RNG.normal(0.3, 1, shape) for name in ("shift", "scale", "gate")}
    arrays |= {"x": RNG.normal(0.5, 1, (B, T, D)), "residual": RNG.normal(size=(B, T, D))}
    arrays |= {"gamma": RNG.normal(size=D), "beta": RNG.normal(size=D)}
    there = ["x", *(["shift"] if options.get("shift", True) else []), "scale"]
    there += [n for n in ("gate", "residual", "gamma", "beta") if options.get(n)]
    absent = {"shift": 0.0, "gate": 1.0, "residual": 0.0, "gamma": 1.0, "beta": 0.0}
    a = {**absent, **{n: arrays[n] for n in there}}
    rest = {n: a[n] for n in ("gate", "residual", "gamma", "beta")}
    want, h, xhat = modulated(a["x"], a["shift"], a["scale"], rms=rms, **rest)
    norm = lngen.compile("ada_rmsnorm" if rms else "ada_layernorm", d=D, dtype="f64", eps=1e-6, **options)
    y, saved = norm.forward(*(a[n] for n in there))
    dy, dh = RNG.normal(0.2, 1, (2, B, T, D))
    if options.get("residual"):
        np.testing.assert_allclose(y[1], h, rtol=1e-13)
        y = y[0]
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)
    found = norm.backward((dy, dh) if options.get("residual") else dy, saved)
    dh = dh if options.get("residual") else np.zeros_like(dy)
    expected = gradients(dy, dh, a["x"], a["scale"], xhat, h, rms=rms, **rest)
    for name, gradient in zip(there, found, strict=True):
        np.testing.assert_allclose(gradient, expected[f"d{name}"], rtol=1e-11, atol=1e-11, err_msg=name)


ANSWERS = {  # of three kernels for one formula, where they differ: FlashInfer's, SGLang's, PyTorch's operators
    "once": {},
    "norm": {2: -0.0166015625, 5: -1.71875},
    "eager": {1: 0.890625, 2: -0.015625, 5: -1.71875, 7: 0.515625},
}


@pytest.mark.parametrize("casts", ANSWERS)
def test_known_answers(casts: str) -> None:
    """Of bf16, by the order of roundings."""
    x, scale, shift = (
        np.array([row], ml_dtypes.bfloat16)
        for row in (
            [1, 2, 3, 4, -1, -2, -3, 5],
            [0.1, 0.2, -0.3, 0.4, 0, 0.5, -0.25, 0.0625],
            [0, 0.5, -0.5, 1, 0, 0, 0.25, -1],
        )
    )
    y, _ = lngen.compile("ada_layernorm", d=8, dtype="bf16", eps=1e-6, casts=casts).forward(x, shift, scale)
    want = [-0.05078125, 0.88671875, -0.0167236328, 2.484375, -0.78515625, -1.7265625, -0.890625, 0.51953125]
    for place, number in ANSWERS[casts].items():
        want[place] = number
    np.testing.assert_array_equal(y.astype(np.float64)[0], np.array(want, np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("casts", ANSWERS)
def test_without_a_smaller_dtype_the_orders_are_one(casts: str) -> None:
    specs = [f"ada_layernorm.{way}:d=64,dtype=f32,gate=yes,residual=yes,casts={casts}" for way in ("fwd", "bwd")]
    for text in specs:
        plain = parse_spec(text.replace(f",casts={casts}", ""))
        assert str(parse_spec(text).graph()) == str(plain.graph())


SHAPES = {
    "one row for each sample": ((B, T, D), (B, D)),
    "with a dimension of 1": ((B, T, D), (B, 1, D)),
    "frames": ((B, 2, T, D), (B, 2, 1, D)),
    "rows in one dimension": ((B * T, D), (B, D)),
    "one sample": ((T, D), (1, D)),
    "a sample for all rows": ((B, T, D), (D,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_has_consecutive_rows(name: str) -> None:
    """Row r of the flattened rows takes the numbers of its sample, and gradients have the shape of what they are of."""
    of_x, of_sets = SHAPES[name]
    norm = lngen.compile("ada_rmsnorm", d=D, dtype="f64", eps=1e-6)
    x, shift, scale = RNG.normal(size=of_x), RNG.normal(size=of_sets), RNG.normal(size=of_sets)
    y, saved = norm.forward(x, shift, scale)
    flat, sets = x.reshape(-1, D), shift.reshape(-1, D)
    sample = np.arange(len(flat)) // (len(flat) // len(sets))
    xhat = flat / np.sqrt((flat * flat).mean(1, keepdims=True) + 1e-6)
    want = xhat * (1 + scale.reshape(-1, D)[sample]) + sets[sample]
    np.testing.assert_allclose(y.reshape(-1, D), want, rtol=1e-12, atol=1e-12)
    dx, dshift, dscale = norm.backward(np.ones_like(x), saved)
    assert (dx.shape, dshift.shape, dscale.shape) == (of_x, of_sets, of_sets)
    np.testing.assert_allclose(dscale.reshape(-1, D)[0], xhat[sample == 0].sum(0), rtol=1e-11, atol=1e-11)


REFUSED = {
    "N divides": ((7, D), (3, D)),
    "first dimensions": ((B, T, D), (T, D)),
    "got": ((B, T, D), (B, 2, D)),
    "shape": ((B, T, D), (B, 1, D - 1)),
    "rows, got none": ((B, 0, D), (B, 1, D)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_shapes_are_refused(words: str) -> None:
    of_x, of_sets = REFUSED[words]
    norm = lngen.compile("ada_layernorm", d=D)
    with pytest.raises(LngenError, match=words if words != "shape" else "row for each sample"):
        norm.forward(np.zeros(of_x, "f"), np.zeros(of_sets, "f"), np.zeros(of_sets, "f"))


def test_arrays_of_sets_agree() -> None:
    norm = lngen.compile("ada_layernorm", d=D)
    with pytest.raises(LngenError, match="'scale' has 1 samples, and another array 3"):
        norm.forward(np.zeros((B, T, D), "f"), np.zeros((B, D), "f"), np.zeros((1, D), "f"))


def test_no_rows_and_no_samples() -> None:
    """Gradients of nothing are empty, and those of gamma zero."""
    norm = lngen.compile("ada_layernorm", d=D, gamma=True)
    y, saved = norm.forward(np.zeros((0, T, D), "f"), np.zeros((0, D), "f"), np.zeros((0, D), "f"), np.ones(D, "f"))
    dx, dshift, dscale, dgamma = norm.backward(np.zeros((0, T, D), "f"), saved)
    assert (y.shape, dx.shape, dshift.shape, dscale.shape) == ((0, T, D), (0, T, D), (0, D), (0, D))
    assert not dgamma.any()


KEYS = {
    "round_sum": "ada_layernorm.fwd:d=64,round_sum=no",
    "strides": "ada_layernorm.fwd:d=64,strides=1",
    "save=y: 'y' cannot stand for 'x'": "ada_layernorm.bwd:d=64,save=y",  # a scale of -1 would leave nothing of x
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_exclude_each_other(name: str) -> None:
    with pytest.raises(LngenError, match=name):
        parse_spec(KEYS[name]).graph()


def test_gradients_of_scale_alone() -> None:
    """An input of sets that nothing reads says how many there are."""
    norm = lngen.compile("ada_layernorm", d=D, dtype="f64", wrt="scale")
    x, shift, scale = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, D)), RNG.normal(size=(B, D))
    _, saved = norm.forward(x, shift, scale)
    assert norm.backward(np.ones_like(x), saved)[0].shape == (B, D)


def test_gradients_that_are_zeros() -> None:
    """The mean of a row depends on no modulation; the gradients of sets are there, beside that of x."""
    norm = lngen.compile("ada_layernorm", d=D, dtype="f64", of="mean", gamma=True)
    x, (shift, scale) = RNG.normal(size=(B, T, D)), RNG.normal(size=(2, B, D))
    _, saved = norm.forward(x, shift, scale, np.ones(D))
    dx, dshift, dscale, dgamma = norm.backward(np.ones((B, T)), saved)
    np.testing.assert_allclose(dx, 1 / D, rtol=1e-15)
    assert (dshift.shape, dscale.shape, dgamma.shape) == ((B, D), (B, D), (D,))
    assert not any(g.any() for g in (dshift, dscale, dgamma))


def test_two_sweeps_of_rows_take_two_graphs() -> None:
    """A sum of all rows beside sums of sets, of which no factor moves out."""

    def both(b: lngen.GraphBuilder) -> None:
        x, scale = b.input("x", M, Axes), b.input("scale", b.axis("N", M / "n"), Axes)
        b.output("y", x * scale + b.input("bias", Axes))

    with pytest.raises(LngenError, match="that takes two graphs"):
        Compilation(make_spec(lngen.Definition("both", both), "bwd", {"d": 64})).check()
