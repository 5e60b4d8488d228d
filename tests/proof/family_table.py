"""What the default kernels of every named graph move and take: a table, and a command that writes it.

    python tests/proof/family_table.py generated/family.json            # writes the table, in some minutes
    python tests/proof/family_table.py generated/family.json --only softmax
    python tests/proof/family_table.py --spills                      # compiles every default; prints those that spill

Traffic is counted by executing the PTX for sm_90 on NumPy, in units of one [M, D] tensor of the spec's dtype, read and
written; the floor is the number of [M, D] inputs and results of the call in the same units. Registers and spilled bytes
are those of the compiler, for each arch. Needs NVRTC and no GPU. tests/proof/test_family_table.py holds the table.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from lngen.compiler.compile import Compilation
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.ir import WIDE
from lngen.compiler.spec import Spec, parse_spec
from lngen.files import write_all
from lngen.lab.inspect.traffic import measure, row_units, traffic_rows
from lngen.proof.check.inputs import random_inputs

WIDTHS = (1024, 4096, 16384)
ARCHES = ("sm_80", "sm_90", "sm_100")
DTYPE = "bf16"
SPILL_WIDTHS = (768, 1024, 2048, 4096, 8192, 16384)
SPILL_DTYPES = ("bf16", "f16", "f32")

Row = dict[str, Any]


def specs(name: str) -> Iterator[Spec]:
    """The specs of one graph in the table."""
    for d, way in product(WIDTHS, ("fwd", "bwd")):
        yield parse_spec(f"{name}.{way}:d={d},dtype={DTYPE}")


def floor_units(spec: Spec) -> float:
    """The [M, D] tensors of a call, each once, in units of the spec's dtype."""
    graph = spec.graph()
    wide = [v for v in (*graph.params, *graph.results) if v.type.axes == WIDE]
    return sum(v.type.dtype.size for v in wide) / spec.dtype.size


def moved(spec: Spec, compilation: Compilation) -> Row:
    """The traffic of the default kernels."""
    kernels = compilation.kernels(compilation.schedule(DEFAULT_ARCH))
    rows = traffic_rows(kernels.plan)
    measured = measure(kernels, random_inputs(spec, rows), DEFAULT_ARCH)
    return {
        "spec": str(spec), "schedule": str(kernels.plan.schedule), "rows": rows, "floor": floor_units(spec),
        "moved": round(row_units(kernels.plan, measured, rows), 4),
    }  # fmt: skip


def taken(compilation: Compilation, arch: str) -> Row:
    """The registers of each kernel by its role, and the bytes that spill, under the default schedule of an arch."""
    schedule = compilation.schedule(arch)
    resources = compilation.kernels(schedule).cubin(arch).resources
    return {
        "schedule": str(schedule),
        "registers": {name.rpartition("__")[2]: used.registers for name, used in resources.items()},
        "spilled": sum(used.spilled for used in resources.values()),
    }


def row(spec: Spec) -> Row:
    """The entry of one spec."""
    compilation = Compilation(spec)
    return moved(spec, compilation) | {"arches": {arch: taken(compilation, arch) for arch in ARCHES}}


def spills() -> int:
    """Compile the defaults for every graph, width, dtype and arch; print those that spill. How many there are."""
    found = 0
    for name, way, d, dtype in product(GRAPHS, ("fwd", "bwd"), SPILL_WIDTHS, SPILL_DTYPES):
        compilation = Compilation(parse_spec(f"{name}.{way}:d={d},dtype={dtype}"))
        for arch in ARCHES:
            schedule = compilation.schedule(arch)
            if spilled := compilation.kernels(schedule).spilled(arch):
                found += 1
                print(f"{compilation.spec} on {arch}: {spilled} bytes, {schedule}", flush=True)
    return found


def write(path: Path, rows: list[Row]) -> None:
    """One line for each spec."""
    lines = ",\n".join(json.dumps(r) for r in sorted(rows, key=lambda r: r["spec"]))
    write_all({path: f"[\n{lines}\n]\n".encode()})


def main() -> None:
    """Write the entries that are asked for, and keep the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=Path("generated/family.json"))
    parser.add_argument("--spills", action="store_true", help="compile every default, write nothing")
    parser.add_argument("--only", nargs="*", choices=[*GRAPHS], default=[*GRAPHS], metavar="NAME")
    arguments = parser.parse_args()
    if arguments.spills:
        sys.exit(spills() > 0)
    rows = json.loads(arguments.table.read_text()) if arguments.table.exists() else []
    for name in arguments.only:
        made = [row(spec) for spec in specs(name)]
        rows = [r for r in rows if r["spec"] not in {m["spec"] for m in made}] + made
        write(arguments.table, rows)
        for m in made:
            spilling = {arch: found["spilled"] for arch, found in m["arches"].items() if found["spilled"]}
            print(f"{m['spec']:<60} floor {m['floor']:g} moved {m['moved']:g} {spilling or ''}", file=sys.stderr)


if __name__ == "__main__":
    main()
