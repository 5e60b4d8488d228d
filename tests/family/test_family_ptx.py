"""If these fail, kernels of a member of the family have other bits than the interpreter under some schedule."""

from itertools import islice

import pytest

import sampling
from lngen.check.inputs import random_inputs
from lngen.check.spec_checks import executed
from lngen.compile import Compilation
from lngen.devices import DEFAULT_ARCH, device_for
from lngen.graphs import GRAPHS
from lngen.interpret import interpret
from lngen.problem import Schedule, fits
from lngen.problem.footprint import has_room
from lngen.schedule.space import space
from lngen.spec import parse_spec
from test_family import KEYS, backward_of, text

pytest.importorskip("cupy")

LENGTHS = (1, 37, 1000, 8192)
ROWS = (37, 3, 1, 0)
ROWS_OF_LONG = (5, 3, 1, 0)
DTYPES = ("bf16", "f32", "f16")
SCHEDULES = 3
LONG = 8192


def case(number: int, name: str, place: int, d: int) -> tuple[str, str, int]:
    """A member at one length: direction, keys and dtype change from length to length and from member to member."""
    keys = KEYS[name][(3 * place + number) % len(KEYS[name])]
    if "dtype=" not in keys.replace("residual_dtype=", ""):
        keys = f"{keys},dtype={DTYPES[(number + place) % len(DTYPES)]}".strip(",")
    return name, ("fwd", "bwd")[(number + place // 2) % 2] + ":" + keys, d


CASES = [case(n, name, place, d) for n, name in enumerate(GRAPHS) for place, d in enumerate(LENGTHS)]


def factors(name: str, keys: str, d: int) -> tuple[object, ...]:
    """Short and long rows, directions and dtypes; the module that describes the member."""
    return d > 96, keys[:3], keys.rpartition("dtype=")[2], GRAPHS[name].describe.__module__


def of_every_form(compilation: Compilation, count: int = SCHEDULES) -> list[Schedule]:
    """The default schedule, then one of each other form that fits, then more of the space until there are ``count``."""
    facts, device = compilation.problem, device_for(DEFAULT_ARCH)
    chosen, listed = [compilation.schedule(DEFAULT_ARCH)], space(facts, device)

    def add(candidates: list[Schedule], start: int) -> None:
        """The first from a place on, which is another one for every spec; one that may spill where none fits."""
        turned = candidates[start % len(candidates) :] + candidates[: start % len(candidates)]
        found = (s for allowed in (fits, has_room) for s in turned if s not in chosen and allowed(s, facts, device))
        chosen.extend(islice(found, 1))

    own = sum(str(compilation.spec).encode())
    for form in dict.fromkeys(s.form for s in listed):
        if form != chosen[0].form:
            add([s for s in listed if s.form == form], own)
    for turn in range(count - len(chosen)):
        add(listed, own + int(0.618 * (turn + 1) * len(listed)))
    return chosen


@sampling.grid(("name", "keys", "d"), CASES, factors, strength=1)
def test_kernels_have_the_interpreter_s_bits(name: str, keys: str, d: int) -> None:
    """Another number of rows under each schedule; of long rows few. Few blocks share those of column sums."""
    way, _, keys = keys.partition(":")
    spec = parse_spec(text(name, "fwd", keys, d)) if way == "fwd" else backward_of(name, f"{keys},blocks=3", d)
    compilation = Compilation(spec)
    schedules = of_every_form(compilation)
    assert len(schedules) >= SCHEDULES or d == 1
    for place, schedule in enumerate(schedules):
        rows = ROWS_OF_LONG[place % len(ROWS)] if d >= LONG else ROWS[(place + len(name)) % len(ROWS)]
        inputs = random_inputs(spec, rows)
        wanted = interpret(compilation.graph, inputs)
        found = executed(compilation.kernels(schedule), DEFAULT_ARCH, rows, inputs, wanted)
        assert found.ok, found


def test_the_cases_hold_every_member_both_ways_and_every_dtype() -> None:
    for name in GRAPHS:
        own = [keys for n, keys, _ in CASES if n == name]
        assert {keys[:3] for keys in own} == {"fwd", "bwd"}
        assert len(own) == len(LENGTHS)
    assert {d for _, _, d in CASES} == {*LENGTHS}
    for dtype in DTYPES:
        assert {d for _, keys, d in CASES if keys.endswith(dtype)} == {*LENGTHS}
