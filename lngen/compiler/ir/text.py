"""Text -> Graph, the exact inverse of ``print_graph``; the grammar is in lngen/docs/graph.md.

Types of arguments are looked up, those of equations are written; the verifier checks both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from lngen.compiler.ir.axes import WIDE, Axis, D, S, axes_union
from lngen.compiler.ir.builder import derived, verify
from lngen.compiler.ir.names import fresh
from lngen.compiler.ir.types import Attr, Attrs, ByValue, Eqn, Graph, Type, Value
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
_AXIS = re.compile(r"(\w++) = (\w++) ([/%@]) (\w++)(?: / (\d++))?+")
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
    axes, attrs = _declared(head[2] or "", *lines[0])
    params = tuple(_param(name, typ, rule, axes, *lines[0]) for name, typ, rule in _PARAM.findall(head[3]))
    known = {str(p): p for p in params}
    eqns: list[Eqn] = []
    results: tuple[Value, ...] | None = None
    for number, line in lines[1:-1]:
        if results is not None:
            raise ParseError(f"Line {number}: expected '}}' after 'return'.\n    {short(line)}")
        if line.startswith("return"):
            results = _uses(line.removeprefix("return"), known, number, line)
        else:
            eqns.append(_eqn(line, known, axes, number))
            known[str(eqns[-1].out)] = eqns[-1].out
    if results is None or lines[-1][1] != "}":
        raise ParseError(f"Line {lines[-1][0]}: expected 'return %value, ...' and then '}}' to end the graph.")
    graph = Graph(head[1], params, tuple(eqns), results, _attrs(attrs, axes, *lines[0]))
    declared = tuple(_type(t, axes, *lines[0]) for t in re.findall(_TYPE_TEXT, head[4]))
    if declared != tuple(r.type for r in results):
        raise ParseError(f"Line {start}: the result types differ from those of the returned values.")
    return verify(graph, "parse")


Axes = Mapping[str, Axis]  # that a text may name
BUILTIN = *WIDE, S


def _declared(text: str, number: int, line: str) -> tuple[Axes, str]:
    """The axes of a graph with those that its head declares, and the other parts of the head."""
    axes, others = {str(a): a for a in BUILTIN}, []
    for part in filter(None, map(str.strip, text.split(","))):
        found = _AXIS.fullmatch(part)
        if not found:
            others.append(part)
            continue
        name, base, by, count, each = found.groups()
        try:
            axis = derived(name, base, by, int(count) if count.isdigit() else count, int(each or 1))
        except ValueError as e:
            raise ParseError(f"Line {number}: '{short(part)}': {e}.\n    {short(line)}") from e
        if axes.get(name, S) is not S:
            raise ParseError(f"Line {number}: axis '{short(name)}' is declared twice.\n    {short(line)}")
        axes |= {name: axis}
    of_order = Axis(fresh("S", {a.name for a in axes.values() if not a.of_order}), D, "/")
    return axes | {of_order.name: of_order}, ", ".join(others)


def _param(name: str, typ: str, rule: str, axes: Axes, number: int, line: str) -> Value:
    found = _type(typ, axes, number, line)
    return ByValue(name, found, rule) if rule else Value(name, found)


def _eqn(line: str, known: dict[str, Value], axes: Axes, number: int) -> Eqn:
    name, typ, op, args, attrs = _match(_EQN, number, line, "%name : type = op %a, %b {key=value}").groups()
    out, found = Value(name, _type(typ, axes, number, line)), _attrs(attrs, axes, number, line)
    return _renamed(Eqn(out, op, _uses(args, known, number, line), found))


# Names that earlier texts have: sums over the segments of a row, and the number of elements of a segment.
FORMER = {
    "segment_sum": ("reduce_sum", {"axis": D, "to": S}),
    "segment_dot": ("reduce_dot", {"axis": D, "to": S}),
    "segment_size": ("size", {"axis": D, "per": S}),
}


def _renamed(eqn: Eqn) -> Eqn:
    if eqn.op not in FORMER:
        return eqn
    op, attrs = FORMER[eqn.op]
    return replace(eqn, op=op, attrs=tuple(sorted({**dict(eqn.attrs), **attrs}.items())))


def _uses(text: str, known: dict[str, Value], number: int, line: str) -> tuple[Value, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ParseError(f"Line {number}: '{short(name)}' is used before it is defined.\n    {short(line)}")
    return tuple(known[name] for name in names)


def _type(text: str, axes: Axes, number: int, line: str) -> Type:
    dtype, names = _match(_TYPE, number, text, "dtype[axis, ...]").groups()
    try:
        found = Type(DType(dtype), tuple(axes[a.strip()] for a in names.split(",") if a.strip()))
    except (ValueError, KeyError):
        found = None
    if found is None or axes_union(found.axes) not in (found.axes, found.axes[::-1] if found.by_columns else ()):
        turn = "in this order" if len(axes) == len(BUILTIN) else "one of M before one of D"
        raise ParseError(
            f"Line {number}: '{short(text)}' is not a type: dtypes are {', '.join(map(str, DType))}, "
            f"axes {', '.join(axes)}, {turn}.\n    {short(line)}"
        )
    return found


def _attrs(text: str | None, axes: Axes, number: int, line: str) -> Attrs:
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
        pairs[key] = _literal(value, axes, number, line)
    return tuple(sorted(pairs.items()))


def _literal(text: str, axes: Axes, number: int, line: str) -> Attr:
    if _NUMBER.match(text):
        try:
            return int(text) if text.lstrip("-").isdigit() else float(text)
        except ValueError as e:
            raise ParseError(f"Line {number}: '{short(text)}' is not a number.\n    {short(line)}") from e
    if text in axes:
        return axes[text]
    return DType(text) if text.upper() in DType.__members__ else text


def _match(pattern: re.Pattern[str], number: int, line: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise ParseError(f"Line {number}: expected '{expected}'.\n    {short(line)}")
    return match
