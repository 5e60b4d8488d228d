"""If these fail, a named graph moves more than it must, a default spills, or generated/family.json is out of date."""

import json
import re
from itertools import product

import pytest

import sampling
from family_table import ARCHES, DTYPE, SPILL_DTYPES, SPILL_WIDTHS, WIDTHS, floor_units, moved, specs
from lngen.compiler.compile import Compilation
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.spec import parse_spec
from paths import ROOT
from spills import REPORTED, case, default

pytest.importorskip("cupy")

TABLE = {row["spec"]: row for row in json.loads((ROOT / "generated" / "family.json").read_text())}
CASES = [*product(GRAPHS, ("fwd", "bwd"), WIDTHS)]
LONGEST = max(WIDTHS)
SPILLS = [
    (name, way, d, dtype, arch)
    for name, way, d, dtype, arch in product(GRAPHS, ("fwd", "bwd"), SPILL_WIDTHS, SPILL_DTYPES, ARCHES)
]


def test_the_table_has_every_graph() -> None:
    assert set(TABLE) == {str(spec) for name in GRAPHS for spec in specs(name)}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_table_is_at_the_floor_and_without_spills(name: str) -> None:
    for spec in specs(name):
        row = TABLE[str(spec)]
        assert row["floor"] == floor_units(spec), spec
        assert row["moved"] == row["floor"] or spec.by_sets, spec  # drawn samples have few rows, and many partial sums
        assert set(row["arches"]) == set(ARCHES)
        assert all(found["spilled"] == 0 for found in row["arches"].values()), spec


@sampling.rotating(("name", "way", "d"), [case for case in CASES if case[2] < LONGEST])
def test_the_table_is_what_the_kernels_move(name: str, way: str, d: int) -> None:
    assert_moved(name, way, d)


# A third of the long rows, which take longest; `python tests/proof/family_table.py` takes all.
@pytest.mark.full(sample=False)
@pytest.mark.parametrize(("name", "way", "d"), [case for case in CASES if case[2] == LONGEST][::3])
def test_the_table_is_what_the_kernels_of_long_rows_move(name: str, way: str, d: int) -> None:
    assert_moved(name, way, d)


def assert_moved(name: str, way: str, d: int) -> None:
    spec = parse_spec(f"{name}.{way}:d={d},dtype={DTYPE}")
    assert moved(spec, Compilation(spec)) == {k: v for k, v in TABLE[str(spec)].items() if k != "arches"}


# A sample of the grid of 1,836 that `python tests/proof/family_table.py --spills` compiles in an hour of one core.
@sampling.rotating(("name", "way", "d", "dtype", "arch"), SPILLS[7::62])
def test_defaults_do_not_spill(name: str, way: str, d: int, dtype: str, arch: str) -> None:
    compilation = Compilation(parse_spec(f"{name}.{way}:d={d},dtype={dtype}"))
    assert compilation.kernels(compilation.schedule(arch)).spilled(arch) == 0


@sampling.rotating(("text", "arch"), REPORTED)
def test_column_sums_that_no_registers_hold_do_not_spill(text: str, arch: str) -> None:
    spilled, schedule = default(text, arch)
    assert (spilled, schedule.form) == (0, "multipass")


# The first of those that `python tests/proof/spills.py` compiles.
@sampling.rotating("number", range(24))
def test_random_defaults_do_not_spill(number: int) -> None:
    assert default(*case(number))[0] == 0


def test_the_page_has_the_units_of_every_graph() -> None:
    page = (ROOT / "lngen" / "docs" / "family.md").read_text()
    units = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (\d, \d) \|", page, re.MULTILINE))
    assert units == {
        name: ", ".join(f"{TABLE[f'{name}.{way}:d=1024,dtype={DTYPE}']['floor']:g}" for way in ("fwd", "bwd"))
        for name in GRAPHS
    }
