"""A plan as data: everything that a program in any language needs to launch its kernels.

The runtime launches by this description, and a manifest has it of every kernel set. ``lngen help manifest`` says how to
read it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lngen.compiler.ir import WIDE, Axis, D, Graph, M, Value, is_of_columns, is_of_set, is_of_table
from lngen.compiler.lower import Argument, Kernel, Plan
from lngen.compiler.passes import accumulated
from lngen.compiler.problem import OVERLAP_ARCH, minimum_arch
from lngen.compiler.spec import Spec
from lngen.files import sha256
from lngen.rules import ALIGNMENT, PADDED, ROW_KINDS, RULES, SETS, TABLE


def call(spec: Spec, graph: Graph) -> dict[str, Any]:
    """The description of a call, which no schedule changes: what a caller passes and gets, of JSON types alone."""
    same = graph.shared
    returned = [f"d{name}" for name in spec.differentiates]
    returned += [r.name for r in graph.results if r.name not in returned]  # scales of dx
    takes_eps = spec.definition.builder(spec.options).takes_eps
    return {
        "spec": _spec(spec),
        "tensors": [
            *(_tensor(spec, graph, v, "input") for v in graph.tensors),
            *(_tensor(spec, graph, v, "output") for v in graph.results),
        ],
        "same_tensor": same,
        "call": {
            "leader": _leader(spec, graph),
            "returned": list(spec.definition.outputs(spec.options)) if spec.direction == "fwd" else returned,
            "cotangents": [] if spec.direction == "fwd" else [f"d{name}" for name in spec.differentiated],
            "eps": spec.eps if takes_eps or graph.by_value else None,
            "numbers": [
                {"name": v.name, "dtype": str(v.type.dtype), "of": "eps", "rule": RULES[v.rule].text}
                for v in graph.by_value
            ],
        },
    }


def _leader(spec: Spec, graph: Graph) -> str:
    """The input that gives rows, library and device: if possible one that forward has checked."""
    forward = spec.forward()
    known = {v.name for v in (*forward.params, *forward.results)}
    rated = enumerate(graph.tensors)
    return max(rated, key=lambda e: (M in e[1].type.axes, e[1].name in known, D in e[1].type.axes, -e[0]))[1].name


def described(plan: Plan) -> dict[str, Any]:
    """The description of a plan's kernel set, of JSON types alone: that of its call, and how kernels are launched."""
    of_call = call(plan.spec, plan.graph)
    values = (*plan.inputs, *plan.outputs)
    return {
        "name": plan.name,
        **of_call,
        "schedule": {
            "text": str(plan.schedule),
            **{f.name: getattr(plan.schedule, f.name) for f in fields(plan.schedule)},
        },
        "graph_sha256": sha256(str(plan.graph).encode()),
        "numerics": {"order": plan.spec.order, "statistics": str(plan.accumulator)},
        "tensors": [{**t, **_placed(plan, v)} for t, v in zip(of_call["tensors"], values, strict=True)],
        "in_place": {"outputs": _in_place(plan), "reads_again": not plan.in_place},
        "minimum_arch": f"sm_{minimum_arch(plan.schedule)}",
        "programmatic_stream_serialization": {"minimum_arch": f"sm_{OVERLAP_ARCH}"},
        "kernels": [_kernel(k) for k in plan.kernels],
        "workspace": {
            "alignment": ALIGNMENT,
            "buffers": [
                {
                    "name": b.name,
                    "dtype": b.element,
                    "element_bytes": b.dtype.size,
                    "fixed": b.fixed,
                    "per_row": b.per_row,
                    "zeroed": b.zeroed,
                    **({"per_stretch": b.per_stretch, "stretch": b.stretch._asdict()} if b.stretch else {}),
                }
                for b in plan.workspace
            ],
        },
    }


def _spec(spec: Spec) -> dict[str, Any]:
    inputs = [p.name for p in spec.forward().tensors]
    declared, chosen = spec.definition.builder(spec.options).declared, dict(spec.chosen)
    return {
        "text": str(spec),
        "graph": spec.definition.name,
        "direction": spec.direction,
        "d": spec.d,
        "dtype": str(spec.dtype),
        "weight": str(spec.weight),
        "out": str(spec.out),
        "eps": spec.eps,
        "inputs": inputs,
        "outputs": list(spec.definition.outputs(spec.options)),
        "options": {name: chosen.get(name, option.default) for name, option in declared.items()},
        "save": spec.save,
        "order": spec.order,
        "wrt": None if spec.direction == "fwd" else list(spec.differentiates),
        "of": None if spec.direction == "fwd" else list(spec.differentiated),
        "grad": None if spec.grad is None else str(spec.grad),
        "accumulate": list(spec.accumulate),
        "strides": spec.strides,
        "forward": str(spec.with_direction("fwd")),
    }


def _tensor(spec: Spec, graph: Graph, value: Value, role: str) -> dict[str, Any]:
    """An array that a caller passes or gets; its shape has expressions of M and D."""
    return {
        "name": value.name,
        "role": role,
        "dtype": str(value.type.dtype),
        "element_bytes": value.type.dtype.size,
        "axes": [str(a) for a in value.type.axes],
        "shape": [_length(a) for a in value.type.axes],
        "added_to": next((p.name for p in graph.tensors if p.name == accumulated(value.name)), None),
    }


def _length(axis: Axis) -> str:
    """The length of an axis: M, D, a part of them, or a number; of sets by the number of inner rows.

    A table has as many rows as its array.
    """
    if axis.base is None:
        return str(axis)
    if axis.of_table:
        return TABLE
    if isinstance(axis.number, str):
        return SETS
    return f"{axis.base} / {axis.number}" if axis.by == "/" else str(int(axis.number) // axis.each)


def _placed(plan: Plan, value: Value) -> dict[str, Any]:
    """How an array has to lie: alignment of its address in bytes, strides in elements.

    A stride is a number, an expression, or the name of one that the caller chooses, a multiple of ``stride_multiple``.
    """
    axes, size = value.type.axes, value.type.dtype.size
    alignment = plan.alignment(value) if D in axes or is_of_columns(value) or is_of_table(value) else size
    if value.type.by_columns:
        return {"alignment": alignment, "strides": ["column_stride", "1"], "stride_multiple": PADDED}
    if is_of_table(value):
        multiple = max(1, alignment // size)
        return {"alignment": alignment, "strides": ["table_stride", "1"], "stride_multiple": multiple}
    if is_of_set(value):
        return {
            "alignment": alignment, "strides": ["outer_stride", "1"], "stride_multiple": max(1, alignment // size),
        }  # fmt: skip
    if axes != WIDE:
        inner = [_length(a) for a in axes[1:]]
        return {"alignment": alignment, "strides": [*inner, "1"][-len(axes) :] if axes else []}
    if plan.contiguous:
        return {"alignment": alignment, "strides": ["D", "1"], "stride_multiple": plan.spec.d}
    chosen = ["outer_stride", "stride", "1"] if plan.spec.strides == 2 else ["stride", "1"]
    return {"alignment": alignment, "strides": chosen, "stride_multiple": max(1, alignment // size)}


def _in_place(plan: Plan) -> dict[str, list[str]]:
    """The inputs of which each output may have the address, and so overwrite them; outputs without any are left out."""
    pairs = {
        v.name: [
            p.name
            for p in plan.inputs
            if p.name == accumulated(v.name)
            or (plan.in_place and p.type.axes == v.type.axes == WIDE and p.type.dtype.size == v.type.dtype.size)
        ]
        for v in plan.outputs
    }
    return {name: inputs for name, inputs in pairs.items() if inputs}


def _kernel(kernel: Kernel) -> dict[str, Any]:
    x, y = kernel.grid
    return {
        "name": kernel.name,
        "arguments": [
            {
                "name": a.name,
                "ctype": _ctype(a),
                "kind": a.kind,
                "tensor": a.tensor if a.tensor and a.kind != "value" else None,
                **({"number": a.tensor} if a.kind == "value" else {}),
            }
            for a in kernel.arguments
        ],
        "grid": {"x": x.described, "y": y.described},
        "block": kernel.block,
        "cluster": kernel.cluster,
        "dynamic_shared_bytes": kernel.dynamic,
        "cooperative": kernel.cooperative,
        "launch_for_no_rows": kernel.always,
    }


def _ctype(a: Argument) -> str:
    """The type of an argument in C."""
    if a.kind == "value":
        return a.ctype
    return "long long" if a.kind in ROW_KINDS else f"{'const ' if a.const else ''}{a.ctype}*"
