"""``lngen tune``: measures schedules, records every trial, locks the fastest; merging and tables need no GPU."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lngen import config
from lngen.cli.failures import INTERRUPTED
from lngen.cli.output import AnyPath, OutFile, Output, note, output_options
from lngen.cli.output import table as table_text
from lngen.cli.shared_options import Whole, dask_executor, dask_option, device_option, overlap_option
from lngen.compiler.devices import default_device, named
from lngen.compiler.spec import Spec, parse_spec
from lngen.errors import LngenError, short
from lngen.user_input import whole

if TYPE_CHECKING:
    from lngen.compiler.problem import Schedule
    from lngen.lab.tune.job import Choice, Job, Listener
    from lngen.lab.tune.trials import Trial
    from lngen.lab.tune.tuner import Report
    from lngen.launch.runtime.lock_file import Locked

FILE = AnyPath(dir_okay=False)
MOST_SECONDS = 10**6
LOCK = Path("lngen.lock.toml")
EXPORTS = ("t4", "kernel-tuner")
NEXT = (
    "To use these schedules, build with 'lngen build SPEC --lock {shell}', or call lngen.compile(..., lock={python})."
)
ABOUT = """Schedules that were measured on this GPU, by direction, bytes of an element, D and workload class: KiB of
inputs for each multiprocessor, at most; 1024 is also what is taken where the number of rows is not known.
Written by: lngen tune --table, from {}
Accesses and grids are left out: they follow from D and from the GPU."""


@dataclass(frozen=True)
class Views:
    """Other views of the trials of a job: a picture, and a file in another tool's format.

    slugs  of the SPECs by name, and the numbers of rows: whatever there are several of is part of a file's name
    """

    plot_file: Path | None
    export: tuple[str, Path] | None
    slugs: Mapping[str, str]
    rows: Sequence[int]

    def __bool__(self) -> bool:
        """True if a view is requested."""
        return self.plot_file is not None or self.export is not None

    def check(self) -> None:
        """Refuse a picture that cannot be drawn, before anything is measured."""
        from lngen.lab.bench.figures import check_plot

        if self.plot_file is not None:
            check_plot(self.plot_file)

    def show(self, spec: str, rows: int, trials: Sequence[Trial], choice: Choice | None) -> None:
        """Write the requested views of one job."""
        from lngen.files import write_all
        from lngen.lab.tune.views import export, plot

        if self.plot_file is not None:
            plot(trials, choice, self._of_job(self.plot_file, spec, rows))
        if self.export is not None:
            form, path = self.export
            write_all({self._of_job(path, spec, rows): export(trials, form).encode()})

    def _of_job(self, path: Path, spec: str, rows: int) -> Path:
        """The file of one job: tune.png, tune-64.png, or with several SPECs tune-rmsnorm_fwd__d64_f32-64.png."""
        parts = [self.slugs[spec]] * (len(self.slugs) > 1) + [str(rows)] * (len(self.rows) > 1)
        return path.with_stem("-".join([path.stem, *parts]))


def parse_budget(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds: ``90``, ``90s``, ``2m``."""
    scale = {"s": 1, "m": 60}.get(value[-1:], 0)
    seconds = whole(value[:-1] if scale else value, 1, MOST_SECONDS)
    if seconds is None:
        raise click.BadParameter(f"expected a time such as 60s or 2m, got '{short(value)}'.", ctx, param)
    return float(seconds * (scale or 1))


@click.command("tune", epilog="Example: lngen tune layernorm.bwd:d=4096,dtype=bf16 --rows 4096,16384 --budget 60s")
@click.argument("specs", metavar="[SPEC]...", nargs=-1)
@click.option("--rows", default="4096", show_default=True, metavar="M,...", type=Whole(1, listed=True), help="Of x.")
@click.option(
    "--budget",
    default="20s",
    show_default=True,
    metavar="TIME",
    callback=parse_budget,
    help="Of measuring, per SPEC and rows.",
)
@click.option("--trials", default=64, show_default=True, type=Whole(1), help="Most candidates, likewise.")
@click.option("--database", type=FILE, metavar="FILE", help="Of all trials; by default in the user's cache folder.")
@click.option("--lock", "lock_file", default=LOCK, show_default=True, type=OutFile(), help="Of the chosen schedules.")
@click.option("--frozen", is_flag=True, help="Tune nothing: exit 1 if a SPEC is not locked; --plot and --export work.")
@click.option("--ranking", is_flag=True, help="Tune nothing: print the order for --device, which needs no GPU.")
@click.option("--top", type=Whole(1), metavar="N", help="Of --ranking the first N only.")
@device_option
@overlap_option("Time calls that start while the last one drains; by default each call waits for its end.")
@click.option("--merge", "shards", multiple=True, type=FILE, metavar="FILE", help="Add another database to --database.")
@click.option(
    "--table", type=OutFile(), metavar="FILE", help="Tune nothing: write the fastest of --database as a table."
)
@click.option(
    "--recorded", multiple=True, type=FILE, metavar="FILE", help="Further times for --table: sweeps, results of bench."
)
@dask_option
@click.option("--plot", "plot_file", type=OutFile(), help="Draw the trials of each job to a .png or .svg file.")
@click.option(
    "--export", nargs=2, type=(click.Choice(EXPORTS), OutFile()), metavar="FORMAT FILE", help=", ".join(EXPORTS)
)
@output_options
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
    top: int | None,
    device: str | None,
    overlap: bool,
    shards: tuple[Path, ...],
    table: Path | None,
    recorded: tuple[Path, ...],
    dask: str | None,
    plot_file: Path | None,
    export: tuple[str, Path] | None,
    output: Output,
) -> None:
    """Measure the schedules of each SPEC for each number of rows, and lock the fastest.

    Every candidate has to reproduce the interpreter's bits before it is timed. Every trial is recorded in the
    database at once, and a later run does not repeat it. Ctrl-C keeps the best so far. On several GPUs, SPECs are
    tuned side by side.
    """
    _check_request(table, specs, shards, frozen, ranking, device, views=bool(plot_file or export))
    if top is not None and not ranking:
        raise click.UsageError("--top belongs to --ranking.")
    if table is not None:
        return _write_table(table, [*recorded, *filter(None, [database])], device, output)
    database = database or config.cache_dir() / "tune" / "trials.jsonl"
    parsed = [*dict.fromkeys(parse_spec(text) for text in specs)]
    views = Views(plot_file, export, {str(s): s.slug for s in parsed}, rows)
    if shards:
        return _merge(shards, database, output)
    if ranking:
        return _print_ranking(parsed, rows, top, device, output)
    if frozen:
        return _frozen(parsed, rows, (database, lock_file), views, output)
    ctx.exit(_tune(parsed, rows, (budget, trials), overlap, (database, lock_file), dask, views, output))


def _check_request(
    table: Path | None, specs: Sequence[str], shards: Sequence[Path], frozen: bool, ranking: bool, device: str | None,
    *, views: bool,
) -> None:  # fmt: skip
    """UsageError for options that do not go together: a table, a merge, a ranking and choices are one each."""
    if table is not None:
        if specs or shards or frozen or ranking:
            raise click.UsageError("--table takes recorded times from --database and --recorded, and nothing else.")
        return
    if bool(shards) == bool(specs) or (frozen and ranking):
        raise click.UsageError("tune takes SPECs, with --frozen or --ranking or neither, or else --merge alone.")
    if device is not None and not ranking:
        raise click.UsageError(
            "--device belongs to --ranking and --table; tuning itself runs on a GPU of this machine."
        )
    if views and (shards or ranking):
        raise click.UsageError("--plot and --export show trials, but --merge and --ranking have none; see --frozen.")


def _tune(
    specs: Sequence[Spec],
    rows: Sequence[int],
    bounds: tuple[float, int],
    overlap: bool,
    files: tuple[Path, Path],
    dask: str | None,
    views: Views,
    output: Output,
) -> int:
    """Tune, lock, report; the exit code."""
    from lngen.lab.tune import job, tuner
    from lngen.lab.tune.trials import foreign
    from lngen.launch.runtime.lock_file import read_lock

    path, lock_file = files
    views.check()
    old, kept = read_lock(lock_file, missing_ok=True), _kept(path)
    known: dict[tuple[str, int], list[Trial]] = {}
    for t in kept:
        known.setdefault((t.spec, t.rows), []).append(t)
    how = job.OVERLAPPING if overlap else job.GPU
    jobs = [
        job.Job(s, m, *bounds, tuple(known.get((str(s), m), ())), tuner.incumbents(old, s, m), how)
        for s in specs
        for m in rows
    ]
    with dask_executor(dask) as executor, _listening() as listener:
        result = tuner.tune(jobs, path, executor=executor, listener=listener)
    devices = [o.device for o in result.outcomes if o.device is not None]
    for text in foreign(kept, devices, path) if devices else ():
        note(text)
    tuner.store_choices(lock_file, result.outcomes)
    _report(result, lock_file, output)
    for o in result.outcomes:
        if o.trials or len(jobs) == 1:
            views.show(o.spec, o.rows, o.trials, o.choice)
    if result.interrupted:
        return INTERRUPTED
    return 0 if all(o.choice is not None for o in result.outcomes) else 1


def _report(result: Report, lock_file: Path, output: Output) -> None:
    """What was found, and remarks on what was not."""
    from lngen.lab.tune.views import REPORT_COLUMNS, against_default, report_json, report_remarks, report_rows

    for text in report_remarks(result.outcomes):
        note(text)
    told = [against_default(result.outcomes)]
    if any(o.choice for o in result.outcomes):
        told.append(NEXT.format(shell=shlex.quote(str(lock_file)), python=repr(str(lock_file))))
    output.table(
        {"interrupted": result.interrupted, "lock": str(lock_file), "tuned": [report_json(o) for o in result.outcomes]},
        table_text(REPORT_COLUMNS, report_rows(result.outcomes)) + "".join(f"{text}\n" for text in told if text),
    )


def _frozen(specs: Sequence[Spec], rows: Sequence[int], files: tuple[Path, Path], views: Views, output: Output) -> None:
    """The locked schedules for this machine's GPU, or for any; the views show the database, locked or not."""
    from lngen.lab.tune.tuner import frozen_choices
    from lngen.launch.runtime.launcher import device_count, device_name
    from lngen.launch.runtime.lock_file import read_lock

    path, lock_file = files
    views.check()
    lock, device = read_lock(lock_file, missing_ok=True), device_name(0) if device_count() else None
    kept = _kept(path) if views else ()
    jobs = product(map(str, specs), rows) if views else ()
    shown = [(s, m, *_shown(kept, path, s, m, device, lock.nearest(s, m, device=device))) for s, m in jobs]
    for view in shown:
        views.show(*view)
    found = frozen_choices(lock, specs, rows, device)
    columns = "spec", "rows", "device", "locked rows", "schedule"
    wanted = [m for _ in specs for m in rows]
    listed = [(e.spec, m, e.device, e.rows, e.schedule) for e, m in zip(found, wanted, strict=True)]
    locked = [
        {"spec": spec, "rows": m, "device": name, "locked_rows": at, "schedule": schedule}
        for spec, m, name, at, schedule in listed
    ]
    output.table({"locked": locked}, table_text(columns, listed))


def _shown(
    kept: Sequence[Trial], path: Path, spec: str, rows: int, device: str | None, locked: Locked | None
) -> tuple[list[Trial], Choice | None]:
    """The trials of a database on that device, or (None) on the locked one, or on the first; and the locked one."""
    from lngen.lab.tune import trials
    from lngen.lab.tune.job import taken

    known = [locked.device] if locked else [t.device for t in kept if (t.spec, t.rows) == (spec, rows)]
    device = device or next(iter(known), None)
    shown = trials.of(kept, spec, rows, device) if device else []
    if not shown:
        where = f" on {device}" if device else ""
        raise LngenError(
            f"'{path}' holds no trials of {spec} with {rows} rows{where}; name the database they were kept in "
            "(--database)."
        )
    return shown, taken(shown, locked.schedule) if locked else None


def _kept(path: Path) -> tuple[Trial, ...]:
    """The trials of a database; invalid lines are reported."""
    from lngen.lab.tune.trials import read

    content = read(path)
    for text in content.complaints:
        note(text)
    return content.trials


def _merge(shards: Sequence[Path], path: Path, output: Output) -> None:
    """Add the trials of other databases to the one at ``path``."""
    from lngen.lab.tune.trials import merge

    count, complaints = merge(shards, path)
    for text in complaints:
        note(text)
    output.table({"database": str(path), "trials": count}, f"{count} trials in {path}\n")


def _print_ranking(
    specs: Sequence[Spec], rows: Sequence[int], top: int | None, device: str | None, output: Output
) -> None:
    """The order of the candidates, of each job the first ``top``; with their times for so many rows.

    Those that a table chooses come first and name it, the others follow in the model's order. It is the same for all
    numbers of rows of a workload class, so the times need not be in order.
    """
    from lngen.compiler.compile import Compilation
    from lngen.compiler.schedule import workload
    from lngen.compiler.schedule.table import origins
    from lngen.lab.explain.evidence import predicted
    from lngen.lab.explain.timings import runs
    from lngen.lab.tune.candidates import ranking

    gpu = named(device) if device else default_device()
    listed: list[dict[str, Any]] = []
    texts: list[str] = []
    for spec in specs:
        p = Compilation(spec).problem
        for m in rows:
            found = ranking(spec, m, gpu.arch, gpu)[:top]
            chosen = {s: table.file for table, _, s in origins(p, workload(p, m, gpu), gpu)}
            here = next((r.times for r in runs(str(spec), p, gpu, m) if (r.device, r.rows) == (gpu.name, m)), {})
            lines = []
            for rank, (s, us) in enumerate(zip(found, predicted(found, p, m, gpu).round(3).tolist(), strict=True)):
                about = {"spec": str(spec), "rows": m, "rank": rank, "from": chosen.get(s, "model")}
                lines.append({**about, "predicted_us": us, "measured_us": here.get(s), "schedule": str(s)})
            texts.append(_ranking_text(lines, found, gpu.name))
            listed += lines
    output.table({"ranking": listed}, "\n".join(texts))


def _ranking_text(lines: Sequence[Mapping[str, Any]], found: Sequence[Schedule], gpu: str) -> str:
    """The ranking of one job: what its columns say, and its schedules, after the first as changes where shorter."""
    from lngen.compiler.problem.schedule import changes

    first, measured = lines[0], any(line["measured_us"] for line in lines)
    files = ", ".join(dict.fromkeys(line["from"] for line in lines if line["from"] != "model"))
    by_model = [line["predicted_us"] for line in lines if line["from"] == "model"]
    said = [
        f"{first['spec']} with {first['rows']} rows: schedules in the order in which lngen prefers them on {gpu}",
        "predicted: by lngen's model" + f"; measured: recorded on {gpu} with {first['rows']} rows" * measured,
    ]
    if files:
        said.append(f"from: table = the entry of {files} for rows of this kind, measured; model = by prediction")
    if by_model != sorted(by_model):
        said.append("The order is that of the most rows of the workload class, so these times need not rise.")
    columns = {
        "rank": [line["rank"] for line in lines],
        "from": ["model" if line["from"] == "model" else "table" for line in lines] if files else [],
        "predicted us": [f"{line['predicted_us']:.4g}" for line in lines],
        "measured us": [f"{us:.4g}" if (us := line["measured_us"]) else "-" for line in lines] if measured else [],
        "schedule; below the first, what differs from it": [
            min(str(s), changes(found[0], s), key=len) if s != found[0] else str(s) for s in found
        ],
    }
    shown = {name: cells for name, cells in columns.items() if cells}
    return "".join(f"{line}\n" for line in said) + table_text([*shown], zip(*shown.values(), strict=True))


def _write_table(path: Path, sources: Sequence[Path], device: str | None, output: Output) -> None:
    """Write the table of a GPU from recorded times."""
    from lngen.files import write_all
    from lngen.lab.tune.device_table import build, text
    from lngen.lab.tune.recorded import latest, points

    if not sources:
        raise click.UsageError("--table takes times from --database FILE, --recorded FILE, or both; got neither.")
    gpu = named(device) if device else default_device()
    found = points(sources)
    made = build(gpu, latest(found), [p for p in found if len(p.times) == 1])
    names = ", ".join(source.name for source in sources)
    write_all({path: text(made, ABOUT.format(names)).encode()})
    count = sum(map(len, made.entries.values()))
    summary = f"{count} entries for {gpu.name} in {path}\n"
    output.table({"table": str(path), "device": gpu.name, "entries": count}, summary)


@contextmanager
def _listening() -> Iterator[Listener]:
    """A listener that shows the best so far on a terminal, and messages anywhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _listener(note, None)
        return

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status("building") as status:
        yield _listener(show, lambda text: status.update(text.replace("[", "\\[")))


def _listener(show: Callable[[str], None], update: Callable[[str], None] | None) -> Listener:
    """``show`` prints a line, ``update`` replaces the lines of the running jobs."""
    from lngen.lab.tune.job import Listener

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
