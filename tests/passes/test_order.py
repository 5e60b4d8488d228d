"""If these fail, the order of a sum is not what the attributes say, kernels do not follow it, or its rule is wrong."""

import re
import tomllib
from pathlib import Path

import pytest

import lngen
import sampling
from lngen.check.inputs import mismatches, random_inputs
from lngen.interpret import interpret
from lngen.ir import Graph, parse
from lngen.lower import lower
from lngen.passes import order
from lngen.problem import Schedule, is_legal, parse_schedule, problem
from lngen.ptx import run_plan
from lngen.schedule import ranked
from lngen.spec import parse_spec
from plans import run_checked

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
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "order_v1.toml").write_text(text.replace(old, new))
    monkeypatch.setattr(order, "PACKAGE", tmp_path)
    with pytest.raises(ValueError, match="is expected to have a whole number"):
        order.rule_of.__wrapped__("v1")  # not what an earlier test read, and nothing that a later one finds
