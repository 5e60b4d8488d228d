"""Launching compiled kernels by the CUDA driver: the standard library alone, in the syntax of Python 3.9.

A program that only launches needs this package, lngen/errors.py and a pack: no NumPy, no CuPy, no compiler. The hub
package carries a copy of it, so imports inside are relative.
"""
