"""If these fail, a command is missing, loads too much, prints other text than it has, or writes another file."""

import json
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import lngen
import tune_fakes
from bench_fakes import RECORDS
from child import output, start
from commands import call, fails, prints
from graph_names import whole_heads
from lngen.cli import COMMANDS, cli
from lngen.cli.output import OutFile, unwritable
from lngen.compiler.emit import emit
from lngen.compiler.ir import FUNCTIONS, ORDERS, VERSIONS
from lngen.compiler.lower import lower
from lngen.compiler.problem import ANY, parse_schedule
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import VerifyError
from lngen.lab.bench import store
from lngen.launch.runtime.direction import Call
from lngen.packs.build import build
from lngen.proof.check import matrix
from lngen.proof.check.spec_checks import Result as Checked
from paths import ROOT

FWD = "rmsnorm.fwd:d=64,dtype=f32"
BWD = "layernorm.bwd:d=64,dtype=bf16"
ALL_KEYS = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"
needs_nvrtc = pytest.mark.usefixtures("compiler")

# ---- the group ----


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_an_example(name: str) -> None:
    text = prints(*name.split(), "--help")
    assert "Usage: lngen" in text
    assert "Example: lngen" in text or not name
    assert all(command in text for command in COMMANDS) or name


def test_the_table_of_commands_is_what_there_is() -> None:
    modules = [import_module(f"lngen.cli.{path.stem}") for path in (ROOT / "lngen" / "cli").glob("[!_]*.py")]
    assert {v.name for m in modules for v in vars(m).values() if isinstance(v, click.Command)} == set(COMMANDS)
    assert lngen.__version__ in prints("--version")


def test_importing_and_listing_load_little_and_names_come_when_asked_for() -> None:
    code = """
        import sys, lngen
        assert 'numpy' not in sys.modules
        for name in lngen.__all__: assert getattr(lngen, name) is getattr(lngen, name), name
        assert sorted(lngen.__all__) == dir(lngen) and lngen.compiler.interpret.interpret
        from lngen.cli import cli
        for a in (['--help'], ['help', 'layout'], ['list'], ['show', 'layernorm.bwd:d=8', '--stage', 'graph']):
            cli.main(a, standalone_mode=False)
        print(sorted({'cupy', 'torch'} & set(sys.modules)))
    """
    assert output(start(code)).splitlines()[-1] == "[]"
    with pytest.raises(AttributeError, match="no attribute 'jit'"):
        _ = lngen.jit  # type: ignore[attr-defined]


# ---- what is printed, as text and as JSON, and written ----

SHOW = ("show", FWD, "--stage")
# Every command line that shows a table, and every one that shows a stage.
TABLES: dict[str, tuple[str, ...]] = {
    "list": ("list",),
    "resources": (*SHOW, "resources", "--schedule", ALL_KEYS),
    "traffic": (*SHOW, "traffic", "--schedule", ALL_KEYS, "--rows", "3"),
    "explain": ("explain", FWD, "--only", "cost", "--schedule", ALL_KEYS),
    "check": ("check", FWD),
    "matrix": ("check", "--matrix"),
    "conform": ("conform", FWD, "--cases", "ordinary", "--device", "cpu"),
    "tune": ("tune", FWD, "--trials", "4", "--database", "t.jsonl"),
    "frozen": ("tune", FWD, "--frozen"),
    "ranking": ("tune", "rmsnorm.fwd:d=1,dtype=f32", "--ranking"),  # which has few schedules
    "merge": ("tune", "--merge", "t.jsonl", "--database", "u.jsonl"),
    "warm": ("warm", FWD, "--rows", "3"),
    "bench": ("bench", "--from", "b.json"),
    "generated": ("generated", "--check"),
    "verify": ("verify", "pack"),
    "pack": ("pack", "list", "pack"),
    "doctor": ("doctor",),
    "help": ("help",),
}
STAGES: dict[str, tuple[str, ...]] = {
    "graph": (*SHOW, "graph"),
    "after": (*SHOW, "graph", "--after", "all"),
    "plan": (*SHOW, "plan", "--schedule", ALL_KEYS),
    "cuda": (*SHOW, "cuda", "--schedule", ALL_KEYS),
    "ptx": (*SHOW, "ptx", "--schedule", ALL_KEYS),
    "diff": (*SHOW, "plan", "--schedule", ALL_KEYS, "--diff", "vec=2"),
    "repro": ("repro", FWD, "--rows", "3"),
}
COMPILED = ("resources", "traffic", "tune", "frozen", "merge", "ptx", "repro")
FOLDER_OR_ARRAYS = {"build": "folder", "run": "outputs"}  # what their --out is


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder in which every command works: one fake GPU, records, and checks that take no time."""
    monkeypatch.chdir(tmp_path)
    tune_fakes.use(monkeypatch, "7")
    described = {"spec": {"text": FWD}, "schedule": {"text": ALL_KEYS}}
    monkeypatch.setattr("lngen.cli.warm.device_count", lambda: 1)
    monkeypatch.setattr(Call, "launcher", lambda call, device, rows: SimpleNamespace(described=described))
    checked = [Checked(FWD, "", 1, "oracle", True, "")]
    monkeypatch.setattr("lngen.cli.verification.check_spec", lambda spec, **_: checked)
    monkeypatch.setattr(matrix, "conditions", lambda: {"device": "none"})
    monkeypatch.setattr(matrix, "run_matrix", lambda listed, **_: iter([matrix.Entry(FWD, ["a"], [1], 64)]))
    store.write_json(Path("b.json"), store.Saved(RECORDS, {"device": "none"}))
    monkeypatch.setattr("lngen.cli.generation.differences", lambda folder: {})
    build([FWD], Path("pack"), emit="cu", schedule=ALL_KEYS)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", [*TABLES, *STAGES])
def test_output_is_text_or_json_and_its_file_has_it(name: str) -> None:
    """The file of a table is JSON, whatever is printed; that of a stage takes the place of what is printed."""
    if name in COMPILED:
        pytest.importorskip("cupy")
    if name in ("frozen", "merge"):
        assert call(*TABLES["tune"]).exit_code == 0
    args = {**TABLES, **STAGES}[name]
    text, document = prints(*args), prints(*args, "--json")
    data = json.loads(document)
    assert text
    if name in STAGES:
        assert (data["text"], data["spec"]) == (text, FWD)
        for more, wanted in ((), text), (("--json",), document):
            assert prints(*args, *more, "--out", "stage") == ""
            assert Path("stage").read_text() == wanted
    else:
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
        assert without_seconds(prints(*args, "--out", "new/out.json")) == without_seconds(text)
        assert without_seconds(Path("new/out.json").read_text()) == without_seconds(document)
        assert [*Path("new").iterdir()] == [Path("new/out.json")]


def without_seconds(text: str) -> str:
    """``text`` without what a clock says: lines with seconds, and of a tuner's table, which has a column of them."""
    return "\n".join(line for line in text.splitlines() if '"seconds"' not in line and "| rmsnorm" not in line)


def test_every_command_keeps_to_it() -> None:
    """--json is a flag everywhere, --out a file, but for the folder of build and the arrays of run."""
    shown = {args[0] for args in (*TABLES.values(), *STAGES.values())}
    assert shown | set(FOLDER_OR_ARRAYS) == set(COMMANDS)
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(cli), "list")
        options: dict[str, Any] = {opt: p for p in command.params for opt in p.opts}
        assert "--json" not in options if name == "run" else options["--json"].is_flag
        assert options["--out"].name == FOLDER_OR_ARRAYS.get(name, "out_file")
        assert isinstance(options["--out"].type, OutFile) == (name not in FOLDER_OR_ARRAYS)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reasons = {
        "": "it is a folder", "file/b": "Not a directory", "a" * 300: "File name too long", "file": None,
        "a\0": "no file can have this name", "\ud800": "no file can have this name", "new/deeper/a": None,
        "/dev/null": "it is not a regular file",
    }  # fmt: skip
    assert {name: unwritable(tmp_path / name) for name in reasons} == reasons


# ---- list, show and check ----


def test_list_names_every_graph_input_and_key() -> None:
    text = prints("list")
    data = json.loads(prints("list", "--json"))
    sums, functions = (f"{v[0]} (key {key}: {' '.join(v)})" for key, v in VERSIONS.items())
    assert text.endswith(f"order {sums}, functions the equations {functions}; another version gives other bits.\n")
    assert data["orders"] == [*ORDERS]
    assert data["functions"] == [*FUNCTIONS]
    for graph in data["graphs"]:
        assert f"  {graph['name']} " in text
        assert graph["summary"] in text
        described = prints("list", graph["name"])
        assert all(k["key"] in described for k in graph["keys"])
        spec = parse_spec(f"{graph['name']}.fwd:d=8")
        assert {p.name for p in spec.forward().params} <= {i["name"] for i in graph["inputs"]}
        # The defaults that are shown are the defaults that hold.
        shown = {k["key"]: k["default"] for k in graph["keys"]}
        assert {"d", "dtype", "weight", "save", "wrt", "of", "grad", "accumulate"} <= shown.keys()
        others = ("d", "wrt", "of", "weight", "out", "blocks", "stretch", "grad", "accumulate", "dx_quant", "dx_scales")
        keys = ",".join(f"{k}={v}" for k, v in shown.items() if k not in others and v != "required")
        assert parse_spec(f"{graph['name']}.fwd:d=8,{keys}") == spec
        roles = {o["name"]: o["type"].partition("[")[0] for o in graph["outputs"]}
        assert ("out" in shown) == ("out" in roles.values())
        for dtype, out in (("f16", "bf16"), ("bf16", "f16")):
            held = {"dtype": dtype, "out": out, "f32": "f32", "compute": "f32"}
            for result in parse_spec(f"{graph['name']}.fwd:d=8,dtype={dtype},out={out},save=none").forward().results:
                assert str(result.type.dtype) == held[roles[result.name]], (graph["name"], result)
        (offered,) = (k["meaning"].rpartition(": ")[2] for k in graph["keys"] if k["key"] == "dtype")
        assert f"{offered} ".startswith("f16 bf16 f32")
        needed = offered.partition("f64")[2].removeprefix(" with ")
        wide = f"{graph['name']}.fwd:d={whole_heads(graph['name'], 8)},dtype=f64"
        if "f64" in offered:
            assert parse_spec(f"{wide}{',' * bool(needed)}{needed}").graph()
        if "f64" not in offered or needed:
            with pytest.raises(VerifyError):
                parse_spec(wide).graph()


@needs_nvrtc
def test_what_is_shown_is_what_is_made() -> None:
    spec = parse_spec(BWD)
    assert prints("show", BWD, "--stage", "graph") == str(spec.graph())
    for name, graph in spec.trace().items():
        assert prints("show", BWD, "--stage", "graph", "--after", name) == str(graph)
    for text in (ALL_KEYS, "form=cp_async,threads=16,rows_per_block=8,vec=4,stages=3,grid=128"):
        source = emit(lower(parse_spec(FWD), parse_schedule(text, ANY)))
        assert prints("show", FWD, "--schedule", text) == source
        ptx = prints("show", FWD, "--stage", "ptx", "--schedule", text, "--arch", "sm_80")
        assert ptx == compile_ptx(source, "sm_80")


@needs_nvrtc
def test_shared_memory_has_one_name_where_it_is_used_and_another_where_a_launch_asks_for_more() -> None:
    spec = "layernorm.bwd:d=4096,dtype=bf16"
    schedule = "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,cached_weights=yes,row_in_registers=yes"
    plan, table = (prints("show", spec, "--stage", s, "--schedule", schedule) for s in ("plan", "resources"))
    head, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[:3:2])
    cells = dict(zip(head, row, strict=True))
    assert f"{cells['dynamic shared']} bytes of dynamic shared memory" in plan
    assert int(cells["launch shared"]) > int(cells["dynamic shared"]), "so that a multiprocessor has one block"


@needs_nvrtc
def test_an_unknown_arch_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    for arch in ("sm_1", "hopper"):
        assert f"error: Unknown arch '{arch}'" in fails(2, "show", FWD, "--arch", arch, "--stage", "ptx")
    assert "Unknown arch 'sm_999'" in fails(2, "build", FWD, "--arch", "sm_999", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_nvrtc
def test_check_and_doctor_run_here() -> None:
    assert "0 failed" in prints("check", FWD, "--rows", "0,3", "--on", "interpreter")
    found = {f["what"]: f for f in json.loads(prints("doctor", "--json"))["findings"]}
    assert {"lngen", "Python", "numpy", "ml_dtypes", "jinja2", "CuPy", "NVRTC", "cache", "templates"} <= set(found)
    assert "sm_90" in found["NVRTC"]["detail"]
    assert metadata.version("numpy") in found["numpy"]["detail"]
    assert "cupy" in sys.modules
