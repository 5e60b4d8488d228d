"""If these fail, formulas in torch or the bounds of a closed form do not see a plausible mistake in a graph."""

from dataclasses import replace
from itertools import product

import numpy as np

import sampling
from family import results
from graph_mutants import survivors
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Graph
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array
from lngen.compiler.passes import finish
from lngen.compiler.spec import parse_spec
from test_closed_form import draw, truth
from test_family import RELATIVE, Exact, distance, own_keys, text

CAUGHT = 1e-3  # an error this large is caught under any rounding
SIZES = [[1.0], [0.1], [0.03], [2.0]]  # of rows: some are shorter than eps
WHOLE = "x1=yes,rowscale=yes,colscale=yes"

# Keys with which a graph has most to go wrong; eps is large enough that a misplaced one shows.
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GRAPHS, ("eps=0.3",)),
    "layernorm": ("eps=0.3,zero_centred=yes", "eps=0.3,save=y"),
    "rmsnorm": ("eps=0.3,casts=gemma", "eps=0.3,beta=yes,save=none"),
    "l2norm": ("eps=0.3", "eps=0.3,guard=max"),
    "add_layernorm": (f"eps=0.3,zero_centred=yes,{WHOLE}",),
    "add_rmsnorm": (f"eps=0.3,{WHOLE}", "eps=0.3"),
    "gated_rmsnorm": ("eps=0.3,gate_first=yes",),
    "layernorm_act": ("eps=0.3,act=gelu",),
    "rmsnorm_act": ("eps=0.3,act=gelu_tanh",),
    "dyt": ("beta=no", "gamma=no"),
    "qk_layernorm": ("eps=0.3,zero_centred=yes,k_heads=3,head=16", "eps=0.3,head_weights=own,head=64"),
    "qk_rmsnorm": ("eps=0.3,k_heads=1,head=64", "eps=0.3,casts=gemma,head=32", "eps=0.3,head=16,rotate=pairs"),
    "rope": ("head=16,rotary=8", "head=16,rotate=pairs,positions=i64"),
    **dict.fromkeys(("softmax", "log_softmax", "cross_entropy"), ("scale=0.5",)),
}
CASES = [(name, way, f"{keys},dtype=bf16") for name in GRAPHS for keys in KEYS[name] for way in ("fwd", "bwd")]


@sampling.rotating(("name", "way", "keys"), CASES)
def test_formulas_see_every_mutant(name: str, way: str, keys: str) -> None:
    spec = parse_spec(text(name, way, keys))
    exact = Exact.of(spec)
    if name == "l2norm":
        rows = {"x": exact.inputs["x"] * SIZES}
        exact = replace(exact, inputs=rows, results=results("l2norm", own_keys(spec), rows))
    graph = spec.forward() if way == "fwd" else spec.trace()["cse"]
    known = {**exact.inputs, **exact.results, **{f"d{n}": exact.cotangents[n] for n in spec.differentiated}}
    wanted = exact.results if way == "fwd" else exact.gradients(spec.differentiated)

    def found(graph: Graph) -> dict[str, Array]:
        return {n: r.value for n, r in evaluate(graph, {p.name: known[p.name] for p in graph.params}).items()}

    assert distance(found(graph), wanted) < RELATIVE
    assert survivors(graph, found, lambda results: distance(results, wanted) > CAUGHT) == []


@sampling.grid(("norm", "way", "dtype"), product(("layernorm", "rmsnorm"), ("fwd", "bwd"), ("f32", "bf16")))
def test_bounds_see_every_mutant(norm: str, way: str, dtype: str) -> None:
    """As many rows as features, so that a row sum could pass for a column sum."""
    spec = parse_spec(f"{norm}.{way}:d=13,dtype={dtype},eps=0.1" + ",beta=yes" * (norm == "rmsnorm"))
    graph, inputs = spec.trace()["build" if way == "fwd" else "save"], draw(spec, 13)
    if way == "bwd":
        inputs |= interpret(spec.with_direction("fwd").graph(), inputs)
    expected = truth(spec, inputs)

    def excess(results: dict[str, Array]) -> float:
        with np.errstate(all="ignore"):
            return max(expected[name].excess(value) for name, value in results.items())

    def found(graph: Graph) -> dict[str, Array]:
        return interpret(finish(graph, spec.d), inputs)

    assert excess(found(graph)) <= 1
    assert survivors(graph, found, lambda results: excess(results) > 1.5) == []
