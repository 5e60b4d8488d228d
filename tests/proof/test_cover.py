"""If these fail, the plain run is chosen by a wrong record, or a mutant that is said to have died never acted."""

import ast
import builtins
import random
from typing import Any

import pytest

import blocks
import cover
import sampling

CODE = """
def f(x, y):
    'adds'
    if x > y:
        total = x + y
    else:
        total = 0
        for n in range(3):
            total += n
    return total

class C:
    def g(self):
        done = []
        with open('/dev/null'):
            done.append(1)
        return done if not False else None
"""
BLOCKS = ["m.py:4", "m.py:5", "m.py:7", "m.py:9", "m.py:14"]
OPERATORS = {  # of a place: its mutants, before and after
    "comparison": [("x > y", "x >= y")],
    "arithmetic": [("x + y", "x - y")],
    "number": [("0", "1"), ("3", "4"), ("1", "2")],
    "call": [("done.append(1)", "pass")],
    "branches": [("done if not False else None", "None if not False else done")],
    "not": [("not False", "False")],
    "truth": [("False", "True")],
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[blocks.Table, dict[str, Any]]:
    """The code with blocks and mutants, executed."""
    table, names = blocks.Table(), dict[str, Any]()
    tree = blocks.changed(ast.parse(CODE), "m.py", table, mutants=True)
    monkeypatch.setattr(builtins, blocks.RAN, table.ran, raising=False)
    monkeypatch.setattr(builtins, blocks.CHOSEN, table.chosen, raising=False)
    exec(compile(tree, "m.py", "exec"), names)
    return table, names


def ran(table: blocks.Table) -> list[str]:
    found = sorted(table.blocks[n] for n, flag in enumerate(table.ran) if flag)
    table.ran[:] = bytes(len(table.ran))
    return found


def test_what_runs_is_flagged(made: tuple[blocks.Table, dict[str, Any]]) -> None:
    table, names = made
    assert ran(table) == []
    assert names["f"](2, 1) == 3
    assert ran(table) == BLOCKS[:2]
    assert names["f"](1, 2) == 3
    assert ran(table) == [BLOCKS[0], *BLOCKS[2:4]]
    assert names["C"]().g() == [1]
    assert ran(table) == BLOCKS[4:]
    assert names["f"].__doc__ == "adds"
    assert sorted(table.blocks) == sorted(BLOCKS)


def test_every_operator_has_its_mutants(made: tuple[blocks.Table, dict[str, Any]]) -> None:
    table, _ = made
    found = {name: [(m.before, m.after) for m in table.mutants if m.operator == name] for name in OPERATORS}
    assert found == OPERATORS
    assert sum(map(len, found.values())) == len(table.mutants)
    assert {m.before: m.block for m in table.mutants} | {"3": BLOCKS[2]} == {
        "x > y": BLOCKS[0], "x + y": BLOCKS[1], "0": BLOCKS[2], "3": BLOCKS[2],
        **dict.fromkeys(["1", "done.append(1)", "done if not False else None", "not False", "False"], BLOCKS[4]),
    }  # fmt: skip


def test_the_chosen_mutant_acts_alone(made: tuple[blocks.Table, dict[str, Any]]) -> None:
    table, names = made

    def results() -> tuple[Any, ...]:
        return names["f"](2, 2), names["f"](3, 2), names["f"](1, 2), names["C"]().g()

    plain = results()
    assert plain == (3, 5, 3, [1])
    wanted = {
        "x > y": (4, 5, 3, [1]), "x + y": (3, 1, 3, [1]), "0": (4, 5, 4, [1]), "3": (6, 5, 6, [1]), "1": (3, 5, 3, [2]),
        "done.append(1)": (3, 5, 3, []), "done if not False else None": (3, 5, 3, None),
        "not False": (3, 5, 3, None), "False": (3, 5, 3, None),
    }  # fmt: skip
    for number, mutant in enumerate(table.mutants):
        table.chosen[0] = number
        assert results() == wanted[mutant.before]
    table.chosen[0] = -1
    assert results() == plain


def test_the_place_of_a_mutant_is_its_own() -> None:
    for mutants in (cover.places("lngen/launch"), cover.template_places()):
        places = [m.place for m in mutants]
        assert len(places) == len({*places}) > 300
        assert all(m.block for m in mutants)


def test_a_cover_runs_every_block() -> None:
    """Of random records; those that have to stay are in it, and few others."""
    for seed in range(30):
        rng = random.Random(seed)
        tests = [
            cover.Recorded(
                f"f{n % 7}.py::test_{n}",
                (f"f{n % 7}.py::test_{n}",),
                0.0,
                cover.rounded(rng.expovariate(5)),
                frozenset(str(b) for b in rng.sample(range(40), rng.randrange(1, 9))),
                rng.random() < 0.05,
            )
            for n in range(90)
        ]
        found = cover.cover(tests)
        assert found >= {t.name for t in tests if t.kept}
        assert {b for t in tests if t.name in found for b in t.blocks} == {b for t in tests for b in t.blocks}
        assert found == cover.cover(tests[::-1])
        assert len(found) < len(tests) * 0.5


def test_a_plain_run_takes_killers_and_the_cheapest() -> None:
    costs = {"covers": 5.0, "kills": 3.0, "cheap": 0.1, "dear": 0.5, "dearer": 1.0}
    tests = [
        cover.Recorded(n, (n,), cpu, cover.rounded(cpu), frozenset("a" if n == "covers" else ""), False)
        for n, cpu in costs.items()
    ]
    for cpu, more in ((0.0, {}), (8.2, {"cheap"}), (8.6, {"cheap", "dear"}), (20.0, {"cheap", "dear", "dearer"})):
        assert cover.affordable(tests, [["kills"], ["gone"], ["covers", "dear"], []], cpu) == {"covers", "kills", *more}
    assert cover.affordable(tests, [["kills", "dearer"]], 0.0) == {"covers", "dearer"}


def test_a_function_goes_if_others_hold_what_it_holds() -> None:
    """The dearest first; not where only three hold a block, nobody else kills, or the one who does has gone."""
    blocks_of = {"dear": "ab", "cheap": "ab", "only": "abc", "killer": "a", **dict.fromkeys(["x", "y", "z"], "ab")}
    cost = {"dear": 9.0, "cheap": 8.0}
    every = {
        n: cover.Function(n, (cover.Recorded(n, (n,), cost.get(n, 1.0), 1.0, frozenset(b), False),), frozenset(b))
        for n, b in blocks_of.items()
    }
    asked = ("dear", "cheap", "only", "killer")
    for instead, found in (
        ({}, ["cheap", "dear", "killer"]),
        ({"dear": ["cheap"]}, ["dear", "killer"]),
        ({"cheap": ["dear"], "killer": [""]}, ["dear"]),
    ):
        assert cover.needless(every, instead, asked) == found
    assert cover.needless(every, {}, ["only"]) == []


def test_costs_are_rounded_up_to_powers_of_two() -> None:
    costs = (0.0, 0.01, 0.011, 0.02, 0.05, 1.0)
    assert [cover.rounded(c) for c in costs] == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.08, 1.28])


def test_the_file_lists_a_whole_function_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.py::test_x[1]", "a.py::test_x[2]", *(f"a.py::test_y[{n} [a]]" for n in range(3)), "b.py::test_z"]
    tests = [cover.Recorded(n, (n,), 0.0, 0.01, frozenset(), False) for n in names]
    file = tmp_path / "left_out.txt"
    file.write_text(cover.text(tests, {"a.py::test_y[2 [a]]"}))
    assert file.read_text().splitlines()[3:] == [
        "a.py",
        "  test_x",
        "  test_y",
        "    [0 [a]]\t[1 [a]]",
        "b.py",
        "  test_z",
    ]
    monkeypatch.setattr(sampling, "LEFT_OUT", file)
    sampling.listed.cache_clear()
    assert [n for n in names if not sampling.is_listed(n)] == ["a.py::test_y[2 [a]]"]
    assert sampling.recorded_count() == 6
    sampling.listed.cache_clear()


def test_cases_named_by_their_position_are_one() -> None:
    rows = [
        {"test": f"a.py::test_x[m{n}]", "outcome": "passed", "cpu": 0.01, "positional": True, "blocks": [str(n)]}
        for n in range(3)
    ] + [{"test": "a.py::test_y", "outcome": "skipped", "cpu": 0.0, "positional": False, "blocks": []}]
    (x, y) = cover.recorded(rows)
    assert (x.name, len(x.tests), x.blocks, x.kept) == ("a.py::test_x", 3, {"0", "1", "2"}, False)
    assert x.cost == pytest.approx(0.03)
    assert (y.name, y.kept) == ("a.py::test_y", True)
