"""The tuner's GPU part on NumPy: expected bits at many rows, and the measurer with an engine that has no GPU."""

import ctypes
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import M, sets_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.lower import Plan
from lngen.compiler.spec import Spec, parse_spec
from lngen.errors import LngenError
from lngen.lab.bench import timing
from lngen.lab.bench.timing import Launch
from lngen.lab.tune import job, measure
from lngen.lab.tune.candidates import Candidate, candidates
from lngen.lab.tune.measure import Bits, CupyTimer, GpuMeasurer
from lngen.launch.runtime.numpy_arrays import raw
from sampling import grid

SPECS = [
    "layernorm.fwd:d=48,dtype=bf16", "layernorm.bwd:d=48,dtype=f16", "rmsnorm.bwd:d=40,dtype=f32,weight=bf16",
    "rmsnorm.fwd:d=7,dtype=f64", "layernorm.bwd:d=300,dtype=f32", "layernorm.bwd:d=48,dtype=f32,save=none,wrt=gamma",
    "layernorm.bwd:d=48,dtype=f32,wrt=x",
    "rmsnorm.fwd:d=48,dtype=f32,eps=run",
    "rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3,scales=block,block_size=16,scale_layout=columns",
    "qk_rmsnorm.bwd:d=64,dtype=f32,head=16,k_heads=2",
]  # fmt: skip
ROTATED = "qk_rmsnorm.bwd:d=64,dtype=bf16,head=32,rotate=halves,positions=i64"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of about a thousand elements, so that these few rows are repetitions of a block."""
    monkeypatch.setattr(measure, "BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(measure, "COLUMN_ELEMENTS", 4000)


def true_results(spec: Spec, bits: Bits, rows: int) -> dict[str, Array]:
    """What the interpreter says of the first rows of the inputs, all of them."""
    graph = spec.graph()
    inputs: dict[str, Array] = {}
    for p in graph.tensors:
        values = bits.inputs[p.name].view(NUMPY_DTYPE[p.type.dtype])
        inputs[p.name] = values[:rows] if M in p.type.axes else values
    return {n: raw(a).copy() for n, a in interpret(graph, inputs | bits.values).items()}


@pytest.mark.parametrize("text", [*SPECS, ROTATED])
@pytest.mark.parametrize("rows", [1, 5, 201])
def test_what_the_interpreter_computes_is_right_and_a_flipped_bit_is_not(text: str, rows: int) -> None:
    spec = parse_spec(text)
    bits = Bits(spec, rows, np)
    assert bits.block % 2 == 1
    assert bits.checked_rows[0] == 1
    assert (rows if bits.whole else bits.block) in bits.checked_rows
    for m in bits.checked_rows:
        results = true_results(spec, bits, m)
        assert bits.complaint(m, results) == ""
        for name, values in results.items():
            for place in (0, -1):
                values.reshape(-1)[place] ^= 1
                assert bits.complaint(m, results) == f"{name}: 1 numbers differ with {m} rows"
                values.reshape(-1)[place] ^= 1
        untouched = bits.empty(m)
        assert {n: a.shape for n, a in untouched.items()} == {n: a.shape for n, a in results.items()}
        assert all(name in bits.complaint(m, untouched) for name in results)


@grid(("text", "rows"), product((
    "ada_layernorm.fwd:d=48,dtype=bf16,gate=yes,residual=yes", "ada_rmsnorm.bwd:d=33,dtype=f32",
    "ada_layernorm.bwd:d=48,dtype=f16,gamma=yes,beta=yes",
), (1, 5, 64, 480)), strength=1)  # fmt: skip
def test_sets_of_rows_repeat_whole(text: str, rows: int) -> None:
    """Of 480 rows there are 15 sets of 32, of which three are in the block."""
    spec = parse_spec(text)
    bits = Bits(spec, rows, np)
    sets = rows // bits.inner
    assert bits.block == (3 if sets > 2 else 1) * bits.inner or bits.inner == 1
    assert bits.checked_rows[-1] == rows
    axis = sets_of(spec.forward())
    for m in bits.checked_rows:
        inputs = {p.name: bits.inputs[p.name].view(NUMPY_DTYPE[p.type.dtype]) for p in spec.graph().tensors}
        for p in spec.graph().tensors:
            taken = m if M in p.type.axes else m // bits.inner if axis in p.type.axes else None
            inputs[p.name] = inputs[p.name][:taken]
        results = {n: raw(a).copy() for n, a in interpret(spec.graph(), inputs | bits.values).items()}
        assert bits.complaint(m, results) == ""
        assert {n: a.shape for n, a in bits.empty(m).items()} == {n: a.shape for n, a in results.items()}
        for name, values in results.items():
            values.reshape(-1)[-1] ^= 1
            assert bits.complaint(m, results) == f"{name}: 1 numbers differ with {m} rows"
            values.reshape(-1)[-1] ^= 1


def test_rows_repeat_and_column_sums_run_over_all_of_them() -> None:
    bits = Bits(parse_spec("layernorm.bwd:d=300,dtype=f32"), 201, np)
    assert (bits.block, bits.whole, bits.checked_rows) == (3, True, (1, 133, 201))
    x = bits.inputs["x"]
    assert x.shape == (201, 300)
    assert all((x[r] == x[r % 3]).all() for r in range(201))
    assert bits.inputs["gamma"].shape == (300,)
    index, sums = bits._columns[201]
    assert len(index) == len(sums["dgamma"]) == 4000 // 201
    assert (index[0], index[-1]) == (0, 299)


# ---- the measurer ----


class NumpyTimer(CupyTimer):
    """NumPy and a clock of its own."""

    def __init__(self) -> None:
        self.captured: list[list[int]] = []
        self.replays = 0
        self.slow: set[int] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def stream(self) -> int:
        return 5

    def synchronize(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return 10**9, 1000

    def release(self) -> None:
        pass

    def name(self) -> str:
        return "a CPU"

    def pointer(self, array: Array) -> int:
        return int(array.ctypes.data)

    def copy(self, out: Array, x: Array) -> None:
        out[...] = x

    def add(self, out: Array, x: Array, y: Array) -> None:
        np.add(x, y, out=out)

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        launch(0, indices[-1])
        self.captured.append([*indices])
        return len(indices)

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        self.replays += 1
        slow = 2.0 if self.replays in self.slow else 1.0
        return [count * 10.0 * (slow if n > len(graphs) // 2 else 1.0) / 1e3 for n, count in enumerate(graphs)]


class Kernel:
    """A launcher whose kernels are the interpreter, reading and writing memory by address; the image says how well."""

    def __init__(self, plan: Plan, image: bytes, device: int, overlap: bool) -> None:
        self.plan, self.image, self.overlap = plan, image, overlap
        self.tensors = tuple(v.name for v in (*plan.inputs, *plan.outputs))

    def contiguous(self, rows: int) -> Mapping[str, int]:
        return dict.fromkeys(self.tensors, self.plan.spec.d)

    def bind(self, rows: int, strides: Mapping[str, int], inner: int) -> Any:
        assert (set(strides.values()), inner) == ({self.plan.spec.d}, 1)
        kernel = self

        class Bound:
            workspace_bytes = 24
            prepared = 0
            given: Mapping[str, int] = MappingProxyType({})

            def give(self, values: Mapping[str, int]) -> None:
                self.given = values

            def prepare(self, workspace: int, stream: int) -> None:
                self.prepared = workspace

            def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
                assert self.prepared == workspace
                if kernel.image == b"raises":
                    raise RuntimeError("too many resources requested for launch")
                assert workspace
                kernel.run(rows, dict(zip(kernel.tensors, pointers, strict=True)), self.given)

        return Bound()

    def run(self, rows: int, pointers: Mapping[str, int], given: Mapping[str, int]) -> None:
        numbers = {n: np.array(bits, np.uint32).view(np.float32) for n, bits in given.items()}
        arrays = {}
        for v in (*self.plan.inputs, *self.plan.outputs):
            shape = v.type.shape(rows, self.plan.spec.d)
            dtype = np.dtype(NUMPY_DTYPE[v.type.dtype])
            count = int(np.prod(shape))
            memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointers[v.name])
            arrays[v.name] = np.frombuffer(memory, dtype, count).reshape(shape)
        results = interpret(self.plan.graph, {v.name: arrays[v.name] for v in self.plan.inputs} | numbers)
        for n, (name, values) in enumerate(results.items()):
            if self.image == b"idle":
                return
            arrays[name][...] = values
            if self.image == b"sloppy" and n == 0 and rows > 1:
                arrays[name][-1] = -arrays[name][-1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> NumpyTimer:
    monkeypatch.setattr(measure, "Launcher", Kernel)
    monkeypatch.setattr(timing, "COLD_BYTES", 100_000)
    return NumpyTimer()


def made(text: str, *images: bytes) -> list[Candidate]:
    ranked = candidates(Compilation(parse_spec(text)), 1, "sm_90")
    return [Candidate(ranked[n], n, "correct", "", f"k{n}", image) for n, image in enumerate(images)]


@pytest.mark.parametrize("text", SPECS)
def test_only_the_interpreters_bits_pass_and_are_timed_beside_a_reference(engine: NumpyTimer, text: str) -> None:
    measurer = GpuMeasurer(engine, np)
    measurer.open(parse_spec(text), 201)
    right, sloppy, idle, raising = made(text, b"right", b"sloppy", b"idle", b"raises")
    assert measurer.check(right) == ""
    rows = measurer._bits.checked_rows[1]
    assert measurer.check(sloppy).endswith(f" numbers differ with {rows} rows")
    assert measurer.check(idle).endswith(" numbers differ with 1 rows")
    for fails in (lambda: measurer.check(raising), lambda: measurer.time([right, raising], 3)):
        with pytest.raises(RuntimeError, match="too many resources"):
            fails()
    assert measurer.healthy()
    engine.captured.clear()
    found = measurer.time([right, sloppy], 3)
    assert [s.median for s in found.stats] == pytest.approx([10.0, 10.0])  # type: ignore[union-attr]
    assert (found.reference, found.drift) == pytest.approx((10.0, 0.0))
    brief = max(map(len, engine.captured))
    measurer.time([right], timing.ROUNDS)
    assert max(map(len, engine.captured)) > 1.5 * brief
    sets = measurer._sets
    assert len(sets) == len(measurer._references) >= 2
    assert all(set(i) == {*range(len(sets))} for i in engine.captured)
    names = {n for s in sets for n in s}
    assert len({engine.pointer(s[n]) for s in sets for n in names}) == len(sets) * len(names)
    # The reference writes to memory of its own, and reads what the kernels read.
    out, *read = measurer._references[1]
    assert engine.pointer(out) not in {engine.pointer(s[n]) for s in sets for n in names}
    assert len(read) == (2 if "bwd" in text else 1)
    assert all(any(a is b for b in sets[1].values()) for a in read)


def test_rounds_are_repeated_while_the_reference_moves(engine: NumpyTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = GpuMeasurer(engine, np)
    measurer.open(parse_spec(SPECS[0]), 33)
    (one,) = made(SPECS[0], b"right")
    engine.slow = {engine.replays + n for n in range(1, 100)}
    measurer._warm = True
    found = measurer.time([one], 4)
    assert found.moved == pytest.approx((1.0, 1.0))
    assert found.drift == pytest.approx(1.0)
    engine.slow = set()
    assert measurer.time([one], 4).moved == ()
    monkeypatch.setattr(NumpyTimer, "memory", lambda self: (10_000, 1000))
    with pytest.raises(LngenError, match="choose fewer rows"):
        measurer.open(parse_spec(SPECS[0]), 201)


@pytest.mark.parametrize(("kind", "overlap"), [(job.GPU, False), (job.OVERLAPPING, True)])
def test_calls_are_timed_in_turn_unless_they_are_to_overlap(engine: NumpyTimer, kind: str, overlap: bool) -> None:
    measurer = pkgutil.resolve_name(kind)(engine, np)
    measurer.open(parse_spec(SPECS[0]), 3)
    (one,) = made(SPECS[0], b"right")
    assert measurer._launcher(one).overlap is overlap


@pytest.mark.parametrize("shape", [(4, 8), (3, 7)])
def test_the_reference_adds_all_bytes_whatever_they_mean(shape: tuple[int, int]) -> None:
    """NumPy stands for CuPy; numbers of 8 bytes are still added as what they are."""
    timer = CupyTimer.__new__(CupyTimer)
    timer._cupy = np
    rng = np.random.default_rng(0)
    for dtype in ("uint16", "float64"):
        x, y = (rng.integers(0, 2**14, shape).astype(dtype) for _ in range(2))
        out = np.full(shape, 0x7FFF, dtype)
        timer.add(out, x, y)
        assert (out != x).any()
        assert dtype == "uint16" or (out == x + y).all()
