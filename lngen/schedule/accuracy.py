"""How well the model predicts: its errors over recorded times, as constants, since few installations have the records.

``python -m lngen.schedule.recorded`` computes them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lngen.devices import Device
from lngen.schedule.model import TERMS, Features, estimates, terms
from lngen.schedule.space import Numbers, Places

REPEATED = 0.025  # times whose ratio has a smaller natural logarithm do not differ


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted times, as natural logarithms: 0.1 is about a tenth.

    schedules             number of recorded times
    off, off_most         error of a time: median and 90th percentile of |log(predicted / recorded)|
    dominated             median error of a time by the term that is the largest
    apart, apart_most     error of the ratio of two times of a point: median and 90th percentile
    told                  of the pairs that differ, and by more than ``apart_most`` as predicted: fraction ordered right
    """

    schedules: int
    off: float
    off_most: float
    dominated: Mapping[str, float]
    apart: float
    apart_most: float
    told: float


def accuracy(f: Features, device: Device, times: Numbers, point: Places) -> Accuracy:
    """The errors of the model over recorded ``times`` in microseconds; those with one number of a ``point`` compare."""
    off = np.log(estimates(f, device) / times)
    parts = terms(f, device)
    largest = np.argmax([getattr(parts, name) for name in TERMS], axis=0)
    medians = {n: np.median(np.abs(off[largest == k])) for k, n in enumerate(TERMS) if (largest == k).any()}
    places = [np.flatnonzero(point == n) for n in np.unique(point)]
    i, j = np.concatenate([mine[np.array(np.triu_indices(len(mine), 1))] for mine in places], axis=1)
    error, recorded = off[i] - off[j], np.log(times[i] / times[j])
    (median, most), (apart, apart_most) = (np.quantile(np.abs(errors), (0.5, 0.9)) for errors in (off, error))
    expected = error + recorded
    told = (np.abs(recorded) > REPEATED) & (np.abs(expected) > apart_most)
    right = (expected * recorded > 0)[told].mean()
    median, most, apart, apart_most, right = (round(float(n), 3) for n in (median, most, apart, apart_most, right))
    dominated = {name: round(float(n), 3) for name, n in medians.items()}
    return Accuracy(len(off), median, most, dominated, apart, apart_most, right)


# By direction: with column sums (bwd) or without (fwd).
STATED = {
    "fwd": Accuracy(4672, 0.22, 0.452, {"memory": 0.189, "waiting": 0.328, "issuing": 0.235}, 0.121, 0.415, 0.957),
    "bwd": Accuracy(2858, 0.111, 0.292, {"memory": 0.105, "waiting": 0.183, "issuing": 0.358}, 0.064, 0.24, 0.924),
}
