"""If these fail, build takes a wrong request, or says nothing clear about it."""

from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from commands import call
from lngen.compile import Compilation
from lngen.errors import ScheduleError
from lngen.spec import parse_spec

FWD = "layernorm.fwd:d=64,dtype=bf16"
BWD = "layernorm.bwd:d=64,dtype=bf16"

BULK = "form=tma,threads=8,rows_per_block=128,vec=8,stages=2"
ASYNC = "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=2"
WIDE = "rmsnorm.fwd:d=131072,dtype=bf16"
FEW = "form=registers,threads=256,rows_per_block=1,vec=8,cluster="
TOO_OLD = [
    (BWD, BULK, "sm_80", "form=tma needs sm_90 or later, got sm_80; use form=registers, cp_async or multipass."),
    (BWD, BULK, "sm_75", "form=tma needs sm_90 or later, got sm_75; use form=registers or multipass."),
    (BWD, ASYNC, "sm_75", "form=cp_async needs sm_80 or later, got sm_75; use form=registers or multipass."),
    (WIDE, f"{FEW}8", "sm_80", "cluster is at most 1 on sm_80, got 8."),
    (WIDE, f"{FEW}16", "sm_120", "cluster is at most 8 on sm_120, got 16."),
]


@pytest.mark.parametrize(("spec", "schedule", "arch", "message"), TOO_OLD)
def test_a_form_an_arch_does_not_have_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, schedule: str, arch: str, message: str
) -> None:
    """For a plan, a build and what is shown; nothing is compiled, nothing written."""
    for where, name in product(("lngen.compile", "lngen.aot.build"), ("compile_cubin", "compile_ptx")):
        monkeypatch.setattr(import_module(where), name, lambda *_, **__: pytest.fail("NVRTC was called"))
    monkeypatch.setattr("lngen.aot.request._otherwise", lambda *_: None)
    with pytest.raises(ScheduleError) as error:
        Compilation(parse_spec(spec)).changed(schedule, "sm_90").cubin(arch)
    assert str(error.value) == message
    done = call("build", spec, "--schedule", schedule, "--arch", f"sm_90,{arch}", "--out", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")
    assert not (tmp_path / "out").exists()
    for stage in ("ptx", "resources", "traffic"):
        shown = call("show", spec, "--stage", stage, "--schedule", schedule, "--arch", arch)
        assert (shown.exit_code, shown.stderr) == (2, f"error: {message}\n"), stage


@pytest.mark.parametrize(("args", "message"), [
    ((FWD, "layernorm.fwd:d=x"), "'d' is expected to be a whole number"),
    ((FWD, BWD, "--schedule", "rows_per_block=3"), "schedule 'form="),
    ((FWD, "--arch", "sm_90,sm_1"),
     "arch is expected to be a list such as sm_80,sm_90+ptx, got 'sm_1'; lngen doctor"),
    ((FWD, "--arch", ","), "a build is expected to be for one arch at least, got none; add for example sm_90."),
    ((FWD, "--arch", "sm_999"), "Unknown arch 'sm_999'"),
    ((FWD, "--emit", "cu,so"),
     "there is no kind of file 'so', expected cu, ptx, cubin, fatbin, vectors, c, cmake."),
    ((FWD, "--emit", ""), "there is no kind of file ''"),
    ((FWD, "--emit", "vectors"), "vectors are expected beside kernels; emit cu, ptx, cubin or fatbin as well."),
    ((FWD, "--emit", "cu", "--arch", "sm_90+ptx"),
     "needs compiled kernels; emit ptx, cubin or fatbin, or drop +ptx."),
    ((FWD, "--rows", "1,few"),
     "rows is expected to be 'all', or a list of numbers from 0 on and 'many', got 'few'."),
    ((FWD, "--rows", "-1"), "got '-1'."),
    ((FWD, "--device", "t4", "--arch", "sm_80"),
     "device t4 is of sm_75, which is not built for; add it to the archs."),
    ((FWD, "--device", "h20"), "There is no device 'h20', expected one of"),
    ((FWD, "--lock", "nowhere.toml"), "nowhere.toml"),
    ((), "Missing argument 'SPEC...': name a spec."),
])  # fmt: skip
def test_what_fails_leaves_nothing(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = call("build", *args, "--out", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
