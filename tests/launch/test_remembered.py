"""If these fail, a process compiles again what is known, or launches what was chosen for something else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lngen
from lngen import files
from lngen.compiler import passes
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.ir import D, M
from lngen.errors import LngenError, ValidationError
from lngen.launch.runtime import remembered
from lngen.launch.runtime.lock_file import Lock, Locked

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

from remembering import Remembering, remembering  # noqa: E402

WIDTH = 64


def own(b: GraphBuilder) -> None:
    """A graph of a program."""
    h = b.input("x", M, D) + b.input("residual", M, D)
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * b.input("gamma", D, positive=True))
    b.statistic(rstd, "rstd")


def no_gradient(b: GraphBuilder) -> None:
    """The same forward, of which one input has no gradient."""
    h = b.input("x", M, D) + b.input("residual", M, D)
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * b.input("gamma", D))
    b.statistic(rstd, "rstd")


NORMS: dict[str, Callable[[], Any]] = {
    "layernorm": lambda: lngen.compile("layernorm", d=WIDTH, dtype="bf16"),
    "eps of a call": lambda: lngen.compile("rmsnorm", d=WIDTH, eps="run"),
    "two distances": lambda: lngen.compile("rmsnorm", d=WIDTH, strides=2, overlap=True),
    "a schedule": lambda: lngen.compile("layernorm", d=WIDTH, schedule={"fwd": "threads=8", "bwd": ""}),
    "a rebuilt row": lambda: lngen.compile("layernorm", d=WIDTH, save="y", eps="run"),
    "own": lambda: lngen.compile(own, d=WIDTH),
}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Remembering:
    monkeypatch.setattr("lngen.launch.runtime.norm.host_copy", lambda value, *_: np.ones(WIDTH, np.float32))
    return remembering(monkeypatch, tmp_path / "cache")


def trained(norm: Any, rows: int = 3, offset: int = 0) -> list[bytes]:
    """The bits of a step with random numbers; ``offset``: elements by which rows are off an aligned address."""
    numbers = torch.Generator().manual_seed(0)

    def array(tensor: Any) -> Any:
        shape, dtype = tensor.shape(rows, WIDTH), {"bf16": torch.bfloat16, "f32": torch.float32}[tensor.dtype]
        size = rows * WIDTH if "M" in tensor.axes else WIDTH
        flat = torch.randn(size + offset, generator=numbers).abs().add(0.5).to(dtype)
        return flat[offset:].view(shape)

    eps = {"eps": 1e-6} if norm.spec().eps == "run" else {}
    y, saved = norm.forward(*map(array, norm._forward.inputs), **eps)
    gradients = norm.backward(array(norm._forward.outputs[0]), saved)
    return [t.view(torch.uint8).numpy().tobytes() for t in (y, *gradients)]


@pytest.mark.parametrize("name", NORMS)
def test_a_process_loads_what_another_one_chose(process: Remembering, name: str) -> None:
    """Aligned or not, with the same bits; it derives, lowers and compiles nothing."""
    cases = [{"offset": 0}, {"offset": 1}, {"rows": 2000}]
    first = [trained(NORMS[name](), **case) for case in cases]
    assert len({*process.compiled}) > 2
    process.forget()
    norm = NORMS[name]()
    assert [trained(norm, **case) for case in cases] == first
    assert process.idle


def test_a_remembered_norm_has_all_else_when_it_is_asked(process: Remembering) -> None:
    trained(NORMS["layernorm"]())
    process.forget()
    norm = NORMS["layernorm"]()
    trained(norm)
    assert process.idle
    assert "sm_90: form=" in norm._repr_html_()
    plan = norm.plan("bwd", rows=3)
    assert str(plan.schedule) in norm._repr_html_()
    assert f"{plan.kernels[0].name}(" in norm.source("bwd", rows=3)
    assert norm.compilation("fwd").graph.results[0].name == "y"


def locked(path: Path, schedule: str) -> Path:
    entry = Locked("NVIDIA H100", "sm_90", f"layernorm.fwd:d={WIDTH},dtype=f32", 3, schedule)
    path.write_text(Lock((entry,)).render())
    return path


# Of a forward with three rows, what is changed before the same is asked for again, and whether it is known then.
CHANGES: dict[str, tuple[Callable[[Remembering, pytest.MonkeyPatch], object], bool]] = {
    "nothing": (lambda process, patch: None, True),
    "the sources of lngen": (lambda process, patch: patch.setattr(remembered, "sources", lambda: "others"), False),
    "the format": (lambda process, patch: patch.setattr(remembered, "FORMAT", 0), False),
    "NVRTC": (lambda process, patch: patch.setattr(remembered, "file_stamp", lambda path: (path, 1, 2)), False),
    "NVRTC is gone": (lambda process, patch: patch.setattr(remembered, "file_stamp", os.stat), False),
    "another GPU": (lambda process, patch: remembering(patch, process.folder, name="NVIDIA H200"), False),
    "fewer multiprocessors": (lambda process, patch: remembering(patch, process.folder, multiprocessors=114), False),
    "torn files": (lambda process, patch: [p.write_bytes(p.read_bytes()[:-9]) for p in process.files], False),
    "empty files": (lambda process, patch: [p.write_bytes(b"") for p in process.files], False),
    "files of others": (lambda process, patch: [p.chmod(0o666) for p in process.files], False),
    "names of others": (lambda process, patch: exchange(process.files), False),
    "no object": (lambda process, patch: [(p.unlink(), files.keep(p, b"[1]")) for p in process.files], False),
    "folders for files": (lambda process, patch: [(p.unlink(), p.mkdir()) for p in process.files], False),
    "no cubins": (lambda process, patch: [p.unlink() for p in (process.folder / "kernels").rglob("*") if p.is_file()],
                  False),
}  # fmt: skip


def exchange(paths: list[Path]) -> None:
    """Each file gets the content of the next one."""
    texts = [path.read_bytes() for path in paths]
    for path, text in zip(paths, texts[1:] + texts[:1], strict=True):
        path.write_bytes(text)


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_a_choice(process: Remembering, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """All that is another one is a miss and no error; the process after it knows that, too."""
    x, norm = torch.ones(3, WIDTH), lngen.compile("softmax", d=WIDTH)
    wanted = norm.forward(x)[0].numpy().tobytes()
    changed, known = CHANGES[change]
    process.forget()
    found = changed(process, monkeypatch)
    process = found if isinstance(found, Remembering) else process
    assert lngen.compile("softmax", d=WIDTH).forward(x)[0].numpy().tobytes() == wanted
    assert bool(process.compiled) is not known
    process.forget()
    if change not in ("folders for files", "NVRTC", "NVRTC is gone"):
        lngen.compile("softmax", d=WIDTH).forward(x)
        assert process.idle


REQUESTS: dict[str, Callable[[Path], tuple[dict[str, Any], int]]] = {
    "rows": lambda folder: ({}, 40_000),
    "a schedule": lambda folder: ({"schedule": {"fwd": "threads=8,rows_per_block=8"}}, 3),
    "a lock": lambda folder: ({"lock": locked(folder / "a", "form=registers,threads=16,rows_per_block=4,vec=4")}, 3),
    "another lock": lambda folder: (
        {"lock": locked(folder / "b", "form=registers,threads=8,rows_per_block=16,vec=4")},
        3,
    ),
    "eps": lambda folder: ({"eps": 0.5}, 3),
    "gamma": lambda folder: ({"gamma": False, "beta": False}, 3),
}


def test_requests_do_not_get_each_others_kernels(process: Remembering, tmp_path: Path) -> None:
    """Each is known when it comes again."""
    chosen: dict[str, str] = {}
    for again in (False, True):
        process.forget()
        for name, request in REQUESTS.items():
            options, rows = request(tmp_path)
            loaded = lngen.compile("layernorm", d=WIDTH, **options)._forward.launcher(0, rows=rows)
            text = json.dumps([loaded.described["schedule"]["text"], loaded.described["spec"]["text"]])
            assert chosen.setdefault(name, text) == text
        assert process.idle is again
    assert len({*chosen.values()}) == len(REQUESTS)


def test_graphs_of_one_text_are_told_apart(process: Remembering) -> None:
    """A note beside the equations: an input that is positive."""
    one, other = (lngen.compile(graph, d=WIDTH).spec("bwd") for graph in (own, no_gradient))
    renamed = lngen.compile(lngen.Definition("own", no_gradient), d=WIDTH).spec("bwd")
    assert str(renamed) == str(one) != str(other)
    assert len({spec.fingerprint for spec in (one, other, renamed)}) == 3


def test_what_is_refused_leaves_nothing(process: Remembering, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that is not the derivative, and kernels that the driver does not load."""
    norm, x = lngen.compile("rmsnorm", d=WIDTH), torch.ones(3, WIDTH)
    with monkeypatch.context() as patch:
        patch.setattr("lngen.launch.runtime.launcher.Loaded.__init__", _refuse)
        with pytest.raises(LngenError, match="refused"):
            norm.forward(x, x[0])
    assert process.files == []
    y, saved = norm.forward(x, x[0])
    left = process.files
    with monkeypatch.context() as patch:
        patch.setattr(passes, "validate", _invalid)
        with pytest.raises(ValidationError):
            norm.backward(y, saved)
    assert process.files == left != []


def _refuse(*_: Any, **__: Any) -> None:
    raise LngenError("refused")


def _invalid(*_: Any) -> None:
    raise ValidationError("internal error")


def test_stages_that_somebody_looks_at_are_made(
    process: Remembering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With LNGEN_DUMP, and with LNGEN_DEBUG=3, whatever is known."""
    x = torch.ones(3, WIDTH)
    for name, value in (("LNGEN_DEBUG", "2"), ("LNGEN_DUMP", str(tmp_path / "dump")), ("LNGEN_DEBUG", "3")):
        lngen.compile("softmax", d=WIDTH).forward(x)
        process.forget()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            lngen.compile("softmax", d=WIDTH).forward(x)
        assert process.idle is (value == "2")
    assert [*(tmp_path / "dump").rglob("plan.txt")]


def test_a_folder_that_cannot_be_written_is_no_error(process: Remembering, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of cubins warns."""
    blocked = process.folder / "file"
    process.folder.mkdir()
    blocked.write_bytes(b"")
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match="Compiled kernels will not be kept"):
        lngen.compile("softmax", d=WIDTH).forward(torch.ones(3, WIDTH))
