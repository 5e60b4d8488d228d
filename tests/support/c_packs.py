"""A pack with a C library, for tests: every kind of launch, in small shapes; and a GPU that launches it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import c_launcher
from bits import spec_of
from c_library import CLibrary
from c_norms import Call, FakeMemory, Layout
from fake_driver import FakeDriver
from lngen.launch.kernels import Described
from lngen.launch.pack import Pack
from lngen.packs.build import build

ONE_LAUNCH = "form=registers,threads=16,rows_per_block=64,vec=8,prefetch=yes,single_launch=yes"
CLUSTERS = "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=2,grid=4,tma_store=yes"
CLAIMED = "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=3,dynamic=yes,cached_weights=yes"

PLAIN = [f"layernorm.{way}:d=96,dtype=bf16" for way in ("fwd", "bwd")]
OTHERS = [
    *(f"layernorm.{way}:d={d}" for way in ("fwd", "bwd") for d in ("77,dtype=f16", "33,dtype=f64")),
    "rmsnorm.fwd:d=64,dtype=bf16,strides=2", "rmsnorm.bwd:d=64,dtype=bf16,strides=2,accumulate=gamma",
    "l2norm.fwd:d=40,dtype=f32,guard=max,eps=run", "l2norm.bwd:d=40,dtype=f32,guard=max,eps=run",
    spec_of("block_scaled.fwd:d=512,dtype=bf16"), spec_of("class_loss.fwd:d=96,dtype=bf16"),
    spec_of("quantised.fwd:d=512,dtype=bf16"),
]  # fmt: skip
SPECIAL = {  # spec: schedule, archs
    "layernorm.bwd:d=128,dtype=bf16": (ONE_LAUNCH, "sm_80,sm_90"),
    "layernorm.fwd:d=16384,dtype=bf16": (CLUSTERS, "sm_90"),
    "layernorm.fwd:d=1024,dtype=bf16": (CLAIMED, "sm_90"),
    "layernorm.bwd:d=80,dtype=bf16": ("", "sm_80+ptx"),
}


def pack(folder: Path, kinds: str = "ptx,cubin,c") -> Path:
    """The pack; kernels of sm_90 are there as PTX for newer GPUs, too."""
    for spec, (schedule, archs) in SPECIAL.items():
        build([spec], folder, arch=archs, schedule=schedule, emit="ptx,cubin")
    build(OTHERS, folder, arch="sm_90+ptx", rows="1", emit="ptx,cubin")
    build(PLAIN, folder, arch="sm_80,sm_90+ptx", rows="1,many", emit=kinds)
    return folder


APART, HEADS = Layout(gap=3), Layout(gap=1, inner=3, outer_gap=5)

# Group, spec, rows, and how it is called.
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "forward": ("layernorm_forward", "layernorm.fwd:d=96,dtype=bf16", 5, {}),
    "forward, rows apart": ("layernorm_forward", "layernorm.fwd:d=96,dtype=bf16", 50, {"layout": APART}),
    "forward, odd D": ("layernorm_forward", "layernorm.fwd:d=77,dtype=f16", 3, {"layout": APART}),
    "forward, f64": ("layernorm_forward", "layernorm.fwd:d=33,dtype=f64", 3, {}),
    "forward, no rows": ("layernorm_forward", "layernorm.fwd:d=96,dtype=bf16", 0, {}),
    "backward": ("layernorm_backward", "layernorm.bwd:d=96,dtype=bf16", 30, {"layout": APART}),
    "backward, odd D": ("layernorm_backward", "layernorm.bwd:d=77,dtype=f16", 3, {}),
    "backward, f64": ("layernorm_backward", "layernorm.bwd:d=33,dtype=f64", 3, {"layout": APART}),
    "backward, no rows": ("layernorm_backward", "layernorm.bwd:d=96,dtype=bf16", 0, {}),
    "backward, one launch": ("layernorm_backward", "layernorm.bwd:d=128,dtype=bf16", 70, {}),
    "two distances": ("rmsnorm_forward_strides_2", "rmsnorm.fwd:d=64,dtype=bf16,strides=2", 7, {"layout": HEADS}),
    "two distances, added": (
        "rmsnorm_backward_accumulate_gamma_strides_2", "rmsnorm.bwd:d=64,dtype=bf16,accumulate=gamma,strides=2", 7,
        {"layout": HEADS},
    ),
    "blocks of features": ("block_scaled_forward", "block_scaled.fwd:d=512,dtype=bf16", 5, {"layout": APART}),
    "results of 8 bits": ("quantised_forward", "quantised.fwd:d=512,dtype=bf16", 5, {"layout": APART}),
    "blocks of features, no rows": ("block_scaled_forward", "block_scaled.fwd:d=512,dtype=bf16", 0, {}),
    "class indices": ("class_loss_forward", "class_loss.fwd:d=96,dtype=bf16", 5, {"layout": APART}),
    "eps of the call": (
        "l2norm_forward_guard_max_eps_run", "l2norm.fwd:d=40,dtype=f32,guard=max,eps=run", 3, {"eps": 100.0},
    ),
    "eps of the call, backward": (
        "l2norm_backward_guard_max_eps_run", "l2norm.bwd:d=40,dtype=f32,guard=max,eps=run", 3, {"eps": 100.0},
    ),
}  # fmt: skip
ON_SM_90 = {
    "clusters": ("layernorm_forward", "layernorm.fwd:d=16384,dtype=bf16", 2, {}),
    "claimed rows": ("layernorm_forward", "layernorm.fwd:d=1024,dtype=bf16", 8, {}),
    "PTX of an older arch": ("layernorm_backward", "layernorm.bwd:d=80,dtype=bf16", 3, {}),
}


def case_of(case: str, library: CLibrary, there: Pack) -> tuple[str, Described, int, dict[str, Any]]:
    """Group, kernels, rows, and how it is called; the names of own graphs have a digest."""
    group, spec, rows, how = (CASES | ON_SM_90)[case]
    named = next(g for g in library.structs if re.sub("_[0-9a-f]{8}(?=_)", "", g) == group)
    return named, there.described(str(spec_of(spec))), rows, how


class Made:
    """A fake GPU that knows the pack, and a library of its own."""

    def __init__(self, folder: Path, library: Path, **how: Any) -> None:
        self.gpu = FakeDriver(**{"version": 14000, **how})
        self.gpu.knows_pack(folder)
        self.library, self.pack = CLibrary(library, folder), Pack(folder)

    def call(self, case: str, device: int = 0, **more: Any) -> Call:
        """A call of a case; the device's context is then current."""
        group, kernels, rows, how = case_of(case, self.library, self.pack)
        c_launcher.begin(self.gpu, device)
        return Call(self.library, FakeMemory(self.gpu, device), group, kernels, rows, device=device, **how, **more)
