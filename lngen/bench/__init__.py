"""Benchmarks: lngen against its peers and the ceilings.

timing      candidates side by side on cold buffers, also for the tuner
engines     arrays, graphs and events of PyTorch or CuPy
floor       the bytes that a call must move
tasks       what is timed; grids: named shapes; targets: fractions and ratios to reach
cases       a spec with argument sets; sets: how they are made; formulas: the reference for results
providers   lngen, PyTorch and the ceilings; peers: the others
measure     one task; run: all tasks
records     results; verdict: targets and best peers; conditions: everything else that results depend on
store       the file; report: tables and summary; plot: figures
host        host time per call
"""
