"""Synchronising instructions, deleted or weakened one at a time: what the PTX executor notices.

Ten kernel sets, one of each form. In each, every instruction that orders something (barriers, fences, waits, arrivals,
commits, acquires and releases) goes, or orders less, and the kernels run on a few rows. A finding, a refusal or other
bits give the change away. What nothing gives away has to be in ``deletions.txt``, below the reason why the
instruction is redundant there.

    python tests/proof/deletions.py [FORM...]    tries all; exits with 1 if that differs from deletions.txt
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lngen.compiler.emit import emit
from lngen.compiler.headers import bundled
from lngen.compiler.interpret import interpret
from lngen.compiler.lower import Plan, lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import PtxError
from lngen.proof.check.inputs import random_inputs, same_bits
from lngen.proof.ptx import run_plan
from schedules import cp_async, multipass, registers, tma, unaligned

KNOWN = Path(__file__).with_name("deletions.txt")


@dataclass(frozen=True)
class Case:
    """A kernel set, and the numbers of rows it runs on: few, so that some stages stay empty, and many."""

    spec: str
    schedule: Schedule
    rows: tuple[int, ...]


CASES = {
    "registers": Case("layernorm.fwd:d=1000,dtype=f32", registers(64, 2, 4), (5,)),
    "prefetch": Case("layernorm.bwd:d=740,dtype=f32,blocks=3", registers(64, 8, 4, "prefetch"), (50,)),
    "cp_async": Case("layernorm.bwd:d=740,dtype=f32,blocks=1", cp_async(64, 8, 4, 2), (28,)),
    "tma": Case("rmsnorm.bwd:d=740,dtype=f32,blocks=3", tma(64, 8, 4, 2, "store"), (60,)),
    "cluster": Case("layernorm.bwd:d=4100,dtype=f32,blocks=4", tma(128, 1, 4, 2, cluster=2), (12,)),
    "tma_unaligned": Case("layernorm.fwd:d=171,dtype=bf16", unaligned(16, 2, 1, 3, "cached", grid=2), (2, 6, 10, 31)),
    "multipass": Case("layernorm.bwd:d=8202,dtype=f32,save=none,blocks=2", multipass(256, 2), (4,)),
    "dynamic": Case(
        "layernorm.fwd:d=4100,dtype=f32", tma(64, 2, 4, 2, "regs early dynamic", cluster=2, grid=2), (1, 5, 19)
    ),
    "single launch": Case("layernorm.bwd:d=740,dtype=f32,blocks=3", registers(64, 8, 4, "single"), (30,)),
    "columns": Case("layernorm.bwd:d=4102,dtype=f32,wrt=gamma+beta", registers(512, 1, 2), (70,)),
}


@dataclass(frozen=True)
class Change:
    """One instruction of a PTX text, by its line, and what stands there instead; ``name`` says which it is."""

    line: int
    old: str
    new: str
    name: str


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
    count = Counter[str]()
    for number, line in enumerate(ptx.splitlines()):
        text = line.strip()
        code = re.sub(r"^@!?\S+\s+", "", text)
        if not text.endswith(";") or text.startswith("//"):
            continue
        opcode = re.split(r"[\s;]", code, maxsplit=1)[0]
        count[opcode] += 1
        name = f"{opcode} {count[opcode]}"
        if DELETED.match(code):
            yield Change(number, text, "", f"{name} -> nothing")
        if wait := WAIT.match(code):
            yield Change(number, text, f"setp.eq.u32 {wait[1]}, 0, 0;", f"{name} -> true at once")
        for pattern, weaker in WEAKER:
            if re.match(pattern, code):
                yield Change(
                    number, text, re.sub(pattern, weaker, text, count=1), f"{name} -> {re.sub(pattern, weaker, opcode)}"
                )


@dataclass(frozen=True)
class Twin:
    """A case, planned and compiled."""

    plan: Plan
    source: str
    ptx: str

    def gives_away(self, ptx: str, rows: int) -> str:
        """What shows that another PTX is wrong; nothing if nothing does."""
        inputs = random_inputs(self.plan.spec, rows)
        try:
            outcome = run_plan(self.plan, inputs, source=self.source, ptx=ptx, stop=True)
        except PtxError:
            return "refused"
        if outcome.findings:
            return outcome.findings[0].kind
        expected = interpret(self.plan.graph, inputs)
        return "bits" if any(not same_bits(outcome.results[n], v).all() for n, v in expected.items()) else ""


@cache
def twin(form: str) -> Twin:
    """The case of a form."""
    plan = lower(parse_spec(CASES[form].spec), CASES[form].schedule)
    source = bundled(emit(plan))
    return Twin(plan, source, compile_ptx(source, "sm_90", lines=True))


def noticed(form: str, change: Change | None) -> str:
    """What gives a change away, many rows first; nothing if nothing does."""
    lines = twin(form).ptx.splitlines()
    if change is not None:
        lines[change.line] = lines[change.line].replace(change.old, change.new)
    text = "\n".join(lines) + "\n"
    return next(filter(None, (twin(form).gives_away(text, rows) for rows in CASES[form].rows[::-1])), "")


def known() -> dict[str, str]:
    """What stays unnoticed, and why: each reason stands above the changes it is for."""
    found, reason, fresh = dict[str, str](), "", False
    for line in KNOWN.read_text().splitlines():
        if line.startswith("#"):
            reason, fresh = (reason + " " if fresh else "") + line[1:].strip(), True
        elif line:
            assert reason, f"'{line}' has no reason"
            found[line], fresh = reason, False
    return found


def main(forms: list[str]) -> int:
    """Tries every change; says what is unnoticed without a reason, and what has a reason and is noticed."""
    total, unnoticed = 0, set[str]()
    forms = forms or [*CASES]
    for form in forms:
        assert noticed(form, None) == "", f"{form}: {noticed(form, None)} without a change"
        for change in changes(twin(form).ptx):
            found = noticed(form, change)
            total += 1
            unnoticed |= set() if found else {f"{form}: {change.name}"}
            print(f"{form}: {change.name}: {found or 'not noticed'}", flush=True)
    reasons = {name for name in known() if name.partition(":")[0] in forms}
    print(f"{total} changes, {len(unnoticed)} not noticed.")
    for text, names in (("Without a reason", unnoticed - reasons), ("Noticed after all", reasons - unnoticed)):
        for name in sorted(names):
            print(f"{text}: {name}")
    return int(unnoticed != reasons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
