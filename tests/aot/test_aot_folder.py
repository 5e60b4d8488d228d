"""If these fail, a manifest lists files that are not there: builds at once, a killed build, a foreign manifest."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from child import output, start
from fuzz import JSON, fuzzed
from killing import Killed, killed_at, points
from lngen import files
from lngen.aot import folder as folders
from lngen.aot import manifest
from lngen.aot.build import build
from lngen.compile import Compilation
from lngen.errors import LngenError
from lngen.files import sha256
from lngen.spec import parse_spec

Pack = Mapping[str, Mapping[str, bytes]]  # kernel sets by name, each with its files
FIRST: Pack = {
    "a": {"a.cu": b"a one", "a.sm_80.cubin": b"a for 80", "a.sm_90.cubin": b"a for 90"},
    "b": {"b.cu": b"b one"},
    "c": {"c.cu": b"c one", "c.sm_90.ptx": b"c ptx"},
}
# a: other bytes, one file more; c: the same bytes, one file more; d: new. b stays as it is.
SECOND: Pack = {
    "a": {"a.cu": b"a two", "a.sm_80.cubin": b"a for 80", "a.sm_90.cubin": b"a for 90", "a.sm_90.ptx": b"a ptx"},
    "c": {"c.cu": b"c one", "c.sm_80.ptx": b"c ptx", "c.sm_90.ptx": b"c ptx"},
    "d": {"d.cu": b"d one"},
}


def put(folder: Path, pack: Pack, version: str = "1") -> None:
    entries = {
        name: {"name": name, "by": version, "files": {n: {"sha256": sha256(data)} for n, data in own.items()}}
        for name, own in pack.items()
    }
    everything = {n: data for own in pack.values() for n, data in own.items()}
    folders.put(folder, entries, everything, version=version, nvrtc=None)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() if p.is_file() else b"a folder" for p in folder.iterdir()}


def listed(folder: Path) -> dict[str, dict[str, str]]:
    """The files of each kernel set that the manifest lists, each proved to be there as it is listed."""
    entries = manifest.read(folder)
    for entry in entries.values():
        for name, digest in manifest.hashes(entry).items():
            assert sha256((folder / name).read_bytes()) == digest, name
    return {name: manifest.hashes(entry) for name, entry in entries.items()}


def hashes(pack: Pack) -> dict[str, dict[str, str]]:
    return {name: {n: sha256(data) for n, data in own.items()} for name, own in pack.items()}


# ---- what replaces what ----


def test_a_rebuild_lists_its_own_files_and_keeps_other_sets(tmp_path: Path) -> None:
    put(tmp_path, FIRST)
    put(tmp_path, SECOND, "2")
    assert listed(tmp_path) == hashes({**FIRST, **SECOND})
    kept = {n: data for own in {**FIRST, **SECOND}.values() for n, data in own.items()}
    assert contents(tmp_path).keys() == {*kept, "manifest.json"}
    assert {name: e["by"] for name, e in manifest.read(tmp_path).items()} == {"a": "2", "b": "1", "c": "2", "d": "2"}
    keys = ["schema_version", "lngen_version", "nvrtc_version", "kernel_sets"]
    assert list(json.loads((tmp_path / "manifest.json").read_bytes())) == keys


@pytest.mark.parametrize(
    ("own", "lost"),
    [
        ({"a.cu": b"a one", "a.sm_90.cubin": b"a for 90"}, ".sm_80.cubin"),
        ({"a.cu": b"a two"}, ".sm_80.cubin, .sm_90.cubin"),
        ({"a.sm_100.ptx": b"a ptx"}, ".cu, .sm_80.cubin, .sm_90.cubin"),
    ],
)
def test_a_build_that_would_take_files_from_a_kernel_set_is_refused(
    tmp_path: Path, own: dict[str, bytes], lost: str
) -> None:
    put(tmp_path, FIRST)
    before = contents(tmp_path)
    with pytest.raises(LngenError) as refused:
        put(tmp_path, {"a": own, "d": {"d.cu": b"d one"}})
    assert str(refused.value) == (
        f"'{tmp_path}' has kernel set 'a' also as {lost}, which this build does not make and would take from it; "
        "name another folder, or build all archs and kinds at once."
    )
    assert contents(tmp_path) == before


def test_a_build_of_fewer_kinds_is_refused_before_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Compilation(parse_spec("rmsnorm.fwd:d=64,dtype=f32")).changed("", "sm_90")
    pytest.importorskip("cupy")
    build([made], tmp_path, arches=["sm_90"], version="1", kinds=["cu", "cubin"])
    assert [*listed(tmp_path)[made.plan.name]] == [f"{made.plan.name}.cu", f"{made.plan.name}.sm_90.cubin"]
    monkeypatch.setattr("lngen.aot.build._compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(LngenError, match=r"also as \.sm_90\.cubin, which this build does not make"):
        build([made], tmp_path, arches=["sm_90"], version="1", kinds=["cu"])
    assert [*listed(tmp_path)[made.plan.name]] == [f"{made.plan.name}.cu", f"{made.plan.name}.sm_90.cubin"]


def test_files_are_replaced_before_the_manifest_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changed set leaves the manifest, files come, the manifest lists all; no file goes."""
    put(tmp_path, FIRST)
    done, real_replace, real_unlink = [], os.replace, os.unlink

    def replace(old: Path, new: Path) -> None:
        real_replace(old, new)
        done.append(Path(new).name)

    def unlink(path: Path, **kwargs: Any) -> None:
        real_unlink(path, **kwargs)
        done.append(f"-{Path(path).name}")

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "unlink", unlink)
    put(tmp_path, SECOND)
    names = ["manifest.json", *(name for own in SECOND.values() for name in own), "manifest.json"]
    assert [name for name in done if not name.endswith((".tmp", ".lock"))] == names


def test_the_same_bytes_again_touch_no_manifest_but_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken out of the manifest meanwhile if no file changes."""
    put(tmp_path, FIRST)
    before, seen, real = contents(tmp_path), [], os.replace

    def replace(old: Path, new: Path) -> None:
        real(old, new)
        seen.append(listed(tmp_path))

    monkeypatch.setattr(os, "replace", replace)
    put(tmp_path, FIRST)
    assert contents(tmp_path) == before
    assert seen == [hashes(FIRST)] * len(seen)


# ---- killed ----


def test_a_build_killed_anywhere_leaves_a_manifest_that_holds(tmp_path: Path) -> None:
    """Every listed file is there as listed, the sets it did not build stay; the next build leaves no trace of it."""
    put(tmp_path / "whole", FIRST)
    count = points(lambda: put(tmp_path / "whole", SECOND, "2"))
    whole = contents(tmp_path / "whole")
    assert count > 20
    outcomes = set()
    for point in range(count):
        folder = tmp_path / str(point)
        put(folder, FIRST)
        with killed_at(point), pytest.raises(Killed):
            put(folder, SECOND, "2")
        found = listed(folder)
        assert found["b"] == hashes(FIRST)["b"]
        for name in ("a", "c", "d"):
            assert found.get(name) in (hashes(FIRST).get(name), hashes(SECOND).get(name), None)
        assert {"a", "c"} - found.keys() <= {"a"}, "only what changes its bytes leaves the manifest"
        outcomes.add((found.get("a") == hashes(SECOND)["a"], "a" in found))
        put(folder, SECOND, "2")
        assert contents(folder) == whole, point
    assert outcomes == {(False, True), (False, False), (True, True)}


def test_a_first_build_killed_anywhere_is_none(tmp_path: Path) -> None:
    count = points(lambda: put(tmp_path / "whole", FIRST))
    for point in range(count):
        folder = tmp_path / str(point)
        with killed_at(point), pytest.raises(Killed):
            put(folder, FIRST)
        assert listed(folder) in ({}, hashes(FIRST))
        put(folder, FIRST)
        assert contents(folder) == contents(tmp_path / "whole")


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, FIRST)
    before = contents(tmp_path)
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if data == b"d one":
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LngenError, match=r"cannot write '.*d\.cu': No space left on device; name a place"):
        put(tmp_path, SECOND)
    assert contents(tmp_path) == before


# ---- at once ----


def test_a_build_waits_for_the_one_that_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second build between the reading and the writing of the manifest would be forgotten."""
    put(tmp_path, FIRST)
    threads = []
    real = manifest.read

    def read(folder: Path) -> Any:
        found = real(folder)
        if not threads:
            threads.append(threading.Thread(target=put, args=(tmp_path, {"e": {"e.cu": b"e"}})))
            threads[0].start()
            threads[0].join(0.3)  # with nothing to wait for it would be done by now
        return found

    monkeypatch.setattr(manifest, "read", read)
    put(tmp_path, SECOND)
    threads[0].join()
    assert listed(tmp_path) == hashes({**FIRST, **SECOND, "e": {"e.cu": b"e"}})
    assert not [name for name in contents(tmp_path) if name.startswith(".")]


def test_eight_builds_by_four_processes_are_all_listed(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from lngen.aot.build import build
        from lngen.compile import Compilation
        from lngen.spec import parse_spec
        folder, own = Path(sys.argv[1]), int(sys.argv[2])
        for d in (8 * own + 8, 8 * own + 72):
            spec = parse_spec(f"rmsnorm.fwd:d={d},dtype=f32")
            made = Compilation(spec).changed("form=registers,threads=1,rows_per_block=32,vec=4", "sm_90")
            build([made], folder, arches=["sm_90"], version="1", kinds=["cu"])
    """
    for process in [start(code, str(tmp_path / "out"), str(n)) for n in range(4)]:
        output(process)
    found = listed(tmp_path / "out")
    assert len(found) == 8
    assert contents(tmp_path / "out").keys() == {"manifest.json", *(n for own in found.values() for n in own)}


def test_a_folder_that_is_held_for_long_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HELD", 0.05)
    with (
        files.exclusive(tmp_path, "lngen"),
        pytest.raises(LngenError, match=r"another process has held '.*\.lngen\.lock' for 0\.05 s; wait for its end"),
    ):
        put(tmp_path, FIRST)
    put(tmp_path, FIRST)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "file", "file/below"])
def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LngenError, match=r"(cannot write|is expected to be a manifest) .*; name a"):
        put(tmp_path / name, FIRST)


# ---- manifests of strangers ----


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"b.cu": "0"}, "'b.cu' is not a file that a build writes for this kernel set"),
        ({"manifest.json": "0"}, "'manifest.json' is not a file that a build writes for this kernel set"),
        ({"notes.txt": "0"}, "'notes.txt' is not a file that a build writes"),
        ({"a.cu.bak": "0"}, "'a.cu.bak' is not a file"),
        ({"a.sm_90.so": "0"}, "'a.sm_90.so' is not a file"),
        ({"../a.cu": "0"}, r"'\.\./a\.cu' is not a file"),
        ({"a.cu\n": "0"}, r"'a\.cu\\n' is not a file"),
        ({"a.cu": None}, r"no sha256 of 'a\.cu'"),
    ],
)
def test_a_manifest_cannot_list_any_file(tmp_path: Path, names: dict[str, str | None], message: str) -> None:
    listed = {n: {"sha256": digest} for n, digest in names.items()}
    document = {"schema_version": 2, "kernel_sets": [{"name": "a", "files": listed}]}
    for name in ("manifest.json", "notes.txt", "b.cu", "a.cu.bak", "a.sm_90.so"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    before = contents(tmp_path)
    with pytest.raises(LngenError, match=message):
        put(tmp_path, {"a": {"a.sm_90.cubin": b"new"}})
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "no list of kernel sets"),
        ({"kernel_sets": {"a": 1}}, "no list of kernel sets"),
        ({"kernel_sets": [3]}, "a kernel set without a name and files"),
        ({"kernel_sets": [{}]}, "a kernel set without a name and files"),
        ({"kernel_sets": [{"name": "../a", "files": {}}]}, "a kernel set without a name"),
        ({"kernel_sets": [{"name": "a", "files": {}}] * 2}, "two kernel sets are called 'a'"),
        ({"kernel_sets": [{"name": "a", "files": {"a.cu": 1}}]}, r"no sha256 of 'a\.cu'"),
        ({"schema_version": True, "kernel_sets": []}, "another schema version"),
        ({"schema_version": 1, "kernel_sets": []}, "another schema version"),
    ],
)
def test_a_wrong_manifest_is_one_sentence(tmp_path: Path, document: dict[str, object], message: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 2} | document))
    with pytest.raises(LngenError, match=rf"but is not \({message}.*\); name another folder, or remove the file\.$"):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("no json"), "Expecting value"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_bytes(b"[" * 10**5), "it is nested deeper than 32 levels"),
        (lambda path: path.write_bytes(b'{"schema_version": ' + b"9" * 400), "is a number of more than 64 bits"),
        (lambda path: path.write_bytes(b'"\\ud800"'), "it holds half of a surrogate pair"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "it is larger than 33554432 bytes"),
        (lambda path: path.symlink_to("/dev/full"), "it is a device, not a regular file"),
        (os.mkfifo, "it is a FIFO, not a regular file"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "manifest.json")
    with pytest.raises(LngenError, match=rf"but is not \(.*{message}.*\); name another folder, or remove the file\.$"):
        manifest.read(tmp_path)


NAMES = st.sampled_from(["a", "b", "a.cu", "b.sm_90.ptx", "sha256", "files", "name", "../x", ""]) | st.text()
VALUES = st.recursive(
    NAMES | st.none() | st.integers(), lambda v: st.lists(v) | st.dictionaries(NAMES, v), max_leaves=8
)
FACTS = st.fixed_dictionaries({"sha256": st.sampled_from([sha256(b"mine"), sha256(b"a"), "0"])})
LISTED = st.dictionaries(st.sampled_from(["a.cu", "a.sm_90.ptx", "b.cu"]), FACTS)
WHOLE = st.fixed_dictionaries({"name": st.sampled_from(["a", "b"]), "files": LISTED})
SETS = st.fixed_dictionaries({}, optional={"name": VALUES, "files": VALUES | st.dictionaries(NAMES, VALUES)})
MANIFESTS = st.fixed_dictionaries(
    {"schema_version": st.just(2) | VALUES},
    optional={
        "kernel_sets": st.lists(WHOLE) | st.lists(SETS | VALUES) | VALUES,
        "nvrtc_version": VALUES,
    },
).map(lambda value: json.dumps(value).encode())


@fuzzed
@given(MANIFESTS | JSON | st.binary())
def test_any_manifest_is_read_or_one_sentence_and_nothing_of_others_is_lost(tmp_path: Path, raw: bytes) -> None:
    with suppress(FileNotFoundError):
        (tmp_path / "a.cu").unlink()
    (tmp_path / "manifest.json").write_bytes(raw)
    (tmp_path / "mine").write_bytes(b"mine")
    before = contents(tmp_path)
    try:
        put(tmp_path, {"a": {"a.cu": b"a"}})
    except LngenError:
        assert contents(tmp_path) == before
        return
    assert manifest.hashes(manifest.read(tmp_path)["a"]) == {"a.cu": sha256(b"a")}
    assert contents(tmp_path).keys() == {"manifest.json", "mine", "a.cu"}
