"""Graphs with axes derived from M and D: a scale per block of features, groups in a row, the loss of a class index.

python -m lngen.examples.derived_axes
"""

from __future__ import annotations

import numpy as np

import lngen
from lngen import D, GraphBuilder, M

ROWS, FEATURES, BLOCK, GROUP = 5, 96, 32, 16


def block_scaled(b: GraphBuilder) -> None:
    """An RMSNorm whose row is divided by a scale per block of 32 features, which is a result: what e4m3 takes."""
    blocks = b.axis("B", D / BLOCK)
    x = b.input("x", M, D)
    y = x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("gamma", D)
    scale = b.stop_gradient(b.max(abs(y), to=blocks).maximum(1e-12) / 448.0)
    b.output("q", y / scale)
    b.output("scale", scale, dtype="f32")


def group_normed(b: GraphBuilder) -> None:
    """Each row normed in groups of 16 features."""
    groups = b.axis("G", D / GROUP)
    x = b.input("x", M, D)
    c = x - b.mean(x, to=groups)
    b.output("y", c * (b.mean(c * c, to=groups) + b.eps()).rsqrt())


def class_loss(b: GraphBuilder) -> None:
    """The cross-entropy of a class index per row."""
    x, target = b.input("x", M, D), b.index("target", M)
    top = b.max(x).detach()
    hit = b.select_eq("hit", target, b.iota("column", D), x)
    b.output("loss", b.sum((x - top).exp()).log() + top - b.sum(hit), dtype="f32")


def main() -> None:
    """Compare each with NumPy in float64."""
    rng = np.random.default_rng(0)
    x, gamma = rng.normal(size=(ROWS, FEATURES)), rng.normal(size=FEATURES)
    target = rng.integers(FEATURES, size=ROWS, dtype=np.int32)
    given = x.astype(np.float32)

    y = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gamma
    scale = abs(y).reshape(ROWS, -1, BLOCK).max(2) / 448
    (q, found), _ = lngen.compile(block_scaled, d=FEATURES).forward(given, gamma.astype(np.float32))
    report("block_scaled q", q, y / scale.repeat(BLOCK, 1))
    report("block_scaled scale", found, scale)

    c = x.reshape(ROWS, -1, GROUP)
    c = c - c.mean(2, keepdims=True)
    normed, _ = lngen.compile(group_normed, d=FEATURES).forward(given)
    report("group_normed y", normed, (c / np.sqrt((c * c).mean(2, keepdims=True) + 1e-5)).reshape(x.shape))

    loss, saved = lngen.compile(class_loss, d=FEATURES).forward(given, target)
    weights = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    report("class_loss", loss, -np.log(weights[range(ROWS), target]))
    (dx,) = lngen.compile(class_loss, d=FEATURES).backward(np.ones(ROWS, np.float32), saved)
    report("class_loss dx", dx, weights - np.eye(FEATURES)[target])


def report(name: str, found: object, wanted: object) -> None:
    """The largest difference, relative to the largest number; it ends the program if that is no rounding."""
    expected = np.asarray(wanted)
    error = float(abs(np.asarray(found) - expected).max() / abs(expected).max())
    print(f"{name:18} largest relative error {error:.1e}")
    if error > 1e-5:
        raise SystemExit(f"{name} is off by {error:.1e} of its largest number, 1e-5 is allowed.")


if __name__ == "__main__":
    main()
