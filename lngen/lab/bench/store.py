"""The file of a benchmark: conditions, records, the circumstances of each run and a summary, as JSON.

One point a line, the same bytes for the same content. The file is replaced in one step after every task, so that a run
can be ended at any time. Records of different conditions are never mixed; circumstances may differ between runs.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from uuid import UUID

from lngen.config import data_dir
from lngen.errors import LngenError
from lngen.files import load_cupy, parse_json, read, shown, write_all
from lngen.lab.bench.records import HostRecord, Record, judge, summarise
from lngen.lab.bench.tasks import DIRECTIONS
from lngen.lab.tune.recorded import benched
from lngen.user_input import LARGEST
from lngen.version import __version__

Item = TypeVar("Item", Record, HostRecord)
RANGES = {"rows": (1, LARGEST), "d": (1, LARGEST), "fraction": (0, 100)}  # of numbers, which a picture has room for
MOST_BYTES = 2**28  # of a file, many times the size for the largest grids
SWEEPS = (
    "'{0}' holds times of many schedules, not what 'lngen bench --out' wrote. "
    "To make a table of schedules of it, run 'lngen tune --table FILE --recorded {0}'."
)
# What differs between the records of a point; the rest is written once.
COLUMNS = (
    "provider", "us_median", "us_p10", "us_p90", "us_min", "gb_s", "fraction", "launches", "schedule", "note",
)  # fmt: skip
APART = {*COLUMNS, "tensor_bytes", "target", "met", "best_peer", "ratio"}  # the last five: reading works them out


@dataclass(frozen=True)
class Saved:
    """The content of a file; ``runs`` are the circumstances of each run that contributed to it."""

    records: list[Record] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)
    host: list[HostRecord] = field(default_factory=list)
    runs: list[dict[str, str]] = field(default_factory=list)


def render(saved: Saved) -> str:
    """The text of a file."""
    parts = {
        "conditions": json.dumps(saved.conditions, indent=1, sort_keys=True),
        "host": _lines(map(vars, saved.host)),
        "records": f'{{"columns":{json.dumps(COLUMNS)},\n"points":{_lines(_points(saved.records))}}}',
        "runs": json.dumps(saved.runs, indent=1, sort_keys=True),
        "summary": _lines(map(vars, summarise(saved.records))),
    }
    return "{" + ",".join(f"\n{json.dumps(name)}: {part}" for name, part in parts.items()) + "\n}\n"


def write_json(path: Path, saved: Saved) -> None:
    """Write a file; LngenError if that fails. The old file remains until the new one is complete."""
    write_all({path: render(saved).encode()})


def read_json(path: Path) -> Saved:
    """The content that ``write_json`` wrote, now or in an earlier version; LngenError for anything else."""
    try:
        content = parse_json(read(path, MOST_BYTES))
        if {"device", "schedules", "points"} <= content.keys():
            raise LngenError(SWEEPS.format(path))
        records = [_record_of(Record, r) for r in benched(content["records"])]
        host = [_record_of(HostRecord, h) for h in content.get("host", [])]
        runs = [{str(k): str(v) for k, v in run.items()} for run in content.get("runs", [])]
        return Saved(judge(records), dict(content["conditions"]), host, runs)
    except OSError as error:
        raise LngenError(f"'{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no '{error.args[0]}'" if isinstance(error, KeyError) else str(error)
        raise LngenError(f"'{path}' is expected to be a file that 'lngen bench --out' wrote, but {why}.") from error


def _points(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """What the records of a point share, and of each the columns up to the last that is set."""

    def shared(r: Record) -> dict[str, Any]:
        return {k: v for k, v in vars(r).items() if k not in APART and v != getattr(Record, k, None)}

    def row(r: Record) -> list[Any]:
        values = [getattr(r, name) for name in COLUMNS]
        while values[-1] == getattr(Record, COLUMNS[len(values) - 1], None):
            values.pop()
        return values

    for head, group in groupby(records, key=shared):
        yield {**head, "records": [row(r) for r in group]}


def _record_of(kind: type[Item], fields: Mapping[str, Any]) -> Item:
    """The record with these fields; TypeError or ValueError for unknown fields or values of another kind."""
    item = kind(**fields)
    for name, hint in get_type_hints(kind).items():
        value = getattr(item, name)
        number = isinstance(value, int | float) and isinstance(1.0, hint)
        if not (isinstance(value, hint) or number):
            raise TypeError(f"{name} is {shown(value)}")
        least, most = RANGES.get(name, (0, 1e18))
        if isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(f"{name} is {value}, expected from {least} to {most}")
    if isinstance(item, Record) and item.direction not in DIRECTIONS:
        raise ValueError(f"direction is {shown(item.direction)}, expected one of {', '.join(DIRECTIONS)}")
    return item


def merged(files: Sequence[Saved]) -> Saved:
    """Several files as one, with the conditions that they share."""
    shared = files[0].conditions.items() if files else ()
    return Saved(
        [r for f in files for r in f.records],
        {name: text for name, text in shared if all(f.conditions.get(name) == text for f in files)},
        [h for f in files for h in f.host],
        [run for f in files for run in f.runs],
    )


def resumed(path: Path, conditions: Mapping[str, str]) -> Saved:
    """The content of a file that is continued, nothing if there is none; LngenError if its conditions differ."""
    if not path.exists():
        return Saved()
    saved = read_json(path)
    names = sorted({*saved.conditions, *conditions})
    changed = [n for n in names if saved.conditions.get(n) != conditions.get(n)]
    if changed:
        was = ", ".join(f"{n} '{saved.conditions.get(n, '')}' -> '{conditions.get(n, '')}'" for n in changed)
        raise LngenError(
            f"'{path}' was measured under other conditions ({was}); "
            "name another file, or leave --resume out to replace this one."
        )
    return saved


def _lines(items: Iterable[Mapping[str, Any]]) -> str:
    """A list with one item per line."""
    lines = ",\n".join(json.dumps(item, sort_keys=True, separators=(",", ":")) for item in items)
    return f"[\n{lines}\n]" if lines else "[]"


# ---- conditions ----

PEERS = (
    "torch",
    "triton",
    "numpy",
    "liger-kernel",
    "quack-kernels",
    "flash-attn",
    "mamba-ssm",
    "flashinfer-python",
    "apex",
)
BYTES = "GB/s: every input and result of the graph once, over the time; of a ceiling its [M, D] tensors alone"
# The files that determine the kernel of a spec; changes of the benchmark and the command line are not counted.
SOURCES = ("compiler", "launch/runtime")


def conditions(device: str, method: str, settings: Mapping[str, str]) -> dict[str, str]:
    """What a result depends on besides the task, by name: GPU, versions, kernels, method, settings of the providers."""
    cupy = load_cupy()
    found = {
        "bytes": BYTES,
        "device": device,
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": str(cupy.__version__),
        "lngen": __version__,
        "kernels": source_digest(),
        "python": platform.python_version(),
        "method": method,
        **{name: _version(name) for name in PEERS},
        **{f"provider {name}": text for name, text in settings.items()},
    }
    return {name: text for name, text in found.items() if text}


def source_digest() -> str:
    """Twelve hex digits that change with the generator or a template."""
    package = Path(__file__).resolve().parents[2]
    files = [f for name in SOURCES for f in _files(package / name, "*.py")] + [*_files(data_dir("templates"), "*")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _files(path: Path, pattern: str) -> Iterable[Path]:
    return [path] if path.is_file() else sorted(f for f in path.rglob(pattern) if f.is_file())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# ---- circumstances ----

SECONDS = 10  # for a program that should answer at once

# Names of nvidia-smi, and the names in a record.
GPU = {
    "driver_version": "driver",
    "clocks.sm": "SM clock, MHz",
    "clocks.max.sm": "SM clock at most, MHz",
    "clocks.mem": "memory clock, MHz",
    "clocks.max.mem": "memory clock at most, MHz",
    "power.draw": "power, W",
    "power.limit": "power at most, W",
    "temperature.gpu": "temperature, C",
}


def circumstances(device: int, commit: str = "") -> dict[str, str]:
    """Date (UTC), commit, the GPU's identity, its driver, and its clocks, power and temperature now, by name.

    ``commit`` names the commit of a copy without its repository; otherwise git gives it. An unknown value is left
    out. Directly after a task was timed, clocks and power are those under load.
    """
    uuid = _uuid(device)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "commit": commit or _commit(Path(__file__).resolve().parents[2]),
        "device id": uuid,
        **(_reported(uuid) if uuid else {}),
    }
    return {name: text for name, text in found.items() if text}


def _uuid(device: int) -> str:
    """The GPU's identity as nvidia-smi writes it; empty without a GPU."""
    try:
        found = load_cupy().cuda.runtime.getDeviceProperties(device)
        return f"GPU-{UUID(bytes=bytes(found['uuid']))}"
    except Exception:  # no CuPy, no driver or no GPU
        return ""


def _reported(uuid: str) -> dict[str, str]:
    """The values that nvidia-smi reports for a GPU."""
    query = f"--query-gpu={','.join(GPU)}"
    values = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={uuid}"]).split(", ")
    return dict(zip(GPU.values(), values, strict=True)) if len(values) == len(GPU) else {}


def _commit(checkout: Path) -> str:
    """The commit that is checked out, with a mark if files differ from it; empty outside a repository."""
    if not (checkout / ".git").exists():
        return ""
    head = _output(["git", "-C", str(checkout), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"])
    return f"{head} with changes" if head and changed else head


def _output(command: list[str]) -> str:
    """The output of a program; empty if there is no such program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
