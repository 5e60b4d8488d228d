"""Wrong arguments of the C library's functions, each with the status that it gets.

All of it is data: addresses are numbers behind which nothing is, so that whoever follows one is seen.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lngen.launch.kernels import Described

Fields = Mapping[str, Any]
ENORMOUS = (2**62, 2**63 - 1)


@dataclass(frozen=True)
class Wrong:
    """Arguments that differ from good ones in one field, and the status they get."""

    field: str
    value: Any
    status: str


def wrong(fields: Fields, kernels: Described) -> Iterator[Wrong]:
    """One after another."""
    d = kernels["spec"]["d"]
    for t in kernels["tensors"]:
        yield Wrong(t["name"], None, "NULL_POINTER")
        yield Wrong(t["name"], fields[t["name"]] + 1, "MISALIGNED")
        if len(t["axes"]) == 2:
            strides = [-(2**63), *ENORMOUS]
            strides += [d - t["row_stride_multiple"], 1 - d] if t["role"] == "output" else []
            strides += [d + 1] if t["row_stride_multiple"] > 1 else []
            yield from [Wrong(f"{t['name']}_stride", stride, "BAD_STRIDE") for stride in strides]
    yield from [Wrong("rows", rows, "BAD_ROWS") for rows in (-1, -(2**63), *ENORMOUS)]
    yield from [Wrong("d", other, "UNSUPPORTED") for other in (0, -1, d + 1, -(2**63))]
    yield from [Wrong("dtype", other, "UNSUPPORTED") for other in (-1, 4, 2**31 - 1)]
    if "eps" in fields:
        yield from [Wrong("eps", eps, "BAD_EPS") for eps in (math.nan, math.inf, -math.inf)]
    if "inner" in fields:
        yield from [Wrong("inner", inner, "BAD_STRIDE") for inner in (-1, -(2**63))]
    if fields.get("workspace_bytes"):
        yield Wrong("workspace", None, "NULL_POINTER")
        yield Wrong("workspace", fields["workspace"] + 8, "MISALIGNED")
        yield Wrong("workspace_bytes", fields["workspace_bytes"] - 1, "WORKSPACE_TOO_SMALL")
        yield Wrong("workspace_bytes", 0, "WORKSPACE_TOO_SMALL")


# ---- the same in C ----


def program(groups: Mapping[str, tuple[Any, Described]], dtypes: Mapping[str, int]) -> str:
    """A part of a program in C for each group, with the structure and a kernel set of it: good calls and wrong ones."""
    parts = []
    for group, (structure, kernels) in groups.items():
        kinds, name = dict(structure._fields_), f"lngen_{group}"
        fields: dict[str, Any] = {"d": kernels["spec"]["d"], "dtype": dtypes[kernels["spec"]["dtype"]], "rows": 6}
        fields |= {key: place << 16 for place, (key, kind) in enumerate(kinds.items(), 1) if kind is ctypes.c_void_p}
        fields |= {key: value for key, value in {"eps": 1e-6, "inner": 2}.items() if key in kinds}
        set_ = [f"good.{key} = {_in_c(value, kinds[key])};" for key, value in fields.items()]
        bad = [
            f"a = good; a.{one.field} = {_in_c(one.value, kinds[one.field])}; "
            f'expect("{group}, {one.field} {one.value}", LNGEN_{one.status}, {name}(&a, device, NULL));'
            for one in wrong({"workspace_bytes": 0} | fields, kernels)
        ]
        parts.append(PART.format(name=name, good="\n    ".join(set_), bad="\n    ".join(bad)))
    return "\n".join(
        [*parts, "static void all_groups(int device) {", *(f"    try_lngen_{g}(device);" for g in groups), "}", ""]
    )


PART = """
static void try_{name}(int device) {{
    {name}_args good = {{0}}, a;
    size_t bytes = 0;
    {good}
    expect("{name}, bytes", LNGEN_OK, {name}_workspace_bytes(&good, device, &bytes));
    good.workspace_bytes = bytes;
    expect("{name}, init", LNGEN_OK, {name}_init_workspace(&good, device, NULL));
    expect("{name}", LNGEN_OK, {name}(&good, device, NULL));
    EACH_FAILS("{name}, the driver fails", {name}(&good, device, NULL), 1) /* cuCtxGetCurrent */
    expect("{name}, no arguments", LNGEN_NULL_POINTER, {name}(NULL, device, NULL));
    expect("{name}, no bytes", LNGEN_NULL_POINTER, {name}_workspace_bytes(&good, device, NULL));
    {bad}
    if (bytes) {{
        a = good; a.workspace = NULL; expect("no workspace", LNGEN_NULL_POINTER, {name}(&a, device, NULL));
        a = good; a.workspace_bytes--; expect("small", LNGEN_WORKSPACE_TOO_SMALL, {name}(&a, device, NULL));
    }}
    good.rows = 0;
    expect("{name}, no rows", LNGEN_OK, {name}(&good, device, NULL));
}}
"""


def _in_c(value: Any, kind: Any) -> str:
    """A value as C writes it."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return "NAN" if math.isnan(value) else f"{'-' * (value < 0)}INFINITY" if math.isinf(value) else repr(value)
    if kind is ctypes.c_void_p:
        return f"(void *){value}"
    return "INT64_MIN" if value == -(2**63) else str(value) if kind is not ctypes.c_int else f"(lngen_dtype){value}"
