"""If these fail, a kernel is taken from a wrong, foreign or damaged file, or processes disturb each other."""

import hashlib
import json
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from child import output, start
from fuzz import JSON, fuzzed
from lngen.compiler import toolchain
from lngen.compiler.toolchain import cache, nvrtc
from lngen.errors import MissingError
from lngen.files import load_cupy
from other_user import UID

ONE = 'extern "C" __global__ void one(float *a) { a[threadIdx.x] += 1.0f; }\n'
TWO = 'extern "C" __global__ void two(float *a) { a[threadIdx.x] += 2.0f; }\n'
ENTRY = cache.Entry("sm_80", "", b"one image", ("one",))


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    found = re.search(r"\((.*)\); it is compiled again and the file replaced\.", str(warning.message), re.DOTALL)
    assert found
    return found[1]


# ---- hits and misses ----


def test_an_entry_comes_back_as_it_was_and_is_its_users_alone(cache_dir: Path) -> None:
    entry = cache.Entry("sm_80", "a log\nwith “lines”", bytes(range(256)) * 3)
    assert cache.load("ab12") is None
    before = os.umask(0)
    try:
        cache.store("ab12", entry)
    finally:
        os.umask(before)
    assert cache.load("ab12") == entry
    path = cache_dir / "kernels" / "ab" / "ab12"
    assert stored(cache_dir) == {path}
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_the_key_covers_everything_the_bytes_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, Any] = {
        "source": "source", "headers": {"a": "text"}, "options": ("-a", "-b"), "arch": "sm_80", "kind": "cubin",
        "compiler": "NVRTC 13.4.1",
    }  # fmt: skip
    others = {
        "source": "source ", "headers": {"a": "texts"}, "options": ("-a-b",), "arch": "sm_86", "kind": "ptx",
        "compiler": "NVRTC 13.4.2",
    }  # fmt: skip
    keys = [cache.key_of(**parts | change) for change in ({}, *({name: other} for name, other in others.items()))]
    monkeypatch.setattr(cache, "_FORMAT", cache._FORMAT + 1)
    keys.append(cache.key_of(**parts))
    assert len({*keys}) == len(keys) == 8
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


@needs_nvrtc
def test_a_hit_does_not_call_nvrtc(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """Another text, arch or build of the compiler is another entry; another name of the text is not."""
    build = toolchain.compiler_build()
    major, minor = toolchain.nvrtc_version()
    assert re.search(rf"\bV{major}\.{minor}\.\d+", build), build
    built = toolchain.compile_cubin(ONE, "sm_80"), toolchain.compile_ptx(ONE, "sm_80")
    assert len(stored(cache_dir)) == 2
    monkeypatch.setattr(nvrtc, "_compiled", lambda *_: pytest.fail("NVRTC was called"))
    assert (toolchain.compile_cubin(ONE, "sm_80", name="x.cu"), toolchain.compile_ptx(ONE, "sm_80")) == built
    for source, arch, compiler in ((ONE + " ", "sm_80", build), (ONE, "sm_86", build), (ONE, "sm_80", build + "1")):
        monkeypatch.setattr(nvrtc, "compiler_build", lambda compiler=compiler: compiler)
        with pytest.raises(pytest.fail.Exception, match="NVRTC was called"):
            toolchain.compile_cubin(source, arch)


@needs_nvrtc
def test_a_cubin_is_found_by_its_key_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that remembers the key does."""
    built = toolchain.compile_cubin(ONE, "sm_80")
    assert toolchain.library_stamp() == toolchain.file_stamp(toolchain.library_stamp()[0])  # type: ignore[index]
    monkeypatch.setattr(nvrtc, "_library", lambda: pytest.fail("NVRTC was loaded"))
    assert toolchain.cached_cubin(built.key) == built
    assert toolchain.cached_cubin("0" * 64) is None


@needs_nvrtc
def test_threads_that_want_the_same_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others beside it."""
    compiled, both = list[str](), threading.Barrier(2, timeout=60)
    real = nvrtc._compiled

    def compile_one(library: Any, source: str, *more: Any) -> Any:
        compiled.append(source)
        both.wait()  # ONE and TWO are compiled at the same time
        return real(library, source, *more)

    toolchain.compiler_build()
    monkeypatch.setattr(nvrtc, "_compiled", compile_one)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda source: toolchain.compile_cubin(source, "sm_80"), [ONE, ONE, TWO, TWO])]
    assert sorted(compiled) == [ONE, TWO]
    assert found[0] == found[1] != found[2] == found[3]


@needs_nvrtc
def test_entries_name_their_kernels(cache_dir: Path) -> None:
    toolchain.compile_cubin(ONE + TWO, "sm_80")
    toolchain.compile_ptx(ONE + TWO, "sm_80")
    headers = [json.loads(path.read_bytes().split(b"\n")[1]) for path in stored(cache_dir)]
    assert [sorted(h["kernels"]) for h in headers] == [["one", "two"]] * 2


# ---- entries that are not trusted ----


@needs_nvrtc
@pytest.mark.parametrize("how", ["cut", "another's", "another user's"])
@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_an_entry_that_is_not_trusted_is_compiled_again(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    compile_one = {"cubin": toolchain.compile_cubin, "ptx": toolchain.compile_ptx}[kind]
    built = compile_one(ONE, "sm_80")
    (path,) = stored(cache_dir)
    good = path.read_bytes()
    with monkeypatch.context() as patched:
        if how == "cut":
            why = "it does not have the hash it was written with"
            path.write_bytes(good[:-1])
        elif how == "another's":
            why = "it is the entry of another key"
            compile_one(TWO, "sm_80")
            (other,) = stored(cache_dir) - {path}
            other.replace(path)
        else:
            why, user, real = f"user {os.geteuid() + 7} owns it", os.geteuid() + 7, os.fstat
            foreign = lambda handle: os.stat_result((*real(handle)[:4], user, *real(handle)[5:10]))  # noqa: E731
            patched.setattr(os, "fstat", foreign)
        with pytest.warns(RuntimeWarning, match=rf"{re.escape(str(path))} .* not yours \({why}\)") as caught:
            assert compile_one(ONE, "sm_80") == built
    assert [w.filename for w in caught] == [__file__]
    assert (stored(cache_dir), path.read_bytes()) == ({path}, good)
    assert compile_one(ONE, "sm_80") == built


LOG = "ptxas info    : Compiling entry function 'one' for 'sm_80'\n"
USED = LOG + "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 8 registers\n"
WHOLE = {"key": "ab12", "arch": "sm_80", "kernels": ["one"], "log": ""}


def header(**change: object) -> Callable[[Path], object]:
    """An entry whose header is changed, signed as a whole one is."""
    return lambda path: path.write_bytes(signed(json.dumps(WHOLE | change).encode() + b"\none image"))


def payload(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(signed(text))


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


HASH, OTHERS = "it does not have the hash it was written with", "its kernels are others than it names"
ANOTHER = "it is the entry of another key"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "another kernel": (header(kernels=["two"]), OTHERS),
    "a kernel more": (header(kernels=["one", "two"]), OTHERS),
    "no kernel": (header(kernels=["image"], log=USED), OTHERS),
    "a number for a kernel": (header(kernels=[1]), "it names no kernels"),
    "a text for kernels": (header(kernels="one"), "it names no kernels"),
    "half a log": (header(log=LOG), "The log of ptxas lacks the registers or spills of 'one':\n.*"),
    "no log": (header(log=None), "it has no log"),
    "a number for an arch": (header(arch=80), "it has no arch"),
    "another key": (header(key="ab13"), ANOTHER),
    "no key": (header(key=None), ANOTHER),
    "no JSON": (payload(b"{arch\nimage"), "Expecting property name.*"),
    "a number": (payload(b"3\nimage"), ANOTHER),
    "no text": (payload(b"\xff\xfe\nimage"), "it is not UTF-8 text"),
    "nothing": (damaged(lambda raw: b""), HASH),
    "cut off": (damaged(lambda raw: raw[:-1]), HASH),
    "no image": (damaged(lambda raw: raw[:70]), HASH),
    "one bit": (damaged(lambda raw: raw[:-40] + bytes([raw[-40] ^ 1]) + raw[-39:]), HASH),
    "a byte more": (damaged(lambda raw: raw + b"\0"), HASH),
    "for a group to write": (lambda path: path.chmod(0o620), "others may write it"),
    "for all to write": (lambda path: path.chmod(0o602), "others may write it"),
    "huge": (lambda path: os.truncate(path, 2**40), "it is larger than 67108864 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_deleted(cache_dir: Path, name: str) -> None:
    cache.store("ab12", ENTRY)
    (path,) = stored(cache_dir)
    change, why = WRONG[name]
    change(path)
    assert re.fullmatch(why, missed("ab12"), re.DOTALL)
    assert not path.exists()
    cache.store("ab12", ENTRY)
    path.chmod(0o644)
    assert cache.load("ab12") == ENTRY


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


NAMES = st.lists(st.sampled_from(["one", "image", "", "two"]) | st.text(max_size=2), max_size=2)
VALUES = st.none() | st.integers() | st.text(max_size=3) | NAMES | st.sampled_from(["ab12", LOG, USED])
HEADERS = st.dictionaries(st.sampled_from(["key", "arch", "log", "kernels"]), VALUES)
NEAR = HEADERS.map(lambda change: WHOLE | change)
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


# ---- writing ----


@needs_nvrtc
def test_an_unwritable_folder_costs_one_warning_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / "below"
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning) as caught:
        first, second = (toolchain.compile_cubin(ONE, "sm_80") for _ in range(2))
    assert first == second
    assert first.resources["one"].registers > 0
    assert [w.filename for w in caught] == [__file__]
    message = str(caught[0].message)
    assert all(part in message for part in (str(folder), "will not be kept", "LNGEN_CACHE_DIR"))
    assert (tmp_path / "file").read_text() == "mine"


WITHOUT_HOME = """
    import json, os, sys, warnings
    from other_user import become_nobody

    become_nobody()
    for name in ("HOME", "XDG_CACHE_HOME", "LNGEN_CACHE_DIR", "CUPY_CACHE_DIR"):
        os.environ.pop(name, None)
    if sys.argv[1:]:
        os.environ["HOME"] = sys.argv[1]
    from commands import prints

    with warnings.catch_warnings(record=True) as caught:
        prints("show", "rmsnorm.fwd:d=8", "--stage", "ptx")
        prints("show", "rmsnorm.fwd:d=16", "--stage", "ptx")
    found = json.loads(prints("doctor", "--json"))["findings"]
    states = {f["what"]: [f["state"], f["detail"], f["fix"]] for f in found if f["what"] in ("CuPy", "NVRTC", "cache")}
    print(json.dumps([[str(w.message) for w in caught], states, os.path.exists("~")]))
"""


@needs_nvrtc
@pytest.mark.parametrize(("home", "why", "default"), [
    ("/nonexistent", "/nonexistent/.cache/lngen cannot be written to", "/nonexistent/.cupy/kernel_cache"),
    (None, "user {uid} has no home folder, and so no folder for lngen's cache", "~/.cupy/kernel_cache"),
])  # fmt: skip
def test_a_user_without_a_home_folder_compiles(home: str | None, why: str, default: str) -> None:
    """Neither lngen nor CuPy has a folder for its cache; it is said once, and by ``doctor``."""
    warned, states, made = json.loads(output(start(WITHOUT_HOME, *filter(None, [home]))))
    why = why.format(uid=UID if os.getuid() == 0 else os.getuid())
    assert not made
    assert len(warned) == 1
    assert f"Compiled kernels will not be kept, because {why}" in warned[0]
    for what, detail in (("CuPy", f"{default} cannot be written to"), ("cache", why)):
        state, said, fix = states[what]
        assert (state, detail in said) == ("note", True)
        assert fix == f"set {'LNGEN' if what == 'cache' else 'CUPY'}_CACHE_DIR to a folder that can be written to"
    assert states["NVRTC"][0] == "ok"


def test_a_folder_that_the_user_gives_cupy_is_used_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "below")
    monkeypatch.setenv("CUPY_CACHE_DIR", folder)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    with pytest.raises(MissingError, match=rf"cache folder '{folder}' \(Not a directory\); set CUPY_CACHE_DIR"):
        load_cupy()
    monkeypatch.setattr(nvrtc, "_load", nvrtc._load.__wrapped__)
    with pytest.raises(MissingError, match="set CUPY_CACHE_DIR"):
        nvrtc.nvrtc_version()
    assert (os.environ["CUPY_CACHE_DIR"], os.environ["CUPY_CACHE_IN_MEMORY"]) == (folder, "0")


def test_a_failed_write_leaves_no_temporary_file(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.store("ab12", ENTRY)
    assert not stored(cache_dir)


# Many writers, few keys, images large enough for a write to be caught half way if it were not atomic.
WRITERS = """
    import random, sys, warnings
    from lngen.compiler.toolchain import cache
    warnings.simplefilter("error")
    for n in range(60):
        key = f"ab{n % 3}"
        cache.store(key, cache.Entry("sm_80", "log", bytes([random.randrange(256)]) * 300_000))
        entry = cache.load(key)
        assert entry is not None and len(entry.image) == 300_000 and len(set(entry.image)) == 1
"""


def test_processes_may_write_the_same_key_at_once(cache_dir: Path) -> None:
    writers = [start(WRITERS, LNGEN_CACHE_DIR=str(cache_dir)) for _ in range(3)]
    for writer in writers:
        output(writer)
    assert sorted(path.name for path in stored(cache_dir)) == ["ab0", "ab1", "ab2"]
