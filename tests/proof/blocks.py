"""The blocks of lngen's code, and single changes of it, put in where a module is imported.

A block is the body of a function, or of a branch or a loop within one. Its first statement sets a flag, so whoever
reads the flags knows what ran. Python that Jinja makes of a template has blocks as well.

A mutant is one changed place: another comparison, a sum for a difference, a number one larger, a condition negated, a
call left out. All are compiled in at once, and the value of ``CHOSEN`` says which one acts; so a process that has
imported lngen forks for each mutant, and imports nothing again.

Both act by a hook on the import, ``install``, and on what Jinja compiles. A line stays where it was.
"""

import ast
import builtins
import copy
import importlib.machinery
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[2]
RAN, CHOSEN = "_blocks_ran_", "_mutant_chosen_"
MOST = 1 << 16  # flags
PARTS = ("body", "orelse", "finalbody")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Mutant:
    """A change of one place. ``which``: of the equal places of a function, from 0. ``block`` holds the place."""

    file: str
    function: str
    operator: str
    which: int
    before: str
    after: str
    block: str = ""

    @property
    def place(self) -> tuple[str, str, str, int, str]:
        """What finds it again in another version of the file."""
        return self.file, self.function, self.operator, self.which, self.before


@dataclass
class Table:
    """Every block and mutant that is compiled in, in the order of their numbers; a block's name is file:line."""

    blocks: list[str] = field(default_factory=list)
    mutants: list["Mutant"] = field(default_factory=list)
    ran: bytearray = field(default_factory=lambda: bytearray(MOST))
    chosen: list[int] = field(default_factory=lambda: [-1])


def install(*, mutants: bool = False) -> Table:
    """From now on every module of lngen that is imported has blocks, and with ``mutants`` those, too."""
    table = Table()
    vars(builtins).update({RAN: table.ran, CHOSEN: table.chosen})
    loader = importlib.machinery.SourceFileLoader
    plain = loader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **how: Any) -> Any:
        name = os.path.relpath(os.fspath(path), ROOT)
        if name.startswith("lngen" + os.sep) and isinstance(data, bytes):
            data = changed(ast.parse(data, path), name, table, mutants=mutants)
        return plain(self, data, path, **how)

    loader.source_to_code = source_to_code
    loader.get_data, loader.path_stats = _without_bytecode(loader)
    compiled = jinja2.Environment._compile

    def compile_template(self: Any, source: str, filename: str) -> Any:
        made: Any = changed(ast.parse(source, filename), f"jinja:{Path(filename).name}", table, mutants=False)
        return compiled(self, made, filename)

    jinja2.Environment._compile = compile_template
    return table


def _without_bytecode(loader: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Nothing is taken from a ``.pyc``, which has no flags; nor is one written."""
    sys.dont_write_bytecode = True
    data, stats = loader.get_data, loader.path_stats

    def get_data(self: Any, path: str) -> bytes:
        if path.endswith(".pyc") and f"{os.sep}lngen{os.sep}" in path:
            raise OSError(path)
        return bytes(data(self, path))

    return get_data, stats


def changed(tree: ast.Module, name: str, table: Table, *, mutants: bool) -> ast.Module:
    """The tree with flags, and with mutants."""
    if mutants:
        mutate = _Mutate(name, table)
        for function in sorted(_functions(tree), key=lambda f: f.lineno):
            mutate.function = function.name
            mutate.inside(function)
    _flag(tree, name, table, inside=False)
    return ast.fix_missing_locations(tree)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions that no other function holds: methods, too."""
    todo: list[ast.AST] = [tree]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, FUNCTIONS):
                yield child
            else:
                todo.append(child)


def _flag(node: ast.AST, name: str, table: Table, *, inside: bool) -> None:
    for child in ast.iter_child_nodes(node):
        _flag(child, name, table, inside=inside or isinstance(node, FUNCTIONS))
    if isinstance(node, FUNCTIONS):
        node.body = _flagged(node.body, name, table)
    elif inside and not isinstance(node, ast.ClassDef | ast.With | ast.AsyncWith) and not hasattr(node, "mutants"):
        for part in PARTS:
            body = getattr(node, part, None)
            chain = part == "orelse" and isinstance(body, list) and len(body) == 1 and isinstance(body[0], ast.If)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt) and not chain:
                setattr(node, part, _flagged(body, name, table))


def _flagged(body: list[ast.stmt], name: str, table: Table) -> list[ast.stmt]:
    """The statements behind one that sets the next flag; a docstring stays first."""
    first = int(isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1)
    (flag,) = ast.parse(f"{RAN}[{len(table.blocks)}] = 1").body
    for part in ast.walk(flag):
        if isinstance(part, ast.stmt | ast.expr):
            ast.copy_location(part, body[first])
    table.blocks.append(block := f"{name}:{body[first].lineno}")
    for part in (part for statement in body for part in ast.walk(statement)):
        for mutant in getattr(part, "mutants", ()):
            mutant.block = mutant.block or block  # of what is further in, that block is named already
    return [*body[:first], flag, *body[first:]]


# ---- mutants ----

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNTOUCHED = (ast.Raise, ast.JoinedStr, ast.Assert, ast.arguments, ast.ClassDef, ast.pattern)


class _Mutate(ast.NodeTransformer):
    """Puts every mutant of a function in; the operands of a changed place are mutated in the plain one alone."""

    def __init__(self, file: str, table: Table):
        self.file, self.table, self.function = file, table, ""
        self.seen = Counter[tuple[str, str, str]]()

    def inside(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """All statements; decorators, arguments and annotations stay."""
        function.body = [self.visit(statement) for statement in function.body]

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, UNTOUCHED):
            return node
        if isinstance(node, FUNCTIONS):
            self.inside(node)
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
            return node
        found, before = [*_changes(node)], ""
        if found:
            before = _text(node)
        node = super().generic_visit(node)
        for operator, other in found:
            node = self._either(node, operator, before, other)
        return node

    def _either(self, node: Any, operator: str, before: str, other: Any) -> Any:
        """The node, or the other one while its number is chosen."""
        number, key = len(self.table.mutants), (self.function, operator, before)
        which = self.seen[key]
        self.seen[key] += 1
        mutant = Mutant(self.file, self.function, operator, which, before, _text(other))
        self.table.mutants.append(mutant)
        test: Any = ast.parse(f"{CHOSEN}[0] == {number}", mode="eval").body
        made: Any
        if isinstance(node, ast.stmt):
            made = ast.If(test=test, body=[ast.Pass()], orelse=[node])
        else:
            made = ast.IfExp(test=test, body=other, orelse=node)
        for part in ast.walk(made):
            if isinstance(part, ast.stmt | ast.expr) and not hasattr(part, "lineno"):
                ast.copy_location(part, node)
        made.mutants = [mutant]
        return ast.copy_location(made, node)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:100]


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Pairs of an operator's name and the changed node, made of copies."""
    again: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        again.ops = [COMPARED[type(node.ops[0])]()]
        yield "comparison", again
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _about_text(node):
        again.op = COMPUTED[type(node.op)]()
        yield "arithmetic", again
    elif isinstance(node, ast.BoolOp):
        again.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", again
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "number", ast.copy_location(ast.Constant(node.value + 1), node)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "truth", ast.copy_location(ast.Constant(not node.value), node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", again.operand
    elif isinstance(node, ast.IfExp):
        again.body, again.orelse = again.orelse, again.body
        yield "branches", again
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
        again.func = ast.copy_location(ast.Name(CALLED[node.func.id], ast.Load()), node.func)
        yield "extreme", again
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", ast.copy_location(ast.Pass(), node)


def _about_text(node: ast.BinOp) -> bool:
    """True where an operand is text or a sequence, of which a difference is an error at once."""
    texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
    sides = (node.left, node.right)
    return any(isinstance(n, texts) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in sides)
