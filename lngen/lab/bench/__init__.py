"""Benchmarks: lngen against its peers and the ceilings, in PyTorch.

tasks          what is timed: bytes, ceilings, targets, grids of shapes
argument_sets  the inputs of a task, and the float64 results that others must match
providers      lngen and the ceilings; peers: PyTorch and other libraries; torch_graph: a graph in PyTorch
timing         launches side by side on cold buffers, also for the tuner; torch_gpu: the GPU; host_time: before a launch
benchmark      all tasks, one after the other
records        results, targets met, best peers; store: the file; summary: tables and text; figures
"""
