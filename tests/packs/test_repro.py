"""If these fail, a file of ``lngen repro`` launches a kernel wrongly, or does not tell wrong bits from right ones."""

import ast
import ctypes
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from commands import call, fails, prints
from fake_driver import FakeDriver
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import device_for
from lngen.compiler.spec import parse_spec
from lngen.errors import MissingError
from lngen.launch.driver import PROGRAMMATIC_STREAM_SERIALIZATION
from lngen.packs import repro_program
from lngen.packs.repro import repro

pytest.importorskip("cupy")

L2_CACHE_SIZE = 38  # CUdevice_attribute
PREFETCHED = "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes,single_launch=yes"
CLUSTERS = "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=2,grid=4,tma_store=yes"

# Specs, schedules, rows and archs: every dtype and attribute of a launch, and rows that are no whole vectors.
CASES: dict[str, tuple[str, str, int, str]] = {
    "rows": ("layernorm.fwd:d=96,dtype=bf16", "form=registers,threads=8,rows_per_block=4,vec=8", 5, "sm_90"),
    "odd rows": ("rmsnorm.fwd:d=77,dtype=f16", "", 3, "sm_80"),
    "eps of the call": ("rmsnorm.fwd:d=64,dtype=f64,eps=run", "", 3, "sm_90"),
    "two kernels": ("layernorm.bwd:d=96,dtype=f32,blocks=2", "", 40, "sm_80"),
    "added, two distances": ("rmsnorm.bwd:d=64,dtype=bf16,accumulate=gamma,strides=2,blocks=2", "", 5, "sm_90"),
    "one launch": ("layernorm.bwd:d=1000,dtype=bf16,blocks=3", PREFETCHED, 20, "sm_90"),
    "clusters": ("layernorm.fwd:d=16384,dtype=bf16", CLUSTERS, 2, "sm_90"),
    "maximum of all rows": ("rmsnorm.fwd:d=64,dtype=f32,quant=int8,amax=yes", "", 5, "sm_80"),
    "positions": ("rope.fwd:d=128,dtype=bf16,head=64,positions=i64", "", 5, "sm_90"),
    "no statistics": ("softmax.bwd:d=33,dtype=f32", "", 4, "sm_90"),
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "repro.py"


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the file as a program, which finds a fake GPU or no driver: its exit code and what it prints."""

    def made(gpu: FakeDriver | None, runs: int = 0) -> tuple[int, str, str]:
        def loaded(name: str) -> FakeDriver:
            if gpu is None or name != "libcuda.so.1":
                raise OSError(f"{name}: no such file")
            return gpu

        monkeypatch.setattr(ctypes, "CDLL", loaded)
        monkeypatch.setattr(sys, "argv", [str(path), str(runs)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        code: Any = ended.value.code
        return code, *capsys.readouterr()

    return made


def written(case: str, path: Path) -> tuple[FakeDriver, KernelSet]:
    """The file of a case, and a GPU that knows its machine code."""
    spec, schedule, rows, arch = CASES[case]
    kernels = Compilation(parse_spec(spec)).changed(schedule, arch, rows=rows)
    path.write_text(repro(kernels, arch, device_for(arch), rows), encoding="utf-8")
    gpu = FakeDriver((int(arch[3]), int(arch[4])), version=14000)
    gpu.attributes[L2_CACHE_SIZE] = 1 << 16
    gpu.knows(kernels.cubin(arch).image, kernels.ptx(arch, lines=True), arch, source=kernels.text)
    return gpu, kernels


def edit(path: Path, before: str, line: str) -> None:
    """Puts a line before the one that starts so."""
    text = path.read_text(encoding="utf-8")
    (found,) = [old for old in text.splitlines() if old.strip().startswith(before)]
    indent = found[: len(found) - len(found.lstrip())]
    path.write_text(text.replace(found, f"{indent}{line}\n{found}"), encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_a_file_gets_the_bits_of_the_interpreter(case: str, path: Path, run: Run) -> None:
    gpu, kernels = written(case, path)
    plan, arch = kernels.plan, CASES[case][3]
    code, out, _ = run(gpu)
    assert (code, out.count(" same bits\n")) == (0, len(plan.outputs)), out
    assert [done.kernel for done in gpu.launched] == [k.name for k in plan.kernels]
    first, k = gpu.launched[0], plan.kernels[0]
    assert (first.cooperative, first.cluster[0], first.shared >= k.dynamic) == (k.cooperative, k.cluster, True)
    early = [PROGRAMMATIC_STREAM_SERIALIZATION in done.attributes for done in gpu.launched]
    assert early == [False] + [arch == "sm_90"] * (len(plan.kernels) - 1)


def test_wrong_bits_are_seen_and_where_they_are(path: Path, run: Run) -> None:
    """One bit of x in the third of 5 rows of 96: what is wrong begins in the part of element 192."""
    gpu, _ = written("rows", path)
    edit(path, "memory[name] = gpu.memory(bits.nbytes, 0)", "bits[-3:-2] ^= np.uint16(64 * (name == 'x'))")
    code, out, _ = run(gpu)
    assert code == 1
    assert "launch 1: y bf16[5, 96] DIFFERS in 4 of 16 parts, first in elements 180 to 209\n  sha256 " in out
    assert "launch 1: mean f32[5] DIFFERS in 1 of 5 parts, first in elements 2 to 2\n" in out
    sha256 = runpy.run_path(str(path))["CASE"]["results"]["rstd"][2]
    gpu, _ = written("rows", path)
    path.write_text(path.read_text(encoding="utf-8").replace(sha256, f"{int(sha256, 16) ^ 1:064x}"), encoding="utf-8")
    code, out, _ = run(gpu)
    assert (code, out.count("same bits"), out.count("rstd f32[5] DIFFERS in 0 of 5 parts")) == (1, 2, 1)


def test_inputs_are_the_same_everywhere() -> None:
    """Values of the first version; every dtype has those of f64, without the digits that it lacks."""
    drawn = {t: repro_program.drawn(0, "x", t, (2, 2), -1.5, 2.5) for t in ("f16", "bf16", "f32", "f64")}
    assert {t: bits[1].tolist() for t, bits in drawn.items()} == {
        "f16": [0x3BC4, 0x30BE], "bf16": [0x3F78, 0x3E17], "f32": [0x3F788EC6, 0x3E17D4D5],
        "f64": [0x3FEF11D8C106ABA0, 0x3FC2FA9AA25B9EA0],
    }  # fmt: skip


def test_where_a_result_differs_is_told() -> None:
    """Of 32 elements each part has two; every NaN is the same one."""
    bits = np.arange(32, dtype=np.float32).view(np.uint32)
    expected = repro_program.identity(bits, "f32")
    assert repro_program.compared(bits, "f32", *expected) == "same bits"
    other = bits.copy()
    other[[5, 30]] = np.array([7, np.nan], np.float32).view(np.uint32)
    first, sha256, values = repro_program.compared(other, "f32", *expected).splitlines()
    assert first == "DIFFERS in 2 of 16 parts, first in elements 4 to 5"
    assert sha256 == f"  sha256 {repro_program.identity(other, 'f32')[0]}, expected {expected[0]}"
    assert values == "  values 0 to 31; 1 NaN"
    nan, infinity = (np.array(bits, np.uint16) for bits in ([0x7FC0, 0xFF81], [0x7F80, 0xFF80]))
    same = [repro_program.identity(b, "bf16") == repro_program.identity(b[::-1], "bf16") for b in (nan, infinity)]
    assert same == [True, False]
    none = np.full(3, 0x7FC0, np.uint16)
    assert repro_program.compared(none, "bf16", *expected).endswith("values none finite; 3 NaN")


def test_calls_are_timed_and_compared_again(path: Path, run: Run) -> None:
    gpu, _ = written("rows", path)
    code, out, _ = run(gpu, 3)
    assert (code, len(gpu.launched), out.count(" same bits")) == (0, 14, 6)
    assert "time 1000.00 us, the median of 3 runs (1000.00 to 1000.00); 0 GB/s of the 2344 bytes" in out
    edit(path, "us, moved = ", 'gpu.call("cuMemsetD8Async", memory["x"], 1, c_size_t(2), None)')
    code, out, _ = run(gpu, 1)
    assert (code, out.count(" same bits")) == (1, 3)
    assert "launch 12: y bf16[5, 96] DIFFERS in 4 of 16 parts, first in elements 0 to 29" in out


def test_what_a_machine_lacks_is_one_sentence(path: Path, run: Run) -> None:
    gpu, _ = written("rows", path)
    gpu.refuse["cuLaunchKernelEx"] = 720
    for there, code, said in (
        (None, 3, "A GPU with an NVIDIA driver is expected, but libcuda.so.1 cannot be loaded: libcuda.so.1: no such"),
        (FakeDriver(devices=0), 3, "the driver finds none that can be used: CUDA_ERROR_NO_DEVICE (100)."),
        (FakeDriver((8, 0)), 3, "is for sm_90, and this driver with a GPU of sm_80 does not load it: "),
        (gpu, 1, "cuLaunchKernelEx fails: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (720)."),
    ):
        ended, _, err = run(there)
        assert (ended, err.count("\n")) == (code, 1)
        assert said in err


def test_a_file_is_python_of_3_9_and_the_same_each_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("repro", "rmsnorm.fwd:d=64,dtype=f32", "--rows", "3", "--arch", "sm_80", "--seed", "7")
    text = prints(*args)
    ast.parse(text, feature_version=(3, 9))
    assert call(*args, "--out", path).stdout == ""
    assert path.read_text(encoding="utf-8") == text
    assert text.splitlines()[11] == "  made by   lngen repro SPEC --schedule SCHEDULE --arch sm_80 --rows 3 --seed 7"
    assert prints(*args[:-1], "8") != text
    monkeypatch.setattr(KernelSet, "spilled", lambda *_: 64)
    assert "; registers spill, 64 bytes a thread\n" in prints(*args)
    monkeypatch.setattr(KernelSet, "cubin", Mock(side_effect=MissingError("Compiling needs CuPy")))
    assert fails(3, *args) == "error: Compiling needs CuPy\n"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gets_the_same_bits(case: str, path: Path) -> None:
    from lngen.launch.runtime.launcher import device_arch

    spec, schedule, rows, _ = CASES[case]
    prints("repro", spec, "--schedule", schedule, "--rows", str(rows), "--arch", device_arch(0), "--out", path)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
