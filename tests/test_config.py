"""The environment: read at call time, empty means unset, nonsense gets a sentence."""

from pathlib import Path

import platformdirs
import pytest

from lngen import config
from lngen.errors import LngenError


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


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LNGEN_DEBUG", "LNGEN_DUMP", "LNGEN_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    assert config.debug_level() == 0
    assert config.dump_dir() is None
    assert config.cache_dir() == platformdirs.user_cache_path("lngen")


def test_folders_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNGEN_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert config.dump_dir() == tmp_path / "dump"
    assert config.cache_dir() == tmp_path / "cache"
    assert not list(tmp_path.iterdir()), "asking for a folder must not create it"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNGEN_CACHE_DIR", "~/kernels")
    assert config.cache_dir() == Path.home() / "kernels"
