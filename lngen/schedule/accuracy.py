"""How well the model predicts: its errors over recorded times, as constants, since few installations have the records.

``python -m lngen.schedule.recorded`` computes them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lngen.schedule.model import MODEL, TERMS, estimates, terms

if TYPE_CHECKING:
    from lngen.schedule.recorded import Sample

REPEATED = 0.025  # times whose ratio has a smaller natural logarithm do not differ


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted times, as natural logarithms: 0.1 is about a tenth.

    points, schedules     numbers of those that were recorded
    off, off_most         error of a time: median and 90th percentile of |log(predicted / recorded)|
    dominated             median error of a time by the term that is the largest
    apart, apart_most     error of the ratio of two times of a point: median and 90th percentile
    ordered               fraction of the pairs that are ordered right, of those whose recorded times differ
    told                  the same of those whose predicted times differ by more than ``apart_most``
    """

    points: int
    schedules: int
    off: float
    off_most: float
    dominated: Mapping[str, float]
    apart: float
    apart_most: float
    ordered: float
    told: float


def accuracy(sample: Sample) -> Accuracy:
    """The errors of the model at the points of a sample."""
    off = np.log(estimates(sample.actual, sample.device, MODEL) / sample.times)
    parts = terms(sample.actual, sample.device, MODEL)
    largest = np.argmax([getattr(parts, name) for name in TERMS], axis=0)
    medians = {n: _round(np.median(np.abs(off[largest == k]))) for k, n in enumerate(TERMS) if (largest == k).any()}
    joined = []
    for n in range(len(sample.points)):
        mine = np.flatnonzero(sample.owner == n)
        i, j = np.triu_indices(len(mine), 1)
        recorded = np.log(sample.times[mine])
        joined.append((off[mine][i] - off[mine][j], recorded[i] - recorded[j]))
    error, ratio = np.concatenate(joined, axis=1)
    apart, most = (_round(np.quantile(np.abs(error), q)) for q in (0.5, 0.9))
    right, differ = (error + ratio) * ratio > 0, np.abs(ratio) > REPEATED
    told = differ & (np.abs(error + ratio) > most)
    return Accuracy(
        len(sample.points), len(off), _round(np.median(np.abs(off))), _round(np.quantile(np.abs(off), 0.9)), medians,
        apart, most, _round(right[differ].mean()), _round(right[told].mean()),
    )  # fmt: skip


def _round(number: float) -> float:
    return round(float(number), 3)


# By direction: with column sums (bwd) or without (fwd).
STATED = {
    "fwd": Accuracy(
        331, 4672, 0.22, 0.452, {"memory": 0.189, "waiting": 0.328, "issuing": 0.235}, 0.121, 0.415, 0.749, 0.957
    ),
    "bwd": Accuracy(
        236, 2858, 0.111, 0.292, {"memory": 0.105, "waiting": 0.183, "issuing": 0.358}, 0.064, 0.24, 0.807, 0.924
    ),
}
