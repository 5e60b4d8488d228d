"""A small run for compute-sanitizer: every kernel structure once, its bits compared with the interpreter.

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 python tests/sanitize.py
done
"""

from __future__ import annotations

import sys

import cupy

import lngen
from lngen.check.inputs import random_inputs, same_bits
from lngen.interpret import interpret

ROWS = 37
CASES = (
    ("layernorm", 64, {"dtype": "bf16"}),
    ("layernorm", 1000, {"dtype": "f32"}),
    ("layernorm", 4093, {"dtype": "f16"}),
    ("rmsnorm", 1024, {"dtype": "bf16", "weight": "f32"}),
    ("layernorm", 40000, {"dtype": "bf16"}),
    ("layernorm", 40000, {"dtype": "f32", "save": "none"}),
    ("rmsnorm", 3, {"dtype": "f64"}),
)


def differences(graph: str, d: int, options: dict[str, str]) -> int:
    """Numbers in which forward and backward differ from the interpreter; outputs and workspace uninitialised."""
    norm = lngen.compile(graph, d=d, **options)
    forward, backward = norm.spec("fwd"), norm.spec("bwd")
    inputs = random_inputs(forward, ROWS)
    y, saved = norm.forward(**{name: cupy.asarray(a) for name, a in inputs.items()})
    given = random_inputs(backward, ROWS)
    gradients = norm.backward(cupy.asarray(given["dy"]), saved)
    want = [*list(interpret(forward.graph(), inputs).values())[:1], *interpret(backward.graph(), given).values()]
    return sum(int((~same_bits(a.get(), w)).sum()) for a, w in zip((y, *gradients), want, strict=True))


if __name__ == "__main__":
    found = {f"{graph} {d} {options}": differences(graph, d, options) for graph, d, options in CASES}
    print(found)
    sys.exit(any(found.values()))
