"""If these fail, ``lngen help`` lacks a page of ``lngen/docs``, a page names what is not there, or an example fails."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

import lngen
from commands import call, fails, prints
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from host_tensors import pass_for_gpu_tensors
from lngen.cli import COMMANDS, cli, installation
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.ir import Value
from lngen.compiler.problem import Schedule
from lngen.compiler.problem.schedule import FORMS
from lngen.compiler.spec.parse import MAX_D
from lngen.launch import driver
from paths import ROOT

TOPICS = (
    "adding", "c", "cross_entropy", "family", "glossary", "graph", "heads", "inspect", "layout", "manifest",
    "modulated", "numbers", "numerics", "packs", "performance", "quantised", "reference", "results", "testing", "torch",
)  # fmt: skip
PAGES = {path.stem: path for path in sorted((ROOT / "lngen" / "docs").glob("*.md"))}
TEXTS = {
    **{f"docs/{name}": path.read_text(encoding="utf-8") for name, path in PAGES.items()},
    **{name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".github/CONTRIBUTING.md")},
}


# ---- lngen help ----


def test_help_lists_every_page_with_its_title() -> None:
    assert tuple(PAGES) == TOPICS
    text = call("help").stdout
    for name, path in PAGES.items():
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert re.search(rf"^\| {name} +\| {re.escape(title)} +\|$", text, re.MULTILINE)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_is_its_source_in_a_pipe(topic: str, tmp_path: Path) -> None:
    text = PAGES[topic].read_text(encoding="utf-8")
    assert call("help", topic).stdout == text
    data = json.loads(call("help", topic, "--json").stdout)
    assert data == {"topic": topic, "title": text.partition("\n")[0].removeprefix("# "), "text": text}
    written = call("help", topic, "--out", str(tmp_path / "page.md"))
    assert (written.exit_code, written.stdout) == (0, "")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_gets_a_formatted_page_or_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rich: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    installation.help_command.main(["glossary"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "persistent" in printed
    assert ("|---|" not in printed and "# Glossary" not in printed) is rich
    assert (printed == TEXTS["docs/glossary"]) is not rich


def test_pages_that_are_missing_exit_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "DOCS", tmp_path)
    assert "found none; reinstall lngen" in fails(3, "help")


# ---- what the texts name ----


def code_of(text: str) -> Iterator[str]:
    """Every piece of code: fenced lines, and what stands between backticks."""
    for fence in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from fence.splitlines()
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(found.split()) for found in re.findall(r"`([^`]+)`", plain))


def paths_of(text: str) -> list[str]:
    """The files and folders of the checkout that a text names; a ``*`` stands for any part of a name."""
    return re.findall(r"(?<![\w./-])(?:(?:lngen|templates|generated|tests|\.github|\.ci)/[\w./*-]*[\w*/])", text)


def commands_of(text: str) -> list[list[str]]:
    """The command lines ``lngen ...`` of a text, as words."""
    lines = [part for line in code_of(text) for part in line.split(" && ")]
    return [line.split() for line in lines if line.startswith("lngen ")]


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_that_are_named_exist(name: str) -> None:
    assert [path for path in paths_of(TEXTS[name]) if not [*ROOT.glob(path)]] == []


def test_every_record_is_named_by_a_page_or_a_test() -> None:
    """So nothing stays in ``generated`` that nobody reads; a ``*`` in a name stands for a part of it."""
    tests = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))]
    named = {word for text in (*TEXTS.values(), *tests) for word in re.findall(r"[\w./*-]*\w[\w*-]*\.\w+", text)}
    named = {re.sub(r"^(\.\./)+", "", word) for word in named}
    named = {word if "/" in word else f"*/{word}" for word in named if not Path(word).name.startswith("*")}
    folder = ROOT / "generated"
    kept = [
        p.relative_to(ROOT) for p in sorted(folder.rglob("*")) if p.is_file() and folder / "kernels" not in p.parents
    ]
    assert kept
    assert [str(p) for p in kept if not any(fnmatch(str(p), f"*{word}") for word in named)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_the_commands_and_options_that_are_named_exist(name: str) -> None:
    faults = []
    for _, command, *words in commands_of(TEXTS[name]):
        if command not in COMMANDS:
            faults += [command] if not command.startswith("--") else []
            continue
        parsed = cli.get_command(click.Context(cli), command)
        known = {"--help", *(option for p in parsed.params for option in p.opts)}
        faults += [f"{command} {word}" for word in words if word.startswith("-") and word not in known]
        if command == "help":
            faults += [f"help {word}" for word in words if word not in (*TOPICS, "TOPIC", "[TOPIC]")]
    assert faults == []


def test_the_reference_has_every_command() -> None:
    first_cells = "\n".join(re.findall(r"^\| (`lngen .*?`) \| ", TEXTS["docs/reference"], re.MULTILINE))
    assert set(re.findall(r"`lngen (\w+)", first_cells)) == set(COMMANDS)


def test_the_reference_has_every_key_of_a_schedule() -> None:
    table = TEXTS["docs/reference"].partition("A schedule is ")[2].partition("`lngen show")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == [f.name for f in fields(Schedule)]
    (forms,) = re.findall(r"^\| `form` \| .*: (.*) \|$", table, re.MULTILINE)
    assert re.findall(r"`(\w+)`", forms) == [*FORMS]


def test_the_largest_row_is_in_the_pages_on_specs_and_graphs() -> None:
    assert MAX_D == 2**30
    assert "| `d` | features per row, 1 to 2^30, required |" in TEXTS["docs/reference"]
    assert "any D up to 2^30" in TEXTS["docs/family"]


def test_what_does_not_exist_is_seen() -> None:
    text = "See `lngen/nowhere.py`, [b](tests/none.py) and `templates/*.cu.none`.\n```\nlngen shwo X --stage y\n```\n"
    assert paths_of(text) == ["lngen/nowhere.py", "tests/none.py", "templates/*.cu.none"]
    assert commands_of(text) == [["lngen", "shwo", "X", "--stage", "y"]]


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    """To a file, and to a heading in it."""
    folder = (ROOT / ("lngen/" * name.startswith("docs/") + name)).parent
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", TEXTS[name].replace("\\", "")):
        assert (folder / path).exists(), path
        target = (folder / path).read_text(encoding="utf-8") if path and anchor else TEXTS[name]
        headings = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
        assert anchor in {"", *(re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)}, anchor


PROGRAMS = {
    name: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name, text in TEXTS.items()
    if name.startswith("docs/") and "```python" in text
}
ABOUT_PACKS = ("docs/c", "docs/manifest", "docs/packs")  # run on a fake GPU by tests/packs/c_api and tests/packs


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # PyTorch's own
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ABOUT_PACKS])
def test_the_programs_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program in PROGRAMS[name]:
        names: dict[str, Any] = {}
        exec(compile(program, name, "exec"), names)
        if "add_rmsnorm" in names:
            norm = lngen.compile(names["add_rmsnorm"], d=8, dtype="bf16")
            assert [r.name for r in norm.spec("bwd").graph().results] == ["dx", "dresidual", "dgamma"]


def test_the_pages_with_programs_are_seen() -> None:
    assert {"docs/family", *ABOUT_PACKS} <= PROGRAMS.keys()


def test_the_page_on_graphs_has_every_method_of_a_description() -> None:
    page = TEXTS["docs/graph"]
    own = {name for name in vars(GraphBuilder) if not name.startswith("_")} - {"emit", "record", "finish"}
    assert sorted(name for name in own if f"`b.{name}(" not in page) == []
    ops = {name for name in vars(Value) if not name.startswith("_")}
    assert sorted(name for name in ops if f"`{name}`" not in page and f"`x.{name}(" not in page) == []


# ---- words ----

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def prose(text: str) -> str:
    """Paragraphs and items, links kept; each piece of code is the word Code."""
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    lines = [line for line in text.splitlines() if not re.match(r"\s*\||#|    |\[\]", line)]
    kept = "\n".join(re.sub(r"^([-*]|\d+\.) ", "\n", line) for line in lines)
    return re.sub(r"`[^`]+`", "Code", kept)


def sentences(text: str) -> Iterator[str]:
    """What ends with a full stop or a question mark, across lines; the next begins with a capital, or with lngen."""
    for paragraph in re.split(r"\n\s*\n", LINK.sub(r"\1", prose(text))):
        joined = " ".join(paragraph.split())
        yield from (part for part in re.split(r"(?<=[.!?])\**\s+(?=\**(?:[A-Z\d]|lngen\b))", joined) if part)


def words(sentence: str) -> list[str]:
    """The words and numbers of a sentence."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


@pytest.mark.parametrize("name", TEXTS)
def test_a_sentence_is_short(name: str) -> None:
    found = [*sentences(TEXTS[name])]
    assert len(found) > (5 if name == "docs/glossary" else 15)  # the glossary is tables
    assert [s for s in found if len(words(s)) > 25] == []


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
    text = TEXTS["README.md"]
    text = prose(text) + "\n".join(line for line in text.splitlines() if line.startswith("| graph | in turn"))
    linked = [found.span(1) for found in LINK.finditer(text)]
    text = LINK.sub(lambda found: f"[{found[1]}](" + " " * (len(found[0]) - len(found[1]) - 4) + ")", text)
    first = re.search(rf"\b{word}\b".replace(" ", r"\s+"), text)
    assert first is not None
    assert any(start <= first.start() < end for start, end in linked)


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
    terms = "\n".join(re.findall(r"^\| (.*?) \|", TEXTS["docs/glossary"], re.MULTILINE))
    pages = "\n".join(text for name, text in TEXTS.items() if name not in ("docs/glossary", ".github/CONTRIBUTING.md"))
    used = [word for word in OWN if re.search(rf"\b{word}", pages, re.IGNORECASE)]
    assert [word for word in used if not re.search(rf"\b{word}\b", terms, re.IGNORECASE)] == []
    assert len(used) > 50


def test_pages_are_short() -> None:
    """A page of paper has about 75 lines; the README shows results after two screens."""
    before, _, _ = TEXTS["README.md"].partition("\n## Results\n")
    for text, most in ((before, 110), (TEXTS["README.md"], 160), (TEXTS["docs/results"], 150)):
        assert len(text.splitlines()) <= most


# ---- the examples of the README ----


def fenced(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXTS["README.md"], re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def program(word: str, **changes: str) -> dict[str, Any]:
    """What the one program of the README that has this word defines, after it ran, on the CPU."""
    (text,) = (text for text in fenced("python") if word in text)
    for old, new in changes.items():
        text = text.replace(old, new)
    exec(compile(text, "README.md", "exec"), names := dict[str, Any]())
    return names


def test_the_norm_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = program("add_rmsnorm")
    x, residual, gamma, dy = (names[n].astype(np.float64) for n in ("x", "residual", "gamma", "dy"))
    h = x + residual
    xhat = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(names["y"], xhat * gamma, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(names["dgamma"], (dy * xhat).sum((0, 1)), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(names["dx"], names["dresidual"])
    assert "__global__" in names["source"]


class Qwen3RMSNorm:
    """Its forward, for a class made of it and ``torch.nn.Module``."""

    def forward(self, x: Any) -> Any:
        h = x.float()
        return self.weight * (h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


@pytest.mark.filterwarnings("ignore:.*CPU:UserWarning")
def test_the_model_is_patched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A small model stands for the one that transformers would load."""
    torch = pytest.importorskip("torch")

    class Norm(Qwen3RMSNorm, torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

    def load(name: str, *, dtype: str, device_map: str) -> Any:
        assert (dtype, device_map) == ("bfloat16", "cuda")
        return torch.nn.Sequential(Norm(), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).bfloat16()

    models = SimpleNamespace(AutoModelForCausalLM=SimpleNamespace(from_pretrained=load))
    monkeypatch.setitem(sys.modules, "transformers", models)
    found = program("transformers")
    assert capsys.readouterr().out.startswith("2 norms patched, 0 left\n")
    x = torch.randn(3, 64).bfloat16()
    mine, own = found["model"][0], Qwen3RMSNorm.forward(found["model"][0], x)
    assert torch.equal(mine(x), own)
    assert type(mine).forward is not Qwen3RMSNorm.forward


def test_the_pack_of_the_command_line_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake GPU, with fewer rows."""
    pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    with cubins_of_ptx():
        prints(*shlex.split(fenced("sh")[0].splitlines()[0])[1:])
    gpu = FakeDriver(version=20000)
    gpu.knows_pack(tmp_path / "build")
    pass_for_gpu_tensors(monkeypatch, gpu)
    found = program("lngen.load", **{"4096, 8192": "4, 8192", '"cuda"': '"cpu"'})
    x = found["x"].float()
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert torch.allclose(found["y"].float(), expected, rtol=1e-3, atol=1e-3)
    driver._gpu.cache_clear()


@pytest.mark.full
def test_the_command_line_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    (block,) = fenced("sh")
    lines = block.splitlines()
    assert {line.split()[1] for line in lines} == {"show", "explain", "build", "check"}
    for line in lines:
        assert line.startswith("lngen ")
        prints(*shlex.split(line)[1:])
    assert Path("build/manifest.json").is_file()
    assert "</html>" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_two_commands_are_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, test = (block.splitlines() for block in fenced(""))
    assert (len(main), len(test)) == (1, 1)
    assert test[0] in [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    install, *rest = main[0].split(" && ")
    assert install == 'pip install ".[cuda13]"'
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    assert [line.split()[1] for line in rest] == ["build", "check"]
    for line in rest:
        prints(*shlex.split(line)[1:])
