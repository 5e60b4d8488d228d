"""If these fail, a pass writes something else, changes what is computed, or derives a wrong backward."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graph_names import dtypes_of
from lngen import passes
from lngen.check.differences import gradient_excess
from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import BF16, F32, F64, Axis, Builder, D, Graph, M, S, is_sum, parse, print_graph
from lngen.ir.numerics import Array
from lngen.passes.order import column_order, orders, row_order, rule_of
from lngen.problem import depths
from lngen.spec import Spec, make_spec, parse_spec

Pass = Callable[[Graph], Graph]
LINE = re.compile(r"(\w+) = (\w+)([ \w]*?)(?: \{(.*)\})?")
WORDS = {"M": M, "D": D, "S": S, "f32": F32, "f64": F64, "bf16": BF16}


def graph(params: str, *lines: str) -> Graph:
    """A graph from its parameters, equations ``y = mul x w {key=value}`` and, last, the names it returns."""
    b = Builder("f", params=parse(f"graph @f({params}) -> () {{\nreturn\n}}").params)
    known = {p.name: p for p in b.params}
    for line in lines[:-1]:
        name, op, args, attrs = LINE.fullmatch(line).groups()  # type: ignore[union-attr]
        given = dict(part.split("=") for part in (attrs or "").split(", ") if part)
        values = {k: WORDS.get(v) or (int(v) if v.isdigit() else float(v)) for k, v in given.items()}
        known[name] = b.emit(op, name, tuple(known[a] for a in args.split()), **values)
        assert known[name].name == name
    return b.build(*(known[name] for name in lines[-1].split(", ")))


def ordered(params: str, *lines: str) -> Graph:
    """The same, whose sums have their order."""
    return replace(graph(params, *lines), attrs=(("order", "v1"),))


V1 = rule_of("v1")
X = "%x: f32[M, D]"
XR = f"{X}, %w: f32[M]"


def scale(eps: float = 1e-5) -> tuple[str, ...]:
    """1 / sqrt(v / n + eps)."""
    return (
        "var = div v n", f"eps = const {{dtype=f32, value={eps}}}", "veps = add var eps", "root = sqrt veps",
        "one = const {dtype=f32, value=1.0}", "rstd = div one root",
    )  # fmt: skip


def centred_lines(d: int = 65536, more: tuple[str, ...] = (), returns: str = "", eps: float = 1e-5) -> tuple[str, ...]:
    """A variance, and elements that are measured from the mean and scaled."""
    return (
        "s = reduce_sum x {axis=D}", f"n = const {{dtype=f32, value={float(d)}}}", "m = div s n", "c = sub x m",
        "v = reduce_dot c c {axis=D}", *scale(eps), "y = mul c rstd", *more,
        ", ".join(filter(None, ("y", "v", returns))),
    )  # fmt: skip


def centred(d: int = 65536, more: tuple[str, ...] = (), returns: str = "", eps: float = 1e-5) -> Graph:
    return graph(X, *centred_lines(d, more, returns, eps))


# A sum over D that waits for one over M, beside the variance.
COLUMNS = ("t = reduce_sum x {axis=M}", "a = mul x t", "most = reduce_max a {axis=D}", "v, most")

SEGMENTS = (
    "x_sums = segment_sum x", "n_1 = segment_size {dtype=f32}", "one_1 = const {dtype=f32, value=1.0}",
    "n_inverse = div one_1 n_1", "centre = mul x_sums n_inverse", "far = sub x centre", "rest = segment_sum far",
    "squares = segment_dot far far", "s = reduce_sum x_sums {axis=S}",
)  # fmt: skip
MEAN = (
    "m_first = div s n", "off_first = sub centre m_first", "left = fma n_1 off_first rest",
    "off_sum = reduce_sum left {axis=S}", "correction = div off_sum n", "m = add m_first correction",
)  # fmt: skip
COMBINED = ("off = sub centre m", "n_off = mul n_1 off", "term = fma n_off off squares", "v = reduce_sum term {axis=S}")


def measured(lines: Iterable[str]) -> tuple[str, ...]:
    """The same, the sum of the row, its mean and the variance taken from the sums of segments."""
    new = {"s = ": SEGMENTS, "m = ": MEAN, "v = ": COMBINED}
    return tuple(after for line in lines for after in new.get(line[:4], (line,)))


def rescaled(old: str, new: str) -> tuple[Pass, Graph, Graph]:
    """Elements with another scale than the rows' own: only the variance is taken from the segments."""
    lines = ["less = const {dtype=f32, value=-1.0}", *(s.replace(old, new) for s in centred_lines())]
    lines[-1] = "y, v, rstd, less"
    after = measured(lines)
    return (passes.place_spread, 65536), graph(XR, *lines), graph(XR, *after)


NARROW = "%h: bf16[M, D]", "x = cast h {to=f32}"
CORRECTED = (
    "s = reduce_sum x {axis=D}", "n = const {dtype=f32, value=768.0}", "m_first = div s n", "c_first = sub x m_first",
    "off_sum = reduce_sum c_first {axis=D}", "squares = reduce_dot c_first c_first {axis=D}", "off = div off_sum n",
    "neg_off = neg off", "less = fma neg_off off_sum squares", "m = add m_first off", "c = sub x m",
    "zero = const {dtype=f32, value=0.0}", "v = maximum less zero",
)  # fmt: skip


def narrow(*lines: str) -> Graph:
    """Rows of 16-bit numbers."""
    return graph(NARROW[0], NARROW[1], *lines)


# A pass, with the length of rows if it takes one; a graph before it, and after it, None for the same.
TABLE: dict[str, tuple[Pass | tuple[Callable[[Graph, int], Graph], int], Graph, Graph | None]] = {
    "dce drops what no result needs": (
        passes.dce,
        graph(XR, "a = mul x x", "b = neg a", "y = add x x", "y"),
        graph(XR, "y = add x x", "y"),
    ),
    "cse keeps the first name, and takes swapped operands for the same": (
        passes.cse,
        graph(XR, "a = mul x w", "b = mul w x", "y = add a b", "y"),
        graph(XR, "a = mul x w", "y = add a a", "y"),
    ),
    "cse follows chains": (
        passes.cse,
        graph(X, "a = neg x", "b = neg x", "c = neg a", "d = neg b", "y = add c d", "y"),
        graph(X, "a = neg x", "c = neg a", "y = add c c", "y"),
    ),
    "cse leaves sub, attributes, signs of zero and results alone": (
        passes.cse,
        graph(
            XR,
            "a = sub x w",
            "b = sub w x",
            "s = reduce_sum a {axis=D}",
            "t = reduce_sum b {axis=M}",
            "p = const {dtype=f32, value=0.0}",
            "n = const {dtype=f32, value=-0.0}",
            "u = add s p",
            "v = add t n",
            "z = add s p",
            "u, v, z",
        ),
        None,
    ),
    "share_constants keeps the first place and the shortest name, and signs of zero, dtypes and results apart": (
        passes.share_constants,
        graph(
            X,
            "one_1 = const {dtype=f32, value=1.0}",
            "a = mul x one_1",
            "wide = const {dtype=f64, value=1.0}",
            "one = const {dtype=f32, value=1.0}",
            "b = add a one",
            "n = const {dtype=f32, value=-0.0}",
            "z = const {dtype=f32, value=0.0}",
            "c = add b n",
            "y = add c z",
            "r = const {dtype=f32, value=1.0}",
            "y, wide, r",
        ),
        graph(
            X,
            "one = const {dtype=f32, value=1.0}",
            "a = mul x one",
            "wide = const {dtype=f64, value=1.0}",
            "b = add a one",
            "n = const {dtype=f32, value=-0.0}",
            "z = const {dtype=f32, value=0.0}",
            "c = add b n",
            "y = add c z",
            "r = const {dtype=f32, value=1.0}",
            "y, wide, r",
        ),
    ),
    "decompose divides a sum by D": (
        (passes.decompose, 6),
        graph(X, "m = reduce_mean x {axis=D}", "y = sub x m", "y"),
        graph(
            X,
            "m_sum = reduce_sum x {axis=D}",
            "d_size = const {dtype=f32, value=6.0}",
            "m = div m_sum d_size",
            "y = sub x m",
            "y",
        ),
    ),
    "decompose leaves M to the launch": (
        (passes.decompose, 6),
        graph(X, "m = reduce_mean x {axis=M}", "m"),
        graph(X, "m_sum = reduce_sum x {axis=M}", "m_size = size {axis=M, dtype=f32}", "m = div m_sum m_size", "m"),
    ),
    "decompose writes rsqrt as a root and a division, and D as a number": (
        (passes.decompose, 6),
        graph("%w: f64[M]", "n = size {axis=D, dtype=f64}", "s = mul w n", "y = rsqrt s", "y"),
        graph(
            "%w: f64[M]",
            "n = const {dtype=f64, value=6.0}",
            "s = mul w n",
            "y_root = sqrt s",
            "one = const {dtype=f64, value=1.0}",
            "y = div one y_root",
            "y",
        ),
    ),
    "place_fma fuses a product into an addition": (
        passes.place_fma,
        graph(XR, "p = mul x w", "y = add p x", "y"),
        graph(XR, "y = fma x w x", "y"),
    ),
    "place_fma negates the addend, or the factor with fewer axes": (
        passes.place_fma,
        graph(XR, "p = mul x w", "a = sub p w", "q = mul x w", "y = sub a q", "y"),
        graph(XR, "w_neg = neg w", "a = fma x w w_neg", "w_neg_1 = neg w", "y = fma x w_neg_1 a", "y"),
    ),
    "place_fma takes the left of two products": (
        passes.place_fma,
        graph(XR, "p = mul x w", "q = mul x x", "y = add p q", "y"),
        graph(XR, "q = mul x x", "y = fma x w q", "y"),
    ),
    "place_fma leaves a product used twice, and one that is returned": (
        passes.place_fma,
        graph(XR, "p = mul x w", "q = mul x x", "a = add p x", "b = add p a", "y = add q b", "y, q"),
        None,
    ),
    "place_fma leaves a product to a sum over S": (
        passes.place_fma,
        graph(XR, "a = segment_sum x", "p = mul a w", "y = reduce_sum p {axis=S}", "y"),
        None,
    ),
    "place_fma fuses a product, and a square, into its sum": (
        passes.place_fma,
        graph(XR, "p = mul x w", "a = reduce_sum p {axis=D}", "q = mul x x", "b = reduce_sum q {axis=M}", "a, b"),
        graph(XR, "a = reduce_dot x w {axis=D}", "b = reduce_dot x x {axis=M}", "a, b"),
    ),
    "place_fma leaves f64": (passes.place_fma, graph("%x: f64[M, D]", "p = mul x x", "y = add p x", "y"), None),
    "place_spread measures long rows from the means of their segments": (
        (passes.place_spread, 65536),
        centred(),
        graph(
            X,
            *SEGMENTS,
            *measured(centred_lines()[1:3]),
            *COMBINED,
            *scale(),
            "shift = mul off rstd",
            "y = fma far rstd shift",
            "y, v",
        ),
    ),
    "place_spread leaves rows of few segments": ((passes.place_spread, 8192), centred(8192), None),
    "place_spread leaves rows of more segments than are kept": ((passes.place_spread, 2**19), centred(2**19), None),
    "place_spread leaves what is not measured from the mean": ((passes.place_spread, 65536), centred(65535), None),
    "place_spread leaves rows whose blocks meet for the mean anyway": (
        (passes.place_spread, 65536),
        centred(more=("a = neg c", "most = reduce_max a {axis=D}"), returns="most"),
        None,
    ),
    "place_spread leaves elements that go into sums over rows": (
        (passes.place_spread, 65536),
        centred(more=("t = reduce_sum y {axis=M}",), returns="t"),
        graph(X, *measured(centred_lines()[:5]), *scale(), "y = mul c rstd", "t = reduce_sum y {axis=M}", "y, v, t"),
    ),
    "place_spread leaves elements with a scale of their own": rescaled("c rstd", "c w"),
    "place_spread leaves elements with the scale of another row": rescaled("div v n", "div w n"),
    "place_spread leaves elements with an endless scale": rescaled("value=1.0}", "value=inf}"),
    "place_spread leaves elements with the scale of a sum turned round": rescaled("div v n", "div v less"),
    "place_spread leaves the squares of columns": (
        (passes.place_spread, 65536),
        graph(X, *centred_lines()[:4], "v = reduce_dot c c {axis=M}", "v"),
        None,
    ),
    "place_spread leaves what is measured from the means of columns": (
        (passes.place_spread, 65536),
        graph(
            X,
            "s = reduce_sum x {axis=M}",
            "n = const {dtype=f32, value=65536.0}",
            "m = div s n",
            *centred_lines()[3:5],
            "v",
        ),
        None,
    ),
    "place_spread minds no meeting for sums of columns": (
        (passes.place_spread, 65536),
        graph(X, *centred_lines()[:5], *COLUMNS),
        graph(X, *(s.replace("one_1", "one") for s in SEGMENTS), *measured(centred_lines()[1:3]), *COMBINED, *COLUMNS),
    ),
    "place_spread leaves the product of two": (
        (passes.place_spread, 65536),
        graph(X, *centred_lines()[:4], "v = reduce_dot c x {axis=D}", "v"),
        None,
    ),
    "place_spread leaves elements whose scale may be infinite": (
        (passes.place_spread, 65536),
        centred(eps=0.0),
        graph(X, *measured(centred_lines()[:5]), *scale(0.0), "y = mul c rstd", "y, v"),
    ),
    "place_spread leaves the mean of 16-bit rows whose sums are exact if their elements are equal": (
        (passes.place_spread, 65536),
        narrow(*centred_lines()[:5], "v"),
        narrow(
            *(s.replace("one_1", "one") for s in SEGMENTS if "rest" not in s), *centred_lines()[1:3], *COMBINED, "v"
        ),
    ),
    "compensate corrects the mean and the squares of the distances from it": (
        (passes.compensate, 768),
        centred(768),
        graph(X, *CORRECTED, *centred_lines()[5:]),
    ),
    "compensate corrects the mean of 16-bit rows that are long": (
        (passes.compensate, 65537),
        narrow(*centred_lines(65537)),
        narrow(*(s.replace("768", "65537") for s in CORRECTED), *centred_lines(65537)[5:]),
    ),
    "compensate leaves 16-bit rows whose sums are exact if their elements are equal": (
        (passes.compensate, 65536),
        narrow(*centred_lines()),
        None,
    ),
    "compensate leaves a mean whose distances are not squared": (
        (passes.compensate, 768),
        graph(X, *centred_lines(768)[:4], "c"),
        None,
    ),
    "compensate leaves f64": (
        (passes.compensate, 768),
        wide := graph(
            X.replace("f32", "f64"),
            *(s.replace("f32", "f64").replace("dot c c", "sum c2") for s in centred_lines(768)[:4]),
            "c2 = mul c c",
            "v = reduce_sum c2 {axis=D}",
            "v",
        ),
        wide,
    ),
    "order_sums writes the order, and keeps one that is written": (
        (passes.order_sums, 4096),
        graph(
            "%x: bf16[M, D]",
            "a = cast x {to=f32}",
            "s = reduce_sum a {axis=D}",
            "t = reduce_sum a {axis=M}",
            "u = reduce_sum a {axis=D, chunk=2}",
            "s, t, u",
        ),
        ordered(
            "%x: bf16[M, D]",
            "a = cast x {to=f32}",
            "s = reduce_sum a {axis=D, chunk=8, segment=4096}",
            "t = reduce_sum a {axis=M, blocks=126, groups=2, interleave=16}",
            "u = reduce_sum a {axis=D, chunk=2, segment=4096}",
            "s, t, u",
        ),
    ),
    "save takes values as parameters and drops what only they needed": (
        lambda g: passes.save(g, g, ("w", "unknown")),
        graph("%x: f32[M, D], %g: f32[D]", "m = reduce_mean x {axis=D}", "w = neg m", "y = mul x w", "y"),
        graph("%x: f32[M, D], %w: f32[M]", "y = mul x w", "y"),
    ),
}


@pytest.mark.parametrize("what", TABLE)
def test_pass(what: str) -> None:
    run, before, after = TABLE[what]
    found = run[0](before, run[1]) if isinstance(run, tuple) else run(before)
    assert print_graph(found) == print_graph(after or before)


# ---- the backward graphs ----


def phases(g: Graph, axis: Axis) -> list[int]:
    """The phase of each sum over ``axis``."""
    levels = depths(g)
    return sorted(max(levels[a] for a in e.args) for e in g.eqns if is_sum(e, axis))


@pytest.mark.parametrize(("spec", "params", "results", "rows", "columns"), [
    ("layernorm.fwd", "x gamma beta", "y mean rstd", [0, 1], 0),
    ("rmsnorm.fwd", "x gamma", "y rstd", [0], 0),
    ("layernorm.bwd", "dy x gamma mean rstd", "dx dgamma dbeta", [0, 0], 2),
    ("layernorm.bwd,wrt=beta", "dy", "dbeta", [], 1),
    ("layernorm.bwd,wrt=gamma", "dy x mean rstd", "dgamma", [], 1),
    ("layernorm.bwd,wrt=gamma+beta", "dy x mean rstd", "dgamma dbeta", [], 2),
    ("layernorm.bwd,wrt=x", "dy x gamma mean rstd", "dx", [0, 0], 0),
    ("layernorm.bwd,wrt=beta+x", "dy x gamma mean rstd", "dx dbeta", [0, 0], 1),
    ("layernorm.bwd,save=none", "dy x gamma", "dx dgamma dbeta", [0, 0, 1, 2], 2),  # mean(dy gamma) needs none
    ("layernorm.bwd,gamma=no", "dy x mean rstd", "dx dbeta", [0, 0], 1),
    ("layernorm.bwd,gamma=no,beta=no", "dy x mean rstd", "dx", [0, 0], 0),
    ("rmsnorm.bwd", "dy x gamma rstd", "dx dgamma", [0], 1),
    ("rmsnorm.bwd,save=none", "dy x gamma", "dx dgamma", [0, 1], 1),
    ("rmsnorm.bwd,beta=yes", "dy x gamma rstd", "dx dgamma dbeta", [0], 2),
    ("rmsnorm.bwd,wrt=gamma", "dy x rstd", "dgamma", [], 1),
    ("rmsnorm.bwd,wrt=x", "dy x gamma rstd", "dx", [0], 0),
])  # fmt: skip
def test_only_what_is_asked_for_stays_in_few_phases(
    spec: str, params: str, results: str, rows: list[int], columns: int
) -> None:
    head, _, tail = spec.partition(",")
    for dtype in ("bf16", "f64"):
        g = parse_spec(f"{head}:d=512,dtype={dtype},{tail}").graph()
        assert (" ".join(p.name for p in g.params), " ".join(r.name for r in g.results)) == (params, results)
        assert passes.dce(g) == g
        assert {a for e in g.eqns for a in e.args} >= set(g.params)
        assert phases(g, D) == rows
        assert len(phases(g, M)) == columns


# ---- no pass changes what is computed ----


def draw(g: Graph, rows: int, d: int, seed: int = 0) -> dict[str, Array]:
    """Random f64 or f32 inputs of a graph."""
    rng = np.random.default_rng([seed, rows, d])
    dtypes = {F32: np.float32, F64: np.float64}
    return {p.name: rng.normal(0.7, 1, p.type.shape(rows, d)).astype(dtypes[p.type.dtype]) for p in g.params}


def every_input(spec: Spec, rows: int = 7) -> dict[str, Array]:
    """Inputs for every stage of the spec: those of forward, its statistics, and dy."""
    forward = spec.with_direction("fwd").forward()
    inputs = draw(forward, rows, spec.d)
    saved = interpret(forward, inputs)
    shapes = {r.name: draw(replace(forward, params=forward.results), rows, spec.d, seed=1) for r in forward.results}
    return {**inputs, **saved, **{f"d{name}": arrays[name] for name, arrays in shapes.items()}}


SPECS = [
    f"{n}.{way}:d=37,dtype={t}{o}"
    for n in GRAPHS
    for way in ("fwd", "bwd")
    for t in dtypes_of(n, "f32", "f64")
    for o in ("", ",save=none")
]
EXACT = {"cse", "decompose", "save"}


@pytest.mark.parametrize("text", SPECS)
def test_every_pass_keeps_the_result(text: str) -> None:
    spec = parse_spec(text)
    inputs = every_input(spec)
    stages = [(n, interpret(g, inputs)) for n, g in spec.trace().items() if n != "vjp" or spec.direction == "bwd"]
    for (_, before), (stage, after) in pairwise(stages):
        if stage == "vjp":
            continue  # another function
        for name, value in after.items():
            if stage in EXACT:
                np.testing.assert_array_equal(value, before[name], err_msg=f"{stage} {name}")
            tolerance = 1e-5 if spec.dtype is F32 else 1e-13
            np.testing.assert_allclose(value, before[name], rtol=0, atol=tolerance * np.abs(before[name]).max())


@pytest.mark.parametrize(("name", "dtype"), [(n, t) for n in GRAPHS for t in dtypes_of(n, "f32", "f64")])
def test_what_is_rematerialised_has_the_bits_of_what_is_saved(name: str, dtype: str) -> None:
    spec = parse_spec(f"{name}.bwd:d=37,dtype={dtype}")
    inputs = every_input(spec) | interpret(spec.with_direction("fwd").graph(), every_input(spec))
    saved = interpret(spec.graph(), inputs)
    for result, value in interpret(parse_spec(f"{spec},save=none").graph(), inputs).items():
        np.testing.assert_array_equal(value, saved[result])


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("d", [4096, 7176, 8192, 16384, 40000])
def test_a_statistic_that_is_computed_again_has_the_order_of_the_forward(d: int, dtype: str) -> None:
    forward = parse_spec(f"layernorm.fwd:d={d},dtype={dtype}").graph()
    again = parse_spec(f"layernorm.bwd:d={d},dtype={dtype},save=none").graph()
    assert orders(forward, d)[0] == orders(again, d)[0]


# Longer rows than these have never fitted anything.
LENGTHS = st.one_of(st.integers(1, 5000), st.integers(1, 2**21), st.integers(0, 21).map(lambda n: 2**n))
SIZES = st.sampled_from([2, 4, 8])


@given(d=LENGTHS, size=SIZES)
def test_segments_are_equal_short_and_a_power_of_two(d: int, size: int) -> None:
    o = row_order(V1, d, size)
    assert o.chunk * size == 16
    assert o.segment % o.chunk == 0
    assert o.segment * size <= 16 * 1024
    count = -(-d // o.segment)
    assert count & (count - 1) == 0 or d * size > 2**23  # chunks cannot be cut: beyond 8 MiB one may be left over
    # Equal: all together lack less than a chunk each, and no more of them than have to be.
    assert 0 <= count * o.segment - d < max(count, 1024) * o.chunk
    assert count == 1 or d * size > count // 2 * 16 * 1024


@given(d=LENGTHS, size=SIZES, cluster=st.sampled_from([1, 2, 4, 8, 16]), element=SIZES)
def test_what_shares_the_rows(d: int, size: int, cluster: int, element: int) -> None:
    assume((element, size) != (2, 4) or not 5120 < d < 16384)  # of these some have more, or as many as were measured
    o, piece = column_order(V1, d, size, cluster, element=element), -(-d // cluster)
    for number in (o.groups, o.interleave):
        assert number & (number - 1) == 0
    most = 12288 if cluster > 1 or 2 * o.groups >= 8 else 10240  # where they could be twice as many
    held = min(most // 2 if size == 8 else most, 24 * 1024 // element)
    assert 1 <= o.groups <= 128
    assert o.groups == 1 or o.groups * max(piece, 64) <= held
    assert o.groups in (1, 128) or 2 * o.groups * max(piece, 64) > held
    assert 4 <= o.blocks <= 128
    # Larger clusters are fewer.
    assert column_order(V1, 2 * d, size, 2 * cluster).blocks <= o.blocks


# ---- graphs of one's own ----


def gated(b: GraphBuilder) -> None:
    """RMSNorm of a product."""
    p = b.input("x", M, D) * b.input("z", M, D)
    b.output("y", p * b.statistic((b.mean(p * p) + b.eps()).rsqrt(), "rstd") * b.input("gamma", D))


def scaled(b: GraphBuilder) -> None:
    """A product with a number in it must not pass for the product."""
    p = b.input("x", M, D) * 0.5 * b.input("z", M, D)
    b.output("y", p * p)


def quotient(b: GraphBuilder) -> None:
    """Division by something that depends on an input, and by a sum."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    b.output("y", x / (z * z + 1) / b.sum(x * x))


def residual(b: GraphBuilder) -> None:
    """One input on three ways to the result."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    xc = x - b.mean(x)
    b.output("y", xc * xc * xc * gamma + -x)


def two_results(b: GraphBuilder) -> None:
    """A cotangent for each of them."""
    x, z = b.input("x", M, D), b.input("z", D)
    b.output("y", x * z * x)
    b.output("other", x * z + x)


def unit_length(b: GraphBuilder) -> None:
    """A root that is divided by."""
    x = b.input("x", M, D)
    b.output("y", x / b.sum(x * x).sqrt())


def column_centred(b: GraphBuilder) -> None:
    """A mean over the rows."""
    x = b.input("x", M, D)
    xc = x - b.mean(x, M)
    b.output("y", xc * xc)


def zero_centred(b: GraphBuilder) -> None:
    """gamma + 1, subtracted from a number; a row parameter; a size."""
    x, gamma, shift = b.input("x", M, D), b.input("gamma", D), b.input("shift", M)
    b.output("y", (2 - (x * (gamma + 1) - shift)) * b.size("d_length", D, b.compute))


def cancels(b: GraphBuilder) -> None:
    """The gradient in z is zero, and says so in the shape of z."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    b.output("y", x * z / z)


def moved_sums(b: GraphBuilder) -> None:
    """A number per row and one per column, each counted as often as its sum has terms."""
    x, shift, beta = b.input("x", M, D), b.input("shift", M), b.input("beta", D)
    b.output("y", b.sum(x + shift) * b.sum(x + beta, M))


OWN = [gated, scaled, quotient, residual, two_results, unit_length, column_centred, zero_centred, cancels, moved_sums]


@pytest.mark.parametrize("describe", OWN)
def test_the_backward_of_a_graph_of_ones_own(describe: Callable[[GraphBuilder], None]) -> None:
    spec = make_spec(Definition(describe.__name__, describe), "bwd", {"d": 5, "dtype": "f64"})
    found = gradient_excess(spec)
    assert list(found) == [f"d{p.name}" for p in spec.forward().params]
    assert max(found.values()) < 1


FUSED = {
    "fma": (graph(XR, "y = fma x w w", "y"), graph(XR, "p = mul x w", "y = add p w", "y")),
    "reduce_dot": (
        graph(XR, "s = reduce_dot x w {axis=D}", "y = mul x s", "y"),
        graph(XR, "p = mul x w", "s = reduce_sum p {axis=D}", "y = mul x s", "y"),
    ),
}


@pytest.mark.parametrize("op", FUSED)
def test_what_is_fused_has_the_derivative_of_its_parts(op: str) -> None:
    found, expected = (passes.vjp(g, ("x", "w")) for g in FUSED[op])
    inputs = draw(expected, 5, 9)
    simplified = interpret(passes.simplify(found, found.params[0].name), inputs)
    for name, value in interpret(expected, inputs).items():
        np.testing.assert_allclose(interpret(found, inputs)[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(simplified[name], value, rtol=1e-5, atol=1e-6)
