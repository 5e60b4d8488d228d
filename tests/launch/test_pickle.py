"""If these fail, a norm cannot be copied or pickled, or what is loaded again has other bits, specs or schedules."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lngen
from fake_gpu import FakeGpu
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.ir import D, M
from lngen.compiler.spec import parse_spec
from lngen.errors import SpecError
from lngen.launch.runtime.lock_file import Lock, Locked
from lngen.proof.check.inputs import random_inputs

WIDTH = 64


def own(b: GraphBuilder) -> None:
    """A graph with all that a description may declare beside its values."""
    x, shift = b.input("x", M, D), b.optional_input("shift", D)
    gain = b.input("gain", D, grad="f32", positive=True)
    mask = b.input("mask", D, differentiable=False)
    power = b.option("power", "one", ("one", "two"))
    h = x * b.option("factor", 2.0) * mask
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    y = h * rstd * (gain * gain if power == "two" else gain)
    b.output("y", y if shift is None else y + shift)
    b.output("total", b.sum(h), save=True)
    b.statistic(rstd, "rstd")


GIVEN = parse_spec("rmsnorm.fwd:d=8,eps=0.25").forward()
BY_VALUE = parse_spec("layernorm.fwd:d=8,eps=run").forward()
NORMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: lngen.compile("layernorm", d=WIDTH),
    "options": lambda: lngen.compile("layernorm", d=WIDTH, dtype="bf16", weight="f32", gamma=False, wrt="x", eps=0.5),
    "saves": lambda: lngen.compile("rmsnorm", d=WIDTH, save="y", grad="f32", accumulate="gamma", blocks=3),
    "softmax": lambda: lngen.compile("softmax", d=WIDTH, out="f16", save="none"),
    "f64": lambda: lngen.compile("add_rmsnorm", d=WIDTH, dtype="f64", strides=2, of="y"),
    "run": lambda: lngen.compile("layernorm", d=WIDTH, eps="run", save="none"),
    "run l2norm": lambda: lngen.compile("l2norm", d=WIDTH, eps="run", guard="max"),
    "own": lambda: lngen.compile(own, d=WIDTH),
    "own bf16": lambda: lngen.compile(own, d=WIDTH, dtype="bf16", save="none"),
    "own options": lambda: lngen.compile(
        own, d=WIDTH, dtype="bf16", shift=False, factor=0.5, power="two", save="y", eps="run", accumulate="gain"
    ),
    "own of a name": lambda: lngen.compile(Definition("layernorm", lambda b: GRAPHS["rmsnorm"].describe(b)), d=WIDTH),
    "graph": lambda: lngen.compile(GIVEN, d=WIDTH),
    "graph by value": lambda: lngen.compile(BY_VALUE, d=WIDTH),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"protocol {n}": lambda norm, n=n: pickle.loads(pickle.dumps(norm, n)) for n in range(2, 6)},
}


def inputs(norm: Any, rows: int = 3) -> dict[str, Any]:
    """The arrays of a forward call, and eps if it takes one."""
    graph = norm.spec().graph()
    arrays = random_inputs(norm.spec(), rows, eps=0.5)
    return {v.name: arrays[v.name] for v in graph.tensors} | ({"eps": 0.5} if graph.by_value else {})


def results(forward: Any, backward: Any, given: dict[str, Any]) -> list[bytes]:
    """The bits of both directions, of the norms ``forward`` and ``backward``."""
    y, saved = forward.forward(**given)
    spec, outputs = backward.spec("bwd"), y if isinstance(y, tuple) else (y,)
    out = tuple(np.ones(WIDTH, np.float32) if n in spec.accumulate else None for n in spec.differentiates)
    gradients = backward.backward(outputs[: len(spec.differentiated)], saved, out=out)
    return [a.tobytes() for a in (*outputs, *gradients)]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", NORMS)
def test_a_copy_has_the_same_specs_and_bits(name: str, how: str) -> None:
    """Also where one of the two runs forward and the other backward."""
    norm = NORMS[name]()
    given = inputs(norm)
    want = results(norm, norm, given)  # what it has loaded and cached is not copied
    copied = COPIES[how](norm)
    for direction in ("fwd", "bwd"):
        assert str(copied.spec(direction)) == str(norm.spec(direction))
        assert copied.spec(direction).graph() == norm.spec(direction).graph()
        assert copied.spec(direction).slug == norm.spec(direction).slug
    assert results(copied, copied, given) == results(norm, copied, given) == results(copied, norm, given) == want


def test_a_copy_of_a_copy_is_equal() -> None:
    for name in ("plain", "own options", "graph by value"):
        once = pickle.loads(pickle.dumps(NORMS[name]()))
        twice = pickle.loads(pickle.dumps(once))
        assert twice.spec() == once.spec()
        assert hash(twice.spec()) == hash(once.spec())


def test_the_function_of_a_graph_is_not_asked_again() -> None:
    """It may be a lambda, or in no module of the other process."""
    asked = []

    def counted(b: GraphBuilder) -> None:
        asked.append(b)
        own(b)

    norm = lngen.compile(counted, d=WIDTH)
    before = len(asked)
    copied = copy.deepcopy(norm)
    assert copied.spec("bwd").graph() == norm.spec("bwd").graph()
    assert len(asked) == before


def test_what_is_declared_stays_for_messages_and_inputs() -> None:
    norm = NORMS["own"]()
    for spec in (norm.spec(), pickle.loads(pickle.dumps(norm)).spec()):
        builder = spec.definition.builder(spec.options)
        assert [*builder.declared] == ["shift", "power", "factor"]
        assert builder.takes_eps
        assert spec.definition.positive(spec.options) == {"gain"}
        assert spec.definition.differentiable(spec.options) == ("x", "shift", "gain")


def test_a_pickled_graph_has_no_other_options() -> None:
    copied = pickle.loads(pickle.dumps(NORMS["own"]()))
    definition = copied.spec().definition
    assert str(lngen.compile(definition, d=8).spec()).startswith("own@")
    with pytest.raises(SpecError, match="it was pickled with its dtypes, eps and options; for others compile its"):
        lngen.compile(definition, d=8, power="two")


def test_what_forward_saved_is_pickled_too() -> None:
    """Alone, and beside its norm, with which it shares the spec."""
    norm = NORMS["run"]()
    given = inputs(norm)
    y, saved = norm.forward(**given)
    want = [a.tobytes() for a in norm.backward(y, saved)]
    alone = pickle.loads(pickle.dumps(saved))
    assert [a.tobytes() for a in norm.backward(y, alone)] == want
    together = pickle.loads(pickle.dumps((norm, saved)))
    assert str(together[0].spec()) == together[1].spec
    assert [a.tobytes() for a in together[0].backward(y, together[1])] == want


def test_schedules_the_lock_file_and_overlap_are_kept(tmp_path: Path, gpu: FakeGpu) -> None:
    """The file may be gone when the norm is loaded."""
    spec = str(lngen.compile("layernorm", d=WIDTH).spec())
    chosen = str(lngen.compile("layernorm", d=WIDTH, schedule={"fwd": "threads=8"}).plan().schedule)
    path = tmp_path / "lock"
    path.write_text(Lock((Locked("NVIDIA H200", "sm_90", spec, 4096, chosen),)).render())
    norm = lngen.compile("layernorm", d=WIDTH, schedule={"bwd": "threads=8"}, lock=path, overlap=True)
    data = pickle.dumps(norm)
    path.unlink()
    copied = pickle.loads(data)
    assert str(copied.plan(arch="sm_90").schedule) == str(norm.plan(arch="sm_90").schedule) == chosen
    assert copied.plan("bwd").schedule == norm.plan("bwd").schedule
    assert copied.plan("bwd").schedule.threads == 8
    arrays = [gpu.array("f32", *v.type.shape(5, WIDTH)) for v in norm.spec().graph().tensors]
    for one in (norm, copied):
        one.forward(*arrays)
    first, second = gpu.launched
    assert (first.attributes, first.grid, first.block) == (second.attributes, second.grid, second.block)
    assert first.attributes, "overlap is an attribute of the launch"
    assert gpu.calls.count("cuModuleLoadDataEx") == 2, "the copy has loaded kernels of its own"


def test_another_process_has_the_same_bits(tmp_path: Path) -> None:
    """Of graphs whose functions it lacks."""
    norms = [NORMS[name]() for name in ("own options", "run", "graph")]
    given = [inputs(norm) for norm in norms]
    data = pickle.dumps([(norm, arrays) for norm, arrays in zip(norms, given, strict=True)])
    code = """if True:
        import pickle, sys
        for norm, given in pickle.load(sys.stdin.buffer):
            y, saved = norm.forward(**given)
            for a in (*(y if isinstance(y, tuple) else (y,)), *saved.arrays):
                print(a.tobytes().hex())
    """
    env = {**os.environ, "PYTHONPATH": str(Path(lngen.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, cwd=tmp_path, env=env, check=False
    )
    want = []
    for norm, arrays in zip(norms, given, strict=True):
        y, saved = norm.forward(**arrays)
        want += [a.tobytes().hex() for a in (*(y if isinstance(y, tuple) else (y,)), *saved.arrays)]
    assert done.stdout.decode().split() == want, done.stderr.decode()


# ---- another version of lngen ----


def test_a_graph_that_another_version_has_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bits under the same name are refused; the text of a graph of one's own is the same everywhere."""
    named, own_graph = pickle.dumps(NORMS["plain"]()), pickle.dumps(NORMS["own of a name"]())
    other = Definition("layernorm", lambda b: GRAPHS["rmsnorm"].describe(b))
    monkeypatch.setattr("lngen.compiler.spec.spec.GRAPHS", {"layernorm": other})
    with pytest.raises(
        SpecError,
        match=r"a spec of the graph layernorm@\w{8} was pickled, but in this version of lngen 'layernorm' is "
        r"layernorm@\w{8}; compile the norm again\.",
    ):
        pickle.loads(named)
    assert str(pickle.loads(own_graph).spec()) == str(NORMS["own of a name"]().spec())
    monkeypatch.setattr("lngen.compiler.spec.spec.GRAPHS", {})
    with pytest.raises(SpecError, match="in this version of lngen 'layernorm' does not exist; compile the norm again"):
        pickle.loads(named)


# ---- packs ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packs") / "pack"
    lngen.build([f"rmsnorm.{way}:d={WIDTH}" for way in ("fwd", "bwd")], out, arch="sm_90", emit="cu", rows="many")
    return out


@pytest.mark.parametrize("how", COPIES)
def test_a_norm_of_a_pack_is_that_of_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """Also of a folder that was named from another one."""
    monkeypatch.chdir(folder.parent)
    norm = lngen.load(folder.name).norm("rmsnorm")
    data = pickle.dumps(norm)
    copied = COPIES[how](norm)
    assert (copied.spec, copied.backward_spec) == (norm.spec, norm.backward_spec)
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(data).spec == norm.spec
