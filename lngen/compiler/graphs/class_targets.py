"""Cross-entropy of class indices: the keys from ``target`` on, and the graph that they choose.

The formulas are those of PyTorch's ``cross_entropy``. A row whose target is ``ignore_index`` has no loss: 0 is chosen,
not multiplied, so that its loss and its gradient are 0 also where x is a NaN. A target that is neither ``ignore_index``
nor a class has a loss and a row of the gradient that are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lngen.compiler.graphs.graph_builder import Chosen, GraphBuilder
from lngen.compiler.ir import D, DType, M, Value

# Each with its default, the words that it takes, and what ``lngen list`` says.
KEYS: Mapping[str, tuple[Chosen, tuple[str, ...], str]] = {
    "target": ("distribution", ("distribution", "index"), "what target has of a row: D probabilities, or a class"),
    "target_dtype": ("i64", ("i64", "i32"), "dtype of the classes"),
    "ignore_index": (-100.0, (), "the target of rows without a loss"),
    "class_weight": (False, (), "whether class_weight, a factor of the loss for each class, is an input"),
    "label_smoothing": (0.0, (), "the share of the target that all classes get alike"),
    "z_loss": (0.0, (), "factor of lse^2, which is added to the loss of a row"),
    "softcap": (0.0, (), "x becomes softcap * tanh(x / softcap); 0 leaves it"),
    "reduction": ("none", ("none", "mean", "sum"), "what loss is of those of all rows"),
    "vocabulary": (
        "whole",
        ("whole", "shard", "join", "none"),
        "whether rows have all classes, some, numbers of all shards, or none: then the result is x_grad_factor",
    ),
    "classes": (0.0, (), "of the vocabulary, for vocabulary=shard and join"),
    "lse": (False, (), "whether lse, log(sum(exp(x))) of each row, is an output"),
    "x_grad": (False, (), "whether x_grad, the gradient by x times the input x_grad_factor, is an output"),
}
# What is said elsewhere, or needs whole rows.
SHARED: Mapping[str, tuple[str, ...]] = {
    "whole": (),
    "shard": ("class_weight", "label_smoothing", "z_loss", "reduction", "lse", "x_grad"),
    "join": ("class_weight", "label_smoothing", "softcap", "x_grad"),
    "none": ("label_smoothing", "z_loss", "softcap", "reduction", "lse", "x_grad"),
}
IN_SHARDS = ("shard", "join")
MOST_EXACT = 2.0**24  # whole numbers up to it are numbers of f32


def by_keys(b: GraphBuilder) -> Mapping[str, Chosen]:
    """What the keys say; SpecError for those that do not fit together."""
    said = {key: b.option(key, *described, of_forward=key == "x_grad") for key, described in KEYS.items()}
    for key, value in said.items():
        if said["target"] != "index" and value != KEYS[key][0]:
            b.refuse(f"{key} needs target=index, got target={said['target']}; add it, or leave {key} away.")
    if not float(said["ignore_index"]).is_integer() or abs(float(said["ignore_index"])) > MOST_EXACT:
        b.refuse(f"ignore_index is expected to be a whole number from -2^24 to 2^24, got {said['ignore_index']}.")
    if not 0 <= float(said["label_smoothing"]) <= 1:
        b.refuse(f"label_smoothing is expected to be from 0 to 1, got {said['label_smoothing']}.")
    for key in ("z_loss", "softcap"):
        if float(said[key]) < 0:
            b.refuse(f"{key} is expected to be 0 or more, got {said[key]}.")
    _check_vocabulary(b, said)
    return said


def _check_vocabulary(b: GraphBuilder, said: Mapping[str, Chosen]) -> None:
    """SpecError for keys that rows without all classes do not take."""
    vocabulary, classes = said["vocabulary"], float(said["classes"])
    if (vocabulary in IN_SHARDS) != (classes != 0) or not classes.is_integer() or not 0 <= classes <= MOST_EXACT:
        b.refuse(
            f"classes is expected to be a whole number up to 2^24 with vocabulary=shard and join, and only there; got "
            f"vocabulary={vocabulary}, classes={said['classes']}."
        )
    for key in SHARED[str(vocabulary)]:
        if said[key] != KEYS[key][0]:
            b.refuse(f"{key} does not go with vocabulary={vocabulary}; leave it away.")


class Targets:
    """The classes of the rows.

    number   [M], the class as a number
    ignored  [M], 1 for a row that is ignored, else 0
    index    i32[M], the place of the class in a row, or none
    column   the place of each element of a row
    """

    def __init__(self, b: GraphBuilder, said: Mapping[str, Chosen], *, whole: bool = True) -> None:
        """Of the input target, whose classes are places of rows if these have the ``whole`` vocabulary."""
        self.b, ignored = b, int(float(said["ignore_index"]))
        given = b.index("target", M, dtype=str(said["target_dtype"]), ignored=ignored if whole else None)
        self.number = b.cast("target_number", given, to=b.compute)
        self.ignored = b.select_eq(
            "ignored", self.number, b.number("ignore_index", float(ignored)), b.number("one", 1.0)
        )
        self.place_in_rows(self.number)

    def place_in_rows(self, number: Value) -> None:
        """The places are these numbers."""
        self.index, self.column = self.b.cast("class_index", number, to=DType.I32), self.b.iota("column", D)

    def known(self, classes: Value) -> Value:
        """1 for a row whose target is below ``classes``, else NaN."""
        b, one = self.b, self.b.number("one", 1.0)
        below = b.where_gt("below_classes", classes, self.number, one, -1.0)
        return b.sqrt("known", b.where_gt("is_class", self.number, -1.0, below, -1.0))

    def chosen(self, name: str, of: Value) -> Value:
        """The element of each row of an input at its class, [M]; 0 if there is none."""
        return self.b.take(name, of, self.index)

    def logit(self, name: str, x: Value, scale: float, softcap: float) -> Value:
        """The logit of each row's class, [M]; 0 if there is none, and in rows that are ignored."""
        chosen = self.unless_ignored(f"{name}_kept", self.chosen(name, x))
        return logits(self.b, chosen, scale, softcap, name)[1]

    def weight(self, of_classes: Value | None) -> Value | None:
        """The weight of the class of each row, [M]; None without weights."""
        return None if of_classes is None else self.chosen("row_weight", of_classes)

    def sealed(self, name: str, x: Value) -> Value:
        """x, whose gradient is 0 in rows that are ignored."""
        return self.b.sealed(name, x, self.ignored)

    def unless_ignored(self, name: str, x: Value) -> Value:
        """x, and 0 in rows that are ignored."""
        return self.b.select_gt(name, self.b.number("half", 0.5), self.ignored, x)


def cross_entropy(b: GraphBuilder, said: Mapping[str, Chosen], scale: float) -> None:
    """The loss of class indices: lse(z) - z[t], z of x by ``scale`` and softcap, with what the keys add.

    loss = w[t] (1 - a) (lse - z[t]) + a / D (lse sum(w) - sum(w z)) + c lse^2, 0 if the row is ignored. t is the
    target, w the class_weight or 1, a the label_smoothing, c the z_loss. The mean of losses is their sum divided by
    that of w[t] over the rows that are not ignored.
    """
    if said["vocabulary"] != "whole":
        if scale != 1.0 and said["vocabulary"] != "shard":
            b.refuse(f"scale does not go with vocabulary={said['vocabulary']}; leave it away.")
        {"shard": shard, "join": join, "none": factor}[str(said["vocabulary"])](b, said, scale)
        return
    loss = _Loss(b, said, scale)
    b.output("loss", loss.reduced(str(said["reduction"])), dtype=b.compute)
    if said["lse"]:
        b.output("lse", loss.targets.unless_ignored("lse_kept", loss.lse), dtype=b.compute)
    if said["x_grad"]:
        b.output("x_grad", b.stop_gradient(loss.gradient()), dtype=b.options.dtype)


def class_weight(b: GraphBuilder) -> Value:
    """The input class_weight."""
    return b.input("class_weight", D, dtype=DType.F32, differentiable=False)


def logits(b: GraphBuilder, x: Value, scale: float, softcap: float, name: str = "x") -> tuple[Value | None, Value]:
    """z, x times ``scale`` and bounded by ``softcap``, after the tanh of that, if there is one."""
    z = x if scale == 1.0 else b.mul(f"{name}_scaled", x, b.number("scale", scale))
    if not softcap:
        return None, z
    tanh = b.named(f"tanh_{name}", b.mul(f"{name}_over_cap", z, b.number("inverse_cap", 1.0 / softcap)).tanh())
    return tanh, b.mul(f"{name}_capped", tanh, b.number("softcap", softcap))


def reduced(b: GraphBuilder, targets: Targets, loss: Value, weight: Value | None, reduction: str) -> Value:
    """The losses of rows, their sum, or their mean by the weights of rows, which are 1 without any."""
    if reduction == "none":
        return loss
    total = _sum_of_rows(b, "loss_sum", loss)
    if reduction == "sum":
        return total
    return b.div("loss_mean", total, b.statistic(weight_sum(b, targets, weight)))


def weight_sum(b: GraphBuilder, targets: Targets, weight: Value | None) -> Value:
    """The sum of the weights of the rows that are not ignored, or without weights their number."""
    counted = targets.unless_ignored("kept", b.number("one", 1.0) if weight is None else weight)
    return _sum_of_rows(b, "weight_sum", counted)


def _sum_of_rows(b: GraphBuilder, name: str, x: Value) -> Value:
    """The sum of [M], by one block for every D: each of its threads adds every 512th row, then they add in a tree.

    The order of column sums has few threads where D is large: 7 for D = 128256.
    """
    return b.emit("reduce_sum", name, (x,), axis=M, groups=512, blocks=1, interleave=1)


class _Loss:
    """The equations of the loss of each row, and of its gradient.

    targets  the classes
    tanh     of softcap; None without one
    top      the largest logit of each row, and ``z_of_class`` that of its class
    e        exp(z - rowmax), and ``total`` its sum
    lse      of each row
    own      what the loss of its own class counts in a row; None for 1
    each     what every class counts beside it, by its weight: a / D
    mass     the sum of the weights of all classes
    rows     the loss of each row
    """

    def __init__(self, b: GraphBuilder, said: Mapping[str, Chosen], scale: float) -> None:
        self.b, self.scale = b, scale
        self.smoothing, self.z_loss, self.softcap = (float(said[k]) for k in ("label_smoothing", "z_loss", "softcap"))
        b.bounds_row(int(MOST_EXACT), "classes as numbers of f32")
        x, self.targets = b.input("x", M, D), Targets(b, said)
        self.known = self.targets.known(b.size("classes", D, b.compute))
        self.class_weight = class_weight(b) if said["class_weight"] else None
        self.tanh, z = logits(b, self.targets.sealed("x_sealed", x), scale, self.softcap)
        self.z_of_class = self.targets.logit("x_of_class", x, scale, self.softcap)
        rowmax = b.statistic(b.reduce_max("rowmax", z, axis=D))
        self.top = top = b.detach("top", rowmax)
        shifted = b.sub("shifted", z, top)
        self.e = b.named("e", shifted.decay())
        self.total = b.statistic(b.reduce_sum("rowsum", self.e, axis=D))
        logsum = b.named("logsum", self.total.log())
        self.lse = b.add("lse32", top, logsum)
        self.own = self.weight = self.targets.weight(self.class_weight)
        loss = self._surprise(shifted, logsum)
        if self.z_loss:
            factor, squared = b.number("z_loss", self.z_loss), b.mul("lse2", self.lse, self.lse)
            loss = b.add("loss_z", loss, b.mul("z_loss_lse2", factor, squared))
        self.rows = self.targets.unless_ignored("loss32", b.mul("loss_known", loss, self.known))

    def _surprise(self, shifted: Value, logsum: Value) -> Value:
        """The loss of each row without z_loss."""
        b = self.b
        surprise = b.sub("surprise", logsum, b.sub("hit", self.z_of_class, self.top))
        if not self.smoothing:
            return surprise if self.own is None else b.mul("weighted_surprise", self.own, surprise)
        classes, weight = b.size("classes", D, b.compute), self.class_weight
        own, self.each = b.number("own_share", 1.0 - self.smoothing), b.number("smoothing", self.smoothing) / classes
        self.own = own if self.weight is None else b.mul("own", own, self.weight)
        if weight is None:
            self.mass, total = classes, b.reduce_sum("shifted_sum", shifted, axis=D)
        else:
            self.mass = b.reduce_sum("mass", b.expand("class_weights", weight, axis=M), axis=D)
            total = b.reduce_sum("shifted_sum", b.mul("weighted_shifted", weight, shifted), axis=D)
        spread = b.sub("spread", b.mul("mass_logsum", self.mass, logsum), total)
        return b.add("smoothed", b.mul("own_surprise", self.own, surprise), b.mul("others", self.each, spread))

    def reduced(self, reduction: str) -> Value:
        """The losses, their sum, or their mean."""
        return reduced(self.b, self.targets, self.rows, self.weight, reduction)

    def gradient(self) -> Value:
        """The gradient of the sum of the losses by x, times the input x_grad_factor."""
        b, targets = self.b, self.targets
        given = b.input("x_grad_factor", dtype=b.compute, differentiable=False)
        factor = b.mul("row_factor", given, self.known)
        own = factor if self.own is None else b.mul("own_factor", factor, self.own)
        share = own
        if self.smoothing:
            each = b.mul("each_factor", factor, self.each)
            share = b.add("share_all", own, b.mul("mass_factor", each, self.mass))
        if self.z_loss:
            twice = b.mul("z_loss_lse", b.number("two_z_loss", 2.0 * self.z_loss), self.lse)
            share = b.add("share_z", share, b.mul("z_loss_factor", factor, twice))
        dz = b.mul("x_grad_e", self.e, b.div("share_over_rowsum", share, self.total))
        dz = b.sub("x_grad_own", dz, b.select_eq("own_at", targets.index, targets.column, own))
        if self.smoothing:
            dz = b.sub(
                "x_grad_all", dz, each if self.class_weight is None else b.mul("each_weight", each, self.class_weight)
            )
        if self.tanh is not None:
            slope = b.sub("slope", b.number("one", 1.0), b.mul("tanh2", self.tanh, self.tanh))
            dz = b.mul("x_grad_cap", dz, slope)
        dx = dz if self.scale == 1.0 else b.mul("x_grad_scaled", dz, b.number("scale", self.scale))
        return targets.unless_ignored("x_grad32", dx)


# ---- without logits ----


def factor(b: GraphBuilder, said: Mapping[str, Chosen], scale: float) -> None:
    """The x_grad_factor of a mean, 1 / weight_sum, which is known before the logits are; infinity of no rows.

    A class outside [0, D) counts as 1, or with weights as 0. The mean of the losses is NaN then.
    """
    b.bounds_row(int(MOST_EXACT), "classes as numbers of f32")
    targets = Targets(b, said)
    weight = targets.weight(class_weight(b) if said["class_weight"] else None)
    inverse = b.div("x_grad_factor", b.number("one", 1.0), weight_sum(b, targets, weight))
    b.output("x_grad_factor", inverse, dtype=b.compute)


# ---- a vocabulary in shards ----


def shard(b: GraphBuilder, said: Mapping[str, Chosen], scale: float) -> None:
    """What a loss needs of a shard of the vocabulary, three numbers of each row: rowmax, rowsum and logit.

    x has the classes from the input first_class on, target the classes of the whole vocabulary. rowsum is the sum of
    exp(z - rowmax), or of exp(z) if rowmax is -inf, and logit is z[target], 0 if the class is in another shard. The
    gradient takes rowmax for a constant, as ``join`` does.
    """
    x, targets = b.input("x", M, D), Targets(b, said, whole=False)
    first = b.cast("first", b.index("first_class", dtype="i64"), to=b.compute)
    targets.place_in_rows(b.sub("place", targets.number, first))
    _, z = logits(b, targets.sealed("x_sealed", x), scale, float(said["softcap"]))
    top = b.stop_gradient(b.max(z))
    b.output("rowmax", top, dtype=DType.F32, save=True)
    lowest = b.where_gt("lowest", top, -math.inf, top, 0.0)
    b.output("rowsum", b.sum((z - lowest).decay()), dtype=DType.F32)
    b.output("logit", targets.logit("x_of_class", x, scale, float(said["softcap"])), dtype=DType.F32)


def join(b: GraphBuilder, said: Mapping[str, Chosen], scale: float) -> None:
    """The loss by the numbers of all shards, [M, D] for D shards; see ``shard``."""
    rowmax = b.input("rowmax", M, D, dtype=DType.F32, differentiable=False)
    rowsum, logit = (b.input(name, M, D, dtype=DType.F32) for name in ("rowsum", "logit"))
    targets = Targets(b, said, whole=False)
    top = b.max(rowmax)
    total = b.sum(rowsum * (rowmax - top).exp())
    logsum = b.named("logsum", total.log())
    loss = logsum - (b.sum(logit) - top)
    lse = b.named("lse32", top + logsum)
    if said["z_loss"]:
        loss = loss + lse * lse * float(said["z_loss"])
    known = targets.known(b.number("classes", float(said["classes"])))
    rows = targets.unless_ignored("loss32", loss * known)
    b.output("loss", reduced(b, targets, rows, None, str(said["reduction"])), dtype=b.compute)
    if said["lse"]:
        b.output("lse", targets.unless_ignored("lse_kept", lse), dtype=b.compute)
