"""Pairs of values of two options run as a user calls them: ``tests/proof/option_pairs.py`` runs all."""

import random

import pytest

import option_pairs
import sampling
from lngen.compiler.graphs import GRAPHS
from lngen.errors import SpecError

PAIRS = 6  # of each graph


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_sample_of_the_pairs_of_a_graph_runs_or_is_refused(graph: str) -> None:
    """Other pairs after another commit."""
    listed = [*option_pairs.pairs(graph)]
    for keys in random.Random(f"{graph} {sampling.commit()}").sample(listed, PAIRS):
        assert option_pairs.answer(graph, keys).status != "failed", keys


def test_no_option_alone_is_missing() -> None:
    """Each key of a graph is in the table, and each value of a key stands with each value of another one."""
    listed = [*option_pairs.pairs("rmsnorm")]
    assert {} in listed
    assert {"casts": "t5"} in listed
    assert {"zero_centred": "yes", "save": "y"} in listed
    assert {"wrt": "beta", "beta": "yes"} in [dict(sorted(keys.items(), reverse=True)) for keys in listed]


def test_a_pair_that_is_refused_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = option_pairs.answer("rmsnorm", {"casts": "gemma", "zero_centred": "yes"})
    assert (refused.status, refused.why.partition(";")[0]) == (
        "refused",
        "graph ...: casts=gemma multiplies by ... + gamma already",
    )
    assert option_pairs.answer("rmsnorm", {"casts": "t5"}).status == "ran"

    def step(norm: object) -> None:
        raise SpecError("not in compile")

    monkeypatch.setattr(option_pairs, "step", step)
    monkeypatch.setattr(option_pairs, "pairs", lambda graph: [{"dtype": "bf16"}])
    failed = option_pairs.answer("rmsnorm", {"casts": "t5"})
    assert failed.status == "failed"
    assert "not in compile" in failed.why
    assert option_pairs.main(["--only", "dyt"]) == 1
