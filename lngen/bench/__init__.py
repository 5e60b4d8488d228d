"""Benchmarks: lngen against its peers and the ceilings.

timing      candidates side by side on cold buffers; the tuner uses it too
engines     arrays, graphs and events of PyTorch or CuPy
floor       the bytes a call must move
tasks       what is timed; grids: named shapes; targets: what shall be reached
cases       a spec with argument sets; sets: how they are made; formulas: what results are held against
providers   lngen, PyTorch and the ceilings; peers: the others
measure     one task; run: task after task
records     what comes out; verdict: targets and best peers; conditions: what it all depends on
store       the file; report: tables and summary; plot: figures
host        host time per call
"""
