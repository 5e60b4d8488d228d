"""If these fail, ``lngen bench`` measures, continues, prints or refuses something else than its options say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench_fakes import RECORDS, CpuGpu
from lngen.bench import host_time, store, summary, torch_gpu
from lngen.bench.argument_sets import Prepared
from lngen.bench.host_time import host_benchmark, host_times
from lngen.bench.peers import Torch
from lngen.bench.records import HostRecord
from lngen.bench.store import Saved, read_json, write_json
from lngen.bench.tasks import make_task
from lngen.cli.bench import bench
from lngen.errors import LngenError, MissingError, SpecError
from lngen.spec import Spec, parse_spec
from own_graphs import own

torch = pytest.importorskip("torch")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, few_sets: None) -> None:
    gpu = CpuGpu()
    monkeypatch.setattr(torch_gpu, "find_gpu", lambda: gpu)
    monkeypatch.setattr(store, "conditions", lambda device, method, settings: {"rounds": method.split()[0]})


def run_bench(*options: str) -> str:
    text = "--providers torch --direction fwd --dtype f32 --rounds 10"
    result = CliRunner().invoke(bench, [*text.split(), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_command_prints_and_writes(on_the_cpu: None, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    assert "layernorm fwd f32: GB/s" in run_bench("--shapes", "8x32", "--out", str(file))
    saved = read_json(file)
    assert [r.provider for r in saved.records] == ["copy", "torch"]
    assert saved.conditions == {"rounds": "10"}
    result = CliRunner().invoke(bench, ["--providers", "tirch"])
    assert isinstance(result.exception, LngenError)
    assert "Example: lngen bench" in CliRunner().invoke(bench, ["--help"]).output


def test_the_command_takes_own_graphs(on_the_cpu: None, folder: Path) -> None:
    options = "--graph layernorm,rmsnorm --graph rmsnorm:beta=yes --graph my.graph "
    options += "--graph bench_norms:add_rmsnorm:gamma=no"
    rest = "--providers torch --shapes 64x32 --direction fwd,bwd,both --dtype f32 --rounds 10 --out b.json --resume"
    first, second = (
        CliRunner().invoke(bench, [*options.split(), *rest.split(), *more], catch_exceptions=False)
        for more in (["--plot", "p.svg"], [])
    )
    assert (first.exit_code, second.exit_code) == (0, 0)
    saved = read_json(Path("b.json"))
    assert len(saved.records) == 5 * 3 * 2
    assert not [r.note for r in saved.records if r.note and r.graph != "rmsnorm"]  # which has no operator on a CPU
    graphs = list(dict.fromkeys(r.graph.split("@")[0] for r in saved.records))
    assert graphs == ["layernorm", "rmsnorm", "rmsnorm:beta=yes", "add_rmsnorm"]
    assert len({r.graph for r in saved.records}) == 5
    assert {r.target for r in saved.records} == {None}  # too small
    digest = next(r.graph for r in saved.records if r.graph.startswith("add_rmsnorm@"))
    assert digest in first.output
    assert len([*folder.glob("p-*.svg")]) == 15
    assert [*folder.glob(f"p-{digest.replace('@', '-')}-*")]
    assert len(json.loads(Path("b.json").read_text())["runs"]) == 1  # nothing was measured twice


def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(on_the_cpu: None, tmp_path: Path) -> None:
    options = ["--providers", "torch", "--shapes", "8x32", "--out", str(tmp_path / "b.json"), "--plot", "x.gif"]
    result = CliRunner().invoke(bench, options)
    assert isinstance(result.exception, LngenError)
    assert not [*tmp_path.iterdir()]


def test_the_command_continues_a_file(on_the_cpu: None, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    options = ["--shapes", "8x32,9x32", "--out", str(file), "--resume"]
    output = run_bench(*options, "--seconds", "0")
    assert "2 of 2 points are left; the same command with --resume measures them." in output.replace("\n", " ")
    assert read_json(file).records == []
    assert "are left" not in run_bench(*options)
    first = file.read_bytes()
    run_bench(*options)
    assert file.read_bytes() == first
    run_bench("--shapes", "10x32", "--out", str(file), "--resume")
    assert [r.rows for r in read_json(file).records] == [8, 8, 9, 9, 10, 10]


def test_a_run_that_adds_records_is_added(on_the_cpu: None, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    run_bench("--shapes", "8x32", "--out", str(file), "--commit", "one")
    run_bench("--shapes", "8x32", "--out", str(file), "--commit", "none", "--resume")
    run_bench("--shapes", "9x32", "--out", str(file), "--commit", "two", "--resume")
    assert [run["commit"] for run in read_json(file).runs] == ["one", "two"]


def test_each_point_is_in_the_file_at_once(on_the_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sizes = tmp_path / "b.json", []
    prepare = Torch.prepare

    def looking(self: Torch, case: Any) -> Prepared:
        sizes.append(len(read_json(file).records) if file.exists() else 0)
        return prepare(self, case)

    monkeypatch.setattr(Torch, "prepare", looking)
    run_bench("--shapes", "8x32,9x32,10x32", "--out", str(file))
    assert sizes == [0, 2, 4]


def test_files_are_shown_again_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_gpu, "device_count", lambda: 0)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_json(one, Saved(RECORDS, {}, [HostRecord("s", 16, "lngen", "cupy", 3.0, 2.9, 3.1)]))
    write_json(two, Saved([replace(r, direction="bwd", spec=r.spec.replace("fwd", "bwd")) for r in RECORDS]))
    options = ["--from", str(one), "--from", str(two), "--plot", str(tmp_path / "x.svg")]
    result = CliRunner().invoke(bench, options, catch_exceptions=False)
    assert "layernorm fwd bf16" in result.output
    assert "layernorm bwd, 3 points" in result.output
    assert "host time per call" in result.output
    assert len([*tmp_path.glob("x-layernorm-*.svg")]) == 2


def test_host_times_leave_the_waiting_out() -> None:
    now, order = [0.0], []

    def spend(name: str, us: float) -> None:
        now[0] += us * 1e-6
        order.append(name)

    def fail() -> None:
        raise MissingError("no GPU")

    calls = {"a": lambda: spend("a", 3.0), "bad": fail, "b": lambda: spend("b", 8.0)}
    found = host_times(calls, lambda: spend("wait", 1e4), count=4, batches=3, clock=lambda: now[0])
    assert [*found] == ["a", "bad", "b"]
    assert found["bad"] == "MissingError: no GPU"
    a, b = found["a"], found["b"]
    assert (a.median, b.median) == pytest.approx((3.0, 8.0))
    assert order == ["a", "wait", "b", "wait", *(["a"] * 4 + ["wait"] + ["b"] * 4 + ["wait"]) * 4]
    table = summary.host_table([HostRecord("s", 16, "lngen", "cupy", 3.0, 2.9, 3.1), HostRecord("s", 16, "-", "torch")])
    assert [list(c.cells) for c in table.columns][2] == ["3.00", "-"]


def test_host_times_are_of_both_kinds_of_arrays_and_a_broken_one_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(spec: Spec, rows: int, library: str) -> dict[str, Any]:
        if library == "broken":
            raise RuntimeError("no GPU part")
        return {library: lambda: None}

    libraries = {"cupy": lambda: "broken", "torch": lambda: "torch"}
    monkeypatch.setattr(host_time, "LIBRARIES", libraries)
    monkeypatch.setattr(host_time, "host_calls", calls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    broken, found = host_benchmark(parse_spec("layernorm.bwd:d=8"), 16)
    assert (found.call, found.arrays, found.rows, found.note) == ("torch", "torch", 16, "")
    assert found.spec == "layernorm.fwd:d=8,dtype=f32"
    assert (broken.call, broken.arrays, broken.us_median) == ("-", "cupy", None)
    assert "no GPU part" in broken.note


def test_host_times_of_a_graph() -> None:
    x, gamma = torch.zeros(2, 24), torch.zeros(24)
    calls = host_time.torch_calls(own("gated"), {"x": x, "z": x, "gamma": gamma}, x)
    assert [*calls] == ["torch, the expression", "torch.empty_like"]
    (y, _) = calls["torch, the expression"]()  # type: ignore[misc]
    assert y.shape == (2, 24)
    spec = make_task("layernorm", "fwd", "f32", 2, 24).specs[0]
    named = {"x": x, "gamma": gamma, "beta": gamma}
    assert [*host_time.torch_calls(spec, named)] == ["torch", "torch.native_layer_norm"]


@pytest.mark.parametrize(("there", "message"), [(False, r'PyTorch.*pip install "\.\[bench\]"'), (True, "NVIDIA GPU")])
def test_without_pytorch_or_a_gpu_there_is_one_sentence(
    there: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wrong graph is told."""
    monkeypatch.setattr(torch_gpu.importlib.util, "find_spec", lambda name: there or None)
    monkeypatch.setattr(torch_gpu, "device_count", lambda: 0)
    with pytest.raises(MissingError, match=message) as caught:
        torch_gpu.find_gpu()
    assert caught.value.exit_code == 3
    for options, error in ((["--graph", "none.graph"], SpecError), (["--providers", "nonsense"], MissingError)):
        assert isinstance(CliRunner().invoke(bench, options).exception, error)


def test_to_continue_needs_a_file(on_the_cpu: None) -> None:
    with pytest.raises(SpecError, match="--out FILE"):
        CliRunner().invoke(bench, ["--resume"], catch_exceptions=False)
