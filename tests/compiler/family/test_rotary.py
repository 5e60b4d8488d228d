"""If these fail, a rotation of heads is another function: other planes, other angles, or another order of roundings.

The models are complex numbers in NumPy, over [tokens, heads, planes], which share nothing with the IR.
"""

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lngen
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError
from sampling import grid

Array = Any
RNG = np.random.default_rng(51)
BF16 = ml_dtypes.bfloat16
T, H, HEAD, POSITIONS = 5, 3, 16, 9
D = H * HEAD


def rotated(x: Array, angle: Array, way: str) -> Array:
    """Rows [T, H * HEAD] turned by complex numbers [T, planes] of length 1, or any other."""
    heads, planes = x.reshape(len(x), -1, HEAD), angle.shape[1]
    turning = heads[..., : 2 * planes].reshape(*heads.shape[:2], *((planes, 2) if way == "pairs" else (2, planes)))
    pairs = turning if way == "pairs" else np.swapaxes(turning, 2, 3)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * angle[:, None]
    found = np.stack([z.real, z.imag], -1)
    found = found if way == "pairs" else np.swapaxes(found, 2, 3)
    return np.concatenate([found.reshape(*heads.shape[:2], -1), heads[..., 2 * planes :]], -1).reshape(x.shape)


@grid(("way", "width", "positions"), product(("halves", "pairs"), (4, 8, 16), ("no", "i32", "i64")), strength=1)
def test_forward_is_the_angle_and_backward_the_conjugate(way: str, width: int, positions: str) -> None:
    """In float64; behind the width all passes. cos and sin have no gradient."""
    rows = T if positions == "no" else POSITIONS
    table = RNG.normal(size=(2, rows, width // 2)).astype(np.float32)
    at = RNG.integers(rows, size=T) if positions != "no" else np.arange(T)
    given = () if positions == "no" else (at.astype(f"i{positions[1:]}".replace("i32", "i4").replace("i64", "i8")),)
    keys = {"rotate": way, "rotary": width, "positions": positions}
    norm = lngen.compile("rope", d=D, head=HEAD, dtype="f64", **keys)
    x, dy = RNG.normal(size=(2, T, D))
    y, saved = norm.forward(x, *table, *given)
    angle = (table[0].astype(float) + 1j * table[1])[at]
    np.testing.assert_allclose(y, rotated(x, angle, way), rtol=1e-14, atol=1e-14)
    (dx,) = norm.backward(dy, saved)
    np.testing.assert_allclose(dx, rotated(dy, angle.conj(), way), rtol=1e-14, atol=1e-14)


X, GAMMA = [0.5, -1.25, 2, 0.75, -0.375, 1.5, -2.25, 0.125], [1, 0.5, 1.25, 0.875, 1.5, 0.75, 1.125, 1]
ANGLES = 3 * 1e4 ** (-np.arange(4) / 4)  # of position 3, for a head of 8 features
NEOX = [-0.31640625, -0.70703125, 1.9609375, 0.498046875, 0.4765625, 0.67578125, -1.8671875, 0.0966796875]
PAIRS = [-0.30859375, 0.5234375, 1.671875, 1.0390625, -0.453125, 0.84375, -1.921875, 0.0893554688]
ROUNDED = {0: -0.314453125, 5: 0.6796875}  # by cos and sin in bf16
QWEN = {3: 0.5, 5: 0.6796875}
FLASHINFER = {2: 1.953125}
ANSWERS = {
    "vllm": ({}, NEOX),
    "vllm, cache in bf16": ({"table_dtype": "bf16"}, [ROUNDED.get(n, y) for n, y in enumerate(NEOX)]),
    "qwen3": (
        {"casts": "llama", "rotate_in": "x", "table_dtype": "bf16"}, [QWEN.get(n, y) for n, y in enumerate(NEOX)],
    ),
    "qwen3, angles in f32": ({"casts": "llama", "rotate_in": "x"}, [QWEN.get(n, y) for n, y in enumerate(NEOX)]),
    "flashinfer": ({"rotate_in": "norm"}, [FLASHINFER.get(n, y) for n, y in enumerate(NEOX)]),
    "pairs": ({"rotate": "pairs"}, PAIRS),
}  # fmt: skip


@pytest.mark.parametrize("order", ANSWERS)
def test_known_answers(order: str) -> None:
    """A head of 16 features that has the planes of one of 8 twice, so that its mean square is that of 8."""
    keys, want = ANSWERS[order]
    twice = np.tile(np.arange(8).reshape(4, 2), 2) if "rotate" in keys else np.arange(8).reshape(2, 4)
    order_of = (np.repeat(np.arange(8).reshape(-1, 2), 2, 0) if "rotate" in keys else np.tile(twice, 2)).reshape(-1)
    planes = np.repeat(np.arange(4), 2) if "rotate" in keys else np.tile(np.arange(4), 2)
    stored = BF16 if keys.get("table_dtype") else np.float32
    norm = lngen.compile(
        "qk_rmsnorm", **{"d": 16, "head": 16, "dtype": "bf16", "eps": 1e-6, "rotate": "halves", **keys}
    )
    cos, sin = (f(ANGLES)[planes][None].astype(stored) for f in (np.cos, np.sin))
    y, _ = norm.forward(np.array(X, BF16)[order_of][None], np.array(GAMMA, BF16)[order_of], cos, sin)
    found = dict(zip(order_of, y[0].astype(float), strict=True))
    np.testing.assert_array_equal([found[n] for n in range(8)], np.array(want).astype(BF16).astype(float))


@pytest.mark.parametrize("name", ["qk_rmsnorm", "qk_layernorm"])
def test_the_norms_of_heads_are_rotated_behind_their_weights(name: str) -> None:
    """The fused call is a norm and a rotation, and its backward theirs, in float64."""
    keys = {"d": D, "head": HEAD, "dtype": "f64"}
    table, x = RNG.normal(size=(2, T, HEAD // 2)).astype(np.float32), RNG.normal(size=(T, D))
    weights = [RNG.normal(size=HEAD) for _ in range(4 if name == "qk_layernorm" else 2)]
    plain, rope = lngen.compile(name, k_heads=1, **keys), lngen.compile("rope", **keys)
    fused = lngen.compile(name, k_heads=1, rotate="halves", **keys)
    n, of_norm = plain.forward(x, *weights)
    y, of_rope = rope.forward(n, *table)
    found, saved = fused.forward(x, *weights, *table)
    np.testing.assert_allclose(found, y, rtol=1e-13, atol=1e-13)
    dy = RNG.normal(size=(T, D))
    want = plain.backward(rope.backward(dy, of_rope)[0], of_norm)
    for got, wanted in zip(fused.backward(dy, saved), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_cos_and_sin_are_views_of_one_table() -> None:
    """As vLLM keeps them: side by side, by position, in the dtype of the model; x is a part of wider rows, in place."""
    angles = RNG.uniform(0, 6, (POSITIONS, HEAD // 2))
    cache = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(BF16)
    qkv, at = RNG.normal(size=(T, D + HEAD)).astype(BF16), RNG.integers(POSITIONS, size=T)
    before = qkv.copy()
    norm = lngen.compile("rope", d=D, head=HEAD, dtype="bf16", positions="i64", table_dtype="bf16")
    norm.forward(qkv[:, :D], cache[:, : HEAD // 2], cache[:, HEAD // 2 :], at, out=qkv[:, :D])
    exact = cache.astype(float)
    want = rotated(before[:, :D].astype(float), (exact[:, : HEAD // 2] + 1j * exact[:, HEAD // 2 :])[at], "halves")
    np.testing.assert_allclose(qkv[:, :D].astype(float), want, rtol=2**-8, atol=2**-8)
    assert qkv[:, D:].tobytes() == before[:, D:].tobytes()


def test_no_rows() -> None:
    norm = lngen.compile("rope", d=D, head=HEAD, positions="i32")
    table = np.ones((POSITIONS, HEAD // 2), np.float32)
    y, saved = norm.forward(np.zeros((0, D), np.float32), table, table, np.zeros(0, np.int32))
    assert y.shape == norm.backward(np.zeros((0, D), np.float32), saved)[0].shape == (0, D)


def test_tokens_of_several_sequences() -> None:
    """Rows may have leading dimensions; so have angles by row, and positions."""
    x = RNG.normal(size=(2, T, D)).astype(np.float32)
    table, at = RNG.normal(size=(2, POSITIONS, HEAD // 2)).astype(np.float32), RNG.integers(POSITIONS, size=(2, T))
    y, _ = lngen.compile("rope", d=D, head=HEAD, positions="i64").forward(x, *table, at)
    other, _ = lngen.compile("rope", d=D, head=HEAD).forward(x, *table[:, at])
    np.testing.assert_array_equal(y, other)


REFUSED = {
    "'rotary' is expected to be a whole number, got '6.5'": "rotary=6.5",
    "rotary is expected to be an even number from 2 to head=16, got 5": "rotary=5",
    "rotary is expected to be an even number from 2 to head=16, got 18": "rotary=18",
    "rotary=6 of rotate=halves has 3 columns that repeat along a row, which do not divide head=16": "rotary=6",
    "rotary=12 of rotate=pairs has 12 columns": "rotate=pairs,rotary=12",
    "there is no rotate 'no', expected one of halves, pairs": "rotate=no",
    "there is no rotate_in 'norm', expected one of f32, x": "rotate_in=norm",
    "D is expected to be a multiple of head=16 for rotate, got d=40": "d=40",
}


def test_keys_that_no_rotation_has() -> None:
    for words, wrong in REFUSED.items():
        keys = {"d": "48", "head": "16"} | dict(part.split("=") for part in wrong.split(","))
        with pytest.raises(LngenError, match=words):
            parse_spec("rope.fwd:" + ",".join(f"{k}={v}" for k, v in keys.items())).graph()


def test_keys_of_a_rotation_need_one() -> None:
    with pytest.raises(LngenError, match=r"rotary, positions, table_dtype and rotate_in need rotate=halves\|pairs"):
        parse_spec("qk_rmsnorm.fwd:d=128,positions=i64").graph()


TABLE, AT = np.ones((POSITIONS, HEAD // 2), np.float32), np.arange(T)
CALLS = {
    "'positions' is expected to be i64, got float32": (TABLE, TABLE, AT.astype(np.float32)),
    r"'positions' is expected to have shape \(5,\), got \(4,\)": (TABLE, TABLE, AT[:4]),
    r"'sin' is expected to be a table of 8 columns, got shape \(9, 4\)": (TABLE, TABLE[:, :4], AT),
    r"'sin' has 8 elements along P; another input has 9": (TABLE, TABLE[:8], AT),
    "a position is expected to be one of the 9 rows of its table, got 9": (TABLE, TABLE, AT + 5),
    "a position is expected to be one of the 9 rows of its table, got -1": (TABLE, TABLE, AT - 1),
    "'cos' is expected to be f32, got float64": (TABLE.astype(float), TABLE, AT),
}


def test_arrays_that_no_rotation_has() -> None:
    norm = lngen.compile("rope", d=D, head=HEAD, positions="i64")
    for words, arrays in CALLS.items():
        with pytest.raises(LngenError, match=words):
            norm.forward(np.ones((T, D), np.float32), *arrays)


def test_angles_by_row_are_as_many_as_rows() -> None:
    with pytest.raises(LngenError, match=r"'cos' is expected to have shape \(5, 8\), got \(9, 8\)"):
        lngen.compile("rope", d=D, head=HEAD).forward(np.ones((T, D), np.float32), TABLE, TABLE)
