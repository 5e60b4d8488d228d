"""A small run for compute-sanitizer: every kernel structure once, its bits compared with the interpreter.

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 python tests/proof/sanitize.py
done
"""

from __future__ import annotations

import sys

import cupy

import lngen
from lngen.check.inputs import mismatches, random_inputs, same_bits
from lngen.compile import KernelSet
from lngen.devices import capability
from lngen.interpret import interpret
from lngen.lower import lower
from lngen.runtime.launch import Launcher, device_arch
from lngen.runtime.numpy_arrays import launch_numpy
from lngen.schedule import Schedule, exists, parse_schedule
from lngen.spec import parse_spec

ROWS = 37
# Under their default schedules, through the library.
CASES = (
    ("layernorm", 64, {"dtype": "bf16"}),
    ("layernorm", 1000, {"dtype": "f32"}),
    ("layernorm", 4093, {"dtype": "f16"}),
    ("rmsnorm", 1024, {"dtype": "bf16", "weight": "f32"}),
    ("layernorm", 40000, {"dtype": "bf16"}),
    ("rmsnorm", 3, {"dtype": "f64"}),
)
# One block a multiprocessor: synccheck, and it alone, ends with an illegal address where several blocks of clusters of
# 16 share one and have an mbarrier, whatever they do with it.
CLUSTERS_OF_16 = (
    "layernorm.bwd:d=40000,dtype=f32,save=none",
    "form=tma,threads=64,rows_per_block=1,vec=4,blocks_per_sm=1,stages=2,cluster=16,cached_weights=yes",
)
# Every form, and each of its ways; few owners, so that their stages go round.
SCHEDULES = (
    ("layernorm.fwd:d=64,dtype=bf16", "form=tma,threads=4,rows_per_block=8,vec=8,stages=2,grid=2,tma_store=yes,"
                                      "cached_weights=yes"),
    ("layernorm.fwd:d=1000,dtype=f32", "form=tma,threads=64,rows_per_block=2,vec=4,stages=3,grid=3"),
    ("layernorm.fwd:d=1001,dtype=bf16", "form=tma_unaligned,threads=64,rows_per_block=2,vec=1,stages=3,grid=3,"
                                        "tma_store=yes"),
    ("layernorm.fwd:d=999,dtype=f32", "form=cp_async,threads=64,rows_per_block=2,vec=1,stages=3,grid=3,"
                                      "cached_weights=yes"),
    ("rmsnorm.fwd:d=32768,dtype=f16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,grid=2,cluster=2,"
                                      "tma_store=yes"),
    ("layernorm.fwd:d=32768,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=4,grid=2,"
                                         "cached_weights=yes"),
    ("rmsnorm.fwd:d=131072,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,grid=2,cluster=16"),
    ("layernorm.fwd:d=1000,dtype=bf16", "form=registers,threads=128,rows_per_block=1,vec=8,cached_weights=yes"),
    ("layernorm.fwd:d=40000,dtype=f32", "form=registers,threads=128,rows_per_block=1,vec=4,cluster=8,"
                                        "cached_weights=yes"),
    ("rmsnorm.fwd:d=32768,dtype=f16", "form=registers,threads=256,rows_per_block=1,vec=8,cluster=4"),
    ("rmsnorm.fwd:d=4093,dtype=f16", "form=tma_unaligned,threads=128,rows_per_block=2,vec=1,stages=3,grid=3,"
                                     "tma_store=yes,row_in_registers=yes"),
    ("layernorm.fwd:d=1000,dtype=f32", "form=tma,threads=64,rows_per_block=2,vec=4,stages=2,grid=2,"
                                       "row_in_registers=yes,dynamic=yes"),
    ("layernorm.fwd:d=1001,dtype=bf16",
     "form=tma_unaligned,threads=64,rows_per_block=1,vec=1,stages=2,grid=3,tma_store=yes,cached_weights=yes,row_in_registers=yes,dynamic=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=registers,threads=64,rows_per_block=8,vec=8,single_launch=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=tma,threads=64,rows_per_block=8,vec=8,stages=3,cached_weights=yes,"
                                        "tma_store=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=cp_async,threads=64,rows_per_block=8,vec=8,stages=2,single_launch=yes"),
    ("layernorm.bwd:d=1001,dtype=bf16", "form=tma_unaligned,threads=64,rows_per_block=8,vec=1,stages=2,tma_store=yes"),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,single_launch=yes"),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=tma,threads=64,rows_per_block=4,vec=8,stages=3,cluster=4,"
                                        "cached_weights=yes"),
    ("layernorm.bwd:d=5120,dtype=bf16",
     "form=tma,threads=64,rows_per_block=4,vec=8,stages=2,cluster=2,cached_weights=yes,row_in_registers=yes,early_release=yes,acquire_shared=yes"),
    ("layernorm.bwd:d=1024,dtype=f32", "form=tma,threads=64,rows_per_block=4,vec=4,stages=2,cached_weights=yes,"
                                       "row_in_registers=yes,early_release=yes"),
    ("layernorm.fwd:d=1000,dtype=bf16",
     "form=tma,threads=32,rows_per_block=4,vec=8,stages=2,grid=2,row_in_registers=yes,early_release=yes,dynamic=yes"),
    ("layernorm.fwd:d=32768,dtype=f32",
     "form=tma,threads=64,rows_per_block=3,vec=4,stages=2,cluster=8,grid=2,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"),
    ("layernorm.bwd:d=16384,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=2,"
                                         "tma_store=yes"),
    ("rmsnorm.bwd:d=65536,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=8,"
                                       "single_launch=yes"),
    ("rmsnorm.bwd:d=65536,dtype=bf16", "form=multipass,threads=512,rows_per_block=1,vec=8"),
    ("rmsnorm.bwd:d=95,dtype=bf16", "form=multipass,threads=32,rows_per_block=1,vec=1,blocks_per_sm=8"),
)  # fmt: skip
# Every other staged one with its rows held in registers.
HELD = tuple(
    (text, f"{schedule},row_in_registers=yes")
    for text, schedule in SCHEDULES
    if "stages=" in schedule and "row_in_registers" not in schedule
)[::2]


def differences(graph: str, d: int, options: dict[str, str]) -> int:
    """Numbers in which forward and backward differ from the interpreter; outputs and workspace uninitialised."""
    norm = lngen.compile(graph, d=d, **options)
    forward, backward = norm.spec("fwd"), norm.spec("bwd")
    inputs = random_inputs(forward, ROWS)
    y, saved = norm.forward(**{name: cupy.asarray(a) for name, a in inputs.items()})
    given = random_inputs(backward, ROWS)
    gradients = norm.backward(cupy.asarray(given["dy"]), saved)
    want = [*list(interpret(forward.graph(), inputs).values())[:1], *interpret(backward.graph(), given).values()]
    return sum(int((~same_bits(a.get(), w)).sum()) for a, w in zip((y, *gradients), want, strict=True))


def wrong(text: str, schedule: str) -> list[str]:
    """The same for one spec under one schedule; nothing where its form does not exist."""
    plan = lower(parse_spec(text), parse_schedule(schedule, Schedule("registers", 32, 1, 1)))
    arch = device_arch(0)
    if not exists(plan.schedule, capability(arch)):
        return []
    inputs = random_inputs(plan.spec, ROWS)
    launcher = Launcher(plan, KernelSet(plan).cubin(arch).image, 0, overlap=True)
    return mismatches(launch_numpy(launcher, ROWS, inputs), interpret(plan.graph, inputs))


if __name__ == "__main__":
    found = {f"{graph} {d} {options}": differences(graph, d, options) for graph, d, options in CASES}
    structures = {f"{text} {schedule}": wrong(text, schedule) for text, schedule in (*SCHEDULES, *HELD, CLUSTERS_OF_16)}
    print(found, {name: parts for name, parts in structures.items() if parts})
    sys.exit(any(found.values()) or any(structures.values()))
