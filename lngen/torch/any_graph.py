"""Any graph as a function of tensors: one of lngen's with all its options, or a program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.ir import Graph
from lngen.runtime.norm import definition_of
from lngen.spec import make_spec
from lngen.torch.bridge import TorchError
from lngen.torch.direct import Direct
from lngen.torch.graph_ops import OPS, GraphOps
from lngen.torch.torch_functions import dispatched, word


def function(
    graph: str | Definition | Graph | Callable[[GraphBuilder], None], **options: bool | str | float
) -> Callable[..., Any]:
    """A differentiable function of tensors: ``y = function(graph)(x, gamma, eps=1e-6)``.

    graph    as of ``lngen.compile``: a name, a function that describes a forward graph, a Definition, a Graph
    options  keys of a spec that are no dtypes: those of the graph, and ``save``

    It takes the inputs in the graph's order, by position or name; an input that the graph may lack may be left out. D,
    dtypes and eps are those of the call. The result is one tensor, or a tuple for a graph of several outputs. The graph
    gets registered operators, ``torch.ops.lngen.NAME_fwd`` and ``NAME_bwd``, in which the name of a program's own graph
    has its digest. SpecError for what is no graph or no option.
    """
    definition = definition_of(graph)
    spec = make_spec(definition, "fwd", {"d": 1, **options})
    ops, count = registered(definition), len(spec.differentiated)
    direct = Direct(ops.name, ops.inputs, tuple(options))
    keys = ",".join(f"{name}={word(value)}" for name, value in options.items())

    def call(*inputs: Tensor | None, eps: float | None = None, **named: Tensor | None) -> Any:
        given = {**dict.fromkeys(ops.inputs), **dict(zip(ops.inputs, inputs, strict=False)), **named}
        if len(inputs) > len(ops.inputs) or len(given) > len(ops.inputs):
            got = ", ".join([f"{len(inputs)} by position", *named])
            raise TorchError(f"'{ops.name}' takes {', '.join(ops.inputs)}; got {got}.")
        if lacking := [name for name, t in given.items() if t is None and name not in ops.optional]:
            raise TorchError(f"'{ops.name}' expects {', '.join(lacking)}, got None.")
        if (eps is None) == ops.takes_eps:
            raise TorchError(f"'{ops.name}' {'expects eps=, for example 1e-5' if ops.takes_eps else 'takes no eps'}.")
        tensors, fixed = (*given.values(), None), (eps, keys)
        results = None
        if not torch.compiler.is_compiling():
            results = direct(tensors, fixed) or direct.prepare(ops, tensors, fixed, keys, eps or 0.0)
        if results is None:
            results = dispatched(ops, {n: t for n, t in given.items() if t is not None}, keys, eps)[:count]
        return results[0] if count == 1 else tuple(results)

    call.__name__ = call.__qualname__ = ops.name
    return call


def registered(definition: Definition) -> GraphOps:
    """The operators of a graph, which it gets once."""
    name = definition.name
    if GRAPHS.get(name) != definition:
        name = f"{name}_{make_spec(definition, 'fwd', {'d': 1}).digest}"
    return OPS.get(name) or OPS.setdefault(name, GraphOps(definition, name))
