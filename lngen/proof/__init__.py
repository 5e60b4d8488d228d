"""Proof: the PTX executed on NumPy, and checks of kernels and of others' norms against oracles."""
