"""If these fail, a program of lngen/examples does not run, or does not print what it promises."""

import importlib.util
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lngen
from lngen import examples
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.examples import train_equals_serve as program
from lngen.lab.bench import agreement
from lngen.lab.tune.candidates import ranking
from lngen.proof.ptx import run_plan
from lngen.proof.ptx.outcome import Outcome

FOLDER = Path(str(examples.__file__)).parent


def run(name: str, *args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def test_the_package_names_every_program() -> None:
    programs = {path.stem for path in FOLDER.glob("[!_]*.py")}
    assert len(programs) == 11
    lines = (examples.__doc__ or "").splitlines()
    assert {line.split()[0] for line in lines[2:] if line} == programs


def test_ahead_of_time_builds_for_both_arches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    run("ahead_of_time", str(tmp_path), monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    listed = {Path(line.strip()) for line in printed.splitlines() if line.startswith(f"  {tmp_path}")}
    assert listed == {path for path in tmp_path.iterdir() if path.suffix in (".cu", ".ptx", ".cubin")}
    assert len([path for path in listed if path.suffix == ".cubin"]) == 5  # one is for GPUs weaker than an A100
    arguments = "rows_, x_ptr_, x_stride_, gamma_ptr_, beta_ptr_, y_ptr_, y_stride_, mean_ptr_, rstd_ptr_"
    assert re.search(rf"__rows\({arguments}\): \d+ threads a block\n", printed)


def test_hub_pack_builds_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("hub_pack", str(tmp_path), "--quick", monkeypatch=monkeypatch)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("4 specs, 1 widths, 1 archs: 4 cubins in ")
    assert second.endswith("files")
    assert third == f"load it: kernels.get_local_kernel(Path({str(tmp_path)!r}))"
    assert lngen.verify(tmp_path).ok


def test_autotune_without_a_gpu_says_what_is_missing_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("job", "tuner"):
        monkeypatch.setattr(f"lngen.lab.tune.{name}.visible_devices", lambda: ())
    run("autotune", str(tmp_path), monkeypatch=monkeypatch)
    first, _, *ranked = capsys.readouterr().out.splitlines()
    assert "needs an NVIDIA GPU" in first
    wanted = ranking(lngen.parse_spec("layernorm.bwd:d=1024,dtype=bf16"), 4096, DEFAULT_ARCH)[:5]
    assert [line.split()[1] for line in ranked] == [str(schedule) for schedule in wanted]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.gpu
def test_autotune_locks_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("autotune", str(tmp_path), monkeypatch=monkeypatch)
    norm = lngen.compile("layernorm", d=1024, dtype="bf16", lock=tmp_path / "lngen.lock.toml")
    assert norm.warmup()


def test_inspect_kernel_shows_one_kernel_and_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("inspect_kernel", monkeypatch=monkeypatch)
    kernel, _, difference = capsys.readouterr().out.partition("\n--- ")
    assert kernel.count("__global__") == 1
    assert "threads=128" in difference
    changed = [line for line in difference.splitlines() if line.startswith(("+", "-"))]
    assert 10 < len(changed) < len(kernel.splitlines())


def test_own_graph_agrees_with_differences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("own_graph", monkeypatch=monkeypatch)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "relative error" in line]
    assert [line[0] for line in lines] == ["dx", "dgate", "dgamma"]
    assert all(abs(float(line[2])) > 0.1 and float(line[-1]) < 1e-7 for line in lines)


def test_derived_axes_agree_with_numpy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("derived_axes", monkeypatch=monkeypatch)
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(errors) == 5
    assert max(errors) < 1e-5


def test_residual_streams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("residual", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "pre-LN: h = x + residual: True; dresidual is dx: True"
    assert printed[1] == "  backward reads dy, dh, gamma, h, rstd"
    assert printed[2] == "post-LN: backward reads dy, x, residual, gamma, rstd"
    assert printed[3].startswith("accumulated dgamma: largest element ")


def train_equals_serve(
    file: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int | str | None, list[dict[str, Any]]]:
    """The exit code of the program, small and without a GPU, and the comparisons of lngen that it saved."""
    pytest.importorskip("cupy")
    for module in (program, agreement):
        monkeypatch.setattr(module, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["train_equals_serve", "--d", "64", "--json", str(file), *more])
    with pytest.raises(SystemExit) as ended:
        program.main()
    lines = json.loads(file.read_text())["lines"] if file.exists() else []
    return ended.value.code, [line for line in lines if line["name"] == "lngen"]


def test_train_equals_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--rows", "4", "--batches", "1", "--whole")
    code, lines = train_equals_serve(tmp_path / "x.json", monkeypatch, *given)
    assert code == 0
    sizes = [(line["graph"], line["what"], line["batch"], line["elements"]) for line in lines]
    wide = [("y, dx", batch, 5 * 2 * 64 * batch) for batch in (1, 4)]
    for graph, sums, count in (("layernorm", "dgamma, dbeta", 2), ("rmsnorm", "dgamma", 1)):
        narrow = [(sums, batch, 5 * count * 64) for batch in (1, 4)]
        assert sorted(size[1:] for size in sizes if size[0] == graph) == sorted([*wide, *narrow])
    assert {line["differ"] for line in lines} == {0}
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "lngen: no bit differs"
    assert len([line for line in printed if "lngen, 5 schedules" in line and line.endswith(" 0")]) == len(lines)
    for ways in json.loads((tmp_path / "x.json").read_text())["schedules"].values():
        assert [len({*chosen}) for chosen in ways.values()] == [5, 5]
        assert all(len({text.partition(",")[0] for text in chosen}) > 2 for chosen in ways.values())


def test_train_equals_serve_sees_one_bit_and_ends_at_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one kind of kernel, the last bit of the last number of two results; of a run that finds something, nothing."""

    def wrong(plan: Any, inputs: Any, **options: Any) -> Outcome:
        outcome = run_plan(plan, inputs, **options)
        for name in {"y", "dgamma"} & {*outcome.results} if plan.schedule.form == "tma" else ():
            outcome.results[name].view("u2").flat[-1] ^= 1
        return outcome

    monkeypatch.setattr(program, "GRAPHS", ("layernorm",))
    monkeypatch.setattr(program, "run_plan", wrong)
    code, lines = train_equals_serve(tmp_path / "x.json", monkeypatch, "--rows", "3", "--batches", "3")
    assert code == 1
    assert {line["what"].split(", ")[0] for line in lines if line["differ"]} == {"y", "dgamma"}
    assert capsys.readouterr().out.splitlines()[-1].endswith(" elements differ")
    monkeypatch.setattr(program, "run_plan", lambda *a, **k: replace(run_plan(*a, **k), findings=("a race",)))
    assert train_equals_serve(tmp_path / "none.json", monkeypatch, "--rows", "3", "--batches", "3") == ("a race", [])


def test_gpt_step_has_the_losses_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(SystemExit, match="0"):
        run("gpt_step", "--tiny", monkeypatch=monkeypatch)
    assert re.fullmatch(
        r"2 layers of 64, 32 tokens: torch \S+ ms \(1.00\), lngen \S+ ms \(\S+\); losses agree to \S+\n",
        capsys.readouterr().out,
    )


def test_dit_step_has_the_losses_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All norms that are modulated are patched: a call of each step reaches lngen's function."""
    pytest.importorskip("torch")
    from lngen.torch import modulated_norms

    calls: list[tuple[int, ...]] = []
    own = modulated_norms.ada_layer_norm
    monkeypatch.setattr(
        modulated_norms, "ada_layer_norm", lambda x, *a, **k: (calls.append(x.shape), own(x, *a, **k))[1]
    )
    with pytest.raises(SystemExit, match="0"):
        run("dit_step", "--tiny", monkeypatch=monkeypatch)
    assert re.fullmatch(
        r"2 layers of 64, 2 x 8 tokens: torch \S+ ms \(1.00\), patched \S+ ms \(\S+\), fused \S+ ms \(\S+\); "
        r"losses agree to \S+\n",
        capsys.readouterr().out,
    )
    steps = 2 * 2  # of two models, the first of which warms up
    assert calls.count((2, 8, 64)) == 3 * steps


@pytest.mark.parametrize("more", [(), ("--compiled",)], ids=["eager", "compiled"])
def test_patch_transformers_times_a_model_that_it_patches(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library like transformers, with one family of one norm; nothing is compiled."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, config: SimpleNamespace) -> None:
            super().__init__()
            self.config, self.device = config, torch.device("cpu")
            self.words = torch.nn.Embedding(config.vocab_size, config.hidden_size)
            self.norm = torch.nn.LayerNorm(config.hidden_size)

        def forward(self, input_ids: Any, labels: Any) -> SimpleNamespace:
            return SimpleNamespace(loss=self.norm(self.words(input_ids)).pow(4).mean())

    fake = SimpleNamespace(LlamaForCausalLM=Model, LlamaConfig=SimpleNamespace, __spec__=None)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake if name == "transformers" else None)
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **o: asked.append((type(model.norm).__module__, o)) or model)
    with pytest.raises(SystemExit, match="0"):
        run("patch_transformers", "--tiny", "--models", "llama", *more, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    ways = ("lngen", "fused", "inductor", "inductor_patched", "inductor_fused")[: 5 if more else 1]
    found = re.fullmatch(
        "llama, 32 tokens: eager \\S+ ms \\(1.00\\), "
        + ", ".join(rf"{way} \S+ ms \(\S+\)" for way in ways)
        + r"; losses agree to (\S+)",
        lines[0],
    )
    assert found is not None
    assert float(found[1]) < 1e-5
    assert lines[1].startswith("| model | tokens | eager, ms | patched, ms | times |")
    assert re.fullmatch(r"\| llama \| 32 \| \S+ \|" + r" \S+ \| \S+ \|" * len(ways) + r"  \|  \|", lines[3])
    norms = [module.partition(".")[0] for module, _ in asked]
    assert norms == (["lngen", "torch", "lngen", "lngen"] if more else [])
    assert [[*options] for _, options in asked] == ([["backend"], [], [], ["options"]] if more else [])


NO_TRANSFORMERS = "transformers is expected, and not found; --tiny runs on the CPU, with transformers\n"


@pytest.mark.parametrize(("name", "options", "said"), [
    ("patch_transformers", (), NO_TRANSFORMERS),
    ("patch_transformers", ("--tiny",), NO_TRANSFORMERS),
    ("dit_step", (), "a GPU is expected, and PyTorch finds none; --tiny runs on the CPU\n"),
    ("gpt_step", (), "a GPU is expected, and PyTorch finds none; --tiny runs on the CPU\n"),
])  # fmt: skip
def test_a_program_without_what_it_needs_says_so(
    name: str, options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="3"):
        run(name, *options, monkeypatch=monkeypatch)
    assert capsys.readouterr().err == said
