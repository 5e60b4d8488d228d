"""Choosing: who goes on to the final rounds, and which of those that are equally fast is taken.

Two candidates closer than the noise are a tie, and a tie goes to the first in the model's order. So runs choose
alike, although none measures the same times as another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lngen.tune.trial import Trial

NOISE = 0.01  # two medians that differ by less are one
MOST_NOISE = 0.03  # what wide spreads may raise it to
NEAR = 0.05  # brief rounds are less exact: what is this near to the best goes on
FINALISTS = 8
FASTEST = 3  # of the finalists, chosen by time alone


@dataclass(frozen=True)
class Choice:
    """The trial chosen, and all that tie with it, it included, in order."""

    trial: Trial
    ties: tuple[Trial, ...]


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """Whom to time again, in rank order.

    The first of all, which is the default, so that one knows what tuning gains; the fastest few; and the first in
    order of those near the fastest.
    """
    timed = sorted((t for t in trials if t.timed), key=_order)
    fastest = sorted(timed, key=lambda t: (t.ratio, *_order(t)))
    near = [t for t in timed if t.ratio <= (1 + NEAR) * fastest[0].ratio]
    chosen = dict.fromkeys([*timed[:1], *fastest[:FASTEST], *near])
    return sorted([*chosen][:FINALISTS], key=_order)


def choose(trials: Sequence[Trial], incumbent: str = "") -> Choice | None:
    """The choice among trials of one job; None if none has a time.

    Trials of the most rounds decide alone. ``incumbent``, the schedule chosen before, wins a tie: a lock file
    does not change for nothing.
    """
    timed = [t for t in trials if t.timed]
    if not timed:
        return None
    rounds = max(t.rounds for t in timed)
    final = sorted((t for t in timed if t.rounds == rounds), key=_order)
    best = min(final, key=lambda t: (t.ratio, *_order(t)))
    ties = tuple(t for t in final if t.ratio <= (1 + noise(best)) * best.ratio)
    return Choice(next((t for t in ties if t.schedule == incumbent), ties[0]), ties)


def taken(trials: Sequence[Trial], schedule: str) -> Choice | None:
    """The choice that a lock file names, among trials of one job; None if it has no time there."""
    return next((Choice(t, (t,)) for t in trials if t.timed and t.schedule == schedule), None)


def noise(trial: Trial) -> float:
    """By how much a candidate may be slower than ``trial`` and still tie with it."""
    if not trial.us_median or trial.us_p10 is None or trial.us_p90 is None:
        return NOISE
    spread = (trial.us_p90 - trial.us_p10) / 2 / trial.us_median
    return min(max(spread, NOISE), MOST_NOISE)


def _order(trial: Trial) -> tuple[int, str]:
    return trial.rank, trial.schedule
