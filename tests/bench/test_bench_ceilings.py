"""The ceilings with programmatic launch move every byte once, and nothing before the kernel before them has ended."""

from __future__ import annotations

import numpy as np
import pytest

from lngen.bench.overlapped import THREADS, OverlappedCeiling, source, variants
from lngen.bench.peers import known, select
from lngen.bench.records import is_ceiling
from lngen.bench.tasks import MOVES
from lngen.ptx import parse, run_kernel
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

SIZES = [16, 15, 1, 16 * THREADS * 4, 2 * 16 * THREADS * 4 + 16 * 3 + 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("move", MOVES)
def test_a_ceiling_moves_every_byte(move: str, size: int) -> None:
    text = source(move)
    module = parse(compile_ptx(text, "sm_90", name="ceiling.cu", lines=True))
    rng = np.random.default_rng(size)
    # Bytes below 128, so that a sum of 32-bit words is a sum of bytes.
    inputs = [rng.integers(0, 128, -(-size // 16) * 16, dtype=np.uint8) for _ in range(MOVES[move])]
    want = sum(inputs, np.zeros_like(inputs[0]))[:size]
    for v in variants(move):
        arguments = (np.zeros_like(inputs[0]), *inputs, np.int64(size))
        outcome = run_kernel(module, v.name, v.blocks(size), THREADS, arguments, source=text)
        assert outcome.findings == (), "\n".join(map(str, outcome.findings))
        np.testing.assert_array_equal(outcome.results["0"][:size], want)
        assert not outcome.results["0"][size:].any()


@pytest.mark.parametrize("move", MOVES)
def test_nothing_is_read_before_the_wait(move: str) -> None:
    kernels = compile_ptx(source(move), "sm_90").split(".entry")[1:]
    assert len(kernels) == len(variants(move))
    for kernel in kernels:
        before, _, after = kernel.partition("griddepcontrol.wait")
        assert "ld.global" not in before
        assert "ld.global" in after
        assert ("prefetch.global.L2" in before) == ("_early" in before.partition("(")[0])


def test_ceilings_are_no_peers_and_need_no_name() -> None:
    assert is_ceiling("copy-overlapped")
    assert is_ceiling("add")
    assert not is_ceiling("torch")
    assert OverlappedCeiling("copy").covers(parse_spec("layernorm.fwd:d=8"))
    assert not OverlappedCeiling("copy").covers(parse_spec("layernorm.bwd:d=8"))
    chosen = {p.name for p in select(["lngen"])}
    assert {"copy", "add"} <= chosen
    assert chosen <= {"lngen", *(n for n, p in known().items() if not p.checked)}
