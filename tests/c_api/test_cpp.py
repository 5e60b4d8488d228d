"""If these fail, a C++ program of lngen/examples does not build, or has other bits than the interpreter.

The programs run in this process; their driver is a FakeDriver, whose GPU executes the PTX of the pack.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from c_driver import Bridge, cc, compiler
from fake_driver import FakeDriver
from lngen import examples
from lngen.aot.build import build
from lngen.interpret import interpret
from lngen.ir.numerics import Array
from lngen.ir.run_time import values_of
from lngen.spec import parse_spec

pytest.importorskip("cupy")

HERE, PROGRAMS = Path(__file__).parent, Path(str(examples.__file__)).parent / "cpp"
D, EPS = 96, 1e-5
STRICT = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", f"-I{PROGRAMS}")


# ---- what the programs print ----


def numbers(dtype: Any, seed: int, *shape: int) -> Array:
    """As ``Array`` in arrays.hpp."""
    i = np.arange(np.prod(shape), dtype=np.int64)
    return (((i * 7919 + seed * 101) % 511 - 255) / np.float32(128)).astype(dtype).reshape(shape)


def results(norm: str, dtype: str, eps: float = EPS, **inputs: Array) -> dict[str, Array]:
    """Of the spec ``norm``, which has no d and dtype, by the interpreter."""
    head, _, keys = norm.partition(":")
    graph = parse_spec(f"{head}:d={D},dtype={dtype},{keys}").graph()
    return interpret(graph, {**inputs, **values_of(graph, eps)})


def line(name: str, array: Array) -> str:
    """A line that a program prints: the FNV-1a hash of an array."""
    found = 0xCBF29CE484222325
    for byte in np.ascontiguousarray(array).tobytes():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return f"{name} {found:016x}"


def lines(found: dict[str, Array], names: str) -> list[str]:
    assert all(np.isfinite(found[name]).all() for name in names.split())
    return [line(name, found[name]) for name in names.split()]


def pre_ln() -> list[str]:
    of = partial(numbers, np.float32)
    x, gamma, beta, dy, dh = of(1, 6, D), of(2, D), of(3, D), of(4, 6, D), of(5, 6, D)
    forward = results("layernorm.fwd:eps=run", "f32", x=x, gamma=gamma, beta=beta)
    saved = {name: forward[name] for name in ("mean", "rstd")}
    backward = results("add_layernorm.bwd:eps=run", "f32", dy=dy, dh=dh, gamma=gamma, h=x, **saved)
    return lines(forward | backward, "y dx dgamma dbeta")


def post_ln() -> list[str]:
    of = partial(numbers, np.float32)
    x, residual, gamma, beta, dy = of(1, 6, D), of(2, 6, D), of(3, D), of(4, D), of(5, 6, D)
    forward = results("add_layernorm.fwd:eps=run", "f32", x=x, residual=residual, gamma=gamma, beta=beta)
    saved = {name: forward[name] for name in ("mean", "rstd")}
    backward = results("layernorm.bwd:eps=run", "f32", dy=dy, x=forward["h"], gamma=gamma, **saved)
    return lines(forward | backward | {"dh": backward["dx"]}, "y h dh dgamma dbeta")


def memory_efficient() -> list[str]:
    of = partial(numbers, bfloat16)
    x, gamma, beta, dy = of(1, 6, D), of(2, D), np.zeros(D, bfloat16), of(3, 6, D)
    forward = results("layernorm.fwd:eps=run,save=y+rstd", "bf16", x=x, gamma=gamma, beta=beta)
    backward = results("layernorm.bwd:eps=run,save=y+rstd", "bf16", dy=dy, gamma=gamma, beta=beta, **forward)
    return lines(forward | backward, "y dx dgamma dbeta")


def several_gradients() -> list[str]:
    of = partial(numbers, np.float64)
    x, gamma, beta, dy, dh = of(1, 5, D), of(2, D), of(3, D), of(4, 5, D), of(5, 5, D)
    forward = results("layernorm.fwd:eps=run,save=y+rstd", "f64", x=x, gamma=gamma, beta=beta)
    given = {"dy": dy, "dh": dh, "gamma": gamma, "beta": beta, **forward}
    return lines(results("add_layernorm.bwd:eps=run,save=y+rstd", "f64", **given), "dx dgamma dbeta")


def inference() -> list[str]:
    of = partial(numbers, bfloat16)
    x, gamma, beta = of(1, 7, D), of(2, D), of(3, D)
    y = results("layernorm.fwd:eps=run,save=none", "bf16", x=x, gamma=gamma, beta=beta)["y"]
    return [line("prompt", y), line("token", y[:1])]


EXAMPLES: dict[str, Callable[[], list[str]]] = {
    f.__name__: f for f in (pre_ln, post_ln, memory_efficient, several_gradients, inference)
}
TRAINING = [f"{norm}:d={D},dtype=f32,eps=run" for norm in ("layernorm.bwd", "add_layernorm.fwd", "add_layernorm.bwd")]
SPECS = [
    *TRAINING, f"layernorm.fwd:d={D},dtype=f32,eps=run", f"layernorm.fwd:d={D},dtype=bf16,eps=run,save=none",
    *(f"layernorm.{way}:d={D},dtype=bf16,eps=run,save=y+rstd" for way in ("fwd", "bwd")),
    *(f"{norm}:d={D},dtype=f64,eps=run,save=y+rstd" for norm in ("layernorm.fwd", "add_layernorm.bwd")),
]  # fmt: skip


# ---- building and running them ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pack")
    build(SPECS, out, arch="sm_90", emit="ptx,cubin,c")
    return out


def compiled(folder: Path, sources: Sequence[Path], *flags: str) -> list[Path]:
    """The files of C++ sources with the library of a pack, side by side."""
    object_file = cc(folder / "kernels.o", [folder / "c/lngen_kernels.c"], "-c", f'-DLNGEN_PACK_DIR="{folder}"', *flags)
    command = [compiler("g++"), *STRICT, f"-I{folder / 'c'}", *flags]
    out = [folder / f"{source.stem}.so" for source in sources]
    begun = [
        subprocess.Popen([*command, source, object_file, "-o", to], stderr=subprocess.PIPE, text=True)
        for source, to in zip(sources, out, strict=True)
    ]
    errors = [program.communicate()[1] for program in begun]
    assert not any(program.returncode for program in begun), "".join(errors)
    return out


@pytest.fixture(scope="module")
def programs(folder: Path, bridge: Bridge) -> dict[str, Path]:
    here = f'-DLNGEN_CUDA_LIBRARY="{bridge.path}"'
    found = compiled(folder, [PROGRAMS / f"{name}.cpp" for name in EXAMPLES], "-shared", here)
    return dict(zip(EXAMPLES, found, strict=True))


@pytest.fixture
def gpu(folder: Path, bridge: Bridge) -> Iterator[FakeDriver]:
    found = FakeDriver(version=14000)
    found.knows_pack(folder)
    with bridge.behind(found):
        yield found


def run(library: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What the program in a library prints."""
    assert ctypes.CDLL(str(library)).main() == 0, capfd.readouterr().err
    return capfd.readouterr().out.splitlines()


def test_the_programs_are_these() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.cpp")} == {*EXAMPLES}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_bits_of_the_interpreter(
    name: str, programs: dict[str, Path], gpu: FakeDriver, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(programs[name], capfd) == EXAMPLES[name]()
    assert gpu.retained == [1]  # by the program itself: the pack is unloaded
    if name == "several_gradients":  # backward, after forward, begins after both streams, and both wait for its end
        (stream,) = {launched.stream for launched in gpu.launched}
        ((_, other, _), _) = gpu.waits
        assert gpu.waits == [(stream, other, 1), (other, stream, len(gpu.launched))]
        assert other != stream
    else:
        assert gpu.waits == []


@pytest.mark.gpu
def test_an_example_has_these_bits_on_a_gpu(folder: Path) -> None:
    built = compiled(folder, [PROGRAMS / f"{name}.cpp" for name in EXAMPLES])
    for name, program in zip(EXAMPLES, built, strict=True):
        done = subprocess.run([program], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == EXAMPLES[name]()


def missing(norm: str, d: int = D) -> str:
    spec = norm.replace(":", f":d={d},dtype=f32,")
    return f"7 The pack has no '{spec}' for this GPU; add it: lngen build {spec} --emit cubin,c --out PACK"


NULL = "1 A pointer is null where the call needs an address; fill in every pointer of the struct."
OTHER = "7 Backward expects training = true and, with betta and norm_out, useMean = false, with norm_in useMean = true."
REFUSED = {
    "null": "1 Normalize variance is null.",
    "no statistics": f"{NULL} lngen_layernorm_forward_eps_run: mean is null.",
    "wider": missing("layernorm.fwd:eps=run", D + 1),
    "serving": missing("layernorm.fwd:eps=run,save=none"),
    "forward": missing("layernorm.fwd:eps=run,save=y+rstd"),
    "backward": missing("layernorm.bwd:eps=run"),
    "backward from y": missing("layernorm.bwd:eps=run,save=y+rstd"),
    "fused": missing("add_layernorm.bwd:eps=run"),
    "fused from y": missing("add_layernorm.bwd:eps=run,save=y+rstd"),
    "mean and y": OTHER, "no mean and x": OTHER, "serving backward": OTHER,
    "no streams": "1 Backward expects two streams, got null.",
}  # fmt: skip


def test_what_is_missing_or_wrong_is_an_error_that_says_so(
    tmp_path: Path, bridge: Bridge, capfd: pytest.CaptureFixture[str]
) -> None:
    build([f"layernorm.fwd:d={D},dtype=f32,eps=run"], tmp_path, arch="sm_90", emit="ptx,cubin,c")
    (program,) = compiled(tmp_path, [HERE / "refused.cpp"], "-shared", f'-DLNGEN_CUDA_LIBRARY="{bridge.path}"')
    gpu = FakeDriver(version=14000)
    gpu.knows_pack(tmp_path)
    with bridge.behind(gpu):
        printed = run(program, capfd)
    *refusals, workspace, apart, close = printed
    assert refusals == [f"{what}: {text}" for what, text in REFUSED.items()]
    assert workspace == "workspace 0 use of the mean 1"
    x, gamma, beta = (numbers(np.float32, *given) for given in ((1, 8, D), (2, D), (3, D)))
    for printed_line, rows in ((apart, x[::2]), (close, x[:4])):
        forward = results("layernorm.fwd:eps=run", "f32", 1e-12, x=rows, gamma=gamma, beta=beta)
        assert printed_line == line("y", forward["y"])
