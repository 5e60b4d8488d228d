"""If these fail, the formulas in torch do not see a plausible mistake in a graph of the family, or see one in none."""

from dataclasses import replace

import sampling
from family import results
from graph_mutants import survivors
from lngen.graphs import GRAPHS
from lngen.ir import Graph
from lngen.ir.evaluate import evaluate
from lngen.ir.numerics import Array
from lngen.spec import Spec, parse_spec
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
    **dict.fromkeys(("softmax", "log_softmax", "cross_entropy"), ("scale=0.5",)),
}
CASES = [(name, way, f"{keys},dtype=bf16") for name in GRAPHS for keys in KEYS[name] for way in ("fwd", "bwd")]


def prepared(name: str, way: str, keys: str) -> tuple[Spec, Graph, Exact]:
    spec = parse_spec(text(name, way, keys))
    exact = Exact.of(spec)
    if name == "l2norm":
        inputs = {"x": exact.inputs["x"] * SIZES}
        exact = replace(exact, inputs=inputs, results=results("l2norm", own_keys(spec), inputs))
    return spec, spec.forward() if way == "fwd" else spec.trace()["cse"], exact


@sampling.rotating(("name", "way", "keys"), CASES)
def test_every_mutant_is_caught(name: str, way: str, keys: str) -> None:
    spec, graph, exact = prepared(name, way, keys)
    known = {**exact.inputs, **exact.results, **{f"d{n}": exact.cotangents[n] for n in spec.differentiated}}
    wanted = exact.results if way == "fwd" else exact.gradients(spec.differentiated)
    inputs = {p.name: known[p.name] for p in graph.params}

    def found(graph: Graph) -> dict[str, Array]:
        return {n: r.value for n, r in evaluate(graph, inputs).items()}

    assert distance(found(graph), wanted) < RELATIVE
    assert survivors(graph, found, lambda results: distance(results, wanted) > CAUGHT) == []
