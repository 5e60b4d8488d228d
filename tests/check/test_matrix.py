"""If these fail, the bit matrix leaves out what it promises, or tells other totals than it has."""

import json

from lngen.check import matrix
from lngen.check.matrix import Entry
from lngen.spec import parse_spec


def test_the_grid_has_every_length_dtype_graph_and_direction() -> None:
    listed = [*matrix.specs((8, 96))]
    assert listed[: len(matrix.EXTREMES)] == [(text, (rows,)) for text, rows in matrix.EXTREMES]
    grid = listed[len(matrix.EXTREMES) :]
    assert len({*grid}) == len(grid) == 2 * 10 * 2 * 2
    assert {rows for _, rows in grid} == {matrix.ROWS}
    read = [parse_spec(text) for text, _ in grid]
    assert [s.d for s in read] == [96] * 40 + [8] * 40, "the largest first"
    heads = {text.partition(":")[0] for text, _ in grid}
    assert heads == {f"{graph}.{way}" for graph in ("layernorm", "rmsnorm") for way in ("fwd", "bwd")}


def test_totals_are_those_of_all_entries() -> None:
    entries = [
        Entry("b", ["s", "t", "u"], [1, 2, 3], numbers=10, differ=1),
        Entry("a", ["s", "t"], [1], numbers=5),
        Entry("c", notes=["not reached"]),
    ]
    found = json.loads(matrix.to_json(entries, {"device": "a GPU"}))
    assert [entry.pop("spec") for entry in found.pop("entries")] == ["a", "b", "c"]
    assert found["conditions"] == {"device": "a GPU"}
    totals = {key: found[key] for key in ("specs", "launches", "numbers_compared", "numbers_that_differ")}
    assert totals == {"specs": 3, "launches": 11, "numbers_compared": 15, "numbers_that_differ": 1}
    assert (found["not_reached"], found["fewest_schedules"]) == (["c"], 2)
