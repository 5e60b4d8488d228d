"""Views of trials: a table and JSON of a run; of one job a picture and the formats of other tuners.

No format of other tuners has a field for a spec: the kernel is named after it, and the number of rows is the problem
size. They require the time of day, which would make equal files differ, so it is constant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lngen.compiler.problem import Schedule, parse_schedule
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError, ScheduleError, one_of
from lngen.lab.bench.figures import COLOURS, GRID, STYLE, check_plot, save, sign
from lngen.lab.tune.job import Choice, Outcome
from lngen.lab.tune.trials import STATUSES, Trial
from lngen.version import __version__

REPORT_COLUMNS = (
    "spec", "rows", "us", "of reference", "over default", "ties", "tried", "correct", "skipped", "s", "schedule",
)  # fmt: skip
TIMESTAMP = "1970-01-01 00:00:00+00:00"
INVALID = {"constraints": "InvalidConfig", "compile": "CompilationFailedConfig"}  # the others: RuntimeFailedConfig
PARAMETERS = tuple(f.name for f in fields(Schedule))
TIMED, BEST, GREY, LINE = COLOURS["lngen"], COLOURS["torch"], "#999999", COLOURS["copy"]
MOST_PANELS = 6
MARKERS = dict(zip(STATUSES, "xv^sDo", strict=True))


# ---- the report of a run ----


def report_rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """A row of REPORT_COLUMNS per choice.

    Its time; the times of the reference and of the default over it; the number of schedules that tie with it, and of
    those that were not compiled because one like them spills.
    """
    for o in outcomes:
        if o.choice is None:
            continue
        t = o.choice.trial
        share = f"{1 / t.ratio:.3f}" if t.reference else "-"
        gain = f"{_default(o).ratio / t.ratio:.3f}"
        correct = sum(x.status == "correct" for x in o.trials)
        counts = len(o.choice.ties) - 1, len(o.trials), correct, o.skipped
        yield o.spec, o.rows, t.us_median, share, gain, *counts, o.seconds, t.schedule


def against_default(outcomes: Sequence[Outcome]) -> str:
    """The defaults' share of the tuned speed; an empty text for less than two choices."""
    shares = [o.choice.trial.ratio / _default(o).ratio for o in outcomes if o.choice is not None]
    if len(shares) < 2:
        return ""
    mean = math.exp(sum(map(math.log, shares)) / len(shares))
    return f"The defaults reach {mean:.3f} of the tuned speed on geometric mean, {min(shares):.3f} at least."


def _default(o: Outcome) -> Trial:
    """The first trial with a time: the schedule without tuning."""
    return next(t for t in o.trials if t.timed)


def report_remarks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A sentence on each outcome that has no choice, with the reasons, or that ended early."""
    for o in outcomes:
        name = f"{o.spec} rows={o.rows}"
        if o.error:
            yield f"{name}: {o.error}"
        elif o.choice is None:
            yield f"{name}: no candidate is correct and timed{'' if o.complete else ', the run ended early'}."
            yield from (f"  {t.schedule}: {t.status}: {t.reason}" for t in o.trials if t.reason)
        elif not o.complete and sum(t.timed for t in o.trials) < 2:
            yield f"{name}: ended before a second schedule was timed, so nothing is compared; give a larger --budget."
        elif not o.complete:
            yield f"{name}: ended early; run it again to try the candidates that are left."


def report_json(o: Outcome) -> dict[str, Any]:
    """An outcome with all its trials, and the number of trials with each status."""
    return {
        "spec": o.spec,
        "rows": o.rows,
        "device": o.device.name if o.device else None,
        "compiler": o.device.compiler if o.device else None,
        "chosen": o.choice.trial.to_json() if o.choice else None,
        "ties": [t.schedule for t in o.choice.ties] if o.choice else [],
        "statuses": {s: n for s in STATUSES if (n := sum(t.status == s for t in o.trials))},
        "trials": [t.to_json() for t in o.trials],
        "complete": o.complete,
        "skipped": o.skipped,
        "messages": [*o.messages],
        "error": o.error,
        "seconds": o.seconds,
    }


# ---- formats of other tuners ----


def export(trials: Sequence[Trial], form: str) -> str:
    """The trials of one job as ``form``, one of FORMATS; LngenError for none, or for those of several jobs."""
    jobs = sorted({(t.spec, t.rows, t.device) for t in trials})
    if len(jobs) != 1:
        raise LngenError(
            f"an export holds the trials of one spec at one number of rows, got {len(jobs)}; export them one by one."
        )
    if form not in FORMATS:
        raise LngenError(f"there is no export format '{form}', {one_of(form, FORMATS)}")
    return FORMATS[form](trials)


def t4(trials: Sequence[Trial]) -> str:
    """A T4 results file, schema 1.0.0; times in ms."""
    results = []
    for t in trials:
        measurements = [{"name": n, "value": v, "unit": u} for n, v, u in _measurements(t)]
        runtimes = [_ms(v) for v in (t.us_p10, t.us_median, t.us_p90) if v is not None]
        times = {"compilation_time": t.compile_ms, "runtimes": runtimes, "framework": 0, "search_algorithm": 0}
        results.append(
            {
                "timestamp": TIMESTAMP,
                "configuration": configuration(t),
                "objectives": ["time"],
                "times": {**times, "validation": 0},
                "invalidity": t.status,
                "correctness": int(t.status == "correct"),
                "measurements": measurements,
            }
        )
    return json.dumps({"schema_version": "1.0.0", "results": results}, indent=1) + "\n"


def kernel_tuner(trials: Sequence[Trial]) -> str:
    """A Kernel Tuner cache file, schema 1.1.0, as its simulation mode reads it; times in ms.

    The layout matters: Kernel Tuner accepts a file as complete only if it ends in two braces on lines of their own.
    """
    first = trials[0]
    listed = [configuration(t) for t in trials]
    head = {
        "schema_version": "1.1.0",
        "device_name": first.device,
        "kernel_name": parse_spec(first.spec).slug,
        "problem_size": [first.rows],
        "tune_params_keys": [*PARAMETERS],
        "tune_params": {k: sorted({c[k] for c in listed}) for k in PARAMETERS},
        "objective": "time",
        "cache": {},
    }
    entries = []
    for t, config in zip(trials, listed, strict=True):
        time: dict[str, Any] = {"time": INVALID.get(t.status, "RuntimeFailedConfig")}
        if t.us_median is not None:
            samples = [_ms(v) for v in (t.us_p10, t.us_median, t.us_p90) if v is not None]
            time = {"time": _ms(t.us_median), "times": samples}
        took = {"compile_time": t.compile_ms, "verification_time": 0, "benchmark_time": 0, "strategy_time": 0}
        entry = {**config, **time, **took, "framework_time": 0, "timestamp": TIMESTAMP}
        key = ",".join(str(config[k]) for k in PARAMETERS)
        entries.append(json.dumps({key: entry})[1:-1])
    return json.dumps(head, indent="")[:-3] + "\n" + ",\n".join(entries) + "}\n}"


FORMATS: dict[str, Callable[[Sequence[Trial]], str]] = {"t4": t4, "kernel-tuner": kernel_tuner}


def configuration(trial: Trial) -> dict[str, Any]:
    """A trial's schedule as parameters; yes and no as 1 and 0. LngenError for one that this version cannot read."""
    try:
        schedule = parse_schedule(trial.schedule, Schedule("registers", threads=1, rows_per_block=1, vec=1))
    except ScheduleError as error:
        raise LngenError(f"a trial cannot be exported: {error}") from error
    values = {k: getattr(schedule, k) for k in PARAMETERS}
    return {k: int(v) if isinstance(v, bool) else v for k, v in values.items()}


def _measurements(t: Trial) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = [("registers", t.registers, ""), ("shared", t.shared, "bytes")]
    if t.us_median is not None:
        found.insert(0, ("time", _ms(t.us_median), "ms"))
    if t.reference is not None:
        found.append(("reference", _ms(t.reference), "ms"))
    return found


def _ms(us: float) -> float:
    return round(us / 1e3, 6)


# ---- the picture ----


def plot(trials: Sequence[Trial], choice: Choice | None, path: Path) -> None:
    """Draw the trials of one job: times, the reference as a line, the choice marked, failures along the top.

    The ending of ``path`` decides the format, .png or .svg. The same trials give the same bytes. MissingError
    without matplotlib, LngenError for another ending or a path that cannot be written.
    """
    matplotlib, figures = check_plot(path)
    configs = {t.schedule: configuration(t) for t in trials}
    varying = [k for k in PARAMETERS if len({str(c[k]) for c in configs.values()}) > 1][: MOST_PANELS - 1]
    with matplotlib.rc_context(STYLE):
        columns = min(len(varying) + 1, 3)
        lines = -(-(len(varying) + 1) // columns)
        figure = figures.Figure(figsize=(4.6 * columns, 3.6 * lines), layout="constrained")
        title = f"{trials[0].spec}, {trials[0].rows} rows" if trials else "no trials"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for position, key in enumerate(["rank", *varying]):
            axes = figure.add_subplot(lines, columns, position + 1)
            _panel(
                axes,
                trials,
                choice,
                {t.schedule: t.rank if key == "rank" else configs[t.schedule][key] for t in trials},
            )
            axes.set_xlabel("rank in the model's order" if key == "rank" else key)
            if position == 0:
                axes.legend(fontsize=7)
        sign(figure, _origin(trials))
        save(figure, path)


def _origin(trials: Sequence[Trial]) -> str:
    """The origin of the trials: device, compiler, lngen's version, and the day of the last."""
    if not trials:
        return ""
    last = max(t.date for t in trials)
    return ", ".join(filter(None, [trials[0].device, trials[0].compiler, f"lngen {__version__}", last]))


def _panel(axes: Any, trials: Sequence[Trial], choice: Choice | None, where: dict[str, Any]) -> None:
    """One cloud of trials; words, and numbers with few distinct values, become ticks side by side."""
    values = sorted(set(where.values()))
    ticks = {v: n for n, v in enumerate(values)}
    numbered = where == {t.schedule: t.rank for t in trials}
    place = {s: v if numbered else ticks[v] for s, v in where.items()}
    if not numbered:
        axes.set_xticks(range(len(values)), [str(v) for v in values])
    timed = [t for t in trials if t.us_median is not None and t.status == "correct"]
    top = max((t.us_median or 0.0 for t in timed), default=1.0) * 1.1
    for status in STATUSES[:-1]:
        failed = [t for t in trials if t.status == status]
        if failed:
            xs = [place[t.schedule] for t in failed]
            axes.plot(xs, [top] * len(xs), MARKERS[status], color=GREY, markersize=4, label=status)
    if timed:
        axes.plot([place[t.schedule] for t in timed], [t.us_median for t in timed], "o", color=TIMED, markersize=4)
    references = [t.reference for t in timed if t.reference is not None]
    if references:
        axes.axhline(sorted(references)[len(references) // 2], color=LINE, linewidth=1, label="reference")
    if choice is not None:
        best = choice.trial
        axes.plot([place[best.schedule]], [best.us_median], "*", color=BEST, markersize=12, label="chosen")
    axes.set_ylabel("us a launch")
    axes.grid(True, color=GRID, linewidth=0.7)
