"""If these fail, a sample of a table lacks what it promises, or a case is in no run at all."""

import os
import random
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

import kept_cache
import sampling
from paths import SEARCH

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of tests with this project's conftest."""
    pytester.makeconftest((sampling.ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = full: as in this project\naddopts = --strict-markers")
    return pytester


def taken(decorator: pytest.MarkDecorator) -> list[object]:
    """What the plain run takes of a table."""
    return [p.values for p in decorator.args[1] if p.marks[-1].kwargs["sample"]]


@pytest.mark.parametrize(("count", "found"), [(0, []), (1, [0]), (10, [0]), (23, [0, 10, 20])])
def test_a_tenth_of_a_table_is_taken(count: int, found: list[int]) -> None:
    assert taken(sampling.rotating("n", range(count))) == [(n,) for n in found]


def test_two_commits_take_every_case() -> None:
    """And a single test each time."""

    class Item:
        def __init__(self, nodeid: str, **kwargs: bool) -> None:
            self.nodeid, self.kwargs = nodeid, kwargs

        def get_closest_marker(self, name: str) -> Any:
            return getattr(pytest.mark, name)(**self.kwargs).mark

    def taken_by(commits: list[str], **kwargs: bool) -> set[int]:
        items: list[Any] = [Item(f"test_x[{n}]", **kwargs) for n in range(99)]
        return {sum(sampling.in_half(item, commit) for commit in commits) for item in items}

    commits = [f"{n:040x}" for n in range(2)]
    assert taken_by(commits, sample=False) == {1}
    assert taken_by(commits) == taken_by(["", ""], sample=False) == {2}


def test_every_pair_of_values_is_in_the_sample() -> None:
    """Of a whole grid, of one with holes, of one case; with strength 1, every value."""

    def held(cases: list[tuple[object, ...]], strength: int) -> set[object]:
        return {part for case in cases for part in combinations(enumerate(case), strength)}

    whole: list[tuple[object, ...]] = [*product("abc", (1, 2, 3, 4), (False, True), "xy")]
    for cases in (whole, random.Random(7).sample(whole, 20), whole[:1]):
        for strength in (1, 2):
            chosen = sampling.covering(cases, strength)
            assert held([cases[n] for n in chosen], strength) == held(cases, strength)
    assert len(sampling.covering(whole, 1)) == 4
    assert len(sampling.covering(whole)) < len(whole) / 3


TESTS = """
import pytest, sampling

@sampling.rotating("n", [pytest.param(n, id=f"n{n}") for n in range(10)])
def test_table(n): ...

@sampling.grid("a, b", [(a, b) for a in range(3) for b in range(4)], lambda a, b: (a, b % 2))
def test_grid(a, b): ...

def test_other(): ...
"""


def test_a_plain_run_takes_the_sample_and_others_what_fits(project: pytest.Pytester) -> None:
    """The plain run: 1 of 10 cases of a table, 6 of 12 cases of the grid, what is in no table; and all the others."""
    project.makepyfile(test_it=TESTS)
    for options, count in (([], 1 + 6 + 1), (["-m", "full"], 9 + 6), (["-m", "not full"], 1), (["-m", ""], 8)):
        project.runpytest(*options).assert_outcomes(passed=count, deselected=23 - count)
    project.runpytest("test_it.py::test_table").assert_outcomes(passed=10)
    project.runpytest("test_it.py::test_table[n0]", "test_it.py::test_table[n1]").assert_outcomes(passed=2)


LISTED = """\
# Recorded tests: 6
test_it.py
  test_other
  test_plain
    [1]
"""


def test_a_plain_run_leaves_out_what_the_file_lists(
    project: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else, so a test that the file does not know runs; ``-m full`` takes what is left out."""
    file = tmp_path / "left_out.txt"
    file.write_text(LISTED)
    monkeypatch.setattr(sampling, "LEFT_OUT", file)
    sampling.listed.cache_clear()
    plain = "@pytest.mark.parametrize('n', [1, 2, 11])\ndef test_plain(n): ...\n\ndef test_new(): ...\n"
    project.makepyfile(test_it=TESTS + plain)
    left = 9 + 6 + 2
    for options, count in (([], 27 - left), (["-m", "full"], left)):
        project.runpytest(*options).assert_outcomes(passed=count, deselected=27 - count)
    project.runpytest("test_it.py::test_plain").assert_outcomes(passed=3)
    assert sampling.recorded_count() == 6
    sampling.listed.cache_clear()


UPDATE = "make it anew: python tests/proof/cover.py record DIR && python tests/proof/cover.py choose DIR"


def test_the_file_knows_the_tests(request: pytest.FixtureRequest) -> None:
    """A name that no test has any more, or more than 15 % of tests that it does not know, is a stale file."""
    if not sampling.LEFT_OUT.exists():
        pytest.skip("there is no such file: a plain run takes every test")
    collected = request.config.stash[sampling.COLLECTED]
    if any("::" in argument for argument in request.config.args) or request.config.option.keyword:
        pytest.skip("some tests were named")
    files = {name.partition("::")[0] for name in collected}
    names = {*collected, *(name.partition("[")[0] for name in collected)}
    of = {name: name.partition("::")[0] for name in sampling.listed()}
    gone = [n for n in of if (of[n] in files and n not in names) or not (sampling.ROOT / of[n]).exists()]
    assert gone == [], UPDATE
    if {*of.values()} <= files:
        assert len(collected) <= 1.15 * sampling.recorded_count(), UPDATE


SAME = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_it(n, tmp_path, monkeypatch):
    (tmp_path / "same.py").write_text(f"number = {n}")
    monkeypatch.syspath_prepend(tmp_path)
    import same
    assert same.number == n
"""


def test_modules_of_one_name_in_two_tests_are_two(project: pytest.Pytester) -> None:
    project.makepyfile(SAME)
    project.runpytest().assert_outcomes(passed=2)


TWO = """
import os, time
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_it(n):
    with open("used.txt", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], os.environ["LNGEN_CACHE_DIR"], file=file)
    time.sleep(0.3)
"""


@pytest.mark.full
def test_the_workers_of_a_run_share_a_cache(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run without a kept folder has another one."""
    pytest.importorskip("xdist")
    project.makepyfile(TWO)
    monkeypatch.setenv("PYTHONPATH", SEARCH)
    monkeypatch.setenv("LNGEN_TEST_CACHE", "")

    def used() -> str:
        file = project.path / "used.txt"
        file.unlink(missing_ok=True)
        project.runpytest_subprocess("-n", "2").assert_outcomes(passed=2)
        workers, folders = zip(*map(str.split, file.read_text().splitlines()), strict=True)
        assert {*workers} == {"gw0", "gw1"}
        (folder,) = {*folders}
        return folder

    assert used() != used()
    monkeypatch.setenv("LNGEN_TEST_CACHE", str(project.path / "kept"))
    assert used() == str(project.path / "kept")


@pytest.mark.parametrize(("environment", "wanted"), [
    ({}, "home/lngen-tests"),
    ({"LNGEN_TEST_CACHE": "/named"}, "/named"),
    ({"LNGEN_TEST_CACHE": ""}, "run"),
    ({"CI": "true"}, "run"),
    ({"CI": "true", "LNGEN_TEST_CACHE": "/named"}, "/named"),
])  # fmt: skip
def test_where_kernels_are_kept(
    environment: dict[str, str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert kept_cache.folder(environment, tmp_path / "run") == tmp_path / wanted


def test_a_kept_folder_has_a_bound(tmp_path: Path) -> None:
    """What was used longest ago goes, and what could be stale: a database of the tuner."""
    for age, name in enumerate(("kernels/a/1", "templates/2", "torch/3/x", "kernels/b/4", "tune/trials.jsonl")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    kept_cache.tidy(tmp_path, 300)
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"1", "2", "x"}
    kept_cache.tidy(tmp_path / "none")
