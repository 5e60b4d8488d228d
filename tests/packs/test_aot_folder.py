"""If these fail, a manifest lists files that are not there: builds at once, a killed build, a foreign manifest."""

import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen
from child import output, start
from fuzz import JSON, fuzzed
from killing import Killed, killed_at, points
from lngen import files
from lngen.errors import LngenError
from lngen.files import sha256
from lngen.launch.pack import FILE_NAME, Pack, content
from lngen.packs import manifest
from packs import contents, dispatch, kernel_set, put

Sets = Mapping[str, Mapping[str, bytes]]  # kernel sets by name, each with its files
FIRST: Sets = {
    "a": {"a.cu": b"a one", "a.sm_80.cubin": b"a for 80", "a.sm_90.cubin": b"a for 90"},
    "b": {"b.cu": b"b one"},
    "c": {"c.cu": b"c one", "c.sm_90.ptx": b"c ptx"},
}
# a: other bytes, one file more; c: one file that is there, one more, one less; d: new. b stays as it is.
SECOND: Sets = {
    "a": {"a.cu": b"a two", "a.sm_80.cubin": b"a for 80", "a.sm_90.cubin": b"a for 90", "a.sm_90.ptx": b"a ptx"},
    "c": {"c.cu": b"c one", "c.sm_80.ptx": b"c ptx"},
    "d": {"d.cu": b"d one"},
}
BOTH: Sets = {**FIRST, **SECOND, "c": {**FIRST["c"], **SECOND["c"]}}
VECTORS = "vectors/s/vectors.json"


def listed(folder: Path) -> dict[str, dict[str, str]]:
    """The files of each kernel set that the manifest lists, each proved to be there as it is listed."""
    found = manifest.read(folder)
    for name, digest in found.files().items():
        assert sha256((folder / name).read_bytes()) == digest, name
    assert {text.removeprefix("spec ") for text in found.specs} == found.kernel_sets.keys()
    return {name: {n: f["sha256"] for n, f in e["files"].items()} for name, e in found.kernel_sets.items()}


def hashes(sets: Sets) -> dict[str, dict[str, str]]:
    return {name: {n: sha256(data) for n, data in own.items()} for name, own in sets.items()}


# ---- what replaces what ----


def test_a_second_build_adds_and_deletes_nothing(tmp_path: Path) -> None:
    assert put(tmp_path, FIRST, others="one") == []
    changed = [n for own in SECOND.values() for n, data in own.items() if contents(tmp_path).get(n, data) != data]
    assert put(tmp_path, SECOND, others="two") == [f"'{n}' has other bytes than before." for n in (*changed, VECTORS)]
    assert listed(tmp_path) == hashes(BOTH)
    kept = {n: data for own in BOTH.values() for n, data in own.items()}
    assert contents(tmp_path) == {**kept, VECTORS: b"two", FILE_NAME: contents(tmp_path)[FILE_NAME]}
    put(tmp_path, {"e": {"e.fatbin": b"sm_80 sm_90|sm_90"}})
    put(tmp_path, {"e": {"e.fatbin": b"sm_80 sm_90 sm_120|sm_90"}})
    assert listed(tmp_path) == hashes({**BOTH, "e": {"e.fatbin": b"sm_80 sm_90 sm_120|sm_90"}})


def test_an_entry_of_the_same_spec_arch_and_rows_is_replaced_and_said_so(tmp_path: Path) -> None:
    """The kernel set that was there stays: other entries may lead to it."""
    old, new = (manifest.Manifest({"s": dispatch(n, f"{n}.cu")}, {n: kernel_set(n, {})}) for n in "ab")
    wider = {"most_bytes": 2048, "kernel_set": "a", "file": "a.cu", "otherwise": None}
    old.specs["s"]["images"][0]["classes"].append(wider)
    older = {"arch": "sm_80", "kind": "source", "classes": [wider]}
    old.specs["s"]["images"].append(older)
    after, replaced = manifest.merged(old, new)
    assert replaced == ["s on sm_90, up to 1024 bytes a multiprocessor: b replaces a."]
    assert after.kernel_sets.keys() == {"a", "b"}
    (first, second) = after.specs["s"]["images"]
    assert [c["kernel_set"] for c in first["classes"]] == ["b", "a"]
    assert second == older
    assert manifest.merged(after, new)[1] == []


@pytest.mark.parametrize("own", [
    {"a.cu": b"a one", "a.sm_90.cubin": b"a for 90"}, {"a.cu": b"a two"}, {"a.sm_100.ptx": b"a ptx"},
])  # fmt: skip
def test_files_of_two_texts_are_never_listed_together(tmp_path: Path, own: dict[str, bytes]) -> None:
    put(tmp_path, FIRST)
    before = contents(tmp_path)
    with pytest.raises(LngenError):
        put(tmp_path, {"a": own, "d": {"d.cu": b"d one"}}, text="another")
    assert contents(tmp_path) == before
    put(tmp_path, {"a": FIRST["a"]}, text="another")
    assert listed(tmp_path) == hashes(FIRST)


def test_a_source_keeps_its_headers_when_a_build_adds_no_source(tmp_path: Path) -> None:
    with_headers = {"flags": ["-a"], "include": "include/0123456789abcdef"}
    old = manifest.Manifest({}, {"a": kernel_set("a", {"a.cu": b"a"}, compile=with_headers)})
    for files_, include in (({"a.sm_90.ptx": b"p"}, with_headers["include"]), ({"a.cu": b"whole"}, None)):
        after, _ = manifest.merged(old, manifest.Manifest({}, {"a": kernel_set("a", files_)}))
        assert after.kernel_sets["a"]["compile"]["include"] == include


def test_files_are_replaced_before_the_manifest_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed set leaves the manifest, files come, the manifest lists all; no file goes. Equal bytes change none."""
    put(tmp_path, FIRST)
    done, seen, real_replace, real_unlink = list[str](), list[Any](), os.replace, os.unlink

    def replace(old: Path, new: Path) -> None:
        real_replace(old, new)
        done.append(Path(new).name)
        seen.append(manifest.read(tmp_path).kernel_sets.keys())

    def unlink(path: Path, **kwargs: Any) -> None:
        real_unlink(path, **kwargs)
        done.append(f"-{Path(path).name}")

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "unlink", unlink)
    before = contents(tmp_path)
    put(tmp_path, FIRST)
    assert contents(tmp_path) == before
    assert seen == [FIRST.keys()] * len(seen), "no set is taken out of the manifest meanwhile"
    done.clear()
    put(tmp_path, SECOND)
    names = [FILE_NAME, *(name for own in SECOND.values() for name in own), FILE_NAME]
    assert [name for name in done if not name.endswith((".tmp", ".lock"))] == names


# ---- killed ----


@pytest.mark.parametrize("first", [True, False])
def test_a_build_killed_anywhere_leaves_a_manifest_that_holds(tmp_path: Path, first: bool) -> None:
    """Every listed file is there as listed, the sets it did not build stay; the next build leaves no trace of it."""

    def begin(folder: Path) -> None:
        if not first:
            put(folder, FIRST, others="one")

    def work(folder: Path) -> None:
        put(folder, FIRST if first else SECOND, others="two")

    begin(tmp_path / "whole")
    count = points(lambda: work(tmp_path / "whole"))
    whole, outcomes = contents(tmp_path / "whole"), set()
    assert count > 15
    for point in range(count):
        folder = tmp_path / str(point)
        begin(folder)
        with killed_at(point), pytest.raises(Killed):
            work(folder)
        found = listed(folder)
        if first:
            assert found in ({}, hashes(FIRST))
        else:
            assert found["b"] == hashes(FIRST)["b"]
            for name in ("a", "c", "d"):
                assert found.get(name) in (hashes(FIRST).get(name), hashes(BOTH)[name], None)
            assert {"a", "c"} - found.keys() <= {"a"}, "only what changes its bytes leaves the manifest"
            outcomes.add((found.get("a") == hashes(SECOND)["a"], "a" in found, VECTORS in manifest.read(folder).others))
        work(folder)
        assert contents(folder) == whole, point
    assert outcomes == (set() if first else {(False, True, True), (False, False, False), (True, True, True)})


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


def test_a_link_that_leaves_the_pack_is_not_written_through(tmp_path: Path) -> None:
    """A folder may be a link as a whole; one inside may not. A file that is a link is replaced."""
    (tmp_path / "there").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "pack").symlink_to("there", target_is_directory=True)
    put(tmp_path / "pack", FIRST, others="one")
    (tmp_path / "there" / "a.cu").unlink()
    (tmp_path / "there" / "a.cu").symlink_to(tmp_path / "mine")
    put(tmp_path / "pack", FIRST)
    assert (tmp_path / "mine").read_bytes() == b"mine"
    (tmp_path / "there" / "vectors").rename(tmp_path / "elsewhere")
    (tmp_path / "there" / "vectors").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(LngenError, match=r"cannot write '.*vectors/s': it is a link that leaves the pack .*; remove"):
        put(tmp_path / "pack", FIRST, others="two")
    assert (tmp_path / "elsewhere" / "s" / "vectors.json").read_bytes() == b"one"


# ---- links ----


def linked(path: Path, target: Path) -> None:
    """Moves a file and leaves a link in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(os.path.relpath(target, path.parent))


PLACES = [
    ("pack", "pack/.own/moved", True),
    ("pack", "pack-2/moved", False),
    ("norms/snapshots/1/build/pack", "norms/blobs/moved", True),
    ("norms/snapshots/1/build/pack", "norms/snapshots/2/moved", False),
    ("norms/snapshots/1/build/pack", "other/blobs/moved", False),
]


@pytest.mark.parametrize("name", ["a.cu", VECTORS, FILE_NAME])
@pytest.mark.parametrize(("folder", "target", "allowed"), PLACES)
def test_a_link_that_leaves_the_pack_is_not_read(
    tmp_path: Path, folder: str, target: str, allowed: bool, name: str
) -> None:
    """Though the bytes behind it are as listed. The Hub's cache has links for all files, to its blobs."""
    place = tmp_path / folder
    put(place, FIRST, others="one")
    digest = manifest.read(place).files().get(name)
    linked(place / name, tmp_path / target)
    with nullcontext() if allowed else pytest.raises(LngenError, match="it is a link that leaves the folder"):
        lngen.load(place)
        content(place, name, digest or sha256((place / name).read_bytes()))
    if folder == "pack" and allowed:
        linked(place / "vectors", tmp_path / "vectors")
        assert any("it is a link that leaves the folder" in fault for fault in lngen.verify(place).faults)


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
    assert listed(tmp_path) == hashes({**BOTH, "e": {"e.cu": b"e"}})
    assert not [name for name in contents(tmp_path) if name.startswith(".")]


def test_builds_by_processes_are_all_listed(tmp_path: Path) -> None:
    code = """
        import sys
        import lngen
        for d in (8 * int(sys.argv[2]) + 8, 8 * int(sys.argv[2]) + 72):
            schedule = "form=registers,threads=1,rows_per_block=32,vec=4"
            lngen.build([f"rmsnorm.fwd:d={d},dtype=f32"], sys.argv[1], emit="cu", schedule=schedule)
    """
    for process in [start(code, str(tmp_path / "out"), str(n)) for n in range(2)]:
        output(process)
    found = manifest.read(tmp_path / "out")
    assert len(found.specs) == len(found.kernel_sets) == 4
    assert contents(tmp_path / "out").keys() == {FILE_NAME, *found.files()}


def test_a_folder_that_is_held_for_long_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HELD", 0.05)
    with (
        files.exclusive(tmp_path, "lngen"),
        pytest.raises(LngenError, match=r"another process has held '.*\.lngen\.lock' for 0\.05 s; wait for its end"),
    ):
        put(tmp_path, FIRST)
    put(tmp_path, FIRST)


# ---- manifests of strangers ----

GOOD = kernel_set("a", {"a.cu": b"mine"})


NAMES = st.sampled_from(["a", "b", "a.cu", "b.sm_90.ptx", "sha256", "files", "name", "../x", ""]) | st.text()
VALUES = st.recursive(
    NAMES | st.none() | st.integers(), lambda v: st.lists(v) | st.dictionaries(NAMES, v), max_leaves=8
)
LISTED = st.dictionaries(st.sampled_from(["a.cu", "b.cu"]), st.just(GOOD["files"]["a.cu"]) | VALUES)
SETS = st.builds(lambda name, files: {**GOOD, "name": name, "files": files}, st.sampled_from(["a", "b"]), LISTED)
SPECS = st.dictionaries(NAMES, st.just(dispatch("a", "a.cu")) | VALUES)
MANIFESTS = st.builds(
    lambda texts, **top: manifest.written(top, texts),
    st.dictionaries(NAMES, SETS.map(manifest.text_of) | VALUES.map(manifest.text_of) | st.binary(), max_size=2),
    specs=st.just({}) | SPECS | VALUES,
    other_files=st.just({}) | VALUES,
)


@fuzzed
@given(MANIFESTS | JSON | st.binary())
def test_any_manifest_is_read_or_one_sentence_and_nothing_of_others_is_lost(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.cu").write_bytes(b"mine")
    (tmp_path / FILE_NAME).write_bytes(raw)
    (tmp_path / "mine").write_bytes(b"mine")
    before = contents(tmp_path)
    try:
        Pack(tmp_path).check()
        put(tmp_path, {"a": {"a.cu": b"a"}})
    except LngenError:
        assert contents(tmp_path) == before
        return
    assert manifest.read(tmp_path).kernel_sets["a"]["files"]["a.cu"]["sha256"] == sha256(b"a")
    assert contents(tmp_path).keys() == {FILE_NAME, "mine", "a.cu"}
