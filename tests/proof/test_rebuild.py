"""The table of what kernels take before and after a change of the emission, and the golden set held to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lngen.aot import catalog
from lngen.bench.grids import WIDTHS
from lngen.config import data_dir
from lngen.spec import parse_spec

pytest.importorskip("cupy")

import rebuild

TABLE = data_dir("generated") / "rebuild.json"
GOLDEN = [{"spec": spec, "schedule": schedule} for spec, schedule in catalog.CATALOG.items()]


def kernel(**changes: int) -> dict[str, int]:
    """What a kernel takes."""
    return {"registers": 64, "spills": 0, "shared": 512, "ptx": 400, "sass": 500, **changes}


def case(**kernels: dict[str, int]) -> dict[str, Any]:
    """A case whose row kernel took what ``kernel()`` says, and takes what ``rows`` says."""
    return {"spec": "layernorm.fwd:d=64", "schedule": "form=registers", "before": {"rows": kernel()}, "after": kernels}


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (kernel(registers=66, sass=510, shared=9999, ptx=9999), []),
        (kernel(registers=67), ["rows: registers 64 -> 67"]),
        (kernel(sass=511), ["rows: sass instructions 500 -> 511 (1.022)"]),
        (kernel(spills=4), ["rows: 4 bytes spilled, before 0"]),
    ],
)
def test_what_a_kernel_may_take(after: dict[str, int], said: list[str]) -> None:
    assert [text for _, text in rebuild.excesses(case(rows=after))] == said


def test_without_machine_instructions_those_of_the_ptx_count() -> None:
    after = kernel(ptx=409)
    del after["sass"]
    assert [text for _, text in rebuild.excesses(case(rows=after))] == ["rows: ptx instructions 400 -> 409 (1.022)"]


def test_a_kernel_more_and_a_kernel_less() -> None:
    assert [text for _, text in rebuild.excesses(case(finish=kernel()))] == [
        "finish: kernel added",
        "rows: kernel gone",
    ]


def test_the_worst_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case(rows=kernel(registers=registers)) for registers in (70, 66, 90)]
    assert rebuild.compare({"cases": [*cases, {**cases[0], "after": None}]}) == 2
    said = capsys.readouterr().out
    assert said.index("64 -> 90") < said.index("64 -> 70")
    assert "3 of 4 cases in both columns, 2 take more than they may" in said
    assert "registers: 1.1771 times in all, +26 at most, over 3 kernels" in said


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new table has two cases."""
    monkeypatch.setattr(rebuild, "cases", lambda: iter([dict(c) for c in GOLDEN[:2]]))


def test_a_table_is_filled_from_where_it_was_left(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    rebuild.main([str(path), "--column", "before"])
    first, second = json.loads(path.read_text())["cases"]
    assert first["before"].keys() == second["before"].keys() == {"rows"}
    counts = first["before"]["rows"]
    assert 16 < counts["registers"] <= 255
    assert counts["ptx"] > 100
    assert counts["spills"] == 0
    done = []
    monkeypatch.setattr(rebuild, "counts", lambda case: done.append(case["spec"]) or {"rows": kernel()})
    rebuild.main([str(path), "--column", "before"])
    assert done == []
    rebuild.main([str(path), "--column", "after"])
    rebuild.main([str(path), "--column", "after", "--again"])
    assert done == [case["spec"] for case in GOLDEN[:2]] * 2
    assert json.loads(path.read_text())["cases"][0]["before"] == first["before"]


def test_another_nvrtc_counts_otherwise(few: None, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    rebuild.write(path, {"nvrtc": [1, 0], "cases": []})
    with pytest.raises(SystemExit, match=r"was measured with NVRTC \[1, 0\]"):
        rebuild.main([str(path), "--column", "after"])


SASS = """\
//--------------------- .text.k__rows      --------------------------
        .section        .text.k__rows,"ax",@progbits
.text.k__rows:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   EXIT ;
.L_x_0:
        /*0030*/                   BRA `(.L_x_0);
        /*0040*/                   NOP;
"""


def test_machine_instructions_are_counted_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout = SASS

    monkeypatch.setattr(rebuild.shutil, "which", lambda name: name)
    monkeypatch.setattr(rebuild.subprocess, "run", lambda *args, **options: Done)
    assert rebuild.sass_instructions(b"") == {"k__rows": 4}
    monkeypatch.setattr(rebuild.shutil, "which", lambda name: None)
    assert rebuild.sass_instructions(b"") == {}


# ---- the table of this emission ----


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def test_the_table_has_the_golden_set_and_the_grid() -> None:
    cases = recorded()["cases"]
    found = {(c["spec"], c["schedule"]) for c in cases}
    assert found >= {*catalog.CATALOG.items()}
    specs = [parse_spec(spec) for spec, _ in found]
    for direction in ("fwd", "bwd"):
        for dtype in rebuild.DTYPES:
            assert {s.d for s in specs if (s.direction, s.dtype.value) == (direction, dtype)} >= {*WIDTHS}
    assert all(c["before"] for c in cases)
