"""A repro: one Python file that launches the kernels of a spec, compares their bits and times them.

It needs NumPy and a GPU alone, so that a question about a kernel can be sent to anyone. The number of rows is known, so
that the launch is data: each grid, size and argument is a number.
"""

import base64
import textwrap
import zlib
from pathlib import Path
from pprint import pformat
from typing import Any

from lngen.compiler.compile import KernelSet, spill_text
from lngen.compiler.devices import Device
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import M, is_of_set, is_of_table, values_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.lower import Argument, Kernel, requested_shared
from lngen.compiler.passes.instance import NAMED, indexed, lengths
from lngen.compiler.toolchain import nvrtc_version
from lngen.errors import LngenError
from lngen.packs.repro_program import DTYPES, drawn, identity
from lngen.rules import ROW_KINDS, Distance, row_argument
from lngen.version import __version__

ANY, POSITIVE = (-1.5, 2.5), (0.25, 2.25)  # inputs are drawn from these; a mean of 0 could hide a mistake
MOST_ELEMENTS = 2**26  # of an [M, D] tensor
UNWRITTEN = 0xFE  # the bytes of results and workspace that no kernel has written to

# Of the program, in place of which a file has the numbers.
FROM_LNGEN, ROWS = "\nfrom lngen.dtypes import READ\n", '{t.value: (f"u{t.size}", t.digits) for t in READ}'

FILE = """'''Launch, check and time the kernels of one call: {spec}, {rows} rows.

    python FILE [RUNS]

It needs Python 3.9, NumPy, and a GPU that runs code for {arch}. All inputs are drawn, also what a forward would have
saved. Each result is compared with that of lngen's interpreter, which defines every bit, by its sha256; all NaNs count
as one. Then RUNS calls are timed, by default 100, none for 0.
Exit codes: 0 the same bits, 1 other bits or a call that fails, 3 no GPU that runs the code.

  schedule  {schedule}
  compiled  lngen {lngen}, NVRTC {nvrtc}, for {gpu}{spills}
  made by   lngen repro SPEC --schedule SCHEDULE --arch {arch} --rows {rows} --seed {seed}
'''
{program}

CASE = {case}

# The machine code: a cubin, deflated, in base64.
IMAGE = '''
{image}
'''

# The text that it was compiled from.
SOURCE = r'''
{source}'''

if __name__ == "__main__":
    sys.exit(main(CASE, IMAGE))
"""


def repro(kernels: KernelSet, arch: str, device: Device, rows: int, seed: int = 0) -> str:
    """The text of the file; ``device``: the GPU, whose shared memory decides how a launch spreads its blocks.

    LngenError for more than MOST_ELEMENTS elements of an [M, D] tensor; else the errors of a cubin.
    """
    plan = kernels.plan
    if rows * plan.spec.d > MOST_ELEMENTS:
        raise LngenError(
            f"a repro is expected to have at most {MOST_ELEMENTS} elements of rows, of which the interpreter computes "
            f"the results, and {rows} rows of {plan.spec.d} are more; use fewer rows."
        )
    spilled, case = kernels.spilled(arch), _case(kernels, arch, device, rows, seed)
    program = Path(__file__).with_name("repro_program.py").read_text(encoding="utf-8").partition('"""\n')[2]
    program = program.replace(FROM_LNGEN, "").replace(ROWS, str(DTYPES))
    image = base64.b64encode(zlib.compress(kernels.cubin(arch).image, 9)).decode()
    return FILE.format(
        **{**case, "case": pformat(case, width=116, sort_dicts=False), "program": program, "source": kernels.bundle},
        lngen=__version__,
        gpu=device.name,
        nvrtc=".".join(map(str, nvrtc_version())),
        spills=f"; {spill_text(plan.schedule, spilled).partition(':')[0]}" if spilled else "",
        image=textwrap.fill(image, 116),
    )


def _case(kernels: KernelSet, arch: str, device: Device, rows: int, seed: int) -> dict[str, Any]:
    """What the program launches; see ``main`` of lngen.packs.repro_program."""
    plan, resources = kernels.plan, kernels.cubin(arch).resources
    spec, numbers = plan.spec, values_of(plan.graph, plan.spec.eps_or_default)
    positive = {*spec.positive_inputs(), *(r.name for r in spec.forward().results)}
    inputs, arrays = dict[str, Any](), dict[str, Array]()
    sizes = lengths(spec.forward(), rows, spec.d)  # the next number of rows that sets divide
    rows, inner = sizes[M], NAMED if spec.by_sets else 1
    axis_of = indexed(plan.graph)
    for v in plan.inputs:
        span = (0, sizes[axis_of[v]] - 1) if v in axis_of else POSITIVE if v.name in positive else ANY
        inputs[v.name] = (str(v.type.dtype), v.type.shape_of(sizes), *span)
        arrays[v.name] = drawn(seed, v.name, *inputs[v.name]).view(NUMPY_DTYPE[v.type.dtype])
    found = interpret(plan.graph, arrays | numbers)
    bits = {v.name: (str(v.type.dtype), found[v.name].view(f"u{v.type.dtype.size}")) for v in plan.outputs}
    shared = requested_shared(plan, {name: used.registers for name, used in resources.items()}, device)

    tensors = (*plan.inputs, *plan.outputs)
    apart: dict[str | None, Distance] = {v.name: rows if v.type.by_columns else spec.d for v in tensors}
    apart |= {v.name: (spec.d, 0) for v in tensors if is_of_set(v)}
    apart |= {v.name: v.type.shape_of(sizes)[1] for v in tensors if is_of_table(v)}

    def argument(a: Argument) -> str | tuple[str, float]:
        if a.kind == "value":
            return f"c_{a.ctype}", float(numbers[a.tensor])
        distance = apart.get(a.tensor, 0)
        return ("c_longlong", row_argument(a.kind, rows, inner, distance)) if a.kind in ROW_KINDS else a.tensor

    return {
        "spec": str(spec),
        "schedule": str(plan.schedule),
        "arch": arch,
        "rows": rows,
        "seed": seed,
        "bytes": sum(a.nbytes for a in (*arrays.values(), *found.values())),
        "inputs": inputs,
        "results": {name: (dtype, a.shape, *identity(a, dtype)) for name, (dtype, a) in bits.items()},
        "buffers": {name: (a.nbytes, UNWRITTEN) for name, a in found.items()}
        | {b.name: (b.bytes(rows, inner), 0 if b.zeroed else UNWRITTEN) for b in plan.workspace},
        "kernels": [
            _launch(k, rows, shared[k.name], device.pdl and k is not plan.kernels[0], [*map(argument, k.arguments)])
            for k in plan.kernels
        ],
    }


def _launch(kernel: Kernel, rows: int, shared: int, early: bool, arguments: list[Any]) -> dict[str, Any]:
    """The launch of a kernel; ``early``: it may start before the one in front of it ends."""
    attributes = {
        "cooperative": int(kernel.cooperative),
        "cluster dimension": kernel.cluster if kernel.cluster > 1 else 0,
        "programmatic stream serialization": int(early),
    }
    return {
        "name": kernel.name,
        "grid": (kernel.grid[0](rows), kernel.grid[1](rows)),
        "block": kernel.block,
        "shared": shared,
        "attributes": {name: value for name, value in attributes.items() if value},
        "arguments": arguments,
    }
