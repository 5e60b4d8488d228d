"""``lngen doctor``: the dependencies on this machine, those that are missing, and the commands that install them."""

from __future__ import annotations

import platform
import sys
import uuid
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import click

from lngen import config
from lngen.cli.output import Output, output_options
from lngen.cli.tables import table
from lngen.data import data_dir
from lngen.errors import LngenError, MissingError
from lngen.toolchain import nvrtc_version, supported_arches
from lngen.version import __version__, install_hint

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


@click.command(epilog="Example: lngen doctor --json")
@output_options
@click.pass_context
def command(ctx: click.Context, output: Output) -> None:
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
        *(_package(name, minimum) for name, minimum in (("numpy", "2.0"), ("ml_dtypes", "0.5"), ("jinja2", "3.1"))),
        _cupy(),
        _nvrtc(),
        *_gpus(),
        _cache(),
        *(_data(name) for name in ("templates", "generated")),
        _optional("torch", "an oracle of the tests, and arrays that lngen accepts"),
    ]


def _python() -> Finding:
    supported = sys.version_info >= (3, 11)
    return Finding(
        "Python",
        "ok" if supported else "missing",
        platform.python_version(),
        "" if supported else "use 3.11+",
    )


def _package(name: str, minimum: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", f'pip install "{name}>={minimum}"')


def _optional(name: str, use: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "note", f"not installed; optional: {use}", f"pip install {name}")


def _cupy() -> Finding:
    installed = []
    for name in CUPY:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    try:
        import cupy
    except Exception as error:  # a broken CuPy may raise any exception
        return Finding("CuPy", "missing", f"{', '.join(installed) or 'not installed'} ({error})".strip(), INSTALL)
    if len(installed) > 1:
        surplus = " ".join(text.split()[0] for text in installed[1:])
        return Finding("CuPy", "note", f"more than one: {', '.join(installed)}", f"pip uninstall {surplus}")
    return Finding("CuPy", "ok", installed[0] if installed else str(cupy.__version__))


def _nvrtc() -> Finding:
    try:
        number = ".".join(map(str, nvrtc_version()))
        return Finding("NVRTC", "ok", f"{number}, compiles for {' '.join(supported_arches())}")
    except LngenError as error:
        return Finding("NVRTC", "missing", str(error).partition(";")[0], INSTALL)


def _gpus() -> list[Finding]:
    try:
        import cupy

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
    folder = config.cache_dir()
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        fix = "set LNGEN_CACHE_DIR to a folder that can be written to"
        return Finding("cache", "note", f"{folder} cannot be written to ({error.strerror})", fix)
    return Finding("cache", "ok", str(folder))


def _data(name: Literal["templates", "generated"]) -> Finding:
    try:
        return Finding(name, "ok", str(data_dir(name)))
    except MissingError as error:
        needed: Literal["missing", "note"] = "missing" if name == "templates" else "note"
        return Finding(name, needed, str(error).partition(";")[0], "pip install --force-reinstall lngen")
