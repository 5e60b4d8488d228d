"""CUDA text to cubin or PTX for any arch, with or without a GPU; CuPy and NVRTC are loaded on first use."""

from lngen.compiler.toolchain.nvrtc import (
    ARCHES,
    FLAGS,
    Binary,
    compile_cubin,
    compile_ptx,
    compiler_build,
    nvrtc_version,
    supported_arches,
)
from lngen.compiler.toolchain.nvrtc_results import Resources
