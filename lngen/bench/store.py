"""The file of a benchmark: conditions, records and a summary as JSON, one record a line, replaced in one step.

The same content gives the same bytes. The file is written after every task, so that a run can be ended at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from lngen.bench.host import HostRecord
from lngen.bench.records import Record
from lngen.bench.tasks import DIRECTIONS
from lngen.bench.verdict import judge, summarise
from lngen.errors import LngenError
from lngen.files import parse_json, read, shown, write_all
from lngen.numbers import LARGEST

Item = TypeVar("Item", Record, HostRecord)
RANGES = {"rows": (1, LARGEST), "d": (1, LARGEST), "fraction": (0, 100)}  # of numbers, which a picture has room for
MOST_BYTES = 2**28  # of a file, many times the size for the largest grids


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
        "host": _lines(saved.host),
        "records": _lines(saved.records),
        "runs": json.dumps(saved.runs, indent=1, sort_keys=True),
        "summary": _lines(summarise(saved.records)),
    }
    return "{" + ",".join(f"\n{json.dumps(name)}: {part}" for name, part in parts.items()) + "\n}\n"


def write_json(path: Path, saved: Saved) -> None:
    """Write a file; LngenError if that fails. The old file remains until the new one is complete."""
    write_all({path: render(saved).encode()})


def read_json(path: Path) -> Saved:
    """The content that ``write_json`` wrote, now or in an earlier version; LngenError for anything else."""
    try:
        content = parse_json(read(path, MOST_BYTES))
        records = [_made(Record, r) for r in content["records"]]
        host = [_made(HostRecord, h) for h in content.get("host", [])]
        runs = [{str(k): str(v) for k, v in run.items()} for run in content.get("runs", [])]
        return Saved(judge(records), dict(content["conditions"]), host, runs)
    except OSError as error:
        raise LngenError(f"'{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LngenError(f"'{path}' is expected to be a file that 'lngen bench --out' wrote: {error!r}.") from error


def _made(kind: type[Item], fields: Mapping[str, Any]) -> Item:
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


def _lines(items: Sequence[Any]) -> str:
    """A list with one item per line."""
    lines = ",\n".join(json.dumps(vars(item), sort_keys=True) for item in items)
    return f"[\n{lines}\n]" if items else "[]"
