"""If these fail, apache-tvm-ffi calls the C library of a pack wrongly, or raises another error than the right one."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from c_driver import Bridge, cc
from c_library import built
from c_norms import Call, FakeMemory
from c_packs import CASES, HEADS, Made

pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, of the extra test")

from gpu_dlpack import tensor  # noqa: E402

STREAM, CAPTURE = 77, 5


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, folder: Path, bridge: Bridge) -> Path:
    where = [f'-DLNGEN_CUDA_LIBRARY="{bridge.path}"', f'-DLNGEN_PACK_DIR="{folder}"', "-DLNGEN_TVM_FFI"]
    return built(folder, tmp_path_factory.mktemp("tvm") / "kernels.so", *where)


class Norms(Made):
    """A GPU, and the functions of a library of its own, in which nothing is loaded."""

    def __init__(self, folder: Path, library: Path, **how: Any) -> None:
        super().__init__(folder, library, **how)
        copy = next(c for n in itertools.count() if not (c := library.with_suffix(f".tvm{n}.so")).exists())
        self.of = tvm_ffi.load_module(str(shutil.copy(library, copy)))

    def given(self, call: Call, *shape: int, **how: Any) -> dict[str, Any]:
        """The tensors of a call by name; ``shape``: the dimensions that count rows."""
        found = {t["name"]: self._tensor(call, t, shape or (call.arguments.rows,), **how) for t in call.kernels["tensors"]}
        if size := getattr(self.of, f"{call.group}_workspace_bytes")(found["x"]):
            found["workspace"] = tensor(call.memory.put(np.zeros(size, np.uint8)), (size,), "u8")
        return found

    def _tensor(self, call: Call, t: Any, shape: tuple[int, ...], **how: Any) -> Any:
        lengths, strides = [n for axis in t["axes"] for n in (shape if axis == "M" else (call.spec.d,))], []
        if len(t["axes"]) == 2:
            step = getattr(call.arguments, f"{t['name']}_stride") or call.spec.d
            outer = getattr(call.arguments, f"{t['name']}_outer_stride", 0) or step * shape[-1]
            strides = [outer, step, 1][-len(lengths) :]
        return tensor(getattr(call.arguments, t["name"]), lengths, t["dtype"], strides, **how)


@pytest.fixture
def make(folder: Path, compiled: Path, bridge: Bridge) -> Iterator[Callable[..., Norms]]:
    with contextlib.ExitStack() as stack:

        def made(**how: Any) -> Norms:
            found = Norms(folder, compiled, **how)
            stack.enter_context(bridge.behind(found.gpu))
            return found

        yield made


def test_calls_have_the_bits_of_the_interpreter(make: Any) -> None:
    """Twice each, in one workspace; the first call loads the kernels."""
    norms = make()
    for case, (group, spec, rows, how) in CASES.items():
        two = how.get("layout") == HEADS
        call = Call(norms.library, FakeMemory(norms.gpu), group, norms.pack.described(spec), rows - two, **how)
        shape = (2, 3) if two else (2, rows // 2) if rows % 2 == 0 else (rows,)
        given = norms.given(call, *shape)
        eps = [call.arguments.eps] if hasattr(call.arguments, "eps") else []
        for _ in range(2):
            getattr(norms.of, call.group)(*given.values(), *eps)
            assert call.wrong() == [], case
    assert {launched.stream for launched in norms.gpu.launched} == {0}
