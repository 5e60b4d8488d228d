"""Which schedules an arch has the instructions for."""

from __future__ import annotations

import re

from lngen.errors import ScheduleError
from lngen.schedule.legal import MAX_CLUSTER
from lngen.schedule.schedule import FORMS, Schedule

# Below these a form's instructions do not exist, nor clusters; from PORTABLE_ARCH on these are small.
MINIMUM_ARCH = {"registers": 75, "stream": 75, "async": 80, "bulk": 90, "ragged": 90}
CLUSTER_ARCH, PORTABLE_ARCH, PORTABLE_CLUSTER = 90, 120, 8

# From here on a kernel may begin while the one before it ends; see _launch.cuh.jinja.
OVERLAP_ARCH = 90


def capability(arch: str) -> int:
    """The compute capability that an arch names: 90 for sm_90 and sm_90a; 0 for what names none."""
    found = re.fullmatch(r"sm_([0-9]{2,3})[a-z]?", arch)
    return int(found[1]) if found else 0


def minimum_arch(s: Schedule) -> int:
    """The compute capability from which on its instructions exist."""
    return max(MINIMUM_ARCH[s.form], CLUSTER_ARCH if s.cluster > 1 else 0)


def largest_cluster(here: int) -> int:
    """The most blocks of a cluster there: none before sm_90, from sm_120 on as many as every GPU with clusters has."""
    return 1 if here < CLUSTER_ARCH else MAX_CLUSTER if here < PORTABLE_ARCH else PORTABLE_CLUSTER


def exists(s: Schedule, here: int) -> bool:
    """True if its instructions, and clusters of its size, exist at the compute capability ``here``."""
    return here >= MINIMUM_ARCH[s.form] and s.cluster <= largest_cluster(here)


def check_arch(s: Schedule, arch: str) -> None:
    """ScheduleError if its instructions do not exist on ``arch``; what no arch is, the compiler says."""
    here = capability(arch)
    there = [form for form in FORMS if MINIMUM_ARCH[form] <= here]
    if there and s.form not in there:
        raise ScheduleError(
            f"form={s.form} needs sm_{MINIMUM_ARCH[s.form]} or later, got {arch}; use form={_either(there)}."
        )
    if there and s.cluster > largest_cluster(here):
        raise ScheduleError(f"cluster is at most {largest_cluster(here)} on {arch}, got {s.cluster}.")


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
