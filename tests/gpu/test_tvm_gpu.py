"""If these fail, TVM FFI gets other bits of a pack on a GPU than Python's launcher, or on another stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lngen
from c_library import CLibrary

torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, of the extra test")
pytestmark = pytest.mark.gpu

D, SHAPE = 4096, (3, 50)
FORWARD = ("x", "gamma", "beta", "y", "mean", "rstd", "workspace")
BACKWARD = ("dy", "x", "gamma", "mean", "rstd", "dx", "dgamma", "dbeta", "workspace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pack")
    specs = [f"layernorm.{way}:d={D},dtype=f16" for way in ("fwd", "bwd")]
    lngen.build(specs, out, arch="sm_75+ptx,sm_80,sm_90+ptx", emit="cubin,ptx,c")
    return out


@pytest.fixture(scope="module")
def norms(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("tvm")
    CLibrary.built(folder, out, LNGEN_PACK_DIR=folder, LNGEN_TVM_FFI="")
    return tvm_ffi.load_module(str(out / "kernels.so"))


@pytest.mark.parametrize("how", ["torch", "cupy", "graph"])
def test_calls_have_the_bits_of_pythons_launcher(folder: Path, norms: Any, how: str) -> None:
    many = {"device": "cuda", "dtype": torch.float16}
    x, dy = torch.randn(2, *SHAPE, D, **many)
    gamma, beta, dgamma, dbeta = torch.randn(4, D, **many)
    mean, rstd = torch.empty(2, *SHAPE, device="cuda")
    sizes = norms.layernorm_forward_workspace_bytes(x), norms.layernorm_backward_workspace_bytes(x)
    workspace = torch.empty(max(sizes), device="cuda", dtype=torch.uint8)
    arrays = {
        "x": x, "dy": dy, "gamma": gamma, "beta": beta, "dgamma": dgamma, "dbeta": dbeta, "mean": mean, "rstd": rstd,
        "workspace": workspace, "y": torch.empty_like(x), "dx": torch.empty_like(x),
    }  # fmt: skip
    norm = lngen.load(folder).norm("layernorm", d=D, dtype="f16")
    y, saved = norm.forward(x, gamma, beta)
    wanted = dict(zip(("y", "dx", "dgamma", "dbeta"), (y, *norm.backward(dy, saved)), strict=True))

    def call(given: Any) -> None:
        norms.layernorm_forward(*[given[name] for name in FORWARD])
        norms.layernorm_backward(*[given[name] for name in BACKWARD])

    torch.cuda.synchronize()
    if how == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(arrays)
        assert not torch.equal(arrays["y"], y)
        graph.replay()
    elif how == "cupy":
        cupy = pytest.importorskip("cupy")
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), stream.ptr):
            call({name: cupy.from_dlpack(array) for name, array in arrays.items()})
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            call(arrays)
    torch.cuda.synchronize()
    for name, value in wanted.items():
        assert torch.equal(arrays[name].view(torch.int16), value.view(torch.int16)), name
