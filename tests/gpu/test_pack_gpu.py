"""If these fail, a pack launches other kernels on a GPU than it promises, or gives other bits than a compiled norm."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

import lngen
from lngen.launch.pack import Pack

pytestmark = pytest.mark.gpu

WIDTHS = (96, 256, 4096)
GRAPHS = ("layernorm", "rmsnorm")
SPECS = [f"{g}.{way}:d={d},dtype=bf16" for g, way, d in product(GRAPHS, ("fwd", "bwd"), WIDTHS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every GPU there is: the oldest by the PTX of sm_75."""
    out = tmp_path_factory.mktemp("pack")
    kinds = "cu,ptx,cubin,fatbin" if _has_fatbin() else "cu,ptx,cubin"
    lngen.build(SPECS, out, arch="sm_75+ptx,sm_80,sm_90+ptx", rows="1,64,4096,many", emit=kinds)
    return out


def _has_fatbin() -> bool:
    from lngen.errors import MissingError
    from lngen.packs.fatbin import fatbin

    try:
        fatbin([])
    except MissingError:
        return False
    return True


def arrays(graph: str, d: int, rows: int) -> tuple[list[Any], Any]:
    """x and the weights, and dy."""
    import torch

    random = torch.Generator(device="cuda").manual_seed(rows)
    shapes = [(rows, d), *[(d,)] * (2 if graph == "layernorm" else 1), (rows, d)]
    made = [torch.randn(shape, device="cuda", generator=random).bfloat16() for shape in shapes]
    return made[:-1], made[-1]


def equal(found: Any, wanted: Any) -> bool:
    import torch

    torch.cuda.synchronize()
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["ptx", "fatbin"])
def test_other_images_give_the_same_bits(folder: Path, kind: str) -> None:
    pytest.importorskip("torch")
    inputs, _ = arrays("layernorm", 4096, 64)
    wanted, _ = lngen.load(folder).norm("layernorm", d=4096, dtype="bf16").forward(*inputs)
    pack = Pack(folder)
    for spec in pack.specs:
        facts: Any = pack.dispatch(spec)
        if kind == "ptx":
            facts["images"] = [image for image in facts["images"] if image["kind"] == "ptx"]
            continue
        for entry in (entry for image in facts["images"] for entry in image["classes"]):
            entry["file"] = f"{entry['kernel_set']}.fatbin"
            if entry["file"] not in pack.kernel_set(entry["kernel_set"])["files"]:
                pytest.skip("nvidia-nvfatbin is not installed")
    y, _ = pack.norm("layernorm", d=4096, dtype="bf16").forward(*inputs)
    assert equal((y,), (wanted,))


def test_a_prepared_pack_is_captured(folder: Path) -> None:
    """Forward and backward, whose kernels no call has loaded before."""
    torch = pytest.importorskip("torch")
    norm = lngen.load(folder).norm("layernorm", d=4096, dtype="bf16").prepare()
    inputs, dy = arrays("layernorm", 4096, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, saved = norm.forward(*inputs)
        gradients = norm.backward(dy, saved)
    graph.replay()
    reference = lngen.compile("layernorm", d=4096, dtype="bf16")
    wanted, kept = reference.forward(*inputs)
    assert equal((y, *gradients), (wanted, *reference.backward(dy, kept)))


def test_check_verifies_what_was_built(folder: Path) -> None:
    found = lngen.verify(folder)
    assert found.ok, found.faults


def test_calls_run_where_their_arrays_are(folder: Path) -> None:
    """Not on the current device; arrays of two devices are refused."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    norm = lngen.load(folder).norm("layernorm", d=256, dtype="bf16")
    inputs, _ = arrays("layernorm", 256, 300)
    here, _ = norm.forward(*inputs)
    there, _ = norm.forward(*(a.to("cuda:1") for a in inputs))
    assert (there.get_device(), torch.cuda.current_device()) == (1, 0)
    assert equal((here,), (there.to("cuda:0"),))
    with pytest.raises(lngen.LngenError, match="'gamma' is expected on GPU 0, where other arrays lie, got GPU 1"):
        norm.forward(inputs[0], inputs[1].to("cuda:1"), inputs[2])
