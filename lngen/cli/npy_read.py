"""One array from an untrusted .npy file: its header is read strictly, and memory is allocated only for existing bytes.

The format is NumPy's (numpy.lib.format): a magic string, a version, the length of the header, the header, which is the
text of a dictionary with the keys descr, fortran_order and shape, and the elements.
"""

from __future__ import annotations

import ast
import math
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lngen.files import opened, shown
from lngen.ir.numerics import Array

MAGIC = b"\x93NUMPY"
MOST_HEADER = 4096  # bytes; numpy.save writes 128 for anything with few dimensions
MOST_DIMENSIONS, MOST_ELEMENTS = 32, 2**48
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # by version
_NUMBERS = re.compile(r"[<>|=]?[biufcV]\d{1,3}", re.ASCII)


@dataclass(frozen=True)
class Header:
    """What the elements of a file are; of Fortran's order, the first dimension is the fastest."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool


def read_header(path: Path) -> Header:
    """What is in a file, without its elements; ValueError says what is wrong with it, OSError why it cannot be read."""
    with opened(path) as file:
        return _checked(file)


def read_npy(path: Path, known: Header | None = None) -> Array:
    """The array in a file, C-ordered; errors as of ``read_header``, and if the header is not the one that is known."""
    with opened(path) as file:
        header = _checked(file)
        if known not in (None, header):
            raise ValueError("the file was replaced during the read")
        data = bytearray(math.prod(header.shape) * header.dtype.itemsize)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise ValueError("the file became shorter during the read")
    flat: Array = np.frombuffer(data, header.dtype)
    if header.fortran_order:
        return np.ascontiguousarray(flat.reshape(header.shape[::-1]).T).reshape(header.shape)
    return flat.reshape(header.shape)


def _checked(file: BinaryIO) -> Header:
    """The header of an open file that has as many elements as it says."""
    given = _header(file)
    header = Header(_dtype(given["descr"]), _shape(given["shape"]), given["fortran_order"])
    needed, there = math.prod(header.shape) * header.dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
    if needed != there:
        raise ValueError(f"its header says {needed} bytes of elements, but there are {there}")
    return header


def _header(file: BinaryIO) -> dict[str, Any]:
    """The header's dictionary, with its three keys."""
    start = file.read(len(MAGIC) + 2)
    length_bytes = LENGTH_BYTES.get((*start[len(MAGIC) :],))
    if not start.startswith(MAGIC) or length_bytes is None:
        raise ValueError("it does not start like a file of version 1, 2 or 3")
    length = int.from_bytes(file.read(length_bytes), "little")
    text = file.read(min(length, MOST_HEADER))
    if len(text) < length:
        raise ValueError(f"its header says it has {length} bytes, and {len(text)} are there, or too many")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unusual literals
            header = ast.literal_eval(text.decode("utf-8").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two: deep nesting
        raise ValueError("its header is not a dictionary") from None
    if not isinstance(header, dict) or {*header} != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header is expected to have the keys descr, fortran_order and shape")
    if not isinstance(header["fortran_order"], bool):
        raise ValueError(f"fortran_order is expected to be True or False, got {shown(header['fortran_order'])}")
    return header


def _dtype(descr: Any) -> np.dtype[Any]:
    """The dtype of elements that are numbers, or opaque bytes."""
    if isinstance(descr, str) and _NUMBERS.fullmatch(descr):
        try:
            return np.dtype(descr)
        except TypeError:  # f3, for example
            pass
    raise ValueError(f"its elements are expected to be numbers, got {shown(descr)}")


def _shape(shape: Any) -> tuple[int, ...]:
    """The shape, if NumPy can make an array of it."""
    whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not whole or len(shape) > MOST_DIMENSIONS or math.prod(max(n, 1) for n in shape) > MOST_ELEMENTS:
        raise ValueError(f"its shape is expected to be a tuple of a few whole numbers, got {shown(shape)}")
    return tuple(shape)
