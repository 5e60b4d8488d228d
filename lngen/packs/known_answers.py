"""Test vectors: inputs of a kernel set and the results that a launcher has to get, as files for any language.

``vectors`` makes a folder for each spec, with a table that names the files of every case. The numbers are the same on
every machine: inputs come from the raw output of PCG64, whose stream NumPy keeps from version to version, by exact
arithmetic and one rounding; results are the interpreter's. The NIST calls such tests known-answer tests.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, DType, M, Value
from lngen.compiler.ir.numerics import FROM_NUMPY, PLAIN_DTYPE, Array, stored
from lngen.compiler.spec import Spec
from lngen.files import sha256

SCHEMA_VERSION = 1
TABLE = "vectors.json"
ELEMENTS = 2**16  # of an [M, D] tensor, unless two rows have more
SPECIAL = "special"  # the case whose first rows have NaN, infinity and other special numbers

_NPY_RULE = "NumPy's format, version 1.0; bf16, which it lacks, as uint16: the upper half of the float32; fp8 as uint8"
_BIN_RULE = "the elements alone, little-endian, the last axis fastest; a file has no bytes if an axis has length 0"
_EQUAL_RULE = "a result is right if its bits are these; where these are a NaN, any NaN is right"
_SPECIAL_RULE = (
    "in each [M, D] input of the forward, unless it has to be positive or has whole numbers: row 0 starts with a NaN, "
    "row 1 with infinity; row 2 is zero, row 3 the largest number of the dtype, row 4 the smallest above zero, as far "
    "as there are rows"
)


def row_counts(d: int) -> tuple[int, ...]:
    """The numbers of rows of the cases of a spec: 0, 1 and up to 5, as ELEMENTS allows; 0 and 2 for long rows."""
    most = min(5, ELEMENTS // d)
    return (0, 1, most) if most > 2 else (0, 2)


def vectors(spec: Spec) -> dict[str, bytes]:
    """The files of a spec by their names in a pack, ``vectors/SLUG/...``, SLUG is ``spec.file_slug``.

    There is a case for each of ``row_counts(spec.d)``, and SPECIAL, with the most rows of them. A tensor of a case is
    ``rows_5/x.npy`` and ``rows_5/x.bin``; an input without rows is the same in all cases, ``gamma.npy`` and
    ``gamma.bin``. ``vectors.json`` has the tensors of each case with role, dtype, shape, files and hashes, and the
    rules for reading and comparing them. A backward's saved tensors are results of the forward.
    """
    counts = row_counts(spec.d)
    folder, files, cases = f"vectors/{spec.file_slug}", dict[str, bytes](), []
    saved = {r.name for r in spec.forward().results}
    for name, n in [*((f"rows_{n}", n) for n in counts), (SPECIAL, counts[-1])]:
        inputs = _inputs(spec, n, special=name == SPECIAL)
        results = interpret(spec.graph(), inputs)
        tensors = [
            _tensor(p, inputs[p.name], "input", f"{name}/" * (M in p.type.axes or p.name in saved), files)
            for p in spec.graph().params
        ]
        tensors += [_tensor(r, results[r.name], "output", f"{name}/", files) for r in spec.graph().results]
        cases.append({"name": name, "rows": n, "tensors": tensors})
    files[TABLE] = (json.dumps(_table(spec, cases), indent=2) + "\n").encode()
    return {f"{folder}/{name}": data for name, data in files.items()}


def _table(spec: Spec, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of vectors.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "spec": str(spec),
        "graph_sha256": sha256(str(spec.graph()).encode()),
        "d": spec.d,
        "eps": spec.eps,
        "same_tensor": spec.graph().shared,
        "npy_rule": _NPY_RULE,
        "bin_rule": _BIN_RULE,
        "equal_rule": _EQUAL_RULE,
        "special_rule": _SPECIAL_RULE,
        "cases": cases,
    }


def _tensor(value: Value, array: Array, role: str, folder: str, files: dict[str, bytes]) -> dict[str, Any]:
    """The entry of a tensor in the table; its two files are added to ``files``."""
    numbers = _portable(array)
    written = io.BytesIO()
    np.lib.format.write_array(written, numbers, version=(1, 0), allow_pickle=False)
    described: dict[str, Any] = {
        "name": value.name,
        "role": role,
        "dtype": str(value.type.dtype),
        "element_bytes": value.type.dtype.size,
        "axes": [str(a) for a in value.type.axes],
        "shape": [*array.shape],
    }
    for kind, data in (("npy", written.getvalue()), ("bin", numbers.tobytes())):
        name = f"{folder}{value.name}.{kind}"
        assert files.setdefault(name, data) == data, f"{name} differs from case to case"
        described[kind] = {"file": name, "bytes": len(data), "sha256": sha256(data)}
    return described


def _portable(array: Array) -> Array:
    """The same numbers, contiguous and little-endian, in NumPy's own dtypes, and every NaN the positive quiet one.

    Processors differ in the NaN that an operation makes; a cast to a float of 8 bits makes one of them.
    """
    whole = array.dtype.kind in "biu" or array.itemsize == 1
    numbers = array if whole else np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    bits = numbers.view(PLAIN_DTYPE[FROM_NUMPY[array.dtype]])
    return np.asarray(bits.astype(bits.dtype.newbyteorder("<"), order="C"))


# ---- inputs ----


def _inputs(spec: Spec, rows: int, *, special: bool) -> dict[str, Array]:
    """The inputs of the spec's graph by name; a backward's saved tensors are computed by its forward."""
    positive = spec.positive_inputs()
    found: dict[str, Array] = {}
    for p in spec.forward().params:
        found[p.name] = _drawn(p, rows, spec.d, positive=p.name in positive, classes=p.name in spec.classes)
        if special and p.type.axes == WIDE and p.type.dtype.digits and p.name not in positive:
            _make_special(found[p.name], p.type.dtype)
    if spec.direction == "bwd":
        found |= interpret(spec.with_direction("fwd").graph(), found)
    return {p.name: found[p.name] if p.name in found else _drawn(p, rows, spec.d) for p in spec.graph().params}


def _drawn(value: Value, rows: int, d: int, *, positive: bool = False, classes: bool = False) -> Array:
    """Numbers of mean 1/2 and deviation 1, about normal, in the value's shape and dtype; none is zero.

    A number is half an odd number, from the sum of four random integers of 11 bits, times 27 / 2^15. This and the mean
    are exact in float64, and rounded once. With ``positive`` it is the absolute value, and 1/4; of ``classes`` what is
    left of 7919 times that, divided by d, without a fraction.
    """
    shape = value.type.shape(rows, d)
    name = f"{value.name} {rows if M in value.type.axes else 'any'} {d}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    raw = np.asarray(np.random.PCG64(seed).random_raw(math.prod(shape)), np.uint64)
    parts = [((raw >> np.uint64(shift)) & np.uint64(0x7FF)).astype(np.float64) for shift in (5, 21, 37, 53)]
    numbers = np.asarray((sum(parts) - np.float64(4093.5)) * (27 / 2**15) + 0.5)
    if positive or classes:
        numbers = np.abs(numbers) + 0.25 if positive else np.floor(np.abs(numbers) * 7919 % d)
    return stored(numbers.reshape(shape), value.type.dtype)


def _make_special(x: Array, dtype: DType) -> None:
    """Overwrite the first rows of [M, D] as ``special_rule`` says."""
    for row, number in enumerate((np.nan, np.inf, 0, dtype.largest, dtype.least)[: len(x)]):
        x[row, : 1 if row < 2 else None] = number
