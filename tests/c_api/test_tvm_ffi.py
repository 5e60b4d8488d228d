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
        found = {
            t["name"]: self._tensor(call, t, shape or (call.arguments.rows,), **how) for t in call.kernels["tensors"]
        }
        if size := getattr(self.of, f"{call.group}_workspace_bytes")(found["x"]):
            found["workspace"] = tensor(call.memory.put(np.zeros(size, np.uint8)), (size,), "u8")
        return found

    def _tensor(self, call: Call, t: Any, shape: tuple[int, ...], **how: Any) -> Any:
        lengths, strides = [n for axis in t["axes"] for n in (shape if axis == "M" else (call.spec.d,))], []
        if step := getattr(call.arguments, f"{t['name']}_stride", 0):
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


def test_wrong_arguments_raise_what_python_would_and_launch_nothing(make: Any) -> None:
    norms = make(devices=2)
    forward, backward = norms.call("forward, rows apart"), norms.call("backward")
    given, of_backward = norms.given(forward), norms.given(backward)
    x, rows = forward.arguments.x, forward.arguments.rows

    def raises(kind: type[Exception], words: str, call: Call = forward, more: Any = (), **changed: Any) -> None:
        arrays = {**(given if call is forward else of_backward), **changed}
        with pytest.raises(kind, match=f"^lngen_{call.group}.*{words}.*[.]$"):
            getattr(norms.of, call.group)(*arrays.values(), *more)

    raises(TypeError, r"takes \(x, gamma, beta, y, mean, rstd, workspace=None\), got 8", more=(None, None))
    raises(TypeError, "beta is expected to be a tensor, got None", beta=None)
    raises(TypeError, "gamma is expected to be a tensor, got something else", gamma=1.5)
    raises(TypeError, "mean is expected to be f32, got f64", mean=tensor(x, (rows,), "f64"))
    raises(TypeError, "mean is expected to be f32, got another dtype", mean=tensor(x, (rows,), "u8"))
    raises(ValueError, "x is expected on a GPU; move it there", x=torch.empty(rows, 96, dtype=torch.bfloat16))
    raises(
        ValueError,
        "y is expected on GPU 0, where other tensors lie, got GPU 1",
        y=tensor(x, (rows, 96), "bf16", device=1),
    )
    raises(ValueError, "y is expected to have 2 dimensions, got 1", y=tensor(x, (96,), "bf16"))
    raises(ValueError, "dimension 0 of y is expected to be 50, got 39", y=tensor(x, (39, 96), "bf16"))
    raises(ValueError, "dimension 0 of gamma is expected to be 96, got 97", gamma=tensor(x, (97,), "bf16"))
    raises(ValueError, "gamma is expected to be contiguous", gamma=tensor(x, (96,), "bf16", (2,)))
    raises(ValueError, "x is expected to have contiguous rows", x=tensor(x, (rows, 96), "bf16", (192, 2)))
    raises(ValueError, "x is expected to have rows at one distance", x=tensor(x, (rows, 96), "bf16", (0, 1)))
    raises(ValueError, "no kernels for x of bf16 with 95 elements .* lngen build", x=tensor(x, (rows, 95), "bf16"))
    raises(ValueError, "no kernels for x of another dtype", x=tensor(x, (rows, 96), "u8"))
    raises(ValueError, "x is expected to have rows, got", x=tensor(x, (), "bf16"))
    raises(ValueError, "x is expected at a multiple of 16 bytes.* copy the array", x=tensor(x + 2, (rows, 96), "bf16"))
    of_backward.pop("workspace")
    raises(ValueError, r"needs a workspace of \d+ bytes for 140 rows, got 0", backward)
    raises(TypeError, "workspace .* contiguous uint8", backward, workspace=tensor(x, (4096,), "f32"))
    raises(ValueError, "workspace is expected on GPU 0", backward, workspace=tensor(x, (4096,), "u8", device=1))
    raises(RuntimeError, "x is expected on device 1", **norms.given(forward, device=1))
    assert norms.gpu.launched == []


def test_heads_that_have_no_cut_in_common_are_refused(make: Any) -> None:
    norms = make()
    group, spec, _, _ = CASES["two distances"]
    call = Call(norms.library, FakeMemory(norms.gpu), group, norms.pack.described(spec), 8)
    given, shape = norms.given(call, 2, 2, 2), (2, 2, 2, 64)
    x, y = call.arguments.x, call.arguments.y
    getattr(norms.of, group)(*given.values())
    assert call.wrong() == []
    with pytest.raises(ValueError, match="x is expected to have rows at two distances at most, which change at one"):
        cuts = {"x": tensor(x, shape, "bf16", (512, 128, 64, 1)), "y": tensor(y, shape, "bf16", (512, 256, 64, 1))}
        getattr(norms.of, group)(*{**given, **cuts}.values())


def test_eps_has_to_be_a_number(make: Any) -> None:
    norms = make()
    call = norms.call("eps of the call")
    given, function = norms.given(call).values(), getattr(norms.of, call.group)
    for eps, kind, words in (
        (("0.1",), TypeError, "eps is expected to be a number"), ((True,), TypeError, "eps is expected to be a number"),
        ((float("nan"),), ValueError, "eps is expected to be finite"), ((), TypeError, r"workspace=None, eps\), got 3"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            function(*given, *eps)
    function(*given, None, 1)


def test_a_call_goes_to_the_current_stream_and_into_its_capture(make: Any) -> None:
    """What is not loaded is an error there, and can be loaded later."""
    norms = make()
    call, gpu = norms.call("backward"), norms.gpu
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), STREAM):
        gpu.captures[STREAM] = CAPTURE
        with pytest.raises(RuntimeError, match="STREAM_CAPTURE_UNSUPPORTED"):
            norms.given(call)
        gpu.captures.clear()
        norms.of.load(0)
        given = norms.given(call)
        gpu.captures[STREAM] = CAPTURE
        norms.of.layernorm_backward(*given.values())
    gpu.captures.clear()
    assert call.wrong() != []
    for _ in range(2):
        gpu.replay(CAPTURE)
        assert call.wrong() == []
    assert {launched.stream for launched in gpu.launched} == {STREAM}
    for device, kind in ((7, RuntimeError), ("0", TypeError), (2**32, TypeError)):
        with pytest.raises(kind, match="device 7|number of a GPU"):
            norms.of.load(device)


# ---- what is declared, and what the page says ----

SAME = """#include <tvm/ffi/extra/c_env_api.h>
#include "lngen_kernels.c"
#define SIZE(mine, theirs) _Static_assert(sizeof(mine) == sizeof(theirs), #mine)
#define SAME(mine, a, theirs, b) SIZE(((mine *)0)->a, ((theirs *)0)->b); \\
    _Static_assert(offsetof(mine, a) == offsetof(theirs, b), #a)
SIZE(any, TVMFFIAny);
SAME(any, kind, TVMFFIAny, type_index); SAME(any, value, TVMFFIAny, v_int64);
SIZE(dl_tensor, DLTensor);
SAME(dl_tensor, data, DLTensor, data); SAME(dl_tensor, device_type, DLTensor, device.device_type);
SAME(dl_tensor, device, DLTensor, device.device_id); SAME(dl_tensor, dimensions, DLTensor, ndim);
SAME(dl_tensor, code, DLTensor, dtype.code); SAME(dl_tensor, bits, DLTensor, dtype.bits);
SAME(dl_tensor, lanes, DLTensor, dtype.lanes); SAME(dl_tensor, shape, DLTensor, shape);
SAME(dl_tensor, strides, DLTensor, strides); SAME(dl_tensor, byte_offset, DLTensor, byte_offset);
#define EQUAL(mine, theirs) _Static_assert((int)mine == (int)theirs, #mine)
EQUAL(ANY_NONE, kTVMFFINone); EQUAL(ANY_INT, kTVMFFIInt); EQUAL(ANY_FLOAT, kTVMFFIFloat); EQUAL(DL_CUDA, kDLCUDA);
EQUAL(ANY_TENSOR_POINTER, kTVMFFIDLTensorPtr); EQUAL(ANY_TENSOR, kTVMFFITensor); EQUAL(DL_UINT, kDLUInt);
EQUAL(OBJECT_HEADER, sizeof(TVMFFIObject)); EQUAL(2, kDLFloat); EQUAL(4, kDLBfloat);
"""


def test_what_is_declared_is_what_their_headers_declare(folder: Path, tmp_path: Path) -> None:
    """Also the functions: C refuses another declaration."""
    (tmp_path / "same.c").write_text(SAME, encoding="utf-8")
    theirs = [f"-isystem{tvm_ffi.libinfo.find_include_path()}", f"-isystem{tvm_ffi.libinfo.find_dlpack_include_path()}"]
    cc(tmp_path / "same.o", [tmp_path / "same.c"], "-c", f"-I{folder / 'c'}", "-DLNGEN_TVM_FFI", "-O0", *theirs)
