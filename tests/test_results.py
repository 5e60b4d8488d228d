"""If these fail, a figure of the README or of a page is not that of its record, or its text is hard to read."""

import re
from functools import cache

import pytest

from lngen.bench.records import Record, geometric_mean
from lngen.bench.store import Saved, read_json
from paths import ROOT
from prose import LINK, prose, sentences, words

README, RESULTS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "lngen/docs/results.md"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "lngen/docs").glob("*.md"))}
NORMS, OTHERS, FAMILY, FEW = "h100-norms", "h100-norms-f16-f32", "h100-family", "h100-few-rows"
CONTRIBUTING = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
TEXTS = {"README": README, "CONTRIBUTING": CONTRIBUTING, **PAGES}
SHOWN = {"torch": "torch", "compile": "torch.compile", "liger": "Liger", "quack": "QuACK"}
GRAPHS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
DIRECTIONS = {"forward": "fwd", "backward": "bwd"}
BOTH = [(graph, direction) for graph in GRAPHS.values() for direction in DIRECTIONS.values()]


@cache
def saved(name: str) -> Saved:
    return read_json(ROOT / "generated" / "bench" / f"{name}.json")


def records(name: str, **wanted: object) -> list[Record]:
    return [r for r in saved(name).records if all(getattr(r, key) == value for key, value in wanted.items())]


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose head begins so, without the head and without emphasis."""
    lines = text[text.index(f"| {heading}") :].partition("\n\n")[0].splitlines()[2:]
    assert lines
    return [[cell.strip().replace("*", "").replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


# ---- figures ----


@cache
def steps() -> dict[tuple[str, str], list[str]]:
    """By family and tokens: eager ms, patched ms, times, Liger's ms, times."""
    lines = (ROOT / "generated/bench/h100-transformers.txt").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    return {(name, tokens): rest for name, tokens, *rest in cells}


def family(shown: str) -> str:
    return shown.lower().replace(" ", "").replace("-", "")


def test_the_models_of_the_readme_are_those_of_the_record() -> None:
    found = table(README, "model | eager")
    for shown, eager, patched, times, liger, few in found:
        many = steps()[family(shown), "8192"]
        assert [eager, patched, times, liger] == [*many[:3], many[4]]
        assert few == steps()[family(shown), "512"][2]
    assert len(found) * 2 == len(steps())


def test_the_models_of_the_results_are_those_of_the_record() -> None:
    found = table(RESULTS, "model | 8192")
    for shown, *cells in found:
        both = [steps()[family(shown), tokens] for tokens in ("8192", "512")]
        assert cells == [cell for found in both for cell in (*found[:3], found[4])]
    assert len(found) * 2 == len(steps())


def test_the_kernels_of_the_readme_are_those_of_the_record() -> None:
    for kernel, shape, *cells in table(README, "kernel"):
        graph, direction = kernel.split()
        rows, d = map(int, shape.split(" x "))
        here = records(NORMS, graph=GRAPHS[graph], direction=DIRECTIONS[direction], rows=rows, d=d)
        speeds = {r.provider: f"{r.gb_s:.0f}" for r in here if r.gb_s is not None}
        ceiling = speeds["copy" if direction == "forward" else "add"]
        assert cells == [ceiling, *(speeds.get(name, "") for name in ("lngen", *SHOWN))]


def test_the_fastest_of_the_readme_is_bold() -> None:
    lines = README[README.index("| kernel") :].partition("\n\n")[0].splitlines()[2:]
    for line in lines:
        _, _, _, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        most = max(int(cell.strip("*")) for cell in cells if cell)
        assert [cell for cell in cells if cell.startswith("*")] == [f"**{most}**"]


def told(r: Record) -> str:
    assert r.ratio is not None
    return f"{r.ratio:.2f} {SHOWN[r.best_peer]}"


def test_the_nine_shapes_are_those_of_the_record() -> None:
    for shape, *cells in table(RESULTS, "rows x D"):
        rows, d = map(int, shape.split(" x "))
        for cell, (graph, direction) in zip(cells, BOTH, strict=True):
            (r,) = records(NORMS, graph=graph, direction=direction, rows=rows, d=d, provider="lngen")
            assert cell == f"{r.fraction:.2f}; {told(r)}"


def mean(found: list[Record], *, ahead: bool = False) -> str:
    ratios = [r.ratio for r in found if r.ratio is not None]
    count = f"{sum(ratio >= 1 for ratio in ratios)}, " if ahead else ""
    return f"{geometric_mean(ratios):.2f} ({count}{min(ratios):.2f})"


def test_the_means_are_those_of_the_records() -> None:
    for what, *cells in table(RESULTS, "| LayerNorm forward"):
        dtype, way = what.split(", ")
        provider = "lngen-overlapped" if way == "overlapped" else "lngen"
        name = NORMS if dtype == "bf16" else OTHERS
        for cell, (graph, direction) in zip(cells, BOTH, strict=True):
            assert cell == mean(records(name, graph=graph, direction=direction, dtype=dtype, provider=provider))


def test_the_family_is_that_of_the_record() -> None:
    found = table(RESULTS, "graph | forward")
    for graph, *cells in found:
        both = [records(FAMILY, graph=graph, direction=d, provider="lngen")[0] for d in DIRECTIONS.values()]
        assert cells == [cell for r in both for cell in (f"{r.fraction:.2f}", told(r))]
    assert {graph for graph, *_ in found} == {r.graph for r in saved(FAMILY).records}


@pytest.mark.parametrize(("page", "ways"), [
    ("README", [("in turn", "lngen"), ("between GEMMs", "lngen"), ("between GEMMs", "lngen-overlapped")]),
    ("results", [(kind, name) for kind in ("in turn", "between GEMMs") for name in ("lngen", "lngen-overlapped")]),
])  # fmt: skip
def test_few_rows_are_those_of_the_record(page: str, ways: list[tuple[str, str]]) -> None:
    for graph, *cells in table(README if page == "README" else RESULTS, "graph | in turn"):
        for cell, (kind, name) in zip(cells, ways, strict=True):
            found = records(FEW, graph=graph, kind=kind, provider=name)
            assert len(found) == 63
            assert cell == mean(found, ahead=page == "results")


CALLS = {
    "norm.forward(x, ...), torch tensors": ("lngen", "torch"),
    "norm.forward(x, ..., out=y), torch tensors": ("lngen, out given", "torch"),
    "F.layer_norm, F.rms_norm": ("torch", "torch"),
    "norm.forward(x, ...), CuPy arrays": ("lngen", "cupy"),
    "norm.forward(x, ..., out=y), CuPy arrays": ("lngen, out given", "cupy"),
}


def test_host_times_are_those_of_the_record() -> None:
    found = table(RESULTS, "call | LayerNorm")
    for call, *cells in found:
        mine = [h for h in saved(NORMS).host if (h.call, h.arrays) == CALLS[call]]
        assert cells == [f"{h.us_median:.1f}" for h in mine]
    assert len(found) == len(CALLS)


def test_every_record_of_figures_has_its_command() -> None:
    """That is: the results page writes each benchmark it names, on an H100."""
    named = set(re.findall(r"generated/bench/(h100-[\w-]+\.json)", README + RESULTS))
    written = set(re.findall(r"--out generated/bench/([\w-]+\.json)", RESULTS))
    assert named == written == {f"{name}.json" for name in (NORMS, OTHERS, FAMILY, FEW)}


def test_generated_files_take_less_than_four_megabytes() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "generated").rglob("*") if path.is_file()) < 4_000_000


# ---- words ----

MOST = 25  # words of a sentence


@pytest.mark.parametrize("name", TEXTS)
def test_a_sentence_is_short(name: str) -> None:
    found = [*sentences(TEXTS[name])]
    assert len(found) > (5 if name == "glossary" else 15)  # the glossary is tables
    assert [s for s in found if len(words(s)) > MOST] == []


@pytest.mark.parametrize(("text", "counts"), [
    ("# No\n\n| no |\n\nIt is `a b c` here.\nSo " + "on " * 30 + "it goes.\n\n    no code\n", [4, 33]),
    ("- One item\n- and another.\n1. A first\n2. and a second, with a table:\n\n   | no |\n", [2, 2, 2, 6]),
    ("**A start.** It goes on. **Another**: why? lngen says so. It is a.b of x. y is not new.", [2, 3, 2, 3, 9]),
])  # fmt: skip
def test_a_sentence_is_counted(text: str, counts: list[int]) -> None:
    assert [len(words(s)) for s in sentences(text)] == counts


# What a reader of the README may not know: its first use is a link to the place that explains it.
LINKED = (
    "schedule", "spec", "pack", "interpreter", "lock file", "floor bytes", "in turn", "cold", "ceiling", "fractions",
    "times the best peer", "between GEMMs", "early start",
)  # fmt: skip


@pytest.mark.parametrize("word", LINKED)
def test_the_readme_links_a_word_where_it_is_first_used(word: str) -> None:
    text = prose(README) + "\n".join(line for line in README.splitlines() if line.startswith("| graph | in turn"))
    linked = [found.span(1) for found in LINK.finditer(text)]
    text = LINK.sub(lambda found: f"[{found[1]}](" + " " * (len(found[0]) - len(found[1]) - 4) + ")", text)
    first = re.search(rf"\b{word}\b".replace(" ", r"\s+"), text)
    assert first is not None
    assert any(start <= first.start() < end for start, end in linked)


@pytest.mark.parametrize("text", [README, *PAGES.values()], ids=["README", *PAGES])
def test_a_link_to_a_heading_finds_it(text: str) -> None:
    folder = ROOT if text is README else ROOT / "lngen/docs"
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        target = (folder / path).read_text(encoding="utf-8") if path else text
        headings = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


# Words that mean something of their own in lngen. A page may use them because the glossary has them.
OWN = (
    "acquire shared", "between GEMMs", "broadcast", "by value", "cached weights", "ceiling", "class of rows", "cold",
    "conformance", "contract", "cotangent", "direct way", "dispatch", "dynamic scheduler", "early release",
    "early start", "equation", "expansion", "finish", "floor bytes", "form", "fraction", "golden set", "host time",
    "image", "in turn", "interpreter", "kernel set", "leading dimension", "lock file", "multipass", "mutant", "oracle",
    "overlapped", "pack", "partial sums", "peer", "persistent", "phase", "pipeline stage", "plan", "policy", "point",
    "prefetch", "preload", "PTX executor", "record", "row group", "row stride", "schedule", "segment", "single launch",
    "spec", "spread", "static scheduler", "statistic", "sweep", "times the best peer", "TMA store", "trial",
    "unaligned TMA", "unit", "variant", "workload class", "workspace",
)  # fmt: skip


def test_the_glossary_has_lngens_words() -> None:
    terms = "\n".join(re.findall(r"^\| (.*?) \|", PAGES["glossary"], re.MULTILINE))
    pages = "\n".join([README, *(text for name, text in PAGES.items() if name != "glossary")])
    used = [word for word in OWN if re.search(rf"\b{word}", pages, re.IGNORECASE)]
    assert [word for word in used if not re.search(rf"\b{word}\b", terms, re.IGNORECASE)] == []
    assert len(used) > 50


def test_the_results_page_is_two_pages() -> None:
    assert len(RESULTS.splitlines()) <= 150


def test_the_readme_shows_results_after_two_screens() -> None:
    before, _, _ = README.partition("\n## Results\n")
    assert len(before.splitlines()) <= 110
