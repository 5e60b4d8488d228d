"""The kernels without parts: what is left out is, and what is left compiles. How fast they are is measured on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import floors
from lngen.bench.records import Record
from lngen.bench.store import Saved, write_json
from lngen.emit import emit

POINTS = {
    "registers": ("layernorm.fwd:d=512,dtype=bf16", "form=registers,threads=8,rows=4,vec=8,resident=12,keep=yes", "A"),
    "ragged": (
        "layernorm.fwd:d=4093,dtype=f16",
        "form=ragged,threads=128,rows=4,vec=1,stages=3,owners=132,bulk_store=yes,hold=yes",
        "A",
    ),
    "spread": (
        "layernorm.fwd:d=65536,dtype=bf16",
        "form=bulk,threads=128,rows=3,vec=8,stages=3,cluster=8,owners=15,keep=yes,hold=yes,soon=yes",
        "AB",
    ),
    "told": (
        "layernorm.fwd:d=32768,dtype=f32",
        "form=bulk,threads=64,rows=3,vec=4,stages=2,cluster=8,owners=15,keep=yes,hold=yes,soon=yes,claim=yes",
        "A",
    ),
    "columns": ("layernorm.bwd:d=768,dtype=bf16", "form=bulk,threads=32,rows=16,vec=8,stages=2,keep=yes", "AC"),
    "cluster": (
        "layernorm.bwd:d=32768,dtype=f16",
        "form=bulk,threads=128,rows=2,vec=8,stages=2,cluster=8,keep=yes,hold=yes,soon=yes",
        "ABC",
    ),
}


def point(name: str) -> floors.Point:
    spec, schedule, _ = POINTS[name]
    return floors.Point(spec, 100, 0.9, 0.8, schedule)


@pytest.mark.parametrize("name", POINTS)
def test_parts_are_left_out(name: str) -> None:
    plan = floors.lowered(point(name))
    texts = {letter: text for letter in "ABC" if (text := floors.without(letter, plan))}
    assert "".join(texts) == POINTS[name][2]
    whole, (result, given) = emit(plan), {"fwd": ("y", "x"), "bwd": ("dx", "dy")}[plan.spec.direction]
    assert len({whole, *texts.values()}) == 1 + len(texts)
    for letter, text in texts.items():
        assert f"{result}_out[i] = {given}" in text
        assert f"{result}_out[i] = {result};" not in text
        assert "fmaf(xhat" not in text
        assert ("lane == cluster_rank()" in text) == (letter in "BC" and plan.schedule.cluster > 1)
        assert ("if (rows >= 0) return;" in text) == (letter == "C")


@pytest.mark.parametrize("name", ["spread", "cluster"])
def test_what_is_left_compiles(name: str) -> None:
    plan = floors.lowered(point(name))
    for letter in POINTS[name][2]:
        binary = floors.Without(letter).compiled(plan, "sm_90")
        assert len(binary.resources) == len(plan.kernels)
        assert not any(r.spills for r in binary.resources.values())


def test_the_points_are_those_below_their_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, schedule, _ = POINTS["cluster"]

    def record(rows: int, fraction: float, met: bool, provider: str = "lngen") -> Record:
        return Record(
            spec, "layernorm", "bwd", rows, 32768, "f16", provider, us_median=1.0, fraction=fraction,
            schedule=schedule, tensor_bytes=rows * 65536, target=0.9, met=met,
        )  # fmt: skip

    path = tmp_path / "records.json"
    write_json(path, Saved([record(256, 0.8, False), record(128, 0.6, False), record(512, 0.95, True)]))
    points = floors.missed([str(path)])
    assert [(p.rows, p.run) for p in points] == [(128, 0.6), (256, 0.8)]
    points[0].fractions = {"now": 0.61, "A": 0.7, "B": 0.92, "C": 0.95}
    points[0].counters = {"read": 2 * 128 * 65536, "write": 0.0, "l2": 6 * 128 * 65536, "dram": 25.0, "issue": 40.0}
    points[0].counters |= {"regs": 255.0, "wait": 0.5, "barrier": 1.5, "membar": 0.0}
    floors.show(points)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split("|")[0].split() == ["bwd", "f16", "128x32768", "8"]
    assert line.split("|")[1:3] == [" 0.900 0.600 0.610 ", " 0.700 0.920 0.950  A.. "]
    assert line.split("|")[3:] == [" 1.000 0.000   25    40 2.00  255 ", " barrier 1.50, wait 0.50"]
