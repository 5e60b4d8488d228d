"""If these fail, a traced workload is built as another norm, or a file that is no trace stops the build."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_traces import ROWS, WEIGHT, dumped, lines, tensor, workload, write
from fuzz import JSON, TEXT, fuzzed
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError
from lngen.packs import trace
from lngen.packs.trace import OPERATIONS, Workload, read_trace

SPECS = {
    "rmsnorm": "rmsnorm.fwd:d=4096,dtype=bf16,eps=1e-06,save=none",
    "gemma_rmsnorm": "rmsnorm.fwd:d=4096,dtype=bf16,casts=gemma,eps=1e-06,save=none",
    "fused_add_rmsnorm": "add_rmsnorm.fwd:d=4096,dtype=bf16,round_sum=no,eps=1e-06,save=none",
    "gemma_fused_add_rmsnorm": "add_rmsnorm.fwd:d=4096,dtype=bf16,round_sum=no,casts=gemma,eps=1e-06,save=none",
    "layernorm": "layernorm.fwd:d=4096,dtype=bf16,weight=f32,eps=1e-06,save=none",
    "fused_rmsnorm_silu": "rmsnorm_act.fwd:d=4096,dtype=bf16,eps=1e-06,save=none",
}
NUMBER = {"shape": None, "dtype": "float32"}


def traced(op: str, d: int = 64, dtype: str = "bfloat16", *, without: str = "", **changes: Any) -> dict[str, Any]:
    """A definition with other entries in its parts, or with other parts."""
    made = dumped(op, d, dtype)
    if without:
        del made["outputs"][without]
    for part, value in changes.items():
        made[part] = {**made[part], **value} if isinstance(value, dict) else value
    return made


def eps(**changes: Any) -> dict[str, Any]:
    return traced("rmsnorm", **changes)


def eps_input(**entry: Any) -> dict[str, Any]:
    return traced("fused_rmsnorm_silu", inputs={"eps": {**NUMBER, **entry}})


def added(**changes: Any) -> dict[str, Any]:
    """As FlashInfer-Bench has it, without the residual as a result."""
    return traced("fused_add_rmsnorm", dtype="float16", without="residual", **changes)


def renamed(tags: Any) -> dict[str, Any]:
    """As FlashInfer-Bench has it, whose example is rmsnorm_d4096 with an input called input."""
    made = dumped("rmsnorm", tags=tags, name="rmsnorm_d4096")
    made["inputs"]["input"] = made["inputs"].pop("hidden_states")
    return made


ADDED, PLAIN, ACT = "add_rmsnorm.fwd:d=64,dtype=f16", "rmsnorm.fwd:d=64,dtype=bf16,", "rmsnorm_act.fwd:d=64,dtype=bf16,"
DEFINITIONS: dict[str, tuple[dict[str, Any], str]] = {
    **{op: (dumped(op), SPECS[op]) for op in OPERATIONS},
    "weight f32": (added(inputs={"weight": tensor(WEIGHT, "float32")}), f"{ADDED},weight=f32,round_sum=no,eps=1e-06,"),
    "out f32": (added(outputs={"output": tensor(ROWS, "float32")}), f"{ADDED},out=f32,round_sum=no,eps=1e-06,"),
    "residual f32": (
        added(inputs={"residual": tensor(ROWS, "float32")}), f"{ADDED},residual_dtype=f32,round_sum=no,eps=1e-06,",
    ),
    "eps": (eps(), f"{PLAIN}eps=1e-06,"),
    "eps of the reference": (eps(reference="EPS = 1e-3"), f"{PLAIN}eps=0.001,"),
    "eps of the description": (eps(reference="..."), f"{PLAIN}eps=1e-06,"),
    "eps of two lines": (eps(reference="EPS = 1e-3\nEPS = 1e-4"), f"{PLAIN}eps=1e-06,"),
    "lngen's default eps": (eps(reference="EPS = 1e-5"), PLAIN),
    "no eps": (eps(reference="...", description="Fused."), PLAIN),
    "no number": (eps(reference="EPS = 1.e.5", description="Fused."), PLAIN),
    "nothing": (eps(reference=None, description=None), PLAIN),
    "eps of the call": (eps_input(), f"{ACT}eps=run,"),
    "eps of the call, or not": (eps_input(optional=True), f"{ACT}eps=run,"),
    "eps with a value": (eps_input(value=0.25), f"{ACT}eps=0.25,"),
    "eps 0": (eps_input(value=0), f"{ACT}eps=0.0,"),
    "PDL": (traced("rmsnorm", 4096, inputs={"enable_pdl": {"shape": None, "dtype": "bool"}}), SPECS["rmsnorm"]),
    "no tags": (renamed([]), SPECS["rmsnorm"]),
    "null for tags": (renamed(None), SPECS["rmsnorm"]),
    "a text for tags": (renamed("fi_api:flashinfer.norm.layernorm"), SPECS["rmsnorm"]),
    "other tags": (renamed([1, "fused"]), SPECS["rmsnorm"]),
    "a tag before a name": (dumped("gemma_rmsnorm", name="rmsnorm_h4096"), SPECS["gemma_rmsnorm"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_has_its_spec(tmp_path: Path, name: str) -> None:
    """A note says where no input tells eps."""
    definition, wanted = DEFINITIONS[name]
    write(tmp_path, definition)
    found = read_trace(tmp_path)
    assert found.skipped == ()
    (((spec, rows),), notes) = found.specs, found.notes
    assert (spec, rows) == (wanted if wanted.endswith("save=none") else f"{wanted}save=none", ())
    assert str(parse_spec(spec)) == spec
    assert len(notes) == ("eps" not in definition["inputs"])
    assert all("which eps" in note and "1 of the specs" in note for note in notes)
    graph = parse_spec(spec).graph()
    assert [r.name for r in graph.results] == (["y", "h"] if spec.startswith("add") else ["y"])
    assert ("residual" in [p.name for p in graph.params]) is spec.startswith("add")


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


@pytest.mark.parametrize(("tokens", "rows"), [({"type": "var"}, 24), ({"type": "const", "value": 5}, 40)])
def test_rows_are_the_product_of_leading_axes(tmp_path: Path, tokens: dict[str, Any], rows: int) -> None:
    axes = {"tokens": tokens, "heads": {"type": "const", "value": 8}, "dim": {"type": "const", "value": 128}}
    x, weight = tensor(["tokens", "heads", "dim"], "bfloat16"), tensor(["dim"], "bfloat16")
    inputs = {"hidden_states": x, "weight": weight}
    write(tmp_path, dumped("rmsnorm", 128, axes=axes, inputs=inputs, outputs={"output": x}))
    (tmp_path / "rows.jsonl").write_text(lines(workload("rmsnorm_h128", tokens=3)))
    assert read_trace(tmp_path).specs == (("rmsnorm.fwd:d=128,dtype=bf16,eps=1e-06,save=none", (rows,)),)


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
    write(tmp_path.parent / f"{tmp_path.name} there", dumped("layernorm"))
    (tmp_path / "link.json").symlink_to(tmp_path.parent / f"{tmp_path.name} there" / "layernorm_h4096.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / os.fsdecode(b"\xff\n.json")).write_bytes(b"")
    (tmp_path / "blank.jsonl").write_bytes(b" " * (trace.LARGEST + 1))
    found = read_trace(tmp_path / "around")
    assert found.specs == ((SPECS["layernorm"], ()), (SPECS["rmsnorm"], ()))
    assert len(found.skipped) == 3
    for sentence in found.skipped:
        sentence.encode()
        assert "\n" not in sentence
    with pytest.raises(LngenError, match=r"^cannot read "):
        read_trace(Path("\0"))


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
