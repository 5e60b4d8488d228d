"""If these fail, ``lngen run`` computes other bits than the interpreter, or misreads a file."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commands import fails, prints
from lngen.cli.run_files import read_header, read_npy
from lngen.compiler.compile import KernelSet
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import M
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec, parse_spec
from lngen.launch.runtime.launcher import device_count
from lngen.proof.check.inputs import random_inputs

FWD = "layernorm.fwd:d=64,dtype=f32"
BWD = "layernorm.bwd:d=64,dtype=bf16"
ALL_KEYS = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"


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


# ---- results ----

NARROW, WIDE = "rmsnorm.fwd:d=7,dtype=f16,weight=bf16,out=f32", "rmsnorm.bwd:d=8,dtype=f64,wrt=x"
BY_VALUE = "rmsnorm.fwd:d=64,eps=run"


@pytest.mark.parametrize("on", ["interpreter", "ptx"])
@pytest.mark.parametrize(("text", "leading", "eps"), [
    (FWD, (2, 3), ""), (FWD, (), ""), (BWD, (1, 6, 1), ""), (BWD, (6,), ""), (BWD, (0, 3), ""), (NARROW, (6,), ""),
    (WIDE, (0,), ""), (BY_VALUE, (3,), "1e-6"), (BY_VALUE, (3,), "0"), (BY_VALUE, (3,), "-0.25"),
])  # fmt: skip
def test_run_gives_the_interpreters_bits(
    tmp_path: Path, text: str, leading: tuple[int, ...], eps: str, on: str
) -> None:
    """And leading dimensions back; of the statistics, [M] may come flat."""
    spec = parse_spec(text)
    arrays = random_inputs(spec, int(np.prod(leading, dtype=int)), **({"eps": float(eps)} if eps else {}))
    flat = {p.name for p in spec.graph().params if M not in p.type.axes or p.name == "mean"}
    shaped = {
        v.name: a if v.name in flat else a.reshape((*leading, *a.shape[1:]))
        for v in spec.graph().tensors
        for a in [arrays[v.name]]
    }
    options = ["--in", save(tmp_path, shaped), "--out", where(tmp_path, spec), "--on", on]
    assert prints("run", text, *options, *(["--eps", eps] if eps else [])) == ""
    found = interpret(spec.graph(), arrays)
    for result in spec.graph().results:
        got, want = np.load(tmp_path / f"out_{result.name}.npy"), found[result.name]
        assert (got.dtype, got.shape) == (as_npy(want).dtype, result.type.shape(leading, spec.d))
        assert got.tobytes() == want.tobytes()


def test_run_takes_bf16_as_ml_dtypes_saves_it(tmp_path: Path) -> None:
    arrays = inputs_of(BWD)
    files = save(tmp_path, arrays)
    np.save(tmp_path / "x.npy", arrays["x"])  # two opaque bytes an element
    prints("run", BWD, "--in", files, "--out", f"dx={tmp_path}/dx.npy")
    want = interpret(parse_spec(BWD).graph(), arrays)["dx"]
    assert np.load(tmp_path / "dx.npy").tobytes() == want.tobytes()


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


def test_run_launches_an_overlapping_call_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_numpy(kernels: KernelSet, inputs: dict[str, Array], *, overlap: bool) -> dict[str, Array]:
        asked.append(overlap)
        return interpret(kernels.plan.graph, inputs)

    asked: list[bool] = []
    monkeypatch.setattr("lngen.cli.run_files.run_numpy", run_numpy)
    monkeypatch.setattr("lngen.cli.run_files.device_arch", lambda device: "sm_90")
    files = ["--in", save(tmp_path, inputs_of(FWD)), "--out", f"y={tmp_path}/y.npy"]
    for option in ([], ["--overlap"]):
        prints("run", FWD, "--on", "gpu", "--schedule", ALL_KEYS, *files, *option)
    assert asked == [False, True]


# ---- refusals ----


@pytest.mark.skipif(device_count() > 0, reason="there is a GPU")
def test_run_on_a_gpu_that_is_not_there_exits_3(tmp_path: Path) -> None:
    files = save(tmp_path, inputs_of(FWD))
    message = fails(3, "run", FWD, "--in", files, "--out", f"y={tmp_path}/y.npy", "--on", "gpu")
    assert message.startswith("error: GPU 0 is expected")
    assert not (tmp_path / "y.npy").exists()


def test_nothing_is_computed_before_all_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are elements read before all headers are right: a file of holes would take memory of its whole size."""
    for name in ("interpret", "run_numpy"):
        monkeypatch.setattr(f"lngen.cli.run_files.{name}", lambda *_: pytest.fail("something was computed"))
    args = ["run", FWD, "--on", "interpreter", "--in", save(tmp_path, inputs_of(FWD)), "--out"]
    fails(2, *args, f"y={tmp_path}/y.npy", "--schedule", f"{ALL_KEYS},threads=3")
    fails(2, *args, f"y={tmp_path}/no/y.npy")
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (2**20, 63)).flush()
    monkeypatch.setattr("lngen.cli.run_files.read_npy", lambda *_: pytest.fail("elements were read"))
    fails(2, *args, f"y={tmp_path}/y.npy")
    assert not (tmp_path / "y.npy").exists()


def test_only_what_is_asked_for_is_written_or_nothing(tmp_path: Path) -> None:
    files = save(tmp_path, inputs_of(FWD))
    (tmp_path / "folder").mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    fails(2, "run", FWD, "--in", files, "--out", f"y={tmp_path}/y.npy,mean={tmp_path}/folder")
    assert {p.name for p in tmp_path.iterdir()} == before
    prints("run", FWD, "--in", files, "--out", f"rstd={tmp_path}/a,b.npy")
    assert {p.name for p in tmp_path.iterdir()} - before == {"a,b.npy"}


# ---- files ----


def test_run_refuses_a_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    header = read_header(tmp_path / "x.npy")
    assert read_npy(tmp_path / "x.npy", header).shape == (3,)
    np.save(tmp_path / "x.npy", np.zeros(4))
    with pytest.raises(ValueError, match="the file was replaced during the read"):
        read_npy(tmp_path / "x.npy", header)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "array", [np.arange(24.0).reshape(2, 3, 4), np.zeros((0, 8)), np.float32(3), np.arange(3, dtype=">i2")]
)
def test_whole_files_come_back(tmp_path: Path, array: Any, order: Any) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.asarray(array, order=order))
    back = read_npy(path)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.c_contiguous
