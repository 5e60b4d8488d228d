"""``lngen tune``: measure schedules, remember every trial, lock the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lngen import config
from lngen.cli.cluster import dask_executor, dask_option
from lngen.cli.common import json_option, print_json, print_table
from lngen.errors import LngenError
from lngen.spec import Spec, parse_spec

if TYPE_CHECKING:
    from lngen.tune.choose import Choice
    from lngen.tune.job import Job, Listener
    from lngen.tune.trial import Trial

FILE = click.Path(dir_okay=False, path_type=Path)
LOCK = Path("lngen.lock.toml")
INTERRUPTED = 130
EXPORTS = ("t4", "kernel-tuner")


@dataclass(frozen=True)
class Views:
    """What else the trials of one job are shown as: a picture, and a file in another's format."""

    plot_file: Path | None
    export: tuple[str, Path] | None

    def __bool__(self) -> bool:
        """True if anything is asked for."""
        return self.plot_file is not None or self.export is not None

    def check(self) -> None:
        """Refuse a picture that cannot be drawn, before anything is measured."""
        from lngen.bench.plot import check

        if self.plot_file is not None:
            check(self.plot_file)

    def show(self, trials: Sequence[Trial], choice: Choice | None) -> None:
        """Write what was asked for."""
        from lngen.files import write_all
        from lngen.tune.export import export
        from lngen.tune.plot import plot

        if self.plot_file is not None:
            plot(trials, choice, self.plot_file)
        if self.export is not None:
            form, path = self.export
            write_all({path: export(trials, form).encode()})


def parse_rows(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers of rows, each once."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise click.BadParameter(f"expected whole numbers from 1, separated by commas, got '{word}'.", ctx, param)
    if not words:
        raise click.BadParameter("expected at least one number of rows.", ctx, param)
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_budget(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds: ``90``, ``90s``, ``2m``."""
    scale = {"s": 1, "m": 60}.get(value[-1:], 0)
    number = value[:-1] if scale else value
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise click.BadParameter(f"expected a time such as 60s or 2m, got '{value}'.", ctx, param)
    return float(int(number) * (scale or 1))


@click.command("tune", epilog="Example: lngen tune layernorm.bwd:d=4096,dtype=bf16 --rows 4096,16384 --budget 60s")
@click.argument("specs", metavar="[SPEC]...", nargs=-1)
@click.option("--rows", default="4096", show_default=True, metavar="M,...", callback=parse_rows, help="Rows of x.")
@click.option(
    "--budget", default="20s", show_default=True, metavar="TIME", callback=parse_budget, help="Per SPEC and rows."
)
@click.option("--trials", default=64, show_default=True, type=click.IntRange(1), help="Most candidates, likewise.")
@click.option("--database", type=FILE, metavar="FILE", help="Of all trials; by default in the user's cache folder.")
@click.option("--lock", "lock_file", default=LOCK, show_default=True, type=FILE, help="Of the chosen schedules.")
@click.option(
    "--frozen",
    is_flag=True,
    help="Tune nothing: exit 1 if a SPEC is not in the lock file; --plot and --export show what the database holds.",
)
@click.option("--ranking", is_flag=True, help="Tune nothing: print the model's order, which needs no GPU.")
@click.option("--merge", "shards", multiple=True, type=FILE, metavar="FILE", help="Add another database to --database.")
@dask_option
@click.option("--plot", "plot_file", type=FILE, help="Draw all trials to this .png or .svg file.")
@click.option(
    "--export", nargs=2, type=(click.Choice(EXPORTS), FILE), metavar="FORMAT FILE", help=f"One of {', '.join(EXPORTS)}."
)
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    specs: tuple[str, ...],
    rows: tuple[int, ...],
    budget: float,
    trials: int,
    database: Path | None,
    lock_file: Path,
    frozen: bool,
    ranking: bool,
    shards: tuple[Path, ...],
    dask: str | None,
    plot_file: Path | None,
    export: tuple[str, Path] | None,
    as_json: bool,
) -> None:
    """Measure the schedules of each SPEC for each number of rows, and lock the fastest.

    Every candidate has to reproduce the interpreter's bits before it is timed. Every trial is kept in the
    database at once: what a run that was killed has measured is not measured again. Ctrl-C keeps the best so far.
    On several GPUs, SPECs are tuned side by side.
    """
    database = database or config.cache_dir() / "tune" / "trials.jsonl"
    parsed = [*dict.fromkeys(parse_spec(text) for text in specs)]
    if bool(shards) == bool(parsed) or (frozen and ranking):
        raise click.UsageError("tune takes SPECs, with --frozen or --ranking or neither, or else --merge alone.")
    views = Views(plot_file, export)
    if views and (shards or ranking):
        raise click.UsageError(
            "--plot and --export show trials, which --merge and --ranking have none of; see --frozen."
        )
    if views and len(parsed) * len(rows) > 1:
        raise click.UsageError("--plot and --export show one SPEC at one number of rows; give them one by one.")
    if shards:
        return _merge(shards, database, as_json)
    if ranking:
        return _ranking(parsed, rows, as_json)
    if frozen:
        return _frozen(parsed, rows, (database, lock_file), views, as_json)
    ctx.exit(_tune(parsed, rows, (budget, trials), (database, lock_file), dask, views, as_json))


def _tune(
    specs: Sequence[Spec],
    rows: Sequence[int],
    bounds: tuple[float, int],
    files: tuple[Path, Path],
    dask: str | None,
    views: Views,
    as_json: bool,
) -> int:
    """Tune, lock, report; the exit code."""
    from lngen.tune import database as trials
    from lngen.tune import job, lock, report
    from lngen.tune.tuner import tune as run

    path, lock_file = files
    views.check()
    old, kept = lock.existing(lock_file), _kept(path)
    known: dict[tuple[str, int], list[Trial]] = {}
    for t in kept:
        known.setdefault((t.spec, t.rows), []).append(t)
    jobs = [
        job.Job(s, m, *bounds, tuple(known.get((str(s), m), ())), lock.incumbents(old, s, m), job.GPU)
        for s in specs
        for m in rows
    ]
    with dask_executor(dask) as executor, _listening() as listener:
        result = run(jobs, path, executor=executor, listener=listener)
    devices = [o.device for o in result.outcomes if o.device is not None]
    for text in trials.foreign(kept, devices, path) if devices else ():
        _note(text)
    lock.store(lock_file, result.outcomes)
    for text in report.remarks(result.outcomes):
        _note(text)
    if as_json:
        tuned = [report.as_json(o) for o in result.outcomes]
        print_json({"interrupted": result.interrupted, "lock": str(lock_file), "tuned": tuned})
    else:
        print_table(report.COLUMNS, report.rows(result.outcomes))
        if compared := report.against_default(result.outcomes):
            click.echo(compared)
    for outcome in result.outcomes if len(jobs) == 1 else ():
        views.show(outcome.trials, outcome.choice)
    if result.interrupted:
        return INTERRUPTED
    return 0 if all(o.choice is not None for o in result.outcomes) else 1


def _merge(shards: Sequence[Path], path: Path, as_json: bool) -> None:
    from lngen.tune.database import merge

    count, complaints = merge(shards, path)
    for text in complaints:
        _note(text)
    if as_json:
        print_json({"database": str(path), "trials": count})
    else:
        click.echo(f"{count} trials in {path}")


def _ranking(specs: Sequence[Spec], rows: Sequence[int], as_json: bool) -> None:
    """How the model ranks the candidates, its favourite first."""
    from lngen.runtime.choose import DEFAULT_ARCH
    from lngen.tune.candidates import ranking

    listed = [
        (str(spec), m, rank, str(s))
        for spec in specs
        for m in rows
        for rank, s in enumerate(ranking(spec, m, DEFAULT_ARCH))
    ]
    columns = "spec", "rows", "rank", "schedule"
    if as_json:
        print_json({"ranking": [dict(zip(columns, line, strict=True)) for line in listed]})
    else:
        print_table(columns, listed)


def _frozen(specs: Sequence[Spec], rows: Sequence[int], files: tuple[Path, Path], views: Views, as_json: bool) -> None:
    """What is locked, on this machine's GPU if it has one, else on any; and the trials it was chosen from."""
    from lngen.runtime.launch import device_count, device_name
    from lngen.tune import database as trials
    from lngen.tune.choose import taken
    from lngen.tune.lock import existing, frozen

    path, lock_file = files
    views.check()
    found = frozen(existing(lock_file), specs, rows, device_name(0) if device_count() else None)
    if views:
        (entry,) = found
        kept = trials.of(_kept(path), entry.spec, entry.rows, entry.device)
        if not kept:
            raise LngenError(
                f"'{path}' holds no trials of {entry.spec} with {entry.rows} rows on {entry.device}; name the database "
                "they were kept in (--database)."
            )
        views.show(kept, taken(kept, entry.schedule))
    columns = "spec", "rows", "device", "schedule"
    listed = [(e.spec, e.rows, e.device, e.schedule) for e in found]
    if as_json:
        print_json({"locked": [dict(zip(columns, line, strict=True)) for line in listed]})
    else:
        print_table(columns, listed)


def _kept(path: Path) -> tuple[Trial, ...]:
    """The trials of a database; what is none is said."""
    from lngen.tune.database import read

    content = read(path)
    for text in content.complaints:
        _note(text)
    return content.trials


def _note(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _listening() -> Iterator[Listener]:
    """A listener that shows the live best on a terminal, and messages anywhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _listener(_note, None)
        return

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status("building") as status:
        yield _listener(show, lambda text: status.update(text.replace("[", "\\[")))


def _listener(show: Callable[[str], None], update: Callable[[str], None] | None) -> Listener:
    """``show`` prints a line, ``update`` replaces the lines of the jobs that run."""
    from lngen.tune.job import Listener

    running: dict[str, str] = {}

    class Shown(Listener):
        def message(self, text: str) -> None:
            show(text)

        def progress(self, job: Job, done: int, total: int, best: Trial | None) -> None:
            fastest = f", best {best.us_median} us: {best.schedule}" if best else ""
            running[str(job)] = f"{job}: {done}/{total}{fastest}"
            if update is not None:
                update("\n".join(running.values()))

    return Shown()


command = tune  # the name under which lngen.cli looks for it
