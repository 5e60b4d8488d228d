"""Fixtures of the benchmark's tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench_fakes
from lngen.lab.bench import timing
from own_graphs import own

MODULE = """
from lngen import D, M


def add_rmsnorm(b):
    h = b.input("x", M, D) + b.input("residual", M, D, dtype="f32")
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    gamma = b.optional_input("gamma", D)
    y = h * rstd
    b.output("y", y if gamma is None else y * gamma)
    b.output("h", h, dtype="f32")
    b.statistic(rstd, "rstd")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_fakes.quick(monkeypatch)


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 10_000)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a file of f32 and a module."""
    (tmp_path / "my.graph").write_text(str(own("add_rmsnorm", dtype="f32").forward()))
    (tmp_path / "bench_norms.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("bench_norms", None)
