"""If these fail, a norm of samples has other bits in a kernel than in the interpreter, or beside other samples.

Specs, schedules, GPUs and numbers of rows are drawn anew for each seed.
"""

import random
from typing import Any

import pytest

from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import M, is_of_set
from lngen.compiler.spec import Spec, parse_spec
from lngen.errors import LngenError
from lngen.proof.check.inputs import mismatches
from lngen.proof.check.spec_checks import others
from lngen.proof.ptx import run_plan
from set_cases import set_inputs

CASES, PLAIN = 1500, 6
SAMPLES, PLAIN_SAMPLES = 300, 6
ARCHS = ("sm_80", "sm_90", "sm_120")
SHORT = 1024  # columns; longer rows have fewer of them

KEYS = {  # a value is drawn, mostly the first
    "dtype": ("bf16", "f16", "f32"), "weight": ("", "f32", "bf16"), "out": ("", "", "f32"),
    "modulation": ("sample", "sample", "row"), "modulation_dtype": ("weight", "f32", "bf16", "f16"),
    "shift": ("yes", "no"), "gate": ("no", "yes"), "residual": ("no", "yes"), "round_sum": ("yes", "no"),
    "gamma": ("no", "yes"), "beta": ("no", "yes"), "casts": ("once", "norm", "eager"), "save": ("", "none"),
    "eps": ("", "run", "0.3"),
}  # fmt: skip
BACKWARD = {
    "wrt": ("", "", "x", "scale", "x+scale"), "of": ("", "", "y", "rstd"), "grad": ("", "", "f32"),
    "stretch": ("", "", "3", "40"),
}  # fmt: skip
FORWARD = {"quant": ("no", "no", "no", "e4m3")}


def drawn(chance: random.Random) -> Spec:
    """A spec that has a graph; keys that exclude each other are drawn again."""
    while True:
        way = chance.choice(("fwd", "bwd", "bwd"))
        keys = {**KEYS, **(BACKWARD if way == "bwd" else FORWARD)}
        chosen = {k: chance.choice(v) if chance.random() < 0.4 else v[0] for k, v in keys.items()}
        chosen["dtype"] = chance.choice(KEYS["dtype"])
        d = chance.choice((8, 33, 64, 100, 256, 384, 512, 1000, SHORT, 1536, 3072))
        text = ",".join(f"{k}={v}" for k, v in chosen.items() if (v and v != KEYS.get(k, ("",))[0]) or k == "dtype")
        try:
            spec = parse_spec(f"{chance.choice(('ada_layernorm', 'ada_rmsnorm'))}.{way}:d={d},{text}")
            spec.graph()
        except LngenError:
            continue
        return spec


def sizes(chance: random.Random, d: int) -> tuple[int, int]:
    """Rows of a sample, and samples: of one row, of part of a stretch, of several stretches."""
    per_set = chance.choice((1, 2, 3, 7, 16, 17, 33, 64, 130) if d <= SHORT else (1, 2, 5, 17, 33))
    return per_set, chance.randint(1, 4 if per_set < 40 else 2)


def sampled(count: int, plain: int) -> list[Any]:
    return [pytest.param(n, marks=[] if n < plain else pytest.mark.full) for n in range(count)]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("seed", sampled(CASES, PLAIN))
def test_kernels_have_the_bits_of_the_interpreter(seed: int) -> None:
    chance = random.Random(seed)
    spec, arch = drawn(chance), chance.choice(ARCHS)
    found = Compilation(spec)
    listed = others(found, 8, arch) if chance.random() < 0.7 else []
    schedule = chance.choice(listed) if listed else found.schedule(arch)
    per_set, sets = sizes(chance, spec.d)
    inputs = set_inputs(spec, per_set, sets, seed)
    outcome = run_plan(found.kernels(schedule).plan, inputs, rows=per_set * sets, arch=arch, order=seed)
    what = (str(spec), str(schedule), per_set, sets, arch)
    assert not outcome.findings, (what, str(outcome.findings[0]))
    assert not mismatches(outcome.results, interpret(found.graph, inputs)), what


@pytest.mark.parametrize("seed", sampled(SAMPLES, PLAIN_SAMPLES))
def test_a_sample_has_its_bits_beside_any_others(seed: int) -> None:
    """Some of the samples, alone; other inputs without samples are the same."""
    chance = random.Random(-seed)
    spec = drawn(chance)
    graph, (per_set, sets) = spec.graph(), (chance.randint(1, 400), chance.randint(1, 9))
    inputs = set_inputs(spec, per_set, sets, seed)
    first = chance.randrange(sets)
    end = chance.randint(first + 1, sets)
    whole = interpret(graph, inputs)

    def part(value: Any, array: Any) -> Any:
        if is_of_set(value):
            return array[first:end]
        return array[first * per_set : end * per_set] if M in value.type.axes else array

    given = {p.name: part(p, inputs[p.name]) for p in graph.params}
    alone = interpret(graph, given)
    for value in graph.results:
        if is_of_set(value) or M in value.type.axes:
            assert alone[value.name].tobytes() == part(value, whole[value.name]).tobytes(), (str(spec), value.name)
