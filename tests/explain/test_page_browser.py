"""If these fail, the page does not do in a browser what it says: Chromium without a window, driven by Selenium."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from explained import golden
from lngen.explain import Section, Subject, explain
from lngen.explain.line_map import Line, line_map, ptx_lines
from lngen.explain.page import Version, built, page, version
from lngen.explain.section import Lines, Table

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no Chromium with its chromedriver")
FLAGS = "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update"
FLAGS += " disable-sync disable-quic"
SPEC, LARGEST, ARCH = "layernorm.bwd:d=4096,dtype=bf16", "layernorm.bwd:d=16384,dtype=bf16", "sm_90"


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
    webdriver = pytest.importorskip("selenium.webdriver")
    folder, options = tmp_path_factory.mktemp("pages"), webdriver.ChromeOptions()
    wide = Table(tuple("abcdefghijkl"), (("wide " * 9,) * 12,))
    sections = [Section("s", title, (Lines(("%xhat = " + "x * " * 99,)), wide)) for title in ("Cost", "Schedule")]
    subject, kernels = shown(SPEC)
    html = page(subject, sections, kernels, [version(subject, ARCH, "threads=256")])
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
    kernels = shown(SPEC)[0].kernels
    return {"ptx": ptx_lines(kernels.ptx(ARCH, lines=True), kernels.plan.name), "sass": shown(SPEC)[1].sass}


def expected(value: str) -> dict[str, list[int]]:
    """By pane the lines, from 1, that belong to a value, by the map of Python."""
    graph = shown(SPEC)[0].plan.graph
    found = line_map(shown(SPEC)[1].cuda, graph)
    names = [v.name for v in (*graph.params, *(e.out for e in graph.eqns))]
    mine = {n for n, s in enumerate(found.statements) if value in s.values}
    code = {p: [n for n, x in enumerate(lines, 1) if found.decides(x.where) in mine] for p, lines in lines_of().items()}
    return {"graph": [names.index(value) + 1], "cuda": [n for n, s in found.of_line.items() if s in mine], **code}


@pytest.mark.parametrize("value", ["xhat", "mean_dy_gamma_sum", "x"])
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
    number = next(n for n, line in enumerate(sass, 1) if line.where and line.where[0].function == "mbarrier_wait")
    browser.open(f"sel=sass:{number}")
    assert browser.lit("graph") == {"graph": []}
    assert browser.texts(f"#sass-{number} .from") == ["mbarrier_wait"]
    assert "from mbarrier_wait (mbarrier.cuh:" in browser.texts("#status")[0]
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


@pytest.mark.parametrize("width", PANES)
def test_no_tab_is_wider_than_the_window(browser: Page, width: int) -> None:
    browser.size(width)
    for tab in ("source", "plan", "cost", "schedule", "compare"):
        browser.open(f"tab={tab}")
        assert browser.run("return document.documentElement.scrollWidth") <= width, tab
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
        lines = [line.text for line in lines_of()[pane]] if pane == "ptx" else shown(SPEC)[1].cuda.splitlines()
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


def test_nothing_is_cut() -> None:
    subject, kernels = shown(SPEC)
    html = page(subject, explain(subject), kernels)
    assert not re.findall(r"\w* ?(?:…|\.\.\.)(?![\w.])", html.partition('id="data"')[0].partition("</style>")[2])
    assert "ellipsis" not in html


def test_a_comparison_marks_what_differs(browser: Page) -> None:
    browser.open("tab=compare&against=0&language=cuda")
    subject, kernels = shown(SPEC)
    mine, theirs = ({*v.cuda.splitlines()} for v in (kernels, version(subject, ARCH, "threads=256")))
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
