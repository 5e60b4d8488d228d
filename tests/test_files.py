"""If these fail, a path of a user hangs lngen, exhausts its memory, or loses a file that is half written."""

import json
import math
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import JSON, fuzzed
from lngen.errors import LngenError
from lngen.files import DEEPEST, opened, parse_json, read, shown, write_all


def why_not(path: Path | str, limit: int = 100) -> str | None:
    try:
        read(path, limit)
    except OSError as error:
        return error.strerror
    return None


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read(path, 5) == read(tmp_path / "link", 5) == b"12345"
    assert why_not(path, 4) == "it is larger than 4 bytes"


def test_huge_files_and_files_without_a_size_are_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 2**40)
    assert why_not(tmp_path / "holes") == "it is larger than 100 bytes"
    assert why_not("/proc/self/status", 10) == "it is larger than 10 bytes"
    assert read("/proc/self/status", 10**6).startswith(b"Name:")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """None of these is waited for: a FIFO without a writer would hold up a plain open for ever."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    assert why_not(tmp_path / "fifo") == why_not(tmp_path / "link") == "it is a FIFO, not a regular file"
    assert why_not("/dev/full") == why_not("/dev/zero") == "it is a device, not a regular file"
    assert why_not(tmp_path) == "Is a directory"
    assert why_not(tmp_path / "none") == "No such file or directory"
    assert why_not("x" * 300) == "File name too long"
    assert why_not("a\0b") == why_not("\ud800") == "no file can have this name"


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    before = os.listdir("/dev/fd")
    with pytest.raises(IsADirectoryError):
        opened(tmp_path)
    assert os.listdir("/dev/fd") == before


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


def test_a_name_no_file_can_have_is_one_sentence(tmp_path: Path) -> None:
    for name in ("a\0b", "\ud800", "x" * 300):
        with pytest.raises(LngenError, match=r"cannot write '.*; name a place that can be written to\."):
            write_all({tmp_path / "good": b"1", tmp_path / name: b"2"})
        assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("link", [False, True])
def test_no_device_is_replaced(tmp_path: Path, link: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "fifo"
    if link:
        path = tmp_path / "link"
        path.symlink_to("fifo")
    with pytest.raises(LngenError, match=f"cannot write '{path}': it is not a regular file; name a place"):
        write_all({path: b"x"})
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
