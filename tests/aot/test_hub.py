"""If these fail, a hub package is not laid out as kernels wants it, loses what it had, or hides what is wrong."""

import json
import re
import shutil
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lngen
from commands import prints
from hub_packages import LAYER, SPECS, VARIANT, D, made
from killing import Killed, killed_at, points
from lngen.aot import hub
from lngen.aot.build import Built
from lngen.errors import LngenError
from paths import ROOT


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that no test changes."""
    folder = tmp_path_factory.mktemp("hub") / "package"
    made(folder)
    return folder


def metadata(folder: Path) -> Any:
    return json.loads((folder / VARIANT / "metadata.json").read_text(encoding="utf-8"))


# ---- the layout ----


def test_metadata_says_what_the_variant_is(whole: Path) -> None:
    found = metadata(whole)
    files = found["digest"]["files"]
    assert (found["name"], found["version"], found["license"]) == ("lngen-norms", 1, "MIT")
    assert found["backend"] == {"type": "cuda", "archs": ["9.0"]}
    assert (found["python-depends"], found["kernel-depends"], found["digest"]["algorithm"]) == ([], [], "sha256")
    assert found["id"].isidentifier()
    assert found["id"].startswith("_lngen_norms_cuda_")
    there = {p.relative_to(whole / VARIANT).as_posix(): p for p in (whole / VARIANT).rglob("*") if p.is_file()}
    assert {*there} == {*files, "metadata.json"}
    assert all(files[name] == hub.digest_of(path.read_bytes()) for name, path in there.items() if name in files)
    assert hub.digest_of(b"hello world") == "uU0nuZNNPgilLlLX2n2r+sSE7+N6U4DukIj3rOLvzek="


def test_the_builder_gets_the_kinds_of_files_and_a_card(whole: Path) -> None:
    read = tomllib.loads((whole / "build.toml").read_text(encoding="utf-8"))
    general = read["general"]
    assert (general["name"], general["version"], general["edition"]) == ("lngen-norms", 1, 5)
    assert general["backends"] == ["cuda"]
    assert read["torch-noarch"] == {"pyext": ["cubin", "json", "ptx", "py"], "cuda_capabilities": ["9.0"]}
    card = (whole / "build" / "CARD.md").read_text(encoding="utf-8")
    assert card == (whole / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "library_name: kernels\nlicense: mit\n" in card
    assert f"| `layernorm.fwd:dtype=f32` | {D} |" in card


def test_by_default_a_package_has_machine_code_alone(tmp_path: Path) -> None:
    built = made(tmp_path, f"layernorm.fwd:{LAYER}", emit=None, arch="sm_80,sm_90+ptx")
    kinds = sorted(Path(name).suffix for name in built.files if "/pack/" in name)
    assert kinds == [".cubin", ".cubin", ".json", ".ptx"]
    assert metadata(tmp_path)["backend"]["archs"] == ["8.0", "9.0+PTX"]
    assert built.files[-1] == "build/torch-cuda/metadata.json"
    assert {*built.files} == {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}


def test_the_same_request_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    made(tmp_path)
    files = [p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert [name for name in files if (tmp_path / name).read_bytes() != (whole / name).read_bytes()] == []


def test_sources_are_those_of_lngen(whole: Path) -> None:
    """All but the two files that say where the others are."""
    root, place = Path(str(lngen.__file__)).parent, whole / VARIANT
    own = {path.name for path in (root / "hub_package").glob("*.py")} - {"_lngen.py"}
    assert {path.name for path in place.glob("*.py")} == own
    assert all((place / name).read_bytes() == (root / "hub_package" / name).read_bytes() for name in own)
    copied = [p.relative_to(place / "_lngen") for p in (place / "_lngen").rglob("*.py") if p.parent != place / "_lngen"]
    assert {path.name for path in copied} == {path.name for path in (root / "launch").glob("*.py")}
    assert all((place / "_lngen" / name).read_bytes() == (root / name).read_bytes() for name in copied)
    assert (place / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


# ---- a second build, and a build that is killed ----


def test_a_second_build_adds(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "package")
    before = metadata(folder)
    changed = json.dumps({**before, "version": 3, "source": "https://example.org/norms.git"})
    (folder / VARIANT / "metadata.json").write_text(changed)
    with (folder / "build.toml").open("a") as file:
        file.write("# mine\n")
    built = made(folder, f"layernorm.fwd:{LAYER}", f"rmsnorm.fwd:d={D},dtype=f16", arch="sm_80,sm_90")
    after = metadata(folder)
    assert (after["version"], after["source"]) == (3, "https://example.org/norms.git")
    assert after["backend"]["archs"] == ["8.0", "9.0"]
    assert {*before["digest"]["files"]} < {*after["digest"]["files"]}
    assert after["id"] != before["id"]
    assert lngen.verify(folder).faults == ()
    assert built.replaced == (f"'{folder / 'build.toml'}' was changed and is left as it is.",)
    assert (folder / "build.toml").read_text().endswith("# mine\n")
    assert f"| `rmsnorm.fwd:dtype=f16` | {D} |" in (folder / "README.md").read_text()


def test_what_metadata_lists_is_there_whenever_a_build_is_killed(whole: Path, tmp_path: Path) -> None:
    """In a new folder and in an old one; building again completes the rest."""
    more = (f"layernorm.fwd:{LAYER}", f"rmsnorm.fwd:d={D},dtype=f16")
    for name, first in (("new", None), ("old", whole)):
        target = tmp_path / name

        def work(target: Path = target) -> Built:
            return made(target, *more)

        def prepare(first: Path | None = first, target: Path = target) -> None:
            shutil.rmtree(target, ignore_errors=True)
            if first is not None:
                shutil.copytree(first, target)
                (target / VARIANT / "layers.py").write_text("# of an older lngen\n")

        prepare()
        count = points(work)
        done = {p for p in target.rglob("*") if p.is_file()}
        for point in range(0, count, 7):
            prepare()
            with suppress(Killed), killed_at(point):
                work()
            if (target / VARIANT / "metadata.json").exists():
                listed = metadata(target)["digest"]["files"]
                wrong = [n for n in listed if hub.digest_of((target / VARIANT / n).read_bytes()) != listed[n]]
                assert wrong in ([], ["layers.py"])
            work()
            assert {p for p in target.rglob("*") if p.is_file()} == done
            assert lngen.verify(target).faults == lngen.verify(target).unlisted == ()


# ---- verify and list ----


def test_verify_and_list_take_the_folder_and_its_variant(whole: Path) -> None:
    for place in (whole, whole / VARIANT):
        found = lngen.verify(place)
        assert (found.faults, found.unlisted) == ((), ())
        assert found.files == len(metadata(whole)["digest"]["files"])
        assert "layernorm.bwd:d=64" in prints("pack", "list", place)
    assert "no fault" in prints("verify", whole)


# ---- bad input ----


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("lngen.aot.build.compile_cubin", refuse)


def test_a_package_without_a_forward_is_refused(tmp_path: Path, whole: Path) -> None:
    backward = f"layernorm.bwd:{LAYER}"
    with pytest.raises(LngenError, match="one forward spec at least, got backwards alone; name the forward as well"):
        made(tmp_path / "package", backward)
    assert not (tmp_path / "package").exists()
    folder = shutil.copytree(whole, tmp_path / "there")
    assert made(folder, backward).files


@pytest.mark.parametrize("what", ["a file", "another package", "a broken package"])
def test_something_else_in_the_place_of_the_package_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    refuse_to_compile(monkeypatch)
    place = tmp_path / VARIANT
    if what == "a file":
        place.parent.mkdir()
        place.write_text("mine")
    else:
        place.mkdir(parents=True)
        foreign = {"id": "_relu", "digest": {"algorithm": "sha256", "files": {"__init__.py": "a"}}}
        (place / "metadata.json").write_text(json.dumps(foreign) if what == "another package" else "{")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    words = f"'{place}' is expected to be a hub package that lngen has built, but has something else"
    with pytest.raises(LngenError, match=re.escape(words)):
        made(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_folder_in_the_place_of_a_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()
    with pytest.raises(LngenError, match=r"cannot write '.*README.md': Is a directory"):
        made(tmp_path, SPECS[0])
