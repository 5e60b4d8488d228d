"""lngen: a compiler for row-normalisation kernels."""
