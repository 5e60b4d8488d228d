"""A plan as data: everything that a program in any language needs to launch its kernels.

The runtime launches by this description, a manifest has it of every kernel set, and ``RULES`` says how to read it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lngen.compiler.ir import RULES as VALUE_RULES
from lngen.compiler.ir import WIDE, D, Lengths, M, Value
from lngen.compiler.lower import NUMBERS, Argument, Extent, Kernel, Plan
from lngen.compiler.passes import accumulated
from lngen.compiler.problem import OVERLAP_ARCH, minimum_arch
from lngen.compiler.spec import Spec
from lngen.dtypes import FLOATS
from lngen.files import sha256

ALIGNMENT = 256  # bytes, of the buffers of a workspace

RULES = {
    "arguments": (
        "every argument is 8 bytes: a pointer, or a long long (rows; strides in elements); but a value has the size of "
        "its ctype: compute its rule in double from the double that its 'of' names, and round the result once to that "
        "type"
    ),
    "two_distances": (
        "with strides=2 row r of a tensor begins (r / inner) * outer_stride + (r % inner) * stride elements after its "
        "pointer: inner, at least 1, is one number for all tensors of a call"
    ),
    "launch": (
        "the kernels of a set are launched in this order on one stream: cluster blocks to a cluster in x if that is "
        "more than 1, cooperatively if the kernel says so. Allow its dynamic shared memory first "
        "(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES): what it uses, or launch_shared_bytes of the arch's "
        "resources, which spread blocks evenly. Allow clusters of more than 8 blocks as well "
        "(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED). Without rows, launch only those with "
        "launch_for_no_rows. A launch has at most 2^31 - 1 blocks in x"
    ),
    "grid": (
        "fixed blocks, or if that is null: n = ceil(rows / per), at most limit; blocks = times * n, at least least"
    ),
    "workspace": (
        f"one allocation aligned to {ALIGNMENT} bytes; a buffer has fixed + per_row * rows elements, its size is "
        f"rounded up to a multiple of {ALIGNMENT} bytes, and the next one starts there; launches that may run at the "
        "same time need a workspace each"
    ),
    "zeroed": (
        "a zeroed buffer is set to zero once, before the first launch that uses it; every launch that ends leaves it "
        "ready for the next"
    ),
    "programmatic": (
        "the attribute CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is to be set on every kernel of a set "
        "but the first, and may be set on the first, which gains time only behind a kernel that runs "
        "griddepcontrol.launch_dependents and costs time behind others: a kernel of code for minimum_arch or newer, "
        "which PTX of an older arch is on no GPU, waits for the previous launches on the stream before it reads or "
        "writes global memory; before the wait it prefetches inputs into L2, so their memory has to be allocated"
    ),
    "in_place": (
        "an output may have the address of one of these inputs, with the same strides; one output per input, and the "
        "input is then lost. No other arrays of a call overlap, if one of them is written to"
    ),
    "numerics": (
        "arithmetic is IEEE 754, round to nearest even, as written: no contraction, no flush to zero; sums have the "
        "order of the graph's text; results are rounded once, at the store; a NaN among a row's inputs makes every "
        "result of that row that depends on it NaN, of unspecified payload"
    ),
}


def described(plan: Plan) -> dict[str, Any]:
    """The description of a plan's kernel set, of JSON types alone."""
    return {
        "name": plan.name,
        "spec": _spec(plan.spec),
        "schedule": {
            "text": str(plan.schedule),
            **{f.name: getattr(plan.schedule, f.name) for f in fields(plan.schedule)},
        },
        "graph_sha256": sha256(str(plan.graph).encode()),
        "numerics": {"order": plan.spec.order, "statistics": str(plan.accumulator)},
        "tensors": [
            *(_tensor(plan, v, "input") for v in plan.inputs),
            *(_tensor(plan, v, "output") for v in plan.outputs),
        ],
        "same_tensor": plan.graph.shared,
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


def _tensor(plan: Plan, value: Value, role: str) -> dict[str, Any]:
    """Shape, alignment and strides: the requirements on a caller's array."""
    axes, size = value.type.axes, value.type.dtype.size
    described: dict[str, Any] = {
        "name": value.name,
        "role": role,
        "dtype": str(value.type.dtype),
        "element_bytes": size,
        "axes": [str(a) for a in axes],
        "shape": ["rows" if a is M else Lengths({D: plan.spec.d})[a] for a in axes],
        "alignment": plan.alignment(value),
        "layout": "contiguous",
        "added_to": next((p.name for p in plan.inputs if p.name == accumulated(value.name)), None),
    }
    if axes == WIDE and plan.contiguous:
        described["row_stride_multiple"] = plan.spec.d
        described["layout"] = f"contiguous: row stride {plan.spec.d}"
    elif axes == WIDE:
        multiple = max(1, plan.alignment(value) // size)
        described["row_stride_multiple"] = multiple
        described["layout"] = f"each row contiguous; row stride in elements a multiple of {multiple}" + (
            f", at least {plan.spec.d}" if role == "output" else ""
        )
    if axes == WIDE and plan.spec.strides == 2:
        described["outer_stride_multiple"] = multiple
        described["layout"] += f"; outer stride a multiple of {multiple}" + (
            ", rows do not overlap" if role == "output" else ""
        )
    return described


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
            _value(a)
            if a.kind == "value"
            else {
                "name": a.name,
                "ctype": "long long" if a.kind in NUMBERS else f"{'const ' if a.const else ''}{a.ctype}*",
                "kind": a.kind,
                "tensor": a.tensor or None,
            }
            for a in kernel.arguments
        ],
        "launch_rule": kernel.launch_rule(),
        "grid": {"x": _extent(x), "y": _extent(y)},
        "block": kernel.block,
        "cluster": kernel.cluster,
        "dynamic_shared_bytes": kernel.dynamic,
        "cooperative": kernel.cooperative,
        "launch_for_no_rows": kernel.always,
    }


def _value(a: Argument) -> dict[str, Any]:
    """A number that is passed by value: what it follows from, and how."""
    described = {"name": a.name, "ctype": a.ctype, "kind": a.kind, "tensor": None, "number": a.tensor}
    dtype = next(str(t) for t in FLOATS if t.ctype == a.ctype)
    return {**described, "dtype": dtype, "of": "eps", "rule": VALUE_RULES[a.rule].text}


def _extent(extent: Extent) -> dict[str, Any]:
    """``fixed`` blocks, or the parameters of the grid rule."""
    by_rows = {f.name: getattr(extent, f.name) for f in fields(extent)}
    return {"text": str(extent), **by_rows, "fixed": extent.fixed if extent.per is None else None}
