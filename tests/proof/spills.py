"""Random defaults and the bytes that they spill: what a user gets who names a graph, two options, a length and an arch.

    python tests/proof/spills.py               # compiles 400 defaults, in ten minutes of a core; exit 1 if one spills
    python tests/proof/spills.py --count 40 --first 1000

Prints a line for each case: the bytes a thread spills, the arch, the spec, the schedule. Case n is the same in every
run. Needs NVRTC and no GPU. tests/proof/test_family_table.py holds some of the cases.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from functools import cache

from graph_names import dtypes_of
from lngen.compiler.compile import Compilation
from lngen.compiler.graphs import GRAPHS, Option
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = ("bf16", "bf16", "f16", "f16", "f32", "f64")
LONGEST = 20_000
COMMON = {"weight": ("f32",), "out": ("f32",), "save": ("none",)}  # keys of every graph, with values to try
BACKWARD = {"grad": ("f32",), "accumulate": ("gamma", "x"), "wrt": ("gamma", "x")}

# Those with which spills of default schedules were reported: many row groups, whose column sums a block holds.
REPORTED = [
    ("gated_rmsnorm.bwd:d=95,dtype=f16,weight=f32,act=gelu_tanh", "sm_80"),
    ("parallel_rmsnorm.bwd:d=127,dtype=bf16,weight=f32,zero_centred=yes,residual_dtype=f32,rowscale=yes,colscale=yes,"
     "grad=f32", "sm_90"),
    ("parallel_layernorm.bwd:d=333,dtype=bf16,weight=f32,zero_centred=yes,rowscale=yes,colscale=yes,round_sum=yes",
     "sm_80"),
]  # fmt: skip

Case = tuple[str, str]  # spec, arch


def case(number: int) -> Case:
    """A random graph with a pair of options, at a random length, for a random arch."""
    dice = random.Random(number)
    while True:
        name, way = dice.choice([*GRAPHS]), dice.choice(("bwd", "bwd", "bwd", "fwd"))
        dtype = dice.choice(dtypes_of(name, *DTYPES))
        # Half of the lengths are short: by their logarithm they are as many as the long ones.
        d = dice.randint(1, LONGEST) if dice.random() < 0.5 else int(LONGEST ** dice.random())
        keys = values(name) | COMMON | (BACKWARD if way == "bwd" else {})
        pair = [f"{key}={dice.choice(keys[key])}" for key in dice.sample(sorted(keys), 2)]
        text = f"{name}.{way}:d={d},dtype={dtype},{','.join(pair)}"
        try:
            parse_spec(text).graph()
        except LngenError:
            continue  # options that exclude each other
        return text, dice.choice(ARCHES)


@cache
def values(name: str) -> dict[str, tuple[str, ...]]:
    """The options that a graph declares, each with the values other than its default."""
    declared = GRAPHS[name].builder(parse_spec(f"{name}.fwd:d=8,dtype=f32").options).declared
    return {key: _others(option) for key, option in declared.items()}


def _others(option: Option) -> tuple[str, ...]:
    if isinstance(option.default, bool):
        return ("no" if option.default else "yes",)
    return tuple(c for c in option.choices if c != option.default) or ("0.5",)


def default(text: str, arch: str) -> tuple[int, Schedule]:
    """The bytes a thread of the default kernels spills, and their schedule."""
    compilation = Compilation(parse_spec(text))
    schedule = compilation.schedule(arch)
    return compilation.kernels(schedule).spilled(arch), schedule


def cases(first: int, count: int) -> Iterator[Case]:
    """The cases from a number on."""
    return map(case, range(first, first + count))


def main() -> None:
    """Print what each case spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--first", type=int, default=0)
    chosen, spilling = parser.parse_args(), 0
    for text, arch in cases(chosen.first, chosen.count):
        spilled, schedule = default(text, arch)
        spilling += spilled > 0
        print(f"{spilled:5} {arch:6} {text} {schedule}", flush=True)
    print(f"{spilling} of {chosen.count} spill", file=sys.stderr)
    sys.exit(spilling > 0)


if __name__ == "__main__":
    main()
