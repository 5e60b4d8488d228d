"""A norm that lngen does not have: described forward, its backward derived, checked by finite differences in float64.

python -m lngen.examples.own_graph
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import lngen
from lngen import D, GraphBuilder, M

ROWS, FEATURES = 5, 48
STEP = 1e-5

Array = NDArray[np.float64]


def gated_rmsnorm(b: GraphBuilder) -> None:
    """y = x * rstd * gamma * gate, one gate per element."""
    x, gate, gamma = b.input("x", M, D), b.input("gate", M, D), b.input("gamma", D)
    rstd = (b.mean(x * x) + b.eps()).rsqrt()
    b.output("y", x * rstd * gamma * gate)
    b.statistic(rstd, "rstd")


def main() -> None:
    """Compare each derived gradient with central differences of the forward, along one random direction."""
    norm = lngen.compile(gated_rmsnorm, d=FEATURES, dtype="f64")  # NumPy arrays: the interpreter, without a GPU
    print(norm.spec("bwd").graph())

    rng = np.random.default_rng(0)
    inputs: list[Array] = [rng.normal(size=shape) for shape in ((ROWS, FEATURES), (ROWS, FEATURES), (FEATURES,))]
    dy: Array = rng.normal(size=(ROWS, FEATURES))
    _, saved = norm.forward(*inputs)
    gradients = norm.backward(dy, saved)

    def loss(arrays: list[Array]) -> float:
        return float((norm.forward(*arrays)[0] * dy).sum())

    for i, (name, gradient) in enumerate(zip(("dx", "dgate", "dgamma"), gradients, strict=True)):
        direction = rng.normal(size=inputs[i].shape)
        ahead, back = ([*inputs[:i], inputs[i] + s * direction, *inputs[i + 1 :]] for s in (STEP, -STEP))
        measured = (loss(ahead) - loss(back)) / (2 * STEP)
        derived = float((gradient * direction).sum())
        error = abs(derived - measured) / max(1.0, abs(measured))
        print(f"{name:7} derived {derived:+.9f}  measured {measured:+.9f}  relative error {error:.1e}")
        if error > 1e-7:
            raise SystemExit(f"{name} is not the derivative of the forward: relative error {error:.1e} above 1e-7.")


if __name__ == "__main__":
    main()
