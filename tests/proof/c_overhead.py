"""What a launch through the C library of a pack takes beyond the driver's calls in it. Needs gcc and no GPU.

    python tests/proof/c_overhead.py [--out generated/bench/c-overhead.txt]

The driver does nothing: tests/support/no_op_driver.c in place of libcuda. The program is tests/proof/c_overhead.c.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from c_driver import cc, no_op
from lngen.aot.build import build

PROGRAM = Path(__file__).with_suffix(".c")
D = 1024
SPECS = [f"layernorm.{way}:d={D},dtype=bf16" for way in ("fwd", "bwd")]
VARIANTS = {
    "each pointer is asked whether it belongs to the device": (),
    "with LNGEN_TRUST_POINTERS": ("-DLNGEN_TRUST_POINTERS",),
}


def measured(folder: Path) -> str:
    """The table of each variant."""
    build(SPECS, folder, arch="sm_90", schedule="single_launch=no", emit="cubin,c")
    no_op(folder)
    texts = []
    for title, flags in VARIANTS.items():
        made = cc(
            folder / "overhead", [PROGRAM, folder / "c/lngen_kernels.c"], *flags, f"-DD={D}", f"-I{folder / 'c'}",
            f'-DLNGEN_PACK_DIR="{folder}"', "-pthread", "-ldl", "-lm", f"-L{folder}", "-l:libcuda.so.1",
        )  # fmt: skip
        where = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        done = subprocess.run([made], env=where, capture_output=True, text=True, check=True)
        texts.append(f"{title}\n{done.stdout}")
    return "\n".join(texts)


def processor() -> str:
    """The name of the processor, where Linux says it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Prints the figures, or writes them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        text = (
            f"Nanoseconds of a call of the C library, {' and '.join(SPECS)}, on {processor()}: of seven runs of a million "
            f"calls the fastest.\nThe driver does nothing; 'driver': the same calls of it made directly.\n\n"
            f"{measured(Path(folder))}"
        )
    if out:
        out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
