"""Inspection: the resources, traffic and instructions of a kernel set."""

from lngen.inspect.resources import COLUMNS, resources
from lngen.inspect.traffic import KernelTraffic, measure, traffic_json, traffic_rows, traffic_text

__all__ = ["COLUMNS", "KernelTraffic", "measure", "resources", "traffic_json", "traffic_rows", "traffic_text"]
