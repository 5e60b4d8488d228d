"""The arrays of a graph in .npy files: names, dtypes and shapes are checked, leading dimensions become rows.

The format has no bfloat16, which is stored as uint16: the upper half of the float32 with the same value.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lngen.cli.npy_read import Header, read_header, read_npy
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
    """The inputs as ``interpret`` takes them, and their leading dimensions.

    Elements are read when the headers of all files are right: a file may be larger than memory.
    """
    params = spec.graph().params
    missing = [p.name for p in params if p.name not in files]
    if missing:
        needed = ", ".join(f"{p.name}: {p.type}" for p in params)
        raise ArrayError(f"--in: '{missing[0]}' is missing; {spec} takes {needed}.")
    headers = {p.name: _header(p, files[p.name]) for p in params}
    wide = next(p for p in params if p.type.axes == WIDE)
    leading = headers[wide.name].shape[:-1]
    for p in params:
        _check_shape(spec, p, headers[p.name].shape, leading, wide.name)
    rows = math.prod(leading)
    found = {p.name: _load(p, files[p.name], headers[p.name]) for p in params}
    return {p.name: found[p.name].reshape(p.type.shape(rows, spec.d)) for p in params}, leading


def _header(value: Value, path: Path) -> Header:
    """What the file says it holds, in the value's dtype."""
    with _named(value, path):
        header = read_header(path)
    dtype = value.type.dtype
    # numpy.save writes the bfloat16 of ml_dtypes as two opaque bytes.
    if header.dtype != _TRAVELS[dtype] and not (dtype is BF16 and header.dtype == np.dtype("V2")):
        raise ArrayError(f"'{value.name}': '{path}' is expected to hold {_NAMES[dtype]}, got {header.dtype}.")
    return header


def _load(value: Value, path: Path, header: Header) -> Array:
    """The file's array in the value's dtype."""
    with _named(value, path):
        return read_npy(path, header).view(NUMPY_DTYPE[value.type.dtype])


@contextmanager
def _named(value: Value, path: Path) -> Iterator[None]:
    """Errors of reading as an ArrayError that names the input and its file."""
    try:
        yield
    except OSError as error:
        raise ArrayError(f"'{value.name}': cannot read '{path}': {error.strerror}.") from error
    except ValueError as error:
        raise ArrayError(
            f"'{value.name}': '{path}' is not a complete .npy file of numbers ({error}); write it with numpy.save."
        ) from error


def _check_shape(spec: Spec, value: Value, shape: tuple[int, ...], leading: tuple[int, ...], wide: str) -> None:
    """ArrayError for a shape that is not the value's, with the leading dimensions, or M for all of them."""
    axes = value.type.axes
    expected = value.type.shape(leading, spec.d)
    if axes == WIDE and shape[-1:] != (spec.d,):
        raise ArrayError(f"'{value.name}' is expected to have shape (..., {spec.d}), the spec's D last, got {shape}.")
    if shape != expected and not (axes == (M,) and shape == (math.prod(leading),)):
        because = f", the rows of '{wide}'" if M in axes else ""
        raise ArrayError(f"'{value.name}' is expected to have shape {expected}{because}, got {shape}.")


def as_file(value: Value, array: Array, leading: tuple[int, ...]) -> bytes:
    """A result as the bytes of a .npy file, with the inputs' leading dimensions."""
    shape = value.type.shape(leading, array.shape[-1] if D in value.type.axes else 1)
    buffer = io.BytesIO()
    np.save(buffer, array.view(_TRAVELS[value.type.dtype]).reshape(shape), allow_pickle=False)
    return buffer.getvalue()
