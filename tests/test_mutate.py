"""The mutation tool: the places it finds, what it makes of them, and that its reasons are of what there is."""

from __future__ import annotations

import ast

import pytest

import mutate

PYTHON = """def f(x: int | None = 1, *, y: bool = False) -> dict:
    \"\"\"Text 1 + 1.\"\"\"
    assert x == 3, "not this 4 + 4"
    if (x + 2) * 3 <= y and not x:
        go(x[0])
    x += min(5, 6)
    return {**x, **y} | {f"{x}": -x}
"""
MADE = [
    "def f(x: int | None = 2, *, y: bool = False) -> dict:",
    "def f(x: int | None = 1, *, y: bool = True) -> dict:",
    "if not ((x + 2) * 3 <= y and not x):",
    "if ((x + 2) * 3 <= y) or (not x):",
    "if (x + 2) * 3 < y and not x:",
    "if (x + 2) // 3 <= y and not x:",
    "if (x - 2) * 3 <= y and not x:",
    "if (x + 3) * 3 <= y and not x:",
    "if (x + 2) * 4 <= y and not x:",
    "if (x + 2) * 3 <= y and (x):",
    "pass",
    "go(x[-1])",
    "go(x[1])",
    "pass",
    "x += max(5, 6)",
    "x += min(6, 6)",
    "x += min(5, 7)",
    'return {f"{x}": -x} | {**x, **y}',
    'return {**y, **x} | {f"{x}": -x}',
    'return {**x, **y} | {f"{x}": (x)}',
]

TEMPLATE = """{# 1 + 1 #}
// 2 < 2
    if (row < {{ rows - 1 }} && d % 8 == 0) {
        sum = sum + 4;  // 5
        __syncthreads();
    const int n = N;
"""
MADE_OF_TEMPLATE = [
    "if (row <= {{ rows - 1 }} && d % 8 == 0) {",
    "if (row < {{ rows - 1 }} && d % 8 != 0) {",
    "if (row < {{ rows - 1 }} || d % 8 == 0) {",
    "if (row < {{ rows - 1 }} && d / 8 == 0) {",
    "if (row < {{ rows - 1 }} && d % 9 == 0) {",
    "if (row < {{ rows - 1 }} && d % 8 == 1) {",
    "sum = sum - 4; // 5",
    "sum = sum + 5; // 5",
    "; // 5",
    ";",
]


def made(places: list[mutate.Mutant]) -> list[str]:
    """What becomes of the lines."""
    return sorted(m.name.partition(" => ")[2] for m in places)


def test_the_places_of_a_module_and_of_a_template() -> None:
    assert made([*mutate.python_places("f.py", PYTHON)]) == sorted(MADE)
    assert made([*mutate.device_places("f.jinja", TEMPLATE)]) == sorted(MADE_OF_TEMPLATE)


def test_a_sample_is_one_of_its_seed_and_every_mutant_a_program() -> None:
    few = mutate.sample(20, 3, "lngen/ir/")
    assert few == mutate.sample(20, 3, "lngen/ir/") != mutate.sample(20, 4, "lngen/ir/")
    chosen = mutate.sample(60, 3)
    assert len({(m.name, m.start) for m in chosen}) == 60
    assert sum(m.path.startswith("templates/") for m in chosen) == 9
    for m in chosen:
        source = (mutate.ROOT / m.path).read_text(encoding="utf-8")
        assert source[m.start : m.end] == m.was != m.text
        if m.path.endswith(".py"):
            ast.parse(source[: m.start] + m.text + source[m.end :])


def test_reasons_are_of_mutants_and_places_that_there_are() -> None:
    survivors = mutate.survivors()
    python, device = mutate.places(mutate.ROOT, "", survivors["excluded"])
    assert {*survivors["equivalent"]} <= {m.name for m in (*python, *device)}
    for place in survivors["excluded"]:
        path, _, name = place.partition("::")
        assert (mutate.ROOT / path).is_file()
        assert bool(name) is any(m.path == path for m in python)
    assert all(len(reason.split()) > 3 for reasons in survivors.values() for reason in reasons.values())


@pytest.mark.parametrize("part", mutate.TESTS)
def test_every_part_has_its_tests(part: str) -> None:
    files = mutate.tests_of(part)
    assert len(files) > 0
    assert all((mutate.ROOT / name).exists() for name in files)
