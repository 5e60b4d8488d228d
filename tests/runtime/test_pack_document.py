"""If these fail, a manifest is read in parts that are not its own, or a pack of many specs is slow to load."""

import json
from pathlib import Path
from typing import Any

import pytest

import lngen
from lngen.aot import manifest
from lngen.launch import pack
from lngen.launch.pack import FILE_NAME, Document
from packs import put

SETS = {name: {f"{name}.cu": name.encode(), f"{name}.sm_90.cubin": b"code"} for name in ("a", "b", "c_d-e")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, SETS)
    return tmp_path


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are parsed from now on."""
    lengths: list[int] = []
    real = json.loads
    monkeypatch.setattr(pack.json, "loads", lambda raw: (lengths.append(len(raw)), real(raw))[1])
    return lengths


def test_a_kernel_set_is_parsed_when_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (folder / FILE_NAME).read_bytes()
    whole = {e["name"]: e for e in json.loads(raw)["kernel_sets"]}
    lengths = parsed(monkeypatch)
    found = Document(raw)
    least = min(len(json.dumps(entry)) for entry in whole.values())
    assert sum(length > least for length in lengths) == 1, "the rest, once"
    assert sum(lengths) < len(raw) - 2 * least
    assert found.names() == [*SETS]
    assert {name: found.kernel_set(name) for name in reversed(found.names())} == whole
    assert found.top == {**json.loads(raw), "kernel_sets": []}
    assert ("a" in found, "other" in found) == (True, False)


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_another_layout_is_read_as_a_whole(folder: Path, indent: int | None) -> None:
    data = json.loads((folder / FILE_NAME).read_bytes())
    (folder / FILE_NAME).write_text(json.dumps(data, indent=indent))
    pack = lngen.load(folder).check()
    assert [pack.kernel_set(name) for name in SETS] == data["kernel_sets"]


def test_text_in_a_manifest_is_no_structure(folder: Path) -> None:
    """What a set begins with, in a string of another place; the same with a real line break is no JSON."""
    path = folder / FILE_NAME
    data: Any = json.loads(path.read_bytes())
    data["rules"]["launch"] += '\n  {\n   "name": "b"\n "kernel_sets": [\n ],\n "other_files": '
    found = manifest.Manifest(data["specs"], {e["name"]: e for e in data["kernel_sets"]}, data["other_files"])
    raw = found.render().replace(b'"launch": "', b'"launch": "\\n  {\\n   \\"name\\": \\"b\\"', 1)
    assert Document(raw).names() == [*SETS]
    with pytest.raises(ValueError, match=r"control character|Expecting|Unterminated"):
        Document(raw.replace(b'"launch": "', b'"launch": "\n "kernel_sets": [\n ],\n "other_files": ', 1))


@pytest.mark.parametrize(("old", "new", "message"), [
    (b'"name": "b"', b'"name": "a"', "two kernel sets are called 'a'"),
    (b'"name": "b"', b'"name": "../b"', "a kernel set without a name and files"),
    (b'"name": "b"', b'"name": 3', "a kernel set without a name and files"),
    (b'"schema_version": 3', b'"schema_version": 4', "another schema version, 4"),
])  # fmt: skip
def test_what_is_wrong_is_said_at_once(folder: Path, old: bytes, new: bytes, message: str) -> None:
    raw = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(raw.replace(old, new, 1))
    with pytest.raises(lngen.LngenError, match=rf"is expected to be a pack, .* but: {message}; name the folder"):
        lngen.load(folder)


def test_a_kernel_set_that_is_no_json_is_one_sentence_when_it_is_used(folder: Path) -> None:
    raw = (folder / FILE_NAME).read_bytes()
    start = raw.index(b'"name": "b"')
    (folder / FILE_NAME).write_bytes(raw[:start] + raw[start:].replace(b'"spec": {', b'"spec": {{', 1))
    pack = lngen.load(folder)
    assert pack.kernel_set("a")["name"] == "a"
    with pytest.raises(lngen.LngenError, match=r"is expected to be a pack, .* but: Expecting property name"):
        pack.kernel_set("b")
