"""Random forward graphs whose backward is worth deriving: norms, gates, sums and maxima of one another.

Each step takes what was made before, so that factors, means and statistics meet in products and in sums over one axis.
"""

import random
from collections.abc import Callable

from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M, Value

ARITHMETIC = ("add", "sub", "mul", "mul", "mul", "square", "affine", "ratio", "half")
FOLDS = ("mean", "sum", "dot", "norm", "gated", "centred", "column", "above")
KINKS = ("relu", "abs", "larger", "less_max", "over_max")
FUNCTIONS = ("tanh", "sigmoid", "silu", "softmax", "power")


def smooth_graph(seed: int, functions: bool = True) -> Definition:
    """A graph of 4 to 15 steps over [M, D], [M] and [D], with up to three results and up to two statistics."""

    def describe(b: GraphBuilder) -> None:
        rng = random.Random(seed)
        pool = [b.input("x", M, D)]
        pool += [b.input(name, *axes) for name, axes in (("z", (M, D)), ("g", (D,)), ("s", (M,))) if rng.random() < 0.5]
        rows: list[Value] = []
        words = (*ARITHMETIC, *FOLDS * 2, *KINKS, *(FUNCTIONS if functions else ()))
        for _ in range(rng.randint(4, 15)):
            value = _step(b, rng.choice(words), *(_recent(rng, pool) for _ in range(2)))
            pool.append(value)
            if value.type.axes == (M,):
                rows.append(value)
        wide = [v for v in pool if M in v.type.axes and D in v.type.axes]
        b.output("y", _recent(rng, wide) * pool[0] if rng.random() < 0.3 else wide[-1])
        for name in ("u", "v")[: rng.choice((0, 0, 1, 2))]:
            b.output(name, _recent(rng, wide) + 0.5)
        for value in rng.sample([*dict.fromkeys(rows)], min(rng.randint(0, 2), len(set(rows)))):
            b.statistic(value)

    return Definition(f"smooth{seed}", describe)


def _recent(rng: random.Random, pool: list[Value]) -> Value:
    """One of the pool, more often one that was made last."""
    return pool[max(rng.randrange(len(pool)), rng.randrange(len(pool)))]


def _most(b: GraphBuilder, x: Value) -> Value:
    return b.reduce_max("most", x, axis=D)


def _scaled(b: GraphBuilder, x: Value) -> Value:
    return x * (b.mean(x * x) + b.eps()).rsqrt()


# Each of x and another value; those of FOLDS need an axis of x, else it is its square, and those of WIDE need D.
STEPS: dict[str, Callable[[GraphBuilder, Value, Value], Value]] = {
    "add": lambda b, x, other: x + other,
    "sub": lambda b, x, other: x - other,
    "mul": lambda b, x, other: x * other,
    "square": lambda b, x, other: x * x,
    "affine": lambda b, x, other: x * 0.5 + 1.5,
    "half": lambda b, x, other: x * 0.5,
    "ratio": lambda b, x, other: x / (other * other + 1.0),
    "mean": lambda b, x, other: b.mean(x),
    "column": lambda b, x, other: b.mean(x, M),
    "sum": lambda b, x, other: b.sum(x) * 0.1,
    "dot": lambda b, x, other: b.mean(x * other) if D in other.type.axes else b.mean(x) * other,
    "norm": lambda b, x, other: _scaled(b, x),
    "gated": lambda b, x, other: _scaled(b, x) * (x + other),
    "centred": lambda b, x, other: x - b.mean(x),
    "above": lambda b, x, other: x - _most(b, x),
    "relu": lambda b, x, other: x.relu(),
    "abs": lambda b, x, other: abs(x),
    "larger": lambda b, x, other: x.maximum(other * 0.5),
    "softmax": lambda b, x, other: (e := (x - _most(b, x)).exp()) / b.sum(e),
    "less_max": lambda b, x, other: x * _most(b, other * x),
    "over_max": lambda b, x, other: x / (_most(b, abs(x)) + 0.5),
    "power": lambda b, x, other: (x * 0.25).tanh().exp(),
    "tanh": lambda b, x, other: x.tanh(),
    "sigmoid": lambda b, x, other: x.sigmoid(),
    "silu": lambda b, x, other: x.silu(),
    "both": lambda b, x, other: x * other + x,
}
WIDE = ("softmax", "less_max", "over_max")


def _step(b: GraphBuilder, word: str, x: Value, other: Value) -> Value:
    """A value that is computed from ``x``, or from both."""
    if word in FOLDS and (M if word == "column" else D) not in x.type.axes:
        word = "square"
    return STEPS["both" if word in WIDE and D not in x.type.axes else word](b, x, other)
