"""Sampled mutants of lngen and of its device code: does a test fail for each? Outside the default suite.

python tests/mutate.py --count 200 --seed 1 --jobs 2 --out mutants.jsonl           # samples, runs, writes a line each
python tests/mutate.py --again mutants.jsonl --whole --jobs 2 --out again.jsonl    # survivors against the whole suite
python tests/mutate.py --report mutants.jsonl again.jsonl                          # counts, survivors, reasons

A mutant is one small change of one place: a comparison, an operator, a constant, a condition, a statement left out, two
operands exchanged; in a template, a line or an operator of the CUDA text. Places are drawn with a seed, so the same
sources give the same mutants. Each runs in a copy of the checkout, against the tests that belong to its folder first.
tests/data/mutants.toml holds those that survive, each with the reason why no test can, or need, tell them apart.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
SURVIVORS = ROOT / "tests" / "data" / "mutants.toml"
COPIED = ("lngen", "templates", "tests", "generated", "pyproject.toml", "README.md", "LICENSE", ".ci", ".gitignore")
DEVICE_SHARE = 0.15  # of the mutants that are of templates

# Which tests belong to which part, the quickest and most specific first; the longest prefix counts. Those of processes,
# signals and the repository are left out: they fail under load, or because a source has changed at all.
EXECUTED = "test_blocks test_ptx_alias test_ragged test_claim test_staged test_ptx_executor test_lower test_mutants"
TESTS = {
    "lngen/": "test_config test_cli",
    "lngen/numbers.py": "test_numbers test_cli",
    "lngen/files.py": "test_files test_cache test_aot_folder",
    "lngen/spec/spec.py": "test_identity test_numbers test_outputs test_runtime test_cli",
    "lngen/ir/": "test_ir test_numerics test_names test_kinks test_passes test_mathematics",
    "lngen/passes/": "test_simplify test_passes test_kinks test_outputs test_mathematics test_random_graphs test_emit",
    "lngen/graphs/": "test_ir test_outputs test_identity test_names test_arguments",
    "lngen/interpret/": "test_ir test_mathematics test_passes",
    "lngen/schedule/": "test_schedule test_lower test_tune test_emit",
    "lngen/lower/": "test_generated test_lower test_emit test_schedule test_ragged test_staged test_traffic",
    "lngen/emit/": "test_generated test_emit test_staged test_ragged",
    "lngen/toolchain/": "test_toolchain test_cache test_aot",
    "lngen/ptx/": "test_ptx_checks test_ptx_sync test_ptx_model test_ptx_forms test_ptx_modifiers "
    "test_ptx_memory_modifiers test_ptx_other_modifiers test_ptx_halves test_ptx_launch test_ptx_async "
    "test_ptx_bulk test_ptx_cluster test_ptx_executor",
    "lngen/runtime/": "test_runtime test_workspace test_overlap test_arguments test_driver test_tune_files",
    "lngen/check/": "test_check test_oracles test_mutations test_cli_output test_cli",
    "lngen/check/conform/": "test_conform",
    "lngen/tune/": "test_tune test_tune_bits test_tune_cluster test_tune_files test_tune_run",
    "lngen/bench/": "test_bench test_bench_ceilings",
    "lngen/aot/": "test_aot_folder test_aot test_generated",
    "lngen/inspect/": "test_traffic test_cli_output test_cli",
    "lngen/cli/": "test_cli_output test_conform test_cli test_aot",
    "lngen/cli/bench.py": "test_bench test_cli_output test_cli",
    "lngen/cli/tune.py": "test_tune_run test_cli_output test_cli",
    "templates/": EXECUTED,
}
SLOW = "every_structure_compiles or never_spills or register_model or time_a_kernel or hash_seed"
NOT_RUN = f"not ({SLOW} or ctrl_c or sigint or console or worker or server)"  # what pytest's -k gets
EVERY = "full or not full"  # what its -m gets: no sample of the large tables


@dataclass(frozen=True)
class Mutant:
    """One change: ``path`` from ``start`` to ``end`` (in characters) becomes ``text``."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str
    was: str
    name: str  # what tests/data/mutants.toml calls it: no line number, so that it outlives changes elsewhere
    status: str = ""  # killed, survived, timeout (of its tests: neither of the two)
    by: str = ""  # the test that failed
    seconds: float = 0.0


def mutant(path: str, source: str, kind: str, start: int, end: int, text: str) -> Mutant:
    """The change of ``source`` between two characters, named by its lines before and after."""
    first, last = source.rfind("\n", 0, start) + 1, (source + "\n").index("\n", end)
    before, after = source[first:last], source[first:start] + text + source[end:last]
    line = source.count("\n", 0, start) + 1
    return Mutant(path, line, kind, start, end, text, source[start:end], f"{path}: {_line(before)} => {_line(after)}")


def _line(text: str) -> str:
    return " ".join(text.split())


# ---- places ----

COMPARED = {"Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">"), "Eq": ("==", "!="),
            "NotEq": ("!=", "=="), "In": ("in", "not in"), "NotIn": ("not in", "in"), "Is": ("is", "is not"),
            "IsNot": ("is not", "is")}  # fmt: skip
COMPUTED = {"Add": ("+", "-"), "Sub": ("-", "+"), "Mult": ("*", "//"), "FloorDiv": ("//", "*"), "Mod": ("%", "*"),
            "BitAnd": ("&", "|"), "LShift": ("<<", ">>"), "RShift": (">>", "<<"), "Div": ("/", "*")}  # fmt: skip
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


class _Python(ast.NodeVisitor):
    """The places of a module. What only people read is left alone: texts, annotations, assertions, help."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, []  # type: ignore[var-annotated]
        self.starts = [0]
        for text in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(text))
        self.visit(ast.parse(source))

    def at(self, line: int, column: int) -> int:
        """A place in characters; the syntax tree counts bytes."""
        text = self.source[self.starts[line - 1] : self.starts[line]]
        return self.starts[line - 1] + len(text.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def add(self, node: ast.AST, kind: str, text: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self.span(node)
        if self.source[start:end] != text:
            self.found.append(mutant(self.path, self.source, kind, start, end, text))

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for child in [*node.body, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(child)

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) != "TYPE_CHECKING":
            self.add(node.test, "condition", f"not ({self.text(node.test)})")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node.test, "condition", f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def between(self, left: ast.AST, right: ast.AST, kind: str, old: str, new: str) -> None:
        """The operator between two operands, whatever parentheses there are."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[start:end]
        if old in gap:
            self.add(left, kind, gap.replace(old, new, 1), (start, end))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self.between(node.left, node.comparators[0], "comparison", *COMPARED[type(node.ops[0]).__name__])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        name, texts = type(node.op).__name__, isinstance(node.left, ast.JoinedStr | ast.Constant)
        if name in COMPUTED and not (texts and self.text(node.left)[-1] in "'\""):
            self.between(node.left, node.right, "operator", *COMPUTED[name])
        elif name == "BitOr" and not self.text(node).endswith("None"):
            self.add(node, "order", f"{self.text(node.right)} | {self.text(node.left)}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, "condition", word.join(f"({self.text(v)})" for v in node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self.add(node, "operator", f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in EXCHANGED and not (name == "sorted" and node.keywords):
            self.add(node.func, "call", EXCHANGED[name])
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in ("option", "command", "argument")):
            self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        spread = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
        if len(spread) == len(node.values) == 2:
            first, second = map(self.text, spread)
            self.add(node, "order", f"{{**{second}, **{first}}}")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "statement", "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "statement", "pass")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "statement", "pass")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Constant) and node.slice.value == 0:
            self.add(node.slice, "index", "-1")
        self.generic_visit(node)


def python_places(path: str, source: str) -> Iterable[Mutant]:
    """The places of a module."""
    return _Python(path, source).found


OPPOSITE = {
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "operator": {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&&": "||", "||": "&&", "&": "|", "^": "|"},
}
NUMBER = re.compile(r"(?<![\w.\"%$])\d+(?![\w.])")
STATEMENT = re.compile(r"^ +(?:[\w:]+\(.*\)|asm volatile\(.*\)|[\w\[\]. ]+ [-+|^]?= .*);$")
NOT_CODE = re.compile(r"^\s*(//|\*|#|\{#|\{%|\{\{)|^\s*$")


def _words(swapped: Iterable[str]) -> re.Pattern[str]:
    """Any of these operators between spaces."""
    return re.compile(rf"(?<= )(?:{'|'.join(map(re.escape, swapped))})(?= )")


def device_places(path: str, source: str) -> Iterator[Mutant]:
    """The places of a template: lines of CUDA without Jinja in what changes."""
    start, comment = 0, False
    for text in source.splitlines(keepends=True):
        comment = comment or "{#" in text
        code = text.split("//")[0].rstrip()
        if not comment and not NOT_CODE.match(text) and "template <" not in text:
            swaps = [(kind, m, new[m[0]]) for kind, new in OPPOSITE.items() for m in _words(new).finditer(code)]
            swaps += [("constant", m, str(int(m[0]) + 1)) for m in NUMBER.finditer(code)]
            for kind, m, new in swaps:
                outside = code[: m.start()].count("{{") == code[: m.start()].count("}}") and '"' not in code
                if outside:
                    yield mutant(path, source, kind, start + m.start(), start + m.end(), new)
            if STATEMENT.match(code) and not re.match(r"^ +(const|real|int|unsigned|long|auto)\b", code):
                body = code.lstrip()
                yield mutant(path, source, "statement", start + code.index(body), start + len(code), ";")
        comment = comment and "#}" not in text
        start += len(text)


def _excluded(root: Path, places: Iterable[str]) -> dict[str, list[range]]:
    """By path, the lines that no mutant is made of: whole files, or one class or function of a module."""
    found: dict[str, list[range]] = {}
    for place in places:
        path, _, name = place.partition("::")
        lines = range(1, 10**6)
        if name:
            body = ast.parse((root / path).read_text(encoding="utf-8")).body
            (node,) = [n for n in body if getattr(n, "name", "") == name]
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        found.setdefault(path, []).append(lines)
    return found


def places(root: Path, only: str, excluded: Iterable[str]) -> tuple[list[Mutant], list[Mutant]]:
    """All places of the package, and all of the templates, in a fixed order, less those that are excluded."""
    out, python, device = _excluded(root, excluded), [], []  # type: tuple[dict[str, list[range]], list[Mutant], list[Mutant]]
    for folder, places_of, found in (("lngen", python_places, python), ("templates", device_places, device)):
        for file in sorted(
            p for p in (root / folder).rglob("*") if p.is_file() and p.suffix in (".py", ".jinja", ".cuh")
        ):
            path = file.relative_to(root).as_posix()
            if path.startswith(only):
                every = places_of(path, file.read_text(encoding="utf-8"))
                found += [m for m in every if not any(m.line in lines for lines in out.get(path, []))]
    return python, device


def sample(count: int, seed: int, only: str = "") -> list[Mutant]:
    """So many mutants: each file is as likely as its places are many, templates have a share of their own.

    In the order in which they are drawn: whatever part has run is a sample, too.
    """
    rng, (python, device) = random.Random(seed), places(ROOT, only, survivors()["excluded"])
    few = min(len(device), round(count * DEVICE_SHARE) if python else count)
    chosen = rng.sample(device, few) + rng.sample(python, min(len(python), count - few))
    return rng.sample(chosen, len(chosen))


# ---- runs ----


def tests_of(path: str) -> list[str]:
    """The test files of a part; first those that import the very module, or are named as a template is."""
    names = TESTS[max((p for p in TESTS if path.startswith(p)), key=len)].split()
    package, _, module = path.removesuffix(".py").replace("/", ".").rpartition(".")
    imports = re.compile(rf"from {package}\.{module} import|from {package} import .*\b{module}\b")
    files = {name: (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8") for name in names}
    named = {name for name in names if path.startswith("templates/") and name.removeprefix("test_") in path}
    direct = named | {name for name, text in files.items() if imports.search(text)}
    return [f"tests/{name}.py" for name in sorted(names, key=lambda name: name not in direct)]


class Copy:
    """A copy of the checkout with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
            elif source.exists():
                shutil.copy(source, folder / name)

    def run(self, mutant: Mutant, whole: bool, seconds: float) -> Mutant:
        """The mutant with what the tests made of it."""
        file = self.folder / mutant.path
        source = file.read_text(encoding="utf-8")
        assert source[mutant.start : mutant.end] == mutant.was, f"{mutant.name}: the source has changed"
        begin = time.monotonic()
        try:
            changed = source[: mutant.start] + mutant.text + source[mutant.end :]
            file.write_text(changed, encoding="utf-8")
            status, by = self.test(["tests"] if whole else tests_of(mutant.path), seconds)
        finally:
            file.write_text(source, encoding="utf-8")
        return replace(mutant, status=status, by=by, seconds=round(time.monotonic() - begin, 1))

    def test(self, files: list[str], seconds: float) -> tuple[str, str]:
        """Killed, survived or timeout, and by which test."""
        log = self.folder / "log.txt"
        child = FORKS.Process(target=_pytest, args=(self.folder, files, log))
        child.start()
        child.join(seconds)
        if child.exitcode is None:
            os.killpg(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
            child.join()
            return "timeout", ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        assert child.exitcode not in (4, 5), f"pytest found none of {files}"
        return ("survived", "") if child.exitcode == 0 else ("killed", failed[1] if failed else "import")


FORKS = multiprocessing.get_context("forkserver")  # what a mutant cannot change is imported once
FORKS.set_forkserver_preload(["pytest", "numpy", "ml_dtypes", "jinja2", "rich", "click", "torch", "cupy"])


def _pytest(folder: Path, files: list[str], log: Path) -> None:
    """Runs test files of a copy, in a process group of its own; the exit code is pytest's."""
    import pytest

    os.setsid()
    os.chdir(folder)
    os.environ.update(PYTHONPATH=str(folder), LNGEN_TEST_CACHE=str(folder / "cache"))
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", EVERY, "-k", NOT_RUN, *files]))


def run_all(mutants: list[Mutant], jobs: int, whole: bool, seconds: float, out: Path) -> None:
    """Every mutant that ``out`` does not have yet; a line each, at once."""
    done = {m.name for m in load([out])} if out.exists() else set()
    todo = [m for m in mutants if m.name not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads, out.open("a") as file:
        copies: Queue[Copy] = Queue()
        for job in range(jobs):
            (Path(folder) / str(job)).mkdir()
            copies.put(Copy(Path(folder) / str(job)))
        first = copies.queue[0].test(["tests/test_config.py"], seconds)
        assert first == ("survived", ""), f"without a change, tests/test_config.py was {first}"

        def one(mutant: Mutant) -> Mutant:
            copy = copies.get()
            try:
                return copy.run(mutant, whole, seconds)
            finally:
                copies.put(copy)

        for number, done in enumerate(as_completed([threads.submit(one, m) for m in todo]), 1):
            result = done.result()
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(f"{number}/{len(todo)} {result.status:<8} {result.seconds:6.1f} s  {result.path}:{result.line} "
                  f"{result.by or result.name}", flush=True)  # fmt: skip


def load(paths: list[Path]) -> list[Mutant]:
    """Results; a later file's word counts."""
    found: dict[str, Mutant] = {}
    for path in paths:
        for text in path.read_text().splitlines():
            m = Mutant(**json.loads(text))
            found[m.name] = m
    return [*found.values()]


def survivors() -> dict[str, dict[str, str]]:
    """Why places are ``excluded``, and why, by their names, mutants are ``equivalent``."""
    return tomllib.loads(SURVIVORS.read_text(encoding="utf-8"))


def reasons() -> dict[str, str]:
    """By a mutant's name, why nothing has to kill it."""
    return survivors()["equivalent"]


def report(results: list[Mutant]) -> None:
    """A table of counts by part, then every survivor with its reason. Places that are excluded by now do not count."""
    known = reasons()
    there = {m.name for found in places(ROOT, "", survivors()["excluded"]) for m in found}
    mutants = [m for m in results if m.name in there]
    parts: dict[str, Counter[str]] = {}
    for m in mutants:
        what = "equivalent" if m.status != "killed" and m.name in known else m.status
        for part in ("/".join(m.path.split("/")[: 2 if m.path.startswith("lngen/") else 1]), "all"):
            parts.setdefault(part, Counter())[what] += 1
    columns = ("killed", "survived", "timeout", "equivalent")
    print(f"{'part':<18}" + "".join(f"{name:>12}" for name in columns))
    for part in [*sorted(parts.keys() - {"all"}), "all"]:
        print(f"{part:<18}" + "".join(f"{parts[part][name]:>12}" for name in columns))
    killed, counted = parts["all"]["killed"], parts["all"].total() - parts["all"]["equivalent"]
    print(f"\n{killed} of {counted} that are not equivalent are killed, {killed / counted:.1%}.")
    if len(results) > len(mutants):
        print(f"{len(results) - len(mutants)} more are of places that are left out, or have changed since.")
    for m in sorted((m for m in mutants if m.status != "killed"), key=lambda m: m.name):
        print(f"\n{m.name}\n    {'equivalent: ' + known[m.name] if m.name in known else m.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a path's beginning")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=400, help="a mutant's tests take at most")
    parser.add_argument("--whole", action="store_true", help="run the whole suite on each")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--again", type=Path, nargs="+", help="the survivors of these results")
    parser.add_argument("--report", type=Path, nargs="+", help="only print what these results say")
    chosen = parser.parse_args()
    if chosen.report:
        report(load(chosen.report))
        return
    mutants = [] if chosen.again else sample(chosen.count, chosen.seed, chosen.only)
    if chosen.again:
        there = {m.name: m for found in places(ROOT, chosen.only, survivors()["excluded"]) for m in found}
        left = [m.name for m in load(chosen.again) if m.status != "killed" and m.name not in reasons()]
        mutants = [there[name] for name in left if name in there]
    run_all(mutants, chosen.jobs, chosen.whole, chosen.seconds, chosen.out)


if __name__ == "__main__":
    main()
