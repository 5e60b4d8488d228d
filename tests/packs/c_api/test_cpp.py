"""If these fail, a C++ program of lngen/examples does not build, or has other bits than the interpreter.

The programs run in this process; their driver is a FakeDriver, whose GPU executes the PTX of the pack.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from c_driver import Bridge, cc
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from lngen import examples
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Value, values_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import Spec, parse_spec
from lngen.packs.build import build
from lngen.packs.c_library import NORMS

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")

PROGRAMS = Path(str(examples.__file__)).parent / "cpp"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
STRICT = ("-std=c++17", *WARNINGS, "-fsanitize=undefined", "-fno-sanitize-recover=all", "-fPIC", f"-I{PROGRAMS}")
D = 96

# Of each program: dtype, rows, forward, backward, arrays in the order of their seeds (others are 0), what it prints.
EXAMPLES = {
    "pre_ln": ("f32", [6], "layernorm.fwd:", "add_layernorm.bwd:", "x gamma beta dy dh", "y dx dgamma dbeta"),
    "post_ln": ("f32", [6], "add_layernorm.fwd:", "layernorm.bwd:", "x residual gamma beta dy", "y h dx dgamma dbeta"),
    "memory_efficient": (
        "bf16", [6], "layernorm.fwd:save=y+rstd,", "layernorm.bwd:save=y+rstd,", "x gamma dy", "y dx dgamma dbeta",
    ),
    "several_gradients": (
        "f64", [5], "layernorm.fwd:save=y+rstd,", "add_layernorm.bwd:save=y+rstd,", "x gamma beta dy dh",
        "dx dgamma dbeta",
    ),
    "inference": ("bf16", [7, 1], "layernorm.fwd:save=none,", "", "x gamma beta", "y"),
}  # fmt: skip


def spec_of(norm: str, dtype: str) -> Spec:
    """With the other keys that all programs have."""
    return parse_spec(norm.replace(":", f":d={D},dtype={dtype},") + "eps=run")


def numbers(value: Value, rows: int, seed: int) -> Array:
    """As ``Array`` in arrays.hpp."""
    shape, dtype = value.type.shape(rows, D), NUMPY_DTYPE[value.type.dtype]
    i = np.arange(np.prod(shape), dtype=np.int64)
    return (((i * 7919 + seed * 101) % 511 - 255) / np.float32(128) * (seed > 0)).astype(dtype).reshape(shape)


def hashed(array: Array) -> str:
    """FNV-1a."""
    found = 0xCBF29CE484222325
    for byte in array.tobytes():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return f"{found:016x}"


def expected(name: str) -> list[str]:
    """The lines that a program prints, by the interpreter."""
    dtype, counts, forward, backward, names, printed = EXAMPLES[name]
    seeds, lines = {given: seed for seed, given in enumerate(names.split(), 1)}, list[str]()
    for rows in counts:
        known: dict[str, Array] = {}
        for norm in filter(None, (forward, backward)):
            graph = spec_of(norm, dtype).graph()
            known = {p.name: numbers(p, rows, seeds.get(p.name, 0)) for p in graph.params} | known
            known |= interpret(graph, known | values_of(graph, 1e-5))
            known["x"] = known["h"] = known.get("h", known["x"])  # what is normalised
        assert all(np.isfinite(known[one]).all() for one in printed.split())
        lines += [f"{one} {hashed(known[one])}" for one in printed.split()]
    return lines


# ---- building and running them ----


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with cubins_of_ptx():
        return built(tmp_path_factory.mktemp("cpp"))


def built(folder: Path) -> Path:
    """The pack of the programs."""
    specs = [spec_of(norm, dtype) for dtype, _, *norms, _, _ in EXAMPLES.values() for norm in norms if norm]
    build(dict.fromkeys(specs), folder, arch="sm_90", emit="ptx,cubin,c")
    return folder


def compiled(pack: Path, sources: Sequence[Path], driver: Path | None = None) -> list[Path]:
    """Shared libraries of C++ programs with the library of a pack, side by side."""
    flags = [] if driver is None else [f'-DLNGEN_CUDA_LIBRARY="{driver}"']
    library = cc(pack / "kernels.o", [pack / "c/lngen_kernels.c"], "-c", f'-DLNGEN_PACK_DIR="{pack}"', *flags)
    command = ["g++", "-shared", *STRICT, f"-I{pack / 'c'}", *flags, library, "-pthread", "-ldl", "-lm"]
    files = [pack / f"{source.stem}.so" for source in sources]
    begun = [
        subprocess.Popen([*command, source, "-o", file], stderr=subprocess.PIPE, text=True)
        for source, file in zip(sources, files, strict=True)
    ]
    errors = [program.communicate()[1] for program in begun]
    assert not any(program.returncode for program in begun), "".join(errors)
    return files


@pytest.fixture(scope="module")
def programs(pack: Path, bridge: Bridge) -> dict[str, Path]:
    return {path.stem: path for path in compiled(pack, [*PROGRAMS.glob("*.cpp")], bridge.path)}


@pytest.fixture
def gpu(pack: Path, bridge: Bridge) -> Iterator[FakeDriver]:
    found = FakeDriver(version=14000)
    found.knows_pack(pack)
    with bridge.behind(found):
        yield found


def run(program: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What a program prints."""
    assert ctypes.CDLL(str(program)).main() == 0, capfd.readouterr().err
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_bits_of_the_interpreter(
    name: str, programs: dict[str, Path], gpu: FakeDriver, capfd: pytest.CaptureFixture[str]
) -> None:
    assert {*programs} == {*EXAMPLES}
    assert run(programs[name], capfd) == expected(name)
    assert gpu.retained == [1]  # by the program itself: the pack is unloaded
    (stream,) = {launched.stream for launched in gpu.launched}
    if name == "several_gradients":  # backward, after one kernel, comes after both streams, and both wait for it
        other = gpu.waits[0][1]
        assert gpu.waits == [(stream, other, 1), (other, stream, len(gpu.launched))]
    else:
        assert gpu.waits == []


def test_a_stream_that_cannot_wait_is_an_error(
    programs: dict[str, Path], gpu: FakeDriver, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.refuse["cuStreamWaitEvent"] = 999
    assert ctypes.CDLL(str(programs["several_gradients"])).main() == 1
    assert "cannot wait for 'a stream'" in capfd.readouterr().err
    assert (gpu.events, gpu.retained) == ({}, [1])


def test_the_code_of_the_page_compiles(pack: Path) -> None:
    """``lngen help c``; the types of CUDA are made up."""
    page = (PROGRAMS.parents[1] / "docs" / "c.md").read_text(encoding="utf-8")
    page = page.partition("\n## C++\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```cpp\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (pack / "page.cpp").write_text(
        f"using cudaStream_t = struct CUstream_st *; struct __half {{ short bits; }};\n{code}"
    )
    command = ["g++", *STRICT, f"-I{pack / 'c'}", "-fsyntax-only", pack / "page.cpp"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.gpu
def test_the_examples_have_these_bits_on_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for program in compiled(built(tmp_path), [PROGRAMS / f"{name}.cpp" for name in EXAMPLES]):
        assert run(program, capfd) == expected(program.stem)


def test_what_is_missing_or_wrong_is_an_error_that_says_so(
    tmp_path: Path, gpu: FakeDriver, bridge: Bridge, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of("layernorm.fwd:", "f32")
    with cubins_of_ptx():
        build([spec], tmp_path, arch="sm_90", emit="cubin,c")
    (program,) = compiled(tmp_path, [Path(__file__).with_name("refused.cpp")], bridge.path)
    null, unset, *missing, with_mean, without, serving, streams, apart, close, facts = run(program, capfd)
    absent = [key.replace(":", f":d={D},dtype=f32,") for role, key in NORMS.items() if role != "Forward"]
    assert missing == [
        f"7 The pack has no '{one}' for this GPU; add it: lngen build {one} --emit cubin,c --out PACK"
        for one in (*absent, str(spec).replace("d=96", "d=97"))
    ]
    assert null == "1 Normalize variance is null."
    assert (unset[:19], unset[-13:]) == ("1 A pointer is null", "mean is null.")
    expects = "7 Backward expects training, with betta useMean = false, else useMean = true."
    assert [with_mean, without, serving] == [expects] * 3
    assert streams == "1 Backward expects two streams, got null."
    graph = spec.graph()
    given = {p.name: numbers(p, 8, n) for n, p in enumerate(graph.params, 1)} | values_of(graph, 1e-12)
    for line, rows in ((apart, given["x"][::2]), (close, given["x"][:4])):
        assert line == f"y {hashed(interpret(graph, given | {'x': rows})['y'])}"
    assert facts == "workspace 0, means 10"
