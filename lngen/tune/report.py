"""The report of a run: a row and a JSON object per outcome, and sentences about problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lngen.tune.job import Outcome
from lngen.tune.trial import STATUSES, Trial

COLUMNS = ("spec", "rows", "us", "of reference", "over default", "ties", "tried", "correct", "s", "schedule")


def rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """A row of COLUMNS per choice.

    Its time; the times of the reference and of the default over it; the number of schedules that tie with it.
    """
    for o in outcomes:
        if o.choice is None:
            continue
        t = o.choice.trial
        share = f"{1 / t.ratio:.3f}" if t.reference else "-"
        gain = f"{_default(o).ratio / t.ratio:.3f}"
        correct = sum(x.status == "correct" for x in o.trials)
        counts = len(o.choice.ties) - 1, len(o.trials), correct
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


def remarks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A sentence on each outcome that has no choice, with the reasons, or that ended early."""
    for o in outcomes:
        name = f"{o.spec} rows={o.rows}"
        if o.error:
            yield f"{name}: {o.error}"
        elif o.choice is None:
            yield f"{name}: no candidate is correct and timed{'' if o.complete else ', the run ended early'}."
            yield from (f"  {t.schedule}: {t.status}: {t.reason}" for t in o.trials if t.reason)
        elif not o.complete:
            yield f"{name}: ended early; run it again to try the candidates that are left."


def as_json(o: Outcome) -> dict[str, Any]:
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
        "messages": [*o.messages],
        "error": o.error,
        "seconds": o.seconds,
    }
