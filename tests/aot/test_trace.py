"""If these fail, a traced workload is built as another norm, or a file that is no trace stops the build."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_traces import ROWS, WEIGHT, dumped, lines, tensor, workload, write
from fuzz import JSON, TEXT, fuzzed
from lngen.aot import trace
from lngen.aot.trace import OPERATIONS, Workload, read_trace
from lngen.errors import LngenError
from lngen.spec import parse_spec


def spec_of(folder: Path, definition: Mapping[str, Any]) -> str:
    """The one spec of one definition, of which nothing is skipped."""
    write(folder, definition)
    found = read_trace(folder)
    assert found.skipped == ()
    ((spec, rows),) = found.specs
    assert rows == ()
    return spec


SPECS = {
    "rmsnorm": "rmsnorm.fwd:d=4096,dtype=bf16,eps=1e-06,save=none",
    "gemma_rmsnorm": "rmsnorm.fwd:d=4096,dtype=bf16,casts=gemma,eps=1e-06,save=none",
    "fused_add_rmsnorm": "add_rmsnorm.fwd:d=4096,dtype=bf16,round_sum=no,eps=1e-06,save=none",
    "gemma_fused_add_rmsnorm": "add_rmsnorm.fwd:d=4096,dtype=bf16,round_sum=no,casts=gemma,eps=1e-06,save=none",
    "layernorm": "layernorm.fwd:d=4096,dtype=bf16,weight=f32,eps=1e-06,save=none",
    "fused_rmsnorm_silu": "rmsnorm_act.fwd:d=4096,dtype=bf16,eps=1e-06,save=none",
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_has_its_spec(tmp_path: Path, op: str) -> None:
    spec = spec_of(tmp_path, dumped(op))
    assert spec == SPECS[op] == str(parse_spec(spec))
    graph = parse_spec(spec).graph()
    assert [p.name for p in graph.params][1:-1] == {"add": ["residual"], "lay": ["gamma"]}.get(
        "add" if "add" in op else op[:3], []
    )
    assert [r.name for r in graph.results] == (["y", "h"] if "add" in op else ["y"])


@pytest.mark.parametrize(("changes", "keys"), [
    ({"inputs": {"weight": tensor(WEIGHT, "float32")}}, "dtype=f16,weight=f32"),
    ({"outputs": {"output": tensor(ROWS, "float32")}}, "dtype=f16,out=f32"),
    ({"inputs": {"residual": tensor(ROWS, "float32")}, "outputs": {}}, "dtype=f16,residual_dtype=f32"),
])  # fmt: skip
def test_dtypes_are_those_of_the_tensors(tmp_path: Path, changes: dict[str, Any], keys: str) -> None:
    definition = dumped("fused_add_rmsnorm", 64, "float16")
    del definition["outputs"]["residual"]  # as FlashInfer-Bench has it
    merged = {part: {**definition[part], **entries} for part, entries in changes.items()}
    assert (
        spec_of(tmp_path, {**definition, **merged}) == f"add_rmsnorm.fwd:d=64,{keys},round_sum=no,eps=1e-06,save=none"
    )


@pytest.mark.parametrize(("changes", "eps"), [
    ({}, "eps=1e-06,"),
    ({"reference": "EPS = 1e-3"}, "eps=0.001,"),
    ({"reference": "..."}, "eps=1e-06,"),  # of the description
    ({"reference": "EPS = 1e-3\nEPS = 1e-4"}, "eps=1e-06,"),  # neither
    ({"reference": "EPS = 1e-5"}, ""),  # lngen's default
    ({"reference": "...", "description": "Fused."}, ""),
    ({"reference": "EPS = 1.e.5", "description": "Fused."}, ""),
    ({"reference": None, "description": None}, ""),
])  # fmt: skip
def test_eps_is_that_of_the_reference_and_a_note_says_so(tmp_path: Path, changes: dict[str, Any], eps: str) -> None:
    assert spec_of(tmp_path, dumped("rmsnorm", 64, **changes)) == f"rmsnorm.fwd:d=64,dtype=bf16,{eps}save=none"
    (note,) = read_trace(tmp_path).notes
    assert "which eps" in note
    assert "1 of the specs" in note


@pytest.mark.parametrize(("entry", "eps"), [
    ({"shape": None, "dtype": "float32"}, "eps=run"),
    ({"shape": None, "dtype": "float32", "optional": True}, "eps=run"),
    ({"shape": None, "dtype": "float32", "value": 0.25}, "eps=0.25"),
    ({"shape": None, "dtype": "float32", "value": 0}, "eps=0.0"),
])  # fmt: skip
def test_an_input_eps_is_a_number_of_the_call(tmp_path: Path, entry: dict[str, Any], eps: str) -> None:
    definition = dumped("fused_rmsnorm_silu", 64)
    definition["inputs"]["eps"] = entry
    assert spec_of(tmp_path, definition) == f"rmsnorm_act.fwd:d=64,dtype=bf16,{eps},save=none"
    assert read_trace(tmp_path).notes == ()


def test_pdl_is_no_part_of_a_spec(tmp_path: Path) -> None:
    definition = dumped("rmsnorm")
    definition["inputs"]["enable_pdl"] = {"shape": None, "dtype": "bool"}
    assert spec_of(tmp_path, definition) == SPECS["rmsnorm"]


@pytest.mark.parametrize("tags", [[], None, "fi_api:flashinfer.norm.layernorm", [1, "fused"]])
def test_without_a_tag_the_name_says_the_operation(tmp_path: Path, tags: Any) -> None:
    """As FlashInfer-Bench has it, whose example is rmsnorm_d4096 with an input called input."""
    definition = dumped("rmsnorm", tags=tags, name="rmsnorm_d4096")
    definition["inputs"]["input"] = definition["inputs"].pop("hidden_states")
    assert spec_of(tmp_path, definition) == SPECS["rmsnorm"]


def test_the_tag_goes_before_the_name(tmp_path: Path) -> None:
    assert spec_of(tmp_path, dumped("gemma_rmsnorm", name="rmsnorm_h4096")) == SPECS["gemma_rmsnorm"]


# ---- rows ----


def test_rows_are_those_of_workloads(tmp_path: Path) -> None:
    write(tmp_path / "definitions" / "rmsnorm", dumped("rmsnorm"), dumped("layernorm"), dumped("silu_and_mul"))
    place = tmp_path / "workloads" / "rmsnorm"
    place.mkdir(parents=True)
    seen = [workload("rmsnorm_h4096", batch_size=n) for n in (7, 4096, 1, 7)]
    (place / "rmsnorm_h4096.jsonl").write_text(lines(*seen, workload("silu_and_mul_h4096", tokens=5)) + "\n")
    (place / "more.jsonl").write_text(lines(workload("rmsnorm_h4096", batch_size=2)))
    found = read_trace(tmp_path)
    assert found.specs == ((SPECS["layernorm"], ()), (SPECS["rmsnorm"], (1, 2, 7, 4096)))
    assert len(found.skipped) == 1
    assert "lngen has no operation 'silu_and_mul'" in found.skipped[0]


def test_rows_are_the_product_of_leading_axes(tmp_path: Path) -> None:
    axes = {"tokens": {"type": "var"}, "heads": {"type": "const", "value": 8}, "dim": {"type": "const", "value": 128}}
    shape = ["tokens", "heads", "dim"]
    inputs = {"hidden_states": tensor(shape, "bfloat16"), "weight": tensor(["dim"], "bfloat16")}
    outputs = {"output": tensor(shape, "bfloat16")}
    write(tmp_path, dumped("rmsnorm", 128, axes=axes, inputs=inputs, outputs=outputs))
    (tmp_path / "rows.jsonl").write_text(lines(workload("rmsnorm_h128", tokens=3)))
    assert read_trace(tmp_path).specs == (("rmsnorm.fwd:d=128,dtype=bf16,eps=1e-06,save=none", (24,)),)
    axes["tokens"] = {"type": "const", "value": 5}
    write(tmp_path, dumped("rmsnorm", 128, axes=axes, inputs=inputs, outputs=outputs))
    assert read_trace(tmp_path).specs == (("rmsnorm.fwd:d=128,dtype=bf16,eps=1e-06,save=none", (40,)),)


def test_files_of_several_runs_may_have_one_name(tmp_path: Path) -> None:
    """FlashInfer leaves the dtype out of a name, so runs in two dtypes have folders of their own."""
    for dtype in ("bfloat16", "float16"):
        write(tmp_path / dtype, dumped("rmsnorm", 64, dtype))
        write(tmp_path / f"{dtype}-again", dumped("rmsnorm", 64, dtype))
    (tmp_path / "rows.jsonl").write_text(lines(workload("rmsnorm_h64", batch_size=3)))
    specs = [f"rmsnorm.fwd:d=64,dtype={dtype},eps=1e-06,save=none" for dtype in ("bf16", "f16")]
    assert read_trace(tmp_path) == Workload(tuple((s, (3,)) for s in specs), (), read_trace(tmp_path).notes)


# ---- what is no norm, and what is no trace ----


def test_what_is_no_trace_is_one_sentence_a_file(tmp_path: Path) -> None:
    write(tmp_path, dumped("rmsnorm"))
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "gone.json").symlink_to("nowhere")
    (tmp_path / "around").symlink_to(".", target_is_directory=True)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / os.fsdecode(b"\xff\n.json")).write_bytes(b"")
    (tmp_path / "blank.jsonl").write_bytes(b" " * (trace.LARGEST + 1))
    found = read_trace(tmp_path)
    assert found.specs == ((SPECS["rmsnorm"], ()),)
    assert len(found.skipped) == 3
    for sentence in found.skipped:
        sentence.encode()
        assert "\n" not in sentence


def test_a_link_to_a_trace_is_one(tmp_path: Path) -> None:
    write(tmp_path / "there", dumped("rmsnorm"))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.json").symlink_to(tmp_path / "there" / "rmsnorm_h4096.json")
    (tmp_path / "link").symlink_to("here", target_is_directory=True)
    assert read_trace(tmp_path / "link").specs == ((SPECS["rmsnorm"], ()),)


def test_a_folder_inside_that_cannot_be_read_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, dumped("rmsnorm"))
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def refused(path: str) -> Any:
        if os.fspath(path).endswith("closed"):  # root may list any folder
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert read_trace(tmp_path).skipped == ("'closed' cannot be read: Permission denied.",)


def test_depth_and_number_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, dumped("rmsnorm"))
    place = tmp_path
    for _ in range(trace.DEEPEST):
        place = place / "a"
    write(place, dumped("layernorm"))
    write(place / "a", dumped("gemma_rmsnorm"))
    assert [spec for spec, _ in read_trace(tmp_path).specs] == [SPECS["layernorm"], SPECS["rmsnorm"]]
    monkeypatch.setattr(trace, "MOST_FILES", 2)
    with pytest.raises(LngenError, match="has more than 2 files; name a folder of traces alone"):
        read_trace(tmp_path)


def test_a_folder_whose_name_no_folder_can_have_is_an_error() -> None:
    with pytest.raises(LngenError, match=r"^cannot read "):
        read_trace(Path("\0"))


KEYS = st.sampled_from(["hidden_states", "weight", "residual", "bias", "eps", "batch_size", "hidden_size", "type"])
LEAVES = st.none() | st.integers() | TEXT | st.sampled_from(["var", "const", "bfloat16", *ROWS]) | st.floats()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS | TEXT, inner), max_leaves=8)
PARTS = st.sampled_from(["name", "tags", "axes", "inputs", "outputs", "reference", "description"])


@st.composite
def definitions(draw: st.DrawFn) -> bytes:
    """A trace of which a part, or an entry of a part, is anything."""
    definition = dumped(draw(st.sampled_from([*OPERATIONS])))
    part = draw(PARTS)
    value = definition[part]
    if isinstance(value, dict) and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        value[key] = {
            **value[key],
            **draw(st.dictionaries(st.sampled_from(["shape", "dtype", "type", "value"]), VALUES)),
        }
    else:
        definition[part] = draw(VALUES)
    return json.dumps(definition).encode()


@fuzzed
@given(definitions() | JSON | st.binary(), JSON | st.binary())
def test_any_file_is_a_spec_or_a_sentence(tmp_path: Path, raw: bytes, rows: bytes) -> None:
    write(tmp_path, dumped("layernorm", 64))
    (tmp_path / "any.json").write_bytes(raw)
    (tmp_path / "any.jsonl").write_bytes(rows)
    found = read_trace(tmp_path)
    assert "layernorm.fwd:d=64,dtype=bf16,weight=f32,eps=1e-06,save=none" in [spec for spec, _ in found.specs]
    for spec, _ in found.specs:
        plain = spec.replace("eps=run,", "")
        assert str(parse_spec(plain)) == plain
    for sentence in (*found.skipped, *found.notes):
        sentence.encode()
        assert "\n" not in sentence
        assert len(sentence) < 1000
        assert sentence.endswith(".")
