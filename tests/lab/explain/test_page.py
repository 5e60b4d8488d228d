"""If these fail, the page shows a wrong connection, changes from run to run, or does not do what it says.

In a browser it is Chromium without a window, driven by Selenium.
"""

import base64
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from child import output, start
from commands import fails, prints
from explained import golden
from lngen.compiler.emit import emit
from lngen.compiler.toolchain.nvrtc import compiler_build
from lngen.config import data_dir
from lngen.lab.explain import Section, Subject, explain
from lngen.lab.explain.drawing import kernel_drawing, row_drawing, row_levels, trial_drawing
from lngen.lab.explain.line_map import Line, line_map, ptx_lines
from lngen.lab.explain.page import Version, built, golden_page, page, version
from lngen.lab.explain.section import Lines, Table, Text
from lngen.lab.inspect import sass
from lngen.lab.inspect.machine_code import kind
from lngen.lab.inspect.sass import Location
from lngen.packs.catalog import CATALOG, plans

ARCH = "sm_90"
GOLDEN, SMALL = "layernorm.bwd:d=4096,dtype=bf16", "rmsnorm.bwd:d=1024,dtype=bf16,wrt=x"
LARGEST = "layernorm.bwd:d=16384,dtype=bf16"
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update"
FLAGS += " disable-sync disable-quic"
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
    for text in ("sm_80", str(tmp_path / "pack")):
        command += ["--compare", text]
    files = tmp_path / "here.html", tmp_path / "there.html"
    prints(*command, "--html", files[0])
    output(start("from lngen.__main__ import main; main()", *command, "--html", str(files[1]), PYTHONHASHSEED="1"))
    assert files[0].read_bytes() == files[1].read_bytes()
    arch, pack = (compared["changes"] for compared in data_of(files[0].read_text())["compare"])
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


def test_nothing_is_cut() -> None:
    subject, kernels = shown(GOLDEN)
    html = page(subject, explain(subject), kernels)
    assert not re.findall(r"\w* ?(?:…|\.\.\.)(?![\w.])", html.partition('id="data"')[0].partition("</style>")[2])
    assert "ellipsis" not in html


# ---- in a browser ----


@cache
def shown(spec: str) -> tuple[Subject, Version]:
    return golden(spec), built(golden(spec).kernels, ARCH)


class Page:
    """The browser, with a page in a folder."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder, self.run = driver, folder, driver.execute_script

    def open(self, fragment: str = "", name: str = "page") -> int:
        """Open a page as a link does; how many ms it takes until it answers."""
        self.driver.get("about:blank")
        self.driver.get(f"{(self.folder / name).as_uri()}.html#{fragment}")
        ready = (self.run("return document.documentElement.dataset.ready") for _ in range(500))
        return int(next(filter(None, ready)))

    def size(self, width: int, height: int = 800) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.driver.switch_to.active_element.send_keys(*(getattr(Keys, key, key) for key in keys))

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def lit(self, *panes: str) -> dict[str, list[int]]:
        ids = self.run("return [...document.querySelectorAll('.lit')].map((e) => e.id.split('-'))")
        return {pane: [int(n) for of, n in ids if of == pane] for pane in panes or ("graph", "cuda", "ptx", "sass")}

    def state(self) -> str:
        return str(self.run("return location.hash"))

    def soon(self, css: str, texts: list[str]) -> bool:
        """Whether the texts are there within two seconds: a page follows its address when it has time."""
        return any(self.texts(css) == texts or time.sleep(0.02) for _ in range(100))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if not (BROWSER and DRIVER):
        pytest.skip("there is no Chromium with its chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    folder, options = tmp_path_factory.mktemp("pages"), webdriver.ChromeOptions()
    wide = Table(tuple("abcdefghijkl"), (("wide " * 9,) * 12,))
    sections = [Section("s", title, (Lines(("%xhat = " + "x * " * 99,)), wide)) for title in ("Cost", "Schedule")]
    subject, kernels = shown(SMALL)
    html = page(subject, sections, kernels, [version(subject, ARCH, "threads=32")])
    (folder / "page.html").write_text(html, encoding="utf-8")
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER, log_output=os.devnull)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        made = Page(driver, folder)
        made.size(1600)
        yield made
        assert driver.get_log("browser") == []  # of all tests together: no error, no warning
    finally:
        driver.quit()


@cache
def lines_of() -> dict[str, tuple[Line, ...]]:
    kernels = shown(SMALL)[0].kernels
    return {"ptx": ptx_lines(kernels.ptx(ARCH, lines=True), kernels.plan.name), "sass": shown(SMALL)[1].sass}


def expected(value: str) -> dict[str, list[int]]:
    """By pane the lines, from 1, that belong to a value, by the map of Python."""
    graph = shown(SMALL)[0].plan.graph
    found = line_map(shown(SMALL)[1].cuda, graph)
    names = [v.name for v in (*graph.params, *(e.out for e in graph.eqns))]
    mine = {n for n, s in enumerate(found.statements) if value in s.values}
    code = {p: [n for n, x in enumerate(lines, 1) if found.decides(x.where) in mine] for p, lines in lines_of().items()}
    return {"graph": [names.index(value) + 1], "cuda": [n for n, s in found.of_line.items() if s in mine], **code}


@pytest.mark.parametrize("value", ["xhat", "mean_dy_gamma_xhat_sum", "x"])
def test_an_equation_lights_its_lines_in_every_pane(browser: Page, value: str) -> None:
    browser.open()
    wanted = expected(value)
    browser.click(f"#graph-{wanted['graph'][0]}")
    assert browser.lit() == wanted
    assert all(wanted.values())
    assert browser.state() == f"#tab=source&sel=value:{value}"
    assert browser.texts("#status")[0].startswith(f"%{value}; CUDA lines {wanted['cuda'][0]}")


def test_the_keyboard_does_it_too_and_back_from_an_instruction(browser: Page) -> None:
    browser.open()
    wanted = expected("xhat")
    browser.run("document.querySelector('#pane-graph .lines').focus()")
    browser.press("HOME", *["ARROW_DOWN"] * (wanted["graph"][0] - 1), "ENTER")
    assert browser.lit() == wanted
    for pane in ("cuda", "ptx", "sass"):
        browser.press("ARROW_RIGHT")
        active = browser.run("return document.activeElement.getAttribute('aria-activedescendant')")
        assert active == f"{pane}-{wanted[pane][0]}"
    browser.press("n", "ENTER")
    assert browser.state() == f"#tab=source&sel=sass:{wanted['sass'][1]}"
    assert browser.lit("graph") == {"graph": wanted["graph"]}
    assert {*browser.lit("cuda")["cuda"]} < {*wanted["cuda"]}  # one of its statements
    browser.press("ESCAPE")
    assert not any(browser.lit().values())


def test_a_line_without_an_equation_names_the_function_it_comes_from(browser: Page) -> None:
    sass = lines_of()["sass"]
    number = next(n for n, line in enumerate(sass, 1) if line.where and line.where[0].function == "pdl_wait")
    browser.open(f"sel=sass:{number}")
    assert browser.lit("graph") == {"graph": []}
    assert browser.texts(f"#sass-{number} .from") == ["pdl_wait"]
    assert "from pdl_wait (launch.cuh:" in browser.texts("#status")[0]
    assert sass[number - 1].where[-1].line in browser.lit("cuda")["cuda"]


def test_a_link_shows_what_its_sender_saw(browser: Page) -> None:
    browser.open("tab=source&panes=graph,sass&sel=value:xhat")
    assert [head.split()[0] for head in browser.texts(".pane:not([hidden]) h2")] == ["Graph", "SASS"]
    assert browser.lit("sass") == {"sass": expected("xhat")["sass"]}
    browser.click("#tab-cost")
    assert browser.state() == "#tab=cost&panes=graph,sass&sel=value:xhat"
    browser.press("ARROW_RIGHT")
    assert browser.run("return document.activeElement.id") == "tab-schedule"
    assert browser.texts("[aria-selected=true][role=tab]") == ["Schedule"]
    browser.click("#schedule a")  # a value in a section
    assert browser.soon("[aria-selected=true][role=tab]", ["Source"])


PANES = {1600: 4, 1599: 2, 1280: 2, 390: 1}  # that a window of so many pixels shows


def test_no_tab_is_wider_than_the_window(browser: Page) -> None:
    browser.open()
    for tab in ("source", "plan", "cost", "schedule", "compare"):
        browser.click(f"#tab-{tab}")
        for width in PANES:
            browser.size(width)
            assert browser.run("return document.documentElement.scrollWidth") <= width, (tab, width)
    browser.size(1600)


@pytest.mark.parametrize("width", PANES)
def test_a_window_shows_the_panes_that_it_has_room_for(browser: Page, width: int) -> None:
    browser.size(width)
    browser.open("sel=value:xhat")
    assert len(browser.texts(".pane:not([hidden])")) == PANES[width]
    browser.click("#shown button:nth-child(4)")  # hides SASS among four, shows it instead of the one chosen first
    assert len(browser.texts(".pane:not([hidden])")) == min(PANES[width], 3)
    first = browser.run("return document.querySelector('#pane-sass .lit')?.getBoundingClientRect().top")
    assert width == 1600 or 0 < first < 800
    browser.run("document.querySelector('.pane:not([hidden]) .lines').focus()")
    browser.press(*["ARROW_RIGHT"] * 3)
    assert browser.run("return document.activeElement.parentNode.id") == ("pane-ptx" if width == 1600 else "pane-sass")
    browser.size(1600)


def test_it_starts_at_the_first_kernel(browser: Page) -> None:
    browser.open()
    tops = "return [...document.querySelectorAll('#pane-%s .row')].map((e) => e.getBoundingClientRect().top)"
    for pane, begins in {"cuda": 'extern "C" __global__', "ptx": ".visible .entry"}.items():
        lines = [line.text for line in lines_of()[pane]] if pane == "ptx" else shown(SMALL)[1].cuda.splitlines()
        first = next(n for n, text in enumerate(lines) if text.startswith(begins))
        top = browser.run(f"return document.querySelector('#pane-{pane} .lines').getBoundingClientRect().top")
        assert 0 <= browser.run(tops % pane)[first] - top <= 3 * 18, pane


def test_marks_are_beside_the_text(browser: Page) -> None:
    browser.size(2400, 1200)  # the whole graph fits
    browser.open("sel=value:xhat")
    boxes = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect())"
    (row,), (tick,) = (browser.run(boxes, f"#pane-graph {css}") for css in (".lit", ".ticks i"))
    assert row["top"] - 1 <= tick["top"] <= row["bottom"]
    for pane in ("cuda", "ptx", "sass"):
        (lines,), ticks = (browser.run(boxes, f"#pane-{pane} {css}") for css in (".lines", ".ticks i"))
        end = lines["left"] + browser.run(f"return document.querySelector('#pane-{pane} .lines').clientWidth")
        labels = browser.run(boxes, f"#pane-{pane} .lit .from")
        wanted, count = expected("xhat")[pane], len(browser.texts(f"#pane-{pane} .row"))
        places = [(tick["top"] - lines["top"]) / lines["height"] for tick in ticks]
        assert places == pytest.approx([n / count for n in wanted], abs=0.03)
        assert all(box["right"] < end + 1 for box in (*ticks, *labels)), pane
    browser.size(1600)


def test_a_comparison_marks_what_differs(browser: Page) -> None:
    browser.open("tab=compare&against=0&language=cuda")
    subject, kernels = shown(SMALL)
    mine, theirs = ({*v.cuda.splitlines()} for v in (kernels, version(subject, ARCH, "threads=32")))
    assert {*browser.texts("td.gone:not(.mark)")} >= mine - theirs
    assert {*browser.texts("td.come:not(.mark)")} >= theirs - mine
    before = len(browser.texts("#sides tr"))
    browser.click("#sides button")  # unfolds equal lines
    assert len(browser.texts("#sides tr")) > before
    browser.click("#language button[value=sass]")
    assert browser.state() == "#tab=compare&against=0&language=sass"
    assert any("FADD" in text for text in browser.texts("td.gone:not(.mark)"))


@pytest.mark.full
def test_the_largest_page_opens_in_a_second(browser: Page) -> None:
    """The best of three, since other tests run beside it."""
    subject, kernels = shown(LARGEST)
    html = page(subject, explain(subject, ["fusion", "schedule"]), kernels)
    assert len(html.encode()) < 1_500_000
    (browser.folder / "largest.html").write_text(html, encoding="utf-8")
    assert min(browser.open(name="largest") for _ in range(3)) < 1000


def test_there_are_two_themes(browser: Page) -> None:
    browser.open()
    grounds = []
    for _ in range(3):
        grounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
        browser.click("#theme")
    assert grounds[0] == grounds[2] != grounds[1]
