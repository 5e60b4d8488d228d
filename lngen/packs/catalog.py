"""The golden set: kernels in ``generated/kernels``, for people to read and for tests to compare byte for byte.

Every schedule is explicit, so that the set depends on the specs, the lowering and the templates, and not on tuning or
on a compiler. The times to emit and to compile it are measured here, too.
"""

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.emit import emit
from lngen.compiler.lower import Plan
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_cubin, compiler_build
from lngen.errors import LngenError
from lngen.files import write_all

CATALOG = {
    # Forward in registers: less than a warp for a row, two warps, a block.
    "rmsnorm.fwd:d=64,dtype=f16,weight=f32": "form=registers,threads=2,rows_per_block=64,vec=8,blocks_per_sm=8",
    "layernorm.fwd:d=768,dtype=f32": "form=registers,threads=64,rows_per_block=1,vec=4,blocks_per_sm=8",
    "layernorm.fwd:d=4096,dtype=bf16": "form=registers,threads=128,rows_per_block=1,vec=8,blocks_per_sm=6",
    # Rows at two distances: the heads of q in a packed projection.
    "rmsnorm.fwd:d=128,dtype=bf16,strides=2": (
        "form=registers,threads=4,rows_per_block=16,vec=8,blocks_per_sm=12,cached_weights=yes"
    ),
    # Rows at any alignment.
    "rmsnorm.fwd:d=1001,dtype=bf16,beta=yes": (
        "form=tma_unaligned,threads=32,rows_per_block=4,vec=1,blocks_per_sm=3,stages=3,grid=384,tma_store=yes,cached_weights=yes,row_in_registers=yes"
    ),
    # A dynamic scheduler; packed weights.
    "layernorm.fwd:d=12288,dtype=bf16": (
        "form=tma,threads=256,rows_per_block=1,vec=8,blocks_per_sm=2,stages=2,grid=264,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"
    ),
    # A cluster per row: dynamic with broadcast; TMA store.
    "layernorm.fwd:d=32768,dtype=f32": (
        "form=tma,threads=64,rows_per_block=3,vec=4,stages=2,cluster=8,grid=15,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"
    ),
    "layernorm.fwd:d=65536,dtype=bf16": (
        "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=4,grid=30,tma_store=yes,cached_weights=yes"
    ),
    # Backward without column sums.
    "rmsnorm.bwd:d=1024,dtype=bf16,wrt=x": "form=registers,threads=64,rows_per_block=1,vec=8,blocks_per_sm=8",
    # Column sums: single launch, cp.async, TMA into row groups, into a block, into a cluster.
    "rmsnorm.bwd:d=768,dtype=f16,weight=f32": (
        "form=registers,threads=32,rows_per_block=16,vec=8,prefetch=yes,single_launch=yes"
    ),
    "layernorm.bwd:d=1000,dtype=f32": "form=cp_async,threads=64,rows_per_block=4,vec=4,stages=2",
    "layernorm.bwd:d=4096,dtype=bf16": "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,cached_weights=yes,"
    "row_in_registers=yes,early_release=yes",
    "layernorm.bwd:d=8192,dtype=f16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes",
    "layernorm.bwd:d=16384,dtype=bf16": "form=tma,threads=64,rows_per_block=4,vec=8,stages=3,cluster=8,"
    "cached_weights=yes",
    # Results of 8 bits: a scale for each row, for each block, and of dx; blocks that two segments share.
    "rmsnorm.fwd:d=4096,dtype=bf16,quant=e4m3": (
        "form=tma,threads=128,rows_per_block=1,vec=8,blocks_per_sm=4,stages=2,grid=528,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"
    ),
    "add_rmsnorm.fwd:d=8320,dtype=bf16,quant=e4m3,scales=block,scale_layout=columns": (
        "form=registers,threads=256,rows_per_block=1,vec=8,blocks_per_sm=2,cached_weights=yes"
    ),
    "rmsnorm.bwd:d=4096,dtype=bf16,wrt=x,dx_quant=e5m2": (
        "form=registers,threads=128,rows_per_block=1,vec=8,blocks_per_sm=4"
    ),
    # Sums over the rows of samples, in stretches; over samples, behind a kernel that only adds columns.
    "ada_layernorm.bwd:d=3072,dtype=bf16": (
        "form=tma,threads=64,rows_per_block=2,vec=8,blocks_per_sm=2,stages=3,row_in_registers=yes,early_release=yes"
    ),
    "ada_rmsnorm.bwd:d=1024,dtype=bf16,gamma=yes": "form=multipass,threads=128,rows_per_block=1,vec=8",
    # Heads, each folded by lanes of a warp and then rotated by a position's angles.
    "qk_rmsnorm.fwd:d=5120,dtype=bf16,k_heads=8,rotate=halves,positions=i64": (
        "form=tma,threads=128,rows_per_block=1,vec=8,blocks_per_sm=4,stages=3,grid=528,cached_weights=yes,row_in_registers=yes,dynamic=yes"
    ),
    # A loss of class indices: rows at any alignment that a cluster shares, their maximum in pairs of whole units.
    "cross_entropy.fwd:d=50257,dtype=bf16,target=index": (
        "form=tma_unaligned,threads=64,rows_per_block=8,vec=1,stages=2,cluster=8,grid=15"
    ),
    # Multipass, in three kernels.
    "rmsnorm.bwd:d=65536,dtype=f32": "form=multipass,threads=512,rows_per_block=1,vec=4,blocks_per_sm=2",
}


def kernel_sets() -> tuple[KernelSet, ...]:
    """The kernels of the set, in the catalog's order."""
    return tuple(Compilation(parse_spec(spec)).changed(schedule, DEFAULT_ARCH) for spec, schedule in CATALOG.items())


def plans() -> tuple[Plan, ...]:
    """Their plans."""
    return tuple(kernels.plan for kernels in kernel_sets())


@cache
def sources() -> dict[str, str]:
    """The set: CUDA text by file name."""
    return {f"{kernels.plan.name}.cu": kernels.text for kernels in kernel_sets()}


def differences(folder: Path) -> dict[str, str]:
    """Differences of the set in ``folder``: file name to stale, missing or superfluous."""
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


# ---- the times to emit and to compile each kernel ----

# All are processor time. NVRTC runs in one thread, so processor time equals elapsed time on an idle machine, and other
# processes do not lengthen it.
REPEATS = 3  # repetitions, of which the median counts

Times = dict[str, float]  # milliseconds of one kernel set


def measure(arch: str, against: Path | None = None) -> Iterator[tuple[str, Times]]:
    """Name and times of each golden kernel, compiled even if it is cached; MissingError without a compiler.

    emit_ms     to lay out the text
    compile_ms  to compile the text to a cubin
    total_ms    both together
    cached_ms   to read the cubin from the disk cache instead
    against_ms  to compile another text of the same spec, if there is one

    ``against``: a folder with another golden set. Its texts and those of this set are compiled in turn, so that a
    change in the machine's speed affects both. LngenError if the folder has no text of a spec.
    """
    others = {} if against is None else texts(against, plans())
    compiler_build()  # loading the library is not part of a kernel's time
    for plan in plans():
        source = emit(plan)
        compile_it = partial(compile_cubin, arch=arch, name=f"{plan.name}.cu")
        works: list[Callable[[], object]] = [
            partial(emit, plan),
            partial(compile_it, source, fresh=True),
            partial(compile_it, source),
        ]
        works += [partial(compile_it, others[plan.name], fresh=True)] if others else []
        rounds = [[_milliseconds(work) for work in works] for _ in range(REPEATS)]
        emitted, compiled, cached, *other = map(statistics.median, zip(*rounds, strict=True))
        found = {"emit_ms": emitted, "compile_ms": compiled, "total_ms": emitted + compiled, "cached_ms": cached}
        if other:
            found["against_ms"] = other[0]
        yield plan.name, found


def texts(folder: Path, wanted: Sequence[Plan]) -> dict[str, str]:
    """The CUDA texts in ``folder`` by the name of the plan that has the same spec; LngenError if one is missing."""
    found = {}
    for path in sorted(folder.glob("*.cu")):
        text = path.read_text(encoding="utf-8")
        if spec := re.search(r"^// +spec +: (\S+)$", text, re.MULTILINE):
            found[spec[1]] = text
    if missing := [str(plan.spec) for plan in wanted if str(plan.spec) not in found]:
        raise LngenError(
            f"{folder} is expected to hold a golden set, but no .cu file there is of {', '.join(missing)}; "
            "name the folder generated/kernels of another checkout."
        )
    return {plan.name: found[str(plan.spec)] for plan in wanted}


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)
