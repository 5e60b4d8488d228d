"""If these fail, the wrong thing is timed: another graph or shape, or its bytes, ceiling or target are others."""

from pathlib import Path

import pytest

from lngen.cli.bench import parse_shapes, tasks
from lngen.compiler.ir import DType
from lngen.compiler.spec import parse_spec
from lngen.lab.bench.tasks import (
    DESIGN,
    GRIDS,
    LATENCY,
    WIDTHS,
    Task,
    ceiling_bytes,
    ceiling_of,
    floor_bytes,
    gb_s,
    is_ceiling,
    rows_for,
    split_graphs,
    target_fraction,
)
from own_graphs import own


@pytest.mark.parametrize(("text", "rows", "want"), [
    ("layernorm.fwd:d=4096,dtype=bf16", 4096, 2 * 4096 * 4096 * 2 + 2 * 4096 * 2 + 8 * 4096),
    ("layernorm.bwd:d=1024,dtype=f32", 32768, 3 * 32768 * 1024 * 4 + 3 * 1024 * 4 + 8 * 32768),
    ("rmsnorm.fwd:d=64,dtype=bf16", 1048576, 2 * 64 * 1048576 * 2 + 64 * 2 + 4 * 1048576),
    ("rmsnorm.bwd:d=256,dtype=f16,weight=f32", 7, 3 * 7 * 256 * 2 + 2 * 256 * 4 + 4 * 7),
])  # fmt: skip
def test_floor_bytes_by_hand(text: str, rows: int, want: int) -> None:
    assert floor_bytes(parse_spec(text), rows) == want


# Read and written [M, D] tensors, and the ceiling whose share of writes is the nearer.
RATIOS = {
    ("add_rmsnorm", "fwd"): (2, 2, "copy"), ("gated", "fwd"): (2, 1, "add"), ("gated", "bwd"): (3, 2, "add"),
    ("scaled", "fwd"): (1, 1, "copy"), ("scaled", "bwd"): (2, 1, "add"), ("loss", "fwd"): (2, 0, "add"),
    ("loss", "bwd"): (2, 2, "copy"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "direction"), RATIOS)
def test_the_ceiling_has_the_nearer_share_of_writes(name: str, direction: str) -> None:
    reads, writes, ceiling = RATIOS[name, direction]
    assert ceiling_bytes(own(name, direction), 10) == (reads + writes) * 10 * 24 * 4
    assert ceiling_of(own(name, direction)) == ceiling


def test_a_ceiling_moves_the_large_arrays() -> None:
    assert ceiling_bytes(parse_spec("layernorm.fwd:d=8,dtype=bf16,out=f32"), 10) == 80 * 6
    assert ceiling_bytes(parse_spec("rmsnorm.bwd:d=8,dtype=f32"), 10) == 80 * 12
    assert gb_s(67_108_864, 15.6) == pytest.approx(4301.9, abs=0.1)


def test_forward_and_backward_have_a_ceiling_each() -> None:
    task = Task((own("gated", "fwd"), own("gated", "bwd")), 10)
    assert (task.ceiling, Task((own("loss"), own("loss", "bwd")), 10).ceiling) == ("add+add", "add+copy")
    assert all(is_ceiling(name) for name in ("add+copy", "copy+copy", "add-overlapped"))


@pytest.mark.parametrize(("graph", "label"), [
    ("rmsnorm", "rmsnorm"),
    ("rmsnorm:weight=f32", "rmsnorm:weight=f32"),
    ("rmsnorm:weight=bf16,eps=1e-05", "rmsnorm"),  # the defaults
    ("layernorm:gamma=no,wrt=x", "layernorm:gamma=no,wrt=x"),
    ("bench_norms:add_rmsnorm", "add_rmsnorm@"),
    ("bench_norms:add_rmsnorm:gamma=no,out=f32", "add_rmsnorm@"),
    ("my.graph", "add_rmsnorm@"),
    ("./my.graph:wrt=x", "add_rmsnorm@"),
])  # fmt: skip
def test_a_graph_is_named_as_in_a_spec(graph: str, label: str, folder: Path) -> None:
    """The record has the name with its digest and the keys that are not defaults."""
    (task,) = tasks([graph], "bwd", "" if "my.graph" in graph else "bf16", "design", [(4, 16)])
    keys = ",".join(k for k in graph.rpartition(":")[2].split(",") if "=" in k)
    assert (task.graph == label) if "@" not in label else task.graph.startswith(label)
    if "@" in label:
        assert task.graph.partition(":")[2] == ",".join(
            k for k in ("out=f32", "gamma=no", "wrt=x") if k in keys.split(",")
        )
    assert task.spec.startswith(f"{task.graph.partition(':')[0]}.bwd:d=16,dtype=")
    assert task.dtype is (DType.F32 if "my.graph" in graph else DType.BF16)  # a file declares its own
    assert task.spec == str(task.specs[0])


def test_keys_of_a_backward_are_of_a_backward(folder: Path) -> None:
    forward, backward, both = tasks(["rmsnorm:wrt=x,eps=0.1"], "fwd,bwd,both", "f32", "design", [(4, 16)])
    assert (forward.graph, backward.graph) == ("rmsnorm:eps=0.1", "rmsnorm:eps=0.1,wrt=x")
    assert (both.spec, both.graph) == ("rmsnorm.both:d=16,dtype=f32,eps=0.1,wrt=x", backward.graph)


def test_several_graphs() -> None:
    given = ["layernorm, rmsnorm", "rmsnorm:weight=f32,out=f32", "a.graph:wrt=x", "m:f"]
    assert split_graphs(given) == ["layernorm", "rmsnorm", *given[1:]]


def test_grids() -> None:
    assert GRIDS["design"].shapes(DType.BF16) == DESIGN
    classic = GRIDS["classic"].shapes(DType.F16)
    assert (classic[0], classic[1], classic[-1], len(classic)) == ((4096, 1024), (4096, 1536), (4096, 15872), 30)
    for dtype in (DType.BF16, DType.F32):
        grid = GRIDS["targets"].shapes(dtype)
        assert len(grid) == len({*grid}) == 5 * 21
        assert {d for _, d in grid} == {*WIDTHS} >= {64, 128, 1000, 4093, 256, 768, 7168, 12288, 131072}
        sizes = [rows * d * dtype.size / 2**20 for rows, d in grid]
        assert sizes == pytest.approx([8, 16, 32, 64, 256] * 21, rel=0.02)
        assert {*GRIDS["quick"].shapes(dtype)} < {*grid}
    assert rows_for(8 << 20, 12288, DType.BF16) == 341
    assert rows_for(8, 12288, DType.BF16) == 1
    assert GRIDS["targets"].dtypes == ("f16", "bf16", "f32")


@pytest.mark.parametrize(("direction", "dtype", "mb", "d", "want"), [
    ("fwd", "bf16", 8, 1024, 0.94),
    ("bwd", "f16", 8, 1024, 0.68),
    ("bwd", "f32", 256, 1024, 0.95),
    ("bwd", "f32", 4096, 1024, 0.95),
    ("bwd", "bf16", 128, 1024, 0.925),  # half way between 64 and 256 in logarithms
    ("fwd", "bf16", 32, 4093, 0.8075),
    ("bwd", "bf16", 64, 64, 0.765),
    ("fwd", "bf16", 64, 128, 0.8245),
    ("fwd", "bf16", 64, 1000, 0.8245),
    ("fwd", "bf16", 64, 768, 0.97),
    ("fwd", "bf16", 7.9, 12288, 0.94),  # whole rows
    ("fwd", "bf16", 4, 1024, None),
    ("fwd", "f64", 64, 1024, None),
    ("both", "bf16", 64, 1024, None),
])  # fmt: skip
def test_targets(direction: str, dtype: str, mb: float, d: int, want: float | None) -> None:
    assert target_fraction(direction, dtype, int(mb * 2**20), d) == want


def test_shapes() -> None:
    assert parse_shapes("", "", "") == []
    assert parse_shapes("", "1,2", "8, 16") == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert parse_shapes("7x9", "", "") == [(7, 9)]


def test_tasks() -> None:
    assert [str(t) for t in tasks(["rmsnorm"], "fwd,both", "f32,bf16", "design", [(3, 8)])] == [
        "rmsnorm.fwd:d=8,dtype=f32 rows=3", "rmsnorm.fwd:d=8,dtype=bf16 rows=3",
        "rmsnorm.both:d=8,dtype=f32 rows=3", "rmsnorm.both:d=8,dtype=bf16 rows=3",
    ]  # fmt: skip
    assert [(t.rows, t.d, str(t.dtype)) for t in tasks(["layernorm"], "fwd", "", "design", [])] == [
        (m, d, "bf16") for m, d in DESIGN
    ]
    assert {str(t.dtype) for t in tasks(["layernorm"], "fwd", "", "targets", [])} == {"f16", "bf16", "f32"}
    found = tasks(["layernorm"], "bwd,both", "f32", "design", [(3, 8)], latency=True)
    assert [t.direction for t in found] == ["bwd"] * 10 + ["both"]
    assert {(t.rows, t.kind) for t in found[1:10]} == {(m, LATENCY) for m in (1, 16, 128)}
    assert str(found[1]).endswith("rows=1 latency")
    assert {t.kind for t in tasks(["layernorm"], "fwd", "", "none", [], latency=True)} == {LATENCY}
