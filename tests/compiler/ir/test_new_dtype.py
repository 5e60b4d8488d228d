"""If this fails, a new storage dtype takes more than ``lngen help adding`` says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lngen.config import PACKAGE, data_dir

ROW = '    U16 = "u16", 16, "uint16", "unsigned short", "u16", 0, 1.0, 65535.0, False\n'
CONVERSIONS = """\
__device__ __forceinline__ float f32_from_u16(unsigned short v) { return v; }

__device__ __forceinline__ double f64_from_u16(unsigned short v) { return v; }

"""
STEPS = {  # by file: what is added, and before which text
    "lngen/dtypes.py": (ROW, "    U32 = "),
    "lngen/packs/schema.json": ('"u16", ', '"int8", "i32", '),
    "templates/include/lngen/numeric.cuh": (CONVERSIONS, "__device__ __forceinline__ float f32_from_i32("),
}
PROGRAM = """
import lngen
import test_whole_numbers as table
from lngen.dtypes import DType

u16 = DType("u16")
for row in [("fwd", 64, "bf16", "tma"), ("bwd", 37, "f64", "registers")]:
    table.test_kernels_have_the_bits_of_the_interpreter(u16, *row)
lngen.build([table.spec_of(table.everywhere(u16), "fwd", 16, "f32")], "pack", emit="cubin,c,vectors")
assert not lngen.verify("pack").faults
"""


@pytest.mark.full  # compiles in a copy of lngen
def test_it_goes_from_its_row_to_kernels(tmp_path: Path) -> None:
    """A copy of lngen that has u16: rows, numbers and masks of it have the interpreter's bits in kernels."""
    pytest.importorskip("cupy")
    shutil.copytree(PACKAGE, tmp_path / "lngen")
    shutil.copytree(data_dir("templates"), tmp_path / "templates")
    for name, (added, before) in STEPS.items():
        path = tmp_path / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, added + before), encoding="utf-8")
    tests = Path(__file__).parents[2]
    folders = [tmp_path, tests / "support", tests / "compiler/bits"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
