"""Eleven short programs: ``python -m lngen.examples.NAME``. None needs a GPU, with ``--tiny`` where a step is timed.

ahead_of_time       generate kernels into a folder, and what a launcher reads from its manifest
autotune            measure schedules on a GPU, or print the model's order where there is none
derived_axes        a scale per block of features, groups in a row, the loss of a class index: graphs, and NumPy
dit_step            a training step of a small diffusion transformer: eager, patched, with its sums fused by hand
gpt_step            a training step of small GPTs: norms of PyTorch, of lngen by patch, of Liger
hub_pack            a package for Hugging Face kernels: 14 widths, five archs; what it takes on disk and in time
inspect_kernel      the CUDA text of a kernel, and what another schedule changes in it
own_graph           a new graph: forward and derived backward, checked by finite differences
patch_transformers  a training step of models of transformers: eager, patched in one line, with Liger's norms
residual            a residual stream: pre-LN, post-LN, gradients added to existing arrays
train_equals_serve  a row in a training batch and alone, under five schedules: no bit differs; torch and Liger beside it
"""
