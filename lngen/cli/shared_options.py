"""What several commands share: types of values, options, an executor on a Dask cluster, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lngen.compiler.devices import DEFAULT_ARCH, Device, named
from lngen.errors import LngenError, MissingError, short
from lngen.user_input import LARGEST, decimal, whole
from lngen.version import install_hint

if TYPE_CHECKING:
    from concurrent.futures import Executor

Function = TypeVar("Function", bound=Callable[..., Any])


class Whole(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A whole number in a range; with ``listed`` several of them, separated by commas, without repetitions."""

    name = "number"

    def __init__(self, least: int = 0, most: int = LARGEST, *, listed: bool = False) -> None:
        self.least, self.most, self.listed = least, most, listed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """An int, or a tuple of them; a usage error for anything else."""
        if isinstance(value, tuple):
            return value
        texts = split(value) if self.listed else (value,)
        numbers = tuple(dict.fromkeys(whole(text, self.least, self.most) for text in texts))
        if None in numbers or not numbers:
            what = "whole numbers, separated by commas, each" if self.listed else "a whole number"
            self.fail(f"expected {what} from {self.least} to {self.most}, got '{short(value)}'.", param, ctx)
        return numbers if self.listed else numbers[0]


class Decimal(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number in a range, which excludes ``above``."""

    name = "number"

    def __init__(self, least: float = 0.0, most: float = 1e9, *, above: float | None = None) -> None:
        self.least, self.most, self.above = least, most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A float; a usage error for anything else."""
        number = decimal(value, self.least, self.most)
        if number is None or number == self.above:
            at = f"above {self.above:g}, at most {self.most:g}" if self.above is not None else ""
            span = at or f"from {self.least:g} to {self.most:g}"
            self.fail(f"expected a number {span}, got '{short(value)}'.", param, ctx)
        return number


class Finite(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A finite number, of either sign."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A float; a usage error for anything else."""
        text = str(value)
        number = decimal(text.removeprefix("-"))
        if number is None:
            self.fail(f"expected a finite number, got '{short(value)}'.", param, ctx)
        return 0.0 - number if text.startswith("-") else number


schedule_option = click.option(
    "--schedule", default="", metavar="K=V,...", help="Change the default schedule, for example threads=256,vec=4."
)


def overlap_option(text: str) -> Callable[[Function], Function]:
    """``--overlap``, for calls that start while the kernel before them drains."""
    return click.option("--overlap", is_flag=True, help=text)


rows_option = click.option(
    "--rows", type=Whole(1), metavar="M", help="The schedule for about M rows; by default, for many."
)

device_option = click.option(
    "--device",
    metavar="NAME",
    help="The GPU to choose the default schedule for, such as h200; by default the one that represents the arch.",
)


def arch_option(text: str) -> Callable[[Function], Function]:
    """``--arch``, a list; ``text`` says how the command uses it."""
    return click.option(
        "--arch", "arches", default=DEFAULT_ARCH, show_default=True, metavar="SM,...", callback=words, help=text
    )


def target(arches: tuple[str, ...], device: str | None) -> tuple[tuple[str, ...], Device | None]:
    """The archs and the GPU that ``--arch`` and ``--device`` name: a device alone implies its own arch."""
    if device is None:
        return arches, None
    gpu = named(device)
    if arches == (DEFAULT_ARCH,):
        return (gpu.arch,), gpu
    if gpu.arch not in arches:
        raise click.UsageError(f"--device {device} is of {gpu.arch}, which --arch {','.join(arches)} does not name.")
    return arches, gpu


def one_arch(what: str, arches: tuple[str, ...]) -> str:
    """The arch; UsageError for several, of which ``what`` takes one."""
    if len(arches) > 1:
        raise click.UsageError(f"{what} takes one --arch, got {', '.join(arches)}.")
    return arches[0]


def on_option(text: str) -> Callable[[Function], Function]:
    """``--on``, where the kernels run; ``text`` explains ``auto``."""
    choice = click.Choice(["auto", "gpu", "ptx", "interpreter"])
    return click.option("--on", type=choice, default="auto", show_default=True, help=text)


def split(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list, without repetitions."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """A comma-separated list without repetitions, none if it is left out; an empty one is a usage error."""
    found = split(value or "")
    if not found and value is not None:
        raise click.BadParameter("expected at least one value.", ctx, param)
    return found


DASK_TIMEOUT = "10s"

dask_option = click.option(
    "--dask", metavar="ADDRESS", help="Run on this Dask cluster, for example tcp://host:8786; lngen is installed there."
)


@contextmanager
def dask_executor(address: str | None) -> Iterator[Executor | None]:
    """An executor on the cluster whose scheduler has this address; None if the address is None.

    MissingError without the distributed package, LngenError if there is no scheduler.
    """
    if address is None:
        yield None
        return
    try:
        distributed = import_module("distributed")
    except ImportError as error:
        raise MissingError(f"--dask needs Dask; install it with: {install_hint('cluster')}.") from error
    try:
        client = distributed.Client(address, timeout=DASK_TIMEOUT)
    except (OSError, ValueError, TypeError) as error:  # TimeoutError is an OSError
        raise LngenError(
            f"--dask expects the address of a running Dask scheduler, for example tcp://host:8786, and there is none "
            f"at '{address}'; start one with 'dask scheduler'."
        ) from error
    with client:
        yield client.get_executor()


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A function (done, total) that advances a bar on stderr; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
