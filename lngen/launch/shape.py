"""The parts of a manifest that a program reads, and what each has to be: wrong ones are found before they are used.

schema.json in lngen/aot says more of each part; a launcher needs no library that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ARCH = re.compile(r"sm_\d{2,3}[af]?", re.ASCII)


class Each:
    """An object whose values all have one shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


# A shape is a type, a tuple of types, a pattern, a list with the shape of its parts, an object with the keys that have
# to be there, or Each.
_COUNT = (int, type(None))
_EXTENT = {"fixed": _COUNT, "per": _COUNT, "limit": _COUNT, "times": int, "least": int}
_KERNEL = {
    "name": str,
    "arguments": [{"name": str, "kind": str, "tensor": (str, type(None))}],
    "grid": {"x": _EXTENT, "y": _EXTENT},
    "block": int,
    "cluster": int,
    "dynamic_shared_bytes": int,
    "cooperative": bool,
    "launch_for_no_rows": bool,
}
_NAMES = (list, type(None))
_SPEC = {
    "graph": str,
    "direction": str,
    "d": int,
    "strides": int,
    "outputs": [str],
    "options": dict,
    "wrt": _NAMES,
    "of": _NAMES,
    "forward": str,
}
_TENSOR = {
    "name": str,
    "role": str,
    "dtype": str,
    "element_bytes": int,
    "axes": [str],
    "alignment": int,
    "added_to": (str, type(None)),
}
FILE = {"kind": str, "bytes": int, "sha256": str, "nvrtc": (str, type(None)), "driver": _COUNT}
FATBIN = {"arches": [ARCH], "ptx_arches": [ARCH]}  # of the machine code, and of the PTX in it
OTHER_FILE = {"bytes": int, "sha256": str}
KERNEL_SET = {
    "name": str,
    "spec": _SPEC,
    "schedule": {"form": str, "vec": int},
    "tensors": [_TENSOR],
    "same_tensor": Each(str),
    "in_place": {"reads_again": bool},
    "programmatic_stream_serialization": {"minimum_arch": ARCH},
    "kernels": [_KERNEL],
    "workspace": {"buffers": [{"name": str, "element_bytes": int, "fixed": int, "per_row": int, "zeroed": bool}]},
    "text_sha256": str,
    "lngen_version": str,
    "compile": {"flags": [str], "include": (str, type(None))},
    "resources": Each(Each({"shared": int, "launch_shared_bytes": int})),
    "files": Each(FILE),
}


def fault(value: Any, shape: Any, where: str = "") -> str:
    """Where a value has another shape, as ``kernels.0.name``; empty if it has this one."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return where or "it"
        keys = ((k, s, f"{where}.{k}".lstrip(".")) for k, s in shape.items())
        return next(filter(None, (fault(value[k], s, at) if k in value else at for k, s, at in keys)), "")
    if isinstance(shape, (list, Each)):
        inner = shape[0] if isinstance(shape, list) else shape.shape
        if not isinstance(value, list if isinstance(shape, list) else dict):
            return where or "it"
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (fault(v, inner, f"{where}.{str(k)[:40]}".lstrip(".")) for k, v in parts)), "")
    if isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
    else:
        types = shape if isinstance(shape, tuple) else (shape,)
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    return "" if fits else where or "it"
