"""Sums that norms read, in graphs that Dynamo traced: each pair becomes one operator, ``fuse``.

    h = a + b                         add_rmsnorm = add_rmsnorm_fwd(a, b, None, None, None, gamma, eps=..., keys=...)
    rmsnorm = rmsnorm_fwd(h, gamma)   h = add_rmsnorm[1]
    y = rmsnorm[0]                    y = add_rmsnorm[0]

The norm of a sum rounds h as PyTorch's addition does, and normalises what it stores, so forward has the same bits.
Backward adds the gradients of h in the compute dtype and rounds once.

Dynamo runs each node on tensors without content, and keeps them in the graph. So they tell what is changed in place:
all views of a memory have one storage, and ``_version`` counts the writes of the whole graph from 0.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from lngen import config
from lngen.compiler.graphs import GRAPHS
from lngen.errors import LngenError
from lngen.torch.graph_ops import OPS, GraphOps

SUMS = {operator.add, operator.iadd, torch.add}
NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
NORMS = {OPS[name].fwd: (OPS[name], OPS[f"add_{name}"]) for name in GRAPHS if f"add_{name}" in GRAPHS}


def fuse(graph_module: GraphModule) -> GraphModule:
    """Make one operator of each sum and the norm of lngen's that reads it, in place; the same module.

    graph_module  what Dynamo hands to a backend of ``torch.compile``: a graph before autograd

    A sum is of two tensors of one shape and dtype, without ``alpha``. What else reads it reads h. Forward keeps its
    bits. A pair stays where one of its tensors is changed in place, and where h would get other strides or gradients,
    as an h that the graph returns for training. ``a += b`` is a sum if nothing reads the former a, or a view of it, any
    more. Graphs inside, as those of activation checkpointing, are treated alike.

    ``torch._dynamo.utils.counters["lngen"]`` counts the operators of lngen's, ``norms``, and the pairs, ``fused``.
    LNGEN_DEBUG=1 prints the pairs.
    """
    modules = [m for m in graph_module.modules() if isinstance(m, GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes]
    counters["lngen"]["norms"] += norms_in(graph_module)
    writes = Writes.of(nodes)
    for module in modules:
        if pairs := list(_fused(module.graph, writes)):
            module.graph.lint()
            module.recompile()
        counters["lngen"]["fused"] += len(pairs)
        for pair in pairs if config.debug_level() >= 1 else ():
            print(f"lngen: fused {pair}", file=sys.stderr)
    return graph_module


def norms_in(graph_module: GraphModule) -> int:
    """The number of calls of lngen's operators."""
    modules = [m for m in graph_module.modules() if isinstance(m, GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes]
    return sum(isinstance(target, OpOverload) and target.namespace == "lngen" for target in targets)


# ---- what tensors without content tell ----


def made(node: Node) -> list[Any]:
    """What a node returned where Dynamo ran it, flattened."""
    found: list[Any] = tree_leaves(node.meta.get("example_value"))
    return found


def tensors(node: Node) -> list[FakeTensor]:
    """The tensors with strides among that."""
    return [value for value in made(node) if isinstance(value, FakeTensor) and value.layout is torch.strided]


def trained(node: Node) -> bool:
    """True if a tensor among that has a gradient."""
    return any(tensor.requires_grad for tensor in tensors(node))


def storage(tensor: FakeTensor) -> int:
    """The same number for all views of one memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


class Writes(NamedTuple):
    """Storages that a graph writes into: ``every`` one, and those with no other writes than ``sums`` in place.

    Such a sum may as well make a new tensor.
    """

    every: set[int]
    sums: set[int]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Writes:
        place = {node: number for number, node in enumerate(nodes)}
        views: dict[int, list[Node]] = defaultdict(list)
        versions: dict[int, int] = defaultdict(int)
        for node in nodes:
            for tensor in tensors(node):
                views[storage(tensor)].append(node)
                versions[storage(tensor)] = max(versions[storage(tensor)], tensor._version)
        unseen = {
            storage(t) for node in nodes if _writes_unseen(node) for n in node.all_input_nodes for t in tensors(n)
        }
        written = {number for number, version in versions.items() if version} - unseen
        return cls(written | unseen, {n for n in written if versions[n] == _sums_in_place(views[n], place)})

    def steady(self, node: Node) -> bool:
        """True for a node whose tensors have the same numbers wherever the graph reads them."""
        return not any(storage(tensor) in self.every - self.sums for tensor in tensors(node))

    def only_makes(self, node: Node) -> bool:
        """True for a node that does nothing but make numbers, and tensors that nothing writes into."""
        fresh = [tensor for tensor in tensors(node) if storage(tensor) not in self.every]
        return len(made(node)) == len(fresh) + sum(isinstance(value, NUMBERS) for value in made(node))


def _writes_unseen(node: Node) -> bool:
    """True for an operator that may write without counting it: one with such a schema, a kernel of Triton's."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    has_graph = any(n.op == "get_attr" for n in node.all_input_nodes)  # whose nodes are seen
    return isinstance(target, HigherOrderOperator) and not has_graph


def _sums_in_place(views: Sequence[Node], place: Mapping[Node, int]) -> int:
    """The number of sums in place among the nodes that have a storage; 0 if a former value is read after one of them.

    The first node has to make the storage, and each other one has to be a sum of the node before it.
    """
    if views[0].op in ("placeholder", "get_attr"):
        return 0
    for former, node in pairwise(views):
        in_place = node.target is operator.iadd and node.args[0] is former
        if not in_place or any(place[reader] > place[node] for reader in former.users):
            return 0
    return len(views) - 1


# ---- pairs ----


class Pair(NamedTuple):
    """A sum and the norm that reads it.

    before   the node before which the norm of the sum is to stand: the first that reads the sum
    given    the arguments of the norm of the sum, by name
    former   the names of the norm's results
    results  the names of those of the norm of the sum
    """

    total: Node
    norm: Node
    before: Node
    given: dict[str, Any]
    former: list[str]
    results: list[str]


def _fused(graph: Graph, writes: Writes) -> Iterator[str]:
    """The pairs of a graph in words, each when it is one operator."""
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    for norm in nodes:
        pair = _pair(norm, place, writes) if norm.target in NORMS else None
        if pair and all(map(writes.only_makes, nodes[place[pair.total] + 1 : place[norm]])):
            words = f"{pair.total} = {' + '.join(map(str, pair.total.args))} and {norm}"
            place |= dict.fromkeys(_rewritten(graph, pair), place[pair.before])
            yield words


def _pair(norm: Node, place: Mapping[Node, int], writes: Writes) -> Pair | None:
    """The norm and the sum that it reads, if nothing about their tensors forbids that they are one operator."""
    ops, of_sum = NORMS[norm.target]
    given: dict[str, Any] = {**dict(zip(ops.inputs, norm.args, strict=False)), **norm.kwargs}
    total = given["x"]
    if not _is_sum(total) or not _same_gradients(total, norm) or not all(map(_is_item, norm.users)):
        return None
    weights = [value for name, value in given.items() if isinstance(value, Node) and name != "x"]
    before = min(total.users, key=lambda reader: place[reader])
    in_time = all(place[weight] < place[before] and weight is not total for weight in weights)
    if not in_time or not all(writes.steady(node) for node in (total, *total.args, *weights)):
        return None
    former = _results(ops, given)
    given |= dict(zip(("x", "residual"), total.args, strict=True))
    if len(total.users) == 1 and not trained(norm):  # nothing needs h
        given["keys"] = ",".join(filter(None, (given.get("keys"), "h=no")))
    results = _results(of_sum, given)
    return Pair(total, norm, before, given, former, results) if results else None


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem


def _same_gradients(total: Node, norm: Node) -> bool:
    """True if autograd sees no difference.

    Of one operator h has a gradient if a term or a weight has one, and y does not depend on the h beside it.
    """
    asked = any(n.op == "output" or getattr(n.target, "__module__", "") == "torch.autograd" for n in total.users)
    if trained(total) != any(map(trained, total.args)):  # under no_grad, or detached in place
        return False
    return not asked if trained(total) else not trained(norm)


def _is_sum(node: Any) -> bool:
    """True for a sum of two tensors that are alike, which is contiguous as the operator's is."""
    if not isinstance(node, Node) or node.kwargs or not all(isinstance(arg, Node) for arg in node.args):
        return False
    if node.target not in SUMS and (node.op, node.target) != ("call_method", "add"):
        return False
    alike = [tensors(n) for n in (node, *node.args)]
    if [len(found) for found in alike] != [1, 1, 1]:
        return False
    (h,), *terms = alike
    contiguous = [math.prod(h.shape[n + 1 :]) for n in range(h.dim())]
    return _same(h.stride(), contiguous) and all(
        (t.dtype, t.device) == (h.dtype, h.device) and _same(t.shape, h.shape) for (t,) in terms
    )


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether numbers are equal for every size that the graph is for; to ask for one size would add a guard."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def _results(ops: GraphOps, given: Mapping[str, Any]) -> list[str]:
    """The names of an operator's results; none for keys that its graph does not take."""
    nodes = [given.get(name) for name in ops.inputs]
    try:
        side = ops.side([tensors(n)[0] if isinstance(n, Node) else None for n in nodes], given.get("keys", ""))
    except LngenError:
        return []
    return [result.name for result in side.results]


def _rewritten(graph: Graph, pair: Pair) -> list[Node]:
    """The new nodes, which stand for the pair."""
    total, norm, names = pair.total, pair.norm, pair.results
    known = dict(zip(pair.former, made(norm), strict=True)) | {"h": made(total)[0]}
    _, of_sum = NORMS[norm.target]
    with graph.inserting_before(pair.before):
        numbers = {key: pair.given[key] for key in ("eps", "keys") if key in pair.given}
        fused = graph.call_function(of_sum.fwd, tuple(pair.given.get(name) for name in of_sum.inputs), numbers)
        fused.meta = {**norm.meta, "example_value": [known[name] for name in names]}
        new = [fused]
        if "h" in names:
            new += [graph.call_function(operator.getitem, (fused, names.index("h")))]
            new[1].meta = dict(total.meta)
            total.replace_all_uses_with(new[1])
    for user in list(norm.users):
        user.args = fused, names.index(pair.former[user.args[1]])
    graph.erase_node(norm)
    graph.erase_node(total)
    return new
