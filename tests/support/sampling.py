"""What a plain run takes. ``pytest -m full`` runs all other cases.

``pytest -m full --half``, which CI runs, takes half of those, and the other half after another commit.

A plain run leaves out the tests of ``tests/data/left_out.txt``, since others run what they run (``proof/cover.py``).
Of a large table it takes a sample: of single cases a tenth; of a grid few cases that hold every pair of values of two
factors that the grid holds. ``pytest.mark.full(sample=False)`` marks a table of which it takes nothing.
"""

import subprocess
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ROOT / "tests" / "data" / "left_out.txt"
PARTS = 10  # a plain run takes one of so many parts of a table

COLLECTED = pytest.StashKey[list[str]]()  # the tests of a run, before any is left out by the file

Names = str | tuple[str, ...]
Ids = Callable[[Any], object] | Sequence[str] | None


@cache
def commit() -> str:
    """The hash of the commit that is checked out; none without git or outside a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def in_half(item: pytest.Item, commit: str) -> bool:
    """True for what CI takes of the full run for a commit: half of the cases of tables, and all single tests."""
    mark = item.get_closest_marker("full")
    single = mark is None or "sample" not in mark.kwargs
    return single or not commit or zlib.crc32(item.nodeid.encode()) % 2 == int(commit, 16) % 2


def rotating(names: Names, cases: Iterable[Any], ids: Ids = None) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with a table of which the plain run takes every tenth case, from the first."""
    listed = [*cases]
    return _parametrized(names, listed, ids, range(0, len(listed), PARTS))


def grid(
    names: Names,
    cases: Iterable[Any],
    factors: Callable[..., Sequence[Hashable]] = lambda *values: values,
    ids: Ids = None,
    strength: int = 2,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with a grid of which the plain run takes what ``covering`` chooses.

    ``factors`` gives those of a case from its values, by default the values themselves; ``indirect`` are fixtures.
    """
    listed = [*cases]
    return _parametrized(names, listed, ids, covering([factors(*_values(c)) for c in listed], strength), indirect)


def covering(cases: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Places of few cases that hold every pair of values of two factors that ``cases`` hold.

    A case is the values of its factors. ``strength`` is 2, or 1 for every value of a factor instead of every pair.
    Greedy: each next case adds most, the first of those that add as many.
    """
    held = [{*combinations(enumerate(case), strength)} for case in cases]
    missing, chosen = {part for parts in held for part in parts}, list[int]()
    while missing:
        best = max(range(len(held)), key=lambda n: len(held[n] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _parametrized(
    names: Names, cases: Sequence[Any], ids: Ids, chosen: Collection[int], indirect: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Every case marked ``full``, those at ``chosen`` as the plain run's sample."""
    params = [
        pytest.param(
            *_values(c),
            id=getattr(c, "id", None),
            marks=(*getattr(c, "marks", ()), pytest.mark.full(sample=n in chosen)),
        )
        for n, c in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, params, ids=ids, indirect=indirect)


def _values(case: Any) -> tuple[Any, ...]:
    """The values of a ``pytest.param``, of a tuple, or of a case that is one value."""
    values = getattr(case, "values", case)
    return values if isinstance(values, tuple) else (case,)


def is_left_out(item: pytest.Item) -> bool:
    """True for a case of a table that is not in the plain run's sample, and for what the file lists."""
    mark = item.get_closest_marker("full")
    return mark is not None and not mark.kwargs.get("sample", False)


@cache
def listed() -> frozenset[str]:
    """The tests of the file; a function without cases stands for all of its cases."""
    found, file, function = set[str](), "", ""
    for line in LEFT_OUT.read_text(encoding="utf-8").splitlines() if LEFT_OUT.exists() else ():
        if line.startswith("    "):
            found.discard(function)
            found.update(function + case for case in line[4:].split("\t"))
        elif line.startswith("  "):
            found.add(function := f"{file}::{line[2:]}")
        elif not line.startswith("#"):
            file = line
    return frozenset(found)


def is_listed(name: str) -> bool:
    """True for a test that the file leaves out of the plain run."""
    return name in listed() or name.partition("[")[0] in listed()


def recorded_count() -> int:
    """How many tests the file was made of; 0 without a file."""
    head = LEFT_OUT.read_text(encoding="utf-8") if LEFT_OUT.exists() else ""
    return int(head.partition("# Recorded tests: ")[2].partition("\n")[0] or 0)
