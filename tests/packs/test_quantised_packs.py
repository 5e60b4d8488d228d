"""If these fail, results of 8 bits are lost or refused on the way from a graph to files, arrays and programs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import lngen
from float8 import SHAPES, table
from lngen.cli.run_files import as_file, read_npy
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, DType, M, Type, Value
from lngen.compiler.ir.numerics import NUMPY_DTYPE, PLAIN_DTYPE
from lngen.compiler.spec import make_spec
from lngen.dtypes import QUANTISED
from lngen.errors import ArrayError
from lngen.launch.arrays import CuPy, torch_dtypes
from lngen.packs.repro_program import compared, drawn, identity, numbers_of


def by_rows(dtype: str) -> Any:
    def describe(b: GraphBuilder) -> None:
        b.quantise("q", b.input("x", M, D) * b.input("gamma", D), dtype)

    return describe


def restored(b: GraphBuilder) -> None:
    """What the bytes stand for."""
    b.output("y", b.input("q", M, D, dtype="e4m3") * b.input("q_scale", M, dtype="f32"))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_pack_has_the_dtype_everywhere(dtype: DType, tmp_path: Path) -> None:
    """In its manifest, its C header and its test vectors, whose bytes are uint8."""
    spec = make_spec(Definition("own", by_rows(str(dtype))), "fwd", {"d": 64, "dtype": "bf16"})
    lngen.build([spec], tmp_path / "pack", arch="sm_80,sm_90", emit="cubin,c,vectors")
    assert not lngen.verify(tmp_path / "pack").faults
    assert f"LNGEN_{str(dtype).upper()}" in (tmp_path / "pack/c/lngen_kernels.h").read_text()
    (found,) = (tmp_path / "pack").rglob("vectors.json")
    tensors = json.loads(found.read_text())["cases"][0]["tensors"]
    q = next(t for t in tensors if t["name"] == "q")
    assert (q["dtype"], q["element_bytes"]) == (str(dtype), 1)
    assert np.load(found.parent / q["npy"]["file"]).dtype == PLAIN_DTYPE[dtype]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_repro_draws_and_compares_them(dtype: DType) -> None:
    bits = drawn(0, "q", str(dtype), (40, 3), -1.5, 2.5)
    numbers = numbers_of(bits, str(dtype)).astype(np.float64)
    assert bits.dtype == np.uint8
    assert -1.5 <= numbers.min() <= -1 < 2 <= numbers.max() <= 2.5
    assert np.array_equal(numbers, bits.view(NUMPY_DTYPE[dtype]).astype(np.float64))
    every = np.arange(256, dtype=np.uint8)
    assert compared(every, str(dtype), *identity(every, str(dtype))) == "same bits"
    assert "DIFFERS in 1 of 16 parts" in compared(every, str(dtype), *identity(every ^ (every == 5), str(dtype)))
    if dtype in SHAPES:
        assert np.array_equal(numbers_of(every, str(dtype))[: len(table(dtype))], table(dtype))
        assert np.isnan(numbers_of(every, str(dtype))[[0x7F, 0xFF]]).all()
        assert identity(every, str(dtype)) == identity(np.where(every == 0xFF, np.uint8(0x7F), every), str(dtype))
        assert identity(every, str(dtype)) != identity(np.where(every == 0x78, np.uint8(0x79), every), str(dtype))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_files_have_bytes(dtype: DType, tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.uint8).view(NUMPY_DTYPE[dtype]).reshape(2, 3)
    path = tmp_path / "q.npy"
    path.write_bytes(as_file(Value("q", Type(dtype, (M, D))), numbers, (2,)))
    found = read_npy(path)
    assert found.dtype == PLAIN_DTYPE[dtype]
    assert found.tobytes() == numbers.tobytes()


def test_numpy_gives_ml_dtypes_and_takes_bytes_as_well() -> None:
    x, gamma = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32), np.ones(8, np.float32)
    (q, scale), _ = lngen.compile(by_rows("e4m3"), d=8).forward(x, gamma)
    assert (q.dtype, scale.dtype) == (ml_dtypes.float8_e4m3fn, np.float32)
    norm = lngen.compile(restored, d=8)
    y, _ = norm.forward(q, scale)
    assert np.array_equal(y, q.astype(np.float32) * scale[:, None])
    assert np.array_equal(norm.forward(q.view(np.uint8), scale)[0], y)
    with pytest.raises(ArrayError, match="'q' is expected to be e4m3, got int8; cast it"):
        norm.forward(q.view(np.int8), scale)


def test_numpy_writes_bytes_that_are_given() -> None:
    x, gamma = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32), np.ones(8, np.float32)
    norm = lngen.compile(by_rows("e5m2"), d=8)
    (q, scale), _ = norm.forward(x, gamma)
    given = np.zeros((3, 8), np.uint8), np.zeros(3, np.float32)
    (found, _), _ = norm.forward(x, gamma, out=given)
    assert found is given[0]
    assert np.array_equal(given[0], q.view(np.uint8))
    assert np.array_equal(given[1], scale)


def test_torch_has_a_dtype_for_each() -> None:
    known = torch_dtypes()
    assert [known[str(t)] for t in QUANTISED] == [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def test_cupy_gives_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes them where bytes are meant; as what else they could be is not known."""
    device = SimpleNamespace(__enter__=lambda self: None, __exit__=lambda self, *what: None)
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: 0), get_current_stream=lambda: None,
            Device=lambda n: type("Device", (), vars(device))(),
        ),
        empty=lambda shape, dtype: np.empty(shape, dtype), ndarray=np.ndarray,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", fake)
    library = CuPy()
    made = {t: library.maker((2, 3), str(t), 0)().dtype for t in (*QUANTISED, DType.BF16)}
    assert made == {
        DType.INT8: np.int8, DType.E4M3: np.uint8, DType.E5M2: np.uint8, DType.BF16: NUMPY_DTYPE[DType.BF16],
    }  # fmt: skip
    assert library.dtype(np.dtype(np.uint8)) is None
    assert library.dtype(NUMPY_DTYPE[DType.E4M3]) == "e4m3"
