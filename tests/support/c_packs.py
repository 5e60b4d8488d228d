"""A pack with a C library, for several GPUs; and a GPU that launches its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import c_launcher
from bits import spec_of
from c_library import CLibrary
from calls import CLAIMED, ONE_LAUNCH, SCHEDULES, TABLE, Call, Memory, spec
from fake_driver import FakeDriver
from launchers import CCall, Host, groups
from lngen.launch.kernels import Described
from lngen.launch.pack import Pack
from lngen.packs.build import build

OLD = "layernorm.bwd:d=80,dtype=bf16"  # as PTX of 8.0 alone
PLAIN = [spec("bf16"), spec("bf16", "bwd")]
TABLES = "rope.fwd:d=128,dtype=bf16,head=64,positions=i64"
OTHERS = [
    spec("heads"), spec("heads", "bwd") + ",accumulate=gamma", spec("max"), spec("odd"), spec("odd", "bwd"), TABLES,
]  # fmt: skip
CALLS = {
    "forward": Call(PLAIN[0], (5,)), "many rows": TABLE["many rows"], "no rows": Call(PLAIN[0], (0,)),
    "backward": Call(PLAIN[1], (30,)), "backward, no rows": Call(PLAIN[1], (0,)), "one launch": TABLE["one launch"],
    "claimed rows": TABLE["claimed rows"], "PTX of an older arch": Call(OLD),
    "heads": TABLE["q of a projection to k of another"], "eps": Call(spec("max"), eps=100.0),
    "odd D": Call(spec("odd")), "odd D, backward": Call(spec("odd", "bwd")),
}  # fmt: skip


def pack(folder: Path) -> Path:
    """The pack; kernels of 9.0 are there as PTX for newer GPUs, too."""
    for text, archs in ((ONE_LAUNCH, "sm_80,sm_90"), (CLAIMED, "sm_90"), (OLD, "sm_80+ptx")):
        build([text], folder, arch=archs, schedule=SCHEDULES.get(text, ""), emit="ptx,cubin")
    build(map(spec_of, OTHERS), folder, arch="sm_90+ptx", rows="1", emit="ptx,cubin")
    build(PLAIN, folder, arch="sm_80,sm_90+ptx", rows="1,many", emit="ptx,cubin,c")
    return folder


class Made:
    """A fake GPU that knows the pack, and a library of its own."""

    def __init__(self, folder: Path, library: Path, **how: Any) -> None:
        self.gpu = FakeDriver(**{"version": 14000, **how})
        self.gpu.knows_pack(folder)
        self.library, self.groups = CLibrary(library, folder), groups(folder)
        self._pack = Pack(folder)
        self._calls: list[CCall] = []  # whose memory is that of the GPU

    def described(self, name: str) -> Described:
        """The kernels of a call, as the manifest has them."""
        return self._pack.described(str(spec_of(CALLS[name].spec)))

    def call(self, name: str, device: int = 0, seed: int = 0) -> CCall:
        """A call of a name in CALLS; the device's context is then current."""
        c_launcher.begin(self.gpu, device)
        memory = Memory(CALLS[name], seed)
        host = Host(self.gpu, memory, device)
        self._calls.append(CCall(self.library, self.groups[str(memory.spec)], memory, host, device))
        return self._calls[-1]
