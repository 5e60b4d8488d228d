"""Build a package for Hugging Face ``kernels``: LayerNorm and RMSNorm, forward and backward, at 14 widths for 5 archs.

python -m lngen.examples.hub_pack [FOLDER] [--quick] [--widths D,...]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import lngen

# The widths of flash-attn's layer norm.
WIDTHS = (256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
NORMS = ("layernorm", "rmsnorm")  # eps=run: a model's own eps, in every call


def main() -> None:
    """Build the package, and print what it takes: files, bytes, seconds."""
    parser = argparse.ArgumentParser(description="Build a package for Hugging Face kernels.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("hub"))
    parser.add_argument("--widths", metavar="D,...", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--quick", action="store_true", help="the first width alone, for one arch")
    given = parser.parse_args()
    widths = WIDTHS[:1] if given.quick else [int(word) for word in given.widths.split(",")]
    arches = ARCHES[2:3] if given.quick else ARCHES
    specs = [f"{norm}.{way}:d={d},dtype=bf16,eps=run" for norm in NORMS for d in widths for way in ("fwd", "bwd")]

    start = time.perf_counter()
    built = lngen.build(specs, given.folder, arch=arches, layout="hf-kernel")
    seconds = time.perf_counter() - start

    sizes = {name: (built.folder / name).stat().st_size for name in built.files}
    cubins = [size for name, size in sizes.items() if name.endswith(".cubin")]
    print(f"{len(specs)} specs, {len(widths)} widths, {len(arches)} archs: {len(cubins)} cubins in {seconds:.0f} s")
    print(f"{sum(cubins) / 1e6:.1f} MB of cubins, {sum(sizes.values()) / 1e6:.1f} MB in {len(sizes)} files")
    print(f"load it: kernels.get_local_kernel(Path({str(built.folder)!r}))")


if __name__ == "__main__":
    main()
