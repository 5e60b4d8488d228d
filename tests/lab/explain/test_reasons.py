"""Why a schedule: every reason is confirmed by legality, by the records, or by the model's own numbers."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from commands import prints
from explained import H200, subject_of
from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import Device, named
from lngen.compiler.problem import ANY, Schedule, check, check_arch, parse_schedule
from lngen.compiler.problem.footprint import most_blocks
from lngen.compiler.problem.schedule import FORMS
from lngen.compiler.schedule import workload
from lngen.compiler.schedule.model import estimates, features
from lngen.compiler.schedule.space import FIELDS, Schedules, roomy_space
from lngen.compiler.schedule.table import key_of, tables
from lngen.compiler.spec import Spec
from lngen.config import data_dir
from lngen.errors import MissingError, ScheduleError
from lngen.files import sha256
from lngen.lab.explain import explain
from lngen.lab.explain.reasons import changed, reasons, why_not
from lngen.lab.explain.section import Subject, Text
from lngen.lab.tune import trials
from lngen.lab.tune.recorded import RECORDED, STATED, Point, points
from own_graphs import own
from plans import BACKWARD, FORWARD

CASES: dict[str, tuple[Spec | str, str, int | None, Device]] = {
    "staged": (FORWARD, "", 4096, H200),
    "column sums": (BACKWARD, "", None, H200),
    "cluster": ("layernorm.fwd:d=65536,dtype=bf16", "", None, H200),
    "multipass": ("rmsnorm.bwd:d=65536,dtype=f32", "form=multipass,threads=512,rows_per_block=1,vec=4", 264, H200),
    "registers": ("layernorm.fwd:d=64,dtype=f32", "", 20000, H200),
    "odd": ("rmsnorm.fwd:d=1001,dtype=bf16", "", None, H200),
    "own graph": (own("gated", "bwd", d=520), "", None, H200),
    "few rows": (own("loss"), "", 64, H200),
    "no bulk copies": (FORWARD, "", None, named("a100")),
    "another GPU": (BACKWARD, "", 8192, replace(named("h100"), name="NVIDIA H100 PCIe")),
}


@cache
def explained(case: str) -> tuple[Subject, dict[str, Any], str]:
    """The subject, the section's data, and its text."""
    one = subject_of(*CASES[case])
    section = reasons(one)
    return one, dict(section.data), str(section)


SENTENCES = {
    "a table's": ("layernorm.bwd:d=4096,dtype=bf16", ""),
    "the model's": ("cross_entropy.bwd:d=32000,dtype=f32", ""),
    "a user's": (FORWARD, "threads=256"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_sentences_are_short(case: str) -> None:
    """At most 25 words, each of one idea; lists of operations and ranges are no sentences."""
    spec, change = SENTENCES[case]
    one = replace(subject_of(spec, change, None, H200), changed=change)
    sections = [*explain(one), why_not(one, "blocks_per_sm=3")]
    texts = [b.text for s in sections for b in s.blocks if isinstance(b, Text)]
    sentences = [s for text in texts for s in re.split(r"(?<=[.:]) (?=[A-Z'])", text)]
    assert [s for s in sentences if len(s.split()) > 25 and not re.match(r"Operations|Ranges|Asked|Its parts", s)] == []
    assert len(sentences) > 20


def test_what_one_block_reduces_has_no_schedule() -> None:
    """The model predicts the time of rows."""
    one = subject_of("cross_entropy.fwd:d=128256,target=index,vocabulary=none", "", None, H200)
    for section in (reasons(one), why_not(one, "threads=64")):
        assert "One block reduces vectors to numbers, with every schedule alike." in str(section)
        assert "predict" not in str(section)


@cache
def recorded() -> list[Point]:
    files = (data_dir("generated") / name for names in RECORDED.values() for name in names)
    return points([path for path in files if path.exists()])


def flat(section: object) -> str:
    return " ".join(str(section).split())


def us(one: Subject, rows: int, *texts: str) -> list[float]:
    """What the model expects; of form multipass, of a kernel without column sums."""
    found = []
    for s in (parse_schedule(text, ANY) for text in texts):
        p = replace(one.problem, column_sums=0) if s.form == "multipass" else one.problem
        found += estimates(features(Schedules.of([s]), p, rows, one.device), one.device).tolist()
    return found


def broken(other: Schedule, one: Subject) -> str:
    """The message of legality."""
    try:
        check(other, one.problem)
        check_arch(other, one.device.arch)
    except ScheduleError as error:
        return str(error)
    room = most_blocks(other, one.problem, one.device)
    return f"a multiprocessor has room for {room} such blocks" if other.blocks_per_sm > room else ""


@pytest.mark.parametrize("case", CASES)
def test_every_field_has_a_true_reason(case: str) -> None:
    one, data, text = explained(case)
    assert [*dict.fromkeys(line["field"] for line in data["fields"])] == [*FIELDS]
    together = [p.times for p in recorded() if p.spec == str(one.plan.spec)]
    most = math.exp(STATED[key_of(one.problem).direction].apart_most)
    for line in data["fields"]:
        other, numbers = parse_schedule(line["neighbour"], ANY), line["numbers"]
        if line["kind"] == "rule":
            assert line["sentence"] in broken(other, one)
            assert line["sentence"]
            continue
        assert not broken(other, one)
        assert getattr(other, line["field"]) == line["other"] != getattr(one.schedule, line["field"])
        if line["kind"] == "measured":
            assert numbers in [(times.get(other), times.get(one.schedule)) for times in together]
            continue
        assert numbers == pytest.approx(us(one, data["rows"], line["neighbour"], data["chosen"]))
        assert line["kind"] == ("predicted" if max(numbers) / min(numbers) > most else "unknown")
    assert all(f"\n  {name}=" in text for name in FIELDS)
    assert data["space"]["legal"] == len(roomy_space(one.problem, one.device))
    shown = [data["chosen"], *(other["schedule"] for other in data["others"])]
    assert not any(broken(parse_schedule(s, ANY), one) for s in shown)
    found = [data["predicted_us"], *(other["predicted_us"] for other in data["others"])]
    assert found == pytest.approx(us(one, data["rows"], *shown), abs=1e-4)
    parts = data["parts"]
    assert sum(parts.values()) == pytest.approx(found[0])


def test_reasons_are_of_every_kind() -> None:
    kinds = {case: {line["kind"] for line in explained(case)[1]["fields"]} for case in CASES}
    assert kinds["column sums"] == {"rule", "measured", "predicted", "unknown"}
    assert all({"rule", "unknown"} <= found for found in kinds.values())
    elsewhere = flat(explained("another GPU")[2])
    assert "measured +32.4 % on NVIDIA H200" in elsewhere
    assert "On the NVIDIA H100 PCIe the error is not known" in elsewhere
    assert "form=tma needs sm_90 or later" in flat(explained("no bulk copies")[2])


def test_another_form_comes_with_the_fewest_changes() -> None:
    for one, data, _ in map(explained, ("staged", "multipass")):
        legal = {line["other"]: line["neighbour"] for line in data["fields"] if line["kind"] != "rule"}
        counts = Counter[str]()
        for s in roomy_space(one.problem, H200):
            differ = sum(getattr(s, name) != getattr(one.schedule, name) for name in FIELDS if name != "grid")
            counts[s.form] = min(counts.get(s.form, 99), differ)
            counts[str(s)] = differ
        assert legal.keys() & {*FORMS}
        assert all(counts[legal[form]] == counts[form] for form in legal.keys() & {*FORMS})


def test_the_sources_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ("staged", "column sums", "cluster", "registers"):
        one, data, _ = explained(case)
        most, source = workload(one.problem, one.expected, H200), data["source"]
        (table,) = [t for t in tables() if t.file == source["table"]]
        assert (source["kind"], source["key"], source["class"]) == ("table", asdict(key_of(one.problem)), most)
        assert parse_schedule(table.entries[key_of(one.problem)][most], ANY).kind == one.schedule.kind
    assert explained("no bulk copies")[1]["source"]["kind"] == "model"
    assert "You chose this schedule, by form=multipass" in flat(explained("multipass")[2])
    first, spilled = str(subject_of(own("gated", d=520), rows=None).schedule), KernelSet.spilled
    monkeypatch.setattr(KernelSet, "spilled", lambda k, *a: spilled(k, *a) + 8 * (str(k.plan.schedule) == first))
    section = reasons(subject_of(own("gated", d=520), rows=None))
    assert section.data["source"]["spilled"] == {first: 8}
    assert f"It tried {first} as well. That spills 8 bytes" in flat(section)


def test_the_users_own_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without = flat(explained("column sums")[2])  # which is kept for other tests
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path))
    one = subject_of(BACKWARD, rows=8192)
    text, kernel = str(one.schedule), sha256(one.kernels.bundle.encode())[:16]
    line = trials.Trial(BACKWARD, 8192, H200.name, "NVRTC 99", text, kernel, 0, "correct", us_median=2.0, in_turn=True)
    fast, stages = text.replace("threads=128", "threads=256"), text.replace("stages=2", "stages=3")
    crash = {"schedule": stages, "status": "runtime", "us_median": None, "reason": "a crash"}
    others = [trials.from_json(line.to_json() | d) for d in ({"schedule": fast, "us_median": 1.0}, crash)]
    (tmp_path / "tune").mkdir()
    trials.append(tmp_path / "tune" / "trials.jsonl", [line, *others])
    monkeypatch.setattr(KernelSet, "cubin", Mock(side_effect=MissingError("no compiler")))
    section = reasons(one)
    shown = flat(section)
    assert section.data["runs"][0] == "trials.jsonl: NVIDIA H200, 8192 rows, NVRTC 99, calls in turn, 2 schedules"
    assert "measured on the NVIDIA H200 with 8192 rows (trials.jsonl, NVRTC 99, calls in turn)" in shown
    assert "The chosen one took 2 us, place 2 of 2 by time. The CUDA text that was measured is today's." in shown
    assert "256: measured -50.0 %" in shown
    assert "3: failed: runtime" in shown
    assert {(t["schedule"], t["measured_us"], t["status"]) for t in section.data["trials"]} == {
        (text, 2.0, "correct"), (fast, 1.0, "correct"), (stages, None, "runtime")
    }  # fmt: skip
    assert why_not(one, "stages=3").data["sentence"].startswith("It failed: runtime, a crash. It ran on")
    assert "It is faster. It took 1 us against 2 us: -50.0 %." in flat(why_not(one, "threads=256"))
    assert "The CUDA text that was measured is an earlier one." in without


@pytest.mark.parametrize("asked", ["threads=256", "threads=64", "form=cp_async", "tma_store=yes", "threads=128"])
def test_why_not_has_the_models_numbers_and_the_compilers(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None for what is illegal, or chosen already; without a compiler none of the compiler."""
    one = explained("column sums")[0]
    section = why_not(one, asked)
    if section.data["kind"] in ("rule", "same"):
        assert asked in ("tma_store=yes", "threads=128")
        return
    found, other = section.data["asked_numbers"], parse_schedule(section.data["asked"], ANY)
    assert [found["predicted_us"]] == pytest.approx(us(one, section.data["rows"], str(other)), abs=1e-4)
    used = one.compilation.kernels(other).cubin("sm_90").resources.values()
    most = {"registers": max(r.registers for r in used), "spilled": sum(r.spilled for r in used)}
    assert found["resources"] == most
    assert ("It spills" in flat(section)) == (most["spilled"] > 0)
    monkeypatch.setattr(KernelSet, "cubin", Mock(side_effect=MissingError("no compiler")))
    assert why_not(one, asked).data["asked_numbers"]["resources"] == {}


def test_the_ranking_has_the_same_times() -> None:
    one, data, _ = explained("column sums")
    listed = json.loads(prints("tune", BACKWARD, "--rows", "8192", "--ranking", "--json"))["ranking"]
    expected = us(one, 8192, *(line["schedule"] for line in listed))
    assert [line["predicted_us"] for line in listed] == pytest.approx(expected, abs=1e-3)
    times = {t["schedule"]: t["measured_us"] for t in data["trials"]}
    assert [line["measured_us"] for line in listed] == [times.get(line["schedule"]) for line in listed]
    assert sum(line["measured_us"] is not None for line in listed) > 20


def test_the_changes_of_a_ranking_lead_back() -> None:
    asked = "tune", "cross_entropy.bwd:d=32000,dtype=f32", "--ranking", "--top", "9", "--rows", "64,4096"
    listed = json.loads(prints(*asked, "--json"))["ranking"]
    tables, subject = prints(*asked).split("\n\n"), subject_of(asked[1], "", 64, H200)
    for first, text in ((0, tables[0]), (9, tables[1])):
        base = parse_schedule(listed[first]["schedule"], ANY)
        cells = [line.split("|")[3].strip() for line in text.splitlines() if line.startswith("| ")][1:]
        found = [changed(base, cell, subject.problem, H200) for cell in cells[1:]]
        assert [str(s) for s in found] == [line["schedule"] for line in listed[first + 1 : first + 9]]
