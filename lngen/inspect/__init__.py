"""Looking inside: what a kernel set moves and executes."""

from lngen.inspect.traffic import KernelTraffic, measure, traffic_text

__all__ = ["KernelTraffic", "measure", "traffic_text"]
