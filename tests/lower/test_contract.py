"""If these fail, the description of a kernel set does not say how to launch its kernels."""

import json
import re

import pytest

from lngen.compile import Compilation, KernelSet
from lngen.contract import RULES, described
from lngen.files import sha256
from lngen.launch.kernels import blocks
from lngen.launch.pack import DISPATCH_RULES
from lngen.spec import parse_spec

FWD = "layernorm.fwd:d=64,dtype=bf16"
BWD = "layernorm.bwd:d=64,dtype=bf16"
STREAM = "rmsnorm.bwd:d=65536,dtype=f32"


def kernel_set(text: str, schedule: str = "") -> KernelSet:
    return Compilation(parse_spec(text)).changed(schedule, "sm_90", compiled=False)


LAUNCHES = {
    FWD: "form=registers,threads=32,rows_per_block=1,vec=8",
    BWD: "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=2",
    STREAM: "form=multipass,threads=512,rows_per_block=1,vec=4",
    "rmsnorm.fwd:d=65536,dtype=bf16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=4,grid=30,"
    "tma_store=yes",
    "layernorm.bwd:d=8192,dtype=bf16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,single_launch=yes",
}


@pytest.mark.parametrize("text", LAUNCHES)
def test_the_description_says_how_to_launch(text: str) -> None:
    """Arguments against the source's signature; grid, workspace and tensors against the plan."""
    kernels = kernel_set(text, LAUNCHES[text])
    made, e, source = kernels.plan, described(kernels.plan), kernels.text
    assert e["graph_sha256"] == sha256(str(made.graph).encode())
    assert [k["name"] for k in e["kernels"]] == [k.name for k in made.kernels]
    for of_kernel, kernel in zip(e["kernels"], made.kernels, strict=True):
        signature = re.search(rf"^{kernel.name}\((.*?)\)", source, re.MULTILINE | re.DOTALL)
        assert signature
        declared = [" ".join(part.split()) for part in signature[1].split(",")]
        types = ["const long long" if a["ctype"] == "long long" else a["ctype"] for a in of_kernel["arguments"]]
        names = [a["name"] for a in of_kernel["arguments"]]
        assert [d.replace(" __restrict__", "") for d in declared] == [*map(" ".join, zip(types, names, strict=True))]
        for rows in (0, 1, 7, 1000, 10**6):
            assert [blocks(of_kernel["grid"][axis], rows) for axis in "xy"] == [g(rows) for g in kernel.grid]
        assert (of_kernel["block"], of_kernel["launch_for_no_rows"]) == (kernel.block, kernel.always)
        assert of_kernel["launch_rule"] == kernel.launch_rule()
        assert (of_kernel["cluster"], of_kernel["cooperative"]) == (kernel.cluster, kernel.cooperative)
        assert of_kernel["dynamic_shared_bytes"] == kernel.dynamic
        assert [of_kernel["grid"][axis]["text"] for axis in "xy"] == [str(g) for g in kernel.grid]
    assert source.count("\n    pdl_wait();\n") == len(made.kernels), "launches may overlap, it says"
    for rows in (0, 1, 100):
        offset = 0
        for b in e["workspace"]["buffers"]:
            assert made.workspace_offsets(rows)[b["name"]] == offset
            assert b["element_bytes"] == {"f32": 4, "f64": 8, "u32": 4}[b["dtype"]]
            size = (b["fixed"] + b["per_row"] * rows) * b["element_bytes"]
            offset += -(-size // 256) * 256
        assert made.workspace_bytes(rows) == offset
    assert [b["name"] for b in e["workspace"]["buffers"] if b["zeroed"]] == ["arrivals_"] * made.schedule.single_launch
    oldest = {"cp_async": "sm_80", "tma": "sm_90"}.get(made.schedule.form, "sm_75")
    assert e["minimum_arch"] == ("sm_90" if made.schedule.cluster > 1 else oldest)
    assert [t["name"] for t in e["tensors"]] == [v.name for v in (*made.inputs, *made.outputs)]
    by_name = {t["name"]: t for t in e["tensors"]}
    wide = by_name["x" if "fwd" in text else "dx"]
    assert wide["shape"] == ["rows", made.spec.d]
    assert wide["row_stride_multiple"] * wide["element_bytes"] == wide["alignment"] == 16
    used = {a["tensor"] for k in e["kernels"] for a in k["arguments"] if a["kind"] in ("input", "output")}
    assert used <= by_name.keys()


def test_the_rules_are_stated() -> None:
    """What a launcher has to know that is not a number."""
    rules = RULES | DISPATCH_RULES
    assert "8 bytes" in rules["arguments"]
    assert all(key in rules["grid"] for key in ("fixed", "per", "limit", "times", "least"))
    assert all(key in rules["launch"] for key in ("cluster", "cooperatively", "dynamic shared memory"))
    assert "before the first launch" in rules["zeroed"]
    assert "may be set" in rules["programmatic"]
    assert all(key in rules["classes"] for key in ("row_bytes", "most_bytes", "multiprocessors"))


def test_rows_at_two_distances() -> None:
    """Both strides of a tensor, the arguments that hold them, and how an address follows; of one distance nothing."""
    text = "rmsnorm.fwd:d=128,dtype=bf16"
    one, two = (described(kernel_set(t).plan) for t in (text, f"{text},strides=2"))
    assert (one["spec"]["strides"], two["spec"]["strides"]) == (1, 2)
    rule = "row r of a tensor begins (r / inner) * outer_stride + (r % inner) * stride elements after its pointer"
    assert rule in RULES["two_distances"]
    assert "outer" not in json.dumps(one)
    for tensor in two["tensors"]:
        wide = tensor["axes"] == ["M", "D"]
        assert ("outer_stride_multiple" in tensor) == wide
        if wide:
            assert tensor["outer_stride_multiple"] == tensor["row_stride_multiple"] == 8
            assert "; outer stride a multiple of 8" in tensor["layout"]
            assert tensor["layout"].endswith(", rows do not overlap") == (tensor["role"] == "output")
    (kernel,) = two["kernels"]
    kinds = [(a["kind"], a["tensor"]) for a in kernel["arguments"] if a["ctype"] == "long long"]
    strides = [(kind, name) for name in ("x", "y") for kind in ("outer_stride", "stride")]
    assert kinds == [("rows", None), ("inner", None), *strides]


def test_what_a_value_follows_from_and_how() -> None:
    """Arguments of other kinds are as they were."""
    guarded = "l2norm.fwd:d=64,dtype=f64,guard=max,eps=run"
    plain, run, square = (described(kernel_set(text).plan) for text in (FWD, f"{FWD},eps=run", guarded))
    arguments = [{a["name"]: a for a in e["kernels"][0]["arguments"]} for e in (plain, run, square)]
    value = {"kind": "value", "tensor": None, "of": "eps"}
    own = {"name": "eps", "ctype": "float", "dtype": "f32", "number": "eps", "rule": "eps"}
    assert arguments[1].pop("eps") == own | value
    assert arguments[1] == arguments[0]
    wanted = {"ctype": "double", "dtype": "f64", "rule": "max(eps * eps, 0x1p-126)"}
    assert arguments[2]["eps2"].items() >= wanted.items()
    assert [t["name"] for t in run["tensors"]] == [t["name"] for t in plain["tensors"]]
    assert (run["spec"]["eps"], run["spec"]["inputs"]) == ("run", plain["spec"]["inputs"])
    assert "a value has the size of its ctype" in RULES["arguments"]


@pytest.mark.parametrize(("text", "outputs"), [
    ("rmsnorm.fwd:d=64,dtype=bf16", {"y": ["x"]}),
    ("rmsnorm.fwd:d=64,dtype=bf16,out=f32", {}),
    ("rmsnorm.bwd:d=64,dtype=bf16,accumulate=gamma", {"dx": ["dy", "x"], "dgamma": ["dgamma_in"]}),
    ("add_rmsnorm.fwd:d=64,dtype=bf16,residual_dtype=f32", {"y": ["x"], "h": ["residual"]}),
])  # fmt: skip
def test_an_output_may_overwrite_rows_of_its_own_size(text: str, outputs: dict[str, list[str]]) -> None:
    assert described(kernel_set(text).plan)["in_place"]["outputs"] == outputs
