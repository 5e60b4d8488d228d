"""The C library of a pack, called through ctypes: its functions and structures are read from its header."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

from c_driver import cc

TYPES: dict[str, Any] = {"int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t, "double": ctypes.c_double}


class CLibrary:
    """A library of its own, which nothing else in this process has loaded: every instance begins anew.

    statuses   their names by value
    dtypes     their values by name, such as ``bf16``
    structs    ctypes structures by group, such as ``layernorm_forward``
    """

    def __init__(self, library: Path, folder: Path) -> None:
        text = (folder / "c/lngen_kernels.h").read_text(encoding="utf-8")
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        self.statuses = {value: name[6:] for name, value in _enum(text, "lngen_status").items()}
        self.dtypes = {name[6:].lower(): value for name, value in _enum(text, "lngen_dtype").items()}
        found = re.findall(r"typedef struct lngen_(\w+)_args \{(.*?)\}", text, re.DOTALL)
        self.structs = {group: _structure(group, body) for group, body in found}
        self._of = ctypes.CDLL(str(copy_of(library)))
        self._of.lngen_last_error.restype = ctypes.c_char_p

    @classmethod
    def built(cls, folder: Path, out: Path, **definitions: Any) -> CLibrary:
        """The library of the pack in a folder, compiled with definitions that are texts."""
        defined = [f'-D{name}="{value}"' for name, value in definitions.items()]
        return cls(cc(out / "kernels.so", [folder / "c/lngen_kernels.c"], "-shared", *defined), folder)

    def call(self, name: str, *given: Any) -> str:
        """The name of the status of a function, without ``lngen_`` and ``LNGEN_``."""
        pointers = [ctypes.byref(g) if isinstance(g, ctypes.Structure) else g for g in given]
        return self.statuses[getattr(self._of, f"lngen_{name}")(*pointers)]

    def with_fields(self, group: str, d: int, dtype: str, rows: int, **fields: Any) -> str:
        """The status of a call on the first device, with these arguments."""
        return self.call(group, self.structs[group](d=d, dtype=self.dtypes[dtype], rows=rows, **fields), 0, None)

    def error(self) -> str:
        """The detail of this thread's last error."""
        return str(self._of.lngen_last_error().decode())

    def supported(self, graph: str, d: int, dtype: str, device: int = 0) -> bool:
        """Whether a device has kernels for them."""
        return bool(self._of.lngen_supported(graph.encode(), ctypes.c_int64(d), self.dtypes[dtype], device))


def copy_of(library: Path) -> Path:
    """A file of its own, as a process loads a file once."""
    copy = next(c for n in itertools.count() if not (c := library.with_suffix(f".{n}.so")).exists())
    return Path(shutil.copy(library, copy))


def _enum(text: str, name: str) -> dict[str, int]:
    """The values of an enumeration."""
    (body,) = re.findall(rf"typedef enum {name} \{{(.*?)\}}", text, re.DOTALL)
    listed = [one.partition("=") for one in map(str.strip, body.split(",")) if one]
    return {key.strip(): int(value or place) for place, (key, _, value) in enumerate(listed)}


def _structure(group: str, body: str) -> Any:
    fields = re.findall(r"([\w ]+?[ *]+)(\w+)\s*;", body)
    return type(group, (ctypes.Structure,), {"_fields_": [(name, _type(kind.strip())) for kind, name in fields]})


def _type(text: str) -> Any:
    return ctypes.c_void_p if text.endswith("*") else ctypes.c_int if text.startswith("lngen_") else TYPES[text]
