"""If these fail, the C library reads or writes where it may not, leaks, overflows, or races with itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from c_driver import linked, no_op
from c_library import CLibrary
from c_packs import CASES
from c_wrong import calls
from lngen.launch.pack import Pack

pytest.importorskip("cupy")

PROGRAM = Path(__file__).with_name("sanitized.c")
TRIED = ("forward", "backward, one launch", "two distances", "two distances, added", "eps of the call")


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_all_calls_are_clean(folder: Path, library: Path, tmp_path: Path, sanitizers: str) -> None:
    """Every call of the driver fails once; threads load and launch at the same time."""
    known, pack = CLibrary(library, folder), Pack(folder)
    tried = {group: (known.structs[group], pack.described(spec)) for group, spec, *_ in (CASES[name] for name in TRIED)}
    (tmp_path / "calls.c").write_text(calls(tried, known.dtypes), encoding="utf-8")
    tampered = shutil.copytree(folder, tmp_path / "tampered")
    for path in tampered.glob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    flags = (
        f'-DTAMPERED="{tampered}"',
        f"-I{tmp_path}",
        "-g",
        "-O1",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
    )
    program, where = linked(tmp_path / "program", PROGRAM, folder, no_op(tmp_path), *flags)
    done = subprocess.run([program], env=where, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
