"""Synchronising instructions, deleted or weakened one at a time: what the PTX executor notices.

Ten kernels, one of each form. In each, every instruction that orders something (barriers, fences, waits, arrivals,
commits, acquires and releases) goes, or orders less, and the kernel set runs on a few rows. A finding, a refusal or
other bits give the change away. What nothing gives away has to be in ``deletions.txt``, with the reason why the
instruction is redundant there.

    python tests/deletions.py [KERNEL...]    runs all of it, lists what stays unnoticed; 1 if that is not what is known
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lngen.check.inputs import random_inputs, same_bits
from lngen.emit import emit
from lngen.errors import PtxError
from lngen.interpret import interpret
from lngen.ir.numerics import Array
from lngen.lower import Plan, lower
from lngen.ptx import Outcome, run_plan
from lngen.schedule import Schedule
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

KNOWN = Path(__file__).with_name("deletions.txt")


@dataclass(frozen=True)
class Case:
    """A kernel set and the rows it runs on."""

    spec: str
    schedule: Schedule
    rows: int


def schedule(form: str, threads: int, rows: int, vec: int, **more: int | bool) -> Schedule:
    """A schedule by its form."""
    return replace(Schedule(form, threads, rows, vec), **more)  # type: ignore[arg-type]


CASES = {
    "registers": Case("layernorm.fwd:d=1000,dtype=f32", schedule("registers", 64, 2, 4), 5),
    "prefetch": Case("layernorm.bwd:d=740,dtype=f32,blocks=3", schedule("registers", 64, 8, 4, prefetch=True), 50),
    "async": Case("layernorm.bwd:d=740,dtype=f32,blocks=3", schedule("async", 64, 8, 4, stages=2), 60),
    "bulk": Case("rmsnorm.bwd:d=740,dtype=f32,blocks=3", schedule("bulk", 64, 8, 4, stages=2, bulk_store=True), 60),
    "cluster": Case("layernorm.bwd:d=4100,dtype=f32,blocks=4", schedule("bulk", 128, 1, 4, stages=2, cluster=2), 12),
    "ragged": Case(
        "layernorm.fwd:d=171,dtype=bf16",
        schedule("ragged", 16, 2, 1, stages=3, owners=2, bulk_store=True, keep=True),
        11,
    ),
    "stream": Case("layernorm.bwd:d=8202,dtype=f32,save=none,blocks=2", schedule("stream", 256, 1, 2), 4),
    "claimed": Case(
        "layernorm.fwd:d=4100,dtype=f32",
        schedule("bulk", 64, 2, 4, stages=2, cluster=2, owners=2, hold=True, soon=True, claim=True),
        19,
    ),
    "one launch": Case(
        "layernorm.bwd:d=740,dtype=f32,blocks=3", schedule("registers", 32, 8, 4, one_launch=True), 30
    ),
    "columns": Case("layernorm.bwd:d=4102,dtype=f32,wrt=gamma+beta", schedule("registers", 512, 1, 2), 70),
}


@dataclass(frozen=True)
class Change:
    """One instruction of a PTX text, by its line, and what stands there instead."""

    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old} -> {self.new or 'nothing'}"


DELETED = re.compile(
    r"(bar|barrier|membar|fence|griddepcontrol)\b|mbarrier\.(?!try_wait|test_wait)|cp\.async\.(bulk\.)?(commit|wait)"
)
WAIT = re.compile(r"mbarrier\.(?:try|test)_wait\S*\s+(\S+),")
WEAKER = (
    (r"((?:atom|red|ld|st|mbarrier|barrier\.cluster)\S*?)\.(?:acq_rel|acquire|release)\b", r"\1.relaxed"),
    (r"(mbarrier\.(?:arrive(?:\.expect_tx)?|(?:try|test)_wait(?:\.parity)?))(\.shared)", r"\1.relaxed.cta\2"),
    (r"((?:atom|red|ld|st|fence)\.\S*?)\.gpu\b", r"\1.cta"),
    (r"(mbarrier\S*?)\.cluster\b", r"\1.cta"),
)


def changes(ptx: str) -> Iterator[Change]:
    """Every instruction that orders something, without it and in weaker forms."""
    for number, line in enumerate(ptx.splitlines()):
        text = line.strip()
        code = re.sub(r"^@!?\S+\s+", "", text)
        if not text.endswith(";") or text.startswith("//"):
            continue
        if DELETED.match(code):
            yield Change(number, text, "")
        if wait := WAIT.match(code):
            yield Change(number, text, f"setp.eq.u32 {wait[1]}, 0, 0;")
        for pattern, weaker in WEAKER:
            if re.match(pattern, code):
                yield Change(number, text, re.sub(pattern, weaker, text, count=1))


@dataclass(frozen=True)
class Twin:
    """A case, planned and compiled, and the results it should have."""

    plan: Plan
    source: str
    ptx: str
    inputs: dict[str, Array]
    expected: dict[str, Array]

    def run(self, ptx: str) -> Outcome:
        """The plan with another PTX, up to its first finding."""
        return run_plan(self.plan, self.inputs, source=self.source, ptx=ptx, stop=True)


@cache
def twin(name: str) -> Twin:
    """The case called ``name``."""
    case = CASES[name]
    plan = lower(parse_spec(case.spec), case.schedule)
    inputs, source = random_inputs(plan.spec, case.rows), emit(plan)
    return Twin(plan, source, compile_ptx(source, "sm_90", lines=True), inputs, interpret(plan.graph, inputs))


def noticed(name: str, change: Change | None) -> str:
    """What gives a change away; nothing if nothing does."""
    t = twin(name)
    lines = t.ptx.splitlines()
    if change is not None:
        lines[change.line] = lines[change.line].replace(change.old, change.new)
    try:
        outcome = t.run("\n".join(lines) + "\n")
    except PtxError:
        return "refused"
    if outcome.findings:
        return outcome.findings[0].kind
    return "bits" if any(not same_bits(outcome.results[n], v).all() for n, v in t.expected.items()) else ""


def main(names: list[str]) -> int:
    import time
    total = unnoticed = 0
    for name in names or CASES:
        t0 = time.time()
        assert noticed(name, None) == "", noticed(name, None)
        print(f"{name}: {time.time() - t0:.2f}s", len(list(changes(twin(name).ptx))), flush=True)
        for change in changes(twin(name).ptx):
            total += 1
            found = noticed(name, change)
            print("   ", found or "-----", change.line + 1, change, flush=True)
            unnoticed += not found
    print(total, unnoticed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
