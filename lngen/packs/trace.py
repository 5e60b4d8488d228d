"""The norms that a workload calls, from a folder of FlashInfer traces: what ``lngen build --trace`` builds.

FlashInfer writes a file per operation and shape with ``FLASHINFER_TRACE_DUMP=1`` (its docs/fi_trace.rst). The file is a
definition of FlashInfer-Bench: a name, tags, axes that are constant or vary, inputs and outputs with axes and a dtype,
and a reference in Python. A definition has no numbers of rows. They are in the workloads of FlashInfer-Bench, lines of
.jsonl files (its docs/flashinfer-trace/workload.mdx), and are taken from there if the folder has them.

FlashInfer names a file by operation and D, so of several dtypes a process writes the first that is called. Of x with
three dimensions it writes the second as D. It does not write the eps of a call: a file has that of its reference, and
``Workload.notes`` says so.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lngen.compiler.spec import parse_spec
from lngen.dtypes import FLOATS
from lngen.errors import LngenError, short
from lngen.files import parse_json, read, reason, shown

LARGEST = 2**20  # bytes of a definition; FlashInfer's have up to 40 KB, most of it the text of references
LARGEST_LINES = 2**26  # bytes of a .jsonl file
MOST_FILES = 10_000
DEEPEST = 8  # folders in folders

DTYPES = {t.library: str(t) for t in FLOATS}


@dataclass(frozen=True)
class Workload:
    """What a folder of traces calls.

    ``specs`` are texts of specs, each with the numbers of rows seen, ascending; none if no file has them. ``skipped``
    has a sentence for each file, or operation, that is no norm of lngen's; ``notes`` has sentences about what the
    traces leave open. All are in the order of their text.
    """

    specs: tuple[tuple[str, tuple[int, ...]], ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Of each function of flashinfer.norm lngen's graph and keys, and the names of its tensors besides x and weight. Sums of
# FlashInfer's are normalised before they are rounded, and the residual stream is always updated
# (include/flashinfer/norm.cuh, FusedAddRMSNormKernel). None returns a statistic: save=none.
OPERATIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "rmsnorm": ("rmsnorm", (), ()),
    "gemma_rmsnorm": ("rmsnorm", ("casts=gemma",), ()),
    "fused_add_rmsnorm": ("add_rmsnorm", ("round_sum=no",), ("residual",)),
    "gemma_fused_add_rmsnorm": ("add_rmsnorm", ("round_sum=no", "casts=gemma"), ("residual",)),
    "layernorm": ("layernorm", (), ("bias",)),
    "fused_rmsnorm_silu": ("rmsnorm_act", (), ()),
}

X_NAMES = ("hidden_states", "input")
IGNORED = {"eps", "enable_pdl"}  # eps is a key; lngen launches with or without PDL


class _Other(ValueError):
    """A definition that is no norm of lngen's, with the reason."""


@dataclass(frozen=True)
class _Call:
    """A definition that is a norm: its spec, the axes along which its rows are, and whether eps is an assumption."""

    spec: str
    leading: tuple[int | str, ...]
    assumed: bool

    def rows(self, sizes: Mapping[str, Any]) -> int | None:
        """The number of rows for the sizes of a workload; None if one is missing or is no size."""
        found = [sizes.get(axis) if isinstance(axis, str) else axis for axis in self.leading]
        numbers = [n for n in found if type(n) is int and n > 0]
        return math.prod(numbers) if len(numbers) == len(found) else None


def read_trace(folder: Path) -> Workload:
    """The norms in the files of ``folder`` and of the folders in it, as specs of forwards.

    Only .json and .jsonl files are looked at; links to folders are not followed. LngenError if the folder cannot be
    read, holds more than MOST_FILES files and folders, or has no trace. A file that is no trace is a sentence in
    ``skipped``.
    """
    skipped: list[str] = []
    files = _files(folder, skipped)
    calls = _read_definitions(folder, files, skipped)
    rows: dict[str, set[int]] = {call.spec: set() for of_name in calls.values() for call in of_name}
    for path in files:
        if path.suffix == ".jsonl":
            _read_workloads(path, _shown(path, folder), calls, rows, skipped)
    for of_name in calls.values():
        for call in of_name:
            rows[call.spec] |= {n for n in (call.rows({}),) if n is not None}
    specs = tuple((spec, tuple(sorted(rows[spec]))) for spec in sorted(rows))
    return Workload(specs, tuple(sorted({*skipped})), _notes(calls))


Calls = dict[str, set[_Call]]  # by the name of a definition, which files of several runs may share


def _files(folder: Path, skipped: list[str]) -> list[Path]:
    """The .json and .jsonl files in the folder, sorted; LngenError if it cannot be read or has too many files."""

    def unreadable(error: OSError) -> None:
        skipped.append(f"{_shown(Path(error.filename), folder)} cannot be read: {reason(error)}.")

    found: list[Path] = []
    entries = 0
    try:
        os.listdir(folder)
        for place, folders, names in os.walk(folder, onerror=unreadable):
            if len(Path(place).relative_to(folder).parts) >= DEEPEST:
                folders.clear()
            found += [Path(place, name) for name in names if name.endswith((".json", ".jsonl"))]
            entries += len(names) + len(folders)
            if entries > MOST_FILES:
                raise LngenError(f"'{folder}' has more than {MOST_FILES} files; name a folder of traces alone.")
    except (OSError, ValueError) as error:
        raise LngenError(f"cannot read '{folder}': {reason(error)}; name a folder of traces.") from error
    return sorted(found)


def _shown(path: Path, folder: Path) -> str:
    return shown(os.path.relpath(path, folder))


def _read_definitions(folder: Path, files: list[Path], skipped: list[str]) -> Calls:
    """The calls of all definitions; a sentence for each file that is none, or that is no norm."""
    calls: Calls = {}
    for path in files:
        if path.suffix == ".jsonl":
            continue
        file = _shown(path, folder)
        try:
            definition = _definition(parse_json(read(path, LARGEST)))
        except (OSError, ValueError) as error:
            skipped.append(f"{file} is no trace: {reason(error) if isinstance(error, OSError) else error}.")
            continue
        of_name = calls.setdefault(definition["name"], set())
        try:
            of_name.add(_call(definition))
        except _Other as error:
            skipped.append(f"{file}: {error}.")
    if not calls:
        why = f" {skipped[0]}" if skipped else ""
        raise LngenError(
            f"'{folder}' is expected to hold traces of FlashInfer, but no .json file there is one.{why} Name the "
            "folder that FLASHINFER_TRACE_DUMP_DIR named when FLASHINFER_TRACE_DUMP was 1."
        )
    return calls


def _read_workloads(path: Path, file: str, calls: Calls, rows: dict[str, set[int]], skipped: list[str]) -> None:
    """Add the numbers of rows in the lines of a file; a sentence for the first line that is no workload."""
    faults: list[str] = []
    try:
        lines = read(path, LARGEST_LINES).split(b"\n")
    except OSError as error:
        skipped.append(f"{file} is no trace: {reason(error)}.")
        return
    for number, line in enumerate(lines, 1):
        try:
            for spec, n in _rows(parse_json(line), calls) if line.strip() else ():
                rows[spec].add(n)
        except ValueError as error:
            faults.append(f"{file}, line {number}: {error}")
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        skipped.append(f"{faults[0]}{more}.")


def _rows(line: Any, calls: Calls) -> list[tuple[str, int]]:
    """The specs of one line and its rows, none for another operation; ValueError if it is no workload."""
    workload = line.get("workload") if isinstance(line, dict) else None
    name, sizes = (line.get("definition"), workload.get("axes")) if isinstance(workload, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(sizes, dict):
        raise ValueError("it is no workload")
    if name not in calls:
        raise ValueError(f"no file defines {shown(name)}")
    found = [(call.spec, call.rows(sizes)) for call in calls[name]]
    if any(rows is None for _, rows in found):
        raise ValueError(f"it lacks sizes of the axes of {shown(name)}")
    return [(spec, rows) for spec, rows in found if rows is not None]


def _definition(value: Any) -> dict[str, Any]:
    """A value that has the parts of a definition, each of its kind; ValueError for any other."""
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    if not isinstance(value.get("name"), str):
        raise ValueError("it has no name")
    for part in ("axes", "inputs", "outputs"):
        entries = value.get(part)
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ValueError(f"it has no {part}")
    return value


def _call(definition: Mapping[str, Any]) -> _Call:
    """The spec of a definition; _Other if lngen has none for it."""
    name = _operation_name(definition)
    if name not in OPERATIONS:
        raise _Other(f"lngen has no operation {shown(name)}")
    graph, more, others = OPERATIONS[name]
    inputs, outputs = definition["inputs"], definition["outputs"]
    x = next((n for n in X_NAMES if n in inputs), X_NAMES[0])
    if unknown := sorted(inputs.keys() - {x, "weight", *others} - IGNORED):
        raise _Other(f"{name} with an input {shown(unknown[0])} is not known")
    axes, d, leading = _shape(definition, x)
    for tensor in ("weight", *others):
        wanted, there = axes if tensor == "residual" else axes[-1:], inputs.get(tensor, {}).get("shape")
        if there != wanted:
            raise _Other(f"{tensor} is expected to have the axes {shown(wanted)}, got {shown(there)}")
    dtype, weight = _dtype(inputs, x), _dtype(inputs, "weight")
    if "bias" in others and _dtype(inputs, "bias") != weight:
        raise _Other("weight and bias have two dtypes, and lngen's have one")
    out = _dtype(outputs, next((n for n in ("output", "out") if n in outputs), "output"))
    named = {"weight": weight, "out": out}
    if "residual" in others:  # it is updated in place; FlashInfer-Bench leaves it out of the outputs
        named["residual_dtype"] = _dtype(inputs, "residual")
        if "residual" in outputs and _dtype(outputs, "residual") != named["residual_dtype"]:
            raise _Other("the residual stream has two dtypes")
    eps, assumed = _eps(definition)
    keys = [f"d={d}", f"dtype={dtype}", *(f"{key}={t}" for key, t in named.items() if t != dtype), *more]
    keys += [f"eps={eps}"] if eps else []
    try:
        spec = parse_spec(f"{graph}.fwd:{','.join(keys)},save=none")
    except LngenError as error:
        raise _Other(short(error).rstrip(".?")) from error
    return _Call(str(spec), leading, assumed)


def _operation_name(definition: Mapping[str, Any]) -> str:
    """``rmsnorm`` of the tag ``fi_api:flashinfer.norm.rmsnorm``; without one, of the name ``rmsnorm_h4096``."""
    tags = definition.get("tags")
    for tag in tags if isinstance(tags, list) else []:
        if isinstance(tag, str) and tag.startswith("fi_api:"):
            function = tag.removeprefix("fi_api:")
            return function.removeprefix("flashinfer.norm.").removeprefix("flashinfer.")
    return re.sub(r"_[hd]_?\d+$", "", str(definition["name"]))


def _shape(definition: Mapping[str, Any], x: str) -> tuple[list[str], int, tuple[int | str, ...]]:
    """The axes of x, D, and its leading axes as numbers or names."""
    axes = definition["inputs"].get(x, {}).get("shape")
    if not isinstance(axes, list) or len(axes) < 2 or not all(isinstance(a, str) for a in axes):
        raise _Other(f"{shown(x)} has no shape of rows and features")
    sizes = {a: _size(definition, a) for a in axes}
    d = sizes[axes[-1]]
    if d is None:
        raise _Other(f"the number of features, {shown(axes[-1])}, is no constant")
    return axes, d, tuple(a if (size := sizes[a]) is None else size for a in axes[:-1])


def _size(definition: Mapping[str, Any], axis: str) -> int | None:
    """The size of an axis, None if it varies."""
    described = definition["axes"].get(axis, {})
    kind, value = described.get("type"), described.get("value")
    if kind == "var":
        return None
    if kind != "const" or type(value) is not int or value < 1:
        raise _Other(f"axis {shown(axis)} is neither var nor const with a size")
    return value


def _dtype(tensors: Mapping[str, Any], name: str) -> str:
    """lngen's name of a tensor's dtype."""
    dtype = tensors.get(name, {}).get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Other(f"{name} is {shown(dtype)}, expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


_EPS = (
    ("reference", re.compile(r"^[ \t]*EPS(?:ILON)?[ \t]*=[ \t]*([\d.eE+-]+)[ \t]*$", re.MULTILINE | re.IGNORECASE)),
    ("description", re.compile(r"Epsilon(?: is)? fixed at ([\d.]+(?:[eE][+-]?\d+)?)")),
)


def _eps(definition: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The value of the key eps, None for lngen's default, and whether FlashInfer may have been called with another.

    An input eps is a number of each call; one with a value is that. Else it is the constant of the reference.
    """
    given = definition["inputs"].get("eps")
    if given is not None:
        value = given.get("value")
        return (repr(float(value)), False) if type(value) in (int, float) else ("run", False)
    for part, pattern in _EPS:
        text = definition.get(part)
        found = {*pattern.findall(text)} if isinstance(text, str) else set()
        if len(found) == 1:
            try:
                return repr(float(found.pop())), True
            except ValueError:
                continue
    return None, True


def _notes(calls: Calls) -> tuple[str, ...]:
    assumed = {call.spec for of_name in calls.values() for call in of_name if call.assumed}
    if not assumed:
        return ()
    return (
        f"a trace does not say with which eps it was called; {len(assumed)} of the specs have the eps of the trace's "
        "reference, or lngen's default if it has none: compare it with the model's.",
    )
