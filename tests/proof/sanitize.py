"""A small run for compute-sanitizer: every kernel structure once, its bits compared with the interpreter.

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 python tests/proof/sanitize.py
done
"""

import sys
from dataclasses import replace

import cupy

import lngen
from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import capability
from lngen.compiler.interpret import interpret
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule
from lngen.compiler.problem.schedule import exists
from lngen.compiler.spec import parse_spec
from lngen.launch.runtime.launcher import Launcher, device_arch
from lngen.launch.runtime.numpy_arrays import launch_numpy
from lngen.proof.check.inputs import mismatches, random_inputs, same_bits
from schedules import cp_async, multipass, registers, tma, unaligned

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
CLUSTERS_OF_16 = ("layernorm.bwd:d=40000,dtype=f32,save=none", tma(64, 1, 4, 2, "cached", cluster=16))
# Every form, and each of its ways; few owners, so that their stages go round.
SCHEDULES = (
    ("layernorm.fwd:d=64,dtype=bf16", tma(4, 8, 8, 2, "store cached", grid=2)),
    ("layernorm.fwd:d=1000,dtype=f32", tma(64, 2, 4, 3, grid=3)),
    ("layernorm.fwd:d=1001,dtype=bf16", unaligned(64, 2, 1, 3, grid=3)),
    ("layernorm.fwd:d=999,dtype=f32", cp_async(64, 2, 1, 3, "cached", grid=3)),
    ("rmsnorm.fwd:d=32768,dtype=f16", tma(256, 1, 8, 2, "store", grid=2, cluster=2)),
    ("layernorm.fwd:d=32768,dtype=bf16", tma(256, 1, 8, 2, "cached", grid=2, cluster=4)),
    ("rmsnorm.fwd:d=131072,dtype=bf16", tma(256, 1, 8, 2, grid=2, cluster=16)),
    ("layernorm.fwd:d=1000,dtype=bf16", registers(128, 1, 8, "cached")),
    ("layernorm.fwd:d=40000,dtype=f32", registers(128, 1, 4, "cached", cluster=8)),
    ("rmsnorm.fwd:d=32768,dtype=f16", registers(256, 1, 8, cluster=4)),
    ("rmsnorm.fwd:d=4093,dtype=f16", unaligned(128, 2, 1, 3, "regs", grid=3)),
    ("layernorm.fwd:d=1000,dtype=f32", tma(64, 2, 4, 2, "regs dynamic", grid=2)),
    ("layernorm.fwd:d=1001,dtype=bf16", unaligned(64, 1, 1, 2, "cached regs dynamic", grid=3)),
    ("layernorm.bwd:d=1000,dtype=bf16", registers(64, 8, 8, "prefetch")),
    ("layernorm.bwd:d=1000,dtype=bf16", registers(64, 8, 8, "single")),
    ("layernorm.bwd:d=1000,dtype=bf16", tma(64, 8, 8, 3, "store cached")),
    ("layernorm.bwd:d=1000,dtype=bf16", cp_async(64, 8, 8, 2, "single")),
    ("layernorm.bwd:d=1001,dtype=bf16", unaligned(64, 8, 1, 2)),
    ("layernorm.bwd:d=8192,dtype=bf16", tma(256, 1, 8, 2, "single")),
    ("layernorm.bwd:d=8192,dtype=bf16", tma(64, 4, 8, 3, "cached", cluster=4)),
    ("layernorm.bwd:d=5120,dtype=bf16", tma(64, 4, 8, 2, "cached regs early acquire", cluster=2)),
    ("layernorm.bwd:d=1024,dtype=f32", tma(64, 4, 4, 2, "cached regs early")),
    ("layernorm.fwd:d=1000,dtype=bf16", tma(32, 4, 8, 2, "regs early dynamic", grid=2)),
    ("layernorm.fwd:d=32768,dtype=f32", tma(64, 3, 4, 2, "cached regs early dynamic", grid=2, cluster=8)),
    ("layernorm.bwd:d=16384,dtype=bf16", tma(256, 1, 8, 2, "store", cluster=2)),
    ("rmsnorm.bwd:d=65536,dtype=bf16", tma(256, 1, 8, 2, "single", cluster=8)),
    ("rmsnorm.bwd:d=65536,dtype=bf16", multipass(512, 8)),
    ("rmsnorm.bwd:d=95,dtype=bf16", multipass(32, 1, blocks_per_sm=8)),
)
# Every other staged one with its rows held in registers.
HELD = tuple((text, replace(s, row_in_registers=True)) for text, s in SCHEDULES if s.stages and not s.row_in_registers)[
    ::2
]


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


def wrong(text: str, schedule: Schedule) -> list[str]:
    """The same for one spec under one schedule; nothing where its form does not exist."""
    arch = device_arch(0)
    if not exists(schedule, capability(arch)):
        return []
    plan = lower(parse_spec(text), schedule)
    inputs = random_inputs(plan.spec, ROWS)
    launcher = Launcher(plan, KernelSet(plan).cubin(arch).image, 0, overlap=True)
    return mismatches(launch_numpy(launcher, ROWS, inputs), interpret(plan.graph, inputs))


if __name__ == "__main__":
    found = {f"{graph} {d} {options}": differences(graph, d, options) for graph, d, options in CASES}
    structures = {f"{text} {schedule}": wrong(text, schedule) for text, schedule in (*SCHEDULES, *HELD, CLUSTERS_OF_16)}
    print(found, {name: parts for name, parts in structures.items() if parts})
    sys.exit(any(found.values()) or any(structures.values()))
