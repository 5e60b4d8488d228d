"""If these fail, ``lngen help`` does not print a page of ``lngen/docs``, or a page names what does not exist."""

import builtins
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import pytest

import lngen
from commands import call
from lngen.cli import COMMANDS, cli, installation
from lngen.graphs import GraphBuilder
from lngen.ir import Value
from lngen.problem import Schedule
from lngen.problem.schedule import FORMS
from lngen.spec.parse import MAX_D

ROOT = Path(__file__).resolve().parent.parent
TOPICS = (
    "adding", "c", "family", "glossary", "graph", "inspect", "layout", "manifest", "numbers", "numerics", "packs",
    "performance", "reference", "results", "testing", "torch",
)  # fmt: skip
PAGES = {path.stem: path for path in sorted((ROOT / "lngen" / "docs").glob("*.md"))}
TEXTS = {
    **{f"docs/{name}": path.read_text(encoding="utf-8") for name, path in PAGES.items()},
    **{name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".github/CONTRIBUTING.md")},
}


# ``lngen help``


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


def test_a_page_is_formatted_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    installation.help_command.main(["glossary"], standalone_mode=False)
    formatted = capsys.readouterr().out
    assert "persistent" in formatted
    assert "|---|" not in formatted
    assert "# Glossary" not in formatted


def test_a_terminal_without_rich_gets_the_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    installation.help_command.main(["glossary"], standalone_mode=False)
    assert capsys.readouterr().out == PAGES["glossary"].read_text(encoding="utf-8")


@pytest.mark.parametrize(("topic", "message"), [
    ("glosary", f"there is no page 'glosary', expected one of {', '.join(TOPICS)}; did you mean 'glossary'?"),
    ("zzz", f"there is no page 'zzz', expected one of {', '.join(TOPICS)}."),
    ("../../README", "there is no page '../../README', expected one of "),
    ("show", f"'show' is a command; use: lngen show --help. Pages are {', '.join(TOPICS)}."),
])  # fmt: skip
def test_an_unknown_topic_is_one_sentence(topic: str, message: str) -> None:
    done = call("help", topic)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_pages_that_are_missing_exit_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "DOCS", tmp_path)
    done = call("help")
    assert done.exit_code == 3
    assert "found none; reinstall lngen" in done.stderr


# What the texts name


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
    folder = ROOT / ("lngen/" * name.startswith("docs/") + name)
    links = [link.replace("\\", "") for link in re.findall(r"\]\(([^)#:]+)\)", TEXTS[name])]
    assert [link for link in links if not (folder.parent / link).exists()] == []


PROGRAMS = {
    name: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name, text in TEXTS.items()
    if name.startswith("docs/") and "```python" in text
}
ABOUT_PACKS = ("docs/c", "docs/manifest", "docs/packs")  # run on a fake GPU by tests/c_api and tests/aot


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # PyTorch's own
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ABOUT_PACKS])
def test_the_programs_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program in PROGRAMS[name]:
        exec(compile(program, name, "exec"), {})


def test_the_pages_with_programs_are_seen() -> None:
    assert {"docs/family", *ABOUT_PACKS} <= PROGRAMS.keys()


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 160


def test_the_page_on_graphs_has_every_method_of_a_description() -> None:
    page = TEXTS["docs/graph"]
    own = {name for name in vars(GraphBuilder) if not name.startswith("_")} - {"emit", "record", "finish"}
    assert sorted(name for name in own if f"`b.{name}(" not in page) == []
    ops = {name for name in vars(Value) if not name.startswith("_")}
    assert sorted(name for name in ops if f"`{name}`" not in page and f"`x.{name}(" not in page) == []


def test_the_graph_of_the_page_on_graphs_compiles() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXTS["docs/graph"], re.MULTILINE | re.DOTALL)
    described: dict[str, Any] = {}
    exec(code, described)
    norm = lngen.compile(described["add_rmsnorm"], d=8, dtype="bf16")
    assert [r.name for r in norm.spec("bwd").graph().results] == ["dx", "dresidual", "dgamma"]
