"""A residual stream: pre-LN, which returns the sum beside its norm, and post-LN; gradients added to existing arrays.

python -m lngen.examples.residual
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import lngen

ROWS, FEATURES = 6, 96

Array = NDArray[np.float32]


def pre_ln(x: Array, residual: Array, gamma: Array, dy: Array, dh: Array) -> None:
    """The next block reads y, the residual stream goes on as h; backward gets a cotangent of each."""
    norm = lngen.compile("add_rmsnorm", d=FEATURES)
    (_, h), saved = norm.forward(x, residual, gamma)
    dx, dresidual, _ = norm.backward((dy, dh), saved)
    print(f"pre-LN: h = x + residual: {np.array_equal(h, x + residual)}; dresidual is dx: {dresidual is dx}")
    print(f"  backward reads {', '.join(p.name for p in norm.spec('bwd').graph().params)}")


def post_ln(x: Array, residual: Array, gamma: Array, dy: Array) -> None:
    """Nothing reads the sum but its norm, so it is not written."""
    norm = lngen.compile("add_rmsnorm", d=FEATURES, h=False)
    _, saved = norm.forward(x, residual, gamma)
    norm.backward(dy, saved)
    print(f"post-LN: backward reads {', '.join(p.name for p in norm.spec('bwd').graph().params)}")


def several_steps(x: Array, residual: Array, gamma: Array, dy: Array) -> None:
    """Gradients of two micro-batches in one array: the bits of adding the second to the first."""
    norm = lngen.compile("add_rmsnorm", d=FEATURES, h=False, accumulate="gamma")
    total = np.zeros(FEATURES, np.float32)
    for part in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        _, saved = norm.forward(x[part], residual[part], gamma)
        norm.backward(dy[part], saved, out=(None, None, total))
    print(f"accumulated dgamma: largest element {np.abs(total).max():.6f}")


def main() -> None:
    """Run the three on NumPy arrays, which the interpreter computes; arrays on a GPU give the same bits."""
    rng = np.random.default_rng(0)
    x, residual, dy, dh = (rng.normal(size=(ROWS, FEATURES)).astype(np.float32) for _ in range(4))
    gamma = rng.normal(size=FEATURES).astype(np.float32)
    pre_ln(x, residual, gamma, dy, dh)
    post_ln(x, residual, gamma, dy)
    several_steps(x, residual, gamma, dy)


if __name__ == "__main__":
    main()
