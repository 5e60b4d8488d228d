"""Passes: what each replaces by what, that none changes what is computed, and the backward they derive."""

from __future__ import annotations

import random
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
from lngen.check.oracles import Array, differences
from lngen.errors import DerivativeError, VerifyError
from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import F32, F64, Axis, Builder, D, DType, Graph, M, is_sum, parse, print_graph
from lngen.passes import upstream
from lngen.passes.order import column_order, orders, row_order, rule_of
from lngen.schedule import depths
from lngen.spec import Spec, make_spec, parse_spec

Pass = Callable[[Graph], Graph]


def graph(params: str, *lines: str) -> Graph:
    """A graph from its parameters, its equations and, last, the names it returns; types are looked up."""
    types = dict(re.findall(r"(%\w+) ?: (\w+\[[\w, ]*\])", params + "\n".join(lines)))
    results = ", ".join(types[name] for name in lines[-1].split(", "))
    return parse("\n".join([f"graph @f({params}) -> ({results}) {{", *lines[:-1], f"return {lines[-1]}", "}"]))


def ordered(params: str, *lines: str) -> Graph:
    """The same, whose sums have their order."""
    return replace(graph(params, *lines), attrs=(("order", "v1"),))


V1 = rule_of("v1")
X = "%x: f32[M, D]"
XR = f"{X}, %w: f32[M]"


def scale(eps: float = 1e-5) -> tuple[str, ...]:
    """1 / sqrt(v / n + eps)."""
    return (
        "%var : f32[M] = div %v, %n",
        f"%eps : f32[] = const {{dtype=f32, value={eps}}}",
        "%veps : f32[M] = add %var, %eps",
        "%root : f32[M] = sqrt %veps",
        "%one : f32[] = const {dtype=f32, value=1.0}",
        "%rstd : f32[M] = div %one, %root",
    )


def centred_lines(d: int = 65536, more: tuple[str, ...] = (), returns: str = "", eps: float = 1e-5) -> tuple[str, ...]:
    """A variance, and elements that are measured from the mean and scaled."""
    return (
        "%s : f32[M] = reduce_sum %x {axis=D}",
        f"%n : f32[] = const {{dtype=f32, value={float(d)}}}",
        "%m : f32[M] = div %s, %n",
        "%c : f32[M, D] = sub %x, %m",
        "%v : f32[M] = reduce_dot %c, %c {axis=D}",
        *scale(eps),
        "%y : f32[M, D] = mul %c, %rstd",
        *more,
        ", ".join(filter(None, ("%y", "%v", returns))),
    )


def centred(d: int = 65536, more: tuple[str, ...] = (), returns: str = "", eps: float = 1e-5) -> Graph:
    return graph(X, *centred_lines(d, more, returns, eps))


# A sum over D that waits for one over M, beside the variance.
COLUMNS = (
    "%t : f32[D] = reduce_sum %x {axis=M}",
    "%a : f32[M, D] = mul %x, %t",
    "%most : f32[M] = reduce_max %a {axis=D}",
    "%v, %most",
)


SEGMENTS = (
    "%x_sums : f32[M, S] = segment_sum %x",
    "%n_1 : f32[S] = segment_size {dtype=f32}",
    "%one_1 : f32[] = const {dtype=f32, value=1.0}",
    "%n_inverse : f32[S] = div %one_1, %n_1",
    "%centre : f32[M, S] = mul %x_sums, %n_inverse",
    "%far : f32[M, D] = sub %x, %centre",
    "%rest : f32[M, S] = segment_sum %far",
    "%squares : f32[M, S] = segment_dot %far, %far",
    "%s : f32[M] = reduce_sum %x_sums {axis=S}",
)
MEAN = (
    "%m_first : f32[M] = div %s, %n",
    "%off_first : f32[M, S] = sub %centre, %m_first",
    "%left : f32[M, S] = fma %n_1, %off_first, %rest",
    "%off_sum : f32[M] = reduce_sum %left {axis=S}",
    "%correction : f32[M] = div %off_sum, %n",
    "%m : f32[M] = add %m_first, %correction",
)
COMBINED = (
    "%off : f32[M, S] = sub %centre, %m",
    "%n_off : f32[M, S] = mul %n_1, %off",
    "%term : f32[M, S] = fma %n_off, %off, %squares",
    "%v : f32[M] = reduce_sum %term {axis=S}",
)


def measured(lines: Iterable[str]) -> tuple[str, ...]:
    """The same, the sum of the row, its mean and the variance taken from the sums of segments."""
    new = {"%s :": SEGMENTS, "%m :": MEAN, "%v :": COMBINED}
    return tuple(after for line in lines for after in new.get(line[:4], (line,)))


def rescaled(old: str, new: str) -> tuple[Pass, Graph, Graph]:
    """Elements with another scale than the rows' own: only the variance is taken from the segments."""
    lines = ["%less : f32[] = const {dtype=f32, value=-1.0}", *(s.replace(old, new) for s in centred_lines())]
    lines[-1] = "%y, %v, %rstd, %less"
    after = measured(lines)
    return lambda g: passes.place_spread(g, 65536), graph(XR, *lines), graph(XR, *after)


NARROW = "%h: bf16[M, D]", "%x : f32[M, D] = cast %h {to=f32}"
CORRECTED = (
    "%s : f32[M] = reduce_sum %x {axis=D}",
    "%n : f32[] = const {dtype=f32, value=768.0}",
    "%m_first : f32[M] = div %s, %n",
    "%c_first : f32[M, D] = sub %x, %m_first",
    "%off_sum : f32[M] = reduce_sum %c_first {axis=D}",
    "%squares : f32[M] = reduce_dot %c_first, %c_first {axis=D}",
    "%off : f32[M] = div %off_sum, %n",
    "%neg_off : f32[M] = neg %off",
    "%less : f32[M] = fma %neg_off, %off_sum, %squares",
    "%m : f32[M] = add %m_first, %off",
    "%c : f32[M, D] = sub %x, %m",
    "%zero : f32[] = const {dtype=f32, value=0.0}",
    "%v : f32[M] = maximum %less, %zero",
)


def narrow(*lines: str) -> Graph:
    """Rows of 16-bit numbers."""
    return graph(NARROW[0], NARROW[1], *lines)


TABLE: dict[str, tuple[Pass, Graph, Graph]] = {
    "dce drops what no result needs": (
        passes.dce,
        graph(XR, "%a : f32[M, D] = mul %x, %x", "%b : f32[M, D] = neg %a", "%y : f32[M, D] = add %x, %x", "%y"),
        graph(XR, "%y : f32[M, D] = add %x, %x", "%y"),
    ),
    "cse keeps the first name, and takes swapped operands for the same": (
        passes.cse,
        graph(
            XR,
            "%a : f32[M, D] = mul %x, %w",
            "%b : f32[M, D] = mul %w, %x",
            "%y : f32[M, D] = add %a, %b",
            "%y",
        ),
        graph(XR, "%a : f32[M, D] = mul %x, %w", "%y : f32[M, D] = add %a, %a", "%y"),
    ),
    "cse follows chains": (
        passes.cse,
        graph(
            X,
            "%a : f32[M, D] = neg %x",
            "%b : f32[M, D] = neg %x",
            "%c : f32[M, D] = neg %a",
            "%d : f32[M, D] = neg %b",
            "%y : f32[M, D] = add %c, %d",
            "%y",
        ),
        graph(X, "%a : f32[M, D] = neg %x", "%c : f32[M, D] = neg %a", "%y : f32[M, D] = add %c, %c", "%y"),
    ),
    "cse leaves sub, attributes, signs of zero and results alone": (
        passes.cse,
        same := graph(
            XR,
            "%a : f32[M, D] = sub %x, %w",
            "%b : f32[M, D] = sub %w, %x",
            "%s : f32[M] = reduce_sum %a {axis=D}",
            "%t : f32[D] = reduce_sum %b {axis=M}",
            "%p : f32[] = const {dtype=f32, value=0.0}",
            "%n : f32[] = const {dtype=f32, value=-0.0}",
            "%u : f32[M] = add %s, %p",
            "%v : f32[D] = add %t, %n",
            "%z : f32[M] = add %s, %p",
            "%u, %v, %z",
        ),
        same,
    ),
    "decompose divides a sum by D": (
        lambda g: passes.decompose(g, 6),
        graph(X, "%m : f32[M] = reduce_mean %x {axis=D}", "%y : f32[M, D] = sub %x, %m", "%y"),
        graph(
            X,
            "%m_sum : f32[M] = reduce_sum %x {axis=D}",
            "%d_size : f32[] = const {dtype=f32, value=6.0}",
            "%m : f32[M] = div %m_sum, %d_size",
            "%y : f32[M, D] = sub %x, %m",
            "%y",
        ),
    ),
    "decompose leaves M to the launch": (
        lambda g: passes.decompose(g, 6),
        graph(X, "%m : f32[D] = reduce_mean %x {axis=M}", "%m"),
        graph(
            X,
            "%m_sum : f32[D] = reduce_sum %x {axis=M}",
            "%m_size : f32[] = size {axis=M, dtype=f32}",
            "%m : f32[D] = div %m_sum, %m_size",
            "%m",
        ),
    ),
    "decompose writes rsqrt as a root and a division, and D as a number": (
        lambda g: passes.decompose(g, 6),
        graph(
            "%w: f64[M]",
            "%n : f64[] = size {axis=D, dtype=f64}",
            "%s : f64[M] = mul %w, %n",
            "%y : f64[M] = rsqrt %s",
            "%y",
        ),
        graph(
            "%w: f64[M]",
            "%n : f64[] = const {dtype=f64, value=6.0}",
            "%s : f64[M] = mul %w, %n",
            "%y_root : f64[M] = sqrt %s",
            "%one : f64[] = const {dtype=f64, value=1.0}",
            "%y : f64[M] = div %one, %y_root",
            "%y",
        ),
    ),
    "place_fma fuses a product into an addition": (
        passes.place_fma,
        graph(XR, "%p : f32[M, D] = mul %x, %w", "%y : f32[M, D] = add %p, %x", "%y"),
        graph(XR, "%y : f32[M, D] = fma %x, %w, %x", "%y"),
    ),
    "place_fma negates the addend, or the factor with fewer axes": (
        passes.place_fma,
        graph(
            XR,
            "%p : f32[M, D] = mul %x, %w",
            "%a : f32[M, D] = sub %p, %w",
            "%q : f32[M, D] = mul %x, %w",
            "%y : f32[M, D] = sub %a, %q",
            "%y",
        ),
        graph(
            XR,
            "%w_neg : f32[M] = neg %w",
            "%a : f32[M, D] = fma %x, %w, %w_neg",
            "%w_neg_1 : f32[M] = neg %w",
            "%y : f32[M, D] = fma %x, %w_neg_1, %a",
            "%y",
        ),
    ),
    "place_fma takes the left of two products": (
        passes.place_fma,
        graph(
            XR,
            "%p : f32[M, D] = mul %x, %w",
            "%q : f32[M, D] = mul %x, %x",
            "%y : f32[M, D] = add %p, %q",
            "%y",
        ),
        graph(XR, "%q : f32[M, D] = mul %x, %x", "%y : f32[M, D] = fma %x, %w, %q", "%y"),
    ),
    "place_fma leaves a product used twice, and one that is returned": (
        passes.place_fma,
        same := graph(
            XR,
            "%p : f32[M, D] = mul %x, %w",
            "%q : f32[M, D] = mul %x, %x",
            "%a : f32[M, D] = add %p, %x",
            "%b : f32[M, D] = add %p, %a",
            "%y : f32[M, D] = add %q, %b",
            "%y, %q",
        ),
        same,
    ),
    "place_fma leaves a product to a sum over S": (
        passes.place_fma,
        of_segments := graph(
            XR,
            "%a : f32[M, S] = segment_sum %x",
            "%p : f32[M, S] = mul %a, %w",
            "%y : f32[M] = reduce_sum %p {axis=S}",
            "%y",
        ),
        of_segments,
    ),
    "place_fma fuses a product, and a square, into its sum": (
        passes.place_fma,
        graph(
            XR,
            "%p : f32[M, D] = mul %x, %w",
            "%a : f32[M] = reduce_sum %p {axis=D}",
            "%q : f32[M, D] = mul %x, %x",
            "%b : f32[D] = reduce_sum %q {axis=M}",
            "%a, %b",
        ),
        graph(
            XR,
            "%a : f32[M] = reduce_dot %x, %w {axis=D}",
            "%b : f32[D] = reduce_dot %x, %x {axis=M}",
            "%a, %b",
        ),
    ),
    "place_fma leaves f64": (
        passes.place_fma,
        same := graph("%x: f64[M, D]", "%p : f64[M, D] = mul %x, %x", "%y : f64[M, D] = add %p, %x", "%y"),
        same,
    ),
    "place_spread measures long rows from the means of their segments": (
        lambda g: passes.place_spread(g, 65536),
        centred(),
        graph(
            X,
            *SEGMENTS,
            *measured(centred_lines()[1:3]),
            *COMBINED,
            *scale(),
            "%shift : f32[M, S] = mul %off, %rstd",
            "%y : f32[M, D] = fma %far, %rstd, %shift",
            "%y, %v",
        ),
    ),
    "place_spread leaves rows of few segments": (lambda g: passes.place_spread(g, 8192), centred(8192), centred(8192)),
    "place_spread leaves rows of more segments than are kept": (
        lambda g: passes.place_spread(g, 2**19),
        centred(2**19),
        centred(2**19),
    ),
    "place_spread leaves what is not measured from the mean": (
        lambda g: passes.place_spread(g, 65536),
        centred(65535),
        centred(65535),
    ),
    "place_spread leaves rows whose blocks meet for the mean anyway": (
        lambda g: passes.place_spread(g, 65536),
        between := centred(
            more=("%a : f32[M, D] = neg %c", "%most : f32[M] = reduce_max %a {axis=D}"), returns="%most"
        ),
        between,
    ),
    "place_spread leaves elements that go into sums over rows": (
        lambda g: passes.place_spread(g, 65536),
        centred(more=("%t : f32[D] = reduce_sum %y {axis=M}",), returns="%t"),
        graph(
            X,
            *measured(centred_lines()[:5]),
            *scale(),
            "%y : f32[M, D] = mul %c, %rstd",
            "%t : f32[D] = reduce_sum %y {axis=M}",
            "%y, %v, %t",
        ),
    ),
    "place_spread leaves elements with a scale of their own": rescaled("%c, %rstd", "%c, %w"),
    "place_spread leaves elements with the scale of another row": rescaled("div %v, %n", "div %w, %n"),
    "place_spread leaves elements with an endless scale": rescaled("value=1.0}", "value=inf}"),
    "place_spread leaves elements with the scale of a sum turned round": rescaled("div %v, %n", "div %v, %less"),
    "place_spread leaves the squares of columns": (
        lambda g: passes.place_spread(g, 65536),
        columns := graph(X, *centred_lines()[:4], "%v : f32[D] = reduce_dot %c, %c {axis=M}", "%v"),
        columns,
    ),
    "place_spread leaves what is measured from the means of columns": (
        lambda g: passes.place_spread(g, 65536),
        crosswise := graph(
            X,
            "%s : f32[D] = reduce_sum %x {axis=M}",
            "%n : f32[] = const {dtype=f32, value=65536.0}",
            "%m : f32[D] = div %s, %n",
            *centred_lines()[3:5],
            "%v",
        ),
        crosswise,
    ),
    "place_spread minds no meeting for sums of columns": (
        lambda g: passes.place_spread(g, 65536),
        graph(X, *centred_lines()[:5], *COLUMNS),
        graph(X, *(s.replace("one_1", "one") for s in SEGMENTS), *measured(centred_lines()[1:3]), *COMBINED, *COLUMNS),
    ),
    "place_spread leaves the product of two": (
        lambda g: passes.place_spread(g, 65536),
        two := graph(X, *centred_lines()[:4], "%v : f32[M] = reduce_dot %c, %x {axis=D}", "%v"),
        two,
    ),
    "place_spread leaves elements whose scale may be infinite": (
        lambda g: passes.place_spread(g, 65536),
        centred(eps=0.0),
        graph(
            X,
            *measured(centred_lines()[:5]),
            *scale(0.0),
            "%y : f32[M, D] = mul %c, %rstd",
            "%y, %v",
        ),
    ),
    "place_spread leaves the mean of 16-bit rows whose sums are exact if their elements are equal": (
        lambda g: passes.place_spread(g, 65536),
        narrow(*centred_lines()[:5], "%v"),
        narrow(
            *(s.replace("one_1", "one") for s in SEGMENTS if "%rest" not in s), *centred_lines()[1:3], *COMBINED, "%v"
        ),
    ),
    "compensate corrects the mean and the squares of the distances from it": (
        lambda g: passes.compensate(g, 768),
        centred(768),
        graph(X, *CORRECTED, *centred_lines()[5:]),
    ),
    "compensate corrects the mean of 16-bit rows that are long": (
        lambda g: passes.compensate(g, 65537),
        narrow(*centred_lines(65537)),
        narrow(*(s.replace("768", "65537") for s in CORRECTED), *centred_lines(65537)[5:]),
    ),
    "compensate leaves 16-bit rows whose sums are exact if their elements are equal": (
        lambda g: passes.compensate(g, 65536),
        narrow(*centred_lines()),
        narrow(*centred_lines()),
    ),
    "compensate leaves a mean whose distances are not squared": (
        lambda g: passes.compensate(g, 768),
        alone := graph(X, *centred_lines(768)[:4], "%c"),
        alone,
    ),
    "compensate leaves f64": (
        lambda g: passes.compensate(g, 768),
        wide := graph(
            X.replace("f32", "f64"),
            *(s.replace("f32", "f64").replace("dot %c, %c", "sum %c2") for s in centred_lines(768)[:4]),
            "%c2 : f64[M, D] = mul %c, %c",
            "%v : f64[M] = reduce_sum %c2 {axis=D}",
            "%v",
        ),
        wide,
    ),
    "order_sums writes the order, and keeps one that is written": (
        lambda g: passes.order_sums(g, 4096),
        graph(
            "%x: bf16[M, D]",
            "%a : f32[M, D] = cast %x {to=f32}",
            "%s : f32[M] = reduce_sum %a {axis=D}",
            "%t : f32[D] = reduce_sum %a {axis=M}",
            "%u : f32[M] = reduce_sum %a {axis=D, chunk=2}",
            "%s, %t, %u",
        ),
        ordered(
            "%x: bf16[M, D]",
            "%a : f32[M, D] = cast %x {to=f32}",
            "%s : f32[M] = reduce_sum %a {axis=D, chunk=8, segment=4096}",
            "%t : f32[D] = reduce_sum %a {axis=M, blocks=126, groups=2, interleave=16}",
            "%u : f32[M] = reduce_sum %a {axis=D, chunk=2, segment=4096}",
            "%s, %t, %u",
        ),
    ),
    "save takes values as parameters and drops what only they needed": (
        lambda g: passes.save(g, g, ("w", "unknown")),
        graph(
            "%x: f32[M, D], %g: f32[D]",
            "%m : f32[M] = reduce_mean %x {axis=D}",
            "%w : f32[M] = neg %m",
            "%y : f32[M, D] = mul %x, %w",
            "%y",
        ),
        graph("%x: f32[M, D], %w: f32[M]", "%y : f32[M, D] = mul %x, %w", "%y"),
    ),
}


@pytest.mark.parametrize("what", TABLE)
def test_pass(what: str) -> None:
    run, before, after = TABLE[what]
    assert print_graph(run(before)) == print_graph(after)


# ---- the backward graphs, as one would write them by hand ----

LAYERNORM_BWD = """\
graph @layernorm_bwd(%dy: bf16[M, D], %x: bf16[M, D], %gamma: bf16[D], %mean: f32[M], %rstd: f32[M]) -> (bf16[M, D], bf16[D], bf16[D]) {
  %x32                     : f32[M, D]  = cast %x {to=f32}
  %gamma32                 : f32[D]     = cast %gamma {to=f32}
  %xc                      : f32[M, D]  = sub %x32, %mean
  %xhat                    : f32[M, D]  = mul %xc, %rstd
  %dy32                    : f32[M, D]  = cast %dy {to=f32}
  %dy_gamma                : f32[M, D]  = mul %dy32, %gamma32
  %mean_dy_gamma           : f32[M]     = reduce_mean %dy_gamma {axis=D}
  %dx32_part               : f32[M, D]  = sub %dy_gamma, %mean_dy_gamma
  %dy_gamma_xhat           : f32[M, D]  = mul %dy_gamma, %xhat
  %mean_dy_gamma_xhat      : f32[M]     = reduce_mean %dy_gamma_xhat {axis=D}
  %xhat_mean_dy_gamma_xhat : f32[M, D]  = mul %xhat, %mean_dy_gamma_xhat
  %dx32_part_1             : f32[M, D]  = sub %dx32_part, %xhat_mean_dy_gamma_xhat
  %dx32                    : f32[M, D]  = mul %rstd, %dx32_part_1
  %dx                      : bf16[M, D] = cast %dx32 {to=bf16}
  %dy_xhat                 : f32[M, D]  = mul %dy32, %xhat
  %sum_dy_xhat             : f32[D]     = reduce_sum %dy_xhat {axis=M}
  %dgamma                  : bf16[D]    = cast %sum_dy_xhat {to=bf16}
  %sum_dy                  : f32[D]     = reduce_sum %dy32 {axis=M}
  %dbeta                   : bf16[D]    = cast %sum_dy {to=bf16}
  return %dx, %dgamma, %dbeta
}
"""  # noqa: E501

RMSNORM_BWD = """\
graph @rmsnorm_bwd(%dy: bf16[M, D], %x: bf16[M, D], %gamma: bf16[D], %rstd: f32[M]) -> (bf16[M, D], bf16[D]) {
  %x32                     : f32[M, D]  = cast %x {to=f32}
  %gamma32                 : f32[D]     = cast %gamma {to=f32}
  %xhat                    : f32[M, D]  = mul %x32, %rstd
  %dy32                    : f32[M, D]  = cast %dy {to=f32}
  %dy_gamma                : f32[M, D]  = mul %dy32, %gamma32
  %dy_gamma_xhat           : f32[M, D]  = mul %dy_gamma, %xhat
  %mean_dy_gamma_xhat      : f32[M]     = reduce_mean %dy_gamma_xhat {axis=D}
  %xhat_mean_dy_gamma_xhat : f32[M, D]  = mul %xhat, %mean_dy_gamma_xhat
  %dx32_part               : f32[M, D]  = sub %dy_gamma, %xhat_mean_dy_gamma_xhat
  %dx32                    : f32[M, D]  = mul %rstd, %dx32_part
  %dx                      : bf16[M, D] = cast %dx32 {to=bf16}
  %dy_xhat                 : f32[M, D]  = mul %dy32, %xhat
  %sum_dy_xhat             : f32[D]     = reduce_sum %dy_xhat {axis=M}
  %dgamma                  : bf16[D]    = cast %sum_dy_xhat {to=bf16}
  return %dx, %dgamma
}
"""


@pytest.mark.parametrize(("name", "text"), [("layernorm", LAYERNORM_BWD), ("rmsnorm", RMSNORM_BWD)])
def test_the_derived_backward_is_the_closed_form(name: str, text: str) -> None:
    assert print_graph(parse_spec(f"{name}.bwd:d=4096,dtype=bf16").trace()["save"]) == text


def sums(spec: str, axis: Axis) -> list[int]:
    """The phase of each sum over ``axis``."""
    g = parse_spec(spec).graph()
    levels = depths(g)
    return [max(levels[a] for a in e.args) for e in g.eqns if is_sum(e, axis)]


@pytest.mark.parametrize(
    ("spec", "rows", "columns"),
    [
        ("layernorm.fwd", [0, 1], 0),
        ("rmsnorm.fwd", [0], 0),
        ("layernorm.bwd", [0, 0], 2),
        ("rmsnorm.bwd", [0], 1),
        ("layernorm.bwd,gamma=no,beta=no", [0, 0], 0),
        ("layernorm.bwd,wrt=x", [0, 0], 0),
        ("layernorm.bwd,wrt=gamma", [], 1),
        ("layernorm.bwd,wrt=gamma+beta", [], 2),
        ("layernorm.bwd,wrt=beta", [], 1),
        ("rmsnorm.bwd,wrt=x", [0], 0),
        ("rmsnorm.bwd,wrt=gamma", [], 1),
        ("layernorm.bwd,save=none", [0, 0, 1, 2], 2),  # mean(dy gamma) needs no statistic
        ("rmsnorm.bwd,save=none", [0, 1], 1),
    ],
)
def test_sums_and_their_phases(spec: str, rows: list[int], columns: int) -> None:
    head, _, tail = spec.partition(",")
    for dtype in ("bf16", "f64"):
        text = f"{head}:d=512,dtype={dtype},{tail}"
        assert sorted(sums(text, D)) == rows, text
        assert len(sums(text, M)) == columns


@pytest.mark.parametrize(
    ("spec", "params", "results"),
    [
        ("layernorm.bwd:d=8", "dy x gamma mean rstd", "dx dgamma dbeta"),
        ("layernorm.bwd:d=8,wrt=beta", "dy", "dbeta"),
        ("layernorm.bwd:d=8,wrt=gamma", "dy x mean rstd", "dgamma"),
        ("layernorm.bwd:d=8,wrt=x", "dy x gamma mean rstd", "dx"),
        ("layernorm.bwd:d=8,wrt=beta+x", "dy x gamma mean rstd", "dx dbeta"),
        ("layernorm.bwd:d=8,save=none", "dy x gamma", "dx dgamma dbeta"),
        ("layernorm.bwd:d=8,gamma=no", "dy x mean rstd", "dx dbeta"),
        ("layernorm.bwd:d=8,gamma=no,beta=no,wrt=x", "dy x mean rstd", "dx"),
        ("rmsnorm.bwd:d=8", "dy x gamma rstd", "dx dgamma"),
        ("rmsnorm.bwd:d=8,save=none", "dy x gamma", "dx dgamma"),
        ("rmsnorm.bwd:d=8,beta=yes", "dy x gamma rstd", "dx dgamma dbeta"),
        ("rmsnorm.bwd:d=8,wrt=gamma", "dy x rstd", "dgamma"),
    ],
)
def test_only_what_is_asked_for_stays(spec: str, params: str, results: str) -> None:
    g = parse_spec(spec).graph()
    assert " ".join(p.name for p in g.params) == params
    assert " ".join(r.name for r in g.results) == results
    assert passes.dce(g) == g
    assert {a for e in g.eqns for a in e.args} >= set(g.params)


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


def unnamed(g: Graph) -> str:
    """The graph's text, every value called by its type and its equation, of the values that it uses."""
    called = {str(p): str(p) for p in g.params}
    for e in g.eqns:
        called[str(e.out)] = f"({e.op} {' '.join(called[str(a)] for a in e.args)} {e.attrs})"
    return "\n".join([*called.values(), *(called[str(r)] for r in g.results)])


@pytest.mark.parametrize("text", SPECS)
def test_a_pass_that_has_run_has_nothing_to_do(text: str) -> None:
    spec = parse_spec(text)
    saved = spec.definition.saved(spec.options)
    again: dict[str, Pass] = {
        "simplify": lambda g: passes.simplify(g, *(f"d{name}" for name in spec.differentiated)),
        "save": lambda g: passes.save(g, spec.forward(), saved),
        "cse": passes.cse,
        "decompose": lambda g: passes.decompose(g, spec.d),
        "place_fma": passes.place_fma,
        "place_spread": lambda g: passes.place_spread(g, spec.d),
        "order_sums": lambda g: passes.order_sums(g, spec.d),
        "share": passes.share_results,
    }
    for stage, g in spec.trace().items():
        if stage == "simplify":
            # Equations that do not depend on each other may change places.
            assert sorted(unnamed(again[stage](g)).splitlines()) == sorted(unnamed(g).splitlines())
        elif stage in again:
            assert print_graph(again[stage](g)) == print_graph(g), stage


@pytest.mark.parametrize(("name", "dtype"), [(n, t) for n in GRAPHS for t in dtypes_of(n, "f32", "f64")])
def test_what_is_rematerialised_has_the_bits_of_what_is_saved(name: str, dtype: str) -> None:
    spec = parse_spec(f"{name}.bwd:d=37,dtype={dtype}")
    inputs = every_input(spec) | interpret(spec.with_direction("fwd").graph(), every_input(spec))
    saved = interpret(spec.graph(), inputs)
    for result, value in interpret(parse_spec(f"{spec},save=none").graph(), inputs).items():
        np.testing.assert_array_equal(value, saved[result])


def test_column_orders_are_a_function_of_d_and_dtype() -> None:
    def found(d: int, dtype: str = "f32", save: str = "stats") -> tuple[int, int, int]:
        _, o = orders(parse_spec(f"layernorm.bwd:d={d},dtype={dtype},save={save}").graph(), d)
        return o.groups, o.blocks, o.interleave

    assert found(1, "bf16") == found(64, "f16") == (128, 128, 16)
    assert (found(1), found(64), found(65, "f64")) == ((64, 128, 16), (64, 128, 16), (32, 128, 16))
    assert (found(1536, "bf16"), found(1537, "bf16")) == ((8, 128, 16), (4, 126, 16))
    assert found(4096, "bf16") == (2, 126, 16)
    # More sums of a few long rows left no room for the rows.
    assert (found(2560, "bf16"), found(2561, "bf16")) == ((4, 126, 16), (2, 126, 16))
    assert (found(4097, "bf16"), found(5121, "bf16")) == ((2, 126, 16), (1, 126, 16))
    # The longest of which one block would hold two are for two blocks.
    assert found(4104, "bf16") == found(5120, "f16") == (4, 66, 16)
    assert found(5120, "bf16", "none") == (2, 126, 16)
    # Rows side by side of more than 24 KiB left no room for their stages.
    assert (found(1536), found(1537), found(3072), found(3073)) == (
        (4, 126, 16), (2, 126, 16), (2, 126, 16), (1, 126, 16),
    )  # fmt: skip
    assert found(3072, "f64") == found(7168, "bf16") == found(6144) == (1, 126, 16)
    # Longer rows are for clusters, of four at least; where they meet for statistics, too, only if they have to.
    assert found(7169, "bf16") == (4, 30, 4)
    assert found(3073, "f64") == found(6145) == found(12288) == (2, 30, 4)
    # Still longer ones are for clusters of eight, and the longest of four bytes an element for clusters of 16.
    assert (found(10240, "bf16"), found(10248, "bf16"), found(16384, "f16")) == ((4, 30, 4), (8, 15, 4), (4, 15, 4))
    # Of some there are as many pieces side by side as keep all threads at work.
    assert found(5128, "bf16") == found(6144, "f16") == found(7176, "bf16") == found(8184, "bf16") == (3, 66, 16)
    assert found(12288, "bf16") == found(13832, "f16") == found(16376, "bf16") == (3, 30, 4)
    assert found(12296, "bf16") == found(13304, "f16") == (8, 15, 4)
    assert found(13312, "bf16") == found(13824, "f16") == (4, 30, 4)
    assert found(12292, "bf16") == (4, 15, 4)  # no whole chunks
    assert (found(12289), found(24576), found(24580), found(32768)) == ((2, 15, 4), (2, 15, 4), (1, 15, 4), (1, 15, 4))
    assert (found(32769), found(65536), found(131072), found(2**18)) == ((2, 7, 4), (1, 7, 4), (1, 7, 4), (1, 4, 4))
    assert found(65536, "bf16") == (1, 15, 4)
    assert found(16384, "bf16", "none") == (1, 66, 16)
    assert (found(8192, save="none"), found(8193, save="none")) == ((1, 126, 16), (1, 66, 16))
    assert found(2**20, "bf16") == (1, 4, 4)


def wide_sums(d: int, dtype: DType) -> tuple[int, ...]:
    """How the sums in f64 of D columns of a gradient with elements of ``dtype`` are shared."""
    b = Builder("wide_bwd")
    x = b.cast("x64", b.param("x", dtype, M, D), to=DType.F64)
    _, o = orders(b.build(b.reduce_sum("s", x, axis=M)), d)
    return o.groups, o.blocks, o.interleave


def test_column_orders_of_eight_byte_sums() -> None:
    """Half as many as of four bytes fit a block; the rows have the bytes of their elements."""
    f64 = {1: (32, 128, 16), 96: (32, 128, 16), 97: (16, 128, 16), 384: (8, 128, 16), 385: (4, 126, 16),
           768: (4, 126, 16), 769: (2, 126, 16), 1536: (2, 126, 16), 1537: (1, 126, 16), 3072: (1, 126, 16),
           3073: (2, 30, 4), 6144: (2, 30, 4), 6145: (1, 30, 4), 16384: (1, 30, 4), 16385: (1, 15, 4),
           32769: (1, 7, 4), 65537: (1, 4, 4)}  # fmt: skip
    assert {d: wide_sums(d, DType.F64) for d in f64} == f64
    bf16 = {1: (64, 128, 16), 768: (8, 128, 16), 769: (4, 126, 16), 1280: (4, 126, 16), 1281: (2, 126, 16),
            2560: (2, 126, 16), 2561: (1, 126, 16), 3584: (1, 126, 16), 3585: (4, 30, 4), 10240: (2, 30, 4),
            10241: (4, 15, 4)}  # fmt: skip
    assert {d: wide_sums(d, DType.BF16) for d in bf16} == bf16


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


# ---- errors ----


def test_a_gradient_of_nothing_is_refused() -> None:
    forward = parse_spec("layernorm.fwd:d=8").forward()
    with pytest.raises(DerivativeError) as error:
        passes.vjp(forward, ("z",))
    assert str(error.value) == ("wrt=z: graph @layernorm_fwd has no input 'z'; its inputs are x, gamma, beta.")


def test_a_gradient_of_an_input_that_does_not_matter_is_refused() -> None:
    unused = graph(XR, "%y : f32[M, D] = neg %x", "%y")
    with pytest.raises(DerivativeError) as error:
        passes.vjp(unused, ("x", "w"))
    assert str(error.value) == "wrt=w: no result of graph @f depends on 'w'."


def test_a_pass_that_breaks_a_graph_is_named() -> None:
    b = Builder("f")
    x = b.param("x", F32, M, D)
    with pytest.raises(VerifyError, match=r"^graph @f is malformed after 'cse': a value is returned twice\.$"):
        b.build(x, x, stage="cse")


# ---- graphs of one's own ----


def gated(b: GraphBuilder) -> None:
    """RMSNorm of a product."""
    x, z, gamma = b.input("x", M, D), b.input("z", M, D), b.input("gamma", D)
    p = b.mul("p", x, z)
    ms = b.reduce_mean("ms", b.mul("p2", p, p), axis=D)
    rstd = b.statistic(b.rsqrt("rstd", b.add("mseps", ms, b.eps())))
    b.output("y", b.mul("scaled", b.mul("xhat", p, rstd), gamma))


def scaled(b: GraphBuilder) -> None:
    """A product with a number in it must not pass for the product."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    p = b.mul("p", b.mul("h", x, b.number("factor", 0.5)), z)
    b.output("y", b.mul("q", p, p))


def quotient(b: GraphBuilder) -> None:
    """Division by something that depends on an input, and by a sum."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    q = b.div("q", x, b.add("below", b.mul("z2", z, z), b.number("one", 1.0)))
    b.output("y", b.div("share", q, b.reduce_sum("total", b.mul("x2", x, x), axis=D)))


def residual(b: GraphBuilder) -> None:
    """One input on three ways to the result."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    xc = b.sub("xc", x, b.reduce_mean("mean", x, axis=D))
    cube = b.mul("cube", b.mul("square", xc, xc), xc)
    b.output("y", b.add("sum", b.mul("weighted", cube, gamma), b.neg("minus", x)))


def two_results(b: GraphBuilder) -> None:
    """A cotangent for each of them."""
    x, z = b.input("x", M, D), b.input("z", D)
    p = b.mul("p", x, z)
    b.output("y", b.mul("q", p, x))
    b.output("other", b.add("sum", p, x))


def unit_length(b: GraphBuilder) -> None:
    """A root that is divided by."""
    x = b.input("x", M, D)
    b.output("y", b.div("q", x, b.sqrt("n", b.reduce_sum("s", b.mul("x2", x, x), axis=D))))


def column_centred(b: GraphBuilder) -> None:
    """A mean over the rows."""
    x = b.input("x", M, D)
    xc = b.sub("xc", x, b.reduce_mean("mean", x, axis=M))
    b.output("y", b.mul("xc2", xc, xc))


def zero_centred(b: GraphBuilder) -> None:
    """gamma + 1, subtracted from a number; a row parameter; a size."""
    x, gamma, shift = b.input("x", M, D), b.input("gamma", D), b.input("shift", M)
    p = b.mul("p", x, b.add("weight", gamma, b.number("one", 1.0)))
    q = b.sub("q", b.number("two", 2.0), b.sub("moved", p, shift))
    b.output("y", b.mul("z", q, b.size("d_length", D, b.compute)))


def cancels(b: GraphBuilder) -> None:
    """The gradient in z is zero, and says so in the shape of z."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    b.output("y", b.div("q", b.mul("p", x, z), z))


def moved_sums(b: GraphBuilder) -> None:
    """A number per row and one per column, each counted as often as its sum has terms."""
    x, shift, beta = b.input("x", M, D), b.input("shift", M), b.input("beta", D)
    of_row = b.reduce_sum("of_row", b.add("row_moved", x, shift), axis=D)
    of_column = b.reduce_sum("of_column", b.add("column_moved", x, beta), axis=M)
    b.output("y", b.mul("y32", of_row, of_column))


OWN = [gated, scaled, quotient, residual, two_results, unit_length, column_centred, zero_centred, cancels, moved_sums]


@pytest.mark.parametrize("describe", OWN)
def test_the_backward_of_a_graph_of_ones_own(describe: Callable[[GraphBuilder], None]) -> None:
    spec = make_spec(Definition(describe.__name__, describe), "bwd", {"d": 5, "dtype": "f64"})
    forward = spec.with_direction("fwd").graph()
    inputs = draw(forward, 4, spec.d)
    saved = interpret(forward, inputs)
    outputs = spec.definition.outputs(spec.options)
    given = np.stack([draw(forward, 4, spec.d, seed)["x"] for seed in range(1, len(outputs) + 1)])
    cotangents = {f"d{name}": ct for name, ct in zip(outputs, given, strict=True)}
    found = interpret(spec.graph(), {**inputs, **saved, **cotangents})
    assert list(found) == [f"d{p.name}" for p in forward.params]

    def function(**at: Array) -> Array:
        results = interpret(forward, at)
        return np.stack([results[name] for name in outputs])

    for p in forward.params:
        expected = differences(function, inputs, p.name, 1e-3, dy=given)
        scale = np.abs(expected).max() + np.abs(given).max()
        np.testing.assert_allclose(found[f"d{p.name}"], expected, rtol=0, atol=1e-9 * scale, err_msg=p.name)


def test_what_is_cut_into_segments_has_no_derivative() -> None:
    measured = passes.place_spread(centred(), 65536)
    with pytest.raises(DerivativeError) as error:
        passes.vjp(measured, ("x",))
    assert str(error.value) == (
        "graph @f: 'segment_sum' has no derivative; only passes behind the derivation write it.\n"
        "    %x_sums : f32[M, S] = segment_sum %x"
    )


def test_fma_has_the_derivative_of_a_product_and_a_sum() -> None:
    fused = graph(XR, "%y : f32[M, D] = fma %x, %w, %w", "%y")
    apart = graph(XR, "%p : f32[M, D] = mul %x, %w", "%y : f32[M, D] = add %p, %w", "%y")
    found, expected = (passes.vjp(g, ("x", "w")) for g in (fused, apart))
    inputs = draw(expected, 5, 9)
    for name, value in interpret(expected, inputs).items():
        np.testing.assert_allclose(interpret(found, inputs)[name], value, rtol=1e-5)


def test_a_sum_of_products_has_the_derivative_of_its_parts() -> None:
    dot = graph(XR, "%s : f32[M] = reduce_dot %x, %w {axis=D}", "%y : f32[M, D] = mul %x, %s", "%y")
    apart = graph(
        XR, "%p : f32[M, D] = mul %x, %w", "%s : f32[M] = reduce_sum %p {axis=D}", "%y : f32[M, D] = mul %x, %s", "%y"
    )
    found, expected = (passes.vjp(g, ("x", "w")) for g in (dot, apart))
    inputs = draw(expected, 5, 9)
    simplified = interpret(passes.simplify(found, found.params[0].name), inputs)
    for name, value in interpret(expected, inputs).items():
        np.testing.assert_allclose(interpret(found, inputs)[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(simplified[name], value, rtol=1e-5, atol=1e-6)


def random_forward(seed: int) -> Graph:
    """A graph of a dozen random equations over inputs of every shape; divisors and roots stay off zero."""
    rng = random.Random(seed)
    b = Builder("random_fwd")
    values = [b.param("x", F64, M, D), b.param("z", F64, M, D), b.param("g", F64, D), b.param("w", F64, M)]
    for _ in range(12):
        a, c = rng.choice(values), rng.choice(values)
        match rng.choice(["add", "sub", "mul", "mul", "mul", "div", "neg", "reduce", "root", "number", "expand"]):
            case "add" | "sub" | "mul" as op:
                values.append(b.emit(op, op, (a, c)))
            case "div":
                values.append(b.div("q", a, b.add("below", b.mul("square", c, c), b.const("one", 1.0, F64))))
            case "neg":
                values.append(b.neg("minus", a))
            case "reduce" if a.type.axes:
                op, axis = rng.choice(["reduce_sum", "reduce_mean"]), rng.choice(a.type.axes)
                values.append(b.emit(op, "total", (a,), axis=axis))
            case "root":
                below = b.add("below", b.mul("square", a, a), b.const("one", 1.0, F64))
                values.append(b.emit(rng.choice(["sqrt", "rsqrt"]), "root", (below,)))
            case "number":
                values.append(b.const("number", rng.choice([2.0, 0.5, -1.0]), F64))
            case "expand" if len(a.type.axes) == 1:
                values.append(b.expand("wide", a, axis=M if a.type.axes == (D,) else D))
    result = next(v for v in reversed(values) if v.type.axes == (M, D))
    return b.build(b.cast("y", result, to=F64))


@pytest.mark.parametrize("block", range(6))
def test_simplify_keeps_the_gradient_of_random_graphs(block: int) -> None:
    compared = 0
    for seed in range(100 * block, 100 * block + 100):
        forward = random_forward(seed)
        live = upstream(forward.eqns, forward.results)
        raw = passes.vjp(forward, tuple(p.name for p in forward.params if p in live))
        inputs = draw(raw, 4, 5, seed)
        expected = interpret(raw, inputs)
        for name, value in interpret(passes.simplify(raw, "dy"), inputs).items():
            if np.isfinite(expected[name]).all():
                scale = max(1.0, float(np.abs(expected[name]).max()))
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-8 * scale, err_msg=str(seed))
                compared += 1
    assert compared > 100
