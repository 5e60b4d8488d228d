"""If these fail, a command is missing, loads too much, or judges wrongly: check, doctor, and the table for tuning."""

import json
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

import lngen
from child import output, start
from commands import call, fails, prints
from lngen.check.spec_checks import Result as Checked
from lngen.cli import COMMANDS, installation
from lngen.errors import MissingError
from lngen.spec import Spec
from paths import ROOT

FWD = "layernorm.fwd:d=64,dtype=f32"
BWD = "layernorm.bwd:d=64,dtype=bf16"


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


def test_version_and_unknown_commands() -> None:
    assert lngen.__version__ in prints("--version")
    assert "No such command 'shwo'" in fails(2, "shwo")


def test_help_and_list_load_neither_cupy_nor_torch() -> None:
    code = """
        import sys
        from lngen.cli import cli
        for a in (['--help'], ['help', 'layout'], ['list'], ['show', 'layernorm.bwd:d=8', '--stage', 'graph']):
            cli.main(a, standalone_mode=False)
        print(sorted({'cupy', 'torch'} & set(sys.modules)))
    """
    assert output(start(code)).splitlines()[-1] == "[]"


def test_importing_lngen_is_cheap_and_names_come_when_asked_for() -> None:
    code = """
        import sys, lngen
        assert 'numpy' not in sys.modules
        for name in lngen.__all__: assert getattr(lngen, name) is getattr(lngen, name), name
        assert sorted(lngen.__all__) == dir(lngen) and lngen.interpret.interpret
        assert not {'cupy', 'torch'} & set(sys.modules)
    """
    output(start(code))
    with pytest.raises(AttributeError, match="no attribute 'jit'"):
        _ = lngen.jit  # type: ignore[attr-defined]


# ---- check ----


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


# ---- doctor ----


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


def test_doctor_sees_what_is_not_installed_or_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def not_installed(name: str) -> str:
        raise installation.PackageNotFoundError(name)

    def missing(name: str) -> Path:
        raise MissingError(f"the data folder {name!r} is missing: expected it there; reinstall")

    (tmp_path / "file").touch()
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(installation, "version", not_installed)
    monkeypatch.setattr(installation, "data_dir", missing)
    code, found = states()
    assert code == 3
    for what, state, fix in (
        ("numpy", "missing", 'pip install "numpy>=2.0"'),
        ("torch", "note", 'pip install ".[bench]" in the checkout of lngen'),
        ("cache", "note", "set LNGEN_CACHE_DIR to a folder that can be written to"),
        ("templates", "missing", "pip install --force-reinstall lngen"),
        ("generated", "note", "pip install --force-reinstall lngen"),
    ):
        assert (found[what]["state"], found[what]["fix"]) == (state, fix)


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


# ---- tune, without a GPU ----


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
