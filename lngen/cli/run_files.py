"""``lngen run``: applies a kernel to .npy files.

Names, dtypes and shapes of the files are checked. Leading dimensions become rows. The format has no bfloat16, which is
stored as uint16: the upper half of the float32 with the same value. Floats of 8 bits are stored as uint8.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import click
import numpy as np

from lngen.cli.output import unwritable
from lngen.cli.shared_options import Finite, on_option, overlap_option, schedule_option
from lngen.compiler.compile import Compilation
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import RUN, WIDE, D, Lengths, M, Value, values_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, PLAIN_DTYPE, Array
from lngen.compiler.spec import Spec, parse_spec
from lngen.errors import ArrayError, CheckError, short
from lngen.files import opened, shown, write_all
from lngen.launch.runtime.launcher import device_arch, device_count
from lngen.launch.runtime.numpy_arrays import run_numpy
from lngen.proof.ptx import run_plan


@click.command(
    "run", epilog="Example: lngen run rmsnorm.fwd:d=768 --in x=x.npy,gamma=gamma.npy --out y=y.npy,rstd=rstd.npy"
)
@click.argument("spec")
@click.option("--in", "inputs", multiple=True, required=True, metavar="NAME=FILE,...", help="Every input, by name.")
@click.option("--out", "outputs", multiple=True, required=True, metavar="NAME=FILE,...", help="The results to write.")
@click.option("--eps", type=Finite(), metavar="NUMBER", help="The eps of a SPEC with eps=run: any finite number.")
@on_option(
    "Compute on a GPU, with the kernels' PTX on NumPy, or with the interpreter; auto: a GPU if there is one, else the "
    "interpreter. The bits are the same."
)
@schedule_option
@overlap_option("On a GPU, let the kernel start while the kernel before it on the stream ends.")
def run_command(
    spec: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    eps: float | None,
    on: str,
    schedule: str,
    overlap: bool,
) -> None:
    """Compute SPEC from .npy files to .npy files.

    Names are the graph's (lngen list; lngen show SPEC --stage graph). bfloat16 is stored as uint16, the upper
    half of a float32: in NumPy a.view(ml_dtypes.bfloat16). x may have any leading dimensions, (..., D), and
    results have the same. Only the results named by --out are written, each file whole or not at all.
    """
    parsed = parse_spec(spec)
    compilation = Compilation(parsed)
    graph = compilation.graph
    numbers = _numbers(compilation, eps)
    targets = parse_files(outputs, "--out", [r.name for r in graph.results])
    _check_targets(targets)
    arrays, leading = load_inputs(parsed, parse_files(inputs, "--in", [p.name for p in graph.tensors]))
    arrays |= numbers
    if on == "gpu" or (on == "auto" and device_count() > 0):
        results = run_numpy(compilation.changed(schedule, device_arch(0)), arrays, overlap=overlap)
    elif on == "ptx":
        kernels = compilation.changed(schedule, DEFAULT_ARCH)
        text, ptx = kernels.text, kernels.ptx(DEFAULT_ARCH, lines=True)
        outcome = run_plan(kernels.plan, arrays, source=text, ptx=ptx, arch=DEFAULT_ARCH)
        if outcome.findings:
            raise CheckError(str(outcome.findings[0]))
        results = outcome.results
    else:
        if schedule:
            compilation.changed(schedule, DEFAULT_ARCH)  # an illegal schedule is refused here as well
        compilation.warn()
        results = interpret(graph, arrays)
    write_all({targets[r.name]: as_file(r, results[r.name], leading) for r in graph.results if r.name in targets})


def _numbers(compilation: Compilation, eps: float | None) -> dict[str, Array]:
    """What the kernels take by value; ArrayError for an eps that is missing, or that the spec has already."""
    spec = compilation.spec
    if eps is None and compilation.graph.by_value:
        raise ArrayError(f"--eps: '{spec}' takes eps when it runs, which is missing; add for example --eps 1e-6.")
    if eps is not None and spec.eps != RUN:
        raise ArrayError(
            f"--eps: '{spec}' does not take eps when it runs; leave --eps out, or give a spec with eps=run."
        )
    return {} if eps is None else values_of(compilation.graph, eps)


def _check_targets(targets: dict[str, Path]) -> None:
    """Before any work: ArrayError if two results go to one file, or the folder of a file does not exist."""
    for name, path in targets.items():
        if not path.parent.is_dir():
            raise ArrayError(f"--out: '{name}' cannot be written to '{path}': there is no folder '{path.parent}'.")
        if (why := unwritable(path)) is not None:
            raise ArrayError(f"--out: cannot write '{name}' to '{path}': {why}.")
    if len({p.resolve() for p in targets.values()}) < len(targets):
        raise ArrayError("--out: two results are given the same file.")


# ---- arrays of a graph in .npy files ----

MOST_HEADER = 4096  # bytes; numpy.save writes 128 for anything with few dimensions
MOST_ELEMENTS = 2**48
HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # for the header of numbers, which is ASCII, both are the same
}
_NAMES = {t: f"{own}" + (f" ({t} travels as {own})" if own != NUMPY_DTYPE[t] else "") for t, own in PLAIN_DTYPE.items()}


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
    params = spec.graph().tensors
    missing = [p.name for p in params if p.name not in files]
    if missing:
        needed = ", ".join(f"{p.name}: {p.type}" for p in params)
        raise ArrayError(f"--in: '{missing[0]}' is missing; {spec} takes {needed}.")
    headers = {p.name: _header(p, files[p.name]) for p in params}
    wide = next(p for p in params if p.type.axes == WIDE)
    leading = headers[wide.name].shape[:-1]
    for p in params:
        _check_shape(spec, p, headers[p.name].shape, leading, wide.name)
    found = {p.name: _load(p, files[p.name], headers[p.name]) for p in params}
    return {p.name: found[p.name].reshape(_flat(p, found[p.name].shape, leading)) for p in params}, leading


def _flat(value: Value, shape: tuple[int, ...], leading: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with one dimension of rows."""
    if M not in value.type.axes:
        return shape
    return (math.prod(leading), *(shape[-1:] if len(value.type.axes) > 1 else ()))


def _header(value: Value, path: Path) -> Header:
    """What the file says it holds, in the value's dtype."""
    with _named(value, path):
        header = read_header(path)
    dtype = value.type.dtype
    # numpy.save writes numbers of ml_dtypes as opaque bytes.
    opaque = PLAIN_DTYPE[dtype] != NUMPY_DTYPE[dtype] and header.dtype == np.dtype(f"V{dtype.size}")
    if header.dtype != PLAIN_DTYPE[dtype] and not opaque:
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
    said = {a: n for a, n in zip(axes, shape, strict=False) if isinstance(a.number, str)}  # by the array alone
    sizes = Lengths({M: math.prod(leading), D: spec.d} | said)
    expected = tuple(n for a in axes for n in (leading if a is M else (sizes[a],)))
    if axes == WIDE and shape[-1:] != (spec.d,):
        raise ArrayError(f"'{value.name}' is expected to have shape (..., {spec.d}), the spec's D last, got {shape}.")
    if shape != expected and not (axes == (M,) and shape == (math.prod(leading),)):
        because = f", the rows of '{wide}'" if M in axes else ""
        raise ArrayError(f"'{value.name}' is expected to have shape {expected}{because}, got {shape}.")


def as_file(value: Value, array: Array, leading: tuple[int, ...]) -> bytes:
    """A result as the bytes of a .npy file, with the inputs' leading dimensions."""
    of_rows = leading if value.type.along(M) else ()
    shape = of_rows + (array.shape[-1:] if value.type.along(D) else ())
    buffer = io.BytesIO()
    np.save(buffer, array.view(PLAIN_DTYPE[value.type.dtype]).reshape(shape), allow_pickle=False)
    return buffer.getvalue()


# ---- one array from a file of a user ----


@dataclass(frozen=True)
class Header:
    """The elements of a file and their place in it; in Fortran's order the first dimension is the fastest."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    start: int


def read_header(path: Path) -> Header:
    """The header of a file, whose elements are not read; ValueError if it is wrong, OSError if it cannot be read."""
    with opened(path) as file:
        return _header_of(file)


def read_npy(path: Path, known: Header | None = None) -> Array:
    """The array in a file, C-ordered; errors as of ``read_header``, and if the header is not the one that is known."""
    with opened(path) as file:
        header = _header_of(file)
        if known not in (None, header):
            raise ValueError("the file was replaced during the read")
        file.seek(header.start)
        flat: Array = np.fromfile(file, header.dtype, math.prod(header.shape))
    if flat.size != math.prod(header.shape):
        raise ValueError("the file became shorter during the read")
    array = flat.reshape(header.shape[::-1]).T if header.fortran_order else flat.reshape(header.shape)
    return np.asarray(array, order="C")


def _header_of(file: BinaryIO) -> Header:
    """The header of an open file. ValueError unless it is of numbers, and the file has exactly the elements it says.

    So memory is only allocated for bytes that exist.
    """
    start = io.BytesIO(file.read(MOST_HEADER))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy and Python warn of unusual headers
            shape, fortran_order, dtype = HEADER_READERS[np.lib.format.read_magic(start)](start)
    except (ValueError, LookupError, TypeError, SyntaxError, TokenError, MemoryError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {shown(str(error))}") from None
    if dtype.kind not in "biufcV" or dtype.names or dtype.subdtype or not dtype.itemsize:
        raise ValueError(f"its elements are expected to be numbers, got {shown(dtype.descr)}")
    if not all(0 <= n <= MOST_ELEMENTS for n in shape):
        raise ValueError(f"its shape is expected to be a tuple of whole numbers, got {shown(shape)}")
    needed, there = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - start.tell()
    if needed != there:
        raise ValueError(f"its header says {needed} bytes of elements, but there are {there}")
    return Header(dtype, shape, fortran_order, start.tell())
