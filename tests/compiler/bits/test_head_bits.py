"""If these fail, a kernel of heads has other bits than the interpreter: other lanes, other weights, or another order.

The order of a sum over heads is written here once more, head by head in Python.
"""

from itertools import product

import numpy as np
import pytest

from head_bits import ARCHES, FORMS, any_seed, by_chance, by_default, compilation, executed, text_of, two_schedules
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, parse
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from plans import plan_of_each_form
from sampling import grid
from schedules import cp_async, multipass, registers, tma

ZERO = np.float32(-0.0)  # adds nothing to any number

# ---- the order of a sum over heads ----

OVER_HEADS = """graph @of_heads {E = D % 4, order=v1}(%x: f32[D]) -> (f32[E]) {
  %total : f32[E] = reduce_sum %x {axis=D, blocks=16, groups=1, interleave=16, to=E}
  return %total
}
"""


def test_the_order_of_a_sum_over_heads() -> None:
    """Head h belongs to partial sum h % 16, which adds its heads in order; the upper half is added onto the lower."""
    for heads in (1, 2, 15, 16, 17, 40, 100):
        x = np.random.default_rng(heads).normal(size=(heads, 4)).astype(np.float32)
        strands = [np.full(4, ZERO)] * 16
        for h, row in enumerate(x):
            strands[h % 16] = strands[h % 16] + row
        while len(strands) > 1:
            half = len(strands) // 2
            strands = [a + b for a, b in zip(strands[:half], strands[half:], strict=True)]
        total = interpret(parse(OVER_HEADS), {"x": x.reshape(-1)})["total"]
        assert total.tobytes() == strands[0].tobytes(), heads


def test_the_text_of_a_backward_has_it() -> None:
    text = str(parse_spec("qk_rmsnorm.bwd:d=640,dtype=bf16,k_heads=1").graph())
    assert text.count("{axis=D, blocks=16, groups=1, interleave=16, to=E}") == 2
    assert text.count("axis=M") == 1  # one sum over rows for the weights of q and of k


# ---- kernels ----

SPECS = (
    "qk_rmsnorm.fwd:d=640,dtype=bf16,k_heads=1",
    "qk_rmsnorm.bwd:d=640,dtype=bf16,k_heads=1",
    "qk_rmsnorm.bwd:d=5120,dtype=bf16,k_heads=8,casts=llama",
    "qk_rmsnorm.fwd:d=1536,dtype=f16,head=256,k_heads=2,casts=gemma",
    "qk_rmsnorm.bwd:d=768,dtype=f16,head=32,k_heads=8,zero_centred=yes",
    "qk_rmsnorm.fwd:d=512,dtype=bf16,head=64,head_weights=own,casts=llama",
    "qk_rmsnorm.bwd:d=512,dtype=bf16,head=64,head_weights=own,weight=f32",
    "qk_rmsnorm.fwd:d=640,dtype=bf16,k_heads=1,quant=e4m3,y=yes",
    "qk_rmsnorm.fwd:d=640,dtype=bf16,k_heads=1,quant=e4m3,scales=block,block_size=32",
    "qk_rmsnorm.fwd:d=640,dtype=bf16,quant=int8,scales=tensor,amax=yes",
    "qk_rmsnorm.bwd:d=640,dtype=bf16,k_heads=1,accumulate=gamma_k,grad=f32,eps=run",
    "qk_layernorm.fwd:d=1024,dtype=f32,head=64,k_heads=4",
    "qk_layernorm.bwd:d=1024,dtype=f32,head=64,k_heads=4",
    "qk_layernorm.fwd:d=768,dtype=bf16,head=16,k_heads=8,casts=eager,out=f32,strides=2",
    "qk_layernorm.bwd:d=768,dtype=bf16,head=16,k_heads=8,beta=no,casts=eager",
    "qk_layernorm.bwd:d=9216,dtype=bf16,k_heads=8",
    "qk_layernorm.fwd:d=384,dtype=f64",
    "qk_layernorm.bwd:d=192,dtype=f64,head=64,gamma=no",
    "qk_rmsnorm.fwd:d=400,dtype=bf16,head=80,k_heads=1,casts=llama",
    "qk_rmsnorm.bwd:d=768,dtype=bf16,head=96,k_heads=1",
    "qk_layernorm.bwd:d=1536,dtype=f32,head=512,k_heads=1",
)


@pytest.mark.usefixtures("compiler")
@grid(("text", "arch"), product(SPECS, ARCHES), strength=1)
def test_default_schedules(text: str, arch: str) -> None:
    by_default(text, arch)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("text", [SPECS[1], SPECS[3], SPECS[12], SPECS[-2]])
def test_every_form(text: str) -> None:
    for plan in plan_of_each_form(parse_spec(text)):
        executed(plan, 9)


LAYOUTS = (  # spec, schedule, and whether a thread's vector has a run of each half of a head
    ("qk_rmsnorm.bwd:d=640,dtype=bf16,k_heads=1", registers(32, 16, 8), True),
    ("qk_rmsnorm.fwd:d=640,dtype=bf16,rotate=halves", tma(64, 1, 8, 2, grid=2), True),
    ("qk_rmsnorm.fwd:d=640,dtype=bf16,rotate=pairs,rotary=64", tma(64, 1, 8, 2, "store", grid=2), True),
    ("qk_layernorm.fwd:d=640,dtype=f32", cp_async(32, 2, 4, 2, grid=3), True),
    ("qk_rmsnorm.fwd:d=640,dtype=bf16,rotate=halves,rotary=64", tma(64, 1, 8, 2, grid=2), False),
    ("qk_rmsnorm.fwd:d=640,dtype=bf16", multipass(128, 8), False),
    ("qk_layernorm.fwd:d=768,dtype=f32,head=256", registers(64, 1, 4), False),  # more vectors than lanes
    ("qk_rmsnorm.fwd:d=640,dtype=bf16,head=80", registers(64, 1, 8), False),  # no power of two
    ("qk_rmsnorm.fwd:d=640,dtype=bf16,head=8", registers(64, 1, 8), False),
    ("rmsnorm.fwd:d=640,dtype=bf16,quant=e4m3,scales=block", registers(64, 1, 8), False),  # a sum of the row
)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("text", "schedule", "halves"), LAYOUTS, ids=[text for text, _, _ in LAYOUTS])
def test_a_thread_has_both_halves_of_heads(text: str, schedule: Schedule, halves: bool) -> None:
    kernels = compilation(text).kernels(schedule)
    assert ("HeadRowLayout<" in kernels.text) is halves
    executed(kernels.plan, 5)


MULTIPASS = {
    "qk_layernorm.bwd:d=9216,dtype=bf16,k_heads=8": 128,
    "qk_rmsnorm.bwd:d=2304,dtype=bf16,head=256,k_heads=1": 32,  # whose last block of threads has no whole warp
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("text", MULTIPASS)
def test_the_kernel_that_only_adds_columns_folds_heads(text: str) -> None:
    """Also in a block of threads that has columns for some."""
    for rows in (0, 1, 200):
        executed(lower(parse_spec(text), multipass(MULTIPASS[text], 8)), rows)


@pytest.mark.usefixtures("compiler")
@any_seed
def test_random_schedules(seed: int) -> None:
    by_chance(SPECS, seed)


OPTIONS: dict[str, tuple[str, ...]] = {
    "graph": ("qk_rmsnorm", "qk_layernorm"),
    "way": ("fwd", "bwd"),
    "head": ("8", "16", "32", "64", "128", "256", "24", "80", "96", "512"),
    "heads": ("1", "2", "3", "5", "9", "24"),
    "dtype": ("bf16", "f16", "f32"),
    "weight": ("bf16", "f16", "f32"),
    "k_heads": ("0", "1", "1"),
    "casts": ("once", "once", "llama", "gemma", "t5", "nemotron", "eager"),
    "gamma": ("yes", "yes", "no"),
    "beta": ("yes", "no"),
    "eps": ("1e-5", "1e-6", "run"),
    "strides": ("1", "2"),
    "quant": ("no", "no", "e4m3", "int8"),
}


def drawn(seed: int) -> str:
    """A spec of any options that go together."""
    rng = np.random.default_rng([seed, 7])
    said = {key: str(rng.choice(values)) for key, values in OPTIONS.items()}
    heads = said.pop("heads")
    if said["casts"] in (("llama", "gemma", "t5") if said["graph"] == "qk_layernorm" else ("nemotron", "eager")):
        said["casts"] = "once"
    if said["casts"] == "nemotron" and said["gamma"] == "no":
        said["casts"] = "once"
    return text_of(said, heads)


@pytest.mark.usefixtures("compiler")
@any_seed
def test_random_options(seed: int) -> None:
    """Any options and heads, under the default schedule and another one."""
    two_schedules(drawn(seed), seed)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "text", ["qk_rmsnorm.fwd:d=8320,dtype=bf16,k_heads=1", "qk_layernorm.bwd:d=8320,dtype=bf16,k_heads=1"]
)
def test_65_heads_are_one_segment(text: str) -> None:
    """Of two segments, as other rows of their length have, a head would lie across both."""
    found = compilation(text)
    plan = found.kernels(found.schedule("sm_90")).plan
    assert (plan.problem.segments, plan.problem.blocks_meet) == (1, False)
    executed(plan, 7)


# ---- memory ----


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("form", FORMS)
def test_y_lies_over_x_in_a_packed_projection(form: str) -> None:
    """Rows of x have the heads of v behind them, which nothing reads or writes."""
    plan = lower(parse_spec("qk_rmsnorm.fwd:d=1280,dtype=bf16,k_heads=2"), FORMS[form])
    assert plan.in_place
    wide = {v.name: 1536 for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE}
    executed(plan, 12, strides=wide, alias={"y": ("x", 0)})  # whole blocks of rows: others read the last row twice
    executed(plan, 11, strides={"x": 1536, "y": 1280}, offset=8)
