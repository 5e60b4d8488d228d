"""The manifest of a build: everything a program in another language needs to launch the kernels.

``manifest.json`` holds, sorted by name, one entry per kernel set. It has no dates, paths or machine names:
the same request gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lngen.devices import device_for
from lngen.errors import LngenError
from lngen.files import parse_json, reason, sha256, shown
from lngen.files import read as read_file
from lngen.ir import RULES, WIDE, D, M, Value
from lngen.lower import Argument, Extent, Kernel, Plan, requested_shared
from lngen.passes import accumulated
from lngen.problem import OVERLAP_ARCH, minimum_arch
from lngen.spec import Spec
from lngen.toolchain import Resources

SCHEMA_VERSION = 2
FILE_NAME = "manifest.json"
LARGEST = 2**25  # bytes of a manifest, and of a file it lists; a thousand kernel sets take 8 MiB
WORKSPACE_ALIGNMENT = 256

_WORKSPACE_RULE = (
    f"one allocation aligned to {WORKSPACE_ALIGNMENT} bytes; a buffer has fixed + per_row * rows elements, "
    f"its size is rounded up to a multiple of {WORKSPACE_ALIGNMENT} bytes, and the next one starts there; "
    "launches that may run at the same time need a workspace each"
)
_ZEROED_RULE = (
    "a zeroed buffer is set to zero once, before the first launch that uses it; every launch that ends leaves it "
    "ready for the next"
)
_ARGUMENT_RULE = "every argument is 8 bytes: a pointer, or a long long (rows; strides in elements)"
_VALUE_RULE = (
    "; but a value has the size of its ctype: compute its rule in double from the double that its 'of' names, and "
    "round the result once to that type"
)
_LAUNCH_RULE = (
    "the kernels of a set are launched in this order on one stream: cluster blocks to a cluster in x if that is more "
    "than 1, cooperatively if the kernel says so. Allow its dynamic shared memory first "
    "(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES): what it uses, or launch_shared_bytes of the arch's "
    "resources, which spread blocks evenly. Allow clusters of more than 8 blocks as well "
    "(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED). Without rows, launch only those with launch_for_no_rows"
)
_DEPENDENT_RULE = (
    "the attribute CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is to be set on every kernel of a set but the "
    "first, and may be set on the first, which gains time only behind a kernel that runs "
    "griddepcontrol.launch_dependents and costs time behind others: a kernel waits for the previous launches on the "
    "stream before it reads or writes global memory; before the wait it prefetches inputs into L2, so their memory has "
    "to be allocated"
)
_IN_PLACE_RULE = (
    "an output may have the address of one of these inputs, with the same strides; one output per input, and the input "
    "is then lost. No other arrays of a call overlap, if one of them is written to"
)
_GRID_RULE = "fixed blocks, or if that is null: n = ceil(rows / per), at most limit; blocks = times * n, at least least"


def entry(plan: Plan, resources: Mapping[str, Mapping[str, Resources]]) -> dict[str, Any]:
    """The manifest's entry of a plan, without its files; ``resources`` by arch and kernel."""
    return {
        "name": plan.name,
        "spec": _spec(plan.spec),
        "schedule": {
            "text": str(plan.schedule),
            **{f.name: getattr(plan.schedule, f.name) for f in fields(plan.schedule)},
        },
        "graph_sha256": sha256(str(plan.graph).encode()),
        "tensors": [
            *(_tensor(plan, v, "input") for v in plan.inputs),
            *(_tensor(plan, v, "output") for v in plan.outputs),
        ],
        "same_tensor": plan.graph.shared,
        "in_place": _in_place(plan),
        "minimum_arch": f"sm_{minimum_arch(plan.schedule)}",
        "argument_rule": _ARGUMENT_RULE + (_VALUE_RULE if plan.by_value else ""),
        "launch_rule": _LAUNCH_RULE,
        "grid_rule": _GRID_RULE,
        "programmatic_stream_serialization": {"minimum_arch": f"sm_{OVERLAP_ARCH}", "rule": _DEPENDENT_RULE},
        "kernels": [_kernel(k) for k in plan.kernels],
        "workspace": {
            "alignment": WORKSPACE_ALIGNMENT,
            "rule": _WORKSPACE_RULE,
            "zeroed_rule": _ZEROED_RULE,
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
        "resources": {arch: _resources(plan, kernels, arch) for arch, kernels in resources.items()},
    }


def _resources(plan: Plan, kernels: Mapping[str, Resources], arch: str) -> dict[str, Any]:
    """The resources of each kernel on an arch, and the dynamic shared memory to launch it with."""
    launched = requested_shared(plan, {name: used.registers for name, used in kernels.items()}, device_for(arch))
    return {k.name: {**asdict(kernels[k.name]), "launch_shared_bytes": launched[k.name]} for k in plan.kernels}


def _spec(spec: Spec) -> dict[str, Any]:
    inputs = [p.name for p in spec.forward().tensors]
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
        "options": dict(spec.chosen),
        "save": spec.save,
        "order": spec.order,
        "wrt": None if spec.direction == "fwd" else list(spec.differentiates),
        "of": None if spec.direction == "fwd" else list(spec.differentiated),
        "grad": None if spec.grad is None else str(spec.grad),
        "accumulate": list(spec.accumulate),
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
        "shape": [{M: "rows", D: plan.spec.d}[a] for a in axes],
        "alignment": plan.alignment(value),
        "layout": "contiguous",
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
    return described


def _in_place(plan: Plan) -> dict[str, Any]:
    """The inputs of which each output may have the address, and so overwrite them."""
    pairs = {
        v.name: [
            p.name
            for p in plan.inputs
            if p.name == accumulated(v.name)
            or (plan.in_place and p.type.axes == v.type.axes == WIDE and p.type.dtype.size == v.type.dtype.size)
        ]
        for v in plan.outputs
    }
    return {"rule": _IN_PLACE_RULE, "outputs": {name: inputs for name, inputs in pairs.items() if inputs}}


def _kernel(kernel: Kernel) -> dict[str, Any]:
    x, y = kernel.grid
    return {
        "name": kernel.name,
        "arguments": [
            _value(a)
            if a.kind == "value"
            else {
                "name": a.name,
                "ctype": "long long" if a.kind in ("rows", "stride") else f"{'const ' if a.const else ''}{a.ctype}*",
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
    dtype = {"float": "f32", "double": "f64"}[a.ctype]
    described = {"name": a.name, "ctype": a.ctype, "kind": a.kind, "tensor": None}
    return {**described, "dtype": dtype, "of": "eps", "rule": RULES[a.rule].text}


def _extent(extent: Extent) -> dict[str, Any]:
    """``fixed`` blocks, or the parameters of the grid rule."""
    by_rows = {f.name: getattr(extent, f.name) for f in fields(extent)}
    return {"text": str(extent), **by_rows, "fixed": extent.fixed if extent.per is None else None}


def render(entries: Mapping[str, Mapping[str, Any]], lngen_version: str, nvrtc_version: str | None) -> bytes:
    """The manifest's bytes."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "lngen_version": lngen_version,
        "nvrtc_version": nvrtc_version,
        "kernel_sets": [entries[name] for name in sorted(entries)],
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of the manifest in ``folder`` by name; none without a manifest.

    LngenError for an invalid manifest. Each file it names is one that lngen writes, in the folder, for that entry.
    """
    path = folder / FILE_NAME
    try:
        document = parse_json(read_file(path, LARGEST))
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            raise ValueError("another schema version")
        return _by_name(document.get("kernel_sets"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise LngenError(
            f"'{path}' is expected to be a manifest with schema_version {SCHEMA_VERSION} but is not "
            f"({why}); name another folder, or remove the file."
        ) from error


def hashes(entry: Mapping[str, Any]) -> dict[str, str]:
    """The files of an entry and their sha256."""
    return {name: facts["sha256"] for name, facts in entry["files"].items()}


def _by_name(listed: Any) -> dict[str, dict[str, Any]]:
    """Entries by name; ValueError for an invalid one."""
    if not isinstance(listed, list):
        raise ValueError("no list of kernel sets")
    found: dict[str, dict[str, Any]] = {}
    for e in listed:
        if not isinstance(e, dict) or not isinstance(e.get("files"), dict) or not _is_name(e.get("name")):
            raise ValueError("a kernel set without a name and files")
        if e["name"] in found:
            raise ValueError(f"two kernel sets are called '{e['name']}'")
        _check_files({n: f.get("sha256") if isinstance(f, dict) else None for n, f in e["files"].items()}, e["name"])
        found[e["name"]] = e
    return found


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"\w+", name, re.ASCII) is not None


def _check_files(digests: Mapping[str, Any], kernel_set: str) -> None:
    """ValueError unless these are files, with hashes, that a build writes for a kernel set of that name."""
    for name, digest in digests.items():
        if not re.fullmatch(rf"{kernel_set}\.(cu|sm_\d+[af]?\.(ptx|cubin))", name, re.ASCII):
            raise ValueError(f"{shown(name)} is not a file that a build writes for this kernel set")
        if not isinstance(digest, str):
            raise ValueError(f"no sha256 of {shown(name)}")
