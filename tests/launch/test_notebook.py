"""If these fail, a notebook shows whole arrays or raw HTML of a user, or showing a norm compiles it."""

from dataclasses import replace

import numpy as np
import pytest

import lngen
from lngen.compiler.compile import Compilation
from lngen.launch.array_norm import Saved
from lngen.launch.runtime.norm import Norm

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def norm() -> Norm:
    return lngen.compile("rmsnorm", d=64, schedule={"fwd": "form=registers,threads=16,rows_per_block=8,vec=4"})


def test_a_norm_shows_its_specs_and_compiles_nothing(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Compilation, "kernels", lambda *_: pytest.fail("it plans"))
        assert repr(norm) == "<Norm rmsnorm.fwd:d=64,dtype=f32, rmsnorm.bwd:d=64,dtype=f32>"
        assert "rmsnorm.fwd:d=64,dtype=f32\n  schedule chosen at first use" in norm._repr_html_()
        assert "rmsnorm.bwd:d=64,dtype=f32\n  derived at first use" in norm._repr_html_()
    schedule = norm.plan().schedule
    assert f"rmsnorm.fwd:d=64,dtype=f32\n  sm_90: {schedule}\nrmsnorm.bwd" in norm._repr_html_()
    norm.compilation("bwd")
    assert "rmsnorm.bwd:d=64,dtype=f32\n  schedule chosen at first use" in norm._repr_html_()


def test_a_plan_and_a_graph_are_a_line_and_their_html_is_their_text(norm: Norm) -> None:
    plan = norm.plan()
    assert repr(plan) == f"<Plan rmsnorm.fwd:d=64,dtype=f32, {plan.schedule}: rows>"
    assert repr(plan.graph) == (
        "<Graph @rmsnorm_fwd {order=v1}(%x: f32[M, D], %gamma: f32[D]) -> (f32[M, D], f32[M]): "
        f"{len(plan.graph.eqns)} equations>"
    )
    for shown in (plan, plan.graph):
        text = str(shown).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert shown._repr_html_() == f"<pre>{text}</pre>"
    named = replace(plan.graph, name=HOSTILE)
    assert HOSTILE in str(named)
    assert "&lt;img" in named._repr_html_()
    assert "<img" not in named._repr_html_()


def test_what_was_saved_is_shown_without_numbers(norm: Norm) -> None:
    saved = norm.forward(np.full((3, 64), 1234.5, np.float32), np.ones(64, np.float32))[1]
    html = Saved(saved.spec, (HOSTILE, *saved.names[1:]), saved.arrays, overwritten=("x",))._repr_html_()
    assert html.splitlines()[1:] == [
        "  &lt;img src=x onerror=alert(1)&gt; float32[3, 64]", "  gamma float32[64]", "  y float32[3, 64]",
        "  rstd float32[3]", "  1804 bytes on cpu", "  overwritten: x</pre>",
    ]  # fmt: skip
