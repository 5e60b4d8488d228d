"""If these fail, norms of heads are another function: other heads, other weights, or another order of roundings.

The models are closed forms in NumPy over [tokens, heads, features], which share nothing with the IR.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lngen
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError

Array = Any
RNG = np.random.default_rng(49)
T, Q, K, HEAD = 5, 3, 2, 16
D = (Q + K) * HEAD
BF16 = ml_dtypes.bfloat16


def model(x: Array, gamma: Array, beta: Array, rms: bool) -> tuple[Array, Array, Array]:
    """y, xhat and rstd for x [T, H, Dh] and weights [H, Dh]."""
    c = x if rms else x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-6)
    return c * rstd * gamma + beta, c * rstd, rstd


def gradient(dy: Array, xhat: Array, rstd: Array, gamma: Array, rms: bool) -> Array:
    """dx in closed form, head by head."""
    g = dy * gamma
    mean = 0.0 if rms else g.mean(-1, keepdims=True)
    return rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdims=True))


WEIGHTS: dict[str, dict[str, Any]] = {
    "of q and of k": {"k_heads": K, "head": 80},
    "of all heads": {},
    "of each head": {"head_weights": "own"},
    "of k alone": {"k_heads": Q + K},
    "none": {"gamma": False, "beta": False},
}


@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_forward_and_backward_are_the_closed_form(weights: str, rms: bool) -> None:
    """In float64: the heads of q come first, and a gradient of shared weights is a sum over tokens and heads."""
    keys, names = WEIGHTS[weights], ("gamma",) if rms else ("gamma", "beta")
    of_k, keys = keys.get("k_heads", 0), {"head": HEAD, **keys}
    head = keys["head"]
    d = (Q + K) * head
    every = {"gamma": np.ones((Q + K, head)), "beta": np.zeros((Q + K, head))}
    given: dict[str, Array] = {}
    parts = [("", slice(0, Q + K - of_k)), ("_k", slice(Q + K - of_k, None))][: 1 + bool(of_k)]
    for end, heads in parts if weights != "none" else ():
        for name in names:
            given[name + end] = RNG.normal(1, 0.5, d if keys.get("head_weights") else head)
            every[name][heads] = given[name + end].reshape(-1, head)
    x, dy = RNG.normal(0.5, 1, (2, T, Q + K, head))
    norm = lngen.compile("qk_rmsnorm" if rms else "qk_layernorm", d=d, dtype="f64", eps=1e-6, **keys)
    y, saved = norm.forward(x.reshape(T, d), *given.values())
    want, xhat, rstd = model(x, every["gamma"], every["beta"], rms)
    np.testing.assert_allclose(y, want.reshape(T, d), rtol=1e-12, atol=1e-12)
    dx, *found = norm.backward(dy.reshape(T, d), saved)
    np.testing.assert_allclose(dx, gradient(dy, xhat, rstd, every["gamma"], rms).reshape(T, d), rtol=1e-11, atol=1e-11)
    for name, got in zip(given, found, strict=True):
        of_heads = (dy * xhat if name.startswith("gamma") else dy).sum(0)
        heads = of_heads[Q + K - of_k :] if name.endswith("_k") else of_heads[: Q + K - of_k]
        expected = of_heads.reshape(d) if keys.get("head_weights") else heads.sum(0)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11, err_msg=name)


# Each row of 16 is the first eight numbers and their mirror; rstd is 0.7601827.
HALF, GAMMA = [0.5, -1.25, 2, 0.75, -0.375, 1.5, -2.25, 0.125], [1, 0.5, 1.25, 0.875, 1.5, 0.75, 1.125, 1] * 2
ONCE = [0.380859375, -0.474609375, 1.8984375, 0.498046875, -0.427734375, 0.85546875, -1.921875, 0.09521484375]
LLAMA = [0.380859375, -0.474609375, 1.90625, 0.5, -0.427734375, 0.85546875, -1.921875, 0.09521484375]


@pytest.mark.parametrize(("casts", "want"), [("once", ONCE), ("llama", LLAMA)])
def test_known_answers(casts: str, want: list[float]) -> None:
    """Of bf16: with one rounding (vLLM, SGLang), and with the rounding of Qwen3 before the weight."""
    x, gamma = np.array([[*HALF, *HALF[::-1]] * 2], BF16), np.array(GAMMA, BF16)
    norm = lngen.compile("qk_rmsnorm", d=32, head=16, k_heads=1, dtype="bf16", eps=1e-6, casts=casts)
    y, _ = norm.forward(x, gamma, 2 * gamma)
    np.testing.assert_array_equal(y[0, :8].astype(float), want)
    np.testing.assert_array_equal(y[0, 16:24].astype(float), 2 * np.array(want))


def test_a_head_of_equal_elements_has_their_mean() -> None:
    """Its deviations are 0 in f32, too, where a sum of the elements is rounded; the other heads are not touched."""
    x = RNG.normal(size=(3, 4 * 128)).astype(np.float32)
    x[:, 128:256] = np.float32([[0.1], [1e6 / 3], [7e-5]])
    y, _ = lngen.compile("qk_layernorm", d=512, eps=1e-12, beta=False).forward(x, np.ones(128, np.float32))
    assert not y[:, 128:256].any()
    assert y[:, :128].std() > 0.9


def test_no_rows() -> None:
    norm = lngen.compile("qk_layernorm", d=D, head=HEAD, k_heads=K)
    y, saved = norm.forward(np.zeros((0, D), "f"), *(np.ones(HEAD, "f"),) * 4)
    dx, *weights = norm.backward(np.zeros((0, D), "f"), saved)
    assert (y.shape, dx.shape) == ((0, D), (0, D))
    assert not any(w.any() for w in weights)


def test_a_packed_projection_is_normalised_in_place() -> None:
    """x is a part of wider rows, and y lies over it: the heads of v stay."""
    qkv = RNG.normal(size=(T, D + 2 * HEAD)).astype(np.float32)
    before, gammas = qkv.copy(), RNG.normal(size=(2, HEAD)).astype(np.float32)
    norm = lngen.compile("qk_rmsnorm", d=D, head=HEAD, k_heads=K, eps=1e-6)
    norm.forward(qkv[:, :D], *gammas, out=qkv[:, :D])
    every = np.repeat(gammas, [Q, K], axis=0)
    want = model(before[:, :D].astype(float).reshape(T, Q + K, HEAD), every, 0.0, True)[0].reshape(T, D)
    np.testing.assert_allclose(qkv[:, :D], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(qkv[:, D:], before[:, D:])


def test_heads_of_other_sizes_are_rows_of_rmsnorm() -> None:
    """The way out that the refusal names: rows (token, head), at two distances, with one weight."""
    qkv = RNG.normal(size=(T, 4, 100)).astype(np.float32)
    gamma = RNG.normal(size=100).astype(np.float32)
    y, _ = lngen.compile("rmsnorm", d=100, eps=1e-6, strides=2).forward(qkv[:, :3], gamma)
    np.testing.assert_allclose(y, model(qkv[:, :3].astype(float), gamma, 0.0, True)[0], rtol=1e-5, atol=1e-6)


REFUSED = {
    "of 16 up to 512, or of 32 up to 1024, got 100; for other heads take rmsnorm": "d=800,head=100",
    "a multiple of 8 up to 256, .* got 264": "d=528,head=264",
    "'head' is expected to be a whole number, got '64.5'": "d=129,head=64.5",
    "k_heads is expected to be from 0 to": "d=128,k_heads=-1",
    "a row with k_heads=3 heads of 64 features has 192 features at least, got d=128": "d=128,head=64,k_heads=3",
    "D is expected to be a multiple of 64": "d=100,head=64",
    "with head_weights=own each head has weights of its own": "d=128,head=64,k_heads=1,head_weights=own",
    "needs gamma": "d=128,k_heads=1,gamma=no,zero_centred=yes",
}


def test_keys_that_no_heads_have() -> None:
    for words, keys in REFUSED.items():
        with pytest.raises(LngenError, match=words):
            parse_spec(f"qk_rmsnorm.fwd:{keys}").graph()


def test_other_shapes_are_refused() -> None:
    norm = lngen.compile("qk_rmsnorm", d=D, head=HEAD, k_heads=K)
    with pytest.raises(LngenError, match="gamma_k"):
        norm.forward(np.zeros((T, D), "f"), np.ones(HEAD, "f"), np.ones(D, "f"))
