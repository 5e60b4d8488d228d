"""A job's trials in the formats of others: T4 results and Kernel Tuner's cache.

Neither format has a field for a spec: the kernel is named after it, and the number of rows is the problem size. Both
require the time of day, which would make equal files differ, so it is constant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from lngen.errors import LngenError, ScheduleError
from lngen.schedule import Schedule, parse_schedule
from lngen.spec import parse_spec
from lngen.tune.trial import Trial

TIMESTAMP = "1970-01-01 00:00:00+00:00"
FAILED = {"constraints": "InvalidConfig", "compile": "CompilationFailedConfig"}  # the others: RuntimeFailedConfig
PARAMETERS = tuple(f.name for f in fields(Schedule))


def export(trials: Sequence[Trial], form: str) -> str:
    """The trials of one job as ``form``, one of FORMATS; LngenError for none, or for those of several jobs."""
    jobs = sorted({(t.spec, t.rows, t.device) for t in trials})
    if len(jobs) != 1:
        raise LngenError(
            f"an export holds the trials of one spec at one number of rows, got {len(jobs)}; export them one by one."
        )
    if form not in FORMATS:
        raise LngenError(f"there is no export format '{form}', expected one of {', '.join(FORMATS)}.")
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
        time: dict[str, Any] = {"time": FAILED.get(t.status, "RuntimeFailedConfig")}
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
