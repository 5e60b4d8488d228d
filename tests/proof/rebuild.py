"""What kernels take before and after a change of the emission: registers, spills, shared memory, instructions.

    python tests/proof/rebuild.py TABLE.json --column before      # with the old code
    python tests/proof/rebuild.py TABLE.json --column after       # with the new code
    python tests/proof/rebuild.py TABLE.json --compare            # exit 1 if a kernel takes more than it may

A new table has the golden set, every spec of ``lngen bench --grid targets`` under its default schedules at the sizes of
the grid, and the structures of sanitize.py. A table that exists keeps its cases, each with its schedule written out, so
that both columns have the same schedules even if the default changes. A case that has the column is not compiled again,
without --again. Needs NVRTC and no GPU. Machine instructions are counted if ``nvdisasm`` is on PATH. They are compared
where both columns have them, else the instructions of the PTX.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from lngen.aot.catalog import CATALOG
from lngen.bench.grids import GRIDS
from lngen.compile import Compilation
from lngen.devices import DEFAULT_ARCH, default_device
from lngen.emit import emit
from lngen.errors import LngenError
from lngen.files import write_all
from lngen.ir import DType
from lngen.ptx import parse
from lngen.schedule import problem, workload
from lngen.spec import parse_spec
from lngen.toolchain import compile_cubin, compile_ptx, nvrtc_version
from sanitize import SCHEDULES

COLUMNS = ("before", "after")
DTYPES = ("bf16", "f32", "f16")
EXTRA_REGISTERS = 2  # that a kernel may take more than before
RATIO = 1.02  # of instructions, after to before
EVERY = 20  # cases between two writes of the table

Counts = dict[str, int]
Case = dict[str, Any]  # spec, schedule, and by column the counts of each kernel, by its role


def cases() -> Iterator[Case]:
    """The golden set, the targets grid, every structure; a schedule that serves several sizes comes once."""
    seen = set()
    for spec, schedule in (*CATALOG.items(), *of_the_grid(), *SCHEDULES):
        text = str(Compilation(parse_spec(spec)).changed(schedule, DEFAULT_ARCH).plan.schedule)
        if (spec, text) not in seen:
            seen.add((spec, text))
            yield {"spec": spec, "schedule": text}


def of_the_grid() -> Iterator[tuple[str, str]]:
    """Specs of the targets grid and their default schedules, by the number of rows."""
    for dtype, direction in product(DTYPES, ("fwd", "bwd")):
        classes = set()
        for rows, d in GRIDS["targets"].shapes(DType(dtype)):
            spec = parse_spec(f"layernorm.{direction}:d={d},dtype={dtype}")
            place = (d, workload(problem(spec.graph(), d), rows, default_device()))
            if place not in classes:
                classes.add(place)
                yield str(spec), str(Compilation(spec).schedule(DEFAULT_ARCH, rows=rows))


def counts(case: Case) -> dict[str, Counts]:
    """What each kernel of a case takes, by its role: rows, finish, ..."""
    plan = Compilation(parse_spec(case["spec"])).changed(case["schedule"], DEFAULT_ARCH).plan
    source = emit(plan)
    binary = compile_cubin(source, DEFAULT_ARCH, name=plan.name)
    entries, sass = parse(compile_ptx(source, DEFAULT_ARCH, name=plan.name)).entries, sass_instructions(binary.image)
    found = {}
    for name, used in binary.resources.items():
        role = name.rpartition("__")[2]
        found[role] = {
            "registers": used.registers,
            "spills": used.spill_stores + used.spill_loads + used.stack,
            "shared": used.shared,
            "ptx": len(entries[name].instructions),
        }
        if name in sass:
            found[role]["sass"] = sass[name]
    return found


def sass_instructions(image: bytes) -> Counts:
    """Instructions of each kernel in a cubin, less the NOPs that fill it up; none without nvdisasm."""
    if shutil.which("nvdisasm") is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run(["nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"^\.text\.([\w$]+):$", text, flags=re.MULTILINE)
    found = {}
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        words = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([\w.]+)", code, re.MULTILINE)
        found[name] = sum(word != "NOP" for word in words)
    return found


def excesses(case: Case) -> Iterator[tuple[float, str]]:
    """How far each kernel of a case is past what it may take, 1.0 being the limit, and the sentence that says so."""
    for role in sorted({*case["before"], *case["after"]}):
        old, new = case["before"].get(role), case["after"].get(role)
        if old is None or new is None:
            yield 9.0, f"{role}: kernel {'added' if old is None else 'gone'}"
            continue
        if new["spills"] > old["spills"]:
            yield 9.0, f"{role}: {new['spills']} bytes spilled, before {old['spills']}"
        if new["registers"] > old["registers"] + EXTRA_REGISTERS:
            yield new["registers"] / old["registers"], f"{role}: registers {old['registers']} -> {new['registers']}"
        kind = "sass" if "sass" in old and "sass" in new else "ptx"
        if new[kind] > RATIO * old[kind]:
            ratio = new[kind] / old[kind]
            yield ratio, f"{role}: {kind} instructions {old[kind]} -> {new[kind]} ({ratio:.3f})"


def compare(table: dict[str, Any]) -> int:
    """Prints the kernels that take more than they may, the worst first, and a summary; how many cases these are."""
    both = [case for case in table["cases"] if all(case.get(c) for c in COLUMNS)]
    found = [
        (max(e)[0], case, [line for _, line in sorted(e, reverse=True)]) for case in both if (e := [*excesses(case)])
    ]
    for _, case, lines in sorted(found, key=lambda f: -f[0]):
        print(f"{case['spec']}\n    {case['schedule']}", *lines, sep="\n    ")
    print(f"\n{len(both)} of {len(table['cases'])} cases in both columns, {len(found)} take more than they may")
    for kind in ("registers", "ptx", "sass"):
        pairs = [
            (k[kind], case["after"][role][kind])
            for case in both
            for role, k in case["before"].items()
            if kind in k and kind in case["after"].get(role, {})
        ]
        if pairs:
            total, more = (sum(p[1] for p in pairs) / sum(p[0] for p in pairs)), max(b - a for a, b in pairs)
            print(f"{kind:9}: {total:.4f} times in all, {more:+d} at most, over {len(pairs)} kernels")
    return len(found)


def measure(path: Path, column: str, again: bool = False) -> None:
    """Fills a column of the table, from where it was left; a case that is refused is left without it."""
    nvrtc = list(nvrtc_version())
    table = json.loads(path.read_text()) if path.exists() else {"arch": DEFAULT_ARCH, "cases": [*cases()]}
    if table.setdefault("nvrtc", nvrtc) != nvrtc:
        sys.exit(f"{path} was measured with NVRTC {table['nvrtc']}, here is {nvrtc}; the counts cannot be compared.")
    todo = [case for case in table["cases"] if again or column not in case]
    for done, case in enumerate(todo, 1):
        case.pop(column, None)
        try:
            case[column] = counts(case)
        except LngenError as error:
            print(f"{case['spec']} {case['schedule']}: {error}", file=sys.stderr)
        if done % EVERY == 0 or done == len(todo):
            write(path, table)
            print(f"{done} of {len(todo)}", file=sys.stderr, flush=True)


def write(path: Path, table: dict[str, Any]) -> None:
    """A case a line, so that a difference can be read."""
    head = {k: v for k, v in table.items() if k != "cases"}
    lines = ",\n".join(json.dumps(case) for case in table["cases"])
    write_all({path: f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n'.encode()})


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--column", choices=COLUMNS, help="the column to fill with what this code emits")
    parser.add_argument("--again", action="store_true", help="measure cases that have the column, too")
    parser.add_argument("--compare", action="store_true", help="print what takes more than before")
    chosen = parser.parse_args(arguments)
    if chosen.column:
        measure(chosen.table, chosen.column, chosen.again)
    if chosen.compare:
        sys.exit(1 if compare(json.loads(chosen.table.read_text())) else 0)


if __name__ == "__main__":
    main()
