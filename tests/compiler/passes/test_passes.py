"""If these fail, a pass writes something else, changes what is computed, or orders sums in another way."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import graph_texts
import lngen
import sampling
from graph_names import dtypes_of, whole_heads
from lngen.compiler import passes
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import F32, F64, Axis, D, Graph, M, is_sum, parse
from lngen.compiler.ir.numerics import Array
from lngen.compiler.ir.places import depths
from lngen.compiler.lower import lower
from lngen.compiler.passes import order
from lngen.compiler.passes.order import column_order, orders, row_order, rule_of
from lngen.compiler.problem import Schedule, is_legal, parse_schedule, problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import Spec, parse_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from plans import run_checked

V1 = rule_of("v1")
FILE = Path(__file__).parent / "passes.txt"


def test_passes(pytestconfig: pytest.Config) -> None:
    """``pytest --update`` writes what passes make of the graphs now."""
    text = FILE.read_text(encoding="utf-8")
    if pytestconfig.option.update:
        FILE.write_text(graph_texts.rewritten(text), encoding="utf-8")
    else:
        assert graph_texts.rewritten(text) == text


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
    ("softmax.bwd,save=none", "dy x", "dx", [1, 2], 0),  # of e behind the maximum, then of dy * y
    ("log_softmax.bwd,save=none", "dy x", "dx", [0, 1], 0),  # of dy, and of e behind the maximum
])  # fmt: skip
def test_only_what_is_asked_for_stays_in_few_phases(
    spec: str, params: str, results: str, rows: list[int], columns: int
) -> None:
    head, _, tail = spec.partition(",")
    for dtype in dtypes_of(head.partition(".")[0], "bf16", "f64"):
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
    """Inputs for every stage of the spec: those of forward, its results, and their cotangents."""
    forward = spec.with_direction("fwd").forward()
    inputs = draw(forward, rows, spec.d)
    saved = interpret(forward, inputs)
    rng = np.random.default_rng(1)
    return {**inputs, **saved, **{f"d{n}": rng.normal(0.7, 1, a.shape).astype(a.dtype) for n, a in saved.items()}}


@pytest.mark.parametrize(("name", "dtype"), [(n, t) for n in GRAPHS for t in dtypes_of(n, "f32", "f64")])
def test_every_pass_keeps_the_result(name: str, dtype: str) -> None:
    """What is computed again has the bits of what is saved."""
    d = whole_heads(name, 37)
    whole = every_input(parse_spec(f"{name}.bwd:d={d},dtype={dtype}"))
    graphs = {}
    for way, option in (("fwd", ""), ("bwd", ""), ("bwd", ",save=none")):
        trace = parse_spec(f"{name}.{way}:d={d},dtype={dtype}{option}").trace()
        graphs[way + option] = [*trace.values()][-1]
        stages = [(n, interpret(g, whole)) for n, g in trace.items() if n != "vjp" or way == "bwd"]
        for (_, before), (stage, after) in pairwise(stages):
            for result, value in after.items() if stage != "vjp" else ():  # which is of another function
                tolerance = 0 if stage in ("cse", "decompose", "save") else 1e-5 if dtype == "f32" else 1e-13
                most = np.abs(before[result]).max()
                np.testing.assert_allclose(value, before[result], rtol=0, atol=tolerance * most, err_msg=stage)
    whole |= interpret(graphs["fwd"], whole)
    saved = interpret(graphs["bwd"], whole)
    for result, value in interpret(graphs["bwd,save=none"], whole).items():
        np.testing.assert_array_equal(value, saved[result])


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
def test_a_statistic_that_is_computed_again_has_the_order_of_the_forward(dtype: str) -> None:
    for d in (4096, 7176, 16384, 40000):
        forward = parse_spec(f"layernorm.fwd:d={d},dtype={dtype}").graph()
        again = parse_spec(f"layernorm.bwd:d={d},dtype={dtype},save=none").graph()
        assert orders(forward, d)[0] == orders(again, d)[0]


# ---- the order of sums ----

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


BACKWARD = "layernorm.bwd:d=324,dtype=f32,blocks=20"
FORWARD = "rmsnorm.fwd:d=12296,dtype=f32"
CENTRED = "layernorm.fwd:d=12296,dtype=f32"
ROWS = {BACKWARD: 150, FORWARD: 20, CENTRED: 20}


def edited(graph: Graph, old: str, new: str, count: int = 0) -> Graph:
    """The graph whose text has ``new`` in every equation that had ``old``, or in the first ``count`` of them."""
    text = str(graph)
    assert re.search(old, text), (old, text)
    return parse(re.sub(old, new, text, count=count))


# What is edited in the text of which spec, and how.
EDITS = {
    "chunk": (BACKWARD, "chunk=4", "chunk=2"),
    "run": (BACKWARD, "chunk=4,", "chunk=4, run=2,"),
    "segment": (FORWARD, r"segment=\d+", "segment=2056"),
    "interleave of segments": (FORWARD, "interleave=4", "interleave=1"),
    "segment of centred sums": (CENTRED, r"segment=\d+", "segment=2056"),
    "interleave of centred sums": (CENTRED, "interleave=4", "interleave=1"),
    "chunk of centred sums": (CENTRED, "chunk=4", "chunk=2"),
    "groups": (BACKWARD, r"groups=\d+", "groups=2"),
    "blocks": (BACKWARD, r"blocks=\d+", "blocks=5"),
    "interleave of blocks": (BACKWARD, r"interleave=\d+", "interleave=2"),
}


@sampling.rotating("what", EDITS)
def test_another_attribute_is_other_bits_and_kernels_follow(what: str) -> None:
    text, old, new = EDITS[what]
    spec, rows = parse_spec(text), ROWS[text]
    graph, inputs = edited(spec.graph(), old, new), random_inputs(spec, rows)
    expected = interpret(graph, inputs)
    assert mismatches(expected, interpret(spec.graph(), inputs)), "the attribute decides bits"
    outcome = run_plan(lower(spec, ranked(problem(graph, spec.d))[0], graph), inputs, rows=rows)
    assert not outcome.findings
    assert not mismatches(outcome.results, expected)


def test_the_order_is_a_key_of_the_spec_and_part_of_the_graph() -> None:
    spec = parse_spec(f"{FORWARD},order=v1")
    assert spec == parse_spec(FORWARD)
    assert spec.graph().attrs == (("order", "v1"),)
    assert parse(str(spec.graph())) == spec.graph()


# ---- blocks=, which says how many blocks share the rows ----

BASE = Schedule("registers", threads=1, rows_per_block=1, vec=1)


def test_the_number_of_blocks_is_part_of_the_graph_and_of_the_name() -> None:
    spec = parse_spec("layernorm.bwd:d=4096,dtype=bf16,blocks=108")
    assert str(spec) == "layernorm.bwd:d=4096,dtype=bf16,blocks=108"
    assert spec.slug.endswith("_blocks108")
    assert "blocks=108" in str(spec.graph())
    assert problem(spec.graph(), 4096).blocks == 108
    assert "blocks=108" not in str(parse_spec("layernorm.bwd:d=4096,dtype=bf16").graph())
    norm = lngen.compile("layernorm", d=64, blocks=7)
    assert (norm.spec("bwd").blocks, norm.spec("fwd").blocks) == (7, None)


@sampling.rotating(("spec", "schedule"), [
    ("d=8192,blocks=5", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes"),
    ("d=8192,blocks=6", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes,single_launch=yes"),
    ("d=4096,blocks=3", "form=tma,threads=256,rows_per_block=2,vec=8,stages=3,tma_store=yes"),
    ("d=1024,blocks=2", "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes"),
])  # fmt: skip
def test_kernels_keep_to_it(spec: str, schedule: str) -> None:
    built = parse_spec(f"layernorm.bwd:{spec},dtype=bf16")
    chosen = parse_schedule(schedule, BASE)
    assert is_legal(chosen, problem(built.graph(), built.d))
    assert built.blocks
    run_checked(lower(built, chosen), 3 * built.blocks * problem(built.graph(), built.d).groups + 1)


# ---- the rule ----


def test_every_number_of_the_rule_says_why() -> None:
    text = (Path(order.__file__).parent / "order_v1.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    assert data.pop("order") == "v1"
    entries = [e for entry in data.values() for e in (entry if isinstance(entry, list) else [entry])]
    assert all(len(e["why"]) > 20 for e in entries)
    order.rule_of("v1")
    with pytest.raises(FileNotFoundError):
        order.rule_of("v0")


@pytest.mark.parametrize(("old", "new"), [
    ("is = 16\n", "is = 0\n"), ("is = 16\n", 'is = "16"\n'), ('why = "a segment', 'because = "a segment'),
])  # fmt: skip
def test_a_rule_with_a_wrong_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str
) -> None:
    text = (Path(order.__file__).parent / "order_v1.toml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "order_v1.toml").write_text(text.replace(old, new))
    monkeypatch.setattr(order, "__file__", str(tmp_path / "order.py"))
    with pytest.raises(ValueError, match="is expected to have a whole number"):
        order.rule_of.__wrapped__("v1")  # not what an earlier test read, and nothing that a later one finds
