"""If these fail, a second derivative is missing, or is not that of the forward, under some options of a graph."""

from itertools import combinations
from typing import Any

import torch

import lngen.torch as L
from graph_names import whole_heads
from lngen.compiler.graphs import GRAPHS
from lngen.errors import SpecError
from lngen.proof.torch_graph import torch_function
from lngen.torch.bridge import TO_TORCH, TorchError
from lngen.torch.graph_ops import OPS, PLAIN
from sampling import rotating

D, ROWS = 5, 2
EPS = {"eps": 0.5}

Keys = dict[str, Any]


def pairs(graph: str) -> list[Keys]:
    """No option, each value of each option alone, then all pairs of values of two options."""
    found: list[tuple[str, Any]] = []
    declared = OPS[graph].definition.builder(PLAIN).declared
    for name, option in ((n, o) for n, o in declared.items() if not o.of_forward):
        others = [c for c in option.choices if c != option.default] or [0.5]
        found += [(name, v) for v in ([not option.default] if isinstance(option.default, bool) else others)]
    return [{}, *({k: v} for k, v in found), *(dict(pair) for pair in combinations(found, 2) if len(dict(pair)) == 2)]


def twice(results: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The derivative of a number that depends on all first derivatives."""
    torch.manual_seed(1)
    total = sum((y * torch.randn_like(y)).sum() for y in results)
    first = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
    number = sum((g * torch.randn_like(g)).sum() for g in first)
    return list(torch.autograd.grad(number, inputs, materialize_grads=True)) if number.requires_grad else list(first)


@rotating(("graph", "keys"), [(graph, keys) for graph in GRAPHS for keys in pairs(graph)], str)
def test_a_second_derivative_is_that_of_the_forward(graph: str, keys: Keys) -> None:
    try:
        function = L.function(graph, **keys)
    except (SpecError, TorchError):  # options that exclude each other, or leave no [M, D] input
        return
    torch.manual_seed(0)
    spec, d = function.spec, whole_heads(graph, D)
    differentiable = spec.definition.differentiable(spec.options)
    given = {
        p.name: torch.randn(p.type.shape(ROWS, d)).to(TO_TORCH[p.type.dtype]).requires_grad_(p.name in differentiable)
        for p in spec.forward().tensors
    }
    places = [name for name in given if name in spec.classes or name == "positions"]
    given |= {name: torch.arange(ROWS).to(given[name].dtype) for name in places}
    inputs = [t for t in given.values() if t.requires_grad]
    eps = EPS if function.ops.takes_eps else {}
    results = function(**given, **eps)
    found = twice([results] if isinstance(results, torch.Tensor) else results, inputs)
    spec = function.ops.side([given.get(n) for n in function.ops.inputs], function.keys).spec
    expected = twice(torch_function(spec.forward(), **eps)(*given.values())[: function.count], inputs)
    tolerance = 0.1 if keys.get("residual_dtype") in ("f16", "bf16") else 1e-4
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance)
