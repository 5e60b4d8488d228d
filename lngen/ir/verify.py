"""The rules a graph keeps, checked after build, after parse and after every pass.

Every value is defined once and has a name that C allows; every use comes after its definition and has
its type; each equation's type is what its op's rule gives; every result is defined.
"""

from __future__ import annotations

from lngen.errors import VerifyError
from lngen.ir.names import is_name, is_reserved
from lngen.ir.ops import OPS
from lngen.ir.printer import print_eqn
from lngen.ir.types import Eqn, Graph, Value


def verify(graph: Graph, stage: str) -> Graph:
    """``graph`` itself, or a VerifyError that names the stage, the equation and the rule."""
    known: dict[str, Value] = {}
    if not is_name(graph.name):
        raise VerifyError(f"graph @{graph.name} needs a lower-case name of letters, digits and _, for its kernels.")
    for value in graph.params:
        _define(graph, stage, known, value, f"parameter '{value}'")
    for number, eqn in enumerate(graph.eqns):
        problem = _problem(eqn, known)
        if problem:
            raise VerifyError(_message(graph, stage, f"equation {number}: {problem}", print_eqn(eqn)))
        _define(graph, stage, known, eqn.out, f"equation {number}: '{eqn.out}'")
    for result in graph.results:
        if known.get(result.name) != result:
            raise VerifyError(_message(graph, stage, f"result '{result}: {result.type}' is not defined"))
    if len(set(graph.results)) != len(graph.results):
        raise VerifyError(_message(graph, stage, "a value is returned twice"))
    return graph


def _define(graph: Graph, stage: str, known: dict[str, Value], value: Value, where: str) -> None:
    if value.name in known:
        raise VerifyError(_message(graph, stage, f"{where} is defined twice"))
    if not is_name(value.name) or is_reserved(value.name):
        raise VerifyError(_message(graph, stage, f"{where} needs a lower-case name that C and the kernels leave free"))
    known[value.name] = value


def _problem(eqn: Eqn, known: dict[str, Value]) -> str | None:
    op = OPS.get(eqn.op)
    if op is None:
        return f"there is no op '{eqn.op}'; the ops are {', '.join(OPS)}"
    if len(eqn.args) != op.arity:
        return f"'{eqn.op}' takes {op.arity} operands, got {len(eqn.args)}"
    for arg in eqn.args:
        if arg.name not in known:
            return f"'{arg}' is used before it is defined"
        if known[arg.name].type != arg.type:
            return f"'{arg}' is used as {arg.type} but defined as {known[arg.name].type}"
    for key, _ in eqn.attrs:
        if key not in op.attrs:
            return f"'{eqn.op}' has no attribute '{key}'; its attributes are {', '.join(op.attrs) or 'none'}"
    try:
        expected = op.typ(tuple(a.type for a in eqn.args), eqn.attrs)
    except ValueError as e:
        return str(e)
    return None if expected == eqn.out.type else f"the result is {expected}, not {eqn.out.type}"


def _message(graph: Graph, stage: str, problem: str, eqn: str = "") -> str:
    return f"graph @{graph.name} is malformed after '{stage}': {problem}." + (f"\n    {eqn}" if eqn else "")
