"""A small run for compute-sanitizer: every kernel structure once, its bits compared with the interpreter.

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 python tests/sanitize.py
done
"""

from __future__ import annotations

import sys

import cupy

import lngen
from lngen.check.inputs import mismatches, random_inputs, same_bits
from lngen.interpret import interpret
from lngen.lower import lower
from lngen.runtime.arrays_np import launch_numpy
from lngen.runtime.choose import capability, compile_plan
from lngen.runtime.launch import Launcher, device_arch
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
# After all else: under synccheck, and it alone, three blocks a multiprocessor of clusters of 16, which this once had,
# end with an illegal address.
LAST = ("layernorm", 40000, {"dtype": "f32", "save": "none"})
# Every form, and each of its ways; few owners, so that their stages go round.
SCHEDULES = (
    ("layernorm.fwd:d=64,dtype=bf16", "form=bulk,threads=4,rows=8,vec=8,stages=2,owners=2,bulk_store=yes,keep=yes"),
    ("layernorm.fwd:d=1000,dtype=f32", "form=bulk,threads=64,rows=2,vec=4,stages=3,owners=3"),
    ("layernorm.fwd:d=1001,dtype=bf16", "form=ragged,threads=64,rows=2,vec=1,stages=3,owners=3,bulk_store=yes"),
    ("layernorm.fwd:d=999,dtype=f32", "form=async,threads=64,rows=2,vec=1,stages=3,owners=3,keep=yes"),
    ("rmsnorm.fwd:d=32768,dtype=f16", "form=bulk,threads=256,rows=1,vec=8,stages=2,owners=2,cluster=2,bulk_store=yes"),
    ("layernorm.fwd:d=32768,dtype=bf16", "form=bulk,threads=256,rows=1,vec=8,stages=2,cluster=4,owners=2,keep=yes"),
    ("rmsnorm.fwd:d=131072,dtype=bf16", "form=bulk,threads=256,rows=1,vec=8,stages=2,owners=2,cluster=16"),
    ("layernorm.fwd:d=1000,dtype=bf16", "form=registers,threads=128,rows=1,vec=8,keep=yes"),
    ("layernorm.fwd:d=40000,dtype=f32", "form=registers,threads=128,rows=1,vec=4,cluster=8,keep=yes"),
    ("rmsnorm.fwd:d=32768,dtype=f16", "form=registers,threads=256,rows=1,vec=8,cluster=4"),
    ("rmsnorm.fwd:d=4093,dtype=f16", "form=ragged,threads=128,rows=2,vec=1,stages=3,owners=3,bulk_store=yes,hold=yes"),
    ("layernorm.fwd:d=1000,dtype=f32", "form=bulk,threads=64,rows=2,vec=4,stages=2,owners=2,hold=yes,claim=yes"),
    ("layernorm.fwd:d=1001,dtype=bf16",
     "form=ragged,threads=64,rows=1,vec=1,stages=2,owners=3,bulk_store=yes,keep=yes,hold=yes,claim=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=registers,threads=64,rows=8,vec=8,prefetch=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=registers,threads=64,rows=8,vec=8,one_launch=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=bulk,threads=64,rows=8,vec=8,stages=3,keep=yes,bulk_store=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16", "form=async,threads=64,rows=8,vec=8,stages=2,one_launch=yes"),
    ("layernorm.bwd:d=1001,dtype=bf16", "form=ragged,threads=64,rows=8,vec=1,stages=2,bulk_store=yes"),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=bulk,threads=256,rows=1,vec=8,stages=2,one_launch=yes"),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=bulk,threads=64,rows=4,vec=8,stages=3,cluster=4,keep=yes"),
    ("layernorm.bwd:d=5120,dtype=bf16",
     "form=bulk,threads=64,rows=4,vec=8,stages=2,cluster=2,keep=yes,hold=yes,soon=yes,restrict=yes"),
    ("layernorm.bwd:d=1024,dtype=f32", "form=bulk,threads=64,rows=4,vec=4,stages=2,keep=yes,hold=yes,soon=yes"),
    ("layernorm.fwd:d=1000,dtype=bf16",
     "form=bulk,threads=32,rows=4,vec=8,stages=2,owners=2,hold=yes,soon=yes,claim=yes"),
    ("layernorm.fwd:d=32768,dtype=f32",
     "form=bulk,threads=64,rows=3,vec=4,stages=2,cluster=8,owners=2,keep=yes,hold=yes,soon=yes,claim=yes"),
    ("layernorm.bwd:d=16384,dtype=bf16", "form=bulk,threads=256,rows=1,vec=8,stages=2,cluster=2,bulk_store=yes"),
    ("rmsnorm.bwd:d=65536,dtype=bf16", "form=bulk,threads=256,rows=1,vec=8,stages=2,cluster=8,one_launch=yes"),
    ("rmsnorm.bwd:d=65536,dtype=bf16", "form=stream,threads=512,rows=1,vec=8"),
)  # fmt: skip
# Every other staged one with its rows held in registers.
HELD = tuple(
    (text, f"{schedule},hold=yes") for text, schedule in SCHEDULES if "stages=" in schedule and "hold" not in schedule
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
    launcher = Launcher(plan, compile_plan(plan, arch).image, 0)
    return mismatches(launch_numpy(launcher, ROWS, inputs), interpret(plan.graph, inputs))


if __name__ == "__main__":
    found = {f"{graph} {d} {options}": differences(graph, d, options) for graph, d, options in CASES}
    structures = {f"{text} {schedule}": wrong(text, schedule) for text, schedule in SCHEDULES + HELD}
    found["last"] = differences(*LAST)
    print(found, {name: parts for name, parts in structures.items() if parts})
    sys.exit(any(found.values()) or any(structures.values()))
