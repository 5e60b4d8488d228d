"""If these fail, an environment variable or a path of a user is ignored, hangs lngen, or ends in a traceback."""

import json
import math
import os
import stat
from pathlib import Path

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import JSON, fuzzed
from lngen import config
from lngen.compiler.compile import dump
from lngen.compiler.lower import lower
from lngen.compiler.problem import problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError
from lngen.files import DEEPEST, parse_json, read, shown, write_all


def test_regular_files_are_read_up_to_a_bound(tmp_path: Path) -> None:
    """Nothing else is waited for: a FIFO without a writer would hold up a plain open for ever."""
    before = os.listdir("/dev/fd")
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 2**40)
    os.mkfifo(tmp_path / "fifo")
    for name, target in (("link", "a"), ("to fifo", "fifo")):
        (tmp_path / name).symlink_to(target)
    assert read(tmp_path / "a", 5) == read(tmp_path / "link", 5) == b"12345"
    assert read("/proc/self/status", 10**6).startswith(b"Name:")
    wanted = {
        tmp_path / "a": "it is larger than 4 bytes", tmp_path / "holes": "it is larger than 4 bytes",
        "/proc/self/status": "it is larger than 4 bytes", tmp_path / "fifo": "it is a FIFO, not a regular file",
        tmp_path / "to fifo": "it is a FIFO, not a regular file", "/dev/full": "it is a device, not a regular file",
        "/dev/zero": "it is a device, not a regular file", tmp_path: "Is a directory",
        tmp_path / "none": "No such file or directory", "x" * 300: "File name too long",
        "a\0b": "no file can have this name", "\ud800": "no file can have this name",
    }  # fmt: skip
    for path, why in wanted.items():
        with pytest.raises(OSError, match=why):
            read(path, 4)
    assert os.listdir("/dev/fd") == before, "a refused file is closed"


def test_json_at_its_bounds_is_read() -> None:
    deep = b"[" * DEEPEST + b"1" + b"]" * DEEPEST
    assert json.dumps(parse_json(deep)).encode() == deep
    found = parse_json(b'["\\ud83d\\ude00", 18446744073709551615, -9223372036854775808, 1e308, -0]')
    assert found == ["\U0001f600", 2**64 - 1, -(2**63), 1e308, 0]


NEAR_JSON = st.text('[]{}:,"\\u d890eE+-.1').map(str.encode)


@fuzzed
@given(JSON | NEAR_JSON | st.binary())
def test_whatever_json_gives_can_be_printed_and_written_again(raw: bytes) -> None:
    try:
        value = parse_json(raw)
    except ValueError:
        return
    again = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2).encode()
    assert parse_json(again) == value
    assert len(shown(value)) < 1000


def test_what_is_shown_of_a_value_is_short() -> None:
    nested: object = 1
    for _ in range(10_000):
        nested = {"a": nested}
    for value in (nested, "x" * 10**6, int("f" * 5000, 16), math.inf, b"a\n"):
        assert len(shown(value)) < 200
        assert "\n" not in shown(value)


def test_what_is_no_file_is_not_written(tmp_path: Path) -> None:
    """Nor is what belongs with it; a link to a device is one."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("a\0b", "\ud800", "x" * 300, "fifo", "link"):
        with pytest.raises(LngenError, match=r"cannot write '.*; name a place that can be written to\."):
            write_all({tmp_path / "good": b"1", tmp_path / name: b"2"})
        assert {path.name for path in tmp_path.iterdir()} == {"fifo", "link"}
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


# ---- the environment ----


def test_debug_level_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LNGEN_DEBUG", raising=False)
    assert config.debug_level() == 0
    for level in range(6):
        monkeypatch.setenv("LNGEN_DEBUG", str(level))
        assert config.debug_level() == level
    for text in ("6", "-1", "yes", "1.5", "0x1", "¹"):
        monkeypatch.setenv("LNGEN_DEBUG", text)
        with pytest.raises(LngenError, match="LNGEN_DEBUG must be a whole number from 0 to 5") as caught:
            config.debug_level()
        assert repr(text) in str(caught.value)


def test_folders_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty variable is an unset one."""
    for name in ("LNGEN_DEBUG", "LNGEN_DUMP", "LNGEN_CACHE_DIR", "LNGEN_PACKS"):
        monkeypatch.setenv(name, "")
    assert (config.debug_level(), config.dump_dir(), config.pack_dirs()) == (0, None, ())
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
