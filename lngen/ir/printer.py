"""Graph -> text. ``parse(print_graph(g)) == g``; the grammar is in ``lngen.ir.parser``."""

from __future__ import annotations

from lngen.ir.types import Attr, Eqn, Graph


def print_graph(graph: Graph) -> str:
    """The graph as text, one equation a line, names and types aligned."""
    params = ", ".join(f"{p}: {p.type}" for p in graph.params)
    results = ", ".join(str(r.type) for r in graph.results)
    name_width = max((len(str(e.out)) for e in graph.eqns), default=0)
    type_width = max((len(str(e.out.type)) for e in graph.eqns), default=0)
    lines = [f"graph @{graph.name}({params}) -> ({results}) {{"]
    lines += [f"  {print_eqn(e, name_width, type_width)}" for e in graph.eqns]
    lines += [f"  return {', '.join(map(str, graph.results))}", "}"]
    return "\n".join(lines) + "\n"


def print_eqn(eqn: Eqn, name_width: int = 0, type_width: int = 0) -> str:
    """One equation, ``%y : f32[M, D] = add %a, %b``."""
    parts = [f"{eqn.out!s:<{name_width}} : {eqn.out.type!s:<{type_width}} = {eqn.op}"]
    if eqn.args:
        parts.append(", ".join(map(str, eqn.args)))
    if eqn.attrs:
        parts.append("{" + ", ".join(f"{k}={_attr(v)}" for k, v in eqn.attrs) + "}")
    return " ".join(parts)


def _attr(value: Attr) -> str:
    # repr of a float is the shortest text that parses back to the same bits.
    return repr(value) if isinstance(value, float) else str(value)
