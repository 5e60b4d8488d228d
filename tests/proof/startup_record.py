"""What a first call costs: CPU of a new process from its imports to the launch. Needs gcc, NVRTC and no GPU.

    python tests/proof/startup_record.py [--against CHECKOUT] [--out generated/bench/startup.txt]

Launches go to a driver that answers at once (pack_record.py). ``--against``: a checkout of another commit, in turn with
this one. A process is cold with an empty cache folder, knows its cubins if only what was chosen is missing, and is warm
where all is known. Times are medians, in ms of CPU, children of the process included.

Before that, the choice of a schedule where the tables have none: from the text of a spec to what the model ranks first,
in a fork of a process that has imported everything.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pack_record import STUB

RUNS = 5
ROOT = Path(__file__).resolve().parents[2]
NORMS = {
    "layernorm:d=4096,dtype=bf16": 'lngen.compile("layernorm", d=4096, dtype="bf16")',
    "own graph:d=4096,dtype=bf16": 'lngen.compile(add_rmsnorm, d=4096, dtype="bf16")',
    "softmax:d=3000,dtype=f32": 'lngen.compile("softmax", d=3000, dtype="f32")',
}
STEPS = ("compile", "first forward", "first backward", "another class of rows", "the same class again")

# Prints the CPU of each step in ms; a launch is by address, as a call of arrays ends.
FIRST = """
import resource, sys, time
import lngen, lngen.launch.runtime.norm
from lngen import D, M
def add_rmsnorm(b):
    h = b.input("x", M, D) + b.input("residual", M, D)
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * b.input("gamma", D))
    b.statistic(rstd, "rstd")
def used():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
def launch(call, rows):
    bound = call.loaded(0, None, rows).bind(rows, dict.fromkeys(call.names, call.d))
    bound([1 << 30] * len(call.names), 1 << 31, 0)
times = [used()]
norm = NORM
times.append(used())
for call, rows in (("_forward", 4096), ("_backward", 4096), ("_forward", 64), ("_forward", 64)):
    launch(getattr(norm, call), rows)
    times.append(used())
print(*[1e3 * (b - a) for a, b in zip(times, times[1:])])
"""

CHOICES = [
    f"{graph}.{direction}:d={d},dtype={dtype}"
    for graph in ("layernorm", "rmsnorm", "add_rmsnorm", "softmax", "gated_rmsnorm", "dyt")
    for direction in ("fwd", "bwd")
    for d in (768, 896, 4096, 6656, 8192, 11008)
    for dtype in ("bf16", "f32")
]

# Prints the CPU of each choice in ms.
CHOOSE = """
import json, os, sys, time
import lngen, numpy.random
from lngen.compiler.compile import Compilation
from lngen.compiler.schedule import attempts, model, table
from lngen.compiler.spec import parse_spec
table.tables = lambda: ()
def chosen(text):
    next(attempts(Compilation(parse_spec(text)).problem, ("sm_90",)))
for text in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        begun = time.process_time()
        chosen(text)
        os.write(write, repr(1e3 * (time.process_time() - begun)).encode())
        os._exit(0)
    os.wait()
    print(os.read(read, 99).decode())
"""


def choices(checkout: Path) -> list[float]:
    """The times of CHOICES, each in a process of its own."""
    command = [sys.executable, "-c", CHOOSE]
    given = json.dumps(CHOICES)
    done = subprocess.run(command, cwd=checkout, input=given, capture_output=True, text=True, check=True)
    return [*map(float, done.stdout.split())]


def choice_lines(checkouts: dict[str, Path]) -> Iterator[str]:
    """A line for each checkout: over all specs, of the medians of each."""
    runs = [(name, choices(checkout)) for _ in range(RUNS) for name, checkout in checkouts.items()]
    for name in sorted(checkouts):
        times = [statistics.median(spec) for spec in zip(*(t for n, t in runs if n == name), strict=True)]
        most, slowest = max(zip(times, CHOICES, strict=True))
        shown = f"median {statistics.median(times):.1f}, most {most:.1f} ({slowest})"
        yield f"choice by the model, {len(CHOICES)} specs, {name}: {shown}"


def first(checkout: Path, norm: str, cache: Path, driver: Path) -> list[float]:
    """The times of a new process."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "LD_LIBRARY_PATH": str(driver), "LNGEN_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", FIRST.replace("NORM", NORMS[norm])]
    done = subprocess.run(command, env=env, cwd=driver, capture_output=True, text=True, check=True)
    return [*map(float, done.stdout.split())]


def lines(checkouts: dict[str, Path], folder: Path) -> Iterator[str]:
    """A line for each norm, state of the cache and checkout."""
    for norm in NORMS:
        states: dict[tuple[str, str], list[list[float]]] = {}
        for _ in range(RUNS):
            for name, checkout in checkouts.items():
                cache = folder / name
                shutil.rmtree(cache, ignore_errors=True)
                for state in ("cold", "cubins known", "warm"):
                    if state == "cubins known":
                        shutil.rmtree(cache / "choices", ignore_errors=True)
                    states.setdefault((state, name), []).append(first(checkout, norm, cache, folder))
        for (state, name), found in sorted(states.items()):
            times = [statistics.median(column) for column in zip(*found, strict=True)]
            shown = ", ".join(f"{step} {t:.1f}" for step, t in zip(STEPS, times, strict=True))
            yield f"{norm}, {state}, {name}: to both launches {sum(times[:3]):.1f} ms; {shown}"


def main() -> None:
    """Prints the record, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    checkouts = {"now": ROOT, **({"before": given.against} if given.against else {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stub.c").write_text(STUB)
        library = ["-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), str(folder / "stub.c")]
        subprocess.run(["gcc", *library], check=True)
        head = f"Python {platform.python_version()}, {os.cpu_count()} cores; medians of {RUNS} processes, ms of CPU\n"
        text = head + "".join(f"{line}\n" for line in (*choice_lines(checkouts), *lines(checkouts, folder)))
    if given.out:
        given.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
