"""The schedules for which an arch has the instructions."""

from __future__ import annotations

from lngen.devices import capability
from lngen.errors import ScheduleError
from lngen.schedule.legal import MAX_CLUSTER
from lngen.schedule.schedule import FORMS, Schedule

# The first archs with the instructions of a form, and with clusters; from PORTABLE_ARCH on clusters are small.
MINIMUM_ARCH = {"registers": 75, "multipass": 75, "cp_async": 80, "tma": 90, "tma_unaligned": 90}
CLUSTER_ARCH, PORTABLE_ARCH, PORTABLE_CLUSTER = 90, 120, 8

# From this arch on a kernel may start while the previous one ends; see templates/include/lngen/launch.cuh.
OVERLAP_ARCH = 90


def minimum_arch(s: Schedule) -> int:
    """The lowest compute capability that has the schedule's instructions."""
    return max(MINIMUM_ARCH[s.form], CLUSTER_ARCH if s.cluster > 1 else 0)


def largest_cluster(here: int) -> int:
    """The largest cluster on an arch: none before sm_90, from sm_120 on the size that every GPU supports."""
    return 1 if here < CLUSTER_ARCH else MAX_CLUSTER if here < PORTABLE_ARCH else PORTABLE_CLUSTER


def exists(s: Schedule, here: int) -> bool:
    """True if the compute capability ``here`` has the schedule's instructions and cluster size."""
    return here >= MINIMUM_ARCH[s.form] and s.cluster <= largest_cluster(here)


def check_arch(s: Schedule, arch: str) -> None:
    """ScheduleError if ``arch`` lacks the schedule's instructions; an unknown arch is reported by the compiler."""
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
