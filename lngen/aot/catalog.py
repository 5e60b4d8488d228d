"""The golden set: kernels that lie in ``generated/kernels`` to be read, and to be compared byte for byte.

Every schedule is written down, so that the set depends on the specs, the lowering and the templates, and on
nothing that may be tuned or that a compiler decides.
"""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

from lngen.aot.plans import plan_for
from lngen.emit import emit
from lngen.files import write_all
from lngen.lower import Plan
from lngen.runtime.choose import DEFAULT_ARCH
from lngen.spec import parse_spec

CATALOG = {
    # Forward in registers: less than a warp for a row, two warps, a block.
    "rmsnorm.fwd:d=64,dtype=f16,weight=f32": "form=registers,threads=2,rows=64,vec=8,resident=8",
    "layernorm.fwd:d=768,dtype=f32": "form=registers,threads=64,rows=1,vec=4,resident=8",
    "layernorm.fwd:d=4096,dtype=bf16": "form=registers,threads=128,rows=1,vec=8,resident=6",
    # Rows that begin anywhere.
    "rmsnorm.fwd:d=1001,dtype=bf16,beta=yes": (
        "form=ragged,threads=32,rows=4,vec=1,resident=3,stages=3,owners=384,bulk_store=yes,keep=yes,hold=yes"
    ),
    # Rows that are claimed, weights that stay packed.
    "layernorm.fwd:d=12288,dtype=bf16": (
        "form=bulk,threads=256,rows=1,vec=8,resident=2,stages=2,owners=264,keep=yes,hold=yes,soon=yes,claim=yes"
    ),
    # A row shared by the blocks of a cluster: claimed by the first for all; results leaving in bulk.
    "layernorm.fwd:d=32768,dtype=f32": (
        "form=bulk,threads=64,rows=3,vec=4,stages=2,cluster=8,owners=15,keep=yes,hold=yes,soon=yes,claim=yes"
    ),
    "layernorm.fwd:d=65536,dtype=bf16": (
        "form=bulk,threads=256,rows=1,vec=8,stages=3,cluster=4,owners=30,bulk_store=yes,keep=yes"
    ),
    # Backward without column sums.
    "rmsnorm.bwd:d=1024,dtype=bf16,wrt=x": "form=registers,threads=64,rows=1,vec=8,resident=8",
    # Column sums: in one launch, by asynchronous copies, by bulk copies into row groups, into a block, into a cluster.
    "rmsnorm.bwd:d=768,dtype=f16,weight=f32": ("form=registers,threads=32,rows=16,vec=8,prefetch=yes,one_launch=yes"),
    "layernorm.bwd:d=1000,dtype=f32": "form=async,threads=64,rows=4,vec=4,stages=2",
    "layernorm.bwd:d=4096,dtype=bf16": "form=bulk,threads=128,rows=2,vec=8,stages=2,keep=yes,hold=yes,soon=yes",
    "layernorm.bwd:d=8192,dtype=f16": "form=bulk,threads=256,rows=1,vec=8,stages=3,keep=yes",
    "layernorm.bwd:d=16384,dtype=bf16": "form=bulk,threads=64,rows=4,vec=8,stages=3,cluster=8,keep=yes",
    # Streaming, in three kernels.
    "rmsnorm.bwd:d=65536,dtype=f32": "form=stream,threads=512,rows=1,vec=4,resident=2",
}


def plans() -> tuple[Plan, ...]:
    """The plans of the set, in the catalog's order."""
    return tuple(plan_for(parse_spec(spec), schedule, DEFAULT_ARCH) for spec, schedule in CATALOG.items())


@cache
def sources() -> dict[str, str]:
    """The set: CUDA text by file name."""
    return {f"{plan.name}.cu": emit(plan) for plan in plans()}


def differences(folder: Path) -> dict[str, str]:
    """What is wrong with the set in ``folder``: file name to stale, missing or superfluous."""
    wanted = sources()
    there = {path.name: path for path in folder.glob("*.cu")}
    found = {}
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            found[name] = "missing"
        elif name not in wanted:
            found[name] = "superfluous"
        elif there[name].read_bytes() != wanted[name].encode():
            found[name] = "stale"
    return found


def rewrite(folder: Path) -> None:
    """Write the set to ``folder`` and remove every other .cu file there."""
    wanted = sources()
    write_all({folder / name: text.encode() for name, text in wanted.items()})
    for path in folder.glob("*.cu"):
        if path.name not in wanted:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
