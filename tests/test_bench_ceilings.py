"""The ceilings with programmatic launch move every byte once, and nothing before the kernel before them has ended."""

from __future__ import annotations

import numpy as np
import pytest

from lngen.bench.overlapped import THREADS, WORDS, OverlappedCeiling, source
from lngen.bench.peers import known, select
from lngen.bench.records import is_ceiling
from lngen.ptx import parse, run_kernel
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

BLOCK_BYTES = 16 * THREADS * WORDS


@pytest.mark.parametrize("size", [16, 15, 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 16 * 3 + 7])
@pytest.mark.parametrize("name", ["copy", "add"])
def test_a_ceiling_moves_every_byte(name: str, size: int) -> None:
    module = parse(compile_ptx(source(), "sm_90", name="ceiling.cu", lines=True))
    rng = np.random.default_rng(size)
    # Bytes below 128, so that a sum of 32-bit words is a sum of bytes.
    a, b = (rng.integers(0, 128, -(-size // 16) * 16, dtype=np.uint8) for _ in range(2))
    inputs = [a] if name == "copy" else [a, b]
    outcome = run_kernel(
        module,
        name,
        max(1, -(-size // BLOCK_BYTES)),
        THREADS,
        (np.zeros_like(a), *inputs, np.int64(size)),
        source=source(),
    )
    assert outcome.findings == (), "\n".join(map(str, outcome.findings))
    want = a if name == "copy" else a + b
    np.testing.assert_array_equal(outcome.results["0"][:size], want[:size])
    assert not outcome.results["0"][size:].any()


def test_nothing_is_read_before_the_wait() -> None:
    ptx = compile_ptx(source(), "sm_90")
    for kernel in ptx.split(".entry")[1:]:
        before, _, after = kernel.partition("griddepcontrol.wait")
        assert "ld.global" not in before
        assert "ld.global" in after
        assert "prefetch.global.L2" in before


def test_ceilings_are_no_peers_and_need_no_name() -> None:
    assert is_ceiling("copy-overlapped")
    assert is_ceiling("add")
    assert not is_ceiling("torch")
    assert OverlappedCeiling("fwd").covers(parse_spec("layernorm.fwd:d=8"))
    assert not OverlappedCeiling("fwd").covers(parse_spec("layernorm.bwd:d=8"))
    chosen = {p.name for p in select(["lngen"])}
    assert {"copy", "add"} <= chosen
    assert chosen <= {"lngen", *(n for n, p in known().items() if not p.checked)}
