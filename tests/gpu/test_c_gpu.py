"""If these fail, the C library of a pack gives other bits on a GPU than the interpreter, or cannot be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from c_library import CLibrary
from c_norms import Call
from c_packs import CASES, ON_SM_90, case_of, pack
from lngen.compiler.ir.numerics import Array
from lngen.launch.pack import Pack

pytestmark = pytest.mark.gpu

MANY = 5000  # rows, which take another class


class TorchMemory:
    """Memory of tensors, which live as long as this."""

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}

    def put(self, content: Array) -> int:
        import torch

        tensor = torch.from_numpy(content).cuda()
        self._tensors[tensor.data_ptr()] = tensor
        return int(tensor.data_ptr())

    def get(self, address: int, size: int) -> Array:
        return self._tensors[address].cpu().numpy() if size else np.empty(0, np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Any:
    """Makes a call of a case, with a workspace; the test is skipped where the GPU has no kernels of it."""
    torch = pytest.importorskip("torch")
    library = CLibrary.built(folder, tmp_path_factory.mktemp("library"), LNGEN_PACK_DIR=folder)
    assert library.call("load", 0) == "OK", library.error()

    def made(case: str, rows: int | None = None) -> Call:
        if case in ON_SM_90 and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("its schedule is for 9.0")
        group, kernels, few, how = case_of(case, library, Pack(folder))
        call = Call(library, TorchMemory(), group, kernels, few if rows is None else rows, **how)
        call.prepare(torch.cuda.current_stream().cuda_stream)
        return call

    return made


@pytest.mark.parametrize(("case", "rows"), [*((c, None) for c in CASES | ON_SM_90), *((c, MANY) for c in CASES)])
def test_calls_have_the_bits_of_the_interpreter(prepared: Any, case: str, rows: int | None) -> None:
    import torch

    call = prepared(case, rows)
    for _ in range(2):
        call.launch(torch.cuda.current_stream().cuda_stream)
        assert call.wrong() == []


@pytest.mark.parametrize("case", ["forward", "backward", "backward, one launch", "claimed rows"])
def test_a_cuda_graph_holds_a_call(prepared: Any, case: str) -> None:
    import torch

    call, graph = prepared(case), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call.launch(torch.cuda.current_stream().cuda_stream)
    assert call.wrong() != []
    for _ in range(2):
        graph.replay()
        assert call.wrong() == []


def test_wrong_calls_leave_the_gpu_usable(prepared: Any) -> None:
    """Null, host memory, and more rows than a grid can have."""
    call, host = prepared("forward"), np.zeros(1 << 12, np.uint8)
    assert call.status(x=None) == "NULL_POINTER"
    assert call.status(x=host.ctypes.data // 64 * 64 + 64) == "WRONG_DEVICE"
    assert call.status(rows=2**62) == "BAD_ROWS"
    call.launch()
    assert call.wrong() == []
