"""The choice: trials for the final rounds, and the winner among equally fast ones.

Two candidates closer than the noise are a tie, and a tie goes to the first in the model's order. So runs choose alike,
although their times differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lngen.tune.trial import Trial

NOISE = 0.01  # two medians that differ by less are equal
MOST_NOISE = 0.03  # the most that a wide spread may raise it to
NEAR = 0.05  # brief rounds are less exact: trials this close to the best go on
FINALISTS = 8
FASTEST = 3  # of the finalists, chosen by time alone


@dataclass(frozen=True)
class Choice:
    """The chosen trial, and all that tie with it (itself included), in order."""

    trial: Trial
    ties: tuple[Trial, ...]


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The trials to time again, in rank order.

    These are the first of all, which is the default, so that the gain of tuning is known; the fastest few; and the
    first in order of those near the fastest.
    """
    timed = sorted((t for t in trials if t.timed), key=_order)
    fastest = sorted(timed, key=lambda t: (t.ratio, *_order(t)))
    near = [t for t in timed if t.ratio <= (1 + NEAR) * fastest[0].ratio]
    chosen = dict.fromkeys([*timed[:1], *fastest[:FASTEST], *near])
    return sorted([*chosen][:FINALISTS], key=_order)


def choose(trials: Sequence[Trial], incumbent: str = "") -> Choice | None:
    """The choice among trials of one job; None if none has a time.

    Only trials with the most rounds count. ``incumbent``, the schedule chosen before, wins a tie, so that a lock
    file does not change without reason.
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
    """The fraction by which a candidate may be slower than ``trial`` and still tie with it."""
    if not trial.us_median or trial.us_p10 is None or trial.us_p90 is None:
        return NOISE
    spread = (trial.us_p90 - trial.us_p10) / 2 / trial.us_median
    return min(max(spread, NOISE), MOST_NOISE)


def _order(trial: Trial) -> tuple[int, str]:
    return trial.rank, trial.schedule
