"""Benchmarks: lngen against its peers and the ceilings.

timing      candidates side by side on cold buffers; the tuner uses it too
engines     arrays, graphs and events of PyTorch or CuPy
cases       argument sets, and the formulas results are held against
providers   lngen, PyTorch and the ceilings; peers: the others
floor       the bytes a call must move
run         records; report: tables, JSON, plots
host        host time per call
"""
