"""If these fail, pack list names other kernels than a launcher takes."""

from pathlib import Path
from typing import Any

from commands import call, prints
from lngen.launch.pack import FILE_NAME
from packs import edit, kernel_set, written


def entry(most: int, name: str, otherwise: str | None = None) -> dict[str, Any]:
    other = {"kernel_set": otherwise, "file": f"{otherwise}.sm_80.cubin"} if otherwise else None
    return {"most_bytes": most, "kernel_set": name, "file": f"{name}.sm_80.cubin", "otherwise": other}


def listing(folder: Path) -> Path:
    """A pack with classes that are empty on some GPU, alike, and otherwise."""
    large = [{**kernel_set("a", {})["kernels"][0], "dynamic_shared_bytes": 150 << 10}]
    sets = [kernel_set(n, {f"{n}.sm_80.cubin": b"x" * 1500}) for n in "abc"]
    sets[0]["kernels"] = large
    classes = [entry(1024, "c"), entry(2048, "b"), entry(4096, "b"), entry(8192, "a", "b"), entry(16384, "a", "c")]
    image = {"arch": "sm_80", "kind": "cubin", "classes": [*classes, entry(2**20, "a")]}
    specs = {"s.fwd:d=65536,dtype=bf16": {"row_bytes": 131072, "images": [image]}}
    for one in sets:
        one["spec"] = {**one["spec"], "text": next(iter(specs))}
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(written({"specs": specs, "kernel_sets": sets, "other_files": {}}))
    return folder


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines]


def test_pack_list_says_what_a_launcher_takes(tmp_path: Path) -> None:
    """Without a GPU's name both choices; classes that no number of rows is in are left out."""
    head, *lines = cells(prints("pack", "list", listing(tmp_path / "pack")))
    assert head == ["image", "for", "rows", "kernel set", "otherwise", "size"]
    assert {tuple(line[:2]) for line in lines} == {("sm_80 cubin", "NVIDIA A100-SXM4-80GB")}
    assert [line[2:] for line in lines] == [
        ["0 to 3", "b", "", "2 kB"], ["4 to 6", "a", "b", "2 kB"], ["7 to 13", "a", "c", "2 kB"],
        ["14 and more", "a", "", "2 kB"],
    ]  # fmt: skip
    ((_, *one),) = [cells(prints("pack", "list", tmp_path / "pack", "--spec", "s.fwd:d=65536,dtype=bf16"))]
    assert one == lines


def test_pack_list_of_a_gpu_has_what_it_can_launch(tmp_path: Path) -> None:
    done = call("pack", "list", listing(tmp_path / "pack"), "--device", "l40s")
    _, *lines = cells(done.stdout)
    assert [line[1:] for line in lines] == [
        ["NVIDIA L40S", rows, name, "2 kB"]
        for rows, name in (("0 to 1", "c"), ("2 to 8", "b"), ("9 to 17", "c"), ("18 and more", "a"))
    ]
    assert done.stderr == "'a' needs 153600 bytes of shared memory for a block, which NVIDIA L40S does not have.\n"
    told = call("pack", "list", tmp_path / "pack", "--device", "t4").stderr
    assert told == "s.fwd:d=65536,dtype=bf16 has no image for Tesla T4, which is sm_75.\n"


def test_pack_list_names_kernel_sets_after_their_spec(tmp_path: Path) -> None:
    """A table for each spec; above it the spec, and what all names of its kernel sets begin with."""
    specs = [f"layernorm.{way}:d=64,dtype=bf16" for way in ("fwd", "bwd")]
    folder = str(tmp_path / "pack")
    prints("build", *specs, "--out", folder, "--emit", "cu", "--rows", "1")
    for (heading, *lines), way in zip(
        (part.splitlines() for part in prints("pack", "list", folder).split("\n\n")), ("bwd", "fwd"), strict=True
    ):
        assert heading == f"layernorm.{way}:d=64,dtype=bf16: layernorm_{way}__bf16_d64__..."
        (_, (image, _, rows, name, _)) = cells("\n".join(lines))
        assert (image, rows) == ("sm_90 source", "any")
        assert (tmp_path / "pack" / f"layernorm_{way}__bf16_d64__{name}.cu").is_file()


def test_pack_list_says_once_what_a_gpu_lacks(tmp_path: Path) -> None:
    folder = listing(tmp_path / "pack")
    classes = [entry(1024, "a"), entry(2**20, "a")]
    edit(folder, lambda d: d["specs"]["s.fwd:d=65536,dtype=bf16"]["images"][0].update(classes=classes))
    assert call("pack", "list", folder, "--device", "l40s").stderr.count("'a' needs") == 1
