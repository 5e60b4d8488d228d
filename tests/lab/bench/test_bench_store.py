"""If these fail, a file of records cannot be read back, mixes conditions, or the command writes it too late."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench_fakes import RECORDS, CpuGpu, few_rows_records
from commands import fails
from lngen.cli.bench import bench
from lngen.compiler.spec import Spec, parse_spec
from lngen.errors import LngenError, MissingError
from lngen.lab.bench import host_time, store, summary, torch_gpu
from lngen.lab.bench.argument_sets import Prepared
from lngen.lab.bench.host_time import host_benchmark, host_times
from lngen.lab.bench.peers import Torch
from lngen.lab.bench.records import HostRecord
from lngen.lab.bench.store import Saved, merged, read_json, resumed, write_json
from lngen.lab.bench.tasks import make_task
from own_graphs import own


def test_json_comes_back_and_is_the_same_twice(tmp_path: Path) -> None:
    conditions = {"torch": "2.11", "device": "H200"}
    host = [HostRecord("layernorm.fwd:d=8", 16, "lngen", "cupy", 3.0, 2.9, 3.1)]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_json(one, Saved(RECORDS, conditions, host))
    write_json(two, Saved(RECORDS, dict(reversed(conditions.items())), host))
    assert one.read_bytes() == two.read_bytes()
    assert read_json(one) == Saved(RECORDS, conditions, host)
    (summary,) = json.loads(one.read_text(encoding="utf-8"))["summary"]
    assert (summary["points"], summary["met"], summary["ratio"]) == (3, 1, 1.25)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_records_are_written_by_point_and_come_back(tmp_path: Path) -> None:
    """Earlier versions wrote every field of a record."""
    file, records = tmp_path / "b.json", [*RECORDS, *few_rows_records()]
    write_json(file, Saved(records))
    assert read_json(file) == Saved(records)
    content = json.loads(file.read_text(encoding="utf-8"))
    found = content["records"]["points"]
    assert [len(p["records"]) for p in found[-4:]] == [4] * 4
    assert found[-4]["records"][0] == ["copy", 1.0]
    file.write_text(json.dumps({"conditions": {}, "records": [vars(r) for r in records]}), encoding="utf-8")
    assert read_json(file) == Saved(records)
    found[0]["records"][0][0] = 1
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(LngenError, match="provider is 1"):
        read_json(file)


def test_a_file_of_other_conditions_is_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    assert resumed(file, {"device": "H200"}) == Saved()
    write_json(file, Saved(RECORDS, {"device": "H200", "torch": "2.11"}))
    assert len(resumed(file, {"device": "H200", "torch": "2.11"}).records) == len(RECORDS)
    with pytest.raises(LngenError):
        resumed(file, {"device": "A100"})


def test_files_of_earlier_versions_are_judged_now() -> None:
    saved = read_json(Path(__file__).parents[2] / "data" / "bench-first-version.json")
    assert saved.conditions["device"] == "NVIDIA H200"
    lngen = next(r for r in saved.records if r.is_lngen)
    assert (lngen.target, lngen.met, lngen.best_peer, lngen.ratio) == (0.68, False, "torch", 1.9049)


def test_merged_files_keep_the_conditions_they_share() -> None:
    one = Saved(RECORDS[:1], {"device": "H200", "torch": "2.11"}, runs=[{"date": "1"}])
    two = Saved(RECORDS[1:], {"device": "H200", "torch": "2.12"}, runs=[{"date": "2"}])
    assert merged([one, two]) == Saved(RECORDS, {"device": "H200"}, [], [{"date": "1"}, {"date": "2"}])


def test_the_conditions_name_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = Path(store.__file__).parents[2]
    assert [name for name in store.SOURCES if not (package / name).exists()] == []
    before = store.source_digest()
    assert before == store.source_digest()
    (tmp_path / "kernel.cu.j2").write_text("another template", encoding="utf-8")
    monkeypatch.setattr(store, "data_dir", lambda name: tmp_path)
    assert len(before) == len(store.source_digest()) == 12
    assert before != store.source_digest()


def test_circumstances_are_what_the_machine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def output(command: list[str]) -> str:
        asked.append(command)
        return "580.1, 1980, 1980, 3201, 3201, 650.5, 700.00, 61" if command[0] == "nvidia-smi" else ""

    monkeypatch.setattr(store, "_output", output)
    monkeypatch.setattr(store, "_uuid", lambda device: f"GPU-{device}")
    found = store.circumstances(1, "abc")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", found.pop("date"))
    assert found == {
        "commit": "abc", "device id": "GPU-1", "driver": "580.1", "SM clock, MHz": "1980",
        "SM clock at most, MHz": "1980", "memory clock, MHz": "3201", "memory clock at most, MHz": "3201",
        "power, W": "650.5", "power at most, W": "700.00", "temperature, C": "61",
    }  # fmt: skip
    assert [c[0] for c in asked] == ["nvidia-smi"]
    assert "--id=GPU-1" in asked[0]


def test_what_nobody_tells_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(store, "_uuid", lambda device: "")
    assert [*store.circumstances(0)] == ["date"]


def test_git_tells_the_commit_and_whether_files_differ(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        options = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *options, *words], check=True, capture_output=True)

    assert store._commit(tmp_path) == ""
    git("init")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "m")
    head = store._commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", head)
    (tmp_path / "f").write_text("2")
    assert store._commit(tmp_path) == f"{head} with changes"


# ---- the command, and host times ----


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


def test_each_point_is_in_the_file_at_once(on_the_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sizes = tmp_path / "b.json", []
    prepare = Torch.prepare

    def looking(self: Torch, case: Any) -> Prepared:
        sizes.append(len(read_json(file).records) if file.exists() else 0)
        return prepare(self, case)

    monkeypatch.setattr(Torch, "prepare", looking)
    run_bench("--shapes", "8x32,9x32,10x32", "--out", str(file))
    assert sizes == [0, 2, 4]


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
    assert re.search(message, fails(3, "bench", "--few-rows"))
    assert "none.graph" in fails(2, "bench", "--graph", "none.graph")
