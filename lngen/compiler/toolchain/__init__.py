"""CUDA text to cubin or PTX for any arch, with or without a GPU; CuPy and NVRTC are loaded on first use."""

from lngen.compiler.toolchain.nvrtc import (
    ARCHES,
    FLAGS,
    Binary,
    cached_cubin,
    compile_cubin,
    compile_ptx,
    compiler_build,
    file_stamp,
    library_stamp,
    nvrtc_version,
    supported_arches,
)
from lngen.compiler.toolchain.nvrtc_results import Resources
