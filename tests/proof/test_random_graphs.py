"""Random graphs under random schedules: what NVRTC makes of them has the interpreter's bits and breaks no rule.

``python tests/proof/test_random_graphs.py --examples 5000 --seed 1`` runs a long campaign.
"""

import argparse
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sampling
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Graph
from lngen.compiler.lower import lower
from lngen.errors import ArrayError, DerivativeError, LngenError, LowerError, SpecError
from lngen.proof.check.inputs import same_bits
from lngen.proof.ptx import run_plan
from random_graphs import KINDS, Case, draw_case, smaller

# Two batches of each kind, so that workers share them; what a batch skips is part of its examples.
BATCHES = [(kind, batch) for kind in KINDS for batch in range(2)]
EXAMPLES = 8


@dataclass(frozen=True)
class Verdict:
    """``skipped`` or ``failed`` say why, shortly; ``detail`` at length."""

    skipped: str = ""
    failed: str = ""
    detail: str = ""
    kernels: int = 0


def judge(case: Case) -> Verdict:
    """Run a case."""
    try:
        return _judge(case)
    except Exception as error:  # an LngenError or any other: none is expected here
        first = re.search(r"error: ([^\"\n]*)", str(error))
        kind = type(error).__name__ + (f": {first[1]}" if first else "")
        return Verdict(failed=kind, detail=f"{traceback.format_exc()[-3000:]}\n{case}")


def _judge(case: Case) -> Verdict:
    try:
        spec = case.spec()
        graph = spec.graph()
        schedule = case.plan_schedule(graph)
        if schedule is None:
            return Verdict("no cheap schedule")
        plan = lower(spec, schedule)
    except (LowerError, DerivativeError) as error:
        return Verdict(f"{type(error).__name__}: {_reason(error)}")
    except SpecError as error:
        if "cannot stand for" in str(error):  # a wide value is kept from which its operands do not follow
            return Verdict("a saved value that does not stand for its operands")
        raise
    inputs = case.inputs(graph)
    try:
        expected = interpret(graph, inputs)
    except ArrayError as error:
        if "no input says how long" in str(error):  # the derivative is a constant along that axis
            return Verdict("no input says how long an axis is")
        raise
    outcome = run_plan(
        plan, inputs, arch=case.arch, rows=case.rows, strides=case.strides(graph, schedule), order=case.order
    )
    heading = f"{case}\n{spec}\n{schedule}\n{graph}"
    if outcome.findings:
        return Verdict("", outcome.findings[0].kind, "\n".join(map(str, (*outcome.findings[:5], heading))))
    for name, value in expected.items():
        same = same_bits(outcome.results[name], value)
        if not same.all():
            at = tuple(np.argwhere(~same)[0].tolist())
            got, want = outcome.results[name][at], value[at]
            text = f"{name}{list(at)} is {got!r}, expected {want!r}; {np.size(same) - int(same.sum())} differ"
            return Verdict("", "bits", f"{text}\n{heading}")
    return Verdict(kernels=len(plan.kernels))


def _reason(error: LngenError) -> str:
    """The message without the names in it."""
    words = str(error).partition(": ")[2] or str(error)
    return " ".join(w for w in words.split() if not w.startswith(("'", "%", "@")))[:60]


def minimal(case: Case, kind: str, budget: int = 150) -> Case:
    """The smallest case found that fails in the same way."""
    found = True
    while found and budget > 0:
        found = False
        for candidate in smaller(case):
            budget -= 1
            if judge(candidate).failed == kind:
                case, found = candidate, True
                break
            if budget <= 0:
                break
    return case


def cases(kind: str) -> st.SearchStrategy[Case]:
    """Cases of a kind."""
    return st.randoms(use_true_random=False).map(partial(_draw, kind))


def _draw(kind: str, rng: random.Random) -> Case:
    return draw_case(rng, kind)


@sampling.rotating(("kind", "batch"), BATCHES)
def test_random_graphs(kind: str, batch: int) -> None:
    done = Counter[str]()
    for number in range(EXAMPLES):
        case = draw_case(random.Random(f"{kind} {batch} {number}"), kind)
        verdict = judge(case)
        assert not verdict.failed, f"{verdict.failed}: {verdict.detail}"
        done[verdict.skipped or "ran"] += 1
    assert done["ran"] >= EXAMPLES // 3, done


@pytest.mark.parametrize("kind", ["forward", "columns", "backward"])
def test_hypothesis_finds_nothing(kind: str) -> None:
    @settings(max_examples=8, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
    @given(cases(kind))
    def holds(case: Case) -> None:
        verdict = judge(case)
        assert not verdict.failed, f"{verdict.failed}: {verdict.detail}"

    holds()


def test_a_recipe_is_replayed() -> None:
    graphs: list[Graph] = []
    for _ in range(2):
        case = draw_case(random.Random("again"), "columns")
        graphs += [case.spec().forward(), case.spec().forward()]
    assert len(set(map(str, graphs))) == 1


def _one(seed: int, number: int) -> tuple[str, Verdict]:
    kind = KINDS[number % len(KINDS)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return kind, judge(draw_case(random.Random(f"{seed} {number}"), kind))


def campaign(examples: int, seed: int, jobs: int, seconds: float, first: int = 0) -> int:
    """Run many cases; print what was skipped and why, and each failure made small. Failures."""
    count, failures = Counter[str](), Counter[str]()
    start, kernels, ran = time.monotonic(), 0, 0
    with ProcessPoolExecutor(jobs) as pool:
        todo = range(first, first + examples)
        for begin in range(0, examples, 64):
            if time.monotonic() - start > seconds:
                break
            part = todo[begin : begin + 64]
            for number, (kind, verdict) in zip(part, pool.map(partial(_one, seed), part, chunksize=4), strict=True):
                ran, kernels = ran + 1, kernels + verdict.kernels
                count[(verdict.failed and "FAILED") or verdict.skipped or f"ran {kind}"] += 1
                if verdict.failed:
                    failures[verdict.failed] += 1
                    print(f"\n==== example {number}, seed {seed}, {kind}: {verdict.failed}")
                    if failures[verdict.failed] <= 6:
                        case = minimal(draw_case(random.Random(f"{seed} {number}"), kind), verdict.failed)
                        print(judge(case).detail, case, sep="\n", flush=True)
    print(f"\n{ran} examples, {kernels} kernels, {time.monotonic() - start:.0f} s")
    for reason, times in count.most_common():
        print(f"{times:7d}  {reason}")
    return failures.total()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    given_ = parser.parse_args()
    return int(campaign(given_.examples, given_.seed, given_.jobs, given_.seconds, given_.first) > 0)


if __name__ == "__main__":
    sys.exit(main())
