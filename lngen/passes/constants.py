"""The proof that a derivative may take a value for a constant: no result changes with it."""

from __future__ import annotations

from dataclasses import replace

from lngen.errors import DerivativeError
from lngen.ir import Eqn, Graph, Value, print_eqn
from lngen.passes.edit import downstream, substitute
from lngen.passes.simplify import simplify
from lngen.passes.vjp import vjp


def constants(graph: Graph, wrt: tuple[str, ...], of: tuple[str, ...]) -> frozenset[Value]:
    """The maxima whose effects on the results ``of`` cancel: the derivative by ``wrt`` takes them for constants.

    exp(x - max(x)) / sum(exp(x - max(x))) does not change with the maximum that it subtracts; sum(exp(x - max(x)))
    does. DerivativeError for a detached value whose effects do not cancel: the gradient would not be that of the
    forward. Each value is tried while all others are constants. If none of them has an effect alone, all of them
    together have none: the value that is computed last reaches the results directly.
    """
    wanted = downstream(graph.eqns, [p for p in graph.params if p.name in wrt])
    found = set()
    for eqn in graph.eqns:
        if eqn.out in wanted and eqn.op == "detach" and not _cancels(graph, eqn.out, of):
            raise DerivativeError(_why(graph, eqn, of))
        if eqn.out in wanted and eqn.op == "reduce_max" and _cancels(graph, eqn.out, of):
            found.add(eqn.out)
    return frozenset(found)


def _cancels(graph: Graph, value: Value, of: tuple[str, ...]) -> bool:
    """Whether the gradient of the results by ``value`` simplifies to zero, where the equations use it.

    Every value of the gradient is read as a polynomial, those of the forward pass, too.
    """
    if graph.producers()[value].op == "detach" and value.name in of:
        return False
    given = _renamed(graph, value)
    cut = substitute(replace(graph, results=()), {value: given})
    results = tuple(r for r in graph.results if r.name in of and r in downstream(cut.eqns, [given]))
    if not results:
        return True
    derived = vjp(replace(cut, params=(*graph.params, given), results=results), (given.name,))
    proof = simplify(derived, *(p.name for p in derived.params))
    return _is_zero(proof, proof.results[0])


def _renamed(graph: Graph, value: Value) -> Value:
    """A value of the same type with a name that is free, and so is that of its gradient."""
    name, taken = "given", graph.values()
    while name in taken or f"d{name}" in taken:
        name += "x"
    return replace(value, name=name)


def _is_zero(graph: Graph, value: Value) -> bool:
    eqn = graph.producers().get(value)
    if eqn is not None and eqn.op in ("cast", "expand"):
        return _is_zero(graph, eqn.args[0])
    return eqn is not None and eqn.op == "const" and eqn.value == 0


def _why(graph: Graph, detach: Eqn, of: tuple[str, ...]) -> str:
    names = ", ".join(f"'{name}'" for name in of)
    return (
        f"graph @{graph.name}: '{detach.args[0].name}' is detached, but its effects on {names} do not cancel, as far "
        "as lngen can show. The gradient would not be that of the forward: leave detach away, or differentiate other "
        f"results (of=).\n    {print_eqn(detach)}"
    )
