"""Any graph as a function of tensors, a program's own as well: ``function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import Graph
from lngen.compiler.spec import Spec, make_spec
from lngen.launch.runtime.norm import definition_of
from lngen.torch.bridge import TorchError
from lngen.torch.given import check_tensors, fitted
from lngen.torch.graph_ops import INDEX, OPS, GraphOps, bound
from lngen.torch.graph_way import Direct
from lngen.torch.torch_functions import dispatched, word


def function(
    graph: str | Definition | Graph | Callable[[GraphBuilder], None], **options: bool | str | float
) -> GraphFunction:
    """A differentiable function of tensors: ``y = function(graph)(x, gamma, eps=1e-6)``.

    graph    as of ``lngen.compile``: a name, a function that describes a forward graph, a Definition, a Graph
    options  keys of a spec that are no dtypes: those of the graph, and ``save``

    It takes the inputs that the options leave, as ``lngen.compile(graph, **options).forward`` does: in the graph's
    order, by position or name. D, dtypes and eps are those of the call. The result is one tensor, or a tuple for a
    graph of several outputs. The graph gets registered operators, ``torch.ops.lngen.NAME_fwd`` and ``NAME_bwd``, in
    which the name of a program's own graph has its digest. SpecError for what is no graph or no option, RuntimeError
    for an input that is missing or that the options exclude.
    """
    return GraphFunction(make_spec(definition_of(graph), "fwd", {"d": 1, **options}))


class GraphFunction:
    """What ``function`` returns: it calls a graph under the options of a spec. It can be copied and pickled.

    A pickle has the name of a named graph, and the function that describes a program's own, as Python pickles it: by
    its module and name.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.ops = spec, registered(spec)
        self.names = tuple(p.name for p in spec.forward().tensors)
        self.count = len(spec.differentiated)
        keys = {**dict(spec.chosen), **({} if spec.save == "stats" else {"save": spec.save})}
        self.keys = ",".join(f"{name}={word(value)}" for name, value in keys.items())
        self.direct = Direct(self.ops.name, self.names)
        self.__name__ = self.__qualname__ = self.ops.name

    def __reduce__(self) -> tuple[Any, ...]:
        definition = self.spec.definition
        graph = definition.name if self.spec.builtin else definition
        return _of, (graph, {**dict(self.spec.chosen), "save": self.spec.save})

    def __deepcopy__(self, memo: object) -> GraphFunction:
        return self  # nothing of it changes

    def __call__(self, *inputs: Tensor | None, eps: float | None = None, **named: Tensor | None) -> Any:
        """The outputs; RuntimeError for what does not fit."""
        rest = self.names[len(inputs) :]
        if named.keys() != {*rest} or len(inputs) > len(self.names):
            bound(self.ops.name, self.spec, inputs, named)  # raises
        inputs = (*inputs, *[named[name] for name in rest])
        eager = not torch.compiler.is_compiling()
        results = self.direct((*inputs, None), eps) if eager else None
        if results is None:
            results = self._general(inputs, eps, eager)
        return results[0] if self.count == 1 else tuple(results)

    def _general(self, inputs: Sequence[Any], eps: float | None, eager: bool) -> Sequence[Tensor]:
        """The outputs of a call that is not like an earlier one."""
        ops = self.ops
        if (eps is None) == ops.takes_eps:
            raise TorchError(f"'{ops.name}' {'expects eps=, for example 1e-5' if ops.takes_eps else 'takes no eps'}.")
        given = dict(zip(self.names, bound(ops.name, self.spec, inputs, {}), strict=True))
        check_tensors(ops.name, given.items())
        if other := fitted(ops, given):
            found, restored = other
            results = self(*(found[name] for name in self.names), eps=eps)
            return [restored(y) for y in (results if self.count > 1 else [results])]
        results = self.direct.prepare(ops, (*inputs, None), eps, self.keys, eps or 0.0) if eager else None
        return dispatched(ops, given, self.keys, eps, self.spec.differentiated) if results is None else results


def _of(graph: str | Definition, options: dict[str, bool | str | float]) -> GraphFunction:
    return function(graph, **options)


def registered(spec: Spec) -> GraphOps:
    """The operators of a forward, which a graph gets once: a named one has them for all that it saves by default."""
    options = dict(spec.chosen)
    ops = INDEX if options.get("target") == "index" else OPS.get(spec.definition.name)
    whole = spec.builtin and "vocabulary" not in options
    whole = whole and ops is not None and {p.name for p in spec.forward().tensors} <= {*ops.inputs}
    if ops is None or not whole or not {*spec.definition.saved(spec.options)} <= {*ops.taken}:
        name = f"{spec.definition.name}_{spec.digest}"
        ops = OPS.get(name) or OPS.setdefault(name, GraphOps(spec.definition, name, spec.options))
    return ops
