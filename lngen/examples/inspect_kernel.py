"""Read the CUDA text of a kernel, and see what another schedule changes in it.

python -m lngen.examples.inspect_kernel
"""

from __future__ import annotations

import difflib

import lngen

ONE_WARP = "form=registers,threads=32,rows_per_block=4,vec=8"  # a warp per row, four rows per block
FOUR_WARPS = "form=registers,threads=128,rows_per_block=1,vec=8"  # four warps share a row and exchange its sum


def source(schedule: str) -> str:
    """The CUDA text under a schedule; one that names every required key needs no compiler."""
    return lngen.compile("rmsnorm", d=1024, dtype="bf16", schedule={"fwd": schedule}).source("fwd")


def main() -> None:
    """Print the kernel with one warp per row, then its difference to the one with four."""
    narrow, wide = source(ONE_WARP), source(FOUR_WARPS)
    print(narrow)
    lines = narrow.splitlines(keepends=True), wide.splitlines(keepends=True)
    print("".join(difflib.unified_diff(*lines, ONE_WARP, FOUR_WARPS)))


if __name__ == "__main__":
    main()
