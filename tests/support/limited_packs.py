"""Packs whose kernels some GPUs cannot launch: they lack multiprocessors, shared memory, clusters, or an image."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fake_images import cubins_of_ptx
from lngen.packs.build import build

BWD = "layernorm.bwd:d=64,dtype=bf16"
WIDE = "rmsnorm.fwd:d=131072,dtype=bf16"
BUILDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "archs and rows": (["layernorm.fwd:d=256,dtype=bf16", "layernorm.bwd:d=256,dtype=bf16"],
     {"arch": "sm_75,sm_80,sm_90+ptx", "rows": "1,1000,many"}),
    "single launch": ([BWD], {"schedule": "form=registers,threads=8,rows_per_block=128,vec=8,single_launch=yes"}),
    "shared memory": ([BWD], {"arch": "sm_80", "device": "a100",
     "schedule": "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=4"}),
    "static shared memory": (["layernorm.bwd:d=4096,dtype=bf16"], {"arch": "sm_80", "device": "a100"}),
    "clusters": ([WIDE], {"arch": "sm_90+ptx",
     "schedule": "form=registers,threads=256,rows_per_block=1,vec=8,cluster=16"}),
}  # fmt: skip


_MADE: dict[str, Path] = {}


def limited(name: str, factory: pytest.TempPathFactory) -> Path:
    """The folder of a build, which no test changes; the PTX of each cubin lies beside it."""
    pytest.importorskip("cupy")
    if name not in _MADE:
        (specs, options), folder = BUILDS[name], factory.mktemp("pack")
        with nullcontext() if name == "static shared memory" else cubins_of_ptx():  # which the compiler tells
            build(specs, folder, emit="ptx,cubin", **options)
        _MADE[name] = folder
    return _MADE[name]
