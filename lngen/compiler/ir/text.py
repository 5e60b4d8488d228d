"""Text -> Graph, the exact inverse of ``print_graph``; the grammar is in lngen/docs/graph.md.

Types of arguments are looked up, those of equations are written; the verifier checks both.
"""

from __future__ import annotations

import re

from lngen.compiler.ir.builder import verify
from lngen.compiler.ir.types import Attr, Attrs, Axis, ByValue, Eqn, Graph, Type, Value, axes_union
from lngen.dtypes import DType
from lngen.errors import ParseError, short

# Every repetition is possessive (++, *+), without backtracking, so that a match takes time linear in the text.
_HEAD = re.compile(r"graph @(\w++)(?: \{([^{}]*+)\})?+\(([^()]*+)\) -> \(([^()]*+)\) \{")
_TYPE = re.compile(r"(\w++)\[([\w, ]*+)\]")
_TYPE_TEXT = r"\w++\[[\w, ]*+\]"
_TYPES = re.compile(rf"(?:{_TYPE_TEXT}(?:, {_TYPE_TEXT})*+)?+")
_PARAM = re.compile(rf"%(\w++): ({_TYPE_TEXT})(?: by value of (\w++))?+")
_PARAMS = re.compile(rf"(?:{_PARAM.pattern}(?:, {_PARAM.pattern})*+)?+")
_EQN = re.compile(rf"%(\w++)\s*+:\s*+({_TYPE_TEXT})\s*+=\s*+(\w++)([%\w, ]*+)(?:\{{([^{{}}]*+)\}})?+")
_NUMBER = re.compile(r"[-+]?(\d|inf|nan)", re.ASCII)


def parse(text: str) -> Graph:
    """The graph in ``text``; ParseError names the line that does not match the grammar."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ParseError("Expected 'graph @name(...) -> (...) {', but the text is empty.")
    head = _match(_HEAD, *lines[0], "graph @name {key=value}(%x: bf16[M, D], ...) -> (type, ...) {")
    start = lines[0][0]
    _match(_PARAMS, start, head[3], "%x: bf16[M, D], %gamma: bf16[D], ...")
    _match(_TYPES, start, head[4], "bf16[M, D], f32[M], ...")
    params = tuple(_param(name, typ, rule, *lines[0]) for name, typ, rule in _PARAM.findall(head[3]))
    known = {str(p): p for p in params}
    eqns: list[Eqn] = []
    results: tuple[Value, ...] | None = None
    for number, line in lines[1:-1]:
        if results is not None:
            raise ParseError(f"Line {number}: expected '}}' after 'return'.\n    {short(line)}")
        if line.startswith("return"):
            results = _uses(line.removeprefix("return"), known, number, line)
        else:
            eqns.append(_eqn(line, known, number))
            known[str(eqns[-1].out)] = eqns[-1].out
    if results is None or lines[-1][1] != "}":
        raise ParseError(f"Line {lines[-1][0]}: expected 'return %value, ...' and then '}}' to end the graph.")
    graph = Graph(head[1], params, tuple(eqns), results, _attrs(head[2], *lines[0]))
    declared = tuple(_type(t, *lines[0]) for t in re.findall(_TYPE_TEXT, head[4]))
    if declared != tuple(r.type for r in results):
        raise ParseError(f"Line {start}: the result types differ from those of the returned values.")
    return verify(graph, "parse")


def _param(name: str, typ: str, rule: str, number: int, line: str) -> Value:
    found = _type(typ, number, line)
    return ByValue(name, found, rule) if rule else Value(name, found)


def _eqn(line: str, known: dict[str, Value], number: int) -> Eqn:
    name, typ, op, args, attrs = _match(_EQN, number, line, "%name : type = op %a, %b {key=value}").groups()
    return Eqn(
        Value(name, _type(typ, number, line)),
        op,
        _uses(args, known, number, line),
        _attrs(attrs, number, line),
    )


def _uses(text: str, known: dict[str, Value], number: int, line: str) -> tuple[Value, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ParseError(f"Line {number}: '{short(name)}' is used before it is defined.\n    {short(line)}")
    return tuple(known[name] for name in names)


def _type(text: str, number: int, line: str) -> Type:
    dtype, axes = _match(_TYPE, number, text, "dtype[axis, ...]").groups()
    try:
        found = Type(DType(dtype), tuple(Axis(a.strip()) for a in axes.split(",") if a.strip()))
    except ValueError:
        found = None
    if found is None or found.axes != axes_union(found.axes):
        raise ParseError(
            f"Line {number}: '{short(text)}' is not a type: dtypes are {', '.join(map(str, DType))}, "
            f"axes {', '.join(map(str, Axis))}, in this order.\n    {short(line)}"
        )
    return found


def _attrs(text: str | None, number: int, line: str) -> Attrs:
    if not text:
        return ()
    pairs: dict[str, Attr] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals:
            raise ParseError(
                f"Line {number}: expected 'key=value' in braces, got '{short(part.strip())}'.\n    {short(line)}"
            )
        if key in pairs:
            raise ParseError(f"Line {number}: '{short(key)}' is given twice.\n    {short(line)}")
        pairs[key] = _literal(value, number, line)
    return tuple(sorted(pairs.items()))


def _literal(text: str, number: int, line: str) -> Attr:
    if _NUMBER.match(text):
        try:
            return int(text) if text.lstrip("-").isdigit() else float(text)
        except ValueError as e:
            raise ParseError(f"Line {number}: '{short(text)}' is not a number.\n    {short(line)}") from e
    if text in Axis.__members__:
        return Axis(text)
    return DType(text) if text.upper() in DType.__members__ else text


def _match(pattern: re.Pattern[str], number: int, line: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise ParseError(f"Line {number}: expected '{expected}'.\n    {short(line)}")
    return match
