"""The choice of schedules: their space, measured ones, the model, and the order in which they are tried."""

from lngen.schedule.ranking import attempts, ranked
from lngen.schedule.space import space
from lngen.schedule.table import known_clean, most_bytes, row_bytes, row_counts, workload

__all__ = ["attempts", "known_clean", "most_bytes", "ranked", "row_bytes", "row_counts", "space", "workload"]
