"""If these fail, elements that differ between batches or runs are not counted, or the picture does not show them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lngen
from lngen.bench import agreement
from lngen.bench.agreement import Arrays, Implementation, Line, compare, draw, peers
from lngen.check.inputs import forward_inputs

D, ROWS = 8, 20
INPUTS = {"x": np.arange(ROWS * D, dtype="f4").reshape(ROWS, D), "gamma": np.ones(D, "f4")}


def same(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2, "dx": inputs["x"] * 3, "dgamma": inputs["x"].sum(0)}


def by_batch(inputs: Arrays) -> Arrays:
    """A single row has other bits, and so have the sums of five rows."""
    results = dict(same(inputs))
    if len(inputs["x"]) == 1:
        results["y"] = results["y"] + 0.5
    if len(inputs["x"]) == 5:
        results["dgamma"] = results["dgamma"] + np.eye(1, D, dtype="f4")[0]
    return results


def counts(side: Implementation) -> dict[tuple[str, int], tuple[int, int]]:
    return {(x.what, x.batch): (x.elements, x.differ) for x in compare(side, "g", INPUTS, [1, 5])}


def test_what_differs_is_counted() -> None:
    assert counts(Implementation("a", "a", same, [same, by_batch], calls=3)) == {
        ("y, dx", 1): (2 * 3 * 2 * D, 3 * D), ("y, dx", 5): (2 * 3 * 2 * 5 * D, 0), ("dgamma", 5): (2 * D, 1),
        ("y, dx", ROWS): (2 * 2 * ROWS * D, 0), ("dgamma", ROWS): (2 * D, 0),
    }  # fmt: skip


def test_a_run_is_compared_with_itself_in_other_batches() -> None:
    found = counts(Implementation("a", "a", by_batch, [by_batch], calls=1, whole=False))
    assert found == {("y, dx", 1): (2 * D, D), ("y, dx", 5): (2 * 5 * D, 0), ("dgamma", 5): (D, 0)}


def test_pytorch_on_a_cpu_is_compared_between_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(agreement, "device_count", lambda: 0)
    used: list[int] = []
    layer_norm = torch.nn.functional.layer_norm

    def counted(*args: Any) -> Any:
        used.append(torch.get_num_threads())
        return layer_norm(*args)

    monkeypatch.setattr(torch.nn.functional, "layer_norm", counted)
    spec, before = lngen.parse_spec("layernorm.bwd:d=8,dtype=bf16"), torch.get_num_threads()
    (side,) = peers(spec)
    inputs = forward_inputs(spec, 3)
    results = [run({**inputs, "dy": inputs["x"]}) for run in (side.want, *side.runs)]
    assert used == [1, 2]
    assert torch.get_num_threads() == before
    assert [a.shape for a in results[0].values()] == [(3, 8), (3, 8), (8,), (8,)]
    assert [*results[1]] == ["y", "dx", "dgamma", "dbeta"]
    assert results[0]["y"].dtype == inputs["x"].dtype


def test_without_pytorch_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "find_spec", lambda name: None)
    assert peers(lngen.parse_spec("rmsnorm.bwd:d=8,dtype=bf16")) == []
    assert "torch" not in agreement.origin()


def test_the_figure_says_what_differs_and_is_the_same_twice(tmp_path: Path) -> None:
    lines = [
        Line("layernorm", "y, dx", 1, "lngen", "lngen, 5 schedules", 100, 0),
        Line("layernorm", "dgamma, dbeta", 1000, "torch", "torch, 1 and 2 threads", 100, 98),
        Line("rmsnorm", "y, dx", 1, "compile", "torch, then torch.compile", 100000, 12),
    ]
    drawn = []
    for _ in range(2):
        draw(lines, "A title", "a CPU", tmp_path / "x.svg")
        drawn.append((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1]
    texts = ("98 %", "0.012 %", "y, dx, batch of 1", "dgamma, dbeta, batch of 1,000", "A title", "a CPU")
    assert [text for text in (*texts, *(x.shown for x in lines)) if text not in drawn[0]] == []
