"""What a GPU would move: the PTX executed on NumPy, its accesses counted, next to the least a call has to move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lngen.errors import LngenError
from lngen.ir import WIDE
from lngen.ir.numerics import Array
from lngen.lower import Kernel, Plan
from lngen.ptx import Traffic, run_plan
from lngen.schedule import piece, problem

SECTOR = 32
ROW_GROUPS = 8  # enough for a block to have some, few enough for a second
MOST_ELEMENTS = 2**25  # about a minute

LEGEND = """
units of M * D    bytes of all arrays of rows, read and written, over the bytes of one such array of the spec's dtype
read, written     bytes that threads ask for, copies to shared memory included
floor             bytes of the array: what a call has to move at least
per sector        bytes asked for per byte of the sectors of 32 bytes that warps touch; above 1 if lanes share one
instructions      per element of a row: 32 threads of each warp instruction, by kind
barriers          warps that come to a barrier; bank conflicts: times shared memory is asked once more
in flight         bytes of rows a block has asked for before it uses the first\
""".splitlines()

# Opcodes by what a person asks about; the first prefix that fits counts.
KINDS = {
    "load": ("ld.global",), "store": ("st.global",), "shared": ("ld.shared", "st.shared"), "shuffle": ("shfl",),
    "copy": ("cp.async", "st.async"), "barrier": ("bar", "mbarrier", "atom", "ld.acquire"), "convert": ("cvt",),
    "branch": ("bra",),
    "f32": ("add.rn.f32", "sub.rn.f32", "mul.rn.f32", "fma.rn.f32", "neg.f32"),
    "f64": ("add.rn.f64", "sub.rn.f64", "mul.rn.f64", "neg.f64"),
}  # fmt: skip


@dataclass(frozen=True)
class KernelTraffic:
    """One kernel of a call. Bytes are what its threads ask for; sectors of 32 bytes are what its warps touch.

    ``moved``: bytes by tensor, read and written; ``efficiency``: bytes asked for per byte of sectors touched, above 1
    where the lanes of a warp share a sector; ``mix``: warp instructions by kind; ``in_flight``: bytes of rows a block
    has under way when all its loads of a round are out, or what its asynchronous copies had under way at most.
    """

    kernel: str
    moved: Mapping[str, tuple[int, int]]
    efficiency: Mapping[str, float]
    mix: Mapping[str, int]
    bank_conflicts: int
    barriers: int
    in_flight: int


def measure(plan: Plan, inputs: Mapping[str, Array], arch: str = "sm_90") -> list[KernelTraffic]:
    """What each kernel of ``plan`` moves for those inputs."""
    traffic = run_plan(plan, inputs, arch=arch).traffic
    return [_kernel(plan, k, traffic) for k in plan.kernels if k.name in traffic.tensors]


def traffic_rows(plan: Plan, rows: int | None = None) -> int:
    """How many rows to count: ``rows``, or (None) ROW_GROUPS row groups, fewer if they are long.

    LngenError for more than MOST_ELEMENTS elements of rows, which the executor would take minutes for.
    """
    most = MOST_ELEMENTS // plan.spec.d
    wanted = rows or max(1, min(ROW_GROUPS * (plan.kernels[0].grid[0].per or 1), most))
    if wanted > most:
        raise LngenError(
            f"traffic is counted by executing the PTX on NumPy, for {MOST_ELEMENTS} elements of rows at most, and "
            f"{wanted} rows of {plan.spec.d} are more; ask for fewer."
        )
    return wanted


def row_units(plan: Plan, measured: list[KernelTraffic], rows: int) -> float:
    """Bytes of [M, D] tensors, in units of what one pass over such a tensor of the spec's dtype moves."""
    wide = {v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE}
    total = sum(sum(bytes_) for k in measured for name, bytes_ in k.moved.items() if name in wide)
    return total / (rows * plan.spec.d * plan.spec.dtype.size)


def traffic_text(plan: Plan, measured: list[KernelTraffic], rows: int) -> str:
    """Tables a person can read: per kernel its tensors, its instructions per row element, its barriers."""
    floor = {
        v.name: math.prod(v.type.shape(rows, plan.spec.d)) * v.type.dtype.size for v in (*plan.inputs, *plan.outputs)
    }
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
    """The same as JSON has it."""
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
    """Bytes of rows a block loads before it uses the first: its piece of each, once more if it prefetches."""
    if plan.schedule.form != "registers":
        return 0
    sizes = [v.type.dtype.size for v in plan.inputs if v.name in {t.name for t in kernel.tiles}]
    elements = min(plan.spec.d, piece(plan.schedule, problem(plan.graph, plan.spec.d)))
    return plan.schedule.rows * elements * sum(sizes) * (2 if plan.schedule.prefetch else 1)
