"""The command line: what each command prints, where it stops, and what it says then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

import lngen
from lngen.check.inputs import random_inputs
from lngen.check.spec_checks import Result as Checked
from lngen.cli import COMMANDS, cli, installation
from lngen.cli.run_files import read_header, read_npy
from lngen.compile import Compilation, KernelSet
from lngen.emit import emit
from lngen.errors import LngenError, MissingError
from lngen.interpret import interpret
from lngen.ir import ORDERS
from lngen.ir.numerics import Array
from lngen.lower import lower
from lngen.runtime.launch import device_count
from lngen.schedule import parse_schedule, problem, ranked
from lngen.spec import Spec, parse_spec
from lngen.toolchain import compile_ptx

ROOT = Path(__file__).resolve().parents[2]
FWD = "layernorm.fwd:d=64,dtype=f32"
BWD = "layernorm.bwd:d=64,dtype=bf16"
ALL_KEYS = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"


def call(*args: str, **env: str) -> Result:
    return CliRunner().invoke(cli, [*args], env=env, prog_name="lngen")


def prints(*args: str) -> str:
    done = call(*args)
    assert done.exit_code == 0, done.output
    return done.stdout


def fails(code: int, *args: str) -> str:
    """The message on stderr of a call that must exit with ``code`` and print nothing."""
    done = call(*args)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert "Traceback" not in done.stderr
    return done.stderr


def process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lngen", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("cupy")


needs_nvrtc = pytest.mark.usefixtures("compiler")


# The group


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_an_example(name: str) -> None:
    text = prints(*name.split(), "--help")
    assert "Usage: lngen" in text
    assert "Example: lngen" in text or not name
    assert all(command in text for command in COMMANDS) or name


def test_the_table_of_commands_is_what_there_is() -> None:
    modules = [import_module(f"lngen.cli.{path.stem}") for path in (ROOT / "lngen" / "cli").glob("[!_]*.py")]
    assert {v.name for m in modules for v in vars(m).values() if isinstance(v, click.Command)} == set(COMMANDS)


def test_version() -> None:
    assert lngen.__version__ in prints("--version")


def test_an_unknown_command_is_a_usage_error() -> None:
    assert "No such command 'shwo'" in fails(2, "shwo")


def test_help_and_list_load_neither_cupy_nor_torch() -> None:
    code = (
        "import sys\nfrom lngen.cli import cli\n"
        "for a in (['--help'], ['help', 'layout'], ['list'], ['show', 'layernorm.bwd:d=8', '--stage', 'graph']):\n"
        "    cli.main(a, standalone_mode=False)\n"
        "print(sorted({'cupy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_lngen_is_cheap_and_names_come_when_asked_for() -> None:
    code = (
        "import sys, lngen; assert 'numpy' not in sys.modules\n"
        "for name in lngen.__all__: assert getattr(lngen, name) is getattr(lngen, name), name\n"
        "assert sorted(lngen.__all__) == dir(lngen); assert lngen.interpret.interpret\n"
        "assert not {'cupy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(AttributeError, match="no attribute 'jit'"):
        _ = lngen.jit  # type: ignore[attr-defined]


@pytest.mark.parametrize(("spec", "code"), [("layernorm.fwd:d=64", 0), ("layernrm.fwd:d=64", 2)])
def test_the_process_ends_with_the_exit_code(spec: str, code: int) -> None:
    done = process("show", spec, "--stage", "graph")
    assert done.returncode == code
    assert done.stdout.startswith("graph @layernorm_fwd") == (code == 0)
    assert ("error: spec 'layernrm.fwd:d=64': there is no graph" in done.stderr) == (code == 2)
    assert "Traceback" not in done.stderr


def test_debug_level_five_shows_the_traceback() -> None:
    assert "Traceback" in process("show", "x.fwd:d=1", LNGEN_DEBUG="5").stderr


def test_a_wrong_debug_level_is_one_sentence() -> None:
    done = process("show", "x.fwd:d=1", LNGEN_DEBUG="6")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_pipe_that_nobody_reads_is_no_error() -> None:
    show = f'"{sys.executable}" -m lngen show layernorm.bwd:d=4096 --stage graph --after all'
    done = subprocess.run(
        ["bash", "-c", f"for i in 1 2 3; do {show} | head -c 10 >/dev/null; done"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_ctrl_c_exits_130(tmp_path: Path) -> None:
    code = (
        "import time, click, lngen.cli\n"
        "def slow(self, ctx, name):\n    print('started', flush=True); time.sleep(60)\n"
        "lngen.cli.Commands.get_command = slow\nlngen.cli.main()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "list"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert (child.returncode, "Traceback" in err) == (130, False)


# list


def test_list_names_every_graph_input_and_key() -> None:
    text = prints("list")
    data = json.loads(prints("list", "--json"))
    assert text.endswith(
        f"Sums have the order {ORDERS[0]} (key order: {' '.join(ORDERS)}); another one gives other bits.\n"
    )
    assert data["orders"] == [*ORDERS]
    for graph in data["graphs"]:
        assert f"  {graph['name']} " in text
        assert graph["summary"] in text
        described = prints("list", graph["name"])
        assert all(k["key"] in described for k in graph["keys"])
        names = {i["name"] for i in graph["inputs"]}
        spec = parse_spec(f"{graph['name']}.fwd:d=8")
        assert {p.name for p in spec.forward().params} <= names
        assert {"d", "dtype", "weight", "out", "save", "wrt", "of", "grad", "accumulate"} <= {
            k["key"] for k in graph["keys"]
        }
        # The defaults that are shown are the defaults that hold.
        shown = {k["key"]: k["default"] for k in graph["keys"]}
        others = ("d", "wrt", "of", "weight", "out", "blocks", "grad", "accumulate")
        keys = ",".join(f"{k}={v}" for k, v in shown.items() if k not in others and v != "required")
        assert parse_spec(f"{graph['name']}.fwd:d=8,{keys}") == spec
    layernorm = data["graphs"][0]
    assert layernorm["inputs"][0] == {"name": "x", "type": "dtype[M, D]", "optional": False, "default": True}
    assert layernorm["outputs"] == [{"name": "y", "type": "out[M, D]"}]
    assert [s["name"] for s in layernorm["statistics"]] == ["mean", "rstd"]


# show


def test_show_graph_is_the_final_graph() -> None:
    assert prints("show", BWD, "--stage", "graph") == str(parse_spec(BWD).graph())


def test_show_after_a_pass() -> None:
    trace = parse_spec(BWD).trace()
    for name, graph in trace.items():
        assert prints("show", BWD, "--stage", "graph", "--after", name) == str(graph)
    every = prints("show", BWD, "--stage", "graph", "--after", "all")
    assert [line for line in every.splitlines() if line.startswith("// ----")] == [
        f"// ---- after {name} ----" for name in trace
    ]


def test_an_unknown_pass_is_answered_with_the_passes() -> None:
    message = fails(2, "show", BWD, "--stage", "graph", "--after", "vpj")
    assert "there is no pass 'vpj'" in message
    assert (
        "build, vjp, simplify, save, cse, decompose, place_fma, place_spread, compensate, order_sums, share, or all"
        in message
    )


def test_show_cuda_is_the_source_to_the_byte() -> None:
    spec = parse_spec(FWD)
    schedule = parse_schedule(ALL_KEYS, ranked(problem(spec.graph(), 64))[0])
    source = emit(lower(spec, schedule))
    assert prints("show", FWD, "--schedule", ALL_KEYS) == source
    assert process("show", FWD, "--stage", "cuda", "--schedule", ALL_KEYS).stdout == source


def test_a_whole_schedule_asks_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("the default schedule was looked for")

    monkeypatch.setattr(Compilation, "schedule", forbidden)
    assert "__global__" in prints("show", FWD, "--schedule", ALL_KEYS)
    assert "__global__" in prints(
        "show", FWD, "--schedule", "form=cp_async,threads=16,rows_per_block=8,vec=4,stages=3,grid=128"
    )


def test_the_header_of_a_source_regenerates_it() -> None:
    source = prints("show", FWD)
    lines = source.replace("\n//       ", "").splitlines()
    spec, schedule, command = (
        next(line for line in lines if line.startswith(f"//   {name} ")).partition(" : ")[2]
        for name in ("spec", "schedule", "regenerate")
    )
    assert prints(*command.replace("SPEC", spec).replace("SCHEDULE", schedule).split()[1:]) == source


def test_show_plan_and_its_diff() -> None:
    plan = prints("show", FWD, "--stage", "plan", "--schedule", ALL_KEYS)
    assert plan.startswith("plan layernorm_fwd__f32_d64__t16_r8_v4_b8\n")
    diff = prints("show", FWD, "--stage", "plan", "--schedule", ALL_KEYS, "--diff", "vec=2").splitlines()
    assert diff[0].startswith("--- layernorm_fwd__f32_d64__t16_r8_v4_b8")
    assert diff[1].startswith("+++ layernorm_fwd__f32_d64__t16_r8_v2_b8")
    assert prints("show", FWD, "--stage", "plan", "--schedule", ALL_KEYS, "--diff", "vec=4") == ""


def test_few_rows_have_a_schedule_of_their_own() -> None:
    few, many = (prints("show", "layernorm.fwd:d=4096", "--stage", "plan", *rows) for rows in (("--rows", "1"), ()))
    assert few.startswith("plan layernorm_fwd__f32_d4096__t128_r1_v4_b1_cached")
    assert many.startswith("plan layernorm_fwd__f32_d4096__t128_r1_v4_b2_tma_s3_g264_cached_regs_early_dynamic\n")


@needs_nvrtc
def test_show_ptx_is_what_the_compiler_made() -> None:
    spec = parse_spec(FWD)
    plan = lower(spec, parse_schedule(ALL_KEYS, ranked(problem(spec.graph(), 64))[0]))
    ptx = prints("show", FWD, "--stage", "ptx", "--schedule", ALL_KEYS, "--arch", "sm_80")
    assert ptx == compile_ptx(emit(plan), "sm_80")


@needs_nvrtc
def test_show_resources_of_several_arches() -> None:
    args = ("show", BWD, "--stage", "resources", "--arch", "sm_80,sm_90")
    data = json.loads(prints(*args, "--json"))
    assert list(data["resources"]) == ["sm_80", "sm_90"]
    table = prints(*args)
    for arch, kernels in data["resources"].items():
        for kernel, found in kernels.items():
            (row,) = [line for line in table.splitlines() if kernel in line and arch in line]
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            assert cells[2:4] == [str(found["registers"]), str(found["spill_stores"])]
    assert table.isascii()


@needs_nvrtc
def test_shared_memory_has_one_name_where_it_is_used_and_another_where_a_launch_asks_for_more() -> None:
    spec = "layernorm.bwd:d=4096,dtype=bf16"
    schedule = "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,cached_weights=yes,row_in_registers=yes"
    plan, table = (prints("show", spec, "--stage", s, "--schedule", schedule) for s in ("plan", "resources"))
    head, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[:3:2])
    cells = dict(zip(head, row, strict=True))
    assert f"{cells['dynamic shared']} bytes of dynamic shared memory" in plan
    assert int(cells["launch shared"]) > int(cells["dynamic shared"]), "so that a multiprocessor has one block"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--stage", "plan", "--after", "cse"), "--after names a pass over the graph"),
        (("--stage", "graph", "--schedule", "vec=1"), "a graph has no schedule"),
        (("--stage", "graph", "--diff", "vec=1"), "a graph has no schedule"),
        (("--stage", "graph", "--rows", "1"), "a graph has no schedule"),
        (("--out", "-"), "expected a file, got '-'"),
        (("--stage", "ptx", "--arch", "sm_80,sm_90"), "--stage ptx takes one --arch"),
        (("--stage", "sass"), "'sass' is not one of"),
        (("--arch", ","), "expected at least one value"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(args: tuple[str, ...], message: str) -> None:
    assert message in fails(2, "show", FWD, *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "layernorm.fwd:d=0"), "error: spec 'layernorm.fwd:d=0': 'd' is expected to be"),
        (("show", FWD, "--schedule", "thread=1"), "did you mean 'threads'?"),
        (("show", FWD, "--schedule", f"{ALL_KEYS},threads=3"), "threads is a power of two, got 3"),
        (("show", FWD, "--arch", "sm_1", "--stage", "ptx"), "error: Unknown arch 'sm_1'"),
        (("show", FWD, "--arch", "hopper", "--stage", "ptx"), "error: Unknown arch 'hopper'"),
    ],
)
@needs_nvrtc
def test_errors_of_lngen_are_one_line(args: tuple[str, ...], message: str) -> None:
    assert message in fails(2, *args)


# run


def as_npy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def save(folder: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", as_npy(array))
    return ",".join(f"{name}={folder / name}.npy" for name in arrays)


def inputs_of(spec: str, rows: int = 6) -> dict[str, np.ndarray[Any, Any]]:
    return random_inputs(parse_spec(spec), rows)


def where(folder: Path, spec: Spec) -> str:
    return ",".join(f"{r.name}={folder}/out_{r.name}.npy" for r in spec.graph().results)


@pytest.mark.parametrize(
    "text", [FWD, BWD, "rmsnorm.fwd:d=7,dtype=f16,weight=bf16,out=f32", "rmsnorm.bwd:d=8,dtype=f64,wrt=x"]
)
@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("on", ["interpreter", "ptx"])
def test_run_gives_the_interpreters_bits(tmp_path: Path, text: str, rows: int, on: str) -> None:
    spec = parse_spec(text)
    arrays = inputs_of(text, rows)
    out = where(tmp_path, spec)
    assert prints("run", text, "--in", save(tmp_path, arrays), "--out", out, "--on", on) == ""
    for name, want in interpret(spec.graph(), arrays).items():
        got = np.load(tmp_path / f"out_{name}.npy")
        assert (got.dtype, got.shape) == (as_npy(want).dtype, want.shape)
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("leading", [(2, 3), (), (1, 6, 1), (0, 3)])
def test_run_gives_leading_dimensions_back(tmp_path: Path, leading: tuple[int, ...]) -> None:
    rows = int(np.prod(leading, dtype=int))
    arrays = inputs_of(BWD, rows)
    want = interpret(parse_spec(BWD).graph(), arrays)
    shaped = {n: a if n == "gamma" else a.reshape((*leading, *a.shape[1:])) for n, a in arrays.items()}
    shaped["mean"] = arrays["mean"]  # [M] may also come flat
    prints("run", BWD, "--in", save(tmp_path, shaped), "--out", where(tmp_path, parse_spec(BWD)))
    assert np.load(tmp_path / "out_dx.npy").shape == (*leading, 64)
    assert np.load(tmp_path / "out_dgamma.npy").shape == (64,)
    for name, array in want.items():
        assert np.load(tmp_path / f"out_{name}.npy").tobytes() == array.tobytes()


def test_statistics_have_the_leading_dimensions_too(tmp_path: Path) -> None:
    arrays = inputs_of(FWD)
    arrays["x"] = arrays["x"].reshape(2, 3, 64)
    prints("run", FWD, "--in", save(tmp_path, arrays), "--out", where(tmp_path, parse_spec(FWD)))
    assert np.load(tmp_path / "out_mean.npy").shape == (2, 3)


def test_run_takes_bf16_as_ml_dtypes_saves_it(tmp_path: Path) -> None:
    arrays = inputs_of(BWD)
    files = save(tmp_path, arrays)
    np.save(tmp_path / "x.npy", arrays["x"])  # two opaque bytes an element
    prints("run", BWD, "--in", files, "--out", f"dx={tmp_path}/dx.npy")
    want = interpret(parse_spec(BWD).graph(), arrays)["dx"]
    assert np.load(tmp_path / "dx.npy").tobytes() == want.tobytes()


def test_run_writes_only_what_is_asked_for(tmp_path: Path) -> None:
    files = save(tmp_path, inputs_of(FWD))
    before = {p.name for p in tmp_path.iterdir()}
    prints("run", FWD, "--in", files, "--out", f"rstd={tmp_path}/a,b.npy")
    assert {p.name for p in tmp_path.iterdir()} - before == {"a,b.npy"}


@pytest.mark.gpu
@pytest.mark.parametrize("text", [FWD, BWD, "rmsnorm.bwd:d=65536,dtype=f32", "layernorm.fwd:d=1000,dtype=f16"])
@pytest.mark.parametrize("rows", [0, 5])
def test_run_on_the_gpu_gives_the_same_files(tmp_path: Path, text: str, rows: int) -> None:
    files = save(tmp_path, inputs_of(text, rows))
    results = []
    for on in ("gpu", "interpreter"):
        folder = tmp_path / on
        folder.mkdir()
        prints("run", text, "--in", files, "--out", where(folder, parse_spec(text)), "--on", on)
        results.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert results[0] == results[1]


@pytest.mark.skipif(device_count() > 0, reason="there is a GPU")
def test_run_on_a_gpu_that_is_not_there_exits_3(tmp_path: Path) -> None:
    files = save(tmp_path, inputs_of(FWD))
    message = fails(3, "run", FWD, "--in", files, "--out", f"y={tmp_path}/y.npy", "--on", "gpu")
    assert message.startswith("error: GPU 0 is expected")
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--in": "x={0}/x.npy"}, "--in: 'gamma' is missing; layernorm.fwd:d=64,dtype=f32 takes x: f32[M"),
        ({"--in": "{in},z={0}/x.npy"}, "--in: there is no 'z', expected x, gamma, beta."),
        ({"--in": "{in},x={0}/x.npy"}, "--in: 'x' is given twice."),
        ({"--in": "x"}, "--in: expected 'name=file.npy', got 'x'."),
        ({"--out": "y="}, "--out: expected 'name=file.npy', got 'y='."),
        ({"--out": "dx={0}/y.npy"}, "--out: there is no 'dx', expected y, mean, rstd."),
        ({"--out": "y={0}/y.npy,y={0}/z.npy"}, "--out: 'y' is given twice."),
        ({"--out": "y={0}/y.npy,mean={0}/y.npy"}, "--out: two results are given the same file."),
        ({"--out": "y={0}/no/y.npy"}, "there is no folder"),
        ({"--in": "{in}", "x": "absent"}, "'x': cannot read"),
        ({"--in": "{in}", "x": "text"}, "is not a complete .npy file of numbers"),
        ({"--in": "{in}", "x": "cut"}, "is not a complete .npy file of numbers"),
        ({"--in": "{in}", "x": "objects"}, "is not a complete .npy file of numbers"),
        ({"--in": "{in}", "x": "archive"}, "is not a complete .npy file of numbers"),
        ({"--in": "{in}", "x": "f64"}, "is expected to hold float32, got float64."),
        ({"--in": "{in}", "x": "big-endian"}, "is expected to hold float32, got >f4."),
        ({"--in": "{in}", "x": "narrow"}, "to have shape (..., 64), the spec's D last, got (6, 63)."),
        ({"--in": "{in}", "x": "scalar"}, "to have shape (..., 64), the spec's D last, got ()."),
        ({"--in": "{in}", "gamma": "narrow"}, "'gamma' is expected to have shape (64,), got (6, 63)."),
        ({"--schedule": f"{ALL_KEYS},threads=3"}, "threads is a power of two"),
    ],
)  # fmt: skip
def test_run_says_what_is_wrong_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr("lngen.cli.run_files.interpret", forbidden)
    monkeypatch.setattr("lngen.cli.run_files.run_numpy", forbidden)
    files = save(tmp_path, inputs_of(FWD))
    options = {"--in": "{in}", "--out": "y={0}/y.npy"}
    for key, value in change.items():
        if key.startswith("--"):
            options[key] = value
        else:
            damage(tmp_path / f"{key}.npy", value)
    args = [part.replace("{in}", files).replace("{0}", str(tmp_path)) for pair in options.items() for part in pair]
    assert message in fails(2, "run", FWD, "--on", "interpreter", *args)
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize("overlap", [False, True])
def test_run_launches_an_overlapping_call_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    def run_numpy(kernels: KernelSet, inputs: dict[str, Array], *, overlap: bool) -> dict[str, Array]:
        asked.append(overlap)
        return interpret(kernels.plan.graph, inputs)

    asked: list[bool] = []
    monkeypatch.setattr("lngen.cli.run_files.run_numpy", run_numpy)
    monkeypatch.setattr("lngen.cli.run_files.device_arch", lambda device: "sm_90")
    files = ["--in", save(tmp_path, inputs_of(FWD)), "--out", f"y={tmp_path}/y.npy"]
    prints("run", FWD, "--on", "gpu", "--schedule", ALL_KEYS, *files, *(["--overlap"] if overlap else []))
    assert asked == [overlap]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("x", np.float64, (2**20, 64), "is expected to hold float32, got float64."),
        ("x", np.float32, (2**20, 63), "to have shape (..., 64), the spec's D last, got (1048576, 63)."),
        ("gamma", np.float32, (2**26,), "'gamma' is expected to have shape (64,), got (67108864,)."),
    ],
)
def test_run_reads_no_elements_before_all_headers_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Any, shape: tuple[int, ...], message: str
) -> None:
    """A file of holes, which would take memory of its whole size."""

    def forbidden(*_: object) -> None:
        raise AssertionError("elements were read")

    files = save(tmp_path, inputs_of(FWD))
    np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", dtype, shape).flush()
    monkeypatch.setattr("lngen.cli.run_files.read_npy", forbidden)
    assert message in fails(2, "run", FWD, "--in", files, "--out", f"y={tmp_path}/y.npy")


def test_run_refuses_a_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    header = read_header(tmp_path / "x.npy")
    assert read_npy(tmp_path / "x.npy", header).shape == (3,)
    np.save(tmp_path / "x.npy", np.zeros(4))
    with pytest.raises(ValueError, match="the file was replaced during the read"):
        read_npy(tmp_path / "x.npy", header)


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    match how:
        case "absent":
            path.unlink()
        case "text":
            path.write_text("x\n")
        case "cut":
            path.write_bytes(raw[:-1])
        case "objects":
            np.save(path, np.array([{}]), allow_pickle=True)
        case "archive":
            with path.open("wb") as file:
                np.savez(file, x=np.zeros(3))
        case "f64":
            np.save(path, np.zeros((6, 64)))
        case "big-endian":
            np.save(path, np.zeros((6, 64), ">f4"))
        case "narrow":
            np.save(path, np.zeros((6, 63), np.float32))
        case "scalar":
            np.save(path, np.float32(1))


def test_run_rejects_another_number_of_rows(tmp_path: Path) -> None:
    arrays = inputs_of(BWD)
    arrays["dy"] = arrays["dy"][:5]
    files = save(tmp_path, arrays)
    message = fails(2, "run", BWD, "--in", files, "--out", f"dx={tmp_path}/dx.npy")
    assert "'x' is expected to have shape (5, 64), the rows of 'dy', got (6, 64)." in message


def test_run_wants_bf16_as_uint16(tmp_path: Path) -> None:
    arrays = {**inputs_of(BWD), "x": np.zeros((6, 64), np.float32)}
    message = fails(2, "run", BWD, "--in", save(tmp_path, arrays), "--out", f"dx={tmp_path}/dx.npy")
    assert "is expected to hold uint16 (bf16 travels as uint16), got float32." in message


def test_an_output_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    files = save(tmp_path, inputs_of(FWD))
    (tmp_path / "folder").mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    message = fails(2, "run", FWD, "--in", files, "--out", f"y={tmp_path}/y.npy,mean={tmp_path}/folder")
    assert "cannot write" in message
    assert {p.name for p in tmp_path.iterdir()} == before


# check


def checked(spec: Spec, **options: Any) -> list[Checked]:
    text = f"{options['rows']} {options['schedules']} {options['arch']} {options['on']}"
    return [Checked(str(spec), "", 1, "oracle", "rmsnorm" not in str(spec), text)]


def test_check_prints_a_table_and_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.cli.verification.check_spec", checked)
    args = ("--rows", "0,7", "--schedules", "3", "--arch", "sm_80", "--on", "interpreter")
    text = prints("check", FWD, BWD, *args)
    assert text.splitlines()[-1] == "2 checks passed, 0 failed"
    assert "(0, 7) 3 sm_80 interpreter" in text
    done = call("check", FWD, "rmsnorm.fwd:d=8", "--json")
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert (data["passed"], data["failed"]) == (1, 1)
    assert [r["ok"] for r in data["results"]] == [True, False]


@needs_nvrtc
def test_check_runs() -> None:
    assert "0 failed" in prints("check", FWD, BWD, "--rows", "0,3", "--on", "interpreter")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rows", "1,x"), "expected whole numbers, separated by commas, each from 0"),
        (("--rows", "-1"), "expected whole numbers"),
        (("--schedules", "0"), "expected a whole number from 1 to 1000, got '0'"),
        (("--arch", "sm_80,sm_90"), "check takes one --arch"),
        (("--on", "cpu"), "'cpu' is not one of"),
    ],
)
def test_check_rejects_nonsense(args: tuple[str, ...], message: str) -> None:
    assert message in fails(2, "check", FWD, *args)


# doctor


def states(*args: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = call("doctor", "--json", *args)
    return done.exit_code, {f["what"]: f for f in json.loads(done.stdout)["findings"]}


@needs_nvrtc
def test_doctor_finds_a_compiler() -> None:
    code, found = states()
    assert code == 0
    assert {"lngen", "Python", "numpy", "ml_dtypes", "jinja2", "CuPy", "NVRTC", "cache", "templates"} <= set(found)
    assert "sm_90" in found["NVRTC"]["detail"]
    assert "NVRTC" in prints("doctor")


def test_doctor_without_cupy_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingError("Compiling needs CuPy, which cannot be imported; install it")

    for module in [m for m in sys.modules if m.partition(".")[0] in ("cupy", "cupy_backends")]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(installation, "nvrtc_version", missing)
    code, found = states()
    assert code == 3
    for what in ("CuPy", "NVRTC"):
        assert found[what]["state"] == "missing"
        assert found[what]["fix"] == 'pip install ".[cuda13]" in the checkout of lngen'
    assert found["GPU"]["state"] == "note"


def test_doctor_sees_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise installation.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "version", nothing)
    code, found = states()
    assert code == 3
    assert found["numpy"]["fix"] == 'pip install "numpy>=2.0"'
    assert (found["torch"]["state"], found["torch"]["fix"]) == (
        "note",
        'pip install ".[bench]" in the checkout of lngen',
    )


def test_doctor_sees_two_cupys_and_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setattr(installation, "version", lambda name: "1.0")
    monkeypatch.setattr(installation.sys, "version_info", (3, 10, 0))
    found = states()[1]
    assert found["CuPy"]["fix"] == "pip uninstall cupy-cuda12x cupy"
    assert (found["Python"]["state"], found["Python"]["fix"]) == ("missing", "use 3.11+")


def test_doctor_reports_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = types.SimpleNamespace(
        driverGetVersion=lambda: 13010,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda n: {"name": b"Card", "totalGlobalMem": 2**34, "major": 9, "minor": 0},
    )
    fake = types.ModuleType("cupy")
    fake.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    fake.__version__ = "14"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", fake)
    found = states()[1]
    assert found["driver"]["detail"] == "for CUDA 13.1"
    assert found["GPU 0"]["detail"] == "Card, sm_90, 16 GiB"


def test_doctor_notes_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = states()[1]["cache"]
    assert found["state"] == "note"
    assert "LNGEN_CACHE_DIR" in found["fix"]


def test_doctor_misses_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise MissingError(f"the data folder {name!r} is missing: expected it there; reinstall")

    monkeypatch.setattr(installation, "data_dir", missing)
    code, found = states()
    assert (code, found["templates"]["state"], found["generated"]["state"]) == (3, "missing", "note")


def test_every_error_class_has_an_exit_code() -> None:
    assert {c.exit_code for c in LngenError.__subclasses__()} <= {1, 2, 3, 70}


# ---- the GPU that a default is for ----


def test_a_device_brings_its_arch() -> None:
    """A default for a GPU that is not there; with several archs, it is one of theirs."""
    here, there = (prints("show", FWD, "--stage", "plan", *device) for device in ((), ("--device", "a100")))
    assert here != there
    assert there == prints("show", FWD, "--stage", "plan", "--arch", "sm_80", "--device", "a100")
    assert "--device a100 is of sm_80, which --arch sm_90,sm_120 does not name." in fails(
        2, "show", FWD, "--stage", "resources", "--device", "a100", "--arch", "sm_90,sm_120"
    )
    assert "--device belongs to --ranking and --table" in fails(2, "tune", FWD, "--device", "a100")
    assert "There is no device 'h10', expected one of" in fails(2, "show", FWD, "--device", "h10")


def test_a_default_that_spills_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.cli.inspection.spilled_bytes", lambda plan, arch: 64)
    done = CliRunner().invoke(cli, ["show", FWD, "--stage", "plan"])
    assert done.exit_code == 0
    assert "registers spill, 64 bytes a thread: form=" in done.stderr
    done = CliRunner().invoke(cli, ["show", FWD, "--stage", "plan", "--schedule", "blocks_per_sm=1"])
    assert done.stderr == "", "of a schedule of one's own, --stage resources tells"


def test_a_table_is_written_of_recorded_times(tmp_path: Path) -> None:
    trials, table = tmp_path / "trials.jsonl", tmp_path / "table.toml"
    line = {"spec": "layernorm.fwd:d=4096,dtype=bf16", "rows": 4096, "status": "correct", "rounds": 4}
    times = {
        "form=registers,threads=128,rows_per_block=1,vec=8": 20.0,
        "form=registers,threads=64,rows_per_block=1,vec=8": 30.0,
    }
    trials.write_text("\n".join(json.dumps(line | {"schedule": s, "us_median": us}) for s, us in times.items()))
    assert prints("tune", "--table", table, "--database", trials) == f"1 entries for NVIDIA H200 in {table}\n"
    assert table.read_text().splitlines()[-2:] == [
        "[fwd.2_bytes.4096]", '"form=registers,threads=128,rows_per_block=1" = [256]',
    ]  # fmt: skip
    assert "takes times from --database FILE" in fails(2, "tune", "--table", table)
    assert "and nothing else" in fails(2, "tune", FWD, "--table", table)
