"""If these fail, an environment variable is ignored, or a wrong one ends in a traceback."""

from pathlib import Path

import platformdirs
import pytest

from lngen import config
from lngen.compile import dump
from lngen.errors import LngenError
from lngen.lower import lower
from lngen.problem import problem
from lngen.schedule import ranked
from lngen.spec import parse_spec


@pytest.mark.parametrize("level", range(6))
def test_debug_level_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    monkeypatch.delenv("LNGEN_DEBUG", raising=False)
    assert config.debug_level() == 0
    monkeypatch.setenv("LNGEN_DEBUG", str(level))
    assert config.debug_level() == level


@pytest.mark.parametrize("text", ["6", "-1", "yes", "1.5", "0x1", "¹"])
def test_a_bad_debug_level_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LNGEN_DEBUG", text)
    with pytest.raises(LngenError, match=r"LNGEN_DEBUG must be a whole number from 0 to 5") as caught:
        config.debug_level()
    assert repr(text) in str(caught.value)


def test_folders_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty variable is an unset one."""
    for name in ("LNGEN_DEBUG", "LNGEN_DUMP", "LNGEN_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    assert (config.debug_level(), config.dump_dir()) == (0, None)
    assert config.cache_dir() == platformdirs.user_cache_path("lngen")
    monkeypatch.setenv("LNGEN_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert config.dump_dir() == tmp_path / "dump"
    assert config.cache_dir() == tmp_path / "cache"
    assert not list(tmp_path.iterdir()), "asking for a folder must not create it"


def test_a_tilde_is_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNGEN_CACHE_DIR", "~/kernels")
    assert config.cache_dir() == Path.home() / "kernels"
    monkeypatch.setenv("LNGEN_CACHE_DIR", "~nosuch-user-here/kernels")
    with pytest.raises(LngenError, match=r"LNGEN_CACHE_DIR .* home folder in '~nosuch-user-here/kernels' is unknown"):
        config.cache_dir()


def test_the_ladder_prints_and_dumps_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = parse_spec("rmsnorm.bwd:d=8")
    plan = lower(spec, ranked(problem(spec.graph(), 8))[0])
    monkeypatch.setenv("LNGEN_DEBUG", "3")
    dump(plan, "the text")
    printed = capsys.readouterr().err
    assert all(f"{name}.ir ----" in printed for name in ("00-build", "01-vjp", "02-simplify"))
    assert "kernel.cu" not in printed
    monkeypatch.setenv("LNGEN_DEBUG", "4")
    dump(plan, "the text")
    assert "kernel.cu ----\nthe text" in capsys.readouterr().err
    monkeypatch.setenv("LNGEN_DEBUG", "0")
    monkeypatch.setenv("LNGEN_DUMP", str(tmp_path / "dump"))
    dump(plan, "the text")
    assert capsys.readouterr().err == ""
    written = {path.name for path in (tmp_path / "dump" / plan.name).iterdir()}
    assert written >= {"00-build.ir", "01-vjp.ir", "plan.txt", "kernel.cu"}
