"""If these fail, a traced workload is built as another norm, or a file that is no trace stops the build."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import JSON, TEXT, fuzzed
from lngen.aot import trace
from lngen.aot.trace import OPERATIONS, Workload, read_trace
from lngen.errors import LngenError
from lngen.spec import parse_spec

# The format is that of flashinfer/trace/template.py, build_fi_trace_fn, and of the files that FlashInfer keeps in
# tests/trace/fi_trace_out, both at commit fb28d724 of github.com/flashinfer-ai/flashinfer; references are shortened.
# Workloads follow docs/flashinfer-trace/workload.mdx at commit 40e6ca78 of github.com/flashinfer-ai/flashinfer-bench.
REFERENCE = (
    "import torch\n\n@torch.no_grad()\ndef _reference(hidden_states, weight):\n    EPS = 1e-6\n    return None\n"
)
ROWS, WEIGHT = ["batch_size", "hidden_size"], ["hidden_size"]


def tensor(shape: list[str], dtype: str) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype}


def dumped(op: str, d: int = 4096, dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    """What FlashInfer dumps for a function of flashinfer.norm."""
    inputs = {"hidden_states": tensor(ROWS, dtype), "weight": tensor(WEIGHT, dtype)}
    outputs = {"output": tensor(ROWS, dtype)}
    if "add" in op:
        inputs = {**inputs, "residual": tensor(ROWS, dtype)}
        outputs["residual"] = tensor(ROWS, dtype)
    if op == "layernorm":
        inputs |= {name: tensor(WEIGHT, "float32") for name in ("weight", "bias")}
    return {
        "name": f"{op}_h{d}",
        "description": "Epsilon is fixed at 1e-6.",
        "op_type": "layernorm" if op == "layernorm" else "rmsnorm",
        "tags": [f"fi_api:flashinfer.norm.{op}", "status:verified"],
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": d}},
        "inputs": inputs,
        "outputs": outputs,
        "reference": REFERENCE,
        "init": "import torch\n",
        **changes,
    }


def workload(definition: str, **axes: Any) -> dict[str, Any]:
    """A line of a .jsonl file of FlashInfer-Bench."""
    inputs = {"hidden_states": {"type": "random"}}
    held = {"uuid": "6120f144", "axes": axes, "inputs": inputs}
    return {"definition": definition, "solution": None, "workload": held, "evaluation": None}


def write(folder: Path, *definitions: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for definition in definitions:
        (folder / f"{definition['name']}.json").write_text(json.dumps(definition, indent=2))


def lines(*values: Any) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


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


BAD_LINES = [
    (b"{", "line 2: Expecting property name"),
    (b"[]", "line 2: it is no workload"),
    (lines({"definition": "rmsnorm_h4096"}).encode(), "line 2: it is no workload"),
    (lines({"definition": 1, "workload": {"axes": {}}}).encode(), "line 2: it is no workload"),
    (lines(workload("other", n=1)).encode(), "line 2: no file defines 'other'"),
    (lines(workload("rmsnorm_h4096")).encode(), "line 2: it lacks sizes of the axes of 'rmsnorm_h4096'"),
    (lines(workload("rmsnorm_h4096", batch_size="7")).encode(), "line 2: it lacks sizes"),
    (lines(workload("rmsnorm_h4096", batch_size=True)).encode(), "line 2: it lacks sizes"),
    (lines(workload("rmsnorm_h4096", batch_size=0)).encode(), "line 2: it lacks sizes"),
    (b"\xff", "line 2: it is not UTF-8"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_one_sentence_and_others_count(tmp_path: Path, line: bytes, message: str) -> None:
    write(tmp_path, dumped("rmsnorm"))
    good = lines(workload("rmsnorm_h4096", batch_size=3)).encode()
    (tmp_path / "rows.jsonl").write_bytes(good + line.strip() + b"\n" + good + line.strip())
    found = read_trace(tmp_path)
    assert found.specs == ((SPECS["rmsnorm"], (3,)),)
    (sentence,) = found.skipped
    assert sentence.startswith(f"'rows.jsonl', {message}")
    assert sentence.endswith(" (and 1 more).")


# ---- what is no norm, and what is no trace ----


Change = Callable[[dict[str, Any]], object]


def without(part: str, name: str) -> Change:
    return lambda definition: definition[part].pop(name)


def entry(part: str, name: str, value: Any) -> Change:
    return lambda definition: definition[part].update({name: value})


OTHERS = [
    (entry("inputs", "scale", {"shape": None, "dtype": "float32"}), "with an input 'scale' is not known"),
    (entry("inputs", "weight", tensor(WEIGHT, "float8_e4m3fn")), "weight is 'float8_e4m3fn', expected one of float16"),
    (entry("inputs", "weight", tensor(WEIGHT, "unknown")), "weight is 'unknown'"),
    (entry("inputs", "weight", {"shape": WEIGHT, "dtype": ["a"]}), "weight is ['a']"),
    (entry("inputs", "weight", tensor(ROWS, "bfloat16")), "weight is expected to have the axes ['hidden_size'], got"),
    (entry("inputs", "residual", tensor(WEIGHT, "bfloat16")), "residual is expected to have the axes ['batch_size', "),
    (
        lambda d: [d[part].update(residual=tensor(ROWS, "float64")) for part in ("inputs", "outputs")],
        "there is no residual_dtype 'f64'",
    ),
    (entry("outputs", "residual", tensor(ROWS, "float32")), "the residual stream has two dtypes"),
    (entry("outputs", "output", tensor(ROWS, "float8_e4m3fn")), "output is 'float8_e4m3fn'"),
    (without("outputs", "output"), "output is None"),
    (without("inputs", "weight"), "weight is expected to have the axes"),
    (without("inputs", "hidden_states"), "'hidden_states' has no shape of rows and features"),
    (entry("inputs", "hidden_states", tensor(WEIGHT, "bfloat16")), "'hidden_states' has no shape of rows"),
    (entry("inputs", "hidden_states", {"shape": [1, 2], "dtype": "bfloat16"}), "'hidden_states' has no shape of rows"),
    (entry("axes", "hidden_size", {"type": "var"}), "the number of features, 'hidden_size', is no constant"),
    (entry("axes", "hidden_size", {"type": "const"}), "axis 'hidden_size' is neither var nor const with a size"),
    (entry("axes", "hidden_size", {"type": "const", "value": True}), "axis 'hidden_size' is neither"),
    (entry("axes", "hidden_size", {"type": "const", "value": 2**40}), "'d' is expected to be"),
    (without("axes", "batch_size"), "axis 'batch_size' is neither"),
    (entry("inputs", "eps", {"value": -1}), "'eps' is expected to be a number from 0 to 1"),
    (
        lambda d: d.update(tags=["fi_api:flashinfer.norm.fused_add_rmsnorm_quant"]),
        "lngen has no operation 'fused_add_rmsnorm_quant'",
    ),
    (lambda d: d.update(tags=["fi_api:flashinfer.gemm.mm_bf16"]), "lngen has no operation 'gemm.mm_bf16'"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS)
def test_what_lngen_has_not_is_one_sentence(tmp_path: Path, change: Change, message: str) -> None:
    definition = dumped("fused_add_rmsnorm")
    change(definition)
    write(tmp_path, definition, dumped("rmsnorm"))
    found = read_trace(tmp_path)
    assert [spec for spec, _ in found.specs] == [SPECS["rmsnorm"]]
    (sentence,) = found.skipped
    assert sentence.startswith("'fused_add_rmsnorm_h4096.json': ")
    assert message in sentence
    assert sentence.endswith(".")


def test_weight_and_bias_have_one_dtype(tmp_path: Path) -> None:
    definition = dumped("layernorm")
    definition["inputs"]["bias"]["dtype"] = "bfloat16"
    write(tmp_path, definition)
    found = read_trace(tmp_path)
    assert found.specs == found.notes == ()
    assert "weight and bias have two dtypes" in found.skipped[0]


NO_TRACES = {
    "text.json": (b"hello", "Expecting value"),
    "list.json": (b"[]", "it holds no JSON object"),
    "unnamed.json": (b"{}", "it has no name"),
    "solution.json": (b'{"name": "a", "definition": "rmsnorm_h4096"}', "it has no axes"),
    "flat.json": (b'{"name": "a", "axes": {"n": 1}}', "it has no axes"),
    "deep.json": (b"[" * 9999, "nested deeper"),
    "large.json": (b" " * (trace.LARGEST + 1), f"it is larger than {trace.LARGEST} bytes"),
    "folder.json/more.txt": (b"", ""),
}


def test_what_is_no_trace_is_one_sentence_a_file(tmp_path: Path) -> None:
    write(tmp_path, dumped("rmsnorm"))
    for name, (data, _) in NO_TRACES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "gone.json").symlink_to("nowhere")
    (tmp_path / "around").symlink_to(".", target_is_directory=True)
    (tmp_path / os.fsdecode(b"\xff\n.json")).write_bytes(b"")
    (tmp_path / "large.jsonl").symlink_to("large.json")
    found = read_trace(tmp_path)
    assert found.specs == ((SPECS["rmsnorm"], ()),)
    for name, (_, why) in NO_TRACES.items():
        assert [s for s in found.skipped if s.startswith(f"'{name}' is no trace: ") and why in s] or not why
    assert len([s for s in found.skipped if "'fifo.json' is no trace: it is a FIFO" in s]) == 1
    assert len([s for s in found.skipped if "'gone.json' is no trace: No such file" in s]) == 1
    assert len(found.skipped) == len(NO_TRACES) - 1 + 3
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


@pytest.mark.parametrize("kind", ["gone", "a file", "NUL", "empty", "no trace"])
def test_a_folder_without_a_trace_is_an_error(tmp_path: Path, kind: str) -> None:
    folder = {"gone": tmp_path / "gone", "a file": tmp_path / "file", "NUL": Path("\0")}.get(kind, tmp_path)
    (tmp_path / "file").write_bytes(b"")
    if kind == "no trace":
        (tmp_path / "a.json").write_text("{}")
    message = {
        "empty": "no .json file there is one. Name the",
        "no trace": "'a.json' is no trace: it has no name. Name",
    }
    with pytest.raises(LngenError, match=message.get(kind, "^cannot read ")):
        read_trace(folder)


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
