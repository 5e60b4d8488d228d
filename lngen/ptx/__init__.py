"""The PTX that NVRTC emits, executed on NumPy: bits, bounds, alignment, initialisation, barriers, races, traffic."""

from lngen.errors import PtxError
from lngen.ptx.kernel import run_kernel
from lngen.ptx.parser import parse
from lngen.ptx.report import Finding, Outcome, Traffic
from lngen.ptx.run import run_plan

__all__ = ["Finding", "Outcome", "PtxError", "Traffic", "parse", "run_kernel", "run_plan"]
