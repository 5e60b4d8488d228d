"""Packs of made-up kernel sets: those of real plans, in which whatever a launcher goes by is drawn anew."""

from __future__ import annotations

import copy
import random
from functools import cache
from pathlib import Path

from bits import spec_of
from lngen.compiler.compile import Compilation
from lngen.compiler.contract import described
from lngen.packs import manifest
from lngen.packs.c_library import OF_EPS, Wanted
from lngen.packs.manifest import Facts, Manifest
from packs import kernel_set

PLAIN = "form=registers,threads=1,rows_per_block=128,vec=1"
FEW = "form=registers,threads=1,rows_per_block=32,vec=1"
BLOCKS = "form=registers,threads=4,rows_per_block=32,vec=8"
HEADS = "form=registers,threads=16,rows_per_block=8,vec=8"
BULK = "form=tma_unaligned,threads=32,rows_per_block=1,vec=1,stages=2,grid=2,tma_store=yes"

# Schedules by spec: every form of what a description says.
BASES = {
    "layernorm.fwd:d=64,dtype=bf16": PLAIN,
    "layernorm.bwd:d=64,dtype=f16": PLAIN,
    "rmsnorm.fwd:d=64,dtype=f32,eps=run,strides=2": PLAIN,
    "rmsnorm.bwd:d=64,dtype=f64,accumulate=gamma,strides=2": FEW,
    "add_rmsnorm.fwd:d=64,dtype=bf16,out=f32": PLAIN,
    "layernorm.fwd:d=77,dtype=f32": BULK,
    "l2norm.fwd:d=64,dtype=f32,guard=max,eps=run": PLAIN,
    "block_scaled.fwd:d=512,dtype=bf16": BLOCKS,
    "rmsnorm.fwd:d=512,dtype=bf16,quant=int8,scales=block,block_size=32,scale_layout=columns": BLOCKS,
    "rope.fwd:d=128,dtype=bf16,head=64,positions=i64": HEADS,
}
ROWS = ("M", "M / 3", "ceil(M / 4)", "roundup(M, 4)")


@cache
def base(spec: str) -> Facts:
    """The description of a kernel set."""
    return described(Compilation(spec_of(spec)).changed(BASES[spec], "sm_90").plan)


def random_pack(folder: Path, seed: int) -> Manifest:
    """A pack for sm_90 with a C library; of each base several variants, of one or two classes of rows."""
    chance, made, images = random.Random(seed), Manifest(), dict[str, bytes]()
    for spec in BASES:
        for times in (1, 2, 3):
            facts = _of_width(base(spec), times)
            _draw_call(facts, chance)
            names = [f"set_{len(made.kernel_sets)}_{n}" for n in range(4)]
            sets = [_drawn(copy.deepcopy(facts), name, chance) for name in names]
            made.kernel_sets |= dict(zip(names, sets, strict=True))
            images |= {f"{name}.sm_90.cubin": name.encode() for name in names}
            made.specs[facts["spec"]["text"]] = _dispatch(names, chance)
    manifest.put(folder, made, images, Wanted())
    return manifest.read(folder)


def _of_width(facts: Facts, times: int) -> Facts:
    """The description for so many times as many features, which gives it a spec of its own."""
    found, spec = copy.deepcopy(facts), facts["spec"]
    d = times * spec["d"]
    text = spec["text"].replace(f"d={spec['d']}", f"d={d}", 1)
    found["spec"] = {**spec, "text": text, "d": d}
    for t in found["tensors"]:
        if t["strides"][:1] == ["D"]:
            t["stride_multiple"] = d
    return found


def _draw_call(facts: Facts, chance: random.Random) -> None:
    """What all kernel sets of a spec have: what follows from eps, and numbers for each row or for so many rows."""
    for t in facts["tensors"]:
        if t["axes"][:1] == ["M"] and t["axes"] != ["M", "D"]:
            t["shape"][0] = chance.choice(ROWS)
            t["axes"][0] = "M" if t["shape"][0] == "M" else "N"
    for n in facts["call"]["numbers"]:
        n |= {"rule": chance.choice(OF_EPS), "dtype": chance.choice(("f32", "f64"))}


def _drawn(facts: Facts, name: str, chance: random.Random) -> Facts:
    """A kernel set with other demands, launches and memory."""
    for t in facts["tensors"]:
        if "D" in t["axes"]:
            t["alignment"] = t["element_bytes"] * chance.choice(
                [n for n in (1, 2, 4, 8) if n * t["element_bytes"] <= 16]
            )
        if "stride" in t["strides"]:
            t["stride_multiple"] = chance.choice((1, t["alignment"] // t["element_bytes"]))
    if chance.random() < 0.3:  # a row is read again, so that only what is added to is written in place
        may = facts["in_place"]["outputs"]
        added = {t["name"]: [t["added_to"]] for t in facts["tensors"] if t["added_to"]}
        facts["in_place"] = {"outputs": {n: a for n, a in added.items() if n in may}, "reads_again": True}
    for b in facts["workspace"]["buffers"]:
        b |= {"fixed": chance.choice((0, 1, 300)), "per_row": chance.randrange(3), "zeroed": chance.random() < 0.5}
    for place, kernel in enumerate(facts["kernels"]):
        chance.shuffle(kernel["arguments"])
        kernel |= {
            "name": f"{name}_{place}",
            "grid": {axis: _extent(chance) for axis in "xy"},
            "block": 32 * chance.randint(1, 32),
            "cluster": chance.choice((1, 1, 2, 16)),
            "dynamic_shared_bytes": chance.choice((0, 1024, 99_000, 240_000)),
            "cooperative": chance.random() < 0.2,
            "launch_for_no_rows": chance.random() < 0.5,
        }
    used = {k["name"]: _resources(chance) for k in facts["kernels"]}
    own = kernel_set(name, {f"{name}.sm_90.cubin": name.encode()})
    facts["programmatic_stream_serialization"] = {"minimum_arch": chance.choice(("sm_90", "sm_100"))}
    return {**own, **facts, "name": name, "resources": {"sm_90": used} if chance.random() < 0.7 else {}}


def _extent(chance: random.Random) -> Facts:
    fixed = chance.choice((None, None, 1, 2, 5000))
    by_rows = {"per": chance.choice((1, 3, 64)), "limit": chance.choice((None, 2, 132))}
    if fixed:
        by_rows = {"per": None, "limit": None}
    return {"fixed": fixed, **by_rows, "times": chance.choice((1, 1, 4)), "least": chance.choice((0, 0, 7))}


def _resources(chance: random.Random) -> Facts:
    names = ("spill_stores", "spill_loads", "stack", "barriers")
    shared = {"shared": chance.choice((0, 16, 48_000)), "launch_shared_bytes": chance.choice((0, 2048, 100_000))}
    return {"registers": 32, "constant": None, **dict.fromkeys(names, 0), **shared}


def _dispatch(names: list[str], chance: random.Random) -> Facts:
    def choice(name: str) -> Facts:
        return {"kernel_set": name, "file": f"{name}.sm_90.cubin"}

    mosts = sorted(chance.sample((1, 8, 64, 1024), 2))
    classes = [
        {"most_bytes": most, **choice(name), "otherwise": chance.choice((None, choice(other)))}
        for most, name, other in zip(mosts, names[::2], names[1::2], strict=True)
    ]
    return {"row_bytes": chance.choice((1, 128)), "images": [{"arch": "sm_90", "kind": "cubin", "classes": classes}]}
