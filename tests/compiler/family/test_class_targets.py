"""If these fail, the cross-entropy of class indices is not PyTorch's, or takes what it cannot compute."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lngen
from bits import Case, check
from lngen.compiler.interpret import interpret
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from lngen.errors import ArrayError, DerivativeError, SpecError
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from plans import plan_of
from schedules import cp_async, multipass, registers, tma

Array = Any
INF, NAN = np.inf, np.nan

# ---- known answers, from float64 ----

X = np.float32([[2, -1, 0.5, 3], [0, 0, 0, 0], [10, -10, 5, 1]])
TARGET, WEIGHT = np.array([3, 1, -100]), np.float32([1, 2, 0.5, 1.5])
WEIGHTED, SMOOTHED = "class_weight=yes", "label_smoothing=0.1"
KNOWN = {  # keys: the losses, their mean, and the first row of the gradient of that
    "": ((0.384091701, 1.386294361, 0), 0.885193031, (0.1252756, 0.0062371, 0.0279528, -0.1594655)),
    WEIGHTED: ((0.576137552, 2.772588722, 0), 0.956778935, (0.1073791, 0.0053461, 0.0239595, -0.1366847)),
    SMOOTHED: ((0.571591701, 1.386294361, 0), 0.978943031, (0.1127756, -0.0062629, 0.0154528, -0.1219655)),
    f"{WEIGHTED},{SMOOTHED}": (
        (0.822785259, 2.668616645, 0), 0.997543401, (0.0984466, -0.0090287, 0.0199888, -0.1094067)
    ),
    "z_loss=1e-4": ((0.384091701 + 0.001145208, 1.386294361 + 0.000192181, 0), None, None),
}  # fmt: skip
FACTOR = {"x_grad_factor": np.array(1, np.float32)}


def results(
    keys: str, x: Array, target: Array, more: dict[str, Array] = FACTOR, graph: str = "fwd"
) -> dict[str, Array]:
    """The results of the interpreter."""
    spec = parse_spec(f"cross_entropy.{graph}:d={x.shape[1]},target=index{',' * bool(keys)}{keys}")
    given = {"x": x, "target": target, "class_weight": WEIGHT, **more}
    return interpret(spec.graph(), {p.name: given[p.name] for p in spec.graph().params})


@pytest.mark.parametrize("keys", KNOWN)
def test_known_answers(keys: str) -> None:
    losses, mean, gradient = KNOWN[keys]
    assert results(keys, X, TARGET)["loss"] == pytest.approx(losses, abs=3e-7)
    found = results(f"{keys}{',' * bool(keys)}reduction=mean", X, TARGET)
    if mean is None:
        return
    assert found["loss"] == pytest.approx(mean, abs=3e-7)
    given = {**found, "dloss": np.array(1, np.float32)}
    dx = results(f"{keys}{',' * bool(keys)}reduction=mean", X, TARGET, given, "bwd")["dx"]
    assert dx[0] == pytest.approx(gradient, abs=1e-7)
    assert not dx[2].any()


# ---- random options, against PyTorch in float64 ----

CHOICES: dict[str, tuple[Any, ...]] = {
    "target_dtype": ("i64", "i32"), "reduction": ("none", "mean", "sum"), "ignore_index": (-100, 0, 2),
    "class_weight": ("no", "yes"), "label_smoothing": (0.0, 0.1, 1.0), "z_loss": (0.0, 0.01),
    "softcap": (0.0, 2.0, 30.0), "scale": (1.0, 0.5), "lse": ("no", "yes"),
}  # fmt: skip


def wanted(said: dict[str, Any], x: Array, target: Array, weight: Array, factor: float) -> tuple[Array, Array, Array]:
    """The loss, its gradient, and that of the sum of the losses by a factor; in float64."""
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    z, t = said["scale"] * given, torch.tensor(target).long()
    z = said["softcap"] * torch.tanh(z / said["softcap"]) if said["softcap"] else z
    w, kept = torch.tensor(weight).double(), t != said["ignore_index"]
    smoothing = {"label_smoothing": said["label_smoothing"], "ignore_index": said["ignore_index"]}
    given_weight = w if said["class_weight"] == "yes" else None
    rows = F.cross_entropy(z, t, given_weight, reduction="none", **smoothing)
    rows = rows + said["z_loss"] * z.logsumexp(1) ** 2 * kept
    counted = (torch.ones_like(w) if given_weight is None else w)[t.clamp(0, len(w) - 1)] * kept
    loss = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / counted.sum()}[said["reduction"]]
    each, together = (torch.autograd.grad(v, given, retain_graph=True)[0] for v in (loss.sum(), rows.sum() * factor))
    return loss.detach().numpy(), each.numpy(), together.numpy()


@pytest.mark.parametrize("seed", range(24))
def test_random_options_are_pytorch_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    said = {key: values[rng.integers(len(values))] for key, values in CHOICES.items()}
    rows, d = int(rng.integers(1, 9)), int(rng.choice([3, 4, 7, 33, 130]))
    x, weight = np.float32(3 * rng.normal(size=(rows, d))), np.float32(rng.random(d) + 0.1)
    target = rng.integers(d, size=rows).astype("int32" if said["target_dtype"] == "i32" else "int64")
    target[1:][rng.random(rows - 1) < 0.3] = said["ignore_index"]
    target[0] = 1  # so that a mean is a number
    loss, gradient, scaled = wanted(said, x, target, weight, 0.75)
    keys = ",".join(f"{key}={value}" for key, value in said.items())
    given = {"class_weight": weight, "x_grad_factor": np.array(0.75, np.float32)}
    found = results(f"{keys},x_grad=yes", x, target, given)
    given |= {**found, "dloss": np.ones(loss.shape, np.float32)}
    found |= results(f"{keys},of=loss", x, target, given, "bwd")
    for name, want in (("loss", loss), ("dx", gradient), ("x_grad", scaled)):
        assert found[name] == pytest.approx(want, rel=1e-5, abs=2e-6), (name, said)


# ---- rows that are ignored, and what is no number ----

ROW, HOT = (1.0, 2.0, 3.0), (INF, 2.0, 3.0)
EDGES = {  # keys, a row and its target: the loss; the gradient is NaN where that is, but finite for +inf
    "minus infinity at the class": ("", (-INF, 2.0, 3.0), 0, INF),
    "minus infinity elsewhere": ("", (-INF, 2.0, 3.0), 2, np.log1p(np.exp(-1.0))),
    "and smoothed": (SMOOTHED, (-INF, 2.0, 3.0), 2, INF),
    "a row of minus infinity": ("", (-INF,) * 3, 0, NAN),
    "plus infinity": ("", HOT, 0, NAN),
    "not a number": ("", (NAN, 2.0, 3.0), 1, NAN),
    "a class too large": ("", ROW, 3, NAN),
    "a class too small": ("", ROW, -1, NAN),
    "much too large": ("", ROW, 2**62, NAN),
    "ignored": ("", ROW, -100, 0.0),
    "ignored, with NaN": (f"z_loss=0.1,softcap=2,{SMOOTHED}", (NAN, INF, -INF), -100, 0.0),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    """Other rows stay as they are; what is ignored is 0, also where x is a NaN."""
    keys, row, target, loss = EDGES[name]
    plan = plan_of(f"cross_entropy.fwd:d=3,target=index,x_grad=yes{',' * bool(keys)}{keys}", registers(1, 32, 1))
    given = {"x": np.float32([row, ROW]), "target": np.array([target, 1]), **FACTOR}
    found = interpret(plan.graph, given)
    assert found["loss"][0] == pytest.approx(loss, nan_ok=True, rel=1e-6)
    assert np.isfinite(found["loss"][1])
    assert np.isfinite(found["x_grad"][1]).all()
    if target == -100:
        assert not found["x_grad"][0].any()
    if np.isnan(loss):
        assert np.isnan(found["x_grad"][0]).all() or name == "plus infinity"
    outcome = run_plan(plan, given)
    assert not outcome.findings
    assert not mismatches(outcome.results, found)


def test_all_rows_ignored() -> None:
    x, target = np.full((2, 3), NAN, np.float32), np.array([-100, -100])
    for reduction, loss in (("mean", NAN), ("sum", 0.0), ("none", [0.0, 0.0])):
        found = results(f"reduction={reduction}", x, target)
        np.testing.assert_array_equal(found["loss"], np.float32(loss))
        given = {**found, "dloss": np.ones(np.shape(loss), np.float32)}
        assert not results(f"reduction={reduction}", x, target, given, "bwd")["dx"].any()


# ---- the factor of a mean ----


def test_the_factor_of_a_mean() -> None:
    """1 / the rows that are not ignored, as PyTorch has it; weights in the order of one block, near those of f64."""
    rng = np.random.default_rng(0)
    x, weight = np.zeros((1, 1000), np.float32), np.float32(rng.random(1000))
    for rows in (1, 511, 513, 5000):
        target = np.where(rng.random(rows) < 0.3, 7, rng.integers(1000, size=rows))
        target[0] = 999
        kept, keys = target[target != 7], "vocabulary=none,ignore_index=7"
        (count,) = results(keys, x, target).values()
        assert count == torch.tensor(len(kept)).reciprocal().numpy()
        (found,) = results(f"{keys},{WEIGHTED}", x, target, {"class_weight": weight}).values()
        terms = np.zeros(-(-rows // 512) * 512, np.float32)
        terms[:rows] = np.where(target == 7, np.float32(0), weight[target])
        folded = np.add.accumulate(terms.reshape(-1, 512))[-1]
        while len(folded) > 1:
            folded = folded[: len(folded) // 2] + folded[len(folded) // 2 :]
        assert found == np.float32(1) / folded[0]
        assert found == pytest.approx(1 / weight[kept].sum(dtype=np.float64), rel=1e-6)
    for keys, no_class in (("", 0.5), (WEIGHTED, 1 / weight[3])):  # counts as in the mean of the losses, which is NaN
        keys = f"vocabulary=none{',' * bool(keys)}{keys}"
        for target, factor in (([-100, -100], INF), ([], INF), ([3, -100, 1000], no_class)):
            (found,) = results(keys, x, np.array(target, np.int64), {"class_weight": weight}).values()
            assert found == np.float32(factor)
    with pytest.raises(DerivativeError, match="no input has a gradient"):
        results("vocabulary=none", x, TARGET, graph="bwd")
    plan = plan_of("cross_entropy.fwd:d=128256,target=index,vocabulary=none,class_weight=yes", multipass(32, 4))
    assert [(k.role, k.grid[0](1_000_000)) for k in plan.kernels] == [("numbers", 1)]


# ---- a vocabulary in shards ----


def in_shards(x: Array, target: Array, shards: tuple[int, ...], keys: str) -> tuple[Array, Array]:
    """The loss, and the gradient by x, of the interpreter."""
    end, of_loss = (
        np.cumsum(shards),
        f"classes={x.shape[1]},reduction={keys.partition(',')[0]},z_loss=0.1,vocabulary=join",
    )
    parts = [slice(e - n, e) for e, n in zip(end, shards, strict=True)]
    of_shard = f"classes={x.shape[1]},softcap=2,vocabulary=shard"
    given = [{"x": x[:, p].copy(), "first_class": np.array(p.start)} for p in parts]
    found = [results(of_shard, one["x"], target, one) for one in given]
    joined = {name: np.stack([f[name] for f in found], 1) for name in ("rowmax", "rowsum", "logit")}
    loss = results(of_loss, joined["rowmax"], target, joined)
    ones = {"dloss": np.ones_like(loss["loss"])}
    back = results(of_loss, joined["rowmax"], target, {**joined, **loss, **ones}, "bwd")
    gradient = []
    for n, (one, f) in enumerate(zip(given, found, strict=True)):
        one |= {**f, **{name: back[name][:, n].copy() for name in ("drowsum", "dlogit")}}
        gradient.append(results(f"{of_shard},of=rowsum+logit", one["x"], target, one, "bwd")["dx"])
    return loss["loss"], np.concatenate(gradient, 1)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shards", [(8, 4), (5, 3, 4)])
def test_shards_have_the_loss_of_the_whole(shards: tuple[int, ...], reduction: str) -> None:
    rng = np.random.default_rng(1)
    x, target = np.float32(2 * rng.normal(size=(6, 12))), np.array([0, 4, 5, 11, -100, 7])
    x[4] = NAN  # which is ignored
    x[0, 8:] = -INF  # a shard without a finite logit
    said = {"scale": 1.0, "softcap": 2.0, "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.1,
            "class_weight": "no", "reduction": reduction}  # fmt: skip
    clean = np.where(np.isfinite(x), x, np.where(np.isnan(x), 0, -1e30))
    loss, gradient, _ = wanted(said, clean, target, np.ones(12, np.float32), 1.0)
    found, dx = in_shards(x, target, shards, reduction)
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert dx == pytest.approx(gradient, rel=1e-5, abs=1e-6)
    assert not dx[4].any()
    wrong, _ = in_shards(x[:2], np.array([12, 3]), shards, "none")
    assert np.isnan(wrong[0])
    assert np.isfinite(wrong[1])


# ---- kernels ----

ALL = "class_weight=yes,label_smoothing=0.1,z_loss=0.01,softcap=2"
OVER_X = "x_grad=x"
CASES = [
    Case("cross_entropy.fwd:d=1000,dtype=bf16,target=index", tma(32, 2, 8, 2, grid=2), (0, 7)),
    Case("cross_entropy.fwd:d=1000,dtype=bf16,target=index,reduction=mean", registers(32, 2, 8), (0, 7)),
    Case("cross_entropy.fwd:d=1001,dtype=bf16,target=index,target_dtype=i32,x_grad=yes,reduction=sum",
         registers(64, 2, 1), (0, 7), alias=OVER_X),
    Case(f"cross_entropy.fwd:d=1000,dtype=f16,target=index,x_grad=yes,reduction=mean,lse=yes,{ALL}",
         registers(32, 2, 8), (5,), alias=OVER_X),
    Case("cross_entropy.fwd:d=20000,dtype=bf16,target=index,x_grad=yes,reduction=mean",
         registers(128, 1, 8, cluster=2), (3,), alias=OVER_X),
    Case("cross_entropy.fwd:d=9000,target=index,x_grad=yes", multipass(256, 4), (3,), alias=OVER_X),
    Case("cross_entropy.fwd:d=1000,dtype=bf16,target=index,x_grad=yes",
         tma(32, 2, 8, 2, "store", grid=2), (7,), alias=OVER_X),
    Case("cross_entropy.bwd:d=1000,dtype=bf16,target=index,reduction=mean", cp_async(32, 2, 8, 2, grid=2), (0, 7)),
    Case(f"cross_entropy.bwd:d=9000,target=index,{ALL}", multipass(256, 4), (3,), alias="dx=x"),
    Case("cross_entropy.fwd:d=1000,dtype=bf16,target=index,vocabulary=shard,classes=3000", registers(32, 2, 8), (7,)),
    Case("cross_entropy.bwd:d=1000,dtype=bf16,target=index,vocabulary=shard,classes=3000", registers(32, 2, 8), (7,)),
    Case("cross_entropy.fwd:d=3,target=index,vocabulary=join,classes=3000,reduction=mean", registers(1, 32, 1), (7,)),
    Case("cross_entropy.bwd:d=9000,target=index,class_weight=yes", tma(256, 1, 4, 2, grid=2), (3,)),
    Case("cross_entropy.fwd:d=100,target=index,vocabulary=none", registers(4, 32, 4), (0, 1, 700)),
    Case("cross_entropy.fwd:d=50257,target=index,target_dtype=i32,vocabulary=none,class_weight=yes",
         multipass(32, 1), (0, 7, 1500)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_have_the_bits(case: Case) -> None:
    check(case)


ONCE = [  # a row in shared memory, in that of a cluster, and in the registers of one
    ("cross_entropy.fwd:d=8000,dtype=bf16,target=index", tma(128, 1, 8, 2, grid=2)),
    ("cross_entropy.fwd:d=16000,dtype=bf16,target=index,x_grad=yes", tma(128, 1, 8, 2, cluster=2, grid=2)),
    ("cross_entropy.fwd:d=16000,dtype=bf16,target=index,x_grad=yes", registers(256, 1, 8, cluster=2)),
]


@pytest.mark.parametrize(("text", "schedule"), ONCE)
def test_a_row_is_read_once(text: str, schedule: Schedule) -> None:
    plan = plan_of(text, schedule)
    traffic = run_plan(plan, random_inputs(plan.spec, 2)).traffic.tensors[plan.kernels[0].name]
    row = 2 * 2 * plan.spec.d  # bytes of two rows
    taken = 2 * 2 * schedule.block * schedule.cluster  # each thread reads the logit of the class
    assert traffic["x"]["bytes_read"] == row + taken
    assert traffic.get("x_grad", {"bytes_written": row})["bytes_written"] == row


# ---- what is refused ----

KEYS_REFUSED = {
    "class_weight=yes": "class_weight needs target=index",
    "reduction=mean": "reduction needs target=index",
    "x_grad=yes": "x_grad needs target=index",
    "target=index,label_smoothing=1.5": "label_smoothing is expected to be from 0 to 1, got 1.5",
    "target=index,ignore_index=0.5": "ignore_index is expected to be a whole number",
    "target=index,z_loss=-1": "z_loss is expected to be 0 or more",
    "target=index,softcap=-1": "softcap is expected to be 0 or more",
    "target=index,vocabulary=shard": "classes is expected to be a whole number up to 2",
    "target=index,classes=9": "classes is expected to be a whole number up to 2",
    "target=index,vocabulary=shard,classes=9,lse=yes": "lse does not go with vocabulary=shard",
    "target=index,vocabulary=join,classes=9,scale=2": "scale does not go with vocabulary=join",
    "target=index,vocabulary=none,reduction=mean": "reduction does not go with vocabulary=none",
    "target=index,reduction=max": "there is no reduction 'max'",
}


@pytest.mark.parametrize("keys", KEYS_REFUSED)
def test_keys_that_do_not_fit(keys: str) -> None:
    with pytest.raises(SpecError, match=KEYS_REFUSED[keys]):
        parse_spec(f"cross_entropy.fwd:d=8,{keys}").graph()


ARRAYS_REFUSED: dict[str, tuple[Array, Array, str]] = {
    "a float target": (np.array([1.0, 2.0]), WEIGHT, "'target' is expected to be i64, got float64"),
    "of another length": (np.array([1, 2, 3]), WEIGHT, r"'target' is expected to have shape \(2,\)"),
    "no class": (np.array([1, 4]), WEIGHT, "classes from 0 to 3, or ignore_index=-100, got 4"),
    "a negative class": (np.array([1, -1]), WEIGHT, "classes from 0 to 3, or ignore_index=-100, got -1"),
    "other weights": (np.array([1, 2]), WEIGHT[:3], r"'class_weight' is expected to have shape \(4,\)"),
}


@pytest.mark.parametrize("name", ARRAYS_REFUSED)
def test_arrays_that_do_not_fit(name: str) -> None:
    target, weight, why = ARRAYS_REFUSED[name]
    loss = lngen.compile("cross_entropy", d=4, target="index", class_weight=True)
    with pytest.raises(ArrayError, match=why):
        loss.forward(X[:2], target, weight)


def test_the_gradient_lies_over_x() -> None:
    """Not over one that is read-only."""
    loss = lngen.compile("cross_entropy", d=4, target="index", x_grad=True)
    x, one = X.copy(), np.array(1, np.float32)
    (_, fresh), _ = loss.forward(x, TARGET, one)
    loss.forward(x, TARGET, one, out=(None, x, None, None))
    np.testing.assert_array_equal(x, fresh)
    x = X.copy()
    x.flags.writeable = False
    with pytest.raises(ArrayError, match="'x_grad' is written to, but is read-only"):
        loss.forward(x, TARGET, one, out=(None, x, None, None))
