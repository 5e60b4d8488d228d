"""Random forward graphs whose backward is worth deriving: norms, gates, sums and maxima of one another.

Each step takes what was made before, so that factors, means and statistics meet in products and in sums over one axis.
"""

import random

from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M, Value

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


def _step(b: GraphBuilder, word: str, x: Value, other: Value) -> Value:
    """A value that is computed from ``x``, or from both; a fold of x needs its axis, else it is the square of x."""
    axis = M if word == "column" else D
    if word in FOLDS and axis not in x.type.axes:
        word = "square"
    match word:
        case "add":
            return x + other
        case "sub":
            return x - other
        case "mul":
            return x * other
        case "square":
            return x * x
        case "affine":
            return x * 0.5 + 1.5
        case "half":
            return x * 0.5
        case "ratio":
            return x / (other * other + 1.0)
        case "mean" | "column":
            return b.mean(x, axis)
        case "sum":
            return b.sum(x) * 0.1
        case "dot":
            return b.mean(x * other) if D in other.type.axes else b.mean(x) * other
        case "norm":
            return x * (b.mean(x * x) + b.eps()).rsqrt()
        case "gated":
            return x * (b.mean(x * x) + b.eps()).rsqrt() * (x + other)
        case "centred":
            return x - b.mean(x)
        case "above":
            return x - b.reduce_max("most", x, axis=D)
        case "relu":
            return x.relu()
        case "abs":
            return abs(x)
        case "larger":
            return x.maximum(other * 0.5)
        case "softmax" if D in x.type.axes:
            e = (x - b.reduce_max("most", x, axis=D)).exp()
            return e / b.sum(e)
        case "less_max" if D in x.type.axes:
            return x * b.reduce_max("most", other * x, axis=D)
        case "over_max" if D in x.type.axes:
            return x / (b.reduce_max("most", abs(x), axis=D) + 0.5)
        case "power":
            return (x * 0.25).tanh().exp()
        case "tanh":
            return x.tanh()
        case "sigmoid":
            return x.sigmoid()
    return x.silu() if word == "silu" else x * other + x
