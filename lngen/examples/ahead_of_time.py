"""Generate LayerNorm for an engine in another language: CUDA text, PTX, cubins and a manifest.

python -m lngen.examples.ahead_of_time [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lngen

SPECS = ("layernorm.fwd:d=4096,dtype=bf16", "layernorm.bwd:d=4096,dtype=bf16")


def main(folder: Path) -> None:
    """Build forward and backward of D = 4096 in bf16, then read the manifest as a launcher does."""
    lngen.build(SPECS, folder, arch="sm_80,sm_90")

    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for kernel_set in manifest["kernel_sets"]:
        print(kernel_set["spec"]["text"])
        for kernel in kernel_set["kernels"]:
            arguments = ", ".join(a["name"] for a in kernel["arguments"])
            print(f"  {kernel['name']}({arguments}): {kernel['block']} threads a block")
        for name in kernel_set["files"]:
            print(f"  {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build"))
