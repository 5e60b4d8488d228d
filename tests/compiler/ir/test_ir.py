"""If these fail, types, names, the op table or the text of graphs no longer keep their rules."""

import copy
import pickle
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import sampling
from graph_names import dtypes_of, whole_heads
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import (
    BF16,
    F16,
    F32,
    F64,
    OPS,
    RULES,
    Attr,
    Axis,
    Builder,
    ByValue,
    D,
    DType,
    Graph,
    M,
    S,
    Type,
    Value,
    bits_of,
    compute_dtype,
    parse,
    print_eqn,
    print_graph,
    values_of,
    verify,
)
from lngen.compiler.ir.axes import axes_union
from lngen.compiler.ir.functions import BIAS, ULPS, WHOLE
from lngen.compiler.ir.meanings import literal
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.ir.places import extract
from lngen.compiler.spec import make_spec, parse_spec
from lngen.dtypes import FLOATS
from lngen.errors import ArrayError, ParseError, VerifyError
from paths import ROOT

MD, ROW, COL, SCALAR = (M, D), (M,), (D,), ()

TEXT = """\
graph @f(%x: f32[M, D], %g: bf16[D]) -> (f32[M, D], f32[M]) {
  %g32 : f32[D]    = cast %g {to=f32}
  %y   : f32[M, D] = mul %x, %g32
  %s   : f32[M]    = reduce_sum %y {axis=D}
  return %y, %s
}
"""


def f32(*axes: Axis) -> Type:
    return Type(F32, axes)


# ---- types and builder ----


def test_types_print_as_the_grammar_says_and_axes_meet_in_one_order() -> None:
    assert [str(Type(t, MD)) for t in FLOATS] == ["f16[M, D]", "bf16[M, D]", "f32[M, D]", "f64[M, D]"]
    assert [str(f32(*axes)) for axes in (SCALAR, ROW, COL)] == ["f32[]", "f32[M]", "f32[D]"]
    assert [compute_dtype(t) for t in FLOATS] == [F32, F32, F32, F64]
    assert (axes_union(COL, ROW), axes_union(COL, COL), axes_union()) == (MD, COL, SCALAR)


def test_builder_keeps_names_unique_and_types_inferred() -> None:
    b = Builder("f", taken=["t"])
    x = b.param("x", F32, M, D)
    assert x.type == f32(M, D)
    assert [b.neg("x", x).name, b.neg("x", x).name, b.neg("t", x).name] == ["x_1", "x_2", "t_1"]
    assert b.add("y", b.param("u", F32, M), b.param("c", F32, D)).type == f32(M, D)


def test_a_graph_has_the_text_of_the_grammar_and_looks_up_its_parts() -> None:
    g = parse(TEXT)
    assert str(g) == print_graph(g) == TEXT
    assert print_eqn(g.eqns[1]) == "%y : f32[M, D] = mul %x, %g32"
    assert verify(g, "cse") is g
    assert g.param("g").type == Type(BF16, COL)
    assert list(g.values()) == ["x", "g", "g32", "y", "s"]
    assert g.producers()[g.values()["s"]].attr("axis") is D
    with pytest.raises(KeyError):
        g.eqns[0].attr("axis")


# ---- the op table ----

G = 0.949951171875  # the guess of 1 / 1
BITS = ("exp2_biased", "exp2_whole", "exponent", "reciprocal_guess", "significand")
FUNCTIONS = tuple(ULPS)

SAMPLE, HEAD, BLOCK, LARGE = DERIVED = (
    Axis("N", M, "/", "n"),
    Axis("H", M, "%", 8),
    Axis("B", D, "/", 16),
    Axis("L", D, "/", 64),
)
TABLE, TURNED = Axis("P", M, "@", "p"), Axis("E", D, "%", 8, 2)
# Axes and dtypes of operands that no graph of other tests has.
ACCEPTS: list[tuple[str, tuple[Type, ...], dict[str, Attr], Type]] = [
    ("expand", (Type(BF16, COL),), {"axis": M}, Type(BF16, MD)),
    ("div", (f32(D), f32(M)), {}, f32(M, D)),
    ("fma", (f32(M), f32(D), f32()), {}, f32(M, D)),
    ("select_gt", (f32(M, D), f32(M), f32(M)), {}, f32(M, D)),
    ("where_gt", (f32(M, D), f32(M), f32(M), f32()), {}, f32(M, D)),
    *((op, (f32(M), f32(D)), {}, f32(M, D)) for op in ("maximum", "minimum", "copysign", "limited")),
    ("reduce_dot", (f32(M), f32(D)), {"axis": M}, f32(D)),
    ("reduce_sum", (Type(F64, COL),), {"axis": D, "to": S, "chunk": 4, "run": 2, "segment": 64}, Type(F64, (S,))),
    ("reduce_dot", (f32(M, S), f32(D)), {"axis": D, "to": S, "chunk": 4, "segment": 64}, f32(M, S)),
    ("size", (), {"axis": D, "per": S, "dtype": F64, "segment": 64}, Type(F64, (S,))),
    ("select_eq", (Type(DType.I32, (M,)), Type(DType.I32, (D,)), f32()), {}, f32(M, D)),
    ("select_eq", (Type(DType.I64, (SAMPLE,)), Type(DType.I64, (HEAD,)), f32(BLOCK)), {}, f32(M, BLOCK)),
    ("mul", (f32(S), f32(M)), {}, f32(M, S)),
    ("take", (Type(BF16, MD), Type(DType.I64, (M,))), {}, Type(BF16, (M,))),
    ("take", (f32(D), Type(DType.I32, (M,))), {}, f32(M)),
    ("gather", (Type(BF16, (TABLE, TURNED)), Type(DType.I64, (M,))), {}, Type(BF16, (M, TURNED))),
    ("gather", (f32(TABLE), Type(DType.I32, (M,))), {}, f32(M)),
    ("mul", (f32(M, TURNED), f32(M, D)), {}, f32(M, D)),
    ("mul", (f32(TURNED), f32(BLOCK)), {}, f32(D)),
    ("reduce_dot", (f32(M, S), f32(M, D)), {"axis": D}, f32(M)),
]

NARROW = "arithmetic is done in f32 or f64, got bf16; cast it first"
ONLY_F32 = "functions are defined in f32 only (their polynomials are for f32), got f64"
MIXED = "operands of one dtype expected, got f32, f64"
B16, DOUBLE = Type(BF16, MD), Type(F64, MD)
TWO = ("add", "sub", "mul", "div", "weighted", "maximum", "minimum")
PLACES = Type(DType.I32, (M,))
REJECTS: list[tuple[str, tuple[Type, ...], dict[str, Attr], str]] = [
    *((op, (B16,) * OPS[op].arity, {}, NARROW) for op in ("select_eq", "select_gt", "where_gt", *TWO)),
    *((op, (B16,), {}, NARROW) for op in ("neg", "sqrt", "rsqrt", "relu", "abs", "rint", "detach", "stop_gradient")),
    *((op, (B16,), {"axis": D}, NARROW) for op in ("reduce_sum", "reduce_mean")),
    ("rotate", (B16,), {"by": "pairs", "head": 4, "width": 2}, NARROW),
    *((op, (DOUBLE,) * OPS[op].arity, {}, ONLY_F32) for op in ("copysign", "limited", "ceil_power", *BITS, *FUNCTIONS)),
    *(
        ("take", (x, at), {}, f"an input over D and an i32 or i64 for each row are expected, got {x}, {at}")
        for x, at in ((f32(M), PLACES), (PLACES, PLACES), (f32(M, D), f32(M)), (f32(M, D), Type(DType.I32, (D,))))
    ),
    (
        "sealed",
        (f32(D), f32(M)),
        {},
        "what is sealed is expected to have the axes of the other operand, got f32[D], f32[M]",
    ),
    ("by_columns", (f32(M, D),), {}, "a value over M and an axis derived from D is expected, got f32[M, D]"),
    (
        "div_scale",
        (f32(M, D), f32(M)),
        {"bounded": 2, "least": 0.0},
        "expected {bounded=0|1, least=number} from 0, got bounded=2, least=0.0",
    ),
    *((op, (f32(M, D), DOUBLE), {}, MIXED) for op in TWO),
]


@pytest.mark.parametrize(("op", "args", "attrs", "expected"), ACCEPTS)
def test_type_rule_accepts(op: str, args: tuple[Type, ...], attrs: dict[str, Attr], expected: Type) -> None:
    assert OPS[op].arity == len(args)
    assert OPS[op].typ(args, tuple(sorted(attrs.items()))) == expected


@pytest.mark.parametrize(("op", "args", "attrs", "message"), REJECTS)
def test_type_rule_rejects(op: str, args: tuple[Type, ...], attrs: dict[str, Attr], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        OPS[op].typ(args, tuple(sorted(attrs.items())))


A = [[1.0, -2.0, 4.0], [0.5, 8.0, -0.25]]
TURNING = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]] * 2
R, C = [2.0, 4.0], [1.0, 10.0, 100.0]
THIRD = float(np.float32(1) / np.float32(3))
MEANINGS: list[tuple[str, list[Any], dict[str, Attr], Any]] = [
    ("const", [], {"dtype": F32, "value": 1e-5}, 1e-5),
    ("size", [], {"dtype": F32, "axis": M}, 2.0),
    ("size", [], {"dtype": F32, "axis": D}, 3.0),
    ("cast", [[1.00390625, 1.01171875]], {"to": BF16}, [1.0, 1.015625]),  # ties to even: down, then up
    ("cast", [[65504.0, 65520.0]], {"to": F16}, [65504.0, np.inf]),
    ("cast", [[2.5, -3.0, 1e6, -np.inf, np.nan]], {"to": DType.I32}, [2, -3, 1e6, -(2**31), 0]),
    ("expand", [R], {"axis": D}, [[2.0] * 3, [4.0] * 3]),
    ("neg", [A], {}, [[-1.0, 2.0, -4.0], [-0.5, -8.0, 0.25]]),
    ("maximum", [[[1.0, -0.0, np.nan], [3.0, 0.0, 1.0]], R], {}, [[2.0, 2.0, np.nan], [4.0, 4.0, 4.0]]),
    ("maximum", [[[-0.0, 0.0, 0.0]] * 2, [[0.0, -0.0, np.nan]] * 2], {}, [[0.0, 0.0, np.nan]] * 2),
    ("select_eq", [[[2.0, 0.0, np.nan], [4.0, -4.0, 4.0]], R, A], {}, [[1.0, 0.0, 0.0], [0.5, 0.0, -0.25]]),
    ("select_gt", [[[2.0, 3.0, np.nan], [4.0, -4.0, 5.0]], R, A], {}, [[0.0, -2.0, 0.0], [0.0, 0.0, -0.25]]),
    ("relu", [[[2.0, -0.0, np.nan], [-np.inf, np.inf, -1.0]]], {}, [[2.0, 0.0, np.nan], [0.0, np.inf, 0.0]]),
    ("minimum", [[[1.0, -0.0, np.nan], [3.0, 9.0, 4.5]], R], {}, [[1.0, -0.0, np.nan], [3.0, 4.0, 4.0]]),
    ("minimum", [[[-0.0, 0.0, 0.0]] * 2, [[0.0, -0.0, np.nan]] * 2], {}, [[-0.0, -0.0, np.nan]] * 2),
    ("clamp", [[[-2.0, -0.0, np.nan], [0.5, np.inf, -np.inf]]], {"low": -1.0, "high": 0.25},
     [[-1.0, -0.0, np.nan], [0.25, 0.25, -1.0]]),
    ("where_gt", [[[2.0, 3.0, np.nan], [4.0, -4.0, 5.0]], R, A, C], {}, [[1.0, -2.0, 100.0], [1.0, 10.0, -0.25]]),
    ("abs", [[[-2.0, -0.0, np.nan], [np.inf, -np.inf, 1.0]]], {}, [[2.0, 0.0, np.nan], [np.inf, np.inf, 1.0]]),
    ("rint", [[[0.5, 1.5, -0.5], [-2.5, 8388609.0, np.inf]]], {}, [[0.0, 2.0, -0.0], [-2.0, 8388609.0, np.inf]]),
    ("detach", [A], {}, A),
    ("sealed", [A, [1.0, 0.0]], {}, A),
    ("stop_gradient", [A], {}, A),
    ("div_scale", [[[-0.0, 1.0, 448.0], [np.inf, 2.0**-149, -3.0]], R], {"least": 1.0, "bounded": 1},
     [[-0.0, 0.5, 224.0], [np.nan, 0.0, -0.75]]),
    ("ceil_power", [[2.0**-126, 0.75, 1.0, 1.0000001, np.inf, np.nan]], {}, [2.0**-126, 1, 1, 2, np.inf, np.nan]),
    ("weighted", [[[0.0, -0.0, 2.0], [np.nan, 0.5, 0.0]], [-np.inf, np.nan, np.inf]], {},
     [[0.0, 0.0, np.inf], [np.nan, np.nan, 0.0]]),
    ("copysign", [[[1.0, -2.0, np.inf]] * 2, [-0.0, 1.0, -3.0]], {}, [[-1.0, 2.0, -np.inf]] * 2),
    ("limited", [[[1.0, -3.0, np.nan], [-0.0, -np.inf, 5.0]], R], {}, [[1.0, -2.0, np.nan], [-0.0, -4.0, 4.0]]),
    ("exp2_whole", [[WHOLE, WHOLE + 3, WHOLE - 126]], {}, [1.0, 8.0, 2.0**-126]),
    ("exp2_biased", [[BIAS, BIAS + 3, BIAS - 126]], {}, [1.0, 8.0, 2.0**-126]),
    ("exponent", [[1.0, 0.75, 0.66, 3e38, 2.0**-126, 1.34]], {}, [0.0, 0.0, -1.0, 128.0, -126.0, 1.0]),
    ("reciprocal_guess", [[1.0, 2.0, 3.0, 2.0**-126]], {}, [G, G / 2, 0.3499755859375, G * 2.0**126]),
    ("significand", [[1.0, 0.75, 0.625, 2.0**127, 2.0**-126, 1.5]], {}, [1.0, 0.75, 1.25, 1.0, 1.0, 0.75]),
    ("reduce_max", [[[1.0, -2.0, 4.0], [-1.0, -0.0, 0.0]]], {"axis": D}, [4.0, 0.0]),
    ("reduce_max", [[[1.0, np.nan, 4.0], [-np.inf, -3.0, -2.0]]], {"axis": D}, [np.nan, -2.0]),
    ("add", [A, R], {}, [[3.0, 0.0, 6.0], [4.5, 12.0, 3.75]]),
    ("sub", [R, A], {}, [[1.0, 4.0, -2.0], [3.5, -4.0, 4.25]]),
    ("mul", [A, C], {}, [[1.0, -20.0, 400.0], [0.5, 80.0, -25.0]]),
    ("div", [R, C], {}, [[2.0, float(np.float32(0.2)), float(np.float32(0.02))], [4.0, 0.4, 0.04]]),
    ("fma", [[4097.0, 1.0], [4097.0, 2.0], [-16785408.0, 3.0]], {}, [1.0, 5.0]),  # 4097^2 has 25 bits
    ("sqrt", [[9.0, 2.0]], {}, [3.0, float(np.sqrt(np.float32(2)))]),
    ("rsqrt", [[9.0, 4.0]], {}, [THIRD, 0.5]),
    ("reduce_mean", [A], {"axis": D}, [1.0, 2.75]),
    ("reduce_mean", [A], {"axis": M}, [0.75, 3.0, 1.875]),
    ("reduce_sum", [A], {"axis": M}, [1.5, 6.0, 3.75]),
    # 2^24 + 1 rounds down, so (2^24 + 1) + 1 differs from 2^24 + (1 + 1): chunks of 1 and of 2 differ, too.
    ("reduce_sum", [[[2.0**24, 1.0, 1.0, 0.0]] * 2], {"axis": D, "chunk": 4, "segment": 4}, [2.0**24] * 2),
    ("reduce_sum", [[[2.0**24, 1.0, 0.0, 1.0]] * 2], {"axis": D, "chunk": 1, "segment": 4}, [16777218.0] * 2),
    ("reduce_sum", [[[2.0**24, 0.0, 1.0, 1.0]] * 2], {"axis": D, "chunk": 1, "segment": 2}, [16777218.0] * 2),
    ("iota", [], {"dtype": DType.I32, "axis": D}, [0, 1, 2]),
    ("iota", [], {"dtype": DType.I64, "axis": M}, [0, 1]),
    ("rotate", [TURNING], {"by": "halves", "head": 4, "width": 4}, [[-3.0, -4.0, 1.0, 2.0, -7.0, -8.0, 5.0, 6.0]] * 2),
    ("rotate", [TURNING], {"by": "pairs", "head": 4, "width": 4}, [[-2.0, 1.0, -4.0, 3.0, -6.0, 5.0, -8.0, 7.0]] * 2),
    ("rotate", [TURNING], {"by": "halves", "head": 8, "width": 4}, [[-3.0, -4.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]] * 2),
    ("rotate", [TURNING], {"by": "pairs", "head": 4, "width": 2}, [[-2.0, 1.0, 0.0, 0.0, -6.0, 5.0, 0.0, 0.0]] * 2),
    ("reduce_dot", [A, R], {"axis": M}, [4.0, 28.0, 7.0]),
    # 4097^2 = 2^24 + 2^13 + 1: rounded alone it would lack the 1.
    ("reduce_dot", [[[-16785408.0, 4097.0, 0.0]] * 2, [1.0, 4097.0, 0.0]], {"axis": D, "chunk": 4}, [1.0] * 2),
    ("reduce_dot", [[[-16785408.0, 4097.0, 0.0]] * 2, [1.0, 4097.0, 0.0]], {"axis": D, "chunk": 1}, [0.0] * 2),
]  # fmt: skip


def axes_of(array: np.ndarray[Any, Any]) -> tuple[Axis, ...]:
    """Two-dimensional is [M, D]; a vector of two is [M], any other [D]."""
    return {0: SCALAR, 1: ROW if array.shape == (2,) else COL, 2: MD}[array.ndim]


@pytest.mark.parametrize(("op", "args", "attrs", "expected"), MEANINGS)
def test_numpy_meaning(op: str, args: list[Any], attrs: dict[str, Attr], expected: Any) -> None:
    b = Builder("f")
    arrays = [np.array(a, np.float32) for a in args]
    values = tuple(b.param(f"a{n}", F32, *axes_of(a)) for n, a in enumerate(arrays))
    b.param("shape", F32, M, D)
    graph = b.build(b.emit(op, "y", values, **attrs))
    wide = max((a.shape[-1] for a in arrays if axes_of(a)[-1:] == COL), default=3)
    inputs = {v.name: a for v, a in zip(values, arrays, strict=True)}
    found = interpret(graph, {**inputs, "shape": np.zeros((2, wide), np.float32)})["y"]
    assert found.dtype == NUMPY_DTYPE[graph.results[0].type.dtype]
    np.testing.assert_array_equal(found, np.array(expected, np.float32).astype(found.dtype))


def test_every_op_is_in_the_tables() -> None:
    messages = (ROOT / "tests" / "messages" / "graphs.txt").read_text(encoding="utf-8")
    assert {row[0] for row in REJECTS} | {*re.findall(r'^typed\("(\w+)"', messages, re.MULTILINE)} == set(OPS)
    # tests/compiler/ir/test_functions.py has functions, and the next tests what is stored by columns, or taken.
    assert {row[0] for row in MEANINGS} == set(OPS) - {*FUNCTIONS, "by_columns", "take", "gather"}


@pytest.mark.parametrize("of", [(M, D), (D,)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_an_element_is_taken_by_its_index(of: tuple[Axis, ...], dtype: DType) -> None:
    """0 outside the row, also for an index that is too large for 32 bits."""
    b = Builder("f")
    x, index = b.param("x", dtype, *of), b.param("index", DType.I64, M)
    b.param("rows", F32, M, D)
    graph = b.build(b.take("y", x, index))
    given = np.float32([[1, -2, 4], [0.5, 8, -0.0], [3, 5, 7], [np.inf, np.nan, 1]]).astype(NUMPY_DTYPE[dtype])
    at = np.array([0, 2, -1, 2**32 + 1])
    found = interpret(graph, {"x": given if M in of else given[0], "index": at, "rows": np.zeros((4, 3), np.float32)})
    want = [1, -0.0, 0, 0] if M in of else [1, 4, 0, 0]
    assert found["y"].tobytes() == np.float32(want).astype(NUMPY_DTYPE[dtype]).tobytes()


def rotary_table() -> Graph:
    """Rows of a table by position, of a number for each pair of four features that repeat."""
    b = Builder("f", params=(Value("x", f32(M, D)),))
    rows, pairs = b.axis("P", M @ "p"), b.axis("E", D % 4 / 2)
    table, at = b.param("table", F32, rows, pairs), b.param("at", DType.I64, M)
    return b.build(b.mul("y", b.params[0], b.gather("row", table, at)))


def test_rows_of_a_table_are_gathered() -> None:
    """A number for each pair of features, of the row that is at the position; the text says both axes."""
    graph = rotary_table()
    assert "{P = M @ p, E = D % 4 / 2}" in str(graph)
    assert parse(str(graph)) == graph
    table = np.float32([[1, 2], [3, 4], [5, 6]])
    found = interpret(graph, {"x": np.ones((2, 8), np.float32), "table": table, "at": np.array([2, 0])})
    np.testing.assert_array_equal(found["y"], [[5, 5, 6, 6, 5, 5, 6, 6], [1, 1, 2, 2, 1, 1, 2, 2]])


@pytest.mark.parametrize("outside", [-1, 3, 2**40])
def test_a_position_outside_its_table_is_an_error(outside: int) -> None:
    given = {"x": np.ones((1, 8), np.float32), "table": np.ones((3, 2), np.float32), "at": np.array([outside])}
    with pytest.raises(ArrayError, match=f"one of the 3 rows of its table, got {outside}"):
        interpret(rotary_table(), given)


def test_columns_have_zeros_behind_the_rows() -> None:
    """Of 5 rows and 2 blocks of 16 features; a result alone is stored so."""
    b = Builder("f", params=(Value("x", f32(M, D)),))
    blocks = b.axis("B", D / 16)
    graph = b.build(b.by_columns("y", b.reduce_max("largest", b.params[0], axis=D, to=blocks)))
    assert "-> (f32[B, M])" in str(graph)
    assert parse(str(graph)) == graph
    assert graph.results[0].type.shape((5, 1), 32) == (2, 5, 1)
    x = np.arange(160, dtype=np.float32).reshape(5, 32)
    want = x.reshape(5, 2, 16).max(2).T
    found = interpret(graph, {"x": x})["y"]
    assert np.array_equal(found, want)
    assert np.array_equal(found.base, np.pad(want, ((0, 0), (0, 3))))
    with pytest.raises(VerifyError, match="as only results are"):
        Builder("g", params=(graph.results[0],)).build(graph.results[0])


def test_what_values_along_s_mean() -> None:
    """Segments of 2 and 1: of 1, 3 and 11 the sums are 4 and 11, of the squares 10 and 121; an element has its own."""
    graph = parse(
        "graph @f(%x: f32[M, D]) -> (f32[M, D], f32[M, D], f32[D], f32[M]) {\n"
        "%a : f32[M, S] = segment_sum %x {chunk=1, segment=2}\n"
        "%b : f32[M, S] = segment_dot %x, %x {chunk=1, segment=2}\n"
        "%n : f32[S] = segment_size {dtype=f32, segment=2}\n"
        "%y : f32[M, D] = sub %x, %a\n%z : f32[M, D] = expand %b {axis=D}\n%w : f32[D] = expand %n {axis=D}\n"
        "%c : f32[M, S] = mul %n, %a\n%s : f32[M] = reduce_sum %c {axis=S, interleave=4}\n"
        "return %y, %z, %w, %s\n}"
    )
    assert parse(str(graph)) == graph
    found = interpret(graph, {"x": np.array([[1, 3, 11], [0, 1, 0]], np.float32)})
    expected = [[[-3, -1, 0], [-1, 0, 0]], [[10, 10, 121], [1, 1, 0]], [2, 2, 1], [19, 2]]
    for result, values in zip(graph.results, expected, strict=True):
        np.testing.assert_array_equal(found[result.name], np.array(values, np.float32))


def test_an_op_has_a_meaning_or_equations_and_says_which_step_lowers_it() -> None:
    by_step: dict[str, set[str]] = {"": set(), "decompose": set(), "lower": set()}
    for op in OPS.values():
        by_step[op.lowered_by].add(op.name)
        assert bool(op.numpy) is not bool(op.expand), op.name
    expanded = {"rsqrt", "reduce_mean", "clamp", "weighted", "div_scale", "ceil_power"}
    assert by_step["decompose"] == {*expanded, *FUNCTIONS}
    assert by_step["lower"] == {"reduce_sum", "reduce_dot", "reduce_max", "rotate", "iota", "take", "gather"}


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_literal_reads_back_to_its_bits(value: float) -> None:
    text = literal(value, F32)
    assert text.endswith("f")
    assert any(c in text for c in ".e")
    assert np.float32(text[:-1]).tobytes() == np.float32(value).tobytes()
    assert np.float64(literal(value, F64)).tobytes() == np.float64(value).tobytes()
    assert literal(np.inf, F32) == "__int_as_float(0x7f800000)"
    assert literal(-np.inf, F64) == "__longlong_as_double(0xfff0000000000000)"


# ---- axes ----


def test_there_is_one_object_for_each_axis() -> None:
    """Also behind a pickle, of which earlier ones say S by its name alone."""
    for axis in (M, D, S, *DERIVED):
        assert pickle.loads(pickle.dumps(axis)) is copy.deepcopy(axis) is axis
    assert [Axis(name) for name in "MDS"] == [M, D, S]
    assert Axis("B", D, "/", 16) is BLOCK is not Axis("B", D, "/", 32)
    with pytest.raises(ValueError, match="'B' is no axis; there are M, D, S and those derived from M and D"):
        Axis("B")


@pytest.mark.parametrize(("finer", "coarser"), [
    (D, BLOCK), (M, SAMPLE), (M, HEAD), (BLOCK, LARGE), (BLOCK, BLOCK), (D, S),
    (Axis("H", M, "%", 8), Axis("G", M, "%", 4)),
])  # fmt: skip
def test_axes_combine_to_the_finer_one(finer: Axis, coarser: Axis) -> None:
    assert finer.is_finer(coarser)
    assert coarser.is_finer(finer) is (finer is coarser)
    assert axes_union((finer,), (coarser,)) == axes_union((coarser,), (finer,)) == (finer,)


@pytest.mark.parametrize(("a", "b"), [
    (SAMPLE, HEAD), (BLOCK, S), (SAMPLE, Axis("P", M, "/", 4)), (Axis("H", M, "%", 8), Axis("T", M, "%", 3)),
    (Axis("T", D, "/", 3), Axis("F", D, "/", 4)),
])  # fmt: skip
def test_axes_that_cannot_be_compared_combine_to_their_base(a: Axis, b: Axis) -> None:
    assert axes_union((a,), (b,)) == (a.root,)


def test_a_graph_may_have_an_axis_called_s() -> None:
    """The segments of its long rows are then S_1, in the text as well."""

    def grouped(b: GraphBuilder) -> None:
        x, w = b.input("x", M, D), b.input("w", b.axis("S", D / 16))
        c = x - b.mean(x)
        b.output("y", c * (b.mean(c * c) + b.eps()).rsqrt() * w)

    graph = make_spec(Definition("grouped", grouped), "fwd", {"d": 16384}).graph()
    assert " : f32[M, S_1] = reduce_sum " in print_graph(graph)
    assert parse(print_graph(graph)) == graph


# ---- text ----

DTYPES = ["dtype=f16", "dtype=bf16", "dtype=f32", "dtype=f64", "dtype=bf16,weight=f32,out=f32"]


@sampling.grid(
    ("name", "dtypes", "direction"),
    [(n, t, way) for n in GRAPHS for t in dtypes_of(n, *DTYPES) for way in ("fwd", "bwd")],
    strength=1,
)
def test_every_pass_prints_what_parses_back(name: str, dtypes: str, direction: str) -> None:
    weighted, d = "gamma" in [p.name for p in parse_spec(f"{name}.fwd:d=77").forward().params], whole_heads(name, 77)
    for option in ("", ",save=none", *[",gamma=no"] * weighted):
        for stage, graph in parse_spec(f"{name}.{direction}:d={d},{dtypes}{option}").trace().items():
            assert parse(print_graph(graph)) == graph, stage


AXES = st.sampled_from([M, D, S, *DERIVED])
LEFT = st.sampled_from([{}, {}, *({"sum": {"to": a}, "size": {"per": a}} for a in (S, *DERIVED))])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph: parameters of any type, equations of any op, attributes of any value."""
    b = Builder(draw(st.from_regex(r"[a-z][a-z0-9]{0,4}(_[a-z0-9]{1,4})?", fullmatch=True)))
    b.axes |= {a.name: a for a in (*DERIVED, TABLE, TURNED)}
    axes = st.sampled_from([MD, ROW, COL, SCALAR, (SAMPLE, D), (M, BLOCK), (BLOCK,), (HEAD, BLOCK), (TABLE, TURNED)])
    values = [b.param(f"p{n}", draw(st.sampled_from(list(DType))), *draw(axes)) for n in range(draw(st.integers(0, 4)))]
    numbers = st.floats(allow_nan=False)
    for _ in range(draw(st.integers(0, 12))):
        op = OPS[draw(st.sampled_from(list(OPS)))]
        if op.arity and not values:
            continue
        attrs: dict[str, Attr] = {
            "const": {"value": draw(numbers), "dtype": draw(st.sampled_from([F32, F64]))},
            "size": {"axis": draw(AXES), "dtype": F32, **draw(LEFT).get("size", {})},
            "rotate": {
                "head": draw(st.integers(1, 9)),
                "width": draw(st.integers(0, 9)),
                "by": draw(st.sampled_from(["halves", "pairs", "z"])),
            },
            "cast": {"to": draw(st.sampled_from([t for t in DType if t.digits]))},
            "expand": {"axis": draw(AXES)},
            "iota": {"axis": draw(AXES), "dtype": draw(st.sampled_from([DType.I32, DType.I64, F32]))},
            "reduce_sum": {"axis": draw(AXES), **draw(LEFT).get("sum", {}), "chunk": draw(st.integers(-9, 99))},
            "reduce_mean": {"axis": draw(AXES), **draw(LEFT).get("sum", {})},
            "clamp": {"low": draw(numbers), "high": draw(numbers)},
        }.get(op.name, {})
        args = tuple(draw(st.sampled_from(values)) for _ in range(op.arity))
        try:
            values.append(b.emit(op.name, draw(st.sampled_from(["v", "ct", "x_1"])), args, **attrs))
        except VerifyError:
            continue  # ill-typed
    returned = [v for v in values if S not in v.type.axes]
    results = draw(st.lists(st.sampled_from(returned), unique=True) if returned else st.just([]))
    try:
        return b.build(*results)
    except VerifyError as error:  # a number of samples that no parameter says
        assume("no input has the axis" not in str(error))
        raise


@given(graphs())
def test_any_graph_prints_what_parses_back(graph: Graph) -> None:
    text = print_graph(graph)
    assert parse(text) == graph
    assert print_graph(parse(text)) == text  # tells -0.0 from 0.0, which compare equal


MANY = 100_000
# Something of the text that is there many times, or in place of something else.
LONG: dict[str, tuple[str, str]] = {
    "spaces behind an operand": ("%g32\n", f"%g32{' ' * MANY}!\n"),
    "spaces, as they may be": ("%g32\n", f"%g32{' ' * MANY}\n"),
    "spaces in a type": ("bf16[D]", f"bf16[D{' ' * MANY}"),
    "spaces before a brace": ("{axis=D}", f"{' ' * MANY}{{axis=D"),
    "braces": ("{axis=D}", "{" * MANY),
    "arrows": (") -> (", ") -> (" * MANY),
    "a long op": ("mul", "m" * MANY + "!"),
    "a long name": ("%y ", f"%{'y_' * MANY} "),
    "parameters": ("%g: bf16[D]", ", ".join(["%g: bf16[D]"] * MANY) + ","),
    "result types": ("-> (", f"-> ({'f32[M], ' * MANY}, "),
    "commas": ("%x, %g32", "%x" + " ," * MANY),
    "attributes": ("{axis=D}", f"{{{'axis=D, ' * MANY}}}"),
    "digits": ("axis=D}", f"axis=D, chunk={'1' * MANY}}}"),
}


@pytest.mark.parametrize("what", LONG)
def test_parsing_takes_time_linear_in_the_text(what: str) -> None:
    start = time.process_time()
    try:
        assert parse(TEXT.replace(*LONG[what])) == parse(TEXT)
    except (ParseError, VerifyError):
        assert what != "spaces, as they may be"
    assert time.process_time() - start < 2


# ---- what a launch passes by value ----

BY_VALUE = """\
graph @f(%x: f32[M, D], %eps: f32[] by value of eps, %least: f32[] by value of eps_squared) -> (f32[M, D]) {
  %z : f32[M, D] = maximum %x, %least
  %y : f32[M, D] = add %z, %eps
  return %y
}
"""


def test_a_text_with_numbers_by_value_parses_to_what_prints_it() -> None:
    """Such a number is not the input of its name; what does not need it does not take it."""
    graph = parse(BY_VALUE)
    assert str(graph) == BY_VALUE
    assert graph.by_value == (ByValue("eps", Type(F32), "eps"), ByValue("least", Type(F32), "eps_squared"))
    assert [p.name for p in graph.tensors] == ["x"]
    plain = parse(BY_VALUE.replace(" by value of eps,", ","))
    assert plain != graph
    assert plain.by_value == graph.by_value[1:]
    part = extract(graph, "part", graph.params, (graph.eqns[0].out,))
    assert [v.name for v in part.by_value] == ["least"]


def test_a_builder_gives_each_rule_one_parameter_with_a_name_that_is_free() -> None:
    b = Builder("f")
    b.param("eps", F32, M, D)
    first = b.by_value("eps", F32, "eps")
    assert first == ByValue("eps_1", Type(F32), "eps")
    assert b.by_value("other", F32, "eps") is first
    assert b.by_value("least", F32, "eps_squared") != first
    assert [p.name for p in b.params] == ["eps", "eps_1", "least"]
    assert not isinstance(b.params[0], ByValue)
    assert Value("eps_1", Type(F32)) != first


@pytest.mark.parametrize("eps", [1e-5, 0.0, -0.25, 0.1, 1e-30, 3e38])
def test_the_text_of_a_rule_says_what_it_computes(eps: float) -> None:
    """The expression in C is one in Python, but for the number in hexadecimal."""
    for rule in RULES.values():
        text = re.sub(r"0x1p(-?\d+)", r"2.0**\1", rule.text)
        assert rule.of(eps) == eval(text, {"eps": eps, "max": max})


def test_the_bits_of_a_number_are_those_of_its_dtype() -> None:
    numbers = [("f32", 1.0, 0x3F800000), ("f64", 1.0, 0x3FF0000000000000), ("f32", -0.5, 0xBF000000)]
    for dtype, eps, bits in numbers:
        assert bits_of(values_of(parse(BY_VALUE.replace("f32", dtype)), eps)["eps"]) == bits
