"""If these fail, a phase, a place or a reason that is shown is not that of the kernels."""

import pytest

from explained import computed, subject_of
from lngen.check.inputs import random_inputs
from lngen.explain import fusion
from lngen.explain.cost import at, is_free
from lngen.explain.fusion import unfused
from lngen.explain.section import WIDTH
from lngen.explain.steps import CLUSTER, GLOBAL, REGISTERS, SHARED, lives, steps
from lngen.lower import Plan
from lngen.passes import upstream
from lngen.problem import depths
from lngen.spec import Spec, parse_spec
from own_graphs import own
from plans import own_spec, plans_of_every_template, weights_alone
from schedules import multipass, tma


@pytest.mark.parametrize("plan", plans_of_every_template(), ids=lambda p: p.name)
def test_steps_and_places_are_those_of_the_kernels(plan: Plan) -> None:
    """Each value comes after what it needs, in its kernel or an earlier one; a phase ends for sums of later values."""
    graph, made, levels = plan.graph, plan.graph.values(), depths(plan.graph)
    args = {e.out.name: {a.name for a in e.args} for e in graph.eqns}
    handed = {p.name for p in graph.params}
    every, known, kernel = steps(plan), {*handed}, ""
    for n, step in enumerate(every):
        known = {*known, *step["defines"]} if step["kernel"] == kernel else {*handed, *step["defines"]}
        kernel = step["kernel"]
        assert all(args[name] <= known for name in step["defines"] if name not in step["columns"]), step
        handed |= {*step["stores"], *step["columns"]}
        again = any(s["inside"] and s["kernel"] == kernel for s in every[n + 1 :])
        assert any(step["needs"].values()) or not (again and step["inside"]), "another phase, and no reason for it"
        for name, users in step["needs"].items():
            assert all(made[name] in upstream(graph.eqns, [made[u]]) for u in users), name
            assert all(levels[made[u]] > step["phase"] for u in users), "no earlier phase can compute it"
    text = subject_of(plan.spec, plan.schedule).kernels.text
    assert {*args} == {name for step in every for name in step["defines"]}
    for rows in (k for k in plan.kernels if k.row):
        found = lives(rows, plan)
        assert all(begin < end for stays in found.values() for _, begin, end in stays)
        assert any(level == CLUSTER for stays in found.values() for level, *_ in stays) is (rows.cluster > 1)
        for name in {t.name for t in rows.wide_inputs} & {name for step in every for name in step["loads"]}:
            held, staged = f" {name}_row_[Row::VECTORS];" in text, f" {name}_shared_ = " in text
            assert {level for level, *_ in found[name]} == {GLOBAL, *[SHARED] * staged, *[REGISTERS] * held}, name


SPECS = [*map(parse_spec, ("layernorm.bwd:d=24,dtype=bf16", "gated_rmsnorm.fwd:d=7,dtype=f16"))]


@pytest.mark.parametrize("spec", [*SPECS, own("scaled", "bwd"), own("loss"), own("larger")], ids=str)
def test_unfused_bytes_are_those_of_the_arrays(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the interpreter, which has an array for each equation."""
    graph = spec.trace()["cse"]
    numbers = {e.out for e in graph.eqns if is_free(e) and not e.out.type.axes}
    done = computed(graph, random_inputs(spec, 5), monkeypatch)
    apart = [(e, args, out) for e, args, out in done if e in graph.eqns and not is_free(e)]
    read = [{a: x.nbytes for a, x in zip(e.args, args, strict=True) if a not in numbers} for e, args, _ in apart]
    moved = sum(out.nbytes for *_, out in apart) + sum(sum(of.values()) for of in read)
    count, amount = unfused(spec)
    assert (count, at(amount, subject_of(spec, rows=5))) == (len(apart), moved)


def test_the_section_says_why_there_is_a_second_kernel() -> None:
    found = [fusion(subject_of("layernorm.bwd:d=1024,dtype=bf16", s)) for s in (
        tma(64, 8, 8, 2), tma(64, 8, 8, 2, "single"), multipass(64, 8),
    )]  # fmt: skip
    roles = [[k["role"] for k in section.data["kernels"]] for section in found]
    assert roles == [["rows", "finish"], ["rows"], ["rows", "columns", "finish"]]
    texts = [" ".join(str(section).split()) for section in found]
    for text, why in zip(texts, ("by a kernel of its own", "after a grid barrier", "reads rows again"), strict=True):
        assert why in text
    assert "mean_dy_gamma_xhat_sum over the whole row, before dx32_part, dx32_part_1" in texts[0]
    assert max(map(len, str(found[0]).splitlines())) <= WIDTH
    assert "Results without rows" in str(fusion(subject_of(own_spec(weights_alone))))
