"""What a kernel set uses: the resources and the machine code of each kernel, and the memory traffic of a call."""

from lngen.inspect.instruction_mix import KernelCode, machine_code
from lngen.inspect.sass import Instruction, Location, disassemble
from lngen.inspect.traffic import (
    COLUMNS,
    KernelTraffic,
    measure,
    resources,
    row_units,
    traffic_json,
    traffic_rows,
    traffic_text,
)

__all__ = [
    "COLUMNS",
    "Instruction",
    "KernelCode",
    "KernelTraffic",
    "Location",
    "disassemble",
    "machine_code",
    "measure",
    "resources",
    "row_units",
    "traffic_json",
    "traffic_rows",
    "traffic_text",
]
