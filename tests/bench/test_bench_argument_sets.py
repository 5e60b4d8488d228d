"""If these fail, providers get other inputs than they should, or a wrong result is timed."""

import numpy as np
import pytest

from bench_fakes import CpuGpu, cases, one_case
from lngen.bench import argument_sets
from lngen.bench.argument_sets import complaint, expected, make_cases, parts, set_bytes
from lngen.bench.tasks import LATENCY, Task, floor_bytes, make_task
from lngen.errors import LngenError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.spec import make_spec
from own_graphs import OWN, own

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", OWN)
def test_sets_come_from_the_graph(name: str) -> None:
    """Inputs, cotangents of mean 0 for every output, and values saved by the forward; not a list of names."""
    (case,) = cases(name, "bwd", rows=400)
    first = case.sets[0]
    assert {*case.inputs, *case.outputs, *(p.name for p in case.forward.params)} == {*first}
    for v in (*case.graph.params, *case.graph.results):
        assert tuple(first[v.name].shape) == v.type.shape(400, 24)
    for output in case.differentiable:
        assert abs(float(first[f"d{output}"].mean())) < 0.25
    arrays = {v.name: first[v.name].numpy() for v in case.forward.params}
    known_values = interpret(own(name).graph(), arrays)
    saved = [v.name for v in case.graph.params if v.name in known_values]
    assert saved == [n for n in case.inputs if n in {r.name for r in case.forward.results}]
    for n in saved:
        np.testing.assert_allclose(first[n].numpy(), known_values[n], rtol=1e-5)


def test_gradients_do_not_add_up_over_the_rows() -> None:
    """A mean would, in f16 beyond the largest number; x keeps one, which makes statistics worth computing."""
    (case,) = make_cases(make_task("layernorm", "bwd", "f32", 4096, 8), 1, CpuGpu())
    assert abs(float(case.sets[0]["dy"].mean())) < 0.05
    assert abs(float(case.sets[0]["x"].mean()) - 0.5) < 0.05


def test_the_halves_of_both_share_their_sets() -> None:
    forward, backward = make_cases(make_task("layernorm", "both", "f32", 4, 16), 2, CpuGpu())
    assert forward.sets is backward.sets
    assert {*forward.sets[1]} == {"x", "gamma", "beta", "y", "mean", "rstd", "dy", "dx", "dgamma", "dbeta"}
    assert (forward.sets[0]["rstd"] == forward.sets[1]["rstd"]).all()  # a backward's input from the start


@pytest.mark.parametrize(("direction", "into", "out"), [("fwd", "x", "y"), ("bwd", "dy", "dx")])
def test_a_latency_is_a_chain(direction: str, into: str, out: str) -> None:
    task = make_task("layernorm", direction, "f32", 4, 16, LATENCY)
    (case,) = make_cases(task, 4, CpuGpu())
    for before, after in zip(case.sets, case.sets[1:], strict=False):
        assert after[into] is before[out]
    assert case.chain == into
    assert case.sets[0]["gamma"] is case.sets[1]["gamma"]  # and warm


def test_inputs_are_where_the_graph_is_defined() -> None:
    def logarithm(b: GraphBuilder) -> None:
        b.output("y", (b.input("x", M, D) + b.input("z", M, D)).log())

    spec = make_spec(Definition("own", logarithm), "bwd", {"d": 24, "dtype": "bf16"})
    (case,) = make_cases(Task((spec,), 33), 1, CpuGpu())
    assert all(bool(torch.isfinite(want).all()) for want in expected(case).values())


def test_a_set_holds_what_a_peer_needs() -> None:
    """lngen's backward of h = x + residual needs neither; PyTorch's records both."""
    task = Task((own("add_rmsnorm", "bwd", of="h"),), 10)
    assert "x" not in {p.name for p in task.specs[0].graph().params}
    assert set_bytes(task) > floor_bytes(task.specs[0], 10)
    assert "x" in make_cases(task, 1, CpuGpu())[0].sets[0]


def test_a_reference_in_parts_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the rows add up, other results are put together; unless an equation joins the rows."""
    for name in ("scaled", "add_rmsnorm"):
        (case,) = cases(name, "bwd", rows=33)
        whole = expected(case)
        monkeypatch.setattr(argument_sets, "CHUNK", 100)
        pieces = expected(case)
        monkeypatch.undo()
        for n, want in whole.items():
            torch.testing.assert_close(pieces[n], want, rtol=1e-12, atol=1e-12)

    def joined(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x - b.mean(x, M))

    spec = make_spec(Definition("joined", joined), "fwd", {"d": 24})
    assert [*parts(spec, 10**7)] == [slice(0, 10**7)]
    assert len([*parts(own("gated"), 10**7)]) > 1


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("mistake", ["mean", "gamma", "nan", "sum"])
def test_a_wrong_backward_is_noticed(dtype: str, mistake: str) -> None:
    case = one_case(f"layernorm.bwd:d=256,dtype={dtype}", 64)
    t = {name: a.double() for name, a in case.sets[0].items()}
    xhat = (t["x"] - t["mean"][:, None]) * t["rstd"][:, None]
    g = t["dy"] * (1.0 if mistake == "gamma" else t["gamma"])
    shift = 0.0 if mistake == "mean" else g.mean(1, keepdims=True)
    dx = t["rstd"][:, None] * (g - shift - xhat * (g * xhat).mean(1, keepdims=True))
    results = {"dx": dx, "dgamma": (t["dy"] * xhat).sum(0), "dbeta": t["dy"].sum(0)}
    if mistake == "nan":
        dx[63, 255] = float("nan")
    if mistake == "sum":
        results["dbeta"] = t["dy"][1:].sum(0)
    assert complaint(case, expected(case), results).startswith("dbeta" if mistake == "sum" else "dx")


def test_a_missing_result_is_an_error() -> None:
    case = one_case("layernorm.fwd:d=8", 2)
    with pytest.raises(LngenError, match="'y' is missing"):
        complaint(case, expected(case), {})
