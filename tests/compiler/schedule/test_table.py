"""The tables of measured schedules: which entry is near, whose table is first, and what follows from the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lngen.compiler.devices import Device, device_for, named
from lngen.compiler.problem import Schedule, is_legal
from lngen.compiler.schedule import candidates
from lngen.compiler.schedule.table import Key, Table, key_of, measured
from plans import BACKWARD, FORWARD, H200, ROWS, STAGED, problem_of


def test_entries_are_near_if_rows_are_alike() -> None:
    staged, rows = replace(STAGED, vec=1, grid=0), replace(ROWS, vec=1)
    table = Table("A", "sm_90", {Key("fwd", 2, 4096): {1024: str(staged)}, Key("fwd", 2, 4608): {1024: str(rows)}})

    def near(spec: str, size: int = 1024) -> list[Schedule]:
        return [entry for _, entry in table.near(problem_of(spec), size)]

    assert near(FORWARD) == [staged, rows]
    assert near("rmsnorm.fwd:d=5000,dtype=f16") == [rows, staged], "the nearest first"
    others = ["d=4096,dtype=f32", "d=4095,dtype=bf16", "d=8192,dtype=bf16", "d=3000,dtype=bf16"]
    for other in (BACKWARD, f"{BACKWARD},wrt=x", *(f"layernorm.fwd:{keys}" for keys in others)):
        assert near(other) == [], other
    assert near(FORWARD, 256) == []
    sets = Key("fwd", 2, 4104, sets=2)
    assert (sets.section, replace(sets, more=1, heavy=31).section) == (
        "fwd_by_2.2_bytes.4104", "fwd_and_1_of_31_by_2.2_bytes.4104",
    )  # fmt: skip
    heads = [key_of(problem_of(f"qk_rmsnorm.bwd:d=3840,dtype=bf16,k_heads=8,head={n}")).section for n in (128, 80)]
    assert heads == ["bwd_of_12.2_bytes.3840", "bwd_of_12_meeting_2.2_bytes.3840"]
    table = replace(table, entries={**table.entries, sets: {1024: str(rows)}})
    assert near("ada_layernorm.fwd:d=4096,dtype=bf16") == [rows, staged, rows], "those with inputs of sets, then others"
    assert near(FORWARD) == [staged, rows]


def test_a_gpu_takes_its_own_table_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one that of the GPU that stands for the arch; exactly this D in any table before a D nearby."""
    h100, other = named("h100"), replace(H200, name="NVIDIA GH200 480GB")

    def table(device: Device, threads: int, lines: dict[int, list[int]]) -> Table:
        line = str(replace(ROWS, vec=1, threads=threads))
        return Table(device.name, "sm_90", {Key("fwd", 2, d): dict.fromkeys(sizes, line) for d, sizes in lines.items()})

    shipped = (
        table(replace(H200, name="A"), 32, {4096: [16, 1024]}),
        table(h100, 128, {4096: [64, 1024], 4608: [1024]}),
        table(H200, 256, {4096: [1024], 4608: [8, 64]}),
        replace(table(h100, 512, {4096: [1024]}), arch="sm_80"),
    )
    monkeypatch.setattr("lngen.compiler.schedule.table.tables", lambda: shipped)

    def first(device: Device, size: int, d: int = 4096) -> int | None:
        return next((s.threads for s in measured(problem_of(f"layernorm.fwd:d={d},dtype=bf16"), size, device)), None)

    assert [first(device, 1024) for device in (h100, H200, other, device_for("sm_90a"))] == [128, 256, 256, 256]
    assert [first(device, 64) for device in (h100, H200, other)] == [128, 128, 128], "exactly this D"
    assert [first(device, 64, 4600) for device in (h100, H200)] == [128, 256]
    assert [first(h100, size) for size in (16, 8, 32)] == [32, 256, None], "what the own table lacks, another may have"


def test_rows_with_blocks_of_features_have_two_vectors_a_thread() -> None:
    """Where few rows wait for each fold in turn; with a scale for the row they have the threads of a norm."""
    text = "rmsnorm.fwd:d={},dtype=bf16,quant=e4m3,scales={}"
    threads = {
        (d, scales): next(measured(problem_of(text.format(d, scales)), 16, named("h100"))).threads
        for d in (2048, 4096, 7168)
        for scales in ("row", "block")
    }
    plain = {
        d: next(measured(problem_of(f"rmsnorm.fwd:d={d},dtype=bf16"), 16, named("h100"))).threads for d in (4096, 7168)
    }
    assert [threads[d, "block"] for d in (2048, 4096, 7168)] == [128, 256, 512]
    assert {d: threads[d, "row"] for d in plain} == plain


def test_an_entry_takes_the_grid_of_the_gpu_it_runs_on() -> None:
    p = problem_of("layernorm.fwd:d=12288,dtype=bf16")
    half = replace(H200, multiprocessors=66, clusters=(66, 33, 15, 7, 3))
    whole, less = (next(measured(p, 1024, device)) for device in (H200, half))
    assert whole.grid == 132 * whole.blocks_per_sm // whole.cluster
    assert replace(whole, grid=0) == replace(less, grid=0)
    assert less.grid == whole.grid // 2
    assert not [*measured(p, 1024, device_for("sm_100"))], "it was measured on another arch"


def test_a_measured_default_enumerates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> list[Schedule]:
        raise AssertionError("the space is enumerated")

    monkeypatch.setattr("lngen.compiler.schedule.model.roomy_space", refuse)
    for spec in (FORWARD, BACKWARD, "rmsnorm.fwd:d=4200,dtype=f16"):
        assert is_legal(next(candidates(problem_of(spec))), problem_of(spec))
    with pytest.raises(AssertionError, match="the space is enumerated"):
        next(candidates(problem_of("layernorm.fwd:d=4096,dtype=f64")))
