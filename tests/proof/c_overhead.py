"""What a launch through the C library of a pack takes beyond its calls of the driver. Needs gcc and no GPU.

    python tests/proof/c_overhead.py > generated/bench/c-overhead.txt

The driver does nothing: tests/support/no_op_driver.c in place of libcuda. The program is tests/proof/c_overhead.c.
"""

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from c_driver import linked, no_op
from lngen.packs.build import build

SPECS = ["layernorm.fwd:d=1024,dtype=bf16", "layernorm.bwd:d=1024,dtype=bf16"]
VARIANTS = {"each pointer is asked for its device": (), "with LNGEN_TRUST_POINTERS": ("-DLNGEN_TRUST_POINTERS",)}


def main() -> None:
    """Prints a table for each way to compile the library."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    print(f"Nanoseconds of a call, the fastest of seven runs of a million, on {cpu}; {', '.join(SPECS)}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(SPECS, folder, arch="sm_90", schedule="single_launch=no", emit="cubin,c")
        for title, flags in VARIANTS.items():
            program, where = linked(
                folder / "overhead", Path(__file__).with_suffix(".c"), folder, no_op(folder), *flags
            )
            done = subprocess.run([program], env=where, capture_output=True, text=True, check=True)
            print(f"\n{title}\n{done.stdout}", end="")


if __name__ == "__main__":
    main()
