"""``lngen help``: a page of the documentation in ``lngen/docs``."""

from __future__ import annotations

import difflib
import sys
from importlib.resources import files
from pathlib import Path

import click

from lngen.cli import COMMANDS
from lngen.cli.output import Output, stage_options, write
from lngen.cli.tables import table
from lngen.errors import LngenError, MissingError

DOCS = Path(str(files("lngen"))) / "docs"


@click.command(epilog="Example: lngen help glossary")
@click.argument("topic", required=False)
@stage_options
def command(topic: str | None, output: Output) -> None:
    """Print the page about TOPIC, or without a TOPIC the list of pages.

    A terminal gets formatted text, a pipe the Markdown source.
    """
    titles = _titles()
    if topic is None:
        listed = [{"topic": name, "title": title} for name, title in titles.items()]
        output.table({"topics": listed}, table(("topic", "about"), titles.items()))
        return
    if topic not in titles:
        raise LngenError(_unknown(topic, [*titles]))
    text = _page(topic).read_text(encoding="utf-8")
    if sys.stdout.isatty() and output == Output():
        _render(text)
    else:
        output.stage({"topic": topic, "title": titles[topic], "text": text}, text, "markdown")


def _page(topic: str) -> Path:
    return DOCS / f"{topic}.md"


def _titles() -> dict[str, str]:
    """Titles by topic, from the first line of each page; MissingError if there are no pages."""
    topics = sorted(path.stem for path in DOCS.glob("*.md"))
    if not topics:
        raise MissingError(f"expected the pages of lngen in '{DOCS}', found none; reinstall lngen.")
    return {name: _page(name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name in topics}


def _unknown(topic: str, topics: list[str]) -> str:
    """The message for a topic without a page: the nearest page, or the help of a command."""
    if topic in COMMANDS:
        return f"'{topic}' is a command; use: lngen {topic} --help. Pages are {', '.join(topics)}."
    near = difflib.get_close_matches(topic, topics, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return f"there is no page '{topic}', expected one of {', '.join(topics)}{hint}"


def _render(text: str) -> None:
    """Markdown formatted for the terminal; the source where Rich is not installed."""
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:
        return write(text)
    Console().print(Markdown(text))
