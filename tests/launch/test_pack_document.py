"""If these fail, a manifest is read in parts that are not its own, or a pack of many specs is slow to load."""

import json
from pathlib import Path
from typing import Any

import pytest

import lngen
from lngen.launch import pack
from lngen.launch.pack import FILE_NAME, Document
from packs import edit, put, sealed, written

SETS = {name: {f"{name}.cu": name.encode(), f"{name}.sm_90.cubin": b"code"} for name in ("a", "b", "c_d-e")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, SETS)
    return tmp_path


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are parsed from now on."""
    lengths: list[int] = []
    real = pack.plain_json
    monkeypatch.setattr(pack, "plain_json", lambda raw: (lengths.append(len(raw)), real(raw))[1])
    return lengths


def test_a_kernel_set_is_parsed_when_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (folder / FILE_NAME).read_bytes()
    whole = json.loads(raw)
    sizes = {name: size for name, (size, _) in whole["texts"].items()}
    lengths = parsed(monkeypatch)
    found = Document(raw)
    assert len(lengths) == 1
    assert lengths[0] < len(raw) - sum(sizes.values())
    assert [*SETS] == [*sizes]
    sets = {e["name"]: e for e in whole["kernel_sets"]}
    assert {name: found.kernel_set(name) for name in reversed(SETS)} == sets
    assert lengths[1:] == [*sizes.values()][::-1]
    assert found.kernel_set("a") is found.kernel_set("a")
    assert found.top == {**whole, "kernel_sets": []}
    assert found.whole() == whole
    assert ("a" in found, "other" in found) == (True, False)


def test_text_in_a_manifest_is_no_structure(folder: Path) -> None:
    """What kernel sets begin with, in a string of another place; the same with a real line break is no JSON."""
    data: Any = json.loads((folder / FILE_NAME).read_bytes())
    data["lngen_version"] += ',\n "kernel_sets": [\n  {\n   "name": "b"'
    raw = written(data)
    assert [*Document(raw).top["texts"]] == [*SETS]
    with pytest.raises(ValueError, match=r"control character|Expecting|Unterminated"):
        Document(sealed(raw.replace(b'"lngen_version": "', b'"lngen_version": ",\n "kernel_sets": [', 1)))


def test_a_dispatch_to_a_kernel_set_of_another_spec_is_refused_when_it_is_used(folder: Path) -> None:
    edit(folder, lambda d: d["specs"].update({"spec a": d["specs"]["spec b"]}))
    found = lngen.load(folder)
    assert found.described("spec b")["name"] == "b"
    with pytest.raises(lngen.LngenError, match="spec 'spec a' names kernel set 'b', which is of another spec"):
        found.described("spec a")


def test_what_is_not_used_is_not_asked_for(folder: Path) -> None:
    """A kernel set that was changed is refused when it is used, and the others are not."""
    raw = (folder / FILE_NAME).read_bytes()
    start = raw.index(b'"name": "b"')
    (folder / FILE_NAME).write_bytes(raw[:start] + raw[start:].replace(b'"d": 8', b'"d": 9', 1))
    found = lngen.load(folder)
    assert found.kernel_set("a")["spec"]["d"] == 8
    with pytest.raises(lngen.LngenError, match=r"is expected to be a pack, .* but: kernel set 'b' is not as a build"):
        found.kernel_set("b")
    with pytest.raises(lngen.LngenError, match=r"kernel set 'b' is not as a build wrote it"):
        found.check()
