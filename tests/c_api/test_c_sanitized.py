"""If these fail, the C library reads or writes where it may not, leaks, overflows, or races with itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from c_driver import cc, no_op
from c_library import CLibrary
from c_packs import CASES
from c_wrong import program
from lngen.launch.pack import Pack

pytest.importorskip("cupy")

PROGRAM = Path(__file__).with_name("sanitized.c")
TRIED = ("forward", "backward", "two distances", "two distances, added", "eps of the call")


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_all_calls_are_clean(folder: Path, library: Path, tmp_path: Path, sanitizers: str) -> None:
    """Every call of the driver fails once; threads load and launch at the same time."""
    known, pack = CLibrary(library, folder), Pack(folder)
    tried = {group: (known.structs[group], pack.described(spec)) for group, spec, *_ in map(CASES.get, TRIED)}
    (tmp_path / "calls.c").write_text(program(tried, known.dtypes), encoding="utf-8")
    no_op(tmp_path)
    made = cc(
        tmp_path / "program", [PROGRAM, folder / "c/lngen_kernels.c"], f"-I{folder / 'c'}", f"-I{tmp_path}", "-g", "-O1",
        f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f'-DLNGEN_PACK_DIR="{folder}"', "-pthread", "-lm",
        "-ldl", f"-L{tmp_path}", "-l:libcuda.so.1",
    )  # fmt: skip
    where = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([made], env=where, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
