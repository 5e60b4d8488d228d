"""If these fail, a figure of the README or of the results page is not that of its record."""

import re
from collections.abc import Callable
from functools import cache

import pytest

from lngen.lab.bench.records import Record, geometric_mean
from lngen.lab.bench.store import Saved, read_json
from paths import ROOT

TOPICS = ("results", "quantised", "cross_entropy", "modulated", "heads")
PAGES = ("README.md", *(f"lngen/docs/{name}.md" for name in TOPICS))
README, RESULTS, QUANTISED, LOSSES, MODULATED, HEADS = ((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
NORMS, OTHERS, FAMILY, FEW = "h100-norms", "h100-norms-f16-f32", "h100-family", "h100-few-rows"
SHOWN = {"torch": "torch", "compile": "torch.compile", "liger": "Liger", "quack": "QuACK"}
OTHER_PEERS = {"flashinfer": "FlashInfer", "flashinfer-pdl": "FlashInfer PDL"}
GRAPHS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
DIRECTIONS = {"forward": "fwd", "backward": "bwd"}
BOTH = [{"graph": graph, "direction": direction} for graph in GRAPHS.values() for direction in DIRECTIONS.values()]
CALLS = {
    "norm.forward(x, ...), torch tensors": ("lngen", "torch"),
    "norm.forward(x, ..., out=y), torch tensors": ("lngen, out given", "torch"),
    "F.layer_norm, F.rms_norm": ("torch", "torch"),
    "norm.forward(x, ...), CuPy arrays": ("lngen", "cupy"),
    "norm.forward(x, ..., out=y), CuPy arrays": ("lngen, out given", "cupy"),
}


@cache
def saved(name: str) -> Saved:
    return read_json(ROOT / "generated" / "bench" / f"{name}.json")


def records(name: str, **wanted: object) -> list[Record]:
    return [r for r in saved(name).records if all(getattr(r, key) == value for key, value in wanted.items())]


@cache
def steps() -> dict[tuple[str, str], list[str]]:
    """By family and tokens: eager ms, patched ms, times, Liger's ms, times."""
    lines = (ROOT / "generated/bench/h100-transformers.txt").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    return {(name, tokens): rest for name, tokens, *rest in cells}


def step(shown: str, tokens: str) -> list[str]:
    """Eager ms, patched ms, times, Liger's times."""
    found = steps()[shown.lower().replace(" ", "").replace("-", ""), tokens]
    return [*found[:3], found[4]]


def kernel(name: str, shape: str) -> list[str]:
    graph, direction = name.split()
    rows, d = map(int, shape.split(" x "))
    here = records(NORMS, graph=GRAPHS[graph], direction=DIRECTIONS[direction], rows=rows, d=d)
    speeds = {r.provider: f"{r.gb_s:.0f}" for r in here if r.gb_s is not None}
    return [speeds["copy" if direction == "forward" else "add"], *(speeds.get(name, "") for name in ("lngen", *SHOWN))]


def told(r: Record) -> str:
    assert r.ratio is not None
    return f"{r.ratio:.2f} {(SHOWN | OTHER_PEERS)[r.best_peer]}"


def shape(text: str) -> list[str]:
    rows, d = map(int, text.split(" x "))
    found = [records(NORMS, **one, rows=rows, d=d, provider="lngen")[0] for one in BOTH]
    return [f"{r.fraction:.2f}; {told(r)}" for r in found]


def mean(found: list[Record], *, ahead: bool = False) -> str:
    ratios = [r.ratio for r in found if r.ratio is not None]
    count = f"{sum(ratio >= 1 for ratio in ratios)}, " if ahead else ""
    return f"{geometric_mean(ratios):.2f} ({count}{min(ratios):.2f})"


def means(what: str) -> list[str]:
    dtype, way = what.split(", ")
    provider = "lngen-overlapped" if way == "overlapped" else "lngen"
    return [mean(records(NORMS if dtype == "bf16" else OTHERS, **one, dtype=dtype, provider=provider)) for one in BOTH]


def of_family(graph: str) -> list[str]:
    both = [records(FAMILY, graph=graph, direction=d, provider="lngen")[0] for d in DIRECTIONS.values()]
    return [cell for r in both for cell in (f"{r.fraction:.2f}", told(r))]


def few(graph: str, *ways: str, ahead: bool = False) -> list[str]:
    found = [records(FEW, graph=graph, kind=kind, provider=name) for kind, name in (way.split(", ") for way in ways)]
    assert {len(one) for one in found} == {63}
    return [mean(one, ahead=ahead) for one in found]


SHAPES = ((16384, 4096), (8192, 7168), (4096, 4096))


def quantised(graph: str) -> list[str]:
    """Times the ceiling, and times the best peer where there is one."""
    name = "h100-dx" if "dx_quant" in graph else "h100-quantised"
    found = [records(name, graph=graph, rows=m, d=d, provider="lngen")[0] for m, d in SHAPES]
    return [f"{r.fraction:.2f}{f'; {told(r)}' if r.best_peer else ''}" for r in found]


def of_losses(graph: str) -> list[str]:
    """Times the ceiling, and microseconds, of lngen; those of QuACK, which compiles whole units of 16 bytes alone."""
    cells = list[str]()
    for m, d in ((8192, 32000), (4096, 128256), (8192, 50256), (8192, 50257), (4096, 128255)):
        name = "h200-losses-unaligned" if d % 8 else "h200-losses"
        own, *peers = (r for who in ("lngen", "quack") for r in records(name, graph=graph, rows=m, d=d, provider=who))
        other = "".join(f"; {peer.us_median:.0f} QuACK" for peer in peers)
        cells.append(f"{own.fraction:.2f}, {own.us_median:.0f} us{other}")
    return cells


def modulated(what: str) -> list[str]:
    graph, direction = what.rsplit(", ", 1)
    wanted = {"graph": graph, "direction": direction, "provider": "lngen"}
    return [f"{r.fraction:.2f}; {told(r)}" for m in (32768, 8192) for r in records("h100-modulated", **wanted, rows=m)]


def fractions(name: str, what: str, shapes: tuple[tuple[int, int], ...]) -> list[str]:
    """Times the ceiling, and times the best peer where there is one, of a graph and a direction at these shapes."""
    graph, direction = what.rsplit(", ", 1)
    wanted = {"graph": graph, "direction": direction, "provider": "lngen"}
    found = [records(name, **wanted, rows=m, d=d)[0] for m, d in shapes]
    return [f"{r.fraction:.2f}{f'; {told(r)}' if r.best_peer else ''}" for r in found]


def modulated_h200(what: str) -> list[str]:
    return fractions("h200-modulated", what, ((32768, 3072), (8192, 1536), (16384, 1152)))


def of_heads(what: str) -> list[str]:
    return fractions("h200-heads", what, ((4096, 5120), (16384, 5120)))


def of_other_heads(graph: str, d: str) -> list[str]:
    return [fractions("h200-heads", f"{graph}, {way}", ((4096, int(d)),))[0] for way in ("fwd", "bwd")]


def few_quantised(graph: str, d: str) -> list[str]:
    wanted = {"graph": graph, "d": int(d), "kind": "in turn", "provider": "lngen"}
    return [f"{records('h100-quantised-few-rows', **wanted, rows=m)[0].us_median:.2f}" for m in (1, 16, 64, 128, 256)]


WAYS = [f"{kind}, {name}" for kind in ("in turn", "between GEMMs") for name in ("lngen", "lngen-overlapped")]

# Of each table: the page, how its head begins, its rows, and what stands behind the first cells of a row.
TABLES: dict[str, tuple[str, str, int, Callable[..., list[str]]]] = {
    "models": (README, "model | eager", 8, lambda m: [*step(m, "8192"), step(m, "512")[2]]),
    "all models": (RESULTS, "model | 8192", 8, lambda m: [*step(m, "8192"), *step(m, "512")]),
    "kernels": (README, "kernel", 12, kernel),
    "nine shapes": (RESULTS, "rows x D", 9, shape),
    "means": (RESULTS, "| LayerNorm forward", 4, means),
    "family": (RESULTS, "graph | forward", 17, of_family),
    "few rows": (README, "graph | in turn", 3, lambda graph: few(graph, WAYS[0], *WAYS[2:])),
    "all of few rows": (RESULTS, "graph | in turn", 3, lambda graph: few(graph, *WAYS, ahead=True)),
    "quantised": (QUANTISED, "graph and keys | 16384", 11, quantised),
    "losses": (LOSSES, "graph and keys, forward", 2, of_losses),
    "modulated": (MODULATED, "graph and keys, direction", 2, modulated),
    "modulated, H200": (MODULATED, "graph and keys, direction, H200", 4, modulated_h200),
    "heads, H200": (HEADS, "graph and keys, direction, H200", 6, of_heads),
    "other heads, H200": (HEADS, "other heads, H200", 4, of_other_heads),
    "few quantised rows": (QUANTISED, "graph and keys, rows | D", 10, few_quantised),
    "host times": (RESULTS, "call | LayerNorm", len(CALLS), lambda call: [
        f"{h.us_median:.1f}" for h in saved(NORMS).host if (h.call, h.arrays) == CALLS[call]
    ]),
}  # fmt: skip


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose head begins so, without the head and without code."""
    lines = text[text.index(f"| {heading}") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("name", TABLES)
def test_figures_are_those_of_the_record(name: str) -> None:
    text, heading, count, wanted = TABLES[name]
    found = [[cell.replace("*", "") for cell in row] for row in table(text, heading)]
    assert len({row[0] + row[1] for row in found}) == count
    keys = wanted.__code__.co_argcount
    assert found == [[*row[:keys], *wanted(*row[:keys])] for row in found]


def test_every_model_and_graph_of_the_record_is_told() -> None:
    assert len(steps()) == 2 * TABLES["models"][2]
    assert {row[0] for row in table(RESULTS, "graph | forward")} == {r.graph for r in saved(FAMILY).records}


def test_the_fastest_of_the_readme_is_bold() -> None:
    for _, _, _, *cells in table(README, "kernel"):
        most = max(int(cell.strip("*")) for cell in cells if cell)
        assert [cell for cell in cells if cell.startswith("*")] == [f"**{most}**"]


def test_every_record_of_figures_has_its_command() -> None:
    """That is: the results page writes each benchmark it names, on an H100."""
    named = set(re.findall(r"generated/bench/(h100-[\w-]+\.json)", README + RESULTS))
    written = set(re.findall(r"--out generated/bench/([\w-]+\.json)", RESULTS))
    assert named == written == {f"{name}.json" for name in (NORMS, OTHERS, FAMILY, FEW)}


def test_generated_files_take_less_than_four_megabytes() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "generated").rglob("*") if path.is_file()) < 4_000_000
