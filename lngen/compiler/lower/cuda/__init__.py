"""How kernels are written in CUDA C++."""
