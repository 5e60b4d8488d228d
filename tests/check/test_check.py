"""If these fail, ``lngen check`` passes what is wrong, refuses what is right, or does not say why."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import sampling
from lngen.check import matrix
from lngen.check import spec_checks as check
from lngen.check.differences import gradient_excess
from lngen.check.inputs import POISON, forward_inputs, random_inputs, same_bits
from lngen.check.oracles import closed_form
from lngen.check.spec_checks import executed
from lngen.compile import Compilation, KernelSet
from lngen.errors import LowerError, MissingError, VerifyError
from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.graphs.norms import layernorm, rmsnorm
from lngen.interpret import interpret
from lngen.ir import BF16, F64, OPS, D, DType, Graph, M, Value, parse
from lngen.ir.evaluate import evaluate
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.ir.real import Real
from lngen.problem import Schedule
from lngen.spec import Spec, make_spec, parse_spec
from lngen.toolchain import Binary, Resources

OPTIONS = ("d=1,dtype=f32", "d=33,dtype=bf16,weight=f32", "d=768,dtype=f64", "d=64,gamma=no,save=none")


@sampling.grid(("norm", "way", "options"), product(("layernorm", "rmsnorm"), ("fwd", "bwd"), OPTIONS))
def test_what_is_right_passes(norm: str, way: str, options: str) -> None:
    pytest.importorskip("cupy")
    spec = parse_spec(f"{norm}.{way}:{options}")
    results = list(check.check_spec(spec, on="interpreter", rows=(0, 1, 17), schedules=2))
    assert [r.what for r in results].count("oracle") == 2
    assert {r.what for r in results} >= {"oracle", "compile"}
    assert all(r.ok for r in results)


@pytest.mark.parametrize("text", ["layernorm.fwd:d=33,eps=run", "l2norm.bwd:d=8,guard=max,eps=run,save=none"])
def test_an_eps_at_run_time_is_checked_with_several_values(text: str) -> None:
    """The oracle's bounds are for the default; bits are compared for others as well, 0 among them."""
    pytest.importorskip("cupy")
    results = list(check.check_spec(parse_spec(text), on="ptx", rows=(0, 3)))
    assert all(r.ok for r in results), [r for r in results if not r.ok]
    passed = [(r.rows, r.detail.partition(":")[0]) for r in results if r.what == "ptx"]
    assert passed == [(0, "eps=1e-05"), (3, "eps=1e-05"), (3, "eps=0"), (3, "eps=1e-12"), (3, "eps=0.5")]
    assert [r.rows for r in results if r.what in ("oracle", "float64")] == [3]


def test_a_kernel_that_ignores_the_eps_of_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr("lngen.ptx.call.bits_of", lambda value: int(np.float32(1e-5).view(np.uint32)))
    results = list(check.check_spec(parse_spec("rmsnorm.fwd:d=33,eps=run"), on="ptx", rows=(3,)))
    assert [r.detail.partition(":")[0] for r in results if not r.ok] == ["eps=0", "eps=1e-12", "eps=0.5"]


@pytest.mark.parametrize("text", ["layernorm.fwd:d=64", "layernorm.bwd:d=64,dtype=bf16", "rmsnorm.bwd:d=64,dtype=f64"])
def test_a_wrong_number_in_any_result_is_caught(text: str) -> None:
    spec = parse_spec(text)
    inputs = random_inputs(spec, 5)
    for name in [r.name for r in spec.graph().results]:
        results = interpret(spec.graph(), inputs)
        results[name] = results[name].copy()
        results[name].flat[-1] *= results[name].dtype.type(1.02)
        found = check.mathematics(spec, 5, inputs, results)
        assert not found.ok
        assert name in found.detail


Describe = Callable[[GraphBuilder], None]


def scaled(b: GraphBuilder) -> None:
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    total = b.reduce_mean("ms", b.mul("x2", x, x), axis=D)
    b.output("y", b.mul("y32", b.div("xhat", x, b.add("raised", total, b.number("one", 1.0))), gamma))


def two_outputs(b: GraphBuilder) -> None:
    """Kinks, an input of a dtype of its own, two outputs, a statistic."""
    x, r = b.input("x", M, D), b.cast("r32", b.param("residual", F64, M, D), to=F64)
    h = b.add("h", b.cast("x64", x, to=F64), r)
    most = b.reduce_max("most", h, axis=D)
    b.output("y", b.relu("kept", b.sub("below", h, b.mul("half", most, b.const("part", 0.5, F64)))))
    b.output("h_out", h)
    b.statistic(most)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("d", [1, 64, 4096])
@pytest.mark.parametrize("describe", [scaled, layernorm, rmsnorm, two_outputs])
def test_any_graph_is_held_against_itself_in_float64(describe: Describe, d: int, dtype: str) -> None:
    for direction in ("fwd", "bwd"):
        spec = make_spec(Definition("own", describe), direction, {"d": d, "dtype": dtype})
        inputs = random_inputs(spec, 3)
        found = check.mathematics(spec, 3, inputs, interpret(spec.graph(), inputs))
        assert found.ok, found.detail
        assert found.what == "float64"
        formulas = check.formulas(spec) if direction == "bwd" else found
        assert formulas.ok, formulas.detail


def test_a_graph_of_ones_own_is_checked_in_both_ways() -> None:
    pytest.importorskip("cupy")
    spec = make_spec(Definition("own", two_outputs), "bwd", {"d": 64})
    results = list(check.check_spec(spec, on="interpreter", rows=(0, 3)))
    assert [r.what for r in results] == ["differences", "float64", "compile"]
    assert all(r.ok for r in results)


def test_a_graph_of_ones_own_that_is_called_like_a_norm_is_checked_as_itself() -> None:
    def layernorm(b: GraphBuilder) -> None:
        b.output("y", b.mul("nothing", b.input("x", M, D), b.number("zero", 0.0)))

    spec = make_spec(Definition("layernorm", layernorm), "fwd", {"d": 64})
    inputs = random_inputs(spec, 5)
    results = interpret(spec.graph(), inputs)
    assert check.mathematics(spec, 5, inputs, results).ok  # 0 is what it says
    builtin = parse_spec("layernorm.fwd:d=64,gamma=no,beta=no")
    zeros = {n: np.zeros_like(a) for n, a in interpret(builtin.graph(), inputs).items()}
    assert not check.mathematics(builtin, 5, inputs, zeros).ok


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("describe", [scaled, two_outputs])
def test_a_wrong_result_of_any_graph_is_caught(describe: Describe, direction: str) -> None:
    """Zeros in place of a result, and one number that is off by eight roundings of its dtype."""
    spec = make_spec(Definition("own", describe), direction, {"d": 64, "dtype": "bf16"})
    inputs = random_inputs(spec, 5)
    right = interpret(spec.graph(), inputs)
    assert check.mathematics(spec, 5, inputs, right).ok
    for name, value in right.items():
        off = value.copy()
        off.flat[np.abs(off.astype(np.float64)).argmax()] *= off.dtype.type(1 + 8 * BF16.roundoff)
        for wrong in (np.zeros_like(value), off):
            found = check.mathematics(spec, 5, inputs, right | {name: wrong})
            assert not found.ok
            assert name in found.detail


def test_a_pass_that_loses_a_term_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward is held against what was described, not against what the passes made of it."""
    spec = make_spec(Definition("own", layernorm), "fwd", {"d": 64})
    graph, inputs = spec.graph(), random_inputs(spec, 5)
    centred = next(e for e in graph.eqns if e.op == "sub")
    kept = replace(graph, eqns=tuple(replace(e, op="add") if e is centred else e for e in graph.eqns))
    assert check.mathematics(spec, 5, inputs, interpret(graph, inputs)).ok
    assert not check.mathematics(spec, 5, inputs, interpret(kept, inputs)).ok


@pytest.mark.parametrize("lost", ["dx", "dgamma"])
def test_differences_catch_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    spec = parse_spec("rmsnorm.bwd:d=64")
    true = gradient_excess(spec)
    assert set(true) == {"dx", "dgamma"}
    assert max(true.values()) < 1

    def forgetful(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Real]:
        results = evaluate(graph, inputs)
        return {n: Real(r.value * (1 + 1e-4) if n == lost else r.value, r.error) for n, r in results.items()}

    monkeypatch.setattr("lngen.check.differences.evaluate", forgetful)
    wrong = gradient_excess(spec)
    assert {name for name, ratio in wrong.items() if ratio > 1} == {lost}
    monkeypatch.setattr(
        "lngen.check.differences.evaluate",
        lambda g, i: {n: Real(r.value * (n != lost), r.error) for n, r in evaluate(g, i).items()},
    )
    assert gradient_excess(spec)[lost] > 1  # no gradient at all


def root_of_input(b: GraphBuilder) -> None:
    b.output("y", b.input("x", M, D).sqrt())


def logarithm(b: GraphBuilder) -> None:
    x, w = b.input("x", M, D), b.input("w", D)
    b.output("y", (x * w).log() + b.input("row", M).rsqrt())


def root_of_difference(b: GraphBuilder) -> None:
    """An input is at least 0.25 if it is positive; this no rule finds."""
    b.output("y", (b.input("x", M, D, positive=True) - 0.125).log())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("describe", "drawn"), [(root_of_input, "x"), (logarithm, "x, w, row"), (root_of_difference, "x")]
)
def test_inputs_are_drawn_where_the_graph_is_defined(
    describe: Describe, drawn: str, direction: str, dtype: str
) -> None:
    spec = make_spec(Definition("own", describe), direction, {"d": 37, "dtype": dtype})
    inputs = random_inputs(spec, 5)
    found = [check.mathematics(spec, 5, inputs, interpret(spec.graph(), inputs))]
    found += [check.formulas(spec)] if direction == "bwd" else []
    for result in found:
        assert result.ok, result.detail
        assert result.detail.endswith(f"; drawn positive: {drawn}")
    given = forward_inputs(spec, 5)
    assert all((given[n] > 0.2).all() for n in drawn.split(", "))


def test_a_domain_is_found_in_a_graph_given_as_text() -> None:
    """A declaration is no part of the text; what is found from the equations is."""
    for describe, found in ((logarithm, ("x", "w", "row")), (root_of_difference, ())):
        forward = make_spec(Definition("own", describe), "fwd", {"d": 8}).forward()
        spec = make_spec(Definition.from_graph(parse(str(forward))), "bwd", {"d": 8})
        assert spec.positive_inputs() == found


DOMAINS: dict[str, tuple[Callable[[GraphBuilder, Value, Value], Value], str]] = {
    "sum": (lambda b, x, z: x + z, "xz"),
    "difference": (lambda b, x, z: x - z, ""),
    "sum with a difference": (lambda b, x, z: x + (z - 1), ""),
    "positive number": (lambda b, x, z: x + 1, "x"),
    "negative number": (lambda b, x, z: x + -1.0, ""),
    "square": (lambda b, x, z: x * x + 1e-5, ""),
    "squares": (lambda b, x, z: b.mean(x * x) + z, "z"),
    "product": (lambda b, x, z: x * b.mean(z), "xz"),
    "quotient": (lambda b, x, z: 1 / x, "x"),
    "exponential": (lambda b, x, z: b.sum((x - z).exp()), ""),
    "absolute value": (lambda b, x, z: x.abs() * z, "z"),
    "clamp": (lambda b, x, z: x.clamp(low=0.5, high=2.0), ""),
    "clamp through zero": (lambda b, x, z: x.clamp(low=-0.5, high=2.0), ""),
    "maximum with a number": (lambda b, x, z: x.maximum(0.5), ""),
    "maximum with zero": (lambda b, x, z: x.maximum(0.0), "x"),
    "minimum": (lambda b, x, z: x.minimum(z), "xz"),
    "negative": (lambda b, x, z: -x, ""),
    "root of a root": (lambda b, x, z: x.sqrt(), "x"),
    "dot": (lambda b, x, z: b.reduce_dot("dot", x, z, axis=D), "xz"),
    "dot with itself": (lambda b, x, z: b.reduce_dot("dot", x, x, axis=D), ""),
}


@pytest.mark.parametrize("argument", DOMAINS)
def test_what_has_to_be_positive(argument: str) -> None:
    expression, positive = DOMAINS[argument]

    def describe(b: GraphBuilder) -> None:
        x, z = b.input("x", M, D), b.input("z", M, D)
        b.output("y", expression(b, x, z).log())
        b.output("sum", x + z)

    spec = make_spec(Definition("own", describe), "fwd", {"d": 8})
    assert spec.positive_inputs() == tuple(positive)


def test_named_graphs_have_no_domain() -> None:
    """Their inputs are drawn as ever."""
    for definition in GRAPHS.values():
        assert make_spec(definition, "bwd", {"d": 8}).positive_inputs() == ()


def test_a_result_that_is_no_number_fails_and_says_what_to_declare() -> None:
    def undefined(b: GraphBuilder) -> None:
        x, z = b.input("x", M, D), b.input("z", M, D)
        b.output("y", x * 2)
        b.output("w", (z - 2).log())

    spec = make_spec(Definition("own", undefined), "bwd", {"d": 37})
    found = check.formulas(spec)
    assert not found.ok, "also where a number comes first"
    assert "; inf, nan: a result is no number for the inputs drawn; if some inputs" in found.detail
    assert found.detail.endswith(" have to be positive, declare them: b.input(name, ..., positive=True)")


def test_numbers_without_a_bound_are_skipped_and_said() -> None:
    """The sum of a centred row is 0 within its error: a quotient by it may be any number."""

    def divided(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x / b.sum(x - b.mean(x)))
        b.output("z", x * 2.0)

    spec = make_spec(Definition("own", divided), "fwd", {"d": 37})
    inputs = random_inputs(spec, 3)
    results = interpret(spec.graph(), inputs)
    found = check.mathematics(spec, 3, inputs, results)
    assert (found.ok, found.detail) == (True, "error / bound: y 0, z 0; no bound, skipped: 111 of 111 numbers of y")
    assert not check.mathematics(spec, 3, inputs, results | {"z": -results["z"]}).ok


def test_a_rounding_keeps_its_number_in_differences() -> None:
    """The scale of a quantiser moves every element of its row over a jump of rint."""

    def quantised(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        scale = b.reduce_max("most", abs(x), axis=D) / 127.0
        b.output("y", (x / scale).rint() * scale)

    spec = make_spec(Definition("own", quantised), "bwd", {"d": 4096})
    found = check.formulas(spec)
    assert found.ok, found.detail
    assert found.detail.endswith("; held at its numbers, between which it jumps: rint")


def test_every_op_has_a_meaning_in_real_numbers() -> None:
    bits = {op.name for op in OPS.values() if op.cuda and op.vjp is None}
    assert {op.name for op in OPS.values() if op.real is None} == bits, "only expansions have operations on bits"


@pytest.mark.parametrize("d", [17, 4096, 40_000])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_real_numbers_are_the_closed_form_within_their_bound(direction: str, d: int) -> None:
    """Of f32 results no error is more than the bound, and no bound is much more than what rounding can do."""
    spec = parse_spec(f"layernorm.{direction}:d={d}")
    inputs = random_inputs(spec, 3)
    found = evaluate(spec.graph(), inputs)
    forward = {**forward_inputs(spec, 3), **inputs}
    expected = closed_form("layernorm", forward, dict.fromkeys(found, F64), spec.eps, F64)
    for name, real in found.items():
        scale = np.abs(expected[name].value).max()
        assert np.abs(real.value - expected[name].value).max() < 1e-5 * scale  # statistics were rounded
        assert 0 < real.error.max() < 3e-4 * scale


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_norm_is_made_as_a_user_makes_it(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """An error of lngen in what only ``lngen.compile`` does is not passed over."""

    def fails(spec: Spec) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lngen.runtime.norm.Rebuilt.of", fails)
    with pytest.raises(ZeroDivisionError):
        list(check.check_spec(parse_spec(f"rmsnorm.{direction}:d=8,save=y"), on="interpreter", rows=(1,)))


def test_a_forward_without_a_backward_is_checked() -> None:
    """A value has the name of a gradient."""
    pytest.importorskip("cupy")

    def taken(b: GraphBuilder) -> None:
        b.output("y", b.neg("dx", b.input("x", M, D)))

    spec = make_spec(Definition("taken", taken), "fwd", {"d": 8})
    assert all(r.ok for r in check.check_spec(spec, on="interpreter", rows=(1,)))
    with pytest.raises(VerifyError):
        list(check.check_spec(spec.with_direction("bwd"), on="interpreter", rows=(1,)))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_of_a_graph_without_kernels_the_interpreter_checks_the_mathematics(direction: str) -> None:
    def scaled_by_a_sum(b: GraphBuilder) -> None:
        b.output("y", b.input("x", M, D) * b.sum(b.input("gamma", D)))

    spec = make_spec(Definition("own", scaled_by_a_sum), direction, {"d": 8})
    why = f"^graph @own_{direction}: '%sum_gamma' reduces over D a value that has no rows, and rows depend on it; pass"
    with pytest.warns(UserWarning, match=why):
        found = list(check.check_spec(spec, on="interpreter", rows=(3,)))
    assert [r.what for r in found] == ["differences"] * (direction == "bwd") + ["float64"]
    assert all(r.ok for r in found)
    with pytest.raises(LowerError, match=why):
        next(check.check_spec(spec, on="ptx", rows=(3,)))


def test_only_the_default_schedule_must_not_spill() -> None:
    used = Resources(255, 8, 8, 16, 0, None, 1)
    binary = Binary("sm_90", b"", "", {"k__rows": used})
    spec, schedule = parse_spec("layernorm.fwd:d=64"), Schedule("registers", 32, 4, 4)
    assert not check.compiled(spec, schedule, binary, may_spill=False).ok
    assert check.compiled(spec, schedule, binary, may_spill=True).ok
    result = check.compiled(spec, schedule, binary, may_spill=True)
    assert result.detail == "sm_90: 255 registers in kernel rows, spills"
    assert result.rows is None, "it is of no number of rows"


def test_on_gpu_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "device_count", lambda: 0)
    with pytest.raises(MissingError, match="on=gpu expects a GPU, none was found"):
        list(check.check_spec(parse_spec("layernorm.fwd:d=8"), on="gpu"))


def test_nans_are_one_value_and_zeros_are_two() -> None:
    a = np.array([np.nan, 0.0, 1.0, -0.0], np.float32)
    b = np.array([-np.nan, -0.0, 1.0, -0.0], np.float32)
    assert same_bits(a, b).tolist() == [True, False, True, True]


def test_poison_is_no_result() -> None:
    spec = parse_spec("layernorm.fwd:d=16,dtype=bf16")
    inputs = random_inputs(spec, 7)
    for want in interpret(spec.graph(), inputs).values():
        fresh = np.full(want.nbytes, POISON, np.uint8).view(want.dtype).reshape(want.shape)
        assert not same_bits(fresh, want).any()


# ---- the matrix, without its GPU ----


def test_the_matrix_covers_the_grid() -> None:
    listed = list(matrix.specs())
    texts = [text for text, _ in listed]
    assert len(texts) == 2 * 2 * len(matrix.DTYPES) * len(matrix.FEATURES) + len(matrix.EXTREMES)
    assert any(parse_spec(text).d * max(rows) > 2**31 for text, rows in listed)
    assert {parse_spec(t).dtype.value for t in texts} == {"f16", "bf16", "f32", "f64"}
    assert sum(parse_spec(t).weight is not parse_spec(t).dtype for t in texts) > 500


def test_the_matrix_says_what_it_did_not_reach() -> None:
    entry = matrix.check_entry("layernorm.fwd:d=8", (1,), 5, deadline=0.0)
    assert entry.notes == ["not reached within the budget"]
    done = matrix.Entry("rmsnorm.fwd:d=8", ["a", "b"], [1, 2], numbers=10, differ=1, notes=["y: 1 differ"])
    text = matrix.to_json([entry, done], {"device": "none"})
    data = json.loads(text)
    assert data["not_reached"] == ["layernorm.fwd:d=8"]
    assert (data["launches"], data["numbers_compared"], data["numbers_that_differ"]) == (4, 10, 1)
    assert [e["spec"] for e in data["entries"]] == ["layernorm.fwd:d=8", "rmsnorm.fwd:d=8"]


def test_the_schedules_tried_are_of_every_kind() -> None:
    """Of each spec as many kinds as there is room for, over the grid all of them."""
    texts = [text for text, _ in matrix.specs() if "weight" not in text]
    seen, options = set(), set()
    for text in texts[::10]:
        tried = check.others(Compilation(parse_spec(text)), 5)
        assert len(tried) == len(set(tried)) == 5
        seen |= {
            (s.form, s.cluster > 1, s.single_launch, parse_spec(text).direction, s.row_in_registers) for s in tried
        }
        options |= {
            name
            for s in tried
            for name in ("row_in_registers", "early_release", "dynamic", "acquire_shared")
            if getattr(s, name)
        }
    one_block = {(form, False) for form in ("registers", "tma", "tma_unaligned", "cp_async")}
    kinds = {*one_block, ("tma", True)}
    assert {s[:2] for s in seen} >= {*kinds, ("multipass", False)}
    assert {s[:2] for s in seen if s[2] and s[3] == "bwd"} >= kinds
    assert {s[0] for s in seen if s[4]} == {"tma", "tma_unaligned", "cp_async"}
    assert options == {"row_in_registers", "early_release", "dynamic", "acquire_shared"}
    wide = check.others(Compilation(parse_spec("layernorm.fwd:d=131072,dtype=bf16")), 9)
    assert {s.cluster for s in wide} >= {8, 16}
    assert all(check.others(Compilation(parse_spec("layernorm.fwd:d=8")), n) == [] for n in (0, -1))


def test_no_schedule_is_tried_where_its_instructions_do_not_exist() -> None:
    spec = parse_spec("layernorm.bwd:d=8192,dtype=bf16")
    assert {s.form for s in check.others(Compilation(spec), 30, "sm_75")} == {"registers", "multipass"}
    assert {s.form for s in check.others(Compilation(spec), 30, "sm_86")} == {"registers", "multipass", "cp_async"}


# ---- without a GPU: the PTX on NumPy ----


def test_without_a_gpu_the_ptx_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(check, "device_count", lambda: 0)
    for on, schedules in (("auto", 1), ("ptx", 2)):
        spec = parse_spec("rmsnorm.bwd:d=96,dtype=bf16,blocks=2")
        results = list(check.check_spec(spec, on=on, rows=(0, 5), schedules=schedules))
        assert [r.what for r in results].count("ptx") == 2 * schedules
        assert all(r.ok for r in results)


def test_wrong_bits_and_findings_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    spec = parse_spec("layernorm.fwd:d=4096")
    kernels = Compilation(spec).kernels(Schedule("registers", 128, 1, 4))
    inputs = random_inputs(spec, 2)
    want = interpret(spec.graph(), inputs)
    assert executed(kernels, "sm_90", 2, inputs, want).ok
    y = want["y"].copy()
    y[1, 7] = np.nextafter(y[1, 7], np.float32(np.inf))
    wrong = executed(kernels, "sm_90", 2, inputs, want | {"y": y})
    assert (wrong.ok, wrong.detail) == (False, "y: 1 of 8192 differ")
    other = KernelSet(kernels.plan)
    monkeypatch.setattr(other, "text", kernels.bundle.replace("__syncthreads();", ";"))
    racy = executed(other, "sm_90", 2, inputs, want)
    assert not racy.ok
    assert "shared-race" in racy.detail


@pytest.mark.parametrize("dtype", [*DType])
def test_an_error_of_one_rounding_is_half_a_step(dtype: DType) -> None:
    """Relative, and where numbers are subnormal absolute; what f64 itself cannot hold counts as 0."""
    facts = ml_dtypes.finfo(NUMPY_DTYPE[dtype])
    assert float(facts.eps) / 2 == dtype.roundoff
    assert float(facts.smallest_subnormal) / 2 == dtype.floor
