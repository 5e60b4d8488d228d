"""If these fail, a value over a derived axis, a reduction to one, or the gradient of either is not what its axes say.

Random graphs over M, D and axes derived from them. Here every value is a full array over [M, D], constant where its
axes are coarser, and reductions walk the elements one by one; the interpreter gathers arrays of the axes' own lengths.
"""

from collections.abc import Callable, Mapping
from itertools import permutations

import numpy as np
import pytest

from lngen import D, Definition, GraphBuilder, M
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Axis, Eqn, Graph, Lengths, Value, parse, print_graph
from lngen.compiler.ir.numerics import stored
from lngen.compiler.passes.instance import drawn, indexed, lengths
from lngen.compiler.spec import Spec, make_spec

Array = np.ndarray
COUNT = 500
PLAIN = 40
MAPS = [(M, "/", "n"), (M, "/", 2), (M, "%", 3), (M, "%", 6), (D, "/", 2), (D, "/", 4), (D, "%", 2), (D, "%", 4)]


def axis_graph(seed: int) -> Definition:
    """Inputs over any axes; products, quotients by what is above zero, sums to coarser axes and over whole ones."""

    def describe(b: GraphBuilder) -> None:
        rng = np.random.default_rng(seed)
        chosen = [MAPS[n] for n in rng.permutation(len(MAPS))[: rng.integers(1, 5)]]
        axes = {M: [M], D: [D]}
        for n, (base, by, number) in enumerate(chosen):
            axes[base].append(b.axis(f"A{n}", base / number if by == "/" else base % number))
        named = [a for a in axes[M] if a.number == "n"]

        def some(base: Axis) -> list[Axis]:
            pick = rng.integers(len(axes[base]) + 1)
            return [] if pick == len(axes[base]) else [axes[base][pick]]

        values = [b.input("x", M, D), *(b.input(f"w{n}", a) for n, a in enumerate(named))]
        values += [b.input(f"u{n}", *some(M), *some(D)) for n in range(rng.integers(1, 4))]
        for _ in range(rng.integers(3, 9)):
            u, v = (values[-1 - min(rng.geometric(0.3) - 1, len(values) - 1)] for _ in range(2))
            values.append(made(b, rng, u, v, axes))
        for base, of in axes.items():  # a fold of a fold, and a join that is finer than both operands
            for a, c in [p for p in permutations(of[1:], 2) if (p[0].by, p[1].by) == ("/", "%")][:1]:
                values.append(b.input(f"p{base}", a) * b.input(f"q{base}", c))
            for fine, coarse in [p for p in permutations(of[1:], 2) if p[0].is_finer(p[1])][:1]:
                values.append(b.mean(b.mean(values[0], base, fine) ** 2, fine, coarse))
            if of[1:]:  # the number that an index says, along the first derived axis
                index = b.index(f"k{base}", *some(M), *([] if base is D else some(D)))
                hit = b.select_eq(f"hit{base}", index, b.iota(f"place{base}", of[1]), values[0])
                values.append(hit * 1.5)
        joined = values[0]
        for v in values[1:]:
            joined = joined + v * float(rng.uniform(0.5, 1.5))
        b.output("y", joined)
        narrow = [v for v in values if (v not in b.params and M in v.type.axes) or D in v.type.axes]
        b.output("z", narrow[-1] * 1.25)

    return Definition(f"axes_{seed}", describe)


def made(b: GraphBuilder, rng: np.random.Generator, u: Value, v: Value, axes: Mapping[Axis, list[Axis]]) -> Value:
    """An equation of one or two values, and a reduction of them if there is something to reduce."""
    match rng.integers(5):
        case 0:
            return u * v
        case 1:
            return u / (v * v + 1.0)
        case 2:
            return (u * u + 0.5).sqrt() - v
    term = u * v if rng.integers(2) else u
    if not term.type.axes:
        return term + 1.0
    axis = term.type.axes[rng.integers(len(term.type.axes))]
    coarser = [a for a in axes[axis.root] if a is not axis and axis.is_finer(a)]
    to = coarser[rng.integers(len(coarser))] if coarser and rng.integers(4) else None
    return b.mean(term, axis, to) if rng.integers(2) else b.sum(term, axis, to) * 0.25


def spec_of(seed: int, way: str) -> Spec:
    return make_spec(axis_graph(seed), way, {"d": 8, "dtype": "f64"})


# ---- the walk ----


def place(n: int, axis: Axis, sizes: Lengths) -> int:
    """The element of ``axis`` to which element ``n`` of its base belongs."""
    if axis.base is None:
        return n
    return n % sizes[axis] if axis.by == "%" else n * sizes[axis] // sizes[axis.base]


def walked(graph: Graph, inputs: Mapping[str, Array], sizes: Lengths) -> dict[str, Array]:
    """The results, each over its own axes."""
    full: dict[Value, Array] = {}
    for p in graph.params:
        given = np.asarray(inputs[p.name], np.float64)
        at = [[place(n, a, sizes) for n in range(sizes[a.root])] for a in p.type.axes]
        shape = [sizes[a] if a in [x.root for x in p.type.axes] else 1 for a in (M, D)]
        full[p] = np.broadcast_to(given[np.ix_(*at)].reshape(shape), (sizes[M], sizes[D]))
    for e in graph.eqns:
        full[e.out] = STEPS[e.op](e, [full[a] for a in e.args], sizes)
    found = {}
    for r in graph.results:
        firsts = [first_of(a, sizes) for a in r.type.axes]
        rows = firsts[0] if r.type.axes and r.type.axes[0].root is M else [0]
        columns = firsts[-1] if r.type.axes and r.type.axes[-1].root is D else [0]
        found[r.name] = full[r][np.ix_(rows, columns)].reshape([sizes[a] for a in r.type.axes])
    return found


def first_of(axis: Axis, sizes: Lengths) -> list[int]:
    """For each element of an axis the first element of its base."""
    return [next(n for n in range(sizes[axis.root]) if place(n, axis, sizes) == k) for k in range(sizes[axis])]


def reduced(e: Eqn, terms: Array, sizes: Lengths) -> Array:
    """The sum of the elements of the equation's axis that belong to one of ``to``, at all their places."""
    terms = terms if e.axis.root is D else terms.T
    ones, out = first_of(e.axis, sizes), np.empty_like(terms)
    for n in range(terms.shape[1]):
        mine = [i for i in ones if e.to is None or place(i, e.to, sizes) == place(n, e.to, sizes)]
        out[:, n] = terms[:, mine].sum(axis=1)
    return out if e.axis.root is D else out.T


def places(axis: Axis, sizes: Lengths) -> Array:
    """The element of ``axis`` at each place."""
    own = [place(n, axis, sizes) for n in range(sizes[axis.root])]
    return np.broadcast_to(np.array(own)[:, None] if axis.root is M else own, (sizes[M], sizes[D]))


def mean(e: Eqn, args: list[Array], sizes: Lengths) -> Array:
    return reduced(e, args[0], sizes) / (sizes[e.axis] // (sizes[e.to] if e.to else 1))


STEPS: dict[str, Callable[[Eqn, list[Array], Lengths], Array]] = {
    "cast": lambda e, a, at: a[0],
    "const": lambda e, a, at: np.full((at[M], at[D]), e.value),
    "add": lambda e, a, at: a[0] + a[1],
    "sub": lambda e, a, at: a[0] - a[1],
    "mul": lambda e, a, at: a[0] * a[1],
    "div": lambda e, a, at: a[0] / a[1],
    "sqrt": lambda e, a, at: np.sqrt(a[0]),
    "iota": lambda e, a, at: places(e.axis, at),
    "select_eq": lambda e, a, at: np.where(a[0] == a[1], a[2], 0.0),
    "reduce_sum": lambda e, a, at: reduced(e, a[0], at),
    "reduce_mean": mean,
}


SEEDS = pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < PLAIN else pytest.mark.full(sample=False)) for n in range(COUNT)]
)


@SEEDS
def test_axes(seed: int) -> None:
    """Forward by the walk, backward by differences of the walk; the text of both parses back."""
    rng, forward = np.random.default_rng([seed, 1]), spec_of(seed, "fwd").forward()
    sizes = lengths(forward, d=8)
    of = indexed(forward)
    inputs = {p.name: stored(drawn(rng, p, sizes, of.get(p), 0.5), p.type.dtype) for p in forward.tensors}
    want = walked(forward, inputs, sizes)
    for spec in (spec_of(seed, "fwd"), spec_of(seed, "bwd")):
        assert parse(print_graph(spec.graph())) == spec.graph()
    got = interpret(spec_of(seed, "fwd").graph(), inputs)
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-11, atol=1e-11)
    cotangents = {f"d{name}": rng.normal(0.3, 1.0, a.shape) for name, a in want.items()}
    backward = spec_of(seed, "bwd").graph()
    known = {**inputs, **want, **cotangents}
    gradients = interpret(backward, {p.name: known[p.name] for p in backward.tensors})
    smooth = [p for p in forward.tensors if p not in of]
    assert {*gradients} == {f"d{p.name}" for p in smooth}
    for p in smooth:
        direction, step = rng.normal(size=inputs[p.name].shape), 1e-5

        def loss(by: float, p: Value = p, direction: Array = direction) -> float:
            moved = walked(forward, inputs | {p.name: inputs[p.name] + by * direction}, sizes)
            return sum(float((cotangents[f"d{name}"] * a).sum()) for name, a in moved.items())

        found = float((gradients[f"d{p.name}"] * direction).sum())
        size = float(np.abs(gradients[f"d{p.name}"] * direction).sum()) + 1.0
        assert abs((loss(step) - loss(-step)) / (2 * step) - found) <= 1e-6 * size, p.name


def test_the_graphs_hold_what_they_are_for() -> None:
    """Folds one after the other on one base, joins that meet in the base, and numbers that the shapes say."""
    graphs = [spec_of(seed, "fwd").forward() for seed in range(PLAIN)]
    folds = [e for g in graphs for e in g.eqns if e.op.startswith("reduce")]
    assert sum(e.axis.base is not None for e in folds) > 20
    assert sum(e.axis.base is not None and e.to is not None for e in folds) > 3
    meet = [{*e.out.type.axes} - {x for v in e.args for x in v.type.axes} for g in graphs for e in g.eqns if e.args]
    assert sum(not axes.isdisjoint((M, D)) for axes in meet) > 5
    assert sum("select_eq" in {e.op for e in g.eqns} for g in graphs) > 20
    assert sum("n" in {a.number for v in g.params for a in v.type.axes} for g in graphs) > 5
