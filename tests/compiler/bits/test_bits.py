"""A kernel gives other bits than the interpreter, or breaks a rule of its memory, if these fail."""

from collections.abc import Hashable
from itertools import combinations, product

import numpy as np
import pytest

import sampling
from bits import Case, check, spec_of, unit_of
from lngen.compiler.interpret import interpret
from lngen.compiler.lower import lower
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from number_graphs import schedules
from schedules import cp_async, multipass, registers, tma, unaligned, without_store

pytest.importorskip("cupy")


# Structures of graphs of one's own, and rows in which a mistake was found once.
NAMED = [
    Case("peaked.fwd:d=8200,dtype=bf16",
         tma(64, 2, 8, 2, "regs early dynamic", cluster=2, grid=2), (3, 23), order=1, times=2),
    Case("peaked.fwd:d=8200,dtype=bf16", cp_async(128, 2, 8, 2, grid=1), (3,)),
    Case("peaked.bwd:d=8200,dtype=bf16,blocks=3", tma(128, 1, 8, 2, "store", cluster=2, grid=2), (7,)),
    Case("plain.fwd:d=8200,dtype=bf16", tma(128, 1, 8, 2, "store", cluster=2, grid=2), (5,)),
    Case("plain.bwd:d=8200,dtype=bf16,blocks=3", tma(128, 1, 8, 2, "single", cluster=2), (5,)),
    Case("block_scaled.fwd:d=512,dtype=bf16", registers(64, 4, 8), (0, 5)),
    Case("block_scaled.fwd:d=768", tma(32, 4, 4, 2, "store", grid=2), (7,)),
    Case("block_scaled.fwd:d=992,dtype=bf16", cp_async(32, 2, 8, 2, grid=2), (7,)),
    Case("block_scaled.fwd:d=20480,dtype=bf16", registers(128, 1, 8, cluster=2), (3,)),
    Case("block_scaled.fwd:d=16384", multipass(256, 4), (3,)),
    Case("block_scaled.fwd:d=96,dtype=f64", registers(16, 8, 2), (5,)),
    Case("block_scaled.bwd:d=512,dtype=bf16,of=y", tma(32, 16, 8, 2), (19,)),
    # Blocks that lie across segments, or have no power of two of vectors: 32 features, or those in the name.
    Case("block_scaled.fwd:d=8224,dtype=bf16", tma(128, 2, 8, 2, "store", grid=2), (5,)),
    Case("block_scaled128.fwd:d=8320,dtype=bf16", registers(256, 1, 8), (0, 3)),
    Case("block_scaled128.fwd:d=8320,dtype=bf16", tma(128, 1, 8, 2, "cached regs early dynamic", grid=2), (7,)),
    Case("block_scaled128.fwd:d=8320,dtype=bf16", multipass(32, 8), (3,), alias="y=x"),
    Case("block_scaled64.fwd:d=8320", registers(256, 1, 4, cluster=2), (3,)),
    Case("block_scaled.bwd:d=4128,of=y", tma(1024, 1, 4, 2), (3,)),
    Case("block_scaled64.fwd:d=11008,dtype=bf16", multipass(256, 8), (3,)),
    Case("block_scaled128.fwd:d=11008", cp_async(256, 1, 4, 2, grid=1), (3,)),
    Case("block_scaled256.fwd:d=11008", registers(512, 1, 4), (3,)),
    Case("block_scaled16.fwd:d=16640", registers(256, 1, 4, "cached"), (3,)),
    Case("block_scaled64.fwd:d=16640", multipass(128, 4), (2,)),
    Case("block_scaled128.fwd:d=16640,dtype=bf16", tma(128, 2, 8, 2, "regs dynamic", cluster=2, grid=2), (5,)),
    Case("block_scaled256.fwd:d=16640,dtype=f16", cp_async(512, 1, 8, 2, "cached regs", grid=2), (5,)),
    Case("block_scaled24.fwd:d=960,dtype=bf16", registers(16, 8, 8), (9,)),
    Case("block_scaled96.fwd:d=960,dtype=bf16", tma(8, 16, 8, 2, "store", grid=1), (37,)),
    Case("block_scaled96.bwd:d=960,of=y", cp_async(64, 4, 4, 2), (19,)),
    Case("scaled_twice.fwd:d=8640,dtype=bf16", registers(512, 1, 8, "prefetch"), (5,)),
    Case("scaled_twice.fwd:d=480,dtype=f64", tma(32, 4, 2, 2), (9,)),
    Case("divided.fwd:d=480", registers(64, 8, 4), (1030,)),
    Case("group_normed.fwd:d=512,dtype=bf16", registers(64, 4, 8), (5,)),
    Case("group_normed.fwd:d=1008,dtype=f16", tma(32, 4, 8, 2, grid=2), (7,)),
    Case("group_normed.bwd:d=4096", cp_async(128, 1, 4, 2, grid=2), (3,)),
    Case("class_loss.fwd:d=1000,dtype=bf16", tma(32, 2, 8, 2, grid=2), (0, 7)),
    Case("class_loss.fwd:d=1001", without_store(32, 2, 1, 2, grid=2), (7,)),
    Case("class_loss.fwd:d=20000,dtype=bf16", registers(128, 1, 8, cluster=2), (3,)),
    Case("class_loss.bwd:d=1000,dtype=bf16", cp_async(32, 2, 8, 2, grid=2), (7,)),
    Case("class_loss.bwd:d=9000", multipass(256, 4), (3,)),
    Case("taken.fwd:d=1000,dtype=bf16", registers(32, 2, 8), (0, 7), inner=3),
    Case("taken.fwd:d=1001", registers(32, 2, 1), (7,)),
    Case("taken.bwd:d=1000,dtype=bf16", tma(32, 8, 8, 2), (7,), inner=3),
    Case("taken.bwd:d=9000", multipass(256, 4), (3,)),
    Case("taken_of_sums.fwd:d=1000", tma(64, 2, 4, 2, grid=2), (0, 7), alias="y=x", inner=3),
    Case("taken_of_sums.fwd:d=20000,dtype=bf16", registers(128, 1, 8, cluster=2), (3,), alias="y=x"),
    Case("placed.fwd:d=96", registers(8, 4, 4), (3,)),
    Case("placed.bwd:d=100", registers(16, 32, 4), (0, 3)),
    Case("placed.bwd:d=9000,blocks=2", multipass(256, 4), (3,)),
    Case("mixed.fwd:d=20001", without_store(256, 1, 1, 2, "cached regs", grid=1), (3,)),
    Case("halved.fwd:d=96,dtype=bf16,weight=f16", registers(8, 128, 4, "single"), (37,)),
    Case("apart.fwd:d=96", registers(8, 4, 4), (3,)),
    Case("apart.fwd:d=8200", tma(256, 1, 4, 2, "regs", cluster=2, grid=1), (3,)),
    Case("apart.fwd:d=8200", multipass(256, 4), (3,)),
    Case("exchanged_twice.fwd:d=96", registers(8, 4, 4), (3,)),
    Case("exchanged_twice.fwd:d=8200", multipass(256, 4), (3,)),
    Case("exchanged_twice.fwd:d=8200", registers(64, 2, 4, cluster=2), (3,)),
    Case("crossed.fwd:d=8200", multipass(256, 4), (2,)),
    Case("crossed.fwd:d=32768", registers(256, 1, 4, cluster=4), (2,)),
    Case("early_and_late.fwd:d=1000,dtype=bf16", tma(32, 2, 8, 2, grid=2), (7,), alias="before=x after=residual"),
    Case("early_and_late.fwd:d=1000,dtype=bf16", tma(32, 2, 8, 2, grid=2), (7,), alias="before=z after=x"),
    Case("early_and_late.fwd:d=1000,dtype=bf16", registers(32, 2, 8), (7,), alias="before=residual after=z"),
    Case("stream.fwd:d=64", registers(1, 32, 4), (3,)),
    Case("stream.fwd:d=64", multipass(32, 4), (3,)),
    Case("stream.fwd:d=64", tma(1, 64, 4, 2, grid=2), (3,)),
    Case("stream.fwd:d=64", tma(1, 64, 4, 2, "store", grid=2), (3,)),
    Case("twice.fwd:d=37,dtype=bf16", registers(8, 64, 1), (3,)),
    Case("hostile.fwd:d=8", registers(1, 32, 4), (5,)),
    Case("hostile.bwd:d=8,wrt=X+first+step+rows+seen", registers(1, 64, 4), (5,)),
    Case("hostile.fwd:d=64", tma(1, 64, 4, 2, grid=2), (5,)),
    Case("hostile.bwd:d=64,wrt=X+first+step+rows+seen", tma(1, 64, 4, 2), (5,)),
    Case("hostile.fwd:d=99", unaligned(8, 8, 1, 2, grid=2), (5,)),
    Case("hostile.fwd:d=64", cp_async(1, 64, 4, 2, grid=2), (5,)),
    Case("hostile.fwd:d=9", multipass(32, 1), (5,)),
    Case("numbers_of_rows.fwd:d=64", registers(1, 128, 4), (7,)),
    Case("result_alone.fwd:d=64", registers(4, 128, 4), (7,), inner=3),
    Case("weights_alone.fwd:d=300,dtype=bf16", registers(4, 128, 4), (0, 2)),
    Case("weights_alone.fwd:d=1", registers(1, 128, 1, "cached"), (0,)),
    Case("statistic_of_columns.fwd:d=37", cp_async(4, 64, 1, 6, "regs"), (3, 37)),
    Case("without_effect.bwd:d=96", registers(8, 64, 4), (3,)),
    Case("without_effect.bwd:d=96,wrt=s", registers(1, 128, 4), (3,)),
    Case("norm_and_sum.bwd:d=37", cp_async(8, 64, 1, 3, "cached regs"), (3,)),
    Case("norm_and_sum.bwd:d=37,of=residual_out", cp_async(16, 32, 1, 6, grid=2), (3,)),
    Case("two_norms.bwd:d=37,dtype=bf16", registers(8, 64, 1, "prefetch"), (3,)),
    Case("two_kinds.bwd:d=37", cp_async(8, 64, 1, 4, "cached regs"), (3,)),
    Case("norms_apart.bwd:d=37,dtype=bf16,of=x_hat", registers(8, 128, 1), (3,)),
    Case("chained.bwd:d=37", cp_async(16, 64, 1, 4, "cached"), (3,)),
    Case("clashing.fwd:d=96", cp_async(8, 32, 4, 6, "cached regs", grid=2), (3,), eps=0.5),
    Case("sums8.fwd:d=1", registers(2, 16, 1, "prefetch"), (37,)),
    Case("sums9.fwd:d=2,dtype=f64", registers(4, 8, 2, "prefetch single"), (37,)),
    Case("sums13.fwd:d=1,dtype=f64", cp_async(32, 5, 1, 6), (37,)),
    Case("sums33.fwd:d=37,dtype=f64", without_store(32, 2, 1, 6), (37,)),
    Case("rmsnorm.bwd:d=381,dtype=f64,blocks=3", multipass(32, 1), (1, 53)),
    Case("parallel_layernorm.bwd:d=96,x1=yes,colscale=yes,blocks=2", multipass(32, 4), (1, 100)),
    Case("layernorm.bwd:d=1500,blocks=2", multipass(32, 4), (1, 21)),
    Case("columns.fwd:d=200", multipass(32, 4), (0, 1, 99)),
    Case("weights.fwd:d=4", registers(1, 128, 4, "cached"), (20000,)),
    Case("weights.fwd:d=8192", registers(32, 16, 4, cluster=2), (20000,)),
    Case("layernorm.fwd:d=16392,out=bf16", tma(128, 1, 4, 2, cluster=8, grid=2), (5,)),
    Case("layernorm.fwd:d=17,dtype=f64", unaligned(32, 1, 1, 2, grid=2), (9,)),
    Case("layernorm.fwd:d=37,out=bf16", unaligned(32, 1, 1, 2, grid=2), (9,)),
    Case("layernorm.fwd:d=1001,dtype=f16", unaligned(64, 1, 1, 2, grid=2), (0, 1, 7)),
    Case("layernorm.bwd:d=1001,dtype=f16,blocks=2", unaligned(64, 8, 1, 2), (0, 1, 9)),
    Case("layernorm.bwd:d=1001,dtype=bf16,blocks=2,wrt=gamma+beta", without_store(64, 8, 1, 4, "single"), (11,)),
    Case("add_rmsnorm.bwd:d=1000,accumulate=residual,blocks=2",
         registers(64, 4, 4), (7,), alias="dresidual=dresidual_in"),
    Case("gated_rmsnorm.fwd:d=64,dtype=bf16,casts=llama", registers(8, 16, 8), (19,)),
    Case("gated_rmsnorm.bwd:d=37,dtype=bf16,casts=llama,blocks=2", registers(1, 128, 1), (19,)),
    Case("layernorm.bwd:d=37,dtype=bf16,casts=nemotron,blocks=2", registers(1, 128, 1), (19,)),
    Case("l2norm.fwd:d=40", cp_async(8, 32, 4, 6, "regs", grid=2), (3,), eps=-0.25),
    Case("l2norm.bwd:d=40,save=none", cp_async(8, 32, 4, 3, "regs", grid=2), (3,), eps=1e-06),
]  # fmt: skip

# What ``factors`` gives, two by two: every pair that exists.
COVER = [
    Case("amax.fwd:d=1,dtype=f64", registers(1, 32, 1, "prefetch"), (3,)),
    Case("dyt.fwd:d=37,dtype=bf16,weight=f32", registers(8, 4, 1), (5,)),
    Case("gated_layernorm.fwd:d=8200,gate_first=yes,dtype=f16",
         registers(256, 1, 8, "cached"), (3, 0), gaps=True, eps=-0.25, arch="sm_75"),
    Case("parallel_layernorm.fwd:d=37,residual_dtype=bf16,round_sum=no,rowscale=yes,dtype=f64",
         registers(32, 1, 1, "cached"), (5,), gaps=True, eps=-0.25, arch="sm_75"),
    Case("softmax.fwd:d=37,scale=-2,dtype=bf16", registers(32, 1, 1), (5,)),
    Case("columns.bwd:d=1,dtype=f64,of=sum", registers(1, 128, 1, "cached"), (3,)),
    Case("dyt.bwd:d=37,dtype=bf16,weight=f32,blocks=2", registers(2, 128, 1), (5,)),
    Case("everything.bwd:d=1,dtype=f64", registers(1, 128, 1), (3,)),
    Case("gated_rmsnorm.bwd:d=1000,dtype=f16,accumulate=gamma,blocks=2",
         registers(64, 8, 8, "single"), (7,), alias="dgamma=dgamma_in", order=1, times=2, arch="sm_120"),
    Case("layernorm.bwd:d=1000,dtype=bf16,accumulate=gamma+beta,blocks=2",
         registers(64, 8, 8, "prefetch single"), (7,), alias="dgamma=dgamma_in dbeta=dbeta_in", arch="sm_80"),
    Case("rmsnorm_sigmoid_mul.bwd:d=37,beta=no,dtype=bf16,blocks=2",
         registers(1, 128, 1, "prefetch single"), (5,), gaps=True, order=1, times=2, arch="sm_80"),
    Case("softmax.bwd:d=37,scale=-2,dtype=bf16,blocks=2", registers(32, 1, 1), (5,)),
    Case("weights.bwd:d=37,of=share+most+rows,wrt=gamma+u", registers(1, 128, 1), (37, 0)),
    Case("add_rmsnorm.fwd:d=8200,save=none,dtype=f64",
         registers(128, 2, 2, cluster=8), (3, 0), gaps=True, order=3, times=2, eps=1e-06, arch="sm_120"),
    Case("rmsnorm.fwd:d=8200,eps=0.3,dtype=bf16",
         registers(64, 4, 8, "cached", cluster=2), (3, 0), inner=2, order=1, arch="sm_120"),
    Case("log_softmax.bwd:d=8200,dtype=f16,blocks=2",
         registers(128, 2, 8, cluster=2), (3, 0), alias="dx=x", order=3, arch="sm_120"),
    Case("l2norm.fwd:d=1000,guard=max,save=none,dtype=f64",
         cp_async(64, 1, 2, 4, grid=2), (3, 0), gaps=True, eps=0.5, arch="sm_86"),
    Case("layernorm.fwd:d=1002,dtype=bf16", cp_async(32, 1, 2, 3, grid=2), (7,), inner=3, order=1, arch="sm_80"),
    Case("layernorm.fwd:d=1002,dtype=bf16", cp_async(32, 1, 2, 3, grid=2), (7,), gaps=True),
    Case("layernorm_sigmoid_mul.fwd:d=40", cp_async(4, 64, 4, 4, "cached regs", grid=2), (3,)),
    Case("loss.fwd:d=1,dtype=f64", cp_async(1, 128, 1, 3, "regs", grid=2), (3,)),
    Case("rmsnorm.fwd:d=64,dtype=f16,weight=f32", cp_async(4, 16, 8, 2, "cached regs", grid=2), (77,)),
    Case("rmsnorm.fwd:d=999,beta=yes",
         cp_async(64, 2, 1, 4, "cached", grid=2), (9,), gaps=True, order=2, times=2, eps=0.5, arch="sm_120"),
    Case("rmsnorm_act.fwd:d=40", cp_async(4, 64, 4, 3, "cached regs", grid=2), (3,)),
    Case("variance.fwd:d=1000,dtype=f16", cp_async(128, 8, 8, 6, "single"), (3,), inner=1, arch="sm_80"),
    Case("add_rmsnorm.bwd:d=1000,dtype=bf16,accumulate=gamma,blocks=2",
         cp_async(64, 8, 8, 2, "single"), (7,), alias="dgamma=dgamma_in", order=1),
    Case("parallel_rmsnorm.bwd:d=1000,residual_dtype=f32,dtype=bf16,blocks=2", cp_async(32, 8, 8, 2, "cached"), (3, 0)),
    Case("rmsnorm.bwd:d=8192,dtype=bf16,blocks=4",
         cp_async(256, 1, 8, 2, "single"), (3,), alias="dx=x", order=1, arch="sm_80"),
    Case("scaled.bwd:d=37", cp_async(16, 64, 1, 6, "cached single"), (37, 0), alias="dx=x", times=2, arch="sm_80"),
    Case("add_layernorm.fwd:d=40,residual=no,x1=yes,dtype=f64",
         tma(16, 16, 2, 5, "cached regs early", grid=2), (5,), gaps=True),
    Case("everything.fwd:d=4096", tma(64, 1, 4, 4, "single regs early"), (3,)),
    Case("layernorm.fwd:d=1024,dtype=bf16",
         tma(32, 1, 8, 2, "regs dynamic", grid=2), (9,), alias="y=x", times=2, eps=1e-06),
    Case("layernorm.fwd:d=8200,save=rstd,dtype=f64",
         tma(256, 1, 2, 2, "regs dynamic", grid=2), (3, 0), inner=2, order=2, eps=0.0, arch="sm_100"),
    Case("rmsnorm.fwd:d=1004,out=bf16", tma(32, 4, 4, 2, grid=2), (17,)),
    Case("rmsnorm.fwd:d=256,dtype=f16", tma(32, 4, 8, 2, "store dynamic", grid=1), (1, 9, 17)),
    Case("scaled.fwd:d=1000,dtype=f16",
         tma(32, 4, 8, 6, "cached regs early dynamic", grid=2), (3,), gaps=True, order=1, arch="sm_120"),
    Case("add_layernorm.bwd:d=8200,residual_dtype=bf16,rowscale=yes,dtype=f16,blocks=2", tma(256, 1, 8, 3), (3, 0)),
    Case("add_rmsnorm.bwd:d=1000,dtype=bf16,accumulate=gamma",
         tma(64, 8, 8, 2, "cached"), (7,), alias="dgamma=dgamma_in"),
    Case("gated_rmsnorm.bwd:d=40,save=none,blocks=2",
         tma(16, 64, 4, 4, "cached regs early"), (3,), inner=2, order=3, times=2, eps=1e-06, arch="sm_100"),
    Case("layernorm.bwd:d=768,out=bf16", tma(32, 16, 8, 2, "store"), (17,)),
    Case("layernorm_act.bwd:d=1000,act=gelu_tanh,dtype=bf16,blocks=2",
         tma(64, 8, 8, 2, "store single regs"), (3, 0), gaps=True),
    Case("layernorm_sigmoid_mul.bwd:d=40,save=none,blocks=2", tma(16, 64, 4, 5, "cached regs early"), (3,)),
    Case("loss.bwd:d=4096,of=rows+loss",
         tma(128, 2, 4, 2, "regs early dynamic", grid=2), (3,), gaps=True, arch="sm_120"),
    Case("rmsnorm.bwd:d=8192,dtype=bf16", tma(256, 1, 8, 2, "store cached"), (1, 3)),
    Case("rmsnorm_act.bwd:d=40,save=none,blocks=2", tma(16, 64, 4, 6, "cached regs early"), (3,)),
    Case("add_layernorm.fwd:d=8200,residual_dtype=bf16,rowscale=yes,dtype=f16",
         tma(64, 1, 8, 2, "cached regs dynamic", cluster=2, grid=2), (3, 0), alias="h=x", eps=1e-06),
    Case("add_rmsnorm.fwd:d=8200,save=none,dtype=f64",
         tma(256, 3, 2, 3, "cached regs dynamic", cluster=8, grid=2), (3, 0), inner=2, eps=0.5, arch="sm_120"),
    Case("layernorm.fwd:d=12288,dtype=bf16",
         tma(128, 1, 8, 2, "store cached", cluster=2, grid=1), (5,), inner=2, order=3, arch="sm_120"),
    Case("layernorm.fwd:d=12288,dtype=bf16",
         tma(128, 1, 8, 2, "store cached", cluster=2, grid=1), (5,), alias="y=x", times=2, eps=1e-06),
    Case("layernorm.fwd:d=12288,dtype=bf16", tma(256, 1, 8, 2, "regs early dynamic", cluster=2, grid=1), (5,)),
    Case("layernorm.fwd:d=12288,dtype=f16",
         tma(128, 2, 8, 2, "cached regs early", cluster=2, grid=2), (1, 13), gaps=True, order=1),
    Case("rmsnorm.fwd:d=8200,dtype=f64",
         tma(128, 1, 2, 2, "store", cluster=4, grid=2), (3,), alias="y=x", order=1, eps=1e-06),
    Case("l2norm.bwd:d=8200,guard=max,save=none,blocks=2",
         tma(512, 1, 4, 5, "store regs dynamic", cluster=2, grid=2), (3, 0), gaps=True),
    Case("layernorm.bwd:d=5120,dtype=bf16,blocks=2", tma(64, 4, 8, 2, "cached regs early acquire", cluster=2), (33,)),
    Case("layernorm.fwd:d=333,dtype=bf16", unaligned(32, 2, 1, 3, "regs dynamic", grid=2),
         (1, 13, 25), alias="y=x", order=3, times=2, eps=0.5, arch="sm_120"),
    Case("layernorm.fwd:d=333", unaligned(64, 1, 1, 2, "dynamic", grid=2), (1, 7, 13)),
    Case("layernorm_act.fwd:d=37,gamma=no",
         unaligned(16, 4, 1, 2, "cached regs", grid=2), (5,), alias="y=x", order=2, eps=0.0),
    Case("rmsnorm.fwd:d=37,dtype=f16,weight=f32", unaligned(32, 1, 1, 4, grid=2), (1, 14)),
    Case("gated_layernorm.bwd:d=37,gate_first=yes,act=gelu_tanh,blocks=2",
         unaligned(16, 64, 1, 2, "cached single regs"), (5,), alias="dx=x", order=2, times=2, arch="sm_100"),
    Case("layernorm.bwd:d=4093,dtype=f16,weight=f32,blocks=2", unaligned(512, 2, 1, 2, "regs"), (1, 11)),
    Case("rmsnorm.bwd:d=1002,dtype=f64,out=f16,blocks=2", unaligned(128, 4, 2, 3, "single regs"), (1, 29)),
    Case("cross_entropy.fwd:d=37,save=none,dtype=f16", multipass(32, 1), (5,)),
    Case("gated_rmsnorm.fwd:d=37,eps=0.3,dtype=f16", multipass(32, 1), (5,), gaps=True, order=3),
    Case("log_softmax.fwd:d=37,save=none", multipass(32, 1), (5,)),
    Case("parallel_rmsnorm.fwd:d=1000,residual_dtype=f32,dtype=bf16", multipass(64, 8), (3, 0), inner=1, arch="sm_120"),
    Case("rmsnorm_sigmoid_mul.fwd:d=40,beta=yes,dtype=f16",
         multipass(32, 8), (5,), alias="y=x", order=1, times=2, eps=1e-06, arch="sm_75"),
    Case("cross_entropy.bwd:d=1000,save=rowmax,blocks=2", multipass(128, 4), (3, 0), gaps=True, times=2),
    Case("rmsnorm.bwd:d=8200,dtype=bf16,accumulate=gamma,blocks=2", multipass(256, 8), (7,), alias="dgamma=dgamma_in"),
    Case("rmsnorm.bwd:d=9001,blocks=2,save=none", multipass(256, 1), (5,), gaps=True),]  # fmt: skip
CASES = NAMED + COVER


def length(case: Case) -> str:
    """The class of a row: shorter than two chunks, of whole vectors or not, of several segments."""
    d = case.plan.spec.d
    if d > 4096:
        return "long" if d % 4096 == 0 else "long, last shorter"
    return "short" if d < 128 else "odd" if d % 8 else "aligned"


def place(case: Case) -> str:
    """Where rows lie."""
    if case.gaps:
        return "gaps" if unit_of(case.plan) > 1 else "anywhere"
    return "two distances" if case.inner else "packed"


ARCHES = {"sm_90": "sm_90", "sm_100": "newer", "sm_120": "newer"}


def factors(case: Case) -> dict[str, Hashable]:
    s, spec = case.schedule, case.plan.spec
    return {
        "form": s.form + " cluster" * (s.cluster > 1) + " dynamic" * s.dynamic, "way": spec.direction,
        "dtype": str(spec.dtype), "length": length(case), "place": place(case), "over": "over" if case.alias else "",
        "order": case.order > 0, "times": case.times > 1, "eps": case.eps is not None,
        "arch": ARCHES.get(case.arch, "older"),
    }  # fmt: skip


def kinds(case: Case) -> list[Hashable]:
    """What a plain run has once: each form both ways, and each way of running it; every graph of one's own."""
    s, name = case.schedule, case.spec.partition(":")[0]
    way = "bwd" in name
    return [
        (s.form, s.cluster > 1, s.dynamic, way), (s.tma_store, s.single_launch, way), (s.row_in_registers,
        s.early_release), name if case in NAMED else "", (bool(case.alias), case.gaps, case.inner > 0), case.times,
        case.eps is None, case.arch,
    ]  # fmt: skip


@sampling.grid("case", CASES, kinds, ids=str, strength=1)
def test_bits(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("spec", ["layernorm.fwd:d=64", "amax.fwd:d=24", "columns.fwd:d=24", "largest.fwd:d=24"])
@pytest.mark.parametrize("odd", [(0.0, -0.0), (0.0, -0.0, 1.0, -1.0, 1e-42, np.inf, -np.inf, np.nan)], ids=["0", "any"])
def test_odd_numbers_have_the_bits(spec: str, odd: tuple[float, ...]) -> None:
    """Of sums and of maxima, by rows and by columns; of few rows and of many."""
    made, rng = spec_of(spec), np.random.default_rng(5)
    for rows, schedule in zip((2, 40, 40, 2), schedules(made), strict=False):
        inputs = {name: a.copy() for name, a in random_inputs(made, rows).items()}
        for a in (a for a in inputs.values() if a.ndim == 2):
            a[...] = rng.choice(np.array(odd, np.float32), a.shape)
        outcome = run_plan(lower(made, schedule), inputs, rows=rows)
        assert not outcome.findings
        assert not mismatches(outcome.results, interpret(made.graph(), inputs)), (str(schedule), rows)


# Values that go with no case, by another: clusters share long rows alone, which begin at multiples of 16 bytes; ragged
# rows are odd and lie behind each other; a result over an input has its place.
BULK = {"anywhere", "older"}
CLUSTER = {"aligned", "odd", "short", *BULK}
RAGGED = {"aligned", "long", "gaps", "two distances", *BULK}
APART: dict[Hashable, set[Hashable]] = {
    "registers": {"long"}, "multipass": {"long"}, "registers cluster": CLUSTER, "tma": BULK, "tma cluster": CLUSTER,
    "tma cluster dynamic": CLUSTER, "tma dynamic": {"long", "odd", "short", *BULK}, "tma_unaligned": RAGGED,
    "tma_unaligned dynamic": {"bwd", "f16", "f64", "long, last shorter", "short", *RAGGED}, "f64": {"long"},
    "aligned": {"anywhere"}, "long": {"anywhere"}, "gaps": {"over"}, "two distances": {"over"}, "anywhere": {"over"},
}  # fmt: skip


def test_the_table_holds_every_pair() -> None:
    """Of the values of two factors; a case that is taken out, or another that comes in its place, leaves a gap."""
    listed = [factors(case) for case in CASES]
    assert [len({f[name] for f in listed}) for name in listed[0]] == [10, 2, 4, 5, 4, 2, 2, 2, 2, 3]
    for one, other in combinations(listed[0], 2):
        held = {(f[one], f[other]) for f in listed}
        missing = {*product({f[one] for f in listed}, {f[other] for f in listed})} - held
        assert not {(a, b) for a, b in missing if b not in APART.get(a, ())}, (one, other)
