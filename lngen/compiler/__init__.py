"""The compiler: a spec becomes a graph, a plan, a text, a cubin. ``compile.py`` is its table of contents."""
