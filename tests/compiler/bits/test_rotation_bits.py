"""If these fail, a kernel that rotates heads has other bits than the interpreter: other lanes, planes or angles."""

from itertools import product

import numpy as np
import pytest

from head_bits import ARCHES, FORMS, any_seed, by_chance, by_default, executed, text_of, two_schedules
from lngen.compiler.ir import WIDE, is_of_table
from lngen.compiler.lower import lower
from lngen.compiler.spec import parse_spec
from plans import plan_of_each_form
from sampling import grid
from schedules import multipass

SPECS = (
    "rope.fwd:d=640,dtype=bf16",
    "rope.bwd:d=640,dtype=bf16,rotate=pairs,positions=i64",
    "rope.fwd:d=384,dtype=f32,head=64,rotary=32,positions=i32",
    "rope.bwd:d=768,dtype=f16,head=256,rotate=pairs,rotary=64,table_dtype=f16",
    "rope.fwd:d=512,dtype=bf16,head=64,rotate_in=x,table_dtype=bf16,quant=e4m3,y=yes",
    "rope.fwd:d=512,dtype=bf16,rotate=pairs,rotate_in=x,quant=int8,scales=block,block_size=32",
    "rope.fwd:d=192,dtype=f64,head=32,positions=i64",
    "qk_rmsnorm.fwd:d=640,dtype=bf16,k_heads=1,rotate=halves,positions=i64",
    "qk_rmsnorm.bwd:d=640,dtype=bf16,k_heads=1,rotate=halves,positions=i64",
    "qk_rmsnorm.fwd:d=1536,dtype=f16,head=256,casts=gemma,rotate=pairs,rotate_in=norm,table_dtype=bf16",
    "qk_rmsnorm.bwd:d=640,dtype=bf16,casts=llama,rotate=halves,rotate_in=x,table_dtype=bf16,rotary=64",
    "qk_rmsnorm.fwd:d=640,dtype=bf16,k_heads=1,rotate=halves,positions=i32,quant=e4m3,scales=block,block_size=32",
    "qk_layernorm.fwd:d=1024,dtype=f32,head=64,k_heads=4,rotate=pairs,strides=2",
    "qk_layernorm.bwd:d=1024,dtype=f32,head=64,k_heads=4,rotate=pairs,rotary=16,positions=i64",
    "qk_layernorm.bwd:d=5120,dtype=bf16,k_heads=8,rotate=halves,rotate_in=norm,positions=i64",
    "rope.fwd:d=240,dtype=bf16,head=80,rotary=32,positions=i64",
    "rope.bwd:d=384,dtype=f64,rotate_in=x",
    "qk_rmsnorm.bwd:d=768,dtype=bf16,head=96,k_heads=1,rotate=halves,positions=i64",
    "qk_layernorm.fwd:d=1536,dtype=f16,head=512,k_heads=1,rotate=pairs,rotary=64",
)


@pytest.mark.usefixtures("compiler")
@grid(("text", "arch"), product(SPECS, ARCHES), strength=1)
def test_default_schedules(text: str, arch: str) -> None:
    by_default(text, arch)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("text", [SPECS[1], SPECS[2], SPECS[8], SPECS[9], SPECS[-2]])
def test_every_form(text: str) -> None:
    for plan in plan_of_each_form(parse_spec(text)):
        executed(plan, 9)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("way", ["halves", "pairs"])
def test_the_kernel_that_only_adds_columns_rotates_heads(way: str) -> None:
    """Also in a block of threads that has columns for some."""
    spec = parse_spec(f"qk_rmsnorm.bwd:d=2304,dtype=bf16,head=256,k_heads=1,rotate={way},rotary=64,positions=i64")
    for rows in (0, 1, 70):
        executed(lower(spec, multipass(32, 8)), rows)


@pytest.mark.usefixtures("compiler")
@any_seed
def test_random_schedules(seed: int) -> None:
    by_chance(SPECS, seed)


OPTIONS: dict[str, tuple[str, ...]] = {
    "graph": ("rope", "qk_rmsnorm", "qk_layernorm"),
    "way": ("fwd", "bwd"),
    "head": ("16", "32", "64", "128", "256", "80", "96", "512"),
    "heads": ("1", "2", "3", "5", "9", "24"),
    "dtype": ("bf16", "f16", "f32"),
    "rotate": ("halves", "pairs"),
    "rotary": ("0", "0", "16", "32", "64"),
    "positions": ("no", "i32", "i64"),
    "table_dtype": ("f32", "bf16", "f16"),
    "rotate_in": ("f32", "norm", "x"),
    "strides": ("1", "2"),
    "quant": ("no", "no", "e4m3", "int8"),
}


def drawn(seed: int) -> str:
    """A spec of any options; the columns of a rotated width divide the head."""
    rng = np.random.default_rng([seed, 11])
    said = {key: str(rng.choice(values)) for key, values in OPTIONS.items()}
    heads = said.pop("heads")
    if int(said["head"]) % max(int(said["rotary"]), 1):
        said["rotary"] = "16"
    if (said["graph"], said["rotate_in"]) == ("rope", "norm"):  # it has no norm to round
        said["rotate_in"] = "x"
    return text_of(said, heads)


@pytest.mark.usefixtures("compiler")
@any_seed
def test_random_options(seed: int) -> None:
    """Any options and heads, under the default schedule and another one."""
    two_schedules(drawn(seed), seed)


# ---- memory ----


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("form", FORMS)
def test_y_lies_over_x_and_tables_have_a_distance(form: str) -> None:
    """Rows of x have the heads of v behind them, and those of cos and sin other columns; neither is touched."""
    for head in (128, 80):
        text = f"qk_rmsnorm.fwd:d=1280,dtype=bf16,head={head},k_heads=2,rotate=halves,positions=i64"
        plan = lower(parse_spec(text), FORMS[form])
        assert plan.in_place
        wide = {v.name: 1536 for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE}
        tables = {v.name: 128 for v in plan.inputs if is_of_table(v)}
        assert {*tables} == {"cos", "sin"}
        executed(plan, 12, strides=wide | tables, alias={"y": ("x", 0)})  # whole blocks: others read the last row twice
        executed(plan, 11, strides={"x": 1536, "y": 1280, **tables}, offset=8)
