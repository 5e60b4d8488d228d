"""Wrong arguments of the C library's functions, each with the status it gets; as data, and as calls in C."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lngen.launch.kernels import Described
from lngen.rules import TABLE

ENORMOUS = (-(2**63), 2**62, 2**63 - 1)
Wrong = tuple[str, Any, str]  # a field, its value, the status


def wrong(fields: Mapping[str, Any], kernels: Described) -> Iterator[Wrong]:
    """Changes of good arguments, one field each."""
    d = kernels["spec"]["d"]
    for t in kernels["tensors"]:
        name, step = t["name"], t.get("stride_multiple", 0)
        yield from [(name, None, "NULL_POINTER"), (name, fields[name] + 1, "MISALIGNED")]
        if step:
            strides = [*ENORMOUS, *[d + 1] * (step > 1), *[d - step, 1 - d] * (t["role"] == "output")]
            yield from [(f"{name}_stride", stride, "BAD_STRIDE") for stride in strides]
    yield from [("rows", rows, "BAD_ROWS") for rows in (-1, *ENORMOUS)]
    for t in (t for t in kernels["tensors"] if t["shape"][:1] == [TABLE]):
        step = fields.get(f"{t['name']}_stride") or int(t["shape"][1])
        last = fields[t["name"]] + (fields["table_rows"] - 1) * step * t["element_bytes"]
        yield from [("table_rows", rows, "BAD_ROWS") for rows in (0, -1, *ENORMOUS)]
        yield from [(o["name"], last, "OVERLAP") for o in kernels["tensors"] if o["role"] == "output"]
    yield from [("d", other, "UNSUPPORTED") for other in (0, -1, d + 1, -(2**63))]
    yield from [("dtype", other, "UNSUPPORTED") for other in (-1, 4, 2**31 - 1)]
    yield from [("eps", eps, "BAD_EPS") for eps in (math.nan, math.inf, -math.inf) if "eps" in fields]
    yield from [("inner", inner, "BAD_STRIDE") for inner in (-1, -(2**63)) if "inner" in fields]
    if size := fields.get("workspace_bytes"):
        yield from [("workspace", None, "NULL_POINTER"), ("workspace", fields["workspace"] + 8, "MISALIGNED")]
        yield ("workspace", 2**64 - 256, "WORKSPACE_TOO_SMALL")
        yield from [("workspace_bytes", few, "WORKSPACE_TOO_SMALL") for few in (0, size - 1)]


def calls(groups: Mapping[str, tuple[Any, Described]], dtypes: Mapping[str, int]) -> str:
    """Good and wrong calls of each group, by the macros of ``sanitized.c``; with a structure and a kernel set of each.

    Addresses are numbers behind which nothing is, so that whoever follows one is seen.
    """
    parts = []
    for group, (structure, kernels) in groups.items():
        kinds = dict(structure._fields_)
        fields: dict[str, Any] = {"d": kernels["spec"]["d"], "dtype": dtypes[kernels["spec"]["dtype"]], "rows": 6}
        fields |= {key: place << 16 for place, (key, kind) in enumerate(kinds.items(), 1) if kind is ctypes.c_void_p}
        fields |= {key: value for key, value in {"eps": 1e-6, "inner": 2, "table_rows": 4}.items() if key in kinds}
        good = " ".join(f"good.{key} = {_in_c(value, kinds[key])};" for key, value in fields.items())
        bad = [
            f"    WRONG({key}, {_in_c(value, kinds[key])}, {status})" for key, value, status in wrong(fields, kernels)
        ]
        parts.append("\n".join([f"GROUP({group}, {good},", *bad, ")"]))
    every = " ".join(f"try_{group}(device);" for group in groups)
    return "\n".join([*parts, f"static void all_groups(int device) {{ {every} }}", ""])


def _in_c(value: Any, kind: Any) -> str:
    """A value as C writes it."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return repr(value).replace("nan", "NAN").replace("inf", "INFINITY")
    cast = {ctypes.c_void_p: "(void *)", ctypes.c_int: "(lngen_dtype)"}.get(kind, "")
    return "INT64_MIN" if value == -(2**63) else f"{cast}{value}"
