"""If these fail, the page shows a wrong connection, changes from run to run, or lets a text become markup."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from child import output, start
from commands import fails, prints
from explained import golden
from lngen.aot.catalog import CATALOG, plans
from lngen.config import data_dir
from lngen.emit import emit
from lngen.explain import Section
from lngen.explain.drawing import kernel_drawing, row_drawing, row_levels, trial_drawing
from lngen.explain.line_map import line_map, ptx_lines
from lngen.explain.page import built, golden_page, page
from lngen.explain.section import Lines, Table, Text
from lngen.inspect import sass
from lngen.inspect.machine_code import kind
from lngen.inspect.sass import Location
from lngen.toolchain.nvrtc import compiler_build

ARCH = "sm_90"
GOLDEN, SMALL = "layernorm.bwd:d=4096,dtype=bf16", "rmsnorm.bwd:d=1024,dtype=bf16,wrt=x"
EVERY = [s if s == GOLDEN else pytest.param(s, marks=pytest.mark.full) for s in CATALOG]


def data_of(html: str) -> Any:
    (packed,) = re.findall(r'id="data">([^<]*)<', html)
    return json.loads(zlib.decompress(base64.b64decode(packed), -zlib.MAX_WBITS))


# ---- what belongs together ----


def test_every_value_has_statements_and_a_note_names_that_of_its_own() -> None:
    for plan in plans():
        text = emit(plan)
        found = line_map(text, plan.graph)
        noted = {n: line for n, line in enumerate(text.splitlines(), 1) if re.search(r"\S.*// %\w+ = ", line)}
        for number, line in noted.items():
            assert f"// %{found.statements[found.of_line[number]].values[0]} = " in line
        values = {v.name for v in (*plan.graph.params, *(e.out for e in plan.graph.eqns))}
        assert values == {value for s in found.statements for value in s.values}


def test_a_statement_without_a_note_has_the_values_that_it_moves() -> None:
    text = golden(GOLDEN).kernels.text
    found, lines = line_map(text, golden(GOLDEN).plan.graph), text.splitlines()
    by_code = {lines[s.first - 1].strip(): s for s in found.statements}
    assert by_code["load_row<Row, PlainLoad>(x_row_, x_shared_);"].values == ("x",)
    alone = "stream_.wait();", 'extern "C" __global__ void __launch_bounds__(256, 1)'
    assert [by_code[code].values for code in alone] == [(), ()]
    sums = next(s for code, s in by_code.items() if code.startswith("row_sums<"))
    assert (sums.last - sums.first, sums.values) == (1, ("mean_dy_gamma_sum", "mean_dy_gamma_xhat_sum"))
    header, *kernel = Location("lngen/a.cuh", 1, "f"), *(Location("k.cu", sums.first + n, "k") for n in (2, 3, 0))
    inner, outer = found.of_line[sums.first + 3], found.of_line[sums.first]
    assert [found.decides(where) for where in ([header, *kernel], kernel[2:], [header])] == [inner, outer, None]


@pytest.mark.parametrize("spec", EVERY)
def test_ptx_and_machine_code_have_their_equations(spec: str) -> None:
    """The PTX is that without line numbers; half of the arithmetic has an equation, and all code a function."""
    kernels = golden(spec).kernels
    shown = [line.text.split() for line in ptx_lines(kernels.ptx(ARCH, lines=True), kernels.plan.name)]
    assert [words for words in shown if words] == [w for w in map(str.split, kernels.ptx(ARCH).splitlines()) if w]
    found = line_map(kernels.text, kernels.plan.graph)
    code = [i for kernel in built(kernels, ARCH).codes for i in kernel.code]
    values = {i: found.statements[n].values if (n := found.decides(i.where)) is not None else () for i in code}
    fp32 = [bool(v) for i, v in values.items() if kind(i) == "FP32"]
    assert sum(fp32) >= 0.5 * len(fp32) > 0
    assert all(i.where and i.where[0].function for i in code)
    products = {e.out.name for e in kernels.plan.graph.eqns if e.op == "mul"}
    assert products & {v for i, named in values.items() if i.opcode == "FMUL" for v in named}


# ---- drawings ----


def test_drawings_are_svg_and_each_level_of_a_row_is_divided() -> None:
    for plan in plans():
        assert all(count > 1 for _, count, _ in row_levels(plan))
        for drawing in (row_drawing(plan), *(kernel_drawing(k, plan) for k in plan.kernels)):
            ElementTree.fromstring(drawing)


def test_trials_are_points_and_the_chosen_one_is_marked() -> None:
    trials = [{"schedule": f"vec={n}", "predicted_us": n + 1.0, "measured_us": n + 2.0} for n in range(3)]
    failed = [{"schedule": "vec=9", "predicted_us": 1.0, "measured_us": None}]
    circles = [e for e in ElementTree.fromstring(trial_drawing(trials + failed, "vec=1")) if e.tag == "circle"]
    assert [c.get("class") for c in circles] == ["trial", "trial", "chosen"]
    assert len({c.get("cx") for c in circles}) == 3
    assert trial_drawing(failed, "vec=9") == ""


# ---- the file ----


def test_texts_are_no_markup_and_values_are_links() -> None:
    bad = "<script>alert('%x')</script>&\"%nobody"
    blocks = Text(bad), Lines((bad,), bad), Table((bad,), ((bad,),), bad)
    subject = golden(SMALL)
    html = page(subject, [Section("s", "A <b>title", blocks, {"trials": []})], built(subject.kernels, ARCH))
    assert (html.count("<script"), html.count("<b>")) == (2, 0)
    assert html.count('alert(&#39;<a href="#tab=source&amp;sel=value:x">%x</a>&#39;)') == 3
    assert "%nobody</a>" not in html
    assert not re.findall(r'(?:src|href)="(?!#|data:,")', html)


def test_a_page_and_its_comparisons_are_the_same_in_another_process(tmp_path: Path) -> None:
    prints("build", SMALL, "--arch", ARCH, "--schedule", CATALOG[SMALL], "--out", tmp_path / "pack")
    command = ["explain", SMALL, "--schedule", CATALOG[SMALL], "--only", "fusion"]
    for text in ("vec=4", "sm_80", str(tmp_path / "pack")):
        command += ["--compare", text]
    files = tmp_path / "here.html", tmp_path / "there.html"
    prints(*command, "--html", files[0])
    output(start("from lngen.__main__ import main; main()", *command, "--html", str(files[1]), PYTHONHASHSEED="1"))
    assert files[0].read_bytes() == files[1].read_bytes()
    schedule, arch, pack = (compared["changes"] for compared in data_of(files[0].read_text())["compare"])
    assert schedule["cuda"]
    assert (arch["cuda"], bool(arch["sass"])) == ([], True)
    assert (len(pack["cuda"]), pack["sass"]) == (1, [])  # the line that says how to compile it


@pytest.mark.full
def test_all_pages_and_their_index(tmp_path: Path) -> None:
    assert len(prints("explain", "--all", "--html", tmp_path).splitlines()) == len(CATALOG) + 1
    listed = re.findall(r'href="([^":#]+)"', (tmp_path / "index.html").read_text())
    assert sorted(listed) == sorted(f"{p.name}.html" for p in plans())
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 1_500_000


def test_what_cannot_be_compared_or_disassembled_leaves_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "explain", SMALL, "--html", tmp_path / "page.html", "--only", "fusion"
    assert "vec divides" in fails(2, *short, "--compare", "vec=3")
    assert "expected to be a pack" in fails(2, *short, "--compare", tmp_path)
    sass._text.cache_clear()
    monkeypatch.setattr(sass, "PACKAGE", "no-such-package")
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    assert "[cuda13]" in fails(3, *short)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("file", sorted((data_dir("generated") / "pages").glob("*.html")), ids=lambda path: path.stem)
def test_a_committed_page_is_current(file: Path) -> None:
    """The deflated bytes differ from one zlib to another, what they hold does not; machine code is of one compiler."""
    html = file.read_text(encoding="utf-8")
    (release,) = re.findall(r"release (.*)", compiler_build())
    if f"NVRTC {release}<" not in html:
        pytest.skip(f"this is NVRTC {release}, and the page is of another")
    (spec,) = (spec for spec in CATALOG if golden(spec).plan.name == file.stem)
    _, wanted, _ = golden_page(spec)
    assert data_of(html) == data_of(wanted), "write it again: lngen explain SPEC --schedule SCHEDULE --html FILE"
    assert re.sub(r'id="data">[^<]*', "", html) == re.sub(r'id="data">[^<]*', "", wanted)
