"""The arrays of a graph in .npy files: names, dtypes and shapes are checked, leading dimensions become rows.

The format has no bfloat16, which is stored as uint16: the upper half of the float32 with the same value.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lngen.cli.npy_read import read_npy
from lngen.errors import ArrayError, short
from lngen.ir import BF16, WIDE, D, DType, M, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.spec import Spec

_TRAVELS = {t: np.dtype(np.uint16) if t is BF16 else NUMPY_DTYPE[t] for t in DType}
_NAMES = {t: f"{_TRAVELS[t]}" + (" (bf16 travels as uint16)" if t is BF16 else "") for t in DType}


def parse_files(texts: Sequence[str], option: str, known: Sequence[str]) -> dict[str, Path]:
    """``name=file,...`` as files by name; ArrayError for an unknown, repeated or malformed part.

    A comma separates only where ``name=`` follows, so file names may have commas.
    """
    files: dict[str, Path] = {}
    for text in texts:
        for part in re.split(r",(?=\w+=)", text):
            name, equals, file = part.partition("=")
            if not equals or not file:
                raise ArrayError(f"{option}: expected 'name=file.npy', got '{short(part)}'.")
            if name not in known:
                raise ArrayError(f"{option}: there is no '{short(name)}', expected {', '.join(known)}.")
            if name in files:
                raise ArrayError(f"{option}: '{name}' is given twice.")
            files[name] = Path(file)
    return files


def load_inputs(spec: Spec, files: Mapping[str, Path]) -> tuple[dict[str, Array], tuple[int, ...]]:
    """The inputs as ``interpret`` takes them, and their leading dimensions."""
    params = spec.graph().params
    missing = [p.name for p in params if p.name not in files]
    if missing:
        needed = ", ".join(f"{p.name}: {p.type}" for p in params)
        raise ArrayError(f"--in: '{missing[0]}' is missing; {spec} takes {needed}.")
    arrays = {p.name: _load(p, files[p.name]) for p in params}
    wide = next(p for p in params if p.type.axes == WIDE)
    leading = arrays[wide.name].shape[:-1]
    return {p.name: _shaped(spec, p, arrays[p.name], leading, wide.name) for p in params}, leading


def _load(value: Value, path: Path) -> Array:
    """The file's array in the value's dtype."""
    try:
        array = read_npy(path)
    except OSError as error:
        raise ArrayError(f"'{value.name}': cannot read '{path}': {error.strerror}.") from error
    except ValueError as error:
        raise ArrayError(
            f"'{value.name}': '{path}' is not a complete .npy file of numbers ({error}); write it with numpy.save."
        ) from error
    dtype = value.type.dtype
    # numpy.save writes the bfloat16 of ml_dtypes as two opaque bytes.
    if array.dtype != _TRAVELS[dtype] and not (dtype is BF16 and array.dtype == np.dtype("V2")):
        raise ArrayError(f"'{value.name}': '{path}' is expected to hold {_NAMES[dtype]}, got {array.dtype}.")
    return np.ascontiguousarray(array).reshape(array.shape).view(NUMPY_DTYPE[dtype])


def _shaped(spec: Spec, value: Value, array: Array, leading: tuple[int, ...], wide: str) -> Array:
    """The array with the IR's dimensions, M for all leading ones."""
    axes = value.type.axes
    expected = value.type.shape(leading, spec.d)
    if axes == WIDE and array.shape[-1:] != (spec.d,):
        raise ArrayError(
            f"'{value.name}' is expected to have shape (..., {spec.d}), the spec's D last, got {array.shape}."
        )
    rows = math.prod(leading)
    if array.shape != expected and not (axes == (M,) and array.shape == (rows,)):
        because = f", the rows of '{wide}'" if M in axes else ""
        raise ArrayError(f"'{value.name}' is expected to have shape {expected}{because}, got {array.shape}.")
    return array.reshape(value.type.shape(rows, spec.d))


def as_file(value: Value, array: Array, leading: tuple[int, ...]) -> bytes:
    """A result as the bytes of a .npy file, with the inputs' leading dimensions."""
    shape = value.type.shape(leading, array.shape[-1] if D in value.type.axes else 1)
    buffer = io.BytesIO()
    np.save(buffer, array.view(_TRAVELS[value.type.dtype]).reshape(shape), allow_pickle=False)
    return buffer.getvalue()
