"""If these fail, build compiles for an arch that lacks what a schedule needs, or leaves something behind."""

from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from commands import call, fails
from lngen.compile import Compilation
from lngen.errors import ScheduleError
from lngen.spec import parse_spec

FWD = "layernorm.fwd:d=64,dtype=bf16"
BWD = "layernorm.bwd:d=64,dtype=bf16"

BULK = "form=tma,threads=8,rows_per_block=128,vec=8,stages=2"
ASYNC = "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=2"
WIDE = "rmsnorm.fwd:d=131072,dtype=bf16"
FEW = "form=registers,threads=256,rows_per_block=1,vec=8,cluster="
TOO_OLD = [(BWD, BULK, "sm_80"), (BWD, ASYNC, "sm_75"), (WIDE, f"{FEW}8", "sm_80"), (WIDE, f"{FEW}16", "sm_120")]


@pytest.mark.parametrize(("spec", "schedule", "arch"), TOO_OLD)
def test_a_form_an_arch_does_not_have_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, schedule: str, arch: str
) -> None:
    """The same for a plan, a build and what is shown; nothing is compiled, nothing written."""
    for where, name in product(("lngen.compile", "lngen.aot.build"), ("compile_cubin", "compile_ptx")):
        monkeypatch.setattr(import_module(where), name, lambda *_, **__: pytest.fail("NVRTC was called"))
    monkeypatch.setattr("lngen.aot.request._otherwise", lambda *_: None)
    with pytest.raises(ScheduleError) as error:
        Compilation(parse_spec(spec)).changed(schedule, "sm_90").cubin(arch)
    message = f"error: {error.value}\n"
    done = call("build", spec, "--schedule", schedule, "--arch", f"sm_90,{arch}", "--out", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (2, message)
    assert not (tmp_path / "out").exists()
    for stage in ("ptx", "resources", "traffic"):
        shown = call("show", spec, "--stage", stage, "--schedule", schedule, "--arch", arch)
        assert (shown.exit_code, shown.stderr) == (2, message), stage


def test_an_arch_that_the_compiler_does_not_know_leaves_nothing(tmp_path: Path) -> None:
    assert "Unknown arch 'sm_999'" in fails(2, "build", FWD, "--arch", "sm_999", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
