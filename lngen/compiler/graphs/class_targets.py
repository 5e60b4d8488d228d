"""Cross-entropy of class indices: the keys from ``target`` on, and the graph that they choose.

The formulas are those of PyTorch's ``cross_entropy``. A row whose target is ``ignore_index`` counts as a row of zeros
without a loss: x is chosen, not multiplied, so that its loss and its gradient are 0 also where x is a NaN. A target
that is neither ``ignore_index`` nor a class has a loss and a row of the gradient that are NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    "lse": (False, (), "whether lse, log(sum(exp(x))) of each row, is an output"),
    "x_grad": (False, (), "whether x_grad, the gradient by x times the input x_grad_factor, is an output"),
}
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
    return said


@dataclass(frozen=True)
class Targets:
    """The classes of the rows.

    index    i32[M] or i64[M]
    column   the class of each element of a row
    ignored  [M], 1 for a row that is ignored, else 0
    known    [M], 1 for one of the D classes, else NaN
    weight   [D], the factor of each class; None for 1
    """

    index: Value
    column: Value
    ignored: Value
    known: Value
    weight: Value | None

    @classmethod
    def of(cls, b: GraphBuilder, said: Mapping[str, Chosen]) -> Targets:
        """Those of the input target, and of class_weight."""
        dtype = DType(str(said["target_dtype"]))
        ignored, one = int(float(said["ignore_index"])), b.number("one", 1.0)
        index = b.index("target", M, dtype=dtype, ignored=ignored)
        place = b.cast("target_number", index, to=b.compute)
        below = b.where_gt("below_classes", b.size("classes", D, b.compute), place, one, -1.0)
        inside = b.where_gt("is_class", place, -1.0, below, -1.0)
        return cls(
            index=index,
            column=b.iota("column", D, dtype),
            ignored=b.select_eq("ignored", place, b.number("ignore_index", float(ignored)), one),
            known=b.sqrt("known", inside),
            weight=b.input("class_weight", D, dtype=DType.F32, differentiable=False) if said["class_weight"] else None,
        )

    def chosen(self, b: GraphBuilder, name: str, of: Value) -> Value:
        """The element of each row at its class, [M]; 0 if there is none."""
        return b.reduce_sum(name, b.select_eq(f"{name}_at", self.index, self.column, of), axis=D)

    def unless_ignored(self, b: GraphBuilder, name: str, x: Value) -> Value:
        """x, and 0 in rows that are ignored."""
        return b.select_gt(name, b.number("half", 0.5), self.ignored, x)


def cross_entropy(b: GraphBuilder, said: Mapping[str, Chosen], scale: float) -> None:
    """The loss of class indices: lse(z) - z[t], z of x by ``scale`` and softcap, with what the keys add.

    loss = w[t] (1 - a) (lse - z[t]) + a / D (lse sum(w) - sum(w z)) + c lse^2, 0 if the row is ignored. t is the
    target, w the class_weight or 1, a the label_smoothing, c the z_loss. The mean of losses is their sum divided by
    that of w[t] over the rows that are not ignored.
    """
    loss = _Loss(b, said, scale)
    b.output("loss", loss.reduced(str(said["reduction"])), dtype=b.compute)
    if said["lse"]:
        b.output("lse", loss.targets.unless_ignored(b, "lse_kept", loss.lse), dtype=b.compute)
    if said["x_grad"]:
        b.output("x_grad", b.stop_gradient(loss.gradient()), dtype=b.options.dtype)


class _Loss:
    """The equations of the loss of each row, and of its gradient.

    targets  the classes
    tanh     of softcap; None without one
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
        self.tanh: Value | None = None
        x, self.targets = b.input("x", M, D), Targets.of(b, said)
        z = self._logits(self.targets.unless_ignored(b, "x_kept", x))
        rowmax = b.statistic(b.reduce_max("rowmax", z, axis=D))
        top = b.detach("top", rowmax)
        shifted = b.sub("shifted", z, top)
        self.e = b.named("e", shifted.exp())
        self.total = b.statistic(b.reduce_sum("rowsum", self.e, axis=D))
        logsum = b.named("logsum", self.total.log())
        self.lse = b.add("lse32", top, logsum)
        self.own = self.weight = self._weight()
        loss = self._surprise(shifted, logsum)
        if self.z_loss:
            factor, squared = b.number("z_loss", self.z_loss), b.mul("lse2", self.lse, self.lse)
            loss = b.add("loss_z", loss, b.mul("z_loss_lse2", factor, squared))
        known = b.mul("loss_known", loss, self.targets.known)
        self.rows = self.targets.unless_ignored(b, "loss32", known)

    def _logits(self, x: Value) -> Value:
        """z: x times the scale, bounded by softcap."""
        b = self.b
        z = x if self.scale == 1.0 else b.mul("x_scaled", x, b.number("scale", self.scale))
        if not self.softcap:
            return z
        self.tanh = b.named("tanh_x", b.mul("x_over_cap", z, b.number("inverse_cap", 1.0 / self.softcap)).tanh())
        return b.mul("x_capped", self.tanh, b.number("softcap", self.softcap))

    def _weight(self) -> Value | None:
        """The weight of the class of each row."""
        weight = self.targets.weight
        return None if weight is None else self.targets.chosen(self.b, "row_weight", weight)

    def _surprise(self, shifted: Value, logsum: Value) -> Value:
        """The loss of each row without z_loss."""
        b = self.b
        surprise = b.sub("surprise", logsum, self.targets.chosen(b, "hit", shifted))
        if not self.smoothing:
            return surprise if self.own is None else b.mul("weighted_surprise", self.own, surprise)
        classes, weight = b.size("classes", D, b.compute), self.targets.weight
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
        b = self.b
        if reduction == "none":
            return self.rows
        total = b.reduce_sum("loss_sum", self.rows, axis=M)
        if reduction == "sum":
            return total
        weight = b.number("one", 1.0) if self.weight is None else self.weight
        counted = self.targets.unless_ignored(b, "kept", weight)
        return b.div("loss_mean", total, b.statistic(b.reduce_sum("weight_sum", counted, axis=M)))

    def gradient(self) -> Value:
        """The gradient of the sum of the losses by x, times the input x_grad_factor."""
        b, targets = self.b, self.targets
        given = b.input("x_grad_factor", dtype=b.compute, differentiable=False)
        factor = b.mul("row_factor", given, targets.known)
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
            dz = b.sub("x_grad_all", dz, each if targets.weight is None else b.mul("each_weight", each, targets.weight))
        if self.tanh is not None:
            slope = b.sub("slope", b.number("one", 1.0), b.mul("tanh2", self.tanh, self.tanh))
            dz = b.mul("x_grad_cap", dz, slope)
        dx = dz if self.scale == 1.0 else b.mul("x_grad_scaled", dz, b.number("scale", self.scale))
        return targets.unless_ignored(b, "x_grad32", dx)
