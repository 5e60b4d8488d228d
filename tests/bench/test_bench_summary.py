"""If these fail, a verdict is wrong or a table does not show what the records say."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench_fakes import RECORDS, bench_record, few_rows_records
from lngen.bench import figures, summary
from lngen.bench.records import HostRecord, Record, judge, summarise, unlike


def test_the_verdict_on_a_point() -> None:
    times = {"copy": 5.0, "lngen": 5.2, "torch": 10.0, "liger": 7.8, "quack": 1.0, "compile": None}
    notes = {"quack": "implausible: faster than the ceiling", "compile": "wrong: y is off"}
    point = [bench_record(n, us_median=us, fraction=us and 5.0 / us, note=notes.get(n, "")) for n, us in times.items()]
    judged = {r.provider: r for r in judge(point)}
    lngen = judged["lngen"]
    assert (lngen.tensor_bytes, lngen.target, lngen.met) == (8 << 20, 0.94, True)
    assert (lngen.best_peer, lngen.ratio) == ("liger", 1.5)
    others = [r for r in judged.values() if r is not lngen]
    assert {(r.target, r.met, r.best_peer, r.ratio) for r in others} == {(0.94, None, "", None)}
    slow = judge([replace(point[1], fraction=0.9399)])[0]
    assert (slow.met, slow.best_peer, slow.ratio) == (False, "", None)  # alone: no peer


def test_targets_are_of_the_two_norms() -> None:
    times = {"gb_s": 1.0, "us_median": 1.0, "fraction": 0.5}
    for graph, target in (("rmsnorm", 0.94), ("rmsnorm:weight=f32", None), ("gated@12345678", None)):
        record = judge([bench_record("lngen", graph=graph, **times)])[0]
        assert (record.target, record.met) == (target, None if target is None else False)
        assert (summarise([record])[0].ratio_target is None) == (target is None)
        assert summary.table_groups([record]) == [[record]]
        assert figures.pictures([record])[0].slug.startswith(graph.split("@")[0].replace(":", "-").replace("=", "-"))


def test_the_summary_counts_and_names_the_worst() -> None:
    points = [(4096, 20480, 0.99, 2.0), (4096, 4096, 0.90, 0.5), (32768, 1024, 0.90, 0.8), (4096, 2048, None, None)]
    records = []
    for rows, d, fraction, ratio in points:
        us = None if ratio is None else 10.0
        records.append(bench_record("lngen", rows, d, us_median=us, fraction=fraction, note="" if us else "failed: x"))
        records.append(bench_record("torch", rows, d, us_median=ratio and 10.0 * ratio))
    (found,) = summarise(judge(records))
    assert (found.points, found.met, found.missed, found.failed) == (4, 1, 2, 1)
    assert found.ratio_common == round(0.4**0.5, 4)
    assert (found.ratio, found.compared, found.ahead) == (round(0.8 ** (1 / 3), 4), 3, 1)
    assert found.worst == ("32768 x 1024 bf16 0.900 < 0.970", "4096 x 4096 bf16 0.900 < 0.950")
    assert found.slower == ("4096 x 4096 bf16 0.50 x torch", "32768 x 1024 bf16 0.80 x torch")
    assert summary.summary_lines([found]) == [
        "lngen, layernorm fwd, 4 points: 1 of 3 targets met; 0.93 times the best peer's speed (geometric mean, target "
        "1.15), 0.63 over D = 768 to 16384; at least as fast at 1 of 3; 1 without a time.",
        "  below target, as a fraction of the ceiling: 32768 x 1024 bf16 0.900 < 0.970, 4096 x 4096 bf16 0.900 < 0.950",
        "  slower than the best peer, as a fraction of its speed: 4096 x 4096 bf16 0.50 x torch, "
        "32768 x 1024 bf16 0.80 x torch",
    ]


@pytest.mark.parametrize(("less", "more", "digits", "shown"), [
    (0.9, 0.95, 3, ("0.900", "0.950")),
    (0.94984, 0.95, 3, ("0.9498", "0.9500")),
    (0.99612, 1.0, 2, ("0.996", "1.000")),
    (0.95, 0.95 + 1e-12, 3, ("0.950000000", "0.950000000")),
])  # fmt: skip
def test_two_numbers_that_differ_are_shown_to_differ(
    less: float, more: float, digits: int, shown: tuple[str, str]
) -> None:
    assert unlike(less, more, digits) == shown


def test_points_beyond_those_that_are_named_are_counted() -> None:
    missed = [bench_record("lngen", d=1024 * n, fraction=0.5, target=0.9, met=False) for n in range(1, 8)]
    assert summary.summary_lines(summarise(missed))[1].endswith("5120 bf16 0.500 < 0.900 and 2 more")


def test_calls_that_wait_have_a_summary_of_their_own() -> None:
    both = [
        bench_record(name, fraction=f, target=0.9, met=f > 0.9)
        for name, f in (("lngen", 1.0), ("lngen-overlapped", 0.8))
    ]
    in_turn, overlapping = summarise(both)
    assert (in_turn.provider, in_turn.met) == ("lngen", 1)
    assert (overlapping.provider, overlapping.met) == ("lngen-overlapped", 0)
    lines = summary.summary_lines([in_turn, overlapping])
    assert lines[0].startswith("lngen, layernorm fwd, 1 point: 1 of 1 targets met")
    assert lines[1].startswith("lngen-overlapped, layernorm fwd, 1 point: 0 of 1 targets met")


def cells(group: Sequence[Record]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Heads and rows of a table, as they are printed."""
    table = summary.table(group)
    return [str(c.header) for c in table.columns], [*zip(*(map(str, c.cells) for c in table.columns), strict=True)]


def test_the_table_has_shapes_down_and_providers_across() -> None:
    (group,) = summary.table_groups(RECORDS)
    heads, rows = cells(group)
    assert heads == ["rows x D", "copy", "lngen", "torch", "best peer", "lngen\n/ best peer"]
    assert rows == [
        ("4096 x 1024 ~", "2995", "2750 (0.92) †  ", "wrong", "-", "-"),
        ("4096 x 4096", "3650", "3490 (0.96)    ", "2800", "torch", "1.25"),
        ("32768 x 1024", "3908", "3765 (0.96) † *", "wrong", "-", "-"),
    ]
    assert summary.titles(group) == [
        "layernorm fwd bf16: GB/s of floor bytes; in brackets, the fraction of the ceiling, copy", summary.RATIO
    ]  # fmt: skip
    notes = summary.footnotes(RECORDS)
    assert notes[0].startswith("† below its target")
    assert (
        notes[1]
        == "torch, layernorm.fwd:d=1024,dtype=bf16 rows=4096 and 1 more: wrong: y is off by 2.0e+00 of its size"
    )
    assert notes[2] == "* lngen, layernorm.fwd:d=1024,dtype=bf16 rows=32768: implausible: x"
    assert notes[-1].startswith("~ the ceiling")


def test_without_peers_nothing_is_compared() -> None:
    group = [r for r in RECORDS if r.provider == "copy"]
    assert cells(group)[0] == ["rows x D", "copy"]
    assert len(summary.titles(group)) == 1


HEADS = {
    "copy-overlapped": "copy-\noverlapped",
    "lngen:form=tma,vec=8": "lngen:\nform=tma,\nvec=8",
    "torch": "torch",
}


@pytest.mark.parametrize("width", [50, 160])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_broken_and_never_cut(name: str, width: int) -> None:
    group = [bench_record(n, gb_s=1.0, us_median=1.0) for n in (name, *"abcdefg")]
    assert cells(group)[0][1] == HEADS[name]
    assert "…" not in summary.text(group, width=width)


def test_a_provider_without_a_time_is_left_out_and_said_once() -> None:
    told = summary.text(few_rows_records())
    assert "│ failed" not in told
    assert told.count("quack is left out, since it has no time here: failed: no such D\n") == 2
    assert "quack, layernorm.fwd" not in told
    assert summary.left_out([bench_record("torch")]) == {"torch": "not measured"}
    timed, failed = HostRecord("s", 16, "lngen", "cupy", 3.0), HostRecord("s", 16, "torch", "torch", note="no")
    assert [len(summary.host_table([r]).columns) for r in (timed, failed)] == [5, 6]


def test_earlier_records_say_which_calls_overlap() -> None:
    old = [bench_record(name, gb_s=1.0, us_median=1.0) for name in ("lngen", "lngen-serial")]
    assert summary.footnotes(old) == [summary.WAYS]
    assert summary.footnotes(old[:1]) == []
