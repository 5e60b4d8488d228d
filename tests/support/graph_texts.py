"""Graphs in short text: ``a = mul x, w; m = reduce_mean a {axis=D}; return m``, whose types follow from the inputs'."""

import re
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import partial

from lngen.compiler import passes
from lngen.compiler.ir import Builder, D, DType, Graph, M, S, parse, print_eqn

LINE = re.compile(r"(\w+) = (\w+)((?: \w+,?)*?)(?: \{(.*)\})?")
CONST = re.compile(r"const \{dtype=(\w+), value=(\S+)\}")
WIDTH = 116
WORDS = {str(word): word for word in (M, D, S, *DType)}


def graph(inputs: str, text: str) -> Graph:
    """The graph of inputs, ``x f32[M, D], w f32[M]``, and statements; ``const f32 1.0`` is short for its attributes."""
    named = re.sub(r"(\w+) (\w+\[)", r"%\1: \2", inputs)
    b = Builder("f", params=parse(f"graph @f({named}) -> () {{\nreturn\n}}").params)
    known = {p.name: p for p in b.params}
    *lines, last = re.sub(r"const (\w+) ([^;]+)", r"const {dtype=\1, value=\2}", text).split("; ")
    for line in lines:
        name, op, args, attrs = LINE.fullmatch(line).groups()  # type: ignore[union-attr]
        given = dict(part.split("=") for part in (attrs or "").split(", ") if part)
        values = {k: WORDS.get(v) or (int(v) if v.isdigit() else float(v)) for k, v in given.items()}
        known[name] = b.emit(op, name, tuple(known[a] for a in args.replace(",", "").split()), **values)
        assert known[name].name == name
    return b.build(*(known[name] for name in last.removeprefix("return ").split(", ")))


def heading(found: Graph) -> str:
    """Inputs, and attributes if there are any."""
    attrs = "".join(f" {key}={value}" for key, value in found.attrs)
    return ", ".join(f"{p.name} {p.type}" for p in found.params) + attrs


def statements(found: Graph) -> list[str]:
    """The statements of a graph, the last with its results."""
    lines = [re.sub(r" +", " ", re.sub(r"%| : \w+\[[\w, ]*\]", "", print_eqn(e))) for e in found.eqns]
    return [*(CONST.sub(r"const \1 \2", line) for line in lines), f"return {', '.join(r.name for r in found.results)}"]


def changed(before: Graph, after: Graph, start: str) -> list[str]:
    """Lines with the statements of ``after``, behind ``start``; three dots are three or more that stay as they are."""
    old, new, parts = statements(before), statements(after), list[str]()
    last = 0
    for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        parts += new[last : block.b]
        parts += new[block.b : block.b + block.size] if block.size < 3 else ["..."]
        last = block.b + block.size
    return wrapped(parts, start)


def wrapped(parts: list[str], start: str = "  ") -> list[str]:
    """As many statements a line as have room."""
    lines = [start + parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}; {part}"
        lines[-1:] = [longer] if len(longer) <= WIDTH else [f"{lines[-1]};", f"  {part}"]
    return lines


def pass_of(words: str) -> Callable[[Graph], Graph]:
    """A pass by its name, with the length of rows, or for ``save`` the values that are saved, behind it."""
    name, *more = words.split()
    run = getattr(passes, name)
    if name == "save":
        return lambda g: passes.save(g, g, tuple(more))
    return partial(lambda g, d: run(g, d), d=int(more[0])) if more else run  # type: ignore[no-any-return]


def rewritten(text: str) -> str:
    """A file of cases with what each pass makes of its graph now. ``a => b`` edits the last graph written out."""
    head, *cases = text.split("\n# ")
    written, found = "", [head]
    for case in cases:
        title, first, *lines = case.rstrip("\n").splitlines()
        given = lines[: next((n for n, line in enumerate(lines) if line.startswith("->")), len(lines))]
        body = " ".join(line.strip() for line in given if " => " not in line)
        written = body = body or written
        for line in given:
            if " => " in line:
                old, _, new = line.strip().partition(" => ")
                assert old in body, (title, old)
                body = body.replace(old, new)
        words, _, inputs = first.partition(": ")
        before = graph(inputs, body)
        after = pass_of(words)(before)
        same = (heading(after), *statements(after)) == (heading(before), *statements(before))
        other = f"({heading(after)}) " if heading(after) != heading(before) else ""
        made = ["-> the same"] if same else changed(before, after, f"-> {other}")
        found.append("\n".join([title, first, *given, *made]))
    return "\n\n# ".join(part.rstrip("\n") for part in found) + "\n"
