"""``lngen list``: the graphs and the keys of a spec."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import click

from lngen.cli.output import Output, output_options
from lngen.graphs import GRAPHS, Chosen, Definition, Options
from lngen.ir import ORDERS, DType, Value
from lngen.spec import SAVES
from lngen.spec.keys import wrong

# Stand-ins, one dtype per role, so that a type is shown by the key that sets it.
_ROLES = {DType.F16: "dtype", DType.BF16: "weight"}
_OPTIONS = Options(DType.F16, DType.BF16, DType.F32)


@click.command(epilog="Example: lngen list add_rmsnorm")
@click.argument("names", nargs=-1, metavar="[GRAPH]...")
@output_options
def command(output: Output, names: tuple[str, ...]) -> None:
    """The graphs, a line each; of every GRAPH named its inputs, outputs, statistics, and keys with their defaults."""
    for name in names:
        if name not in GRAPHS:
            wrong(name, "graph", name, list(GRAPHS))
    graphs = [_described(GRAPHS[name]) for name in names or GRAPHS]
    output.table({"graphs": graphs, "orders": [*ORDERS]}, "\n".join(map(_text, graphs)) if names else _overview(graphs))


def _overview(graphs: list[dict[str, Any]]) -> str:
    """The graphs by group, a line each."""
    width = max(len(g["name"]) for g in graphs)
    lines = []
    for group in dict.fromkeys(g["group"] for g in graphs):
        lines += [group, *(f"  {g['name']:<{width}}  {g['summary']}" for g in graphs if g["group"] == group), ""]
    lines += [
        "lngen list GRAPH prints its inputs, results and keys; a spec is GRAPH.fwd|bwd:key=value,...",
        f"Sums have the order {ORDERS[0]} (key order: {' '.join(ORDERS)}); another one gives other bits.\n",
    ]
    return "\n".join(lines)


def _described(definition: Definition) -> dict[str, Any]:
    declared = definition.builder(_OPTIONS).declared
    everything = tuple((n, True) for n, option in declared.items() if isinstance(option.default, bool))
    built = definition.builder(replace(_OPTIONS, chosen=everything))
    dtypes = " ".join(t.value for t in DType)
    results = [v.name for v in built.results]
    keys = {
        "d": ("required", "features per row"),
        "dtype": ("f32", f"of inputs and gradients with rows: {dtypes}"),
        "weight": ("dtype", "dtype of inputs without rows"),
        "out": ("dtype", f"dtype of {', '.join(results)}"),
        **{n: (_text_of(o.default), f"{o.about}: {o.values}") for n, o in declared.items()},
        **({"eps": ("1e-05", "added to the mean square, from 0 to 1")} if built.takes_eps else {}),
        "save": ("stats", f"what forward saves for backward: {' '.join(SAVES)}, or names of results"),
        "wrt": ("all inputs", f"bwd only, what to differentiate: {'+'.join(definition.differentiable(built.options))}"),
        "of": ("all outputs", f"bwd only, which results have a cotangent: {'+'.join(results)}"),
        "grad": ("the input's", "bwd only, dtype of the gradients of inputs without rows"),
        "accumulate": ("none", "bwd only, the inputs whose gradient is added to an array, in the compute dtype"),
        "order": (ORDERS[0], f"version of the rule that orders the sums; part of the result: {' '.join(ORDERS)}"),
        "blocks": ("the same on every GPU", "bwd only, blocks that share the rows of column sums; part of the result"),
    }
    return {
        "name": definition.name,
        "group": definition.group,
        "summary": definition.summary,
        "inputs": [
            {
                "name": p.name,
                "type": _type(p),
                "optional": p.name in declared,
                "default": p.name not in declared or bool(declared[p.name].default),
            }
            for p in built.params
        ],
        "outputs": [{"name": v.name, "type": _type(v, "out")} for v in built.results],
        "statistics": [{"name": v.name, "type": _type(v, "compute")} for v in built.statistics],
        "keys": [{"key": k, "default": default, "meaning": text} for k, (default, text) in keys.items()],
    }


def _text_of(value: Chosen) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _type(value: Value, role: str = "") -> str:
    return re.sub(r"^\w+", role or _ROLES[value.type.dtype], str(value.type))


def _text(graph: dict[str, Any]) -> str:
    lines = [f"{graph['name']}.fwd, {graph['name']}.bwd: {graph['summary']}"]
    for i in graph["inputs"]:
        note = f"  optional, {'in' if i['default'] else 'not in'} by default" if i["optional"] else ""
        lines.append(f"  input      {i['name']}: {i['type']}{note}")
    lines += [f"  output     {o['name']}: {o['type']}" for o in graph["outputs"]]
    lines += [f"  statistic  {s['name']}: {s['type']}" for s in graph["statistics"]]
    name, width = (max(len(k[part]) for k in graph["keys"]) for part in ("key", "default"))
    lines += [f"  key        {k['key']:<{name}} = {k['default']:<{width}}  {k['meaning']}" for k in graph["keys"]]
    return "\n".join(lines) + "\n"
