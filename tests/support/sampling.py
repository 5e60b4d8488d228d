"""What a plain run takes of a large table of cases. ``pytest -m full`` runs all other cases of every table.

``pytest -m full --half``, which CI runs, takes half of those, and the other half after another commit.

``pytest.mark.full(sample=False)`` marks a table of which a plain run takes nothing, and CI half, too.

Two samples: a table of single cases gives a tenth, another one after another commit. A grid gives few cases that hold
every pair of values of two factors that the grid holds. Both depend on the table and the commit alone.
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
PARTS = 10  # a plain run takes one of so many parts of a table

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


def part_of(commit: str) -> int:
    """Which part of a table the plain run of a commit takes, from 0; the first without a commit."""
    return int(commit, 16) % PARTS if commit else 0


def in_half(item: pytest.Item, commit: str) -> bool:
    """True for what CI takes of the full run for a commit: half of the cases of tables, and all single tests."""
    mark = item.get_closest_marker("full")
    single = mark is None or "sample" not in mark.kwargs
    return single or not commit or zlib.crc32(item.nodeid.encode()) % 2 == int(commit, 16) % 2


def rotating(names: Names, cases: Iterable[Any], ids: Ids = None, part: int | None = None) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with a table of which the plain run takes every tenth case.

    The commit says which, or ``part``; at least one is taken.
    """
    listed = [*cases]
    first = part_of(commit()) if part is None else part
    return _parametrized(names, listed, ids, range(first % max(len(listed), 1), len(listed), PARTS))


def grid(
    names: Names,
    cases: Iterable[Any],
    factors: Callable[..., Sequence[Hashable]] = lambda *values: values,
    ids: Ids = None,
    strength: int = 2,
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with a grid of which the plain run takes what ``covering`` chooses.

    ``factors`` gives those of a case from its values, by default the values themselves.
    """
    listed = [*cases]
    return _parametrized(names, listed, ids, covering([factors(*_values(c)) for c in listed], strength))


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


def _parametrized(names: Names, cases: Sequence[Any], ids: Ids, chosen: Collection[int]) -> pytest.MarkDecorator:
    """Every case marked ``full``, those at ``chosen`` as the plain run's sample."""
    params = [
        pytest.param(
            *_values(c),
            id=getattr(c, "id", None),
            marks=(*getattr(c, "marks", ()), pytest.mark.full(sample=n in chosen)),
        )
        for n, c in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, params, ids=ids)


def _values(case: Any) -> tuple[Any, ...]:
    """The values of a ``pytest.param``, of a tuple, or of a case that is one value."""
    values = getattr(case, "values", case)
    return values if isinstance(values, tuple) else (case,)


def is_left_out(item: pytest.Item) -> bool:
    """True for a case of a table that is not in the plain run's sample."""
    mark = item.get_closest_marker("full")
    return mark is not None and not mark.kwargs.get("sample", False)
