"""Every pair of values of two options, of every named graph, as a user calls it: compile, forward, backward on NumPy.

    python tests/proof/option_pairs.py                     # all pairs, in some minutes; exit 1 if one fails
    python tests/proof/option_pairs.py --only rmsnorm      # those of one graph

A pair may be refused by ``lngen.compile``, with an LngenError; the command prints the reasons and how often each came.
A pair that is compiled has to run: weights are of size 0.5 to 1.5, so that none is too small to rebuild a row.
"""

import argparse
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

import lngen
from lngen.compiler.graphs import GRAPHS, Definition, Options
from lngen.compiler.ir import DType, M, Value
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.errors import LngenError, SpecError
from lngen.launch.runtime import Norm

LENGTH, HEAD, ROWS = 8, 128, 3
DTYPES = ("f16", "bf16", "f32", "f64")

NUMBERS = {"head": "64", "k_heads": "1", "rotary": "64"}  # of options that take few

Keys = dict[str, str]


def values(graph: str) -> dict[str, tuple[str, ...]]:
    """The values of each key of a graph that are tried, the default aside where it is a value of an option."""
    definition = GRAPHS[graph]
    plain = Options(*(DType.F32,) * 3)
    declared = definition.builder(plain).declared
    found: dict[str, tuple[str, ...]] = {}
    for name, option in declared.items():
        if isinstance(option.default, bool):
            found[name] = ("no" if option.default else "yes",)
        else:
            found[name] = tuple(c for c in option.choices if c != option.default) or (NUMBERS.get(name, "0.5"),)
    switches = (n for n, o in declared.items() if o.default is False and n != "zero_centred" and not o.of_forward)
    added = tuple((n, True) for n in switches if _fits(definition, replace(plain, chosen=((n, True),))))
    whole = replace(plain, chosen=added)
    outputs, statistics = definition.outputs(whole), definition.statistics(whole)
    inputs = definition.differentiable(whole)
    return found | {
        "dtype": ("f16", "bf16", "f64"), "weight": DTYPES, "out": DTYPES,
        "eps": ("1e-3",) if definition.builder(whole).takes_eps else (), "save": ("none", *outputs, *statistics),
        "wrt": inputs, "of": (*outputs, *statistics), "grad": DTYPES, "accumulate": inputs, "blocks": ("2",),
    }  # fmt: skip


def _fits(definition: Definition, options: Options) -> bool:
    """False for an option that needs another one."""
    try:
        definition.builder(options)
    except SpecError:
        return False
    return True


def pairs(graph: str) -> Iterator[Keys]:
    """No key, each value of each key alone, then all pairs of values of two keys."""
    listed = [(key, value) for key, several in values(graph).items() for value in several]
    yield {}
    yield from ({key: value} for key, value in listed)
    yield from ({a: v, b: w} for (a, v), (b, w) in combinations(listed, 2) if a != b)


@dataclass(frozen=True)
class Answer:
    """``ran``, ``refused`` by compile, or ``failed``; and why."""

    status: str
    why: str = ""


def answer(graph: str, keys: Keys) -> Answer:
    """One pair: compile may refuse it with an LngenError; nothing else may raise."""
    try:
        norm = lngen.compile(graph, d=HEAD if GRAPHS[graph].group == "heads" else LENGTH, **keys)
    except LngenError as error:
        return Answer("refused", re.sub(r"'[^']*'|\d+|, expected.*", "...", str(error).splitlines()[0]))
    except Exception:  # the next pair is tried
        return Answer("failed", traceback.format_exc())
    try:
        step(norm)
    except Exception:
        return Answer("failed", traceback.format_exc())
    return Answer("ran")


def step(norm: Norm) -> None:
    """Shapes and dtypes are those that the specs say, and every number is finite."""
    rng, forward, backward = np.random.default_rng(27), norm.spec(), norm.spec("bwd")
    d = forward.d
    y, saved = norm.forward(**{p.name: drawn(rng, p, d) for p in forward.forward().params})
    outputs = forward.definition.outputs(forward.options)
    types = {r.name: r for s in (forward, backward) for r in s.forward().results}
    for name, got in zip(outputs, y if isinstance(y, tuple) else (y,), strict=True):
        check(name, got, types[name].type.shape(ROWS, d), types[name].type.dtype)
    cotangents = tuple(drawn(rng, types[name], d) for name in backward.differentiated)
    stored = {p.name: p.type for p in backward.forward().params}
    wide = {r.name: r.type.dtype for r in backward.graph().results}
    out = tuple(
        np.zeros(stored[n].shape(ROWS, d), NUMPY_DTYPE[wide[f"d{n}"]]) if n in backward.accumulate else None
        for n in backward.differentiates
    )
    found = norm.backward(cotangents, saved, out=out if backward.accumulate else None)
    shared = backward.graph().shared
    for name, got in zip(backward.differentiates, found, strict=True):
        check(f"d{name}", got, stored[name].shape(ROWS, d), wide[shared.get(f"d{name}", f"d{name}")])


def drawn(rng: np.random.Generator, value: Value, d: int) -> Array:
    """Numbers of size 0.5 to 1.5; those of rows have both signs, whole ones are 1."""
    shape = value.type.shape(ROWS, d)
    numbers = rng.uniform(0.5, 1.5, shape)
    if not value.type.dtype.digits:
        return np.ones(shape, NUMPY_DTYPE[value.type.dtype])
    return round_to(numbers * rng.choice([-1.0, 1.0], shape) if M in value.type.axes else numbers, value.type.dtype)


def check(name: str, got: Array, shape: tuple[int, ...], dtype: DType) -> None:
    wanted = NUMPY_DTYPE[dtype]
    assert (got.shape, got.dtype) == (shape, wanted), f"{name}: {got.dtype}{list(got.shape)}, not {wanted}{list(shape)}"
    assert np.isfinite(got.astype(np.float64)).all(), f"{name}: {got}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs every pair of values of two options of the named graphs.")
    parser.add_argument("--only", choices=tuple(GRAPHS))
    only = parser.parse_args(arguments).only
    counts, refused = Counter[str](), Counter[str]()
    for graph in [only] if only else GRAPHS:
        for keys in pairs(graph):
            found = answer(graph, keys)
            counts[found.status] += 1
            if found.status == "refused":
                refused[found.why] += 1
            if found.status == "failed":
                print(f"{graph} {keys}: {found.why}", file=sys.stderr)
        so_far = ", ".join(f"{counts[status]} {status}" for status in ("ran", "refused", "failed"))
        print(f"{graph}: {so_far} so far", flush=True)
    for why, count in refused.most_common():
        print(f"{count:6} refused: {why}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
