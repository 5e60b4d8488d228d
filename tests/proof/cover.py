"""Chooses the tests of a plain run by what they cover, and measures what they kill.

    python tests/proof/cover.py record DIR       runs every test of today's plain run alone, and notes what it runs
    python tests/proof/cover.py choose DIR       writes tests/data/left_out.txt: what a plain run has no time for
    python tests/proof/cover.py kill DIR         330 drawn mutants: killed by all tests, and by those of the plain run?
    python tests/proof/cover.py kill DIR --others    330 others, by which nobody chose
    python tests/proof/cover.py spare DIR        functions that other tests may make needless, to be read

A plain run has a cover, which runs every block (``blocks.py``), a test for each mutant that died, and of all other
tests the cheapest that it has time for: three of four take a tenth of the time, and what is cheap asserts most. Costs
are rounded to powers of two of 10 ms, and ties are broken by name, so two recordings give nearly one set. Cases whose
names are positions (``message0``) stay or go with all of their function.

In the plain run stay tests that fail under the recorder or are skipped, and those whose subject is no code of lngen:
they run no block of it, or are about pages, messages and the repository.

``record`` starts from an empty cache of compiled kernels and takes about ten minutes on two cores; ``kill`` as long, of
which 30 mutants are of templates.
"""

import argparse
import ast
import heapq
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blocks

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))

import sampling  # noqa: E402

DRAWN = ROOT / "tests/data/mutants.txt"
CPU = 300.0  # seconds of a plain run's tests: three and a half minutes of two cores, less starting and collecting
UNIT = 0.01  # seconds, of which costs are powers of two
SEED, COUNT, TEMPLATES = 20261127, 300, 30
TRIED, AGAIN, LONGEST = 40, 80, 3.0  # tests at most for a mutant, and for one that has died before; seconds of one
NOT_RECORDED = "tests/lab/tune/test_tuner.py"  # its workers are forks, which wait for the recorder's
OF_TEXTS = tuple(f"tests/test_{name}.py" for name in ("docs", "messages", "repo", "results", "sampling"))
HEAD = """\
# The tests that a plain run leaves out, since others run what they run. pytest -m full runs them.
# Made by: python tests/proof/cover.py record DIR && python tests/proof/cover.py choose DIR
# Recorded tests: {count}
"""


@dataclass(frozen=True)
class Recorded:
    """One test, or all cases of a function whose names are positions. ``cost`` is ``cpu`` rounded."""

    name: str
    tests: tuple[str, ...]
    cpu: float
    cost: float
    blocks: frozenset[str]
    kept: bool

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


# ---- record ----


def record(folder: Path, jobs: int) -> None:
    """One process for each of ``jobs`` shares of the test files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted({*(ROOT / "tests").rglob("test_*.py")} - {ROOT / NOT_RECORDED})
    size = Counter({path: path.stat().st_size for path in files})
    shares: list[list[Path]] = [[] for _ in range(jobs)]
    for path, _ in size.most_common():
        min(shares, key=lambda share: sum(size[p] for p in share)).append(path)
    runs = [started(sorted(share), {"LNGEN_RECORD": f"{folder}/{n}.jsonl"}) for n, share in enumerate(shares)]
    for process in runs:
        process.wait()


def started(files: Sequence[Path], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Pytest in one process with the recorder, on an empty cache: templates that count blocks are nobody else's."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/proof"), os.environ.get("PYTHONPATH", "")])
    own = {"LNGEN_TEST_CACHE": "", "LNGEN_CACHE_DIR": tempfile.mkdtemp(prefix="lngen-cover-"), "PYTHONPATH": paths}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "recorder"]
    environment = {**os.environ, **variables, **own, **threads}
    return subprocess.Popen([*command, *map(str, files)], cwd=ROOT, env=environment)


def lines(folder: Path) -> Iterator[dict[str, Any]]:
    """What was recorded, by the tests' names."""
    found = [json.loads(line) for path in folder.glob("[0-9]*.jsonl") for line in path.read_text().splitlines()]
    yield from sorted(found, key=lambda r: str(r["test"]))


def recorded(rows: Iterable[Mapping[str, Any]]) -> list[Recorded]:
    """Tests, and functions whose cases are one."""
    groups = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in rows:
        name = row["test"]
        groups[name.partition("[")[0] if row["positional"] else name].append(row)
    return [
        Recorded(
            name,
            tuple(r["test"] for r in group),
            sum(r["cpu"] for r in group),
            sum(rounded(r["cpu"]) for r in group),
            frozenset(block for r in group for block in r["blocks"]),
            any(r["outcome"] != "passed" or not r["blocks"] or r["test"].startswith(OF_TEXTS) for r in group),
        )
        for name, group in sorted(groups.items())
    ]


def rounded(cpu: float) -> float:
    """The next power of two of 10 ms, at least one."""
    return float(UNIT * 2 ** max(0, math.ceil(math.log2(max(cpu, 1e-9) / UNIT))))


# ---- choose ----


def cover(tests: Sequence[Recorded]) -> set[str]:
    """Names of tests that run every block that all run, and of those that have to stay. Greedy, by blocks for cost."""
    chosen = {t.name for t in tests if t.kept}
    missing = {block for t in tests for block in t.blocks} - {block for t in tests if t.kept for block in t.blocks}
    todo = [(-len(t.blocks) / t.cost, t.name, t) for t in tests if not t.kept]
    heapq.heapify(todo)
    while missing:
        _, name, t = heapq.heappop(todo)
        gain = len(t.blocks & missing) / t.cost
        if gain and todo and (-gain, name) > todo[0][:2]:
            heapq.heappush(todo, (-gain, name, t))
        elif gain:
            chosen.add(name)
            missing -= t.blocks
    return chosen


def affordable(tests: Sequence[Recorded], killers: Iterable[Collection[str]], cpu: float) -> set[str]:
    """Names of a cover with a test of each of ``killers``, and of the cheapest others for ``cpu`` seconds in all."""
    chosen, by_test = cover(tests), {name: t for t in tests for name in t.tests}
    for able in killers:
        found = sorted((by_test[n].cost, by_test[n].name) for n in able if n in by_test)
        if found and not any(name in chosen for _, name in found):
            chosen.add(found[0][1])
    spent = sum(t.cpu for t in tests if t.name in chosen)
    for t in sorted(tests, key=lambda t: (rounded(t.cpu / len(t.tests)), t.name)):
        if t.name not in chosen and spent + t.cpu <= cpu:
            chosen.add(t.name)
            spent += t.cpu
    return chosen


def known_killers(folder: Path) -> list[list[str]]:
    """The tests that killed each mutant, of those kept and of every trial in the folder."""
    found = defaultdict[Any, set[str]](set)
    for line in DRAWN.read_text(encoding="utf-8").splitlines() if DRAWN.exists() else ():
        row = json.loads(line)
        found[tuple(row["place"])] |= {row["all"], row["plain"]} - {""}
    for path in sorted(folder.glob("*.out")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[tuple(row["place"][:5])] |= {row["killed"]} - {""}
    return [sorted(tests) for _, tests in sorted(found.items())]


def choose(folder: Path, cpu: float) -> None:
    """Writes what is not ``affordable``."""
    tests, killers = recorded(lines(folder)), known_killers(folder)
    chosen = affordable(tests, killers, cpu)
    for label, names in (("a cover with killers", affordable(tests, killers, 0)), ("a plain run", chosen)):
        taken = [t for t in tests if t.name in names]
        print(f"{label}: {sum(len(t.tests) for t in taken)} tests, {sum(t.cpu for t in taken):.0f} s of CPU")
    print(f"all: {sum(len(t.tests) for t in tests)} tests, {sum(t.cpu for t in tests):.0f} s of CPU")
    sampling.LEFT_OUT.write_text(text(tests, chosen), encoding="utf-8")


def text(tests: Sequence[Recorded], chosen: set[str]) -> str:
    """The file: below a test file its functions, and behind one of which something is chosen the other cases."""
    cases = defaultdict[str, list[str]](list)
    partly = {name.partition("[")[0] for name in chosen}
    for name in sorted(name for t in tests if t.name not in chosen for name in t.tests):
        function, bracket, case = name.partition("[")
        cases[function] += [bracket + case] if function in partly else []
    found, last = [HEAD.format(count=sum(len(t.tests) for t in tests))], ""
    for function, left in cases.items():
        file, _, short = function.partition("::")
        found += [f"{file}\n"] if file != last else []
        found += [f"  {short}\n", *wrapped(left)]
        last = file
    return "".join(found)


def wrapped(cases: Sequence[str], width: int = 116) -> Iterator[str]:
    """Lines of cases, separated by tabs."""
    line = ""
    for case in cases:
        if line and len(line) + len(case) >= width:
            yield f"    {line}\n"
            line = ""
        line += f"\t{case}" if line else case
    if line:
        yield f"    {line}\n"


# ---- kill ----


def places(folder: str = "lngen") -> list[blocks.Mutant]:
    """Every mutant of lngen, by file."""
    table = blocks.Table()
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        blocks.changed(ast.parse(path.read_text(encoding="utf-8")), name, table, mutants=True)
    return table.mutants


EDITS = {
    " < ": " <= ",
    " > ": " >= ",
    " == ": " != ",
    " && ": " || ",
    " + ": " - ",
    " * ": " + ",
    " - 1": "",
    "++": "--",
}
RUNS_KERNELS = "lngen/proof/ptx/call.py"  # where headers act


def template_places() -> list[blocks.Mutant]:
    """Changed lines of templates and headers, and statements left out, each by its file and the number of its line."""
    found = []
    folder = ROOT / "templates"
    for path in sorted([*folder.glob("*.cu.jinja"), *folder.rglob("*.cuh")]):
        name = str(path.relative_to(ROOT))
        block = f"jinja:{path.name}" if path.suffix == ".jinja" else RUNS_KERNELS
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            code = line.partition("//")[0]
            if not code.strip() or code.lstrip().startswith(("#", "{#", "*")):
                continue
            changes = [(old.strip(), line.replace(old, new, 1)) for old, new in EDITS.items() if old in code]
            if code.rstrip().endswith(");") and code[:1] == " " and "=" not in code and "return" not in code:
                changes.append(("call", ""))
            found += [blocks.Mutant(name, "", operator, n, line, after, block) for operator, after in changes]
    return found


def drawn(others: bool = False) -> list[blocks.Mutant]:
    """The mutants: those of the kept file that have a place, then the next ones of the seed; or as many others."""
    both = (places(), COUNT, "lngen"), (template_places(), TEMPLATES, "templates")
    return [m for found, count, root in both for m in _order(found, root)[others * count :][:count]]


def _order(mutants: Sequence[blocks.Mutant], root: str) -> list[blocks.Mutant]:
    every = {m.place: m for m in mutants}
    order = sorted(every)
    random.Random(SEED).shuffle(order)
    lines = DRAWN.read_text(encoding="utf-8").splitlines() if DRAWN.exists() else []
    kept = [place for line in lines if (place := tuple(json.loads(line)["place"]))[0].startswith(root)]
    still = [place for place in kept if place in every]
    new = [place for place in order if place not in {*still}]
    if gone := len(kept) - len(still):
        print(f"{gone} mutants of {root} have no place any more; others are drawn for them")
    return [every[place] for place in [*still, *new]]


def kill(folder: Path, jobs: int, others: bool) -> None:
    """Tries the mutants on all tests, those that die on the plain run's, and writes who killed which.

    ``others`` are mutants by which nobody chose the plain run: they are not kept.
    """
    tests = recorded(lines(folder))
    by_block = defaultdict[str, list[Recorded]](list)
    for t in sorted(tests, key=lambda t: (t.cost, t.name)):
        able = not t.kept or t.name.startswith(OF_TEXTS)
        for block in {name for b in t.blocks for name in (b, b.rpartition(":")[0])} if able else ():
            by_block[block].append(t)  # by the block, and by its file
    mutants, base = drawn(others), folder / ("others" if others else "drawn")
    rows = map(json.loads, DRAWN.read_text(encoding="utf-8").splitlines() if DRAWN.exists() else ())
    died = {tuple(row["place"]) for row in rows if row["all"]}
    every = killed([trial(m, by_block[m.block], m.place in died) for m in mutants], jobs, Path(f"{base}-all"))
    names = {"", *(name for t in tests for name in t.tests)}
    plain = {place: test for place, test in every.items() if test in names and not sampling.is_listed(test)}
    again = [m for m in mutants if m.place not in plain]
    taken = {b: [t for t in found if not sampling.is_listed(t.tests[0])] for b, found in by_block.items()}
    plain |= killed([trial(m, taken.get(m.block, []), True) for m in again], jobs, Path(f"{base}-plain"))
    with (Path(f"{base}.txt") if others else DRAWN).open("w", encoding="utf-8") as file:
        for m in mutants:
            by = {"all": every[m.place], "plain": plain[m.place]}
            print(json.dumps({"place": m.place, "after": m.after, **by}), file=file)
    survived = [m for m in mutants if every[m.place] and not plain[m.place]]
    print(f"{sum(map(bool, every.values()))} of {len(mutants)} die, {len(survived)} of them not in the plain run:")
    for m in survived:
        print(f"  {m.block} {m.function}: {m.before} -> {m.after}; {every[m.place]}")


def trial(m: blocks.Mutant, able: Sequence[Recorded], again: bool) -> dict[str, Any]:
    """A mutant and the tests to try on it: the cheapest of every file, or of every function, the cheapest first."""
    first: dict[str, str] = {}
    for t in able:
        if t.cost <= LONGEST * len(t.tests):
            first.setdefault(t.name.partition("[")[0] if again else t.file, t.tests[0])
    return {"place": m.place, "after": m.after, "tests": [*first.values()][: AGAIN if again else TRIED]}


def killed(wanted: Sequence[Mapping[str, Any]], jobs: int, base: Path) -> dict[Any, str]:
    """By place, the test that killed it. What the files of an earlier call have is not tried again."""

    def known() -> dict[Any, str]:
        files = [*base.parent.glob(f"{base.name}-*.out")]
        found = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
        return {tuple(r["place"]): r["killed"] for r in found}

    before = known()
    todo, runs = [w for w in wanted if w["place"] not in before], []
    for n in range(jobs) if todo else ():
        share, path = todo[n::jobs], Path(f"{base}-{len(before)}-{n}")
        path.with_suffix(".txt").write_text("".join(json.dumps(w) + "\n" for w in share), encoding="utf-8")
        files = sorted({ROOT / name.partition("::")[0] for w in share for name in w["tests"]})
        variables = {"LNGEN_KILL": f"{path}.out", "LNGEN_MUTANTS": f"{path}.txt"}
        runs += [started(files, variables)] if files else []
    for process in runs:
        process.wait()
    found = known()
    return {w["place"]: found.get(w["place"], "") for w in wanted}


# ---- spare ----

HOLD = 3  # functions that run a block when one more is needless
OWN_MUTANTS = 4  # tried for each function, in the blocks that fewest others run


@dataclass(frozen=True)
class Function:
    """A test function with all its cases, the cheapest first."""

    name: str
    tests: tuple[Recorded, ...]
    blocks: frozenset[str]

    @property
    def cpu(self) -> float:
        return sum(t.cpu for t in self.tests)

    @property
    def quick(self) -> list[str]:
        """Its three cheapest cases."""
        return [t.tests[0] for t in self.tests[:3] if t.cost <= LONGEST * len(t.tests)]


def functions(tests: Iterable[Recorded]) -> dict[str, Function]:
    """The functions of which every case passed, and none has to stay."""
    groups = defaultdict[str, list[Recorded]](list)
    for t in sorted(tests, key=lambda t: (t.cost, t.name)):
        groups[t.name.partition("[")[0]].append(t)
    return {
        name: Function(name, tuple(group), frozenset(block for t in group for block in t.blocks))
        for name, group in groups.items()
        if not any(t.kept for t in group)
    }


def spare(folder: Path, jobs: int) -> None:
    """Prints the functions whose every block ``HOLD`` others run, and whose mutants others kill as well.

    Each of a function's mutants that it kills is tried on the functions that run its block.
    """
    every = functions(recorded(lines(folder)))
    runs = Counter(block for f in every.values() for block in f.blocks)
    by_block = defaultdict[str, list[Function]](list)
    for f in sorted(every.values(), key=lambda f: f.tests[0].cost):
        for block in f.blocks:
            by_block[block].append(f)
    of_block = defaultdict[str, list[blocks.Mutant]](list)
    for m in places():
        of_block[m.block].append(m)
    mine = {f.name: own(f, runs, of_block) for f in every.values() if all(runs[b] > HOLD for b in f.blocks)}
    first = [
        {"place": (*m.place, name), "after": m.after, "tests": every[name].quick} for name in mine for m in mine[name]
    ]
    killed_by_own = killed(first, jobs, folder / "own")
    second = [
        {**w, "tests": [t for f in by_block[m.block][:40] if f.name != name for t in f.quick[:1]]}
        for name in mine
        for m in mine[name]
        for w in [{"place": (*m.place, name), "after": m.after}]
        if killed_by_own[(*m.place, name)]
    ]
    instead = defaultdict[str, list[str]](list)
    for place, test in killed(second, jobs, folder / "instead").items():
        instead[place[-1]].append(test.partition("[")[0])
    for name in needless(every, instead, mine):
        others = ", ".join(sorted({*instead[name]}))
        print(f"{name}: {every[name].cpu:.1f} s{f'; {others}' if others else ''}")


def needless(every: Mapping[str, Function], instead: Mapping[str, Sequence[str]], asked: Collection[str]) -> list[str]:
    """Those of the functions ``asked`` that may go together, by name.

    ``instead``: for each mutant that a function kills another one that does; empty if none does. Each block keeps
    ``HOLD`` functions, and who kills in the place of another stays.
    """
    runs = Counter(block for f in every.values() for block in f.blocks)
    needed, gone = set[str](), set[str]()
    for f in sorted((every[name] for name in asked), key=lambda f: (-f.cpu, f.name)):
        others = {*instead.get(f.name, ())}
        if f.name in needed or "" in others or others & gone or not all(runs[b] > HOLD for b in f.blocks):
            continue
        gone.add(f.name)
        needed |= others
        runs.subtract(f.blocks)
    return sorted(gone)


def own(f: Function, runs: Mapping[str, int], of_block: Mapping[str, Sequence[blocks.Mutant]]) -> list[blocks.Mutant]:
    """The mutants to try on a function: of the blocks that fewest functions run, two of a block at most."""
    rng, found = random.Random(f.name), list[blocks.Mutant]()
    for block in sorted(f.blocks, key=lambda b: (runs[b], b)):
        there = of_block.get(block, ())
        found += rng.sample(there, min(2, len(there)))
        if len(found) >= OWN_MUTANTS:
            break
    return found[:OWN_MUTANTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("record", "choose", "kill", "spare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--others", action="store_true", help="kill: 330 other mutants")
    parser.add_argument("--cpu", type=float, default=CPU, help="seconds of a plain run")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    if asked.what == "choose":
        choose(folder, asked.cpu)
    elif asked.what in ("record", "spare"):
        (record if asked.what == "record" else spare)(folder, asked.jobs)
    else:
        kill(folder, asked.jobs, asked.others)


if __name__ == "__main__":
    main()
