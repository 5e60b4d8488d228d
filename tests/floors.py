"""What bounds the points that miss their target: kernels without parts, side by side, and counters. Needs a GPU.

python tests/floors.py generated/bench/h200-targets-*.json --part 0/1 --json floors.json   # measures, ncu included
python tests/floors.py --table floors.json > generated/bench/h200-floors.txt
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

from lngen.bench import measure as measuring
from lngen.bench.engines import make_engine
from lngen.bench.measure import Method
from lngen.bench.providers import Ceiling, Lngen
from lngen.bench.run import benchmark
from lngen.bench.sets import make_cases
from lngen.bench.tasks import Task
from lngen.emit import emit
from lngen.lower import Plan, lower
from lngen.runtime.launch import device_arch
from lngen.schedule import Schedule, parse_schedule
from lngen.spec import parse_spec
from lngen.toolchain import Binary, compile_cubin

METHOD = Method(rounds=6, repeats=1)
BASE = Schedule("registers", 32, 1, 1)
LOOP = "for (int i = 0; i < CHUNK; ++i) {"
READ = {"fwd": 1, "bwd": 2}  # tensors [M, D]
NUMBERS = {
    "read": "dram__bytes_read.sum",
    "write": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "regs": "launch__registers_per_thread",
}
WAITS = (
    "barrier", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction",
    "not_selected", "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
WAITED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
HEAD = """\
What is below its target in h200-targets-*.json, and what bounds it: {count} points, by tests/floors.py.

Fractions of the ceiling (copy, add) in floor bytes a second, as in the targets grid. target, run: of that grid;
again: in this run, {rounds} rounds, beside the kernels without parts (their results are wrong), which have the same
loads, stores, barriers, schedule, launch:
  A  no arithmetic: of a chunk one element goes into each sum, results are an input's bits, stored once the row
     sums are there
  B  besides: row sums stay within a block, no exchange between the blocks of a cluster; not where they claim rows
  C  besides: a finish that is launched and returns (backward)
Letters say which of them are below the target, too: with A there, no arithmetic however fast would meet it under
this schedule ({bounded} points). {noise} points meet theirs in this run: they are within noise of it.

Counters of one cold call (Nsight Compute, the row kernel alone, caches flushed, so that up to the L2's size of
results is not yet written): read, write: DRAM bytes over the least there can be; dram: of its peak in %; issue:
slots used in %; l2: bytes through L2 over the least; regs: of a thread; then the two most frequent reasons for
which a warp waits, in cycles per instruction.

                           MB | target run   again |     A     B     C  < | read  write dram issue l2   regs | waits"""


@dataclass
class Point:
    """A point below its target, what it reaches now, with and without parts, and its counters."""

    spec: str
    rows: int
    target: float
    run: float
    schedule: str
    fractions: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Its row in the table."""
        spec, f, c = parse_spec(self.spec), self.fractions, self.counters
        size = self.rows * spec.d * spec.dtype.size
        below = "".join(letter if f.get(letter, 9) < self.target else "." for letter in "ABC")
        parts = " ".join(f"{f[letter]:.3f}" if letter in f else "    -" for letter in "ABC")
        waits = sorted(((c[w], w) for w in WAITS if w in c), reverse=True)[:2]
        counted = "not counted"
        if c:
            read, write = c["read"] / (READ[spec.direction] * size), c["write"] / size
            l2 = c["l2"] / ((READ[spec.direction] + 1) * size)
            counted = f"{read:.3f} {write:.3f} {c['dram']:4.0f} {c['issue']:5.0f} {l2:.2f} {c['regs']:4.0f} | "
            counted += ", ".join(f"{name} {value:.2f}" for value, name in waits)
        shape = f"{self.rows}x{spec.d}"
        return (
            f"{spec.direction} {spec.dtype.value:<4} {shape:>15} {size / 2**20:>5.0f} | "
            f"{self.target:.3f} {self.run:.3f} {f['now']:.3f} | {parts}  {below} | {counted}"
        )


def no_arithmetic(source: str, direction: str) -> str:
    """Sums of an element a chunk; results are copies that wait for what the sums come to."""
    *before, last = re.split(r"(?m)(?=^ *// ---- phase \d+ ----$)", source)
    name = {"fwd": "x", "bwd": "dy"}[direction]
    held = f"{name}_held[k][i]" if f"{name}_held[k]" in source else f"{name}[k][i]"
    copied = f"{name}[i]" if re.search(rf"\w+ {name}\[CHUNK\];", last) else held
    number = re.findall(r"const float (\w+) = [^\[]*;", before[-1])[-1]
    body = re.escape(LOOP) + r"\n(?:(?!\n *\}\n).)*?(\w+)_out\[i\] = \1;\n *\}"
    last, found = re.subn(body, rf"{LOOP} \1_out[i] = {copied}; }}", last, count=1, flags=re.DOTALL)
    assert found == 1, last
    waiting = f'asm volatile("" :: "f"({number}) : "memory");\n'
    return "".join(part.replace(LOOP, LOOP.replace("CHUNK", "1")) for part in before) + waiting + last


def no_exchange(source: str) -> str:
    """Every block sends its numbers to itself alone."""
    sent, counted = "if (lane < CLUSTER) {\n        real* own", "CLUSTER * PARTS * sizeof(real)"
    assert sent in source, source
    assert counted in source, source
    return source.replace(sent, sent.replace("< CLUSTER", "== cluster_rank()")).replace(
        counted, counted.removeprefix("CLUSTER * ")
    )


def no_finish(source: str) -> str:
    """What completes the column sums returns at once."""
    at = source.index("{\n", source.index("__finish("))
    return source[: at + 2] + "    if (rows >= 0) return;\n" + source[at + 2 :]


def without(letter: str, plan: Plan) -> str:
    """The text of a kernel without parts; empty if there is nothing more to leave out."""
    source = emit(plan)
    head, rows, *finish = re.split(r'(?=extern "C" __global__)', source)
    text = head + no_arithmetic(rows, plan.spec.direction) + "".join(finish)
    # Blocks that are told their rows would run ahead of each other.
    clusters, completes = plan.schedule.cluster > 1 and not plan.schedule.claim, "__finish(" in source
    if (letter == "B" and not clusters) or (letter == "C" and not completes):
        return ""
    if letter in "BC" and clusters:
        text = no_exchange(text)
    return no_finish(text) if letter == "C" else text


class Without(Lngen):
    """Kernels without parts; the name is a letter of the table."""

    def compiled(self, plan: Plan, arch: str) -> Binary:
        return compile_cubin(without(self.name, plan), arch, name=f"{plan.name}.cu")


def lowered(point: Point) -> Plan:
    """The plan of a point."""
    return lower(parse_spec(point.spec), parse_schedule(point.schedule, BASE))


def missed(paths: Iterable[str]) -> list[Point]:
    """The points of some records that are below their target."""
    records = [r for path in paths for r in json.loads(Path(path).read_text())["records"]]
    own = [r for r in records if r["provider"] == "lngen" and r["target"] and not r["met"]]
    points = [Point(r["spec"], r["rows"], r["target"], r["fraction"], r["schedule"]) for r in own]
    return sorted(points, key=place)


def place(point: Point) -> tuple[bool, str, int, int]:
    """Where it stands in the table."""
    spec = parse_spec(point.spec)
    return spec.direction == "bwd", spec.dtype.value, spec.d, point.rows


def time_without(points: list[Point], keep: Callable[[], None]) -> None:
    """The points under the schedule of their record, with and without parts."""
    engine = make_engine()
    arch = device_arch(engine.device()[0])
    for point in points:
        plan = lowered(point)
        kernels = [Lngen("now", point.schedule)]
        kernels += [Without(letter, point.schedule) for letter in "ABC" if without(letter, plan)]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda kernel, plan=plan: kernel.compiled(plan, arch), kernels))
        providers = [Ceiling(plan.spec.direction), *kernels]
        with mock.patch.object(measuring, "complaint", return_value=""):  # their results are wrong
            found = benchmark([Task((plan.spec,), point.rows)], providers, engine, METHOD).records
        point.fractions = {r.provider: r.fraction for r in found if r.fraction is not None and not r.is_ceiling}
        print(point.line(), flush=True)
        keep()


def count(points: list[Point], script: str, path: str) -> None:
    """The counters of one call of each row kernel."""
    names = {**NUMBERS, **{w: WAITED.format(w) for w in WAITS}}
    options = ["--csv", "--kernel-name", "regex:__rows$", "--metrics", ",".join(names.values())]
    run = subprocess.run(
        ["ncu", *options, sys.executable, script, "--launch", path], capture_output=True, text=True, check=False
    )
    lines = run.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(lines[start:]))
    if not rows:
        print(run.stdout[-600:], run.stderr[-600:], file=sys.stderr)
    back = {metric: name for name, metric in names.items()}
    scale = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    for row in rows:
        value = float(row["Metric Value"].replace(",", "")) * scale.get(row["Metric Unit"], 1)
        points[int(row["ID"])].counters[back[row["Metric Name"]]] = value


def launch(points: list[Point]) -> None:
    """One call of each."""
    engine = make_engine()
    for point in points:
        case = make_cases(Task((parse_spec(point.spec),), point.rows), 1, engine)[0]
        Lngen("now", point.schedule).prepare(case).launch(engine.stream(), 0)
        engine.synchronize()


def load(path: str) -> list[Point]:
    return [Point(**p) for p in json.loads(Path(path).read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", help="records of lngen bench --grid targets")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the points")
    parser.add_argument("--json", default="floors.json", help="where what is measured goes")
    parser.add_argument("--table", nargs="+", metavar="JSON", help="prints what was measured")
    parser.add_argument("--launch", metavar="JSON", help="launches each point once")
    chosen = parser.parse_args()
    if chosen.launch:
        launch(load(chosen.launch))
    elif chosen.table:
        show([point for path in chosen.table for point in load(path)])
    else:
        part, parts = map(int, chosen.part.split("/"))
        points = missed(chosen.records)[part::parts]

        def keep() -> None:
            Path(chosen.json).write_text(json.dumps([asdict(p) for p in points], indent=1))

        keep()
        count(points, __file__, chosen.json)
        time_without(points, keep)


def show(points: list[Point]) -> None:
    """The table, in the order of the records."""
    done = [p for p in points if p.fractions]
    bounded = sum(p.fractions["A"] < p.target for p in done)
    noise = sum(p.fractions["now"] >= p.target for p in done)
    print(HEAD.format(count=len(done), rounds=METHOD.rounds, bounded=bounded, noise=noise))
    for point in sorted(done, key=place):
        print(point.line())


if __name__ == "__main__":
    main()
