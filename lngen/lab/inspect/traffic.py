"""What a kernel set uses: the resources of each kernel, and the memory traffic of a call.

Resources are the compiler's. Traffic is counted while the PTX is executed on NumPy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import DEFAULT_ARCH, Device, device_for
from lngen.compiler.ir import WIDE
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import Kernel, Plan, requested_shared
from lngen.compiler.problem.facts import WARP
from lngen.compiler.problem.footprint import cluster_tile, occupancy
from lngen.compiler.toolchain import Resources
from lngen.errors import LngenError
from lngen.lab.bench.tasks import value_bytes
from lngen.proof.ptx import Traffic, run_plan

# ---- resources ----

# A column of the table, and its key.
COLUMNS = {
    "registers": "registers",
    "spill stores": "spill_stores",
    "spill loads": "spill_loads",
    "stack": "stack",
    "static shared": "shared",
    "dynamic shared": "dynamic_shared",
    "launch shared": "launch_shared",
    "barriers": "barriers",
    "threads": "threads",
    "blocks per SM": "blocks_per_multiprocessor",
    "warps per SM": "warps_per_multiprocessor",
}


def resources(plan: Plan, compiled: Mapping[str, Resources], arch: str) -> dict[str, dict[str, Any]]:
    """By kernel: the compiler's numbers, its dynamic shared memory, and the resident blocks and warps.

    dynamic_shared              bytes that the kernel uses, which its text and the plan name
    launch_shared               bytes that a launch requests, more where that spreads the blocks evenly
    threads                     per block
    blocks_per_multiprocessor   limit by threads, registers, shared memory and barriers; clusters may have a lower one
    warps_per_multiprocessor    of that many blocks
    """
    device = device_for(arch)
    requested = requested_shared(plan, {name: used.registers for name, used in compiled.items()}, device)
    return {k.name: usage(compiled[k.name], k.block, k.dynamic, requested[k.name], device) for k in plan.kernels}


def usage(used: Resources, block: int, dynamic: int, launch: int, device: Device) -> dict[str, Any]:
    """The resources of one kernel, with blocks of ``block`` threads and its two numbers of dynamic shared memory."""
    blocks = occupancy(block, used.registers, used.shared + launch, used.barriers, device)
    return {
        **asdict(used),
        "dynamic_shared": dynamic,
        "launch_shared": launch,
        "threads": block,
        "blocks_per_multiprocessor": blocks,
        "warps_per_multiprocessor": blocks * -(-block // WARP),
    }


# ---- traffic ----

SECTOR = 32
ROW_GROUPS = 8  # enough for a few per block, few enough to take about a second
MOST_ELEMENTS = 2**25  # about a minute

LEGEND = """
units of M * D    bytes of all arrays of rows, read and written, over the bytes of one such array of the spec's dtype
read, written     bytes that threads access, copies to shared memory included
floor             bytes of the array: the minimum that a call has to move
per sector        bytes accessed per byte of the sectors of 32 bytes that warps touch; above 1 if lanes share one
instructions      per element of a row: 32 threads of each warp instruction, by kind
barriers          warps that arrive at a barrier; bank conflicts: additional accesses to shared memory
in flight         bytes of rows that a block loads before it uses the first\
""".splitlines()

# Opcode prefixes by kind; the first prefix that matches counts.
KINDS = {
    "load": ("ld.global",), "store": ("st.global",), "shared": ("ld.shared", "st.shared"), "shuffle": ("shfl",),
    "copy": ("cp.async", "st.async"), "barrier": ("bar", "mbarrier", "atom", "ld.acquire"), "convert": ("cvt",),
    "branch": ("bra",),
    "f32": ("add.rn.f32", "sub.rn.f32", "mul.rn.f32", "fma.rn.f32", "neg.f32"),
    "f64": ("add.rn.f64", "sub.rn.f64", "mul.rn.f64", "neg.f64"),
}  # fmt: skip


@dataclass(frozen=True)
class KernelTraffic:
    """One kernel of a call. Bytes are those that threads access; sectors of 32 bytes are those that warps touch.

    ``moved``: bytes by tensor, read and written; ``efficiency``: bytes accessed per byte of sectors touched, above 1
    where the lanes of a warp share a sector; ``mix``: warp instructions by kind; ``in_flight``: bytes of rows that a
    block has in flight after all loads of a round, or the most that its asynchronous copies have in flight.
    """

    kernel: str
    moved: Mapping[str, tuple[int, int]]
    efficiency: Mapping[str, float]
    mix: Mapping[str, int]
    bank_conflicts: int
    barriers: int
    in_flight: int


def measure(kernels: KernelSet, inputs: Mapping[str, Array], arch: str = DEFAULT_ARCH) -> list[KernelTraffic]:
    """The traffic of each of the ``kernels`` for the given inputs."""
    plan = kernels.plan
    traffic = run_plan(plan, inputs, source=kernels.text, ptx=kernels.ptx(arch, lines=True)).traffic
    return [_kernel(plan, k, traffic) for k in plan.kernels if k.name in traffic.tensors]


def traffic_rows(plan: Plan, rows: int | None = None) -> int:
    """The number of rows to count: ``rows``, or (None) ROW_GROUPS row groups, fewer if rows are long.

    LngenError for more than MOST_ELEMENTS elements of rows, which would take the executor minutes.
    """
    most = MOST_ELEMENTS // plan.spec.d
    wanted = rows or max(1, min(ROW_GROUPS * (plan.kernels[0].grid[0].per or 1), most))
    if wanted > most:
        raise LngenError(
            f"traffic is counted by executing the PTX on NumPy, for {MOST_ELEMENTS} elements of rows at most, and "
            f"{wanted} rows of {plan.spec.d} are more; use fewer rows."
        )
    return wanted


def row_units(plan: Plan, measured: list[KernelTraffic], rows: int) -> float:
    """Bytes of [M, D] tensors, in units of one pass over such a tensor of the spec's dtype."""
    wide = {v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE}
    total = sum(sum(bytes_) for k in measured for name, bytes_ in k.moved.items() if name in wide)
    return total / (rows * plan.spec.d * plan.spec.dtype.size)


def traffic_text(plan: Plan, measured: list[KernelTraffic], rows: int) -> str:
    """Tables for a person: per kernel its tensors, its instructions per row element, its barriers."""
    floor = {v.name: value_bytes(v, rows, plan.spec.d) for v in (*plan.inputs, *plan.outputs)}
    lines = [
        f"traffic {plan.name}, {rows} rows counted",
        f"  rows of {plan.spec.dtype}: {row_units(plan, measured, rows):.3f} units of M * D",
    ]
    for k in measured:
        lines += ["", f"kernel {k.kernel}", "  tensor                        read    written      floor  per sector"]
        for name, (read, written) in k.moved.items():
            least = floor.get(name)
            floor_text = "workspace" if least is None else str(least)
            lines.append(f"  {name:<24}{read:>10} {written:>10} {floor_text:>10} {k.efficiency[name]:>11.2f}")
        elements = max(1, rows * plan.spec.d)
        mix = "  ".join(f"{kind} {32 * count / elements:.2f}" for kind, count in k.mix.items() if count)
        lines += [
            f"  instructions per element: {mix}",
            f"  barriers per row: {k.barriers / max(1, rows):.2f} warps; bank conflicts: {k.bank_conflicts} wavefronts",
        ]
        if k.in_flight:
            lines.append(f"  in flight per block: {k.in_flight} bytes")
    return "\n".join([*lines, *LEGEND]) + "\n"


def traffic_json(plan: Plan, measured: list[KernelTraffic], rows: int) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "name": plan.name,
        "spec": str(plan.spec),
        "schedule": str(plan.schedule),
        "rows": rows,
        "row_units": row_units(plan, measured, rows),
        "kernels": [
            {**asdict(k), "moved": {n: {"read": r, "written": w} for n, (r, w) in k.moved.items()}} for k in measured
        ],
    }


def _kernel(plan: Plan, kernel: Kernel, traffic: Traffic) -> KernelTraffic:
    tensors = traffic.tensors[kernel.name]
    mix: Counter[str] = Counter(dict.fromkeys((*KINDS, "other"), 0))
    for opcode, count in traffic.instructions[kernel.name].items():
        mix[next((kind for kind, starts in KINDS.items() if opcode.startswith(starts)), "other")] += count
    return KernelTraffic(
        kernel=kernel.name,
        moved={n: (t["bytes_read"], t["bytes_written"]) for n, t in tensors.items() if any(t.values())},
        efficiency={n: _efficiency(t) for n, t in tensors.items()},
        mix=dict(mix),
        bank_conflicts=traffic.shared[kernel.name]["bank_conflicts"],
        barriers=traffic.barriers[kernel.name],
        in_flight=max(_in_flight(plan, kernel), traffic.in_flight[kernel.name]),
    )


def _efficiency(counts: Mapping[str, int]) -> float:
    sectors = counts["sectors_read"] + counts["sectors_written"]
    return (counts["bytes_read"] + counts["bytes_written"]) / (sectors * SECTOR) if sectors else 0.0


def _in_flight(plan: Plan, kernel: Kernel) -> int:
    """Bytes of rows that a block loads before it uses the first: its part of each, once more if it prefetches."""
    if plan.schedule.form != "registers":
        return 0
    sizes = [v.type.dtype.size for v in plan.inputs if v.name in {t.name for t in kernel.inputs.element}]
    elements = min(plan.spec.d, cluster_tile(plan.schedule, plan.problem))
    return plan.schedule.rows_per_block * elements * sum(sizes) * (2 if plan.schedule.prefetch else 1)
