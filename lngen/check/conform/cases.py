"""The list of cases, one entry each."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial

from lngen.check.conform import of_graphs, shapes, values
from lngen.check.conform.case import Case, general
from lngen.errors import SpecError

# Why a case has no form for graphs that are not one of the two norms.
NO_FORMULA = "correctly rounded results are those of a closed form, which a graph has not"
NO_RANGE = "which numbers overflow, and what follows, is known of a norm, not of a graph"
NO_SUBNORMALS = "the error bound of a graph assumes that no intermediate number is subnormal"
OF_LAYERNORM = "it is a property of LayerNorm"

CASES: tuple[Case, ...] = (
    general("ordinary", "the closed form in float64: random gamma, dy with a mean", values.ordinary),
    Case(
        "differences",
        "backward is the derivative of forward, along random directions",
        values.directions,
        of_graphs.directions,
    ),
    Case("ulps", "errors against the correctly rounded result", values.ulps, NO_FORMULA),
    general("large-mean-1e2", "E[x^2] - mean^2 loses 4 digits", partial(values.large_mean, ratio=1e2)),
    general("large-mean-1e3", "E[x^2] - mean^2 loses 6 digits", partial(values.large_mean, ratio=1e3)),
    general("large-mean-1e4", "E[x^2] - mean^2 may be negative", partial(values.large_mean, ratio=1e4)),
    general("tiny-variance", "variance 1e-12: eps stands inside the root", partial(values.spread, std=1e-6)),
    Case("huge", "16-bit sums overflow, and the cube of rstd underflows", values.huge, NO_RANGE),
    Case("overflow", "squares overflow f32: that row is beta (0 without) or NaN", values.overflow, NO_RANGE),
    Case("gamma-zero", "gamma 0 and 1e-6: nothing divides by gamma", values.gamma_zero, of_graphs.weights_zero),
    Case("gamma-negative", "the sign of gamma reaches y and dx", values.gamma_negative, of_graphs.weights_negative),
    Case("subnormal-x", "inputs below the smallest normal number", values.subnormal_x, NO_SUBNORMALS),
    Case("subnormal-y", "results below the smallest normal number are not flushed", values.subnormal_y, NO_SUBNORMALS),
    Case("nan-row", "a NaN poisons exactly its row", values.nan_row, of_graphs.nan_row),
    Case("inf-row", "an infinity shows, in its row alone", values.inf_row, of_graphs.inf_row),
    Case("constant-rows", "variance 0: y = beta, dx finite", values.constant_rows, of_graphs.constant_rows),
    Case("shift-invariance", "LayerNorm of x + 8 is that of x", values.shift_invariance, OF_LAYERNORM),
    Case("dx-sums-to-zero", "the mean term of LayerNorm's dx", values.dx_sums_to_zero, OF_LAYERNORM),
    general("d-1", "one feature", partial(values.ordinary, d=1)),
    general("d-2", "two features: dx nearly cancels", partial(values.ordinary, d=2)),
    general("d-31", "odd: masked lanes must not enter the sums", partial(values.ordinary, d=31)),
    general("d-768", "not a power of two", partial(values.ordinary, d=768)),
    general("d-4093", "prime: no vector width divides a row", partial(values.ordinary, d=4093)),
    general("m-0", "no rows: empty y and dx, dgamma and dbeta zero", shapes.no_rows),
    general("m-1", "one row", partial(values.ordinary, m=1)),
    general("m-4096", "many rows: dgamma and dbeta summed in f32", partial(values.ordinary, m=4096, d=64)),
    general("strided-rows", "x[:, :D] of a wider array: right or refused", shapes.strided_rows),
    general("unaligned-base", "one element off alignment: right or refused", shapes.unaligned_base),
    general("transposed", "rows not contiguous: right or refused", shapes.column_major),
    general("rows-alone", "a row's bits do not depend on other rows", shapes.rows_alone),
    general("rows-permuted", "a row's bits do not depend on its place", shapes.rows_permuted),
    general("rows-in-bigger-batch", "a row's bits do not depend on M", shapes.rows_in_bigger_batch),
    general("repeat", "the same call gives the same bits", shapes.repeated),
    general("repeat-columns", "dgamma and dbeta are deterministic", shapes.repeated_columns),
    general("inputs-unmodified", "no input is written to", shapes.inputs_unmodified),
    general("shape-and-dtype", "results have the shape and dtype of what they belong to", shapes.shape_and_dtype),
)


def select(names: Sequence[str]) -> tuple[Case, ...]:
    """The named cases in the order of the list, all without names; SpecError for an unknown one."""
    known = [case.name for case in CASES]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected some of {', '.join(known)}."
            raise SpecError(f"there is no case '{name}'; {hint}")
    return tuple(case for case in CASES if not names or case.name in names)
