"""The numbers of a version of the order: ``order_v1.toml`` as a ``Rule``, read once and checked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from lngen.ir import ORDERS

BySize = Mapping[int, int]


@dataclass(frozen=True)
class Measured:
    """Rows of ``first`` to ``last`` elements are shared by ``cluster`` blocks with ``groups`` rows side by side."""

    first: int
    last: int
    cluster: int
    groups: int


@dataclass(frozen=True)
class Clusters:
    """Rows longer than a number of elements, by bytes of a sum or of an element, are shared by ``cluster`` blocks."""

    longer_than: BySize
    cluster: int


@dataclass(frozen=True)
class Rule:
    """The numbers of one version; the file gives the meaning and the reason of each."""

    chunk_bytes: int
    segment_bytes: int
    segment_interleave: int
    centred_least: int
    centred_most: int
    held_groups: BySize
    held_few_groups: BySize
    held_one_row: BySize
    sums_together: int
    tile_bytes: int
    most_groups: int
    least_columns: int
    many_groups: int
    blocks: BySize
    blocks_of_short_rows: int
    many_blocks: int
    interleave_many: int
    interleave_few: int
    pair_longer_than: int
    pair_cluster: int
    long_row: Clusters
    longer_row: Clusters
    longest_row: Clusters
    measured: tuple[Measured, ...]


@cache
def rule_of(order: str) -> Rule:
    """The rule of a version; the file is part of the package, so an error in it is a defect: ValueError."""
    text = files("lngen.passes").joinpath(f"order_{order}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    if data.pop("order", None) != order or order not in ORDERS:
        raise ValueError(f'order_{order}.toml is expected to say order = "{order}".')
    return _rule(data)


def _rule(data: dict[str, Any]) -> Rule:
    whole: dict[str, Any] = {
        key: _whole(data, key, "is") for key, entry in data.items() if "is" in entry and key != "many_blocks"
    }
    by_size: dict[str, Any] = {key: _table(data, key, "by_size") for key, entry in data.items() if "by_size" in entry}
    longer: dict[str, Any] = {
        key: Clusters(_table(data, key, "longer_than"), _whole(data, key, "cluster"))
        for key in ("long_row", "longer_row", "longest_row")
    }
    return Rule(
        **whole,
        **by_size,
        **longer,
        centred_least=_whole(data, "centred_segments", "least"),
        centred_most=_whole(data, "centred_segments", "most"),
        blocks=_table(data, "blocks", "by_cluster"),
        many_blocks=_whole(data, "many_blocks", "is"),
        interleave_many=_whole(data, "many_blocks", "interleave"),
        interleave_few=_whole(data, "many_blocks", "fewer"),
        pair_longer_than=_whole(data, "pair", "longer_than"),
        pair_cluster=_whole(data, "pair", "cluster"),
        measured=tuple(_measured(entry) for entry in data["measured"]),
    )


def _measured(entry: dict[str, Any]) -> Measured:
    named = {"measured": entry}
    return Measured(*(_whole(named, "measured", key) for key in ("first", "last", "cluster", "groups")))


def _whole(data: Mapping[str, Any], entry: str, key: str) -> int:
    """A whole number from 1 in an entry that has a reason."""
    value, why = data[entry][key], data[entry].get("why")
    if not isinstance(value, int) or value < 1 or not isinstance(why, str):
        raise ValueError(f"'{entry}' is expected to have a whole number '{key}' from 1 and a 'why', got {data[entry]}.")
    return value


def _table(data: Mapping[str, Any], entry: str, key: str) -> BySize:
    table = {"why": data[entry].get("why"), **data[entry][key]}
    return {int(size): _whole({entry: table}, entry, size) for size in data[entry][key]}
