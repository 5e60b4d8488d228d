"""If these fail, the bits of ``order=v1`` have moved: the interpreter's results have other digests than recorded."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

import digests
import sampling
from digests import CASES, LENGTHS, Case
from lngen.compiler.ir import Graph, is_column_fold, is_set_fold
from lngen.compiler.passes import order
from lngen.compiler.passes.order import Rule, rule_of
from lngen.compiler.spec import parse_spec

V1 = rule_of("v1")


@pytest.mark.full(sample=False)
@pytest.mark.parametrize("d", LENGTHS)
def test_every_result_of_a_row_length_has_the_recorded_bits(d: int) -> None:
    assert changed([case for case in CASES if case.d == d]) == []


def test_a_sample_of_the_results_has_the_recorded_bits() -> None:
    """Every row length, and every graph with every direction and dtype, at least once."""
    facts = [((c.d,), (c.graph, c.direction, c.dtype, c.rows)) for c in CASES]
    assert changed([CASES[n] for n in sampling.covering(facts, strength=1)]) == []


def changed(cases: list[Case]) -> list[str]:
    """The cases whose bits are not those of the file."""
    recorded = digests.recorded()
    return [str(case) for case in cases if digests.digest(case) != recorded[case]]


def test_inputs_are_what_the_hash_says() -> None:
    """Fixed numbers: SplitMix64 of 0 and 1 is published, and a library that rounded otherwise would show here."""
    assert [hex(int(n)) for n in digests.mixed(digests.np.arange(1, 3, dtype="uint64"))] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


# Numbers that may be these as well, and decide nothing else.
EQUIVALENT = {
    ("centred_most", 72): "from 17 segments on, rows of up to 8 MiB have a power of two of them",
    ("held_groups[4]", 12296): "so many columns of 2 bytes are more than tile_bytes",
    ("most_groups", 256): "the sums of 256 groups of 64 columns are more than a block holds",
    ("measured[3].first", 12281): "the entry before it has 12288",
    ("measured[4].first", 13304): "the entry before it has 13304",
    ("measured[5].first", 13817): "the entry before it has 13824",
}


@pytest.mark.full
def test_every_number_of_the_order_decides_a_recorded_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest covers the order of the sums, so it changes where an order does."""
    specs = {(c.graph, c.direction, c.dtype): c for c in CASES}.values()
    graphs = {_facts(*found): found for found in map(_graph, specs)}.values()
    before, undecided = _orders(monkeypatch, V1, graphs), set()
    for name, number, rule in _changed_rules():
        if _orders(monkeypatch, rule, graphs) == before:
            undecided.add((name, number))
    assert undecided == EQUIVALENT.keys()


def _graph(case: Case) -> tuple[Graph, int | None]:
    """The graph of a case over rows of any length, before its sums have their order; and what shares the rows."""
    spec = parse_spec(f"{case.graph}.{case.direction}:d=1024,dtype={case.dtype}", digests.GRAPHS_BY_NAME)
    return spec.trace()["place_fma"], spec.blocks


def _facts(graph: Graph, blocks: int | None) -> tuple[Any, ...]:
    """What the rule asks of a graph."""
    sums = sum(is_column_fold(e) for e in graph.eqns)
    return order.element_size(graph), order.sum_size(graph), sums, order.suited_cluster(graph, 2**14, V1), blocks


def _orders(patch: pytest.MonkeyPatch, rule: Rule, graphs: Iterable[tuple[Graph, int | None]]) -> list[Any]:
    """The orders of the sums of ``graphs`` for rows of every length, and whether segments have centres."""
    patch.setattr(order, "rule_of", lambda version: rule)
    found: list[Any] = []
    for graph, blocks in graphs:
        for d in LENGTHS:
            row, column = order.orders(graph, d, blocks)
            segments = -(-d // row.segment)
            found.append((row.attrs(d), rule.centred_least <= segments <= rule.centred_most))
            found += [column] * any(map(is_column_fold, graph.eqns))
            found += [order.set_order(rule, d, column)] * any(map(is_set_fold, graph.eqns))
    return found


def _changed_rules() -> Iterator[tuple[str, int, Rule]]:
    """Rules with one number changed: its name, and the number."""
    for f in fields(V1):
        for name, number, value in _changed(f.name, getattr(V1, f.name)):
            yield name, number, replace(V1, **{f.name: value})


def _changed(name: str, value: Any) -> Iterator[tuple[str, int, Any]]:
    """``value`` with one number changed: limits that lengths are compared with by a chunk, others doubled."""
    if isinstance(value, int):
        limit = "longer" in name or name.endswith((".first", ".last")) or (value > 2000 and "bytes" not in name)
        for number in (value + 8, value - 8) if limit or name == "centred_most" else (2 * value,):
            yield name, number, number
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            for part, number, new in _changed(f"{name}[{key}]", entry):
                yield part, number, {**value, key: new}
    elif isinstance(value, tuple):
        for place, entry in enumerate(value):
            for part, number, new in _changed(f"{name}[{place}]", entry):
                yield part, number, (*value[:place], new, *value[place + 1 :])
    elif is_dataclass(value):
        for f in fields(value):
            for part, number, new in _changed(f"{name}.{f.name}", getattr(value, f.name)):
                yield part, number, replace(value, **{f.name: new})  # type: ignore[type-var]
