"""Train = serve: a row of a training batch has the bits that it has alone, under any schedule; torch beside it.

python -m lngen.examples.train_equals_serve [--d D] [--rows M] [--batches M,...] [--compile] [--whole] [--json FILE]
                                            [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import lngen
from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Graph
from lngen.lab.bench.agreement import CALLS, Arrays, Implementation, Line, Run, compare, draw, origin, peers, table
from lngen.lab.bench.figures import check_plot
from lngen.launch.runtime.launcher import Launcher, device_arch, device_count
from lngen.launch.runtime.norm import Norm
from lngen.launch.runtime.numpy_arrays import launch_numpy
from lngen.proof.check.inputs import POISON, forward_inputs, random_inputs
from lngen.proof.check.spec_checks import others
from lngen.proof.ptx import run_plan

GRAPHS = ("layernorm", "rmsnorm")
COUNT = 5  # schedules
WAYS = ("fwd", "bwd")


def schedules(norm: Norm, way: str, arch: str) -> list[str]:
    """The default for few rows, the default for many, then the other forms, then whatever is legal."""
    defaults = [norm.plan(way, arch, rows).schedule for rows in (1, None)]
    spread = others(norm.compilation(way), 6 * COUNT, arch)
    forms = {s.form: s for s in spread if s.form not in {d.form for d in defaults}}
    return list(dict.fromkeys(map(str, (*defaults, *forms.values(), *spread))))[:COUNT]


def in_turn(steps: Sequence[Callable[[Arrays], Arrays]]) -> Run:
    """Forward, then backward with what forward saved."""

    def run(inputs: Arrays) -> Arrays:
        known = dict(inputs)
        for step in steps:
            known |= step(known)
        return known

    return run


def executed(kernels: KernelSet, arch: str, inputs: Arrays) -> Arrays:
    """The compiled PTX on NumPy, where a race or a bad access ends the program."""
    outcome = run_plan(kernels.plan, inputs, source=kernels.text, ptx=kernels.ptx(arch, lines=True))
    if outcome.findings:
        raise SystemExit(str(outcome.findings[0]))
    return outcome.results


def launched(launcher: Launcher, inputs: Arrays) -> Arrays:
    """The kernels on a GPU."""
    return launch_numpy(launcher, len(inputs["x"]), inputs, POISON)


def own_side(graph: str, d: int, whole: bool) -> tuple[Implementation, dict[str, list[str]]]:
    """lngen under ``COUNT`` schedules against the interpreter, and the schedules."""
    norm, gpu = lngen.compile(graph, d=d, dtype="bf16"), device_count() > 0
    arch = device_arch(0) if gpu else DEFAULT_ARCH
    chosen = {way: schedules(norm, way, arch) for way in WAYS}
    runs = []
    for pair in zip(*chosen.values(), strict=False):
        scheduled = lngen.compile(graph, d=d, dtype="bf16", schedule=dict(zip(WAYS, pair, strict=True)))
        sets = [scheduled.kernels(way, arch) for way in WAYS]
        if gpu:
            runs.append(in_turn([partial(launched, Launcher(s.plan, s.cubin(arch).image, 0)) for s in sets]))
        else:
            runs.append(in_turn([partial(executed, s, arch) for s in sets]))
    graphs: list[Graph] = [norm.compilation(way).graph for way in WAYS]
    meaning = in_turn([partial(interpret, g) for g in graphs])
    shown = f"lngen, {len(runs)} schedules"
    return Implementation("lngen", shown, meaning, runs, CALLS if gpu else 1, gpu or whole), chosen


def main() -> None:
    """Compare; exit with 1 if a bit of lngen differs."""
    parser = argparse.ArgumentParser(description="Rows of a training batch beside the same rows in other batches.")
    parser.add_argument("--d", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096, help="of the training batch")
    parser.add_argument("--batches", metavar="M,...", default="1,3,64", help="rows of the other batches")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--whole", action="store_true", help="without a GPU too, the training batch by every schedule")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    batches = [int(word) for word in given.batches.split(",")]
    if not all(0 < batch <= given.rows for batch in batches):
        parser.error(f"--batches: numbers from 1 to {given.rows} are expected, got {given.batches}.")
    if given.plot:
        check_plot(given.plot)

    lines: list[Line] = []
    chosen = {}
    for graph in GRAPHS:
        own, chosen[graph] = own_side(graph, given.d, given.whole)
        bwd = lngen.parse_spec(f"{graph}.bwd:d={given.d},dtype=bf16")
        inputs = {**forward_inputs(bwd, given.rows), "dy": random_inputs(bwd, given.rows)["dy"]}
        for side in (own, *peers(bwd, given.compile)):
            lines += compare(side, graph, inputs, batches)
    title = f"Train = serve: elements that differ, bf16, {given.rows:,} x {given.d}"
    print(f"{title}; {origin()}\n{table(lines)}")
    if given.json:
        saved = {"title": title, "origin": origin(), "schedules": chosen, "lines": [asdict(x) for x in lines]}
        given.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if given.plot:
        draw(lines, title, origin(), given.plot)
    differ = sum(x.differ for x in lines if x.name == "lngen")
    print(f"lngen: {differ:,} elements differ" if differ else "lngen: no bit differs")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
