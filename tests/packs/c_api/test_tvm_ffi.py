"""If these fail, apache-tvm-ffi calls the C library of a pack wrongly, or raises another error than the right one."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import c_launcher
from c_driver import Bridge, cc, no_op
from c_library import CLibrary
from c_packs import Made
from fake_driver import FakeDriver
from launchers import CCall, TvmFfi

pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, of the extra test")

import lngen  # noqa: E402
from gpu_dlpack import as_on_gpu, tensor  # noqa: E402
from host_tensors import pass_for_gpu_tensors  # noqa: E402

STREAM, CAPTURE = 77, 5


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, folder: Path, bridge: Bridge) -> Path:
    return compiled_for(bridge.path, folder, tmp_path_factory.mktemp("tvm"))


def compiled_for(driver: Path, folder: Path, out: Path) -> Path:
    """The library with the functions of TVM FFI."""
    CLibrary.built(folder, out, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=driver, LNGEN_TVM_FFI="")
    return out / "kernels.so"


class Norms(TvmFfi):
    """A GPU, and the functions of a library of its own, in which nothing is loaded."""

    def __init__(self, folder: Path, library: Path, **how: Any) -> None:
        super().__init__(folder, library)
        self.made = Made(folder, library, **how)
        self.gpu = self.made.gpu
        c_launcher.begin(self.gpu)


@pytest.fixture
def make(folder: Path, compiled: Path, bridge: Bridge) -> Iterator[Callable[..., Norms]]:
    with contextlib.ExitStack() as stack:

        def made(**how: Any) -> Norms:
            found = Norms(folder, compiled, **how)
            stack.enter_context(bridge.behind(found.gpu))
            return found

        yield made


def test_wrong_arguments_raise_what_python_would_and_launch_nothing(make: Any) -> None:
    norms = make(devices=2)
    forward, backward = norms.made.call("many rows"), norms.made.call("backward")
    given, of_backward = (norms.given(call.memory, call.host) for call in (forward, backward))
    of_backward.pop("workspace")

    def at_x(*shape: int, dtype: str = "bf16", **how: Any) -> Any:
        return tensor(forward.fields["x"], shape, dtype, **how)

    def raises(kind: type[Exception], words: str, call: CCall = forward, more: Any = (), **changed: Any) -> None:
        arrays = {**(given if call is forward else of_backward), **changed}
        with pytest.raises(kind, match=f"^lngen_{call.group}.*{words}.*[.]$"):
            getattr(norms.of, call.group)(*arrays.values(), *more)

    raises(TypeError, r"takes \(x, gamma, beta, y, mean, rstd, workspace=None\), got 8", more=(None, None))
    raises(TypeError, "gamma is expected to be a tensor, got something else", gamma=0)
    raises(TypeError, "mean is expected to be f32, got another dtype", mean=at_x(50, dtype="u8"))
    raises(ValueError, "x is expected on a GPU; move it there", x=torch.empty(50, 96, dtype=torch.bfloat16))
    raises(ValueError, "y is expected on GPU 0, where other tensors lie, got GPU 1", y=at_x(50, 96, device=1))
    raises(ValueError, "y is expected to have 2 dimensions, got 1", y=at_x(96))
    raises(ValueError, "no kernels for x of another dtype", x=at_x(50, 96, dtype="u8"))
    raises(ValueError, "x is expected to have rows, got", x=at_x())
    raises(ValueError, r"needs a workspace of \d+ bytes for 30 rows, got 0", backward)
    raises(TypeError, "workspace .* contiguous uint8", backward, workspace=at_x(4096, dtype="f32"))
    raises(ValueError, "workspace is expected on GPU 0", backward, workspace=at_x(4096, dtype="u8", device=1))
    raises(RuntimeError, "x is expected on device 1", **norms.given(forward.memory, forward.host, device=1))
    assert norms.gpu.launched == []


def test_a_call_goes_to_the_current_stream_and_into_its_capture(make: Any) -> None:
    """What is not loaded is an error there, and can be loaded later."""
    norms = make()
    call, gpu = norms.made.call("backward"), norms.gpu
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), STREAM):
        gpu.captures[STREAM] = CAPTURE
        with pytest.raises(RuntimeError, match="STREAM_CAPTURE_UNSUPPORTED"):
            norms.given(call.memory, call.host)
        gpu.captures.clear()
        norms.of.load(0)
        given = norms.given(call.memory, call.host)
        gpu.captures[STREAM] = CAPTURE
        norms.of.layernorm_backward(*given.values())
    gpu.captures.clear()
    assert call.wrong() != []
    for _ in range(2):
        gpu.replay(CAPTURE)
        assert call.wrong() == []
    assert {launched.stream for launched in gpu.launched} == {STREAM}
    for device, kind in ((7, RuntimeError), ("0", TypeError), (2**32, TypeError)):
        with pytest.raises(kind, match=r"device 7|number of a GPU"):
            norms.of.load(device)


# ---- what is declared, and what the page says ----

SAME = {  # of the C file, of the headers
    "any TVMFFIAny": "kind=type_index value=v_int64",
    "dl_tensor DLTensor": """data=data device_type=device.device_type device=device.device_id dimensions=ndim
        code=dtype.code bits=dtype.bits lanes=dtype.lanes shape=shape strides=strides byte_offset=byte_offset""",
    "": """ANY_NONE=kTVMFFINone ANY_INT=kTVMFFIInt ANY_FLOAT=kTVMFFIFloat ANY_TENSOR_POINTER=kTVMFFIDLTensorPtr
        ANY_TENSOR=kTVMFFITensor OBJECT_HEADER=sizeof(TVMFFIObject) DL_CUDA=kDLCUDA DL_UINT=kDLUInt""",
}
HEADERS = [
    f"-isystem{path()}" for path in (tvm_ffi.libinfo.find_include_path, tvm_ffi.libinfo.find_dlpack_include_path)
]


def test_what_is_declared_is_what_their_headers_declare(folder: Path, tmp_path: Path) -> None:
    """Also the functions: C refuses another declaration."""
    lines = ["#include <tvm/ffi/extra/c_env_api.h>", '#include "lngen_kernels.c"']
    for types, same in SAME.items():
        mine, _, theirs = types.partition(" ")
        equal = [pair.split("=") for pair in same.split()]
        if types:
            fields = [(f"(({mine} *)0)->{a}", f"(({theirs} *)0)->{b}") for a, b in equal]
            equal = [(f"offsetof({mine}, {a})", f"offsetof({theirs}, {b})") for a, b in equal]
            equal += [(f"sizeof({a})", f"sizeof({b})") for a, b in [(mine, theirs), *fields]]
        lines += [f'_Static_assert((int){a} == (int){b}, "{a}");' for a, b in equal]
    (tmp_path / "same.c").write_text("\n".join([*lines, ""]), encoding="utf-8")
    cc(tmp_path / "same.o", [tmp_path / "same.c"], "-c", f"-I{folder / 'c'}", "-DLNGEN_TVM_FFI", "-O0", *HEADERS)


PAGE = (Path(__file__).parents[3] / "lngen/docs/c.md").read_text(encoding="utf-8").partition("\n## TVM FFI\n")[2]


def code(language: str) -> str:
    """The code of the page, for the D of the pack."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found).replace("4096", "96")


class OnGpu:
    """The functions of a module, for which CPU tensors are memory of a fake GPU."""

    def __init__(self, functions: Any, gpu: FakeDriver) -> None:
        self.functions, self.gpu = functions, gpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: getattr(self.functions, name)(*map(self._shown, given))

    def _shown(self, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        self.gpu.maps(given.untyped_storage().data_ptr(), given.untyped_storage().nbytes(), f"{given.data_ptr()}")
        return as_on_gpu(given)


def test_the_python_of_the_page_has_the_bits_of_pythons_launcher(
    make: Any, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    norms = make()
    monkeypatch.setattr(tvm_ffi, "load_module", lambda _: OnGpu(norms.of, norms.gpu))
    pass_for_gpu_tensors(monkeypatch, norms.gpu)
    v: dict[str, Any] = {"aligned": aligned}
    exec(code("python").replace('"cuda"', '"cpu"').replace("torch.empty(size", "aligned(size"), v)
    norm = lngen.load(folder).norm("layernorm", d=96, dtype="bf16")
    y, saved = norm.forward(v["x"], v["gamma"], v["beta"])
    wanted = y, *norm.backward(v["dy"], saved)
    assert all(torch.equal(a, v[name]) for a, name in zip(wanted, ("y", "dx", "dgamma", "dbeta"), strict=True))


def aligned(size: int, **how: Any) -> Any:
    """New memory at a multiple of 256 bytes."""
    whole = torch.empty(size + 256, **how)
    return whole[-whole.data_ptr() % 256 :][:size]


MAIN = """
int main(int, char **arguments)
{
    int64_t shape[] = {4, 96}, strides[] = {96, 1}, one[] = {1};
    DLTensor x{(void *)4096, {kDLCUDA, 0}, 2, {kDLBfloat, 16, 1}, shape, strides, 0}, y = x, gamma = x, mean = x, rstd;
    y.data = (void *)8192;
    gamma.data = (void *)12288, gamma.ndim = 1, gamma.shape++, gamma.strides = one;
    mean.data = (void *)16384, mean.ndim = 1, mean.dtype = {kDLFloat, 32, 1}, mean.strides = one;
    (rstd = mean).data = (void *)20480;
    auto norms = Module::LoadFromFile(arguments[1]);
    forward(norms, &x, &gamma, &gamma, &y, &mean, &rstd);
    try { forward(norms, &x, &gamma, &gamma, &x, &mean, &mean); }
    catch (const tvm::ffi::Error &error) { return error.kind() == "ValueError" ? 3 : 2; }
}
"""


def test_the_cpp_of_the_page_runs(folder: Path, tmp_path: Path) -> None:
    """With a driver that launches nothing; a second, wrong call is an exception."""
    library = compiled_for(no_op(tmp_path), folder, tmp_path)
    main, program = tmp_path / "main.cc", tmp_path / "main"
    main.write_text(code("cpp") + MAIN, encoding="utf-8")
    theirs = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    flags = [*HEADERS, f"-L{theirs}", "-ltvm_ffi", f"-Wl,-rpath,{theirs}"]
    subprocess.run(["g++", "-std=c++17", str(main), *flags, "-o", str(program)], check=True)
    assert subprocess.run([str(program), str(library)], check=False).returncode == 3
