"""Benchmarks: lngen against its peers and the ceilings.

timing      candidates side by side on cold buffers, also for the tuner
engines     arrays, graphs and events of PyTorch; cupy_engine: of CuPy
floor       the bytes that a call must move
tasks       what is timed; grids: named shapes; targets: fractions and ratios to reach
cases       a spec with argument sets; sets: how they are made
formulas    the float64 results that others must match; reference: those of any graph; torch_graph: it in PyTorch
providers   lngen and PyTorch; ceilings, overlapped: a copy and an addition; libraries: the others; peers: the choice
measure     one task; run: all tasks
records     results; verdict: targets and best peers; conditions: everything else that results depend on
store       the file; report: tables and summary; plot: figures; palette: their colours
host        host time per call
"""
