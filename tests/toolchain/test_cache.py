"""The disk cache among others: entries of other keys, other users, other compilers, and of no cache at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import JSON, fuzzed
from lngen import toolchain
from lngen.toolchain import cache, nvrtc

ONE = 'extern "C" __global__ void one(float *a) { a[threadIdx.x] += 1.0f; }\n'
TWO = 'extern "C" __global__ void two(float *a) { a[threadIdx.x] += 2.0f; }\n'
ENTRY = cache.Entry("sm_80", "", b"one image", ("one",))


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("cupy")


needs_nvrtc = pytest.mark.usefixtures("compiler")


def stored(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


def signed(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def missed(key: str) -> str:
    """Why an entry is not used."""
    with pytest.warns(RuntimeWarning, match="is compiled again") as caught:
        assert cache.load(key) is None
    (warning,) = caught
    found = re.search(r"\((.*)\); it is compiled again and the file replaced\.", str(warning.message))
    assert found
    return found[1]


# ---- entries of others ----


@needs_nvrtc
@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_the_entry_of_another_kernel_is_not_used(cache_dir: Path, kind: str) -> None:
    compile_one = {"cubin": toolchain.compile_cubin, "ptx": toolchain.compile_ptx}[kind]
    built = compile_one(ONE, "sm_80")
    (path,) = stored(cache_dir)
    good = path.read_bytes()
    compile_one(TWO, "sm_80")
    (other,) = stored(cache_dir) - {path}
    shutil.copy(other, path)
    with pytest.warns(RuntimeWarning, match="it is the entry of another key"):
        assert compile_one(ONE, "sm_80") == built
    assert path.read_bytes() == good


def test_an_entry_says_whose_it_is(cache_dir: Path) -> None:
    cache.store("ab12", ENTRY)
    (path,) = stored(cache_dir)
    header = json.loads(path.read_bytes().split(b"\n")[1])
    assert header == {"key": "ab12", "arch": "sm_80", "kernels": ["one"], "log": ""}
    assert cache.load("ab12") == ENTRY


@needs_nvrtc
def test_entries_name_their_kernels(cache_dir: Path) -> None:
    toolchain.compile_cubin(ONE + TWO, "sm_80")
    toolchain.compile_ptx(ONE + TWO, "sm_80")
    headers = [json.loads(path.read_bytes().split(b"\n")[1]) for path in stored(cache_dir)]
    assert [sorted(h["kernels"]) for h in headers] == [["one", "two"]] * 2


LOG = "ptxas info    : Compiling entry function 'one' for 'sm_80'\n"
USED = LOG + "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 8 registers\n"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kernels": ["two"]}, "its kernels are others than it names"),
        ({"kernels": ["one", "two"]}, "its kernels are others than it names"),
        ({"kernels": [1]}, "it names no kernels"),
        ({"kernels": ["image"], "log": USED}, "its kernels are others than it names"),
        ({"kernels": "one"}, "it names no kernels"),
        ({"log": LOG}, "The log of ptxas lacks the registers or spills of 'one':\n.*"),
        ({"log": None}, "it has no log"),
        ({"arch": 80}, "it has no arch"),
        ({"key": "ab13"}, "it is the entry of another key"),
        ({"key": None}, "it is the entry of another key"),
    ],
)
def test_an_entry_whose_parts_do_not_fit_is_not_used(cache_dir: Path, change: dict[str, object], why: str) -> None:
    cache.store("ab12", ENTRY)
    (path,) = stored(cache_dir)
    header = {"key": "ab12", "arch": "sm_80", "kernels": ["one"], "log": "", **change}
    path.write_bytes(signed(json.dumps(header).encode() + b"\none image"))
    with pytest.warns(RuntimeWarning, match=rf"\({why}\); it is compiled again"):
        assert cache.load("ab12") is None
    assert not path.exists()


# ---- other users ----


def test_what_is_kept_is_its_users_alone(cache_dir: Path) -> None:
    before = os.umask(0)
    try:
        cache.store("ab12", ENTRY)
    finally:
        os.umask(before)
    (path,) = stored(cache_dir)
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]
    assert path.parent.parent == cache_dir / "kernels"


@needs_nvrtc
def test_the_file_of_another_user_is_not_used(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = toolchain.compile_cubin(ONE, "sm_80")
    (path,) = stored(cache_dir)
    real = os.fstat

    def foreign(handle: int) -> os.stat_result:
        found = real(handle)
        return os.stat_result((*found[:4], os.geteuid() + 7, *found[5:10]))

    monkeypatch.setattr(cache.os, "fstat", foreign)  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=rf"not yours \(user {os.geteuid() + 7} owns it\)"):
        assert toolchain.compile_cubin(ONE, "sm_80") == built
    monkeypatch.setattr(cache.os, "fstat", real)  # type: ignore[attr-defined]
    assert stored(cache_dir) == {path}
    assert toolchain.compile_cubin(ONE, "sm_80") == built


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_used(cache_dir: Path, mode: int) -> None:
    cache.store("ab12", ENTRY)
    (path,) = stored(cache_dir)
    path.chmod(mode)
    assert missed("ab12") == "others may write it"
    cache.store("ab12", ENTRY)
    path.chmod(0o644)
    assert cache.load("ab12") == ENTRY


# ---- other compilers ----


@needs_nvrtc
def test_another_build_of_the_compiler_has_entries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.compile_cubin(ONE, "sm_80")
    build = toolchain.compiler_build()
    major, minor = toolchain.nvrtc_version()
    assert re.search(rf"\bV{major}\.{minor}\.\d+", build), build

    def called(*_: object) -> None:
        raise AssertionError("NVRTC was called")

    monkeypatch.setattr(nvrtc, "_compiled", called)
    toolchain.compile_cubin(ONE, "sm_80")
    monkeypatch.setattr(nvrtc, "compiler_build", lambda: build + "1")
    with pytest.raises(AssertionError, match="NVRTC was called"):
        toolchain.compile_cubin(ONE, "sm_80")


# ---- no entries ----


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_not_waited_for(cache_dir: Path, make: Callable[[Path], object]) -> None:
    path = cache_dir / "kernels" / "ab" / "ab12"
    path.parent.mkdir(parents=True)
    make(path)
    assert cache.load("ab12") is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.store("ab12", ENTRY)
    assert cache.load("ab12") == (None if path.is_dir() else ENTRY)
    assert len([*path.parent.iterdir()]) == 1


def test_a_huge_file_is_not_read_whole(cache_dir: Path) -> None:
    cache.store("ab12", ENTRY)
    (path,) = stored(cache_dir)
    os.truncate(path, 2**40)
    assert missed("ab12") == "it is larger than 67108864 bytes"


NAMES = st.lists(st.sampled_from(["one", "image", "", "two"]) | st.text(max_size=2), max_size=2)
VALUES = st.none() | st.integers() | st.text(max_size=3) | NAMES | st.sampled_from(["ab12", LOG, USED])
HEADERS = st.dictionaries(st.sampled_from(["key", "arch", "log", "kernels"]), VALUES)
NEAR = HEADERS.map(lambda change: {"key": "ab12", "arch": "sm_80", "kernels": ["one"], "log": "", **change})
PAYLOADS = st.tuples(NEAR.map(lambda h: json.dumps(h).encode()) | JSON, st.just(b"one image") | st.binary())


@fuzzed
@given(PAYLOADS.map(b"\n".join).map(signed) | st.binary())
def test_any_entry_is_used_whole_or_not_at_all(cache_dir: Path, raw: bytes) -> None:
    cache.store("ab12", ENTRY)
    path = cache_dir / "kernels" / "ab" / "ab12"
    path.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cache.load("ab12")
    assert (found is not None) == path.exists()
    if found is not None:
        assert all(name.encode() in found.image for name in found.kernels)
        cache.store("ab12", found)
        assert cache.load("ab12") == found
