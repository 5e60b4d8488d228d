"""If these fail, verify passes a pack that is not what its manifest says."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import lngen
from commands import call, prints
from lngen.aot.build import build
from lngen.errors import LngenError, MissingError
from lngen.files import sha256
from lngen.headers import headers_hash
from lngen.launch.pack import FILE_NAME
from lngen.version import __version__
from packs import edit, manifest_of

SPEC = "rmsnorm.fwd:d=8,dtype=f32"
QUICK = "form=registers,threads=1,rows_per_block=32,vec=4"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cupy")
    folder = tmp_path_factory.mktemp("built")
    build([SPEC], folder, arch="sm_80+ptx,sm_90", emit="cu,cubin,fatbin,vectors", schedule=QUICK)
    return folder


@pytest.fixture
def pack(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "pack"))


def name_of(pack: Path, end: str) -> str:
    (found,) = pack.glob(f"*{end}")
    return found.name


def relist(pack: Path, name: str, data: bytes) -> None:
    """Replace a file and its hash: a build of somebody else."""
    (pack / name).write_bytes(data)
    edit(pack, lambda d: (d["kernel_sets"][0]["files"] | d["other_files"])[name].update(sha256=sha256(data)))


def test_a_whole_pack_is_recompiled(pack: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = lngen.verify(pack, progress=lambda *counts: seen.append(counts))
    listed = {str(p.relative_to(pack)) for p in pack.rglob("*") if p.is_file()} - {FILE_NAME}
    assert (found.ok, found.files, found.recompiled, found.rebuilt) == (True, len(listed), 4, 1)
    assert (found.faults, found.skipped, found.unlisted) == ((), (), ())
    assert seen == [(n, 5) for n in range(1, 6)]
    assert prints("verify", pack) == (
        f"{len(listed)} files as listed, 4 compiled again with the same bytes, 1 kernel set of the same launch data, "
        "no fault\n"
    )


DAMAGE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda p: p.write_bytes(b"?" + p.read_bytes()[1:]), "is not the file that the pack's manifest lists"),
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is not the file that the pack's manifest lists"),
    "empty": (lambda p: p.write_bytes(b""), "is not the file that the pack's manifest lists"),
    "missing": (Path.unlink, "of the pack cannot be read: No such file or directory"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "of the pack cannot be read: Is a directory"),
}


ENDS = "*.cu", "*.sm_90.cubin", "*.fatbin", "include/*/lngen/*.cuh", "vectors/*/*/y.bin"


@pytest.mark.parametrize(("end", "how"), [*((end, "changed") for end in ENDS), *((ENDS[0], how) for how in DAMAGE)][1:])
def test_any_damage_is_a_fault(pack: Path, end: str, how: str) -> None:
    damage, message = DAMAGE[how]
    path = next(p for p in sorted(pack.glob(end)) if p.stat().st_size)
    damage(path)
    found = lngen.verify(pack)
    assert found.faults == (f"'{path}' {message}; build the pack again.",)
    done = call("verify", pack)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, found.faults[0])
    assert done.stdout.endswith(", 1 fault\n")


@pytest.mark.parametrize("end", [".sm_90.cubin", ".sm_80.ptx", ".fatbin"])
def test_a_file_that_the_compiler_does_not_make_is_a_fault(pack: Path, end: str) -> None:
    """Though its hash is as listed."""
    name = name_of(pack, end)
    data = (pack / name).read_bytes()
    relist(pack, name, data[:200] + bytes([data[200] ^ 1]) + data[201:])
    found = lngen.verify(pack)
    version = manifest_of(pack)["kernel_sets"][0]["files"][name]["nvrtc"]
    assert found.faults == (f"'{name}' is not what NVRTC {version} makes of '{name_of(pack, '.cu')}'.",)
    assert found.recompiled == 3


@pytest.mark.parametrize("text", [b"nonsense", b"\xff"])
def test_a_source_that_does_not_compile_is_a_fault(pack: Path, text: bytes) -> None:
    relist(pack, name_of(pack, ".cu"), text)
    found = lngen.verify(pack)
    assert len(found.faults) == 4
    assert all("its source does not compile" in fault for fault in found.faults)


def missing() -> Any:
    raise MissingError("NVRTC is missing, install it.")


SKIPPED: Mapping[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "another compiler": (
        lambda pack, patch: patch.setattr("lngen.aot.verify.nvrtc_version", lambda: (1, 2)),
        "and this one is 1.2: 4 files are not compiled again.",
    ),
    "no compiler": (
        lambda pack, patch: patch.setattr("lngen.aot.verify.nvrtc_version", missing),
        "there is no compiler (NVRTC is missing): 4 files are not compiled again.",
    ),
    "other flags": (
        lambda pack, patch: edit(pack, lambda d: d["kernel_sets"][0]["compile"]["flags"].append("-x")),
        "they were compiled with other flags: 4 files are not compiled again.",
    ),
    "no source": (
        lambda pack, patch: edit(pack, lambda d: d["kernel_sets"][0]["files"].pop(name_of(pack, ".cu"))),
        "the pack has no CUDA source of them, which a build with --emit cu adds: 4 files are not compiled again.",
    ),
}


@pytest.mark.parametrize("how", SKIPPED)
def test_what_cannot_be_compiled_again_is_told(pack: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    change, message = SKIPPED[how]
    change(pack, monkeypatch)
    found = lngen.verify(pack)
    assert (found.ok, found.recompiled, len(found.skipped)) == (True, 0, 1)
    assert found.skipped[0].endswith(message)
    done = call("verify", pack)
    assert (done.exit_code, message in done.stderr) == (0, True)


def test_one_file_that_cannot_be_compiled_again_is_one(pack: Path) -> None:
    name = name_of(pack, ".sm_90.cubin")
    edit(pack, lambda d: d["kernel_sets"][0]["files"][name].update(nvrtc="1.2"))
    found = lngen.verify(pack)
    assert (found.ok, found.recompiled, len(found.skipped)) == (True, 3, 1)
    assert found.skipped[0].endswith(": 1 file is not compiled again.")


def test_another_version_of_lngen_has_its_own_headers(pack: Path) -> None:
    """A source is compiled with those that lie in the pack, not with those of this lngen."""
    other = "0123456789abcdef"
    (pack / "include" / headers_hash()).rename(pack / "include" / other)
    renamed = json.loads(json.dumps(manifest_of(pack)).replace(headers_hash(), other))
    edit(pack, lambda d: d.update(renamed))
    assert (lngen.verify(pack).ok, lngen.verify(pack).recompiled) == (True, 4)
    header = next((pack / "include" / other / "lngen").glob("launch.cuh"))
    relist(pack, str(header.relative_to(pack)), b"nonsense")
    assert len(lngen.verify(pack).faults) == 4
    header.unlink()
    found = lngen.verify(pack)
    assert (len(found.faults), found.recompiled, len(found.skipped)) == (1, 0, 1)
    assert "no CUDA source" in found.skipped[0]


# ---- launch data ----


LIES: Mapping[str, Callable[[Any], object]] = {
    "kernels.0.grid.x.per": lambda e: e["kernels"][0]["grid"]["x"].update(per=928),
    "kernels.0.block": lambda e: e["kernels"][0].update(block=64),
    "tensors.1.alignment": lambda e: e["tensors"][1].update(alignment=4),
    "spec.eps": lambda e: e["spec"].update(eps=1e-3),
    "kernels": lambda e: e["kernels"].append(e["kernels"][0]),
    "numerics": lambda e: e.pop("numerics"),
    "text_sha256": lambda e: e.update(text_sha256="0" * 64),
    "resources.sm_80.rmsnorm_fwd__f32_d8__t1_r32_v4_b1__rows.launch_shared_bytes": lambda e: next(
        iter(e["resources"]["sm_80"].values())
    ).update(launch_shared_bytes=512),
}


@pytest.mark.parametrize("where", LIES)
def test_launch_data_of_another_schedule_are_a_fault(pack: Path, where: str) -> None:
    """Though the digests are right: a build of somebody else."""
    edit(pack, lambda d: LIES[where](d["kernel_sets"][0]))
    found = lngen.verify(pack)
    name = name_of(pack, ".cu").removesuffix(".cu")
    assert found.faults == (
        f"kernel set '{name}' has another '{where}' than lngen {__version__} makes of its spec and schedule.",
    )
    assert (found.ok, found.rebuilt, found.recompiled) == (False, 0, 4)


@pytest.mark.parametrize(("change", "message"), [
    (lambda e: e["spec"].update(eps=0.0, text=SPEC + ",eps=-1"), "does not follow from its spec and schedule: spec '"),
    (lambda e: e["schedule"].update(text="form=none"), "does not follow from its spec and schedule: "),
])  # fmt: skip
def test_a_spec_or_schedule_that_there_is_not_is_a_fault(pack: Path, change: Any, message: str) -> None:
    def lie(document: Any) -> None:
        change(document["kernel_sets"][0])
        document["specs"] = {document["kernel_sets"][0]["spec"]["text"]: document["specs"][SPEC]}

    edit(pack, lie)
    (fault,) = lngen.verify(pack).faults
    assert message in fault


def test_the_bytes_of_a_row_follow_from_the_spec(pack: Path) -> None:
    edit(pack, lambda d: d["specs"][SPEC].update(row_bytes=64))
    (fault,) = lngen.verify(pack).faults
    assert "has another 'row_bytes' than" in fault


@pytest.mark.parametrize(("change", "why"), [
    (lambda e: e.update(lngen_version="0.0.9"), f"they are of lngen 0.0.9, and this one is {__version__}"),
    (lambda e: e["spec"].update(graph="mine", text="mine@0123.fwd:d=8"), "their graphs are not lngen's"),
    (lambda e: e["spec"].update(text="this:that.fwd:d=8"), "their graphs are not lngen's"),
])  # fmt: skip
def test_launch_data_that_cannot_be_made_again_are_told(pack: Path, change: Any, why: str) -> None:
    """No text of a manifest is taken for a module: that would be imported."""

    def lie(document: Any) -> None:
        change(document["kernel_sets"][0])
        document["specs"] = {document["kernel_sets"][0]["spec"]["text"]: document["specs"][SPEC]}

    edit(pack, lie)
    found = lngen.verify(pack)
    assert (found.ok, found.rebuilt) == (True, 0)
    assert found.skipped == (f"{why}: 1 kernel set is not compared with spec and schedule.",)


def test_a_digit_of_a_manifest_that_was_changed_is_refused(pack: Path) -> None:
    """By verify, and by a launcher before it launches."""
    raw = (pack / FILE_NAME).read_bytes()
    (pack / FILE_NAME).write_bytes(raw.replace(b'"per": 32,', b'"per": 932,', 1))
    with pytest.raises(LngenError, match="is not as a build wrote it"):
        lngen.verify(pack)
    with pytest.raises(LngenError, match="is not as a build wrote it"):
        lngen.load(pack).norm("rmsnorm", d=8)


def test_a_file_that_is_not_listed_is_told(pack: Path) -> None:
    (pack / "mine.cubin").write_bytes(b"mine")
    assert (lngen.verify(pack).ok, lngen.verify(pack).unlisted) == (True, ("mine.cubin",))
    assert "'mine.cubin' is not in the manifest." in call("verify", pack).stderr
