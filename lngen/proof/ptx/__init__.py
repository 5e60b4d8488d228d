"""The PTX that NVRTC emits, executed on NumPy: bits, bounds, alignment, initialisation, barriers, races, traffic."""

from lngen.proof.ptx.call import run_plan
from lngen.proof.ptx.launch import run_kernel
from lngen.proof.ptx.outcome import Finding, Outcome, Traffic
from lngen.proof.ptx.parser import parse

__all__ = ["Finding", "Outcome", "Traffic", "parse", "run_kernel", "run_plan"]
