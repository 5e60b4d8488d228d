"""If these fail, launches are timed wrongly: too few or warm argument sets, a drift that nobody sees."""

from collections.abc import Sequence
from typing import Any

import pytest

from bench_fakes import FakeTimer
from lngen.bench import timing
from lngen.bench.timing import Stats, drift, launch_count, set_count, time_side_by_side

MB = 1_000_000


@pytest.mark.parametrize(("set_mb", "l2_mb", "free_mb", "want"), [
    (16, 60, 100_000, 19),  # 300 MB
    (16, 100, 100_000, 32),  # 5 x L2
    (1, 60, 100_000, 64),  # at most
    (1000, 60, 100_000, 2),  # at least, so that a set is not found where it was left
    (100, 60, 350, 2),  # 60 % of what is free
    (1000, 60, 2000, 1),
])  # fmt: skip
def test_set_count(set_mb: int, l2_mb: int, free_mb: int, want: int) -> None:
    assert set_count(set_mb * MB, l2_mb * MB, free_mb * MB) == want


@pytest.mark.parametrize(
    ("us", "sets", "want"), [(10.0, 19, 817), (1000.0, 2, 8), (5000.0, 5, 5), (0.1, 64, 2048), (0.0, 1, 2000)]
)
def test_launch_count(us: float, sets: int, want: int) -> None:
    assert launch_count(us, sets) == want
    assert want % sets == 0


def test_statistics() -> None:
    stats = Stats.of([5.0, 1.0, 2.0, 3.0, 4.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0])
    assert (stats.median, stats.p10, stats.p90, stats.minimum) == (6.0, 2.0, 10.0, 1.0)
    assert drift([1.0, 1.0, 9.0, 1.1, 1.1]) == pytest.approx(0.1)
    assert drift([1.0]) == 0.0


def test_rounds_are_shuffled_over_all_sets() -> None:
    timer = FakeTimer({"copy": 4.0, "a": 8.0, "b": 100.0})
    found = time_side_by_side(
        {name: timer.launch(name) for name in timer.us}, 3, timer, reference="copy", rounds=10, warm_ms=20
    )
    first, *order = timer.replayed[-1]
    assert first == order[-1]  # one more, which finds an idle GPU
    rounds = [tuple(order[i : i + 3]) for i in range(0, 30, 3)]
    assert {frozenset(one) for one in rounds} == {frozenset(timer.us)}
    assert len({*rounds}) > 1  # nobody always follows the same other
    assert sum(names == ["copy", "a", "b"] for names in timer.replayed) == 1  # 24 ms of warm-up
    assert {name: s.median for name, s in found.stats.items()} == pytest.approx(timer.us)
    assert found.launches == {"copy": 2001, "a": 1002, "b": 81}
    for _, indices in timer.captured:
        assert indices == [i % 3 for i in range(len(indices))]
    assert not found.drifted
    assert not found.failures


def test_one_that_cannot_be_captured_stops_no_other() -> None:
    timer = FakeTimer({"copy": 4.0, "bad": None})
    found = time_side_by_side({name: timer.launch(name) for name in timer.us}, 2, timer, reference="bad", rounds=3)
    assert found.failures == {"bad": "RuntimeError: operation not permitted"}
    assert [*found.stats] == ["copy"]
    alone = time_side_by_side({"bad": timer.launch("bad")}, 2, timer)
    assert not alone.stats
    assert alone.failures


def test_the_calmest_rounds_count() -> None:
    moves = [0.3, 0.1, 0.2]

    class Calming(FakeTimer):
        def elapsed(self, graphs: Sequence[Any]) -> list[float]:
            ms = super().elapsed(graphs)
            if len(graphs) < 10:
                return ms
            move = moves.pop(0)
            return [one * (1 + move * (i > 10)) for i, one in enumerate(ms)]

    timer = Calming({"copy": 4.0})
    found = time_side_by_side({"copy": timer.launch("copy")}, 2, timer, reference="copy", rounds=20, repeats=2)
    assert (found.drift, found.repeats) == (pytest.approx(0.1), 2)
    assert found.stats["copy"].p90 == pytest.approx(4.4)


@pytest.mark.parametrize("us", [{"a": 4.0, "b": 5.0}, {"a": 5.0, "b": 4.0}, {"a": 4.0, "b": 4.0}, {"a": 4.0}])
def test_the_fastest_way_is_the_ceiling(us: dict[str, float]) -> None:
    timer = FakeTimer(us)
    ways = {name: timer.launch(name) for name in us}
    chosen = timing.fastest([*ways.values()], 3, timer)
    assert chosen is ways[min(us, key=lambda name: us[name])]
    assert [i for _, i in timer.captured] == [[0, 1, 2]] * (2 if len(us) > 1 else 0)
