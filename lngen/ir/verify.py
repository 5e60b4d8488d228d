"""The rules a graph keeps, checked after build, after parse and after every pass.

Every value is defined once and has a name that is valid in C; every use follows its definition and has its type; each
equation's type is the result of its op's rule; every result is defined; no parameter or result varies along S, whose
segments have one length in a graph.
"""

from __future__ import annotations

from lngen.errors import VerifyError, short
from lngen.ir.names import is_graph_name, is_name
from lngen.ir.ops import OPS
from lngen.ir.reductions import OF_SEGMENTS, ORDERS
from lngen.ir.types import Eqn, Graph, S, Value, print_eqn


def verify(graph: Graph, stage: str) -> Graph:
    """``graph`` itself, or a VerifyError that names the stage, the equation and the rule."""
    known: dict[str, Value] = {}
    if not is_graph_name(graph.name):
        raise VerifyError(f"graph @{graph.name} needs a lower-case name of letters, digits and _, for its kernels.")
    _check_attrs(graph, stage)
    for value in (*graph.params, *graph.results):
        if S in value.type.axes:
            raise VerifyError(
                _message(graph, stage, f"'{value}: {value.type}' varies along S, which no input or result does")
            )
    for value in graph.params:
        _define(graph, stage, known, value, f"parameter '{value}'")
    for number, eqn in enumerate(graph.eqns):
        problem = _problem(eqn, known)
        if problem:
            raise VerifyError(_message(graph, stage, f"equation {number}: {problem}", print_eqn(eqn)))
        _define(graph, stage, known, eqn.out, f"equation {number}: '{eqn.out}'")
    _one_segment(graph, stage)
    for result in graph.results:
        if known.get(result.name) != result:
            raise VerifyError(_message(graph, stage, f"result '{result}: {result.type}' is not defined"))
    if len(set(graph.results)) != len(graph.results):
        raise VerifyError(_message(graph, stage, "a value is returned twice"))
    return graph


def _check_attrs(graph: Graph, stage: str) -> None:
    """The attributes of a graph are ``order``, and names of results that are another result, ``%name``."""
    results = {str(r) for r in graph.results}
    for key, value in graph.attrs:
        if key == "order":
            if value not in ORDERS:
                what = f"there is no order '{value}'; the orders are {', '.join(ORDERS)}"
                raise VerifyError(_message(graph, stage, what))
        elif not isinstance(value, str) or not value.startswith("%"):
            what = f"a graph has no attribute '{key}'; its attributes are order, and results that are another, dz=%dx"
            raise VerifyError(_message(graph, stage, what))
        elif value not in results or key in graph.values():
            what = f"'{key}={value}' is expected to name a result that is another result, such as dz=%dx"
            raise VerifyError(_message(graph, stage, what))


def _one_segment(graph: Graph, stage: str) -> None:
    """All values along S have segments of one length."""
    first: Eqn | None = None
    for number, eqn in enumerate(graph.eqns):
        if eqn.op in OF_SEGMENTS:
            first = first or eqn
            wanted, found = (dict(e.attrs).get("segment") for e in (first, eqn))
            if found != wanted:
                problem = f"equation {number}: segment={wanted} is expected, as of '{first.out}', got {found}"
                raise VerifyError(_message(graph, stage, problem, print_eqn(eqn)))


def _define(graph: Graph, stage: str, known: dict[str, Value], value: Value, where: str) -> None:
    if value.name in known:
        raise VerifyError(_message(graph, stage, f"{where} is defined twice"))
    if not is_name(value.name):
        raise VerifyError(
            _message(graph, stage, f"{where} needs a name of letters and digits, one underscore between two words")
        )
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
    return f"graph @{graph.name} is malformed after '{stage}': {problem}." + (f"\n    {short(eqn)}" if eqn else "")
