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
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
SURVIVORS = ROOT / "tests" / "data" / "mutants.toml"
COPIED = ("lngen", "templates", "tests", "generated", "pyproject.toml", "README.md", "LICENSE", ".ci", ".gitignore")
DEVICE_SHARE = 0.2  # of the mutants that are of templates

# Which tests belong to which part; the longest prefix counts. Of templates those that execute, none that compare text.
EXECUTED = (
    "test_ptx_forms test_mutants test_claim test_ragged test_staged test_mutants_ragged test_blocks test_traffic "
    "test_ptx_alias test_check"
)
TESTS = {
    "lngen/": "test_cli test_config test_repo test_readme",
    "lngen/ir/": "test_ir test_numerics test_kinks test_passes test_mathematics test_random_graphs",
    "lngen/passes/": "test_passes test_kinks test_mathematics test_mutations test_outputs test_random_graphs test_emit",
    "lngen/graphs/": "test_ir test_outputs test_mathematics test_passes test_runtime test_cli",
    "lngen/interpret/": "test_ir test_mathematics test_runtime",
    "lngen/spec.py": "test_ir test_passes test_cli test_aot test_runtime test_outputs",
    "lngen/files.py": "test_files test_aot_folder test_aot test_tune",
    "lngen/schedule/": f"test_schedule test_lower test_tune {EXECUTED}",
    "lngen/lower/": f"test_lower test_emit {EXECUTED}",
    "lngen/emit/": f"test_emit test_generated {EXECUTED}",
    "lngen/toolchain/": "test_toolchain test_aot test_generated",
    "lngen/ptx/": "test_ptx_executor test_ptx_checks test_ptx_launch test_ptx_halves test_ptx_bulk test_ptx_async "
    f"test_ptx_cluster {EXECUTED}",
    "lngen/runtime/": "test_runtime test_workspace test_driver test_tune test_cli test_toolchain",
    "lngen/check/": "test_check test_oracles test_mathematics test_conform test_cli",
    "lngen/check/conform/": "test_conform",
    "lngen/tune/": "test_tune test_tune_run test_tune_bits test_tune_cluster",
    "lngen/bench/": "test_bench test_floors",
    "lngen/aot/": "test_aot test_aot_folder test_generated test_cli",
    "lngen/inspect/": "test_traffic test_cli",
    "lngen/cli/": "test_cli test_aot test_conform test_bench test_tune_run",
    "templates/": EXECUTED,
}


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
    status: str = ""  # killed, survived, timeout
    by: str = ""  # the test that failed
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What tests/data/mutants.toml calls it: no line number, so that it outlives changes elsewhere."""
        return f"{self.path} | {self.kind} | {self.was} -> {self.text}"


# ---- places ----

COMPARED = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==", "In": "not in", "NotIn": "in",
            "Is": "is not", "IsNot": "is"}  # fmt: skip
COMPUTED = {"Add": "-", "Sub": "+", "Mult": "//", "FloorDiv": "*", "Mod": "*", "BitAnd": "|", "LShift": ">>",
            "RShift": "<<", "Div": "*"}  # fmt: skip
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
        was = self.source[start:end]
        if was != text:
            self.found.append(Mutant(self.path, node.lineno, kind, start, end, text, was))  # type: ignore[attr-defined]

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

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            new = COMPARED[type(node.ops[0]).__name__]
            self.add(node, "comparison", f"{self.text(node.left)} {new} {self.text(node.comparators[0])}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        name, texts = type(node.op).__name__, isinstance(node.left, ast.JoinedStr | ast.Constant)
        if name in COMPUTED and not (texts and "'" in self.text(node.left) + '"'):
            self.add(node, "operator", f"{self.text(node.left)} {COMPUTED[name]} {self.text(node.right)}")
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
    for number, text in enumerate(source.splitlines(keepends=True), 1):
        comment = comment or "{#" in text
        code = text.split("//")[0].rstrip()
        if not comment and not NOT_CODE.match(text) and "template <" not in text:
            swaps = [(kind, m, new[m[0]]) for kind, new in OPPOSITE.items() for m in _words(new).finditer(code)]
            swaps += [("constant", m, str(int(m[0]) + 1)) for m in NUMBER.finditer(code)]
            for kind, m, new in swaps:
                outside = code[: m.start()].count("{{") == code[: m.start()].count("}}") and '"' not in code
                if outside:
                    yield Mutant(path, number, kind, start + m.start(), start + m.end(), new, m[0])
            if STATEMENT.match(code) and not re.match(r"^ +(const|real|int|unsigned|long|auto)\b", code):
                body = code.lstrip()
                yield Mutant(path, number, "statement", start + code.index(body), start + len(code), ";", body)
        comment = comment and "#}" not in text
        start += len(text)


def places(root: Path, only: str) -> tuple[list[Mutant], list[Mutant]]:
    """All places of the package, and all of the templates, in a fixed order."""
    python: list[Mutant] = []
    for file in sorted((root / "lngen").rglob("*.py")):
        python += _Python(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")).found
    device = [
        m
        for file in sorted(p for p in (root / "templates").rglob("*") if p.is_file())
        for m in device_places(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    ]
    return [m for m in python if m.path.startswith(only)], [m for m in device if m.path.startswith(only)]


def sample(count: int, seed: int, only: str = "") -> list[Mutant]:
    """So many mutants: each file is as likely as its places are many, templates have a share of their own."""
    rng, (python, device) = random.Random(seed), places(ROOT, only)
    few = min(len(device), round(count * DEVICE_SHARE) if python else count)
    chosen = rng.sample(device, few) + rng.sample(python, min(len(python), count - few))
    return sorted(chosen, key=lambda m: (m.path, m.start, m.text))


# ---- runs ----


def tests_of(path: str) -> list[str]:
    """The test files of a part that there are."""
    prefix = max((p for p in TESTS if path.startswith(p)), key=len)
    return [f"tests/{name}.py" for name in TESTS[prefix].split() if (ROOT / "tests" / f"{name}.py").exists()]


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
        python = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.Popen(
            [*python, *files],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, 9)
            run.communicate()
            return "timeout", ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return ("survived", "") if run.returncode == 0 else ("killed", failed[1] if failed else "import")


def run_all(mutants: list[Mutant], jobs: int, whole: bool, seconds: float, out: Path) -> None:
    """Every mutant that ``out`` does not have yet; a line each, at once."""
    done = {m.name + str(m.line) for m in load([out])} if out.exists() else set()
    todo = [m for m in mutants if m.name + str(m.line) not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads, out.open("a") as file:
        copies: Queue[Copy] = Queue()
        for job in range(jobs):
            (Path(folder) / str(job)).mkdir()
            copies.put(Copy(Path(folder) / str(job)))

        def one(mutant: Mutant) -> Mutant:
            copy = copies.get()
            try:
                return copy.run(mutant, whole, seconds)
            finally:
                copies.put(copy)

        for number, result in enumerate(threads.map(one, todo), 1):
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(f"{number}/{len(todo)} {result.status:<8} {result.seconds:6.1f} s  {result.path}:{result.line} "
                  f"{result.was} -> {result.text}  {result.by}".replace("\n", " ")[:180], flush=True)  # fmt: skip


def load(paths: list[Path]) -> list[Mutant]:
    """Results; a later file's word counts."""
    found: dict[tuple[str, int], Mutant] = {}
    for path in paths:
        for text in path.read_text().splitlines():
            m = Mutant(**json.loads(text))
            found[m.name, m.start] = m
    return [*found.values()]


def reasons() -> dict[str, str]:
    """By a mutant's name, why nothing has to kill it."""
    return tomllib.loads(SURVIVORS.read_text())["equivalent"] if SURVIVORS.exists() else {}


def report(mutants: list[Mutant]) -> None:
    """Counts by part, then every survivor."""
    known, parts = reasons(), Counter((m.path.split("/")[:2][-1], m.status) for m in mutants)
    for part in sorted({part for part, _ in parts}):
        counts = {s: parts[part, s] for s in ("killed", "timeout", "survived") if parts[part, s]}
        print(f"{part:<24} {counts}")
    left = [m for m in mutants if m.status == "survived"]
    equivalent = [m for m in left if m.name in known]
    counted = len(mutants) - len(equivalent)
    killed = sum(m.status in ("killed", "timeout") for m in mutants)
    print(f"{killed} of {counted} killed ({killed / counted:.1%}); {len(equivalent)} more are equivalent.")
    for m in sorted(left, key=lambda m: (m.path, m.line)):
        print(f"{m.path}:{m.line} | {m.kind} | {m.was} -> {m.text}: {known.get(m.name, 'SURVIVED')}")


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
    mutants = sample(chosen.count, chosen.seed, chosen.only)
    if chosen.again:
        mutants = [m for m in load(chosen.again) if m.status == "survived" and m.name not in reasons()]
    run_all(mutants, chosen.jobs, chosen.whole, chosen.seconds, chosen.out)


if __name__ == "__main__":
    main()
