"""The float64 results of any graph, for comparison with what providers compute.

With PyTorch the forward graph as described is evaluated in float64 and differentiated by autograd, which shares nothing
with lngen's derivation. Without PyTorch nothing but lngen is compared: its graph is evaluated on the host, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.bench.cases import Tensors
from lngen.bench.engines import Array, Engine
from lngen.bench.torch_graph import torch_function
from lngen.check.differences import real_results
from lngen.ir import Graph, M
from lngen.passes import accumulated
from lngen.spec import Spec


def graph_results(spec: Spec, engine: Engine, inputs: Mapping[str, Array], rows: slice) -> Tensors:
    """The spec's results by name in float64, for some rows of its inputs; see ``formulas.wide_results``.

    A gradient that is added to an array is that of these rows alone.
    """
    forward, graph = spec.with_direction("fwd").forward(), spec.graph()
    needed = {v.name: v for g in (forward, graph) for v in g.params if v.name in inputs}
    cut = {n: engine.wide(inputs[n][rows] if M in v.type.axes else inputs[n]) for n, v in needed.items()}
    if engine.name != "torch":
        host = {n: engine.host(a) for n, a in cut.items()}
        host |= {n: np.zeros_like(host[n]) for n in map(accumulated, (f"d{n}" for n in spec.accumulate))}
        taken = {p.name: host[p.name] for p in (forward if spec.direction == "fwd" else graph).params}
        return {n: engine.array(found.value.astype(np.float64)) for n, found in real_results(spec, taken).items()}
    if spec.direction == "fwd":
        return _forward(forward, cut)
    return _backward(spec, forward, cut)


def _forward(graph: Graph, inputs: Tensors) -> Tensors:
    results = torch_function(graph, wide=True)(*(inputs[p.name] for p in graph.params))
    return dict(zip((r.name for r in graph.results), results, strict=True))


def _backward(spec: Spec, forward: Graph, inputs: Tensors) -> Tensors:
    """The gradients of the inputs that the spec differentiates by; zero for one that no output depends on."""
    import torch

    leaves = {name: inputs[name].detach().requires_grad_() for name in spec.differentiates}
    results = _forward(forward, {**inputs, **leaves})
    taken = [name for name in spec.differentiated if results[name].requires_grad]
    given = torch.autograd.grad(
        [results[name] for name in taken],
        [*leaves.values()],
        [inputs[f"d{name}"] for name in taken],
        allow_unused=True,
    )
    found = zip(leaves.items(), given, strict=True)
    return {f"d{name}": torch.zeros_like(leaf) if g is None else g for (name, leaf), g in found}
