"""If these fail, kernels are compiled with other arithmetic, or an error of the compiler is not explained."""

import re
import struct
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lngen.compiler import toolchain
from lngen.compiler.toolchain import ARCHES, Resources, nvrtc
from lngen.compiler.toolchain.nvrtc_results import elf_length, repaired, resources, tidied
from lngen.errors import CompileError, LngenError, MissingError

TINY = 'extern "C" __global__ void __launch_bounds__(64) tiny(float *a) { a[threadIdx.x] += 1.0f; }\n'
# Names in no alphabetical order: only the source gives this order.
THREE = """
extern "C" __global__ void __launch_bounds__(64) mid(float *a) {
    __shared__ float s[100];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) zed(float *a) { a[threadIdx.x] += 1.0f; }
extern "C" __global__ void __launch_bounds__(64) alpha(double *a) {
    __shared__ double s[64];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = s[63 - threadIdx.x];
}
"""
# 64 values live across a barrier, in at most 32 registers.
SPILLING = """
extern "C" __global__ void __maxnreg__(32) full(float *a) {
    float r[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) r[i] = a[i * 64 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i * 65 + threadIdx.x] = r[i] * r[63 - i];
}
"""
MULTIPLY_ADD = """
extern "C" __global__ void mad(const float *x, float *y) { y[0] = x[0] * x[1] + x[2]; }
extern "C" __global__ void dmad(const double *x, double *y) { y[0] = x[0] * x[1] + x[2]; }
extern "C" __global__ void root(const float *x, float *y) { y[0] = 1.0f / sqrtf(x[0]); }
"""
BROKEN = """\
// line 1
// line 2
extern "C" __global__ void bad(float *a) {
    a[0] = missing;
    // line 5
    // line 6
}
// line 8
// line 9
// line 10
__device__ int worse = ;
"""


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache for each test, and none of the caller's settings."""
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LNGEN_DEBUG", raising=False)
    monkeypatch.delenv("LNGEN_DUMP", raising=False)
    return tmp_path / "cache"


needs_nvrtc = pytest.mark.usefixtures("compiler")


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# ---- compiling ----


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHES)
def test_every_arch_compiles_and_tells_its_resources(arch: str) -> None:
    binary = toolchain.compile_cubin(THREE, arch)
    assert binary.arch == arch
    assert len(binary.image) == elf_length(binary.image)
    assert repaired(binary.image[:-1]) == repaired(binary.image) == binary.image
    assert list(binary.resources) == ["mid", "zed", "alpha"]
    assert [r.shared for r in binary.resources.values()] == [400, 0, 512]
    assert [r.barriers for r in binary.resources.values()] == [1, 0, 1]
    assert all(0 < r.registers < 64 and not r.spills for r in binary.resources.values())


@needs_nvrtc
@pytest.mark.parametrize("arch", [ARCHES[0], ARCHES[-1]])
def test_spills_are_reported(arch: str) -> None:
    full = toolchain.compile_cubin(SPILLING, arch).resources["full"]
    assert (full.spills, full.registers <= 32) == (True, True)
    assert min(full.spill_stores, full.spill_loads, full.stack) > 0
    free = toolchain.compile_cubin(SPILLING.replace("__maxnreg__(32)", "__maxnreg__(128)"), arch)
    assert not free.resources["full"].spills


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHES)
def test_arithmetic_is_ieee_and_as_written(arch: str) -> None:
    """An FMA is there only where one is written."""
    ptx = toolchain.compile_ptx(MULTIPLY_ADD, arch)
    assert f".target {arch}" in ptx
    assert not [word for word in ("fma.", ".ftz", ".approx") if word in ptx]
    for instruction in ("mul.rn.f32", "add.rn.f32", "mul.rn.f64", "add.rn.f64", "sqrt.rn.f32", "rn.f32"):
        assert instruction in ptx
    written = MULTIPLY_ADD.replace("x[0] * x[1] + x[2]", "fma(x[0], x[1], x[2])", 1)
    assert toolchain.compile_ptx(written, arch).count("fma.rn.f32") == 1


@needs_nvrtc
def test_suffixes_mangled_names_and_no_kernel_at_all() -> None:
    assert toolchain.compile_cubin(TINY, "sm_90a").resources["tiny"].registers > 0
    assert ".target sm_90a" in toolchain.compile_ptx(TINY, "sm_90a")
    mangled = toolchain.compile_cubin("__global__ void f(int *a) { a[0] = 1; }", "sm_80")
    assert list(mangled.resources) == ["_Z1fPi"]
    assert toolchain.compile_cubin("__device__ int unused;", "sm_80").resources == {}


@needs_nvrtc
def test_threads_compile_at_once() -> None:
    sources = [TINY.replace("1.0f", f"{n}.0f") for n in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = [binary.image for binary in pool.map(lambda s: toolchain.compile_cubin(s, "sm_80"), sources)]
    assert len(set(together)) == len(sources)
    library = nvrtc._library()
    options = nvrtc._options("sm_80", "cubin", library.version)
    alone = [nvrtc._compiled(library, s, "sm_80", "cubin", options, "x").image for s in sources]
    assert together == alone


def test_options_are_sorted_and_switch_contraction_off() -> None:
    for version in ((12, 8), (12, 9), (13, 4)):
        options = nvrtc._options("sm_90", "cubin", version)
        assert list(options) == sorted(options)
        assert {"-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-arch=sm_90"} <= set(options)
        assert ({"--no-cache", "--minimal"} <= set(options)) == (version >= (12, 9))
        assert not any("lineinfo" in option or option.startswith("-I") for option in options)
    assert "-arch=compute_90" in nvrtc._options("sm_90", "ptx", (13, 4))


# ---- errors ----


@needs_nvrtc
@pytest.mark.parametrize("compile_", [toolchain.compile_cubin, toolchain.compile_ptx])
def test_an_unknown_arch_gets_the_list_of_known_ones(compile_: types.FunctionType) -> None:
    known = toolchain.supported_arches()
    assert {"sm_75", "sm_80", "sm_90"} <= {*known}
    for arch in ("sm_91", "sm_75a", "sm_90x", "sm_90af", "compute_90", "90", "", "sm_90 "):
        with pytest.raises(LngenError, match=re.escape(f"Unknown arch {arch!r}")) as caught:
            compile_(TINY, arch)
        assert all(one in str(caught.value) for one in known)


@needs_nvrtc
@pytest.mark.parametrize("compile_", [toolchain.compile_cubin, toolchain.compile_ptx])
def test_a_compile_error_shows_the_numbered_lines(compile_: types.FunctionType, cache_dir: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_(BROKEN, "sm_90", name="ln fwd.cu")
    message = str(caught.value)
    assert message.startswith("NVRTC refused ln fwd.cu for sm_90:\n")
    assert 'ln fwd.cu(4): error: identifier "missing" is undefined' in message
    assert "kernel.cu" not in message
    listing = message.split("ln fwd.cu:\n")[1].splitlines()
    assert listing == [
        "   2 | // line 2",
        '   3 | extern "C" __global__ void bad(float *a) {',
        ">  4 |     a[0] = missing;",
        "   5 |     // line 5",
        "   6 |     // line 6",
        "  ...",
        "   9 | // line 9",
        "  10 | // line 10",
        "> 11 | __device__ int worse = ;",
        "  12 |",
    ]
    assert not entries(cache_dir), "a failure must not be cached"


REFUSED = {
    "PTX": (
        'extern "C" __global__ void k() { asm volatile("no.such.thing;"); }',
        r"PTX of x\.cu:(.|\n)*\n> \d+ \| +\t*no\.such",
    ),
    "shared memory": (THREE.replace("s[100]", "s[50000]"), "uses too much shared data"),
    "a file of the current folder": ('#include "helper.h"\n' + TINY, r"could not open source file .helper\.h"),
}


@needs_nvrtc
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_compiler_refuses(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "helper.h").write_text("")
    monkeypatch.chdir(tmp_path)
    source, words = REFUSED[name]
    with pytest.raises(CompileError, match=rf"NVRTC refused x\.cu(.|\n)*{words}"):
        toolchain.compile_cubin(source, "sm_90", name="x.cu")


@needs_nvrtc
def test_a_refused_source_is_dumped_and_its_file_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it cannot be written, the error is still that of the source."""
    monkeypatch.setenv("LNGEN_DUMP", str(tmp_path / "deep" / "dump"))
    with pytest.raises(CompileError) as caught:
        toolchain.compile_cubin(BROKEN, "sm_90", name="../a b.cu")
    path = tmp_path / "deep" / "dump" / ".._a_b.cu"
    assert path.read_text() == BROKEN
    assert str(caught.value).endswith(f"The source is in {path}")
    monkeypatch.setenv("LNGEN_DUMP", str(path / "dump"))
    with pytest.raises(CompileError, match=r"identifier .missing.(.|\n)*could not be written(.|\n)*LNGEN_DUMP"):
        toolchain.compile_cubin(BROKEN, "sm_90")


@pytest.fixture
def _unloaded() -> Iterator[None]:
    """The library is looked for again, in the test and after it."""
    nvrtc._load.cache_clear()
    yield
    nvrtc._load.cache_clear()


@pytest.mark.usefixtures("_unloaded")
def test_a_missing_cupy_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=r'needs CuPy.*pip install "\.\[cuda13\]"') as caught:
        toolchain.compile_cubin(TINY, "sm_90")
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("_unloaded")
@pytest.mark.parametrize("error", [RuntimeError, AssertionError, OSError, ImportError])
def test_a_missing_nvrtc_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail() -> None:
        raise error("no libnvrtc.so.13\n")

    package = types.ModuleType("cupy.cuda")
    package.nvrtc = types.SimpleNamespace(getVersion=fail)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", package)
    wanted = r'needs NVRTC.*libnvrtc \(no libnvrtc\.so\.13\); .*pip install "\.\[cuda13\]"'
    with pytest.raises(MissingError, match=wanted):
        toolchain.compile_ptx(TINY, "sm_90")


def test_missing_builtins_are_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LookupError("NVRTC_ERROR_BUILTIN_OPERATION_FAILURE (7)")

    destroyed: list[int] = []
    api: Any = types.SimpleNamespace(
        NVRTCError=LookupError, createProgram=lambda *_: 7, compileProgram=refuse, destroyProgram=destroyed.append,
        getProgramLog=lambda _: "nvrtc: error: failed to open libnvrtc-builtins.so.13.4.",
    )  # fmt: skip
    monkeypatch.setattr(nvrtc, "_library", lambda: nvrtc._Library(api, (13, 4), ("sm_90",)))
    with pytest.raises(MissingError, match=r"libnvrtc-builtins.*pip install"):
        toolchain.compile_cubin(TINY, "sm_90")
    assert destroyed == [7]


# ---- the repair of cubins ----


def elf(programs: int, sections: int) -> bytes:
    """An ELF64 file that ends with its section headers if it has some, else with its program headers."""
    program_at = 64
    section_at = program_at + 56 * programs if sections else 0
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2, 190, 1, 0, program_at, section_at, 0, 64, 56, programs, 64, sections, 0,
    )  # fmt: skip
    body = bytes(range(1, 53)) + bytes(4)
    return header + body * programs + (bytes(range(1, 61)) + bytes(4)) * sections


@pytest.mark.parametrize(("programs", "sections"), [(3, 0), (0, 2), (2, 5)])
def test_a_short_cubin_is_repaired_and_a_whole_one_left_alone(programs: int, sections: int) -> None:
    whole = elf(programs, sections)
    assert [repaired(whole[: len(whole) - cut]) == whole for cut in range(5)] == [True] * 5
    assert repaired(whole + b"more") == whole + b"more"
    for image in (*(whole[:n] for n in (0, 1, 63, 64, 100, -5)), b"//\n" * 100):
        with pytest.raises(CompileError, match="truncated image"):
            repaired(image)


# ---- the log of ptxas ----


OLD_LOG = """\
ptxas info    : 0 bytes gmem, 16 bytes cmem[3]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 48 bytes cumulative stack size, 400 bytes smem, \
360 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Function properties for _Z6helperf
    99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
ptxas info    : Compile time = 3.141 ms
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    24 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""


def test_the_log_is_read_number_by_number() -> None:
    found = resources(OLD_LOG)
    assert list(found.items()) == [
        ("first", Resources(8, 0, 0, 24, 0, None, 0)),
        ("second", Resources(40, 4, 8, 16, 400, 368, 2)),
    ]
    with pytest.raises(CompileError, match="lacks the registers or spills of 'first'"):
        resources(OLD_LOG.replace("Used 8 registers", ""))
    assert [line for line in OLD_LOG.splitlines() if "Compile time" not in line] == tidied(OLD_LOG + "\0").splitlines()


def test_any_local_memory_is_a_spill() -> None:
    none = Resources(registers=8, spill_stores=0, spill_loads=0, stack=0, shared=4, constant=4, barriers=1)
    assert [replace(none, **{field: 4}).spills for field in ("spill_stores", "spill_loads", "stack")] == [True] * 3
    assert not none.spills


# ---- LNGEN_DEBUG ----


@needs_nvrtc
def test_debugging_tells_of_each_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    toolchain.compile_cubin(SPILLING, "sm_90")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("LNGEN_DEBUG", "1")
    registers = toolchain.compile_cubin(THREE, "sm_90", name="three.cu").resources["zed"].registers
    toolchain.compile_cubin(SPILLING, "sm_90", name="full.cu")
    toolchain.compile_ptx(THREE, "sm_90", name="three.cu")
    out, err = capsys.readouterr()
    built, cached, ptx = err.splitlines()
    assert out == ""
    assert re.match(r"lngen: built three\.cu sm_90 cubin in \d+\.\d ms, mid \d+ registers, ", built)
    assert f"zed {registers} registers, alpha " in built
    assert re.fullmatch(r"lngen: cached full\.cu sm_90 .* full \d+ registers with spills", cached)
    assert re.fullmatch(r"lngen: built three\.cu sm_90 ptx in \d+\.\d ms", ptx)
    for level in ("4", "5"):
        monkeypatch.setenv("LNGEN_DEBUG", level)
        binary = toolchain.compile_cubin(TINY, "sm_90")
        assert (binary.log in capsys.readouterr().err) == (level == "5")
    assert "Compiling entry function 'tiny'" in binary.log
