"""If these fail, ``lngen conform`` refuses right kernels of a graph that is no norm, or misses a mistake in them."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest

import sampling
from commands import call
from lngen.compiler.ir import D, M
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec, parse_spec
from lngen.proof.check.conform import CASES, Outcome, conform_graph, select
from lngen.proof.check.conform.implementations import LngenTarget, Ran
from lngen.proof.check.conform.suites import GraphSuite
from own_graphs import own

Change = Callable[[dict[str, Array], Mapping[str, Array]], None]
ON_CPU = "conform", "--device", "cpu"
ALWAYS_SKIPPED = {"ulps", "huge", "overflow", "subnormal-x", "subnormal-y", "shift-invariance", "dx-sums-to-zero"}


class Changed(LngenTarget):
    """The interpreter, whose results ``change`` spoils; it gets the inputs too, and may spoil them."""

    def __init__(self, spec: Spec, change: Change) -> None:
        super().__init__(spec, gpu=False)
        self.change = change

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        ran = super().run(inputs)
        results = {n: a.copy() for n, a in ran.results.items()}
        with np.errstate(all="ignore"):
            self.change(results, inputs)
        return Ran(results, ran.memory)


def outcomes(spec: Spec, cases: str = "", change: Change | None = None) -> dict[str, Outcome]:
    target = LngenTarget(spec, gpu=False) if change is None else Changed(spec, change)
    found = conform_graph(GraphSuite(target, spec), select(cases.split()))
    return {o.name: o for o in found}


def with_status(found: dict[str, Outcome], status: str) -> set[str]:
    return {name for name, o in found.items() if o.status == status}


@pytest.mark.parametrize("text", ["rmsnorm.bwd:d=96", "l2norm.bwd:d=96,guard=max"])
def test_conform_passes_the_default_eps_by_value(text: str) -> None:
    run, fixed = (with_status(outcomes(parse_spec(f"{text}{keys}")), "pass") for keys in (",eps=run", ""))
    assert run == fixed
    assert len(run) > 12


@sampling.grid(
    ("name", "direction", "dtype"),
    product(("add_rmsnorm", "weighted_rows", "larger", "doubled"), ("fwd", "bwd"), ("f32", "bf16")),
    strength=1,
)
def test_right_kernels_pass(name: str, direction: str, dtype: str) -> None:
    """Several outputs and cotangents, inputs without rows or features; what does not apply says why."""
    spec = own(name, direction, dtype=dtype, d=96)
    found = outcomes(spec)
    assert [*found] == [case.name for case in CASES]
    assert with_status(found, "fail") == set()
    skipped = {*ALWAYS_SKIPPED}
    skipped |= {"large-mean-1e3", "large-mean-1e4"} if dtype == "bf16" else set()
    skipped |= {"gamma-zero", "gamma-negative"} if name != "add_rmsnorm" else set()
    skipped |= {"differences", "repeat-columns"} if direction == "fwd" else set()
    skipped |= {"repeat-columns"} if name != "add_rmsnorm" else set()
    assert with_status(found, "skipped") == skipped
    assert all(o.detail for o in found.values())
    assert found["gamma-zero"].detail == "no input over D alone that may have either sign" or name == "add_rmsnorm"


@sampling.grid(
    ("name", "direction", "keys"),
    product(("ada_layernorm", "ada_rmsnorm"), ("fwd", "bwd"), ("", "gate=yes,residual=yes,dtype=bf16", "gamma=yes")),
    strength=1,
)
def test_right_kernels_of_samples_pass(name: str, direction: str, keys: str) -> None:
    """Three samples in each case, and none; rows of a sample are joined by its sums."""
    found = outcomes(parse_spec(f"{name}.{direction}:d=96" + f",{keys}" * bool(keys)))
    assert with_status(found, "fail") == set()
    assert with_status(found, "pass") >= {"ordinary", "constant-rows", "m-0", "m-1", "m-4096", "strided-rows", "repeat"}
    assert direction == "fwd" or "dscale float32 [3, 96]" in found["shape-and-dtype"].detail or "bf16" in keys


def test_a_sample_that_takes_anothers_scale_is_seen() -> None:
    def takes(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
        results["dscale"] = results["dscale"][::-1]

    spec = parse_spec("ada_layernorm.bwd:d=96")
    assert with_status(outcomes(spec, "ordinary m-4096", takes), "fail") == {"ordinary", "m-4096"}


def test_a_graph_with_a_domain_is_judged_within_it() -> None:
    """Constant rows, and weights of zero and below it: only where an input may have either sign."""
    found = outcomes(own(lambda b, x, w=D, v=D: (x * w).log() * v, "bwd", d=96))
    assert with_status(found, "fail") == set()
    assert with_status(found, "skipped") == ALWAYS_SKIPPED


def test_every_result_is_judged_or_what_is_asked_for() -> None:
    """Gradients that are one array, too."""
    found = outcomes(own("add_rmsnorm", "bwd"), "ordinary shape-and-dtype")
    assert {*found["ordinary"].measured} == {"y", "h", "dx", "dresidual", "dgamma"}
    assert "dresidual float32 [37, 24]" in found["shape-and-dtype"].detail
    found = outcomes(own("add_rmsnorm", "bwd", wrt="gamma", of="y"), "ordinary repeat-columns")
    assert {*found["ordinary"].measured} == {"y", "h", "dgamma"}
    assert with_status(found, "pass") == {*found}


def scaled(name: str, factor: float) -> Change:
    def change(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
        if name in results:
            results[name] = results[name] * results[name].dtype.type(factor)

    return change


def mixes_rows(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
    if len(inputs["x"]):
        results["y"] += np.float32(1e-6) * inputs["x"].sum(dtype=np.float32)


calls = count()


def forgets_order(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
    results["dgamma"] *= np.float32(1 + 1e-7 * (next(calls) % 2))


def divides(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
    results["y"] = results["y"] / inputs["gamma"] * inputs["gamma"]


def writes(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
    inputs["residual"][...] = 0


def widens(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
    results["h"] = results["h"].astype(np.float64)


def loses_empty(results: dict[str, Array], inputs: Mapping[str, Array]) -> None:
    results["dgamma"] = results["dgamma"] + np.float32(not len(inputs["x"]))


@pytest.mark.parametrize(("change", "case"), [
    (scaled("y", 1.001), "ordinary"), (scaled("h", 1.001), "d-31"), (scaled("dresidual", 1.001), "m-4096"),
    (scaled("dgamma", 0.999), "large-mean-1e2"), (scaled("dx", 1.001), "constant-rows"),
    (scaled("y", 1.001), "tiny-variance"), (scaled("y", -1.0), "gamma-negative"), (divides, "gamma-zero"),
    (mixes_rows, "rows-alone"), (mixes_rows, "rows-in-bigger-batch"), (mixes_rows, "nan-row"),
    (mixes_rows, "inf-row"), (forgets_order, "repeat-columns"), (writes, "inputs-unmodified"),
    (widens, "shape-and-dtype"), (loses_empty, "m-0"),
])  # fmt: skip
def test_a_mistake_fails_its_case(change: Change, case: str) -> None:
    (outcome,) = outcomes(own("add_rmsnorm", "bwd"), case, change).values()
    assert outcome.status == "fail", outcome


def test_a_wrong_derivation_fails_the_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"dx": 3.0, "dgamma": 0.5}
    monkeypatch.setattr("lngen.proof.check.conform.number_cases.gradient_excess", lambda spec: wrong)
    (outcome,) = outcomes(own("gated", "bwd"), "differences").values()
    assert (outcome.status, outcome.measured) == ("fail", wrong)


def test_rows_that_are_joined_skip_the_cases_of_rows() -> None:
    with pytest.warns(UserWarning, match="the row result '%y' depends on a sum over rows; that takes two graphs"):
        found = outcomes(
            own(lambda b, x: x - b.mean(x, M)), "rows-alone rows-permuted rows-in-bigger-batch nan-row inf-row"
        )
    assert {(o.status, o.detail) for o in found.values()} == {("skipped", "an equation of the graph joins rows")}


def test_numbers_without_a_bound_are_skipped() -> None:
    """A divisor that may be zero."""
    (outcome,) = outcomes(own(lambda b, x: x / (x - x)), "ordinary").values()
    assert (outcome.status, outcome.detail[:34]) == ("skipped", "no error bound for such numbers: y")


# ---- command line ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my.graph").write_text(str(own("gated", dtype="bf16").forward()))
    (tmp_path / "conform_norms.py").write_text(
        "from lngen import D, M\n\n\ndef twice(b):\n    b.output('y', 2 * b.input('x', M, D))\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("conform_norms", None)


@pytest.mark.parametrize(("spec", "graph", "dtype"), [
    ("my.graph.bwd:d=96", "gated@", "bf16"),
    ("conform_norms:twice.fwd:d=96,dtype=f16", "twice@", "f16"),
    ("layernorm.bwd:d=96", "layernorm", "f32"),
])  # fmt: skip
def test_the_command_takes_a_file_a_function_and_a_name(spec: str, graph: str, dtype: str, folder: Path) -> None:
    done = call(*ON_CPU, spec, "--json", "--cases", "ordinary,ulps,rows-alone,shape-and-dtype")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["norm"].startswith(graph)
    assert (data["dtype"], data["failed"]) == (dtype, 0)
    assert data["passed"] == (4 if graph == "layernorm" else 3)


def test_a_norm_with_other_options_is_judged_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the closed form has not."""
    spec = parse_spec("rmsnorm.bwd:d=24,of=y")
    assert with_status(outcomes(replace(spec, wrt=("x",)), "ordinary rows-alone"), "fail") == set()
    monkeypatch.setattr("lngen.cli.verification.has_closed_form", lambda spec: False)
    done = call(*ON_CPU, "rmsnorm.fwd:d=24", "--cases", "ulps")
    assert "correctly rounded results are those of a closed form" in " ".join(done.stdout.split())
