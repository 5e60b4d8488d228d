"""``lngen help`` and ``lngen doctor``: the pages of this installation, and its dependencies.

Nothing here needs NumPy, which may be what is missing."""

import os
import platform
import sys
import uuid
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click

from lngen import config
from lngen.cli import COMMANDS
from lngen.cli.output import Output, output_options, stage_options, table, write
from lngen.compiler.toolchain import nvrtc_version, supported_arches
from lngen.config import data_dir
from lngen.errors import LngenError, MissingError, one_of
from lngen.files import IN_MEMORY, default_cache, load_cupy
from lngen.version import __version__, install_hint

# ---- help: a page of the documentation ----

DOCS = config.PACKAGE / "docs"


@click.command("help", epilog="Example: lngen help glossary")
@click.argument("topic", required=False)
@stage_options
def help_command(topic: str | None, output: Output) -> None:
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
    return f"there is no page '{topic}', {one_of(topic, topics)}"


def _render(text: str) -> None:
    """Markdown formatted for the terminal; the source where Rich is not installed."""
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:
        return write(text)
    Console().print(Markdown(text))


# ---- doctor: dependencies found and missing ----

NEEDED = {"numpy": "2.0", "ml_dtypes": "0.5", "jinja2": "3.1"}
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
INSTALL = install_hint("cuda13")
DRIVER = "https://www.nvidia.com/drivers"


@dataclass(frozen=True)
class Finding:
    """One dependency. ``missing``: compiling needs it; ``note``: it is optional."""

    what: str
    state: Literal["ok", "missing", "note"]
    detail: str
    fix: str = ""


@click.command("doctor", epilog="Example: lngen doctor --json")
@output_options
@click.pass_context
def doctor_command(ctx: click.Context, output: Output) -> None:
    """Print dependencies that are found or missing, and the commands that install them.

    Exits 3 if a dependency for generating and compiling kernels is missing; without a GPU there is only a note.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of the same findings
        found = examine()
    rows = [(f.state, f.what, f.detail, f.fix) for f in found]
    output.table({"findings": [asdict(f) for f in found]}, table(("", "what", "found", "fix"), rows))
    if any(f.state == "missing" for f in found):
        ctx.exit(MissingError.exit_code)


def examine() -> list[Finding]:
    """All findings, in order."""
    return [
        Finding("lngen", "ok", __version__),
        _python(),
        *(_package(name, f'pip install "{name}>={minimum}"') for name, minimum in NEEDED.items()),
        _cupy(),
        _nvrtc(),
        *_gpus(),
        _cache(),
        *(_data(name) for name in ("templates", "generated")),
        _package("nvidia-cuda-nvdisasm", INSTALL, "lngen show --stage sass needs nvdisasm"),
        _package("torch", install_hint("bench"), "lngen bench needs it, the tests have it as an oracle"),
    ]


def _python() -> Finding:
    fix = "" if sys.version_info >= (3, 11) else "use 3.11+"
    return Finding("Python", "missing" if fix else "ok", platform.python_version(), fix)


def _package(name: str, fix: str, optional: str = "") -> Finding:
    """A package; ``optional``: what needs it, if compiling does not."""
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        use = f"; optional: {optional}" if optional else ""
        return Finding(name, "note" if optional else "missing", f"not installed{use}", fix)


def _cupy() -> Finding:
    installed = []
    for name in CUPY:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    try:
        cupy = load_cupy()
    except MissingError as error:
        what, _, fix = str(error).partition("; ")
        return Finding("CuPy", "missing", what, fix.rstrip("."))
    except Exception as error:  # a broken CuPy may raise any exception
        return Finding("CuPy", "missing", f"{', '.join(installed) or 'not installed'} ({error})".strip(), INSTALL)
    if len(installed) > 1:
        surplus = " ".join(text.split()[0] for text in installed[1:])
        return Finding("CuPy", "note", f"more than one: {', '.join(installed)}", f"pip uninstall {surplus}")
    found = installed[0] if installed else str(cupy.__version__)
    if IN_MEMORY.items() <= os.environ.items():
        why = f"{default_cache()} cannot be written to, so that CuPy keeps its own kernels in memory"
        return Finding("CuPy", "note", f"{found}; {why}", "set CUPY_CACHE_DIR to a folder that can be written to")
    return Finding("CuPy", "ok", found)


def _nvrtc() -> Finding:
    try:
        number = ".".join(map(str, nvrtc_version()))
        return Finding("NVRTC", "ok", f"{number}, compiles for {' '.join(supported_arches())}")
    except LngenError as error:
        return Finding("NVRTC", "missing", str(error).partition(";")[0], INSTALL)


def _gpus() -> list[Finding]:
    try:
        cupy = load_cupy()
        runtime = cupy.cuda.runtime
        driver = runtime.driverGetVersion()
        count = runtime.getDeviceCount()
        found = [Finding("driver", "ok", f"for CUDA {driver // 1000}.{driver % 1000 // 10}")]
        for device in range(count):
            facts = runtime.getDeviceProperties(device)
            name, memory = facts["name"].decode(), facts["totalGlobalMem"] / 2**30
            found.append(
                Finding(f"GPU {device}", "ok", f"{name}, sm_{facts['major']}{facts['minor']}, {memory:.0f} GiB")
            )
        return found
    except Exception as error:  # no CuPy, no driver and no device raise different exceptions
        why = str(error).partition("\n")[0]
        return [Finding("GPU", "note", f"none ({why}); NumPy arrays run the interpreter", f"driver: {DRIVER}")]


def _cache() -> Finding:
    fix = "set LNGEN_CACHE_DIR to a folder that can be written to"
    try:
        folder = config.cache_dir()
        probe = folder / f".{uuid.uuid4().hex}.tmp"
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except MissingError as error:
        return Finding("cache", "note", str(error).partition(";")[0], fix)
    except OSError as error:
        return Finding("cache", "note", f"{folder} cannot be written to ({error.strerror})", fix)
    return Finding("cache", "ok", str(folder))


def _data(name: Literal["templates", "generated"]) -> Finding:
    try:
        return Finding(name, "ok", str(data_dir(name)))
    except MissingError as error:
        needed: Literal["missing", "note"] = "missing" if name == "templates" else "note"
        return Finding(name, needed, str(error).partition(";")[0], "pip install --force-reinstall lngen")
