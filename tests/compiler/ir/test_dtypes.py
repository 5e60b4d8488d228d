"""If these fail, a row of the table of storage dtypes says what NumPy, ml_dtypes or PyTorch does not."""

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from lngen.compiler.ir import D, M, Type, parse
from lngen.dtypes import FLOATS, READ, WRITTEN, DType


def test_numbers_are_those_of_numpy_and_ml_dtypes() -> None:
    finfo: Any = ml_dtypes.finfo
    for t in DType:
        own = t.numpy()
        if t.digits:
            facts = finfo(own)
            assert (t.largest, t.least, 2 * t.roundoff) == (facts.max, facts.smallest_subnormal, facts.eps), t
            assert t.normal == facts.smallest_normal, t
            assert t.bits == facts.bits, t
        elif t is not DType.BOOL:
            assert (t.largest, t.bits) == (float(np.iinfo(own).max), np.iinfo(own).bits), t
        assert t.size == (own.itemsize if t.bits >= 8 else 0), t


def test_a_dtype_is_found_by_any_name() -> None:
    for t in DType:
        own = t.numpy()
        spelt = [t, t.value, t.library, f"torch.{t.library}", own, own.type]
        spelt += [getattr(torch, t.library)] if hasattr(torch, t.library) else []
        assert {DType.of(name) for name in spelt} == {t}
    for wrong in ("f8", "float", "bf32", 4, None, float, "torch.torch.float32", np.dtype("int16")):
        with pytest.raises(ValueError, match="is not a valid DType"):
            DType.of(wrong)


def test_every_row_is_a_dtype_of_graphs() -> None:
    for t in DType:
        to = t if t.digits else "f32"
        text = f"graph @f(%x: {t}[M, D]) -> ({to}[M, D]) {{\n  %y : {to}[M, D] = cast %x {{to={to}}}\n  return %y\n}}\n"
        assert str(parse(text)) == text
        assert parse(text).params[0].type == Type(t, (M, D))


def test_kernels_read_rows_with_a_c_type_and_write_floats_and_what_saturates() -> None:
    assert [t.value for t in FLOATS] == ["f16", "bf16", "f32", "f64"]
    assert [t.value for t in WRITTEN] == ["f16", "bf16", "f32", "f64", "int8", "e4m3", "e5m2"]
    assert [t.value for t in DType if t.arithmetic] == ["f32", "f64"]
    assert {*WRITTEN} <= {*READ}
    assert all(t.size for t in READ)
    for column in ("library", "ptx"):
        assert len({getattr(t, column) for t in DType} - {""}) == len(DType), column
    assert len({t.ctype for t in READ}) == len(READ)


def test_the_table_needs_the_standard_library_alone() -> None:
    code = "import sys, lngen.dtypes; print({'numpy', 'ml_dtypes', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
