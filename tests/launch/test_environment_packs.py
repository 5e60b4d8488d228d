"""If these fail, a norm compiles what a pack of LNGEN_PACKS has, or takes kernels of it that are not its own."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lngen
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from lngen import config
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M
from lngen.compiler.toolchain import nvrtc
from lngen.errors import LngenError, MissingError
from lngen.launch.runtime import environment_packs
from lngen.launch.runtime.lock_file import Lock, Locked

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

from host_tensors import gpu_with, pass_for_gpu_tensors  # noqa: E402
from remembering import remembering  # noqa: E402

WIDTH = 64


def own(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("gamma", D))


def of_another_dtype(b: GraphBuilder) -> None:
    """The same forward, whose backward has another result."""
    x = b.input("x", M, D)
    b.output("y", x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("gamma", D, grad="f32"))


NORMS: dict[str, Callable[[], Any]] = {
    "layernorm": lambda: lngen.compile("layernorm", d=WIDTH, dtype="bf16"),
    "overlap": lambda: lngen.compile("rmsnorm", d=WIDTH, overlap=True),
    "own": lambda: lngen.compile(own, d=WIDTH, dtype="bf16"),
}
SPECS = [norm().spec(way) for norm in NORMS.values() for way in ("fwd", "bwd")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pack")
    with cubins_of_ptx():
        lngen.build(SPECS, out, arch="sm_90", rows="1,many", emit="ptx,cubin")
    return out


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeDriver:
    """A machine without NVRTC."""
    found = gpu_with(monkeypatch, folder)
    monkeypatch.setenv("LNGEN_PACKS", str(folder))
    monkeypatch.setattr(nvrtc, "_library", _missing)
    environment_packs._opened.cache_clear()
    return found


def _missing() -> Any:
    raise MissingError("Compiling needs NVRTC.")


def arrays(norm: Any, rows: int = 5, offset: int = 0) -> list[Any]:
    """Inputs of a forward; ``offset``: elements by which they are off an aligned address."""
    numbers = torch.Generator().manual_seed(0)
    dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}

    def array(tensor: Any) -> Any:
        shape = tensor.shape(rows, WIDTH)
        flat = torch.randn(offset + torch.Size(shape).numel(), generator=numbers).to(dtypes[tensor.dtype])
        return flat[offset:].view(shape)

    return [array(tensor) for tensor in norm._forward.inputs]


def host(tensor: Any) -> Any:
    import ml_dtypes

    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("rows", [1, 2000])
@pytest.mark.parametrize("name", NORMS)
def test_the_kernels_of_a_pack_have_the_same_bits(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    """Forward and backward, without NVRTC; nothing is derived but the whole graph of a program, to be compared."""
    asked: list[str] = []
    trace = lngen.Spec.trace
    monkeypatch.setattr(lngen.Spec, "trace", lambda spec: asked.append(spec.definition.name) or trace(spec))
    norm = NORMS[name]().warmup()
    given = arrays(norm, rows)
    y, saved = norm.forward(*given)
    gradients = norm.backward(y, saved)
    assert len(gpu.launched) >= 2
    assert {*asked} == ({"own"} if name == "own" else set())
    wanted, kept = norm.forward(*map(host, given))
    for found, right in zip((y, *gradients), (wanted, *norm.backward(wanted, kept)), strict=True):
        assert host(found).tobytes() == right.tobytes()


def test_the_class_of_rows_and_the_overlap_are_those_of_the_call(gpu: FakeDriver) -> None:
    call = NORMS["layernorm"]()._forward
    assert call.launcher(0, rows=1) is not call.launcher(0, rows=10**6)
    assert call.launcher(0) is call.launcher(0, rows=10**6)
    assert [NORMS[name]()._forward.launcher(0, rows=1).overlap for name in ("layernorm", "overlap")] == [False, True]
    assert str(call) == f"{call.spec}\n  of the pack '{call._packs[0].folder}'"


def locked(path: Path) -> Path:
    entry = Locked("NVIDIA H100", "sm_90", str(SPECS[0]), 3, "form=registers,threads=8,rows_per_block=4,vec=8")
    path.write_text(Lock((entry,)).render())
    return path


# What a pack has not, though it has a spec of that text.
OTHERS: dict[str, Callable[[Path], Any]] = {
    "another spec": lambda folder: lngen.compile("layernorm", d=WIDTH, dtype="bf16", eps=0.5)._forward,
    "a schedule": lambda folder: lngen.compile("layernorm", d=WIDTH, dtype="bf16", schedule={"fwd": "vec=4"})._forward,
    "a lock": lambda folder: lngen.compile("layernorm", d=WIDTH, dtype="bf16", lock=locked(folder / "l"))._forward,
    "another graph": lambda folder: lngen.compile(Definition("own", of_another_dtype), d=WIDTH, dtype="bf16")._backward,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_pack_has_not_is_compiled(gpu: FakeDriver, tmp_path: Path, name: str) -> None:
    """Here it cannot be, and one sentence says what to do."""
    call = OTHERS[name](tmp_path)
    lacks = f"no pack of LNGEN_PACKS has kernels of '{call.text}' for sm_90, and nothing can be compiled here"
    build = f"build it: lngen build {call.text} --arch sm_90 --out DIR."
    with pytest.raises(MissingError, match=f"^{re.escape(f'{lacks}; {build}')}$"):
        call.launcher(0, rows=3)


def test_a_graph_of_a_module_is_built_by_its_name(gpu: FakeDriver) -> None:
    norm = lngen.compile("own_graphs:gated", d=8)
    with pytest.raises(MissingError, match=r"lngen build own_graphs:gated\.fwd:d=8,dtype=f32 --arch sm_90 --out DIR"):
        norm._forward.launcher(0, rows=3)


def test_other_versions_and_other_gpus_are_compiled_for(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(environment_packs, "__version__", "0.0.1")
        assert NORMS["layernorm"]()._forward._packs == ()
    older = FakeDriver((8, 0), 108, "NVIDIA A100-SXM4-80GB", version=13090)
    pass_for_gpu_tensors(monkeypatch, older)
    with pytest.raises(MissingError, match=r"for sm_80, and nothing can be compiled here; build it: .* --arch sm_80 "):
        NORMS["layernorm"]()._forward.launcher(0, rows=3)


def test_arrays_that_do_not_suit_a_pack(
    gpu: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels for them are compiled, or built with narrower accesses."""
    norm = NORMS["layernorm"]()
    given = arrays(norm, offset=1)
    with pytest.raises(MissingError, match=r"with accesses of 1 elements, which .* --schedule vec=1 --out DIR"):
        norm.forward(*given)
    monkeypatch.undo()
    process = remembering(monkeypatch, tmp_path / "cache")
    process.gpu.knows_pack(folder)
    monkeypatch.setenv("LNGEN_PACKS", str(folder))
    environment_packs._opened.cache_clear()
    norm = NORMS["layernorm"]()
    y, _ = norm.forward(*given)
    assert len(process.compiled) >= 1
    assert host(y).tobytes() == norm.forward(*map(host, given))[0].tobytes()


def test_the_first_of_several_packs_is_taken(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    copy, other = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "other"
    lngen.build(["softmax.fwd:d=8,dtype=f32"], other, arch="sm_90", emit="cu")
    monkeypatch.setenv("LNGEN_PACKS", os.pathsep.join(["", str(other), str(copy), str(folder)]))
    assert [pack.folder for pack in NORMS["layernorm"]()._forward._packs] == [str(copy), str(folder)]
    monkeypatch.setenv("LNGEN_PACKS", "")
    assert config.pack_dirs() == NORMS["layernorm"]()._forward._packs == ()


@pytest.mark.parametrize("wrong", ["missing", "no manifest", "a torn manifest", "no file of it", "no home"])
def test_a_folder_that_is_no_pack_is_one_error(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, wrong: str
) -> None:
    there = shutil.copytree(folder, tmp_path / "pack")
    if wrong == "missing":
        shutil.rmtree(there)
    elif wrong == "no manifest":
        (there / "manifest.json").unlink()
    elif wrong == "a torn manifest":
        (there / "manifest.json").write_bytes((there / "manifest.json").read_bytes()[:999])
    elif wrong == "no file of it":
        for path in there.glob("*.cubin"):
            path.unlink()
    monkeypatch.setenv("LNGEN_PACKS", "~nosuch-user-here/pack" if wrong == "no home" else str(there))
    with pytest.raises(LngenError, match=r"LNGEN_PACKS|of the pack cannot be read") as caught:
        NORMS["layernorm"]()._forward.launcher(0, rows=3)
    assert "pack" in str(caught.value).partition("\n")[0]
