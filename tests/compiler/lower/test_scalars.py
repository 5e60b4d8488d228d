"""Reductions to a number and maxima over rows: if these fail, their kernels, order or derivatives are wrong."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import lngen
from commands import call
from fake_gpu import FakeGpu
from lngen.compiler.contract import described
from lngen.compiler.devices import default_device
from lngen.compiler.emit import emit
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, Graph, M, parse, sums
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.lower import lower
from lngen.compiler.lower.finish import requested_shared
from lngen.compiler.problem import problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import make_spec, parse_spec
from lngen.proof.check.differences import gradient_excess, result_excess
from lngen.proof.check.inputs import mismatches, random_inputs, same_bits
from lngen.proof.check.oracles import SLACK, excess
from number_graphs import (
    BACKWARD,
    NUMPY,
    Describe,
    amax,
    columns,
    everything,
    has_bits,
    largest,
    loss,
    scaled,
    schedules,
    spec_of,
    weights,
    wide,
)

# ---- the mathematics ----


@pytest.mark.parametrize("describe", [*NUMPY])
def test_results_are_within_the_rounding_of_numpys_in_float64(describe: Describe) -> None:
    for dtype, d in product(("f16", "bf16", "f32", "f64"), (1, 37, 1000)):
        spec = spec_of(describe, d=d, dtype=dtype)
        for rows in (1, 3, 37):
            inputs = random_inputs(spec, rows)
            got, allowed = interpret(spec.graph(), inputs), evaluate(spec.forward(), inputs)
            for name, want in NUMPY[describe](**{n: wide(a) for n, a in inputs.items()}).items():
                assert got[name].shape == np.shape(want)
                assert excess(got[name], np.asarray(want), SLACK * allowed[name].error) <= 1, (dtype, d, name, rows)


@pytest.mark.parametrize("describe", [*NUMPY])
def test_gradients_are_the_differences_of_the_forward(describe: Describe) -> None:
    spec = spec_of(describe)
    names = spec.differentiated
    forward = spec.forward()
    inputs = tuple(p.name for p in forward.params)
    backward = replace(spec, direction="bwd", wrt=inputs, of=tuple(n for n in names if n != "count"))
    assert all(value <= 1 for value in gradient_excess(backward).values()), gradient_excess(backward)


@pytest.mark.parametrize("describe", [*BACKWARD])
def test_gradients_that_kernels_compute_are_within_rounding(describe: Describe) -> None:
    for dtype, rows in product(("f16", "bf16", "f32", "f64"), (1, 3, 37)):
        spec = spec_of(describe, "bwd", dtype=dtype)
        inputs = random_inputs(spec, rows)
        found = result_excess(spec, inputs, interpret(spec.graph(), inputs))
        assert all(value <= 1 for value in found.values()), (dtype, rows, found)


def test_the_derivative_in_a_number_adds_over_rows_first() -> None:
    """So it shares the column sums of the gradients in gamma and beta, and one number per column is left to add."""
    graph = spec_of(scaled, "bwd").graph()
    eqns = {e.out.name: e for e in graph.eqns}
    number = next(e for e in graph.eqns if e.op in ("reduce_sum", "reduce_dot") and not e.out.type.axes)
    assert number.axis is D
    assert [eqns[a.name].axis for a in number.args if eqns[a.name].op == "reduce_dot"] == [M]


def test_a_maximum_over_rows_shares_its_cotangent_among_ties() -> None:
    x = np.array([[1.0, -0.0, 2.0], [3.0, 0.0, 2.0], [3.0, -1.0, 2.0]])
    spec = make_spec(Definition("largest", largest), "bwd", {"d": 3, "dtype": "f64"})
    saved = interpret(spec.with_direction("fwd").graph(), {"x": x})
    inputs = {"x": x, "dmost": np.array([6.0, 6.0, 6.0]), **saved}
    found = interpret(spec.graph(), {p.name: inputs[p.name] for p in spec.graph().params})["dx"]
    np.testing.assert_array_equal(found, [[0, 3, 2], [3, 3, 2], [3, 0, 2]])


def test_a_maximum_over_rows_keeps_nan_and_has_plus_zero_above_minus_zero() -> None:
    x = np.array([[-0.0, -0.0, -0.0, np.nan, -np.inf], [0.0, -0.0, -1.0, 1.0, -np.inf]])
    want = np.array([0.0, -0.0, -0.0, np.nan, -np.inf])
    assert same_bits(sums.column_max(x), want).all()
    assert same_bits(sums.column_max(x[::-1]), want).all()


def test_nothing_has_a_sum_of_plus_zero_a_largest_of_minus_infinity_and_no_mean() -> None:
    spec = spec_of(everything)
    got = interpret(spec.graph(), random_inputs(spec, 0))
    assert np.isnan(got["by_rows"])
    assert np.isnan(got["by_columns"])
    spec = spec_of(amax)
    got = interpret(spec.graph(), random_inputs(spec, 0))
    assert (got["by_rows"], got["by_columns"]) == (-np.inf, -np.inf)
    got = interpret(spec_of(columns).graph(), random_inputs(spec_of(columns), 0))
    assert (got["most"] == -np.inf).all()
    assert same_bits(got["sum"], np.zeros(37, np.float32)).all()
    spec = spec_of(weights)
    got = interpret(spec.graph(), random_inputs(spec, 0))
    assert same_bits(got["rows"], np.float32(0.0).reshape(())).all()
    assert (got["most_of_rows"], got["count"]) == (-np.inf, 0)


# ---- the kernels ----


@pytest.mark.parametrize(("d", "form"), [(1024, "cp_async"), (8193, "multipass")])
@pytest.mark.parametrize(("wrt", "why"), [("x+alpha+gamma", 1), ("x+gamma", 0)])
def test_the_text_says_why_a_number_has_a_sum_for_each_column(d: int, form: str, wrt: str, why: int) -> None:
    spec = parse_spec(f"dyt.bwd:d={d},dtype=bf16,wrt={wrt}")
    plan = lower(spec, next(s for s in ranked(problem(spec.graph(), spec.d)) if s.form == form))
    text = re.sub(r"\n *// +", " ", emit(plan))
    said = re.findall(r"Only a sum over these columns .* order=v1.*\n\s*float (\w+)_sums_\[", text)
    assert said == ["sum_dy_x_slope"] * why


def test_a_result_that_a_number_needs_is_read_where_it_is() -> None:
    """No second copy of it in the workspace."""

    def described(b: GraphBuilder) -> None:
        mean = b.statistic(b.reduce_mean("mean", b.input("x", M, D), axis=D))
        b.output("total", b.reduce_sum("t", mean, axis=M))

    spec = spec_of(described)
    plan = lower(spec, schedules(spec)[0])
    assert [str(b) for b in plan.workspace] == []
    assert {a.name: (a.kind, a.const) for a in plan.kernels[-1].arguments}["mean_ptr_"] == ("output", True)


def test_the_finish_is_spread_as_without_a_number() -> None:
    spec = spec_of(scaled, "bwd", d=4096)
    plan = lower(spec, schedules(spec)[0])
    without = replace(plan, kernels=plan.kernels[:-1])
    registers = {k.name: 128 for k in plan.kernels}
    found = requested_shared(plan, registers, default_device())
    assert found.pop(plan.kernels[-1].name) == 0
    assert found == requested_shared(without, registers, default_device())
    assert max(found.values()) > 0


# ---- the order ----


def edited(graph: Graph, old: str, new: str) -> Graph:
    """The graph with other attributes in the sums to a number."""
    lines = str(graph).splitlines()
    changed = [re.sub(old, new, line) if "f32[]" in line.split("=")[0] else line for line in lines]
    assert changed != lines, (old, str(graph))
    return parse("\n".join(changed))


EDITS = {
    "chunk": (everything, "chunk=4", "chunk=2"),
    "run": (everything, "chunk=4, ", "chunk=4, run=2, "),
    "segment": (everything, r"segment=\d+", "segment=256"),
    "interleave of segments": (everything, r"chunk=4, segment=\d+", "chunk=4, interleave=2, segment=64"),
    "groups": (loss, r"groups=\d+", "groups=3"),
    "blocks": (loss, r"blocks=\d+", "blocks=5"),
    "interleave of blocks": (loss, r"interleave=\d+", "interleave=3"),
    "more groups than a warp": (loss, r"groups=\d+", "groups=512"),
    "more blocks than threads": (loss, r"groups=\d+", "groups=2"),
}


@pytest.mark.parametrize("what", EDITS)
def test_another_attribute_is_other_bits_and_kernels_follow(what: str) -> None:
    describe, old, new = EDITS[what]
    spec, rows = spec_of(describe, d=1000), 1100 if describe is loss else 3
    if describe is loss:
        spec = spec_of(describe, d=8)
    graph = edited(spec.graph(), old, new)
    different = False
    for seed in range(4):
        inputs = random_inputs(spec, rows, seed)
        different |= bool(mismatches(interpret(graph, inputs), interpret(spec.graph(), inputs)))
    assert different, "the attribute decides bits"
    has_bits(spec, schedules(spec)[0], rows, graph)


def test_a_sum_without_attributes_is_added_from_left_to_right_in_segments_of_one_chunk() -> None:
    spec = spec_of(everything)
    graph = parse(re.sub(r", (blocks|chunk|groups|interleave|run|segment)=\d+", "", str(spec.graph())))
    has_bits(spec, next(s for s in schedules(spec, graph) if s.form == "registers"), 37, graph)


@pytest.mark.parametrize("d", [1, 37, 1000, 4096, 12296, 65536])
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_the_sum_of_a_vector_has_the_order_of_a_row_of_f32(d: int, dtype: str) -> None:
    def row(b: GraphBuilder) -> None:
        b.output("y", b.reduce_sum("s", b.input("x", M, D), axis=D))

    def vector(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", b.reduce_sum("s", b.reduce_sum("column", x, axis=M), axis=D))
        b.output("z", b.reduce_sum("t", b.reduce_sum("row", x, axis=D), axis=M))

    like = next(e for e in spec_of(row, d=d, dtype="f32").graph().eqns if e.op == "reduce_sum")
    eqns = {e.out.name: e for e in spec_of(vector, d=d, dtype=dtype).graph().eqns}
    assert eqns["s"].attrs == like.attrs
    assert eqns["t"].attrs == eqns["column"].attrs


def test_a_forward_keeps_its_bits_when_it_also_averages_a_loss() -> None:
    """A sum over rows of numbers of rows makes no row shorter: the order of the rows' sums stays."""

    def rows(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        xc = b.sub("xc", x, b.reduce_mean("mean", x, axis=D))
        var = b.reduce_mean("var", b.mul("sq", xc, xc), axis=D)
        b.output("y", b.mul("y32", xc, b.rsqrt("rstd", b.add("veps", var, b.eps()))))

    def averaged(b: GraphBuilder) -> None:
        rows(b)
        b.output("loss", b.reduce_mean("l", next(e.out for e in b.eqns if e.out.name == "var"), axis=M))

    for d in (1000, 20000):
        one, two = (spec_of(describe, d=d, dtype="bf16") for describe in (rows, averaged))
        inputs = random_inputs(one, 3)
        got = interpret(two.graph(), inputs)
        assert same_bits(got["y"], interpret(one.graph(), inputs)["y"]).all()


# ---- around the kernels ----


def test_numbers_on_a_gpu_are_arrays_of_no_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    norm = lngen.compile(scaled, d=8)
    x, alpha, vector = gpu.array("f32", 4, 8), gpu.array("f32"), gpu.array("f32", 8)
    y, saved = norm.forward(x, alpha, vector, vector)
    dx, dalpha, dgamma, _ = norm.backward(y, saved)
    assert [a.shape for a in (dx, dalpha, dgamma)] == [(4, 8), (), (8,)]
    assert [k.role for k in gpu.launched[-1].plan.kernels] == ["rows", "finish", "numbers"]


@pytest.mark.parametrize("on", ["ptx"])
def test_numbers_are_files_of_no_dimensions(tmp_path: Path, on: str) -> None:
    graph = tmp_path / "loss.graph"
    graph.write_text(str(spec_of(loss).forward()), encoding="utf-8")
    x, weight = (np.random.default_rng(1).normal(size=s).astype(np.float32) for s in ((3, 8), (3,)))
    for name, array in (("x", x), ("weight", weight)):
        np.save(tmp_path / f"{name}.npy", array)
    given = ",".join(f"{name}={tmp_path}/{name}.npy" for name in ("x", "weight"))
    where = f"loss={tmp_path}/loss.npy,rows={tmp_path}/rows.npy"
    done = call("run", f"{graph}.fwd:d=8", "--in", given, "--out", where, "--on", on)
    assert done.exit_code == 0, done.output
    found = np.load(tmp_path / "loss.npy")
    assert (found.shape, found.dtype) == ((), np.float32)
    assert found == pytest.approx((np.square(x).mean(1) * weight).mean(), rel=1e-6)
    assert np.load(tmp_path / "rows.npy").shape == (3,)


def test_a_manifest_has_numbers_without_axes() -> None:
    found = described(lower(spec_of(everything), schedules(spec_of(everything))[0]))
    number = next(t for t in found["tensors"] if t["name"] == "by_rows")
    assert (number["axes"], number["shape"], number["strides"], number["alignment"]) == ([], [], [], 4)
    assert found["kernels"][-1]["launch_for_no_rows"]
