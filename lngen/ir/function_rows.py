"""The op table's rows for functions with an expansion, and for the exact operations that expansions need."""

from __future__ import annotations

import numpy as np

from lngen.ir import derivatives, functions, numerics, type_rules
from lngen.ir.op import Op

# Operations on the bits of f32, without a derivative. The result for numbers that they are not made for is that of the
# bits, so that kernels and NumPy agree, except for a NaN, whose bits are not defined.
BIT_ROWS = (
    Op(  # |a| with the sign of b
        "copysign", 2, type_rules.function,
        numpy=lambda a, e, n: np.copysign(a[0], a[1]),
        cuda=lambda a, e: f"copysign_of({a[0]}, {a[1]})",
        vjp=None,
    ),
    Op(  # for t = n + functions.BIAS, 2^n: the low bits of t in the place of the exponent; n whole, -126 to 127
        "exp2_biased", 1, type_rules.function,
        numpy=lambda a, e, n: numerics.exp2_biased(a[0]),
        cuda=lambda a, e: f"__uint_as_float(__float_as_uint({a[0]}) << 23)",
        vjp=None,
    ),
    Op(  # the whole number k with x / 2^k in [2/3, 4/3), of a positive normal x
        "exponent", 1, type_rules.function,
        numpy=lambda a, e, n: numerics.exponent(a[0]),
        cuda=lambda a, e: f"exponent({a[0]})",
        vjp=None,
    ),
    Op(  # 1 / x to within 5.1 percent, of x from 2^-126 to 1.89 * 2^125
        "reciprocal_guess", 1, type_rules.function,
        numpy=lambda a, e, n: numerics.reciprocal_guess(a[0]),
        cuda=lambda a, e: f"__uint_as_float({numerics.RECIPROCAL:#x}u - __float_as_uint({a[0]}))",
        vjp=None,
    ),
    Op(  # x / 2^k in [2/3, 4/3), of a positive normal x
        "significand", 1, type_rules.function,
        numpy=lambda a, e, n: numerics.significand(a[0]),
        cuda=lambda a, e: f"significand({a[0]})",
        vjp=None,
    ),
)  # fmt: skip

FUNCTION_ROWS = (
    Op.expanded("exp", 1, type_rules.function, functions.exp, lambda b, e, ct: (b.mul("ct", ct, e.out),)),
    Op.expanded("exp2", 1, type_rules.function, functions.exp2, derivatives.exp2),
    Op.expanded("log", 1, type_rules.function, functions.log, lambda b, e, ct: (b.div("ct", ct, e.args[0]),)),
    Op.expanded("tanh", 1, type_rules.function, functions.tanh, derivatives.tanh),
    Op.expanded("sigmoid", 1, type_rules.function, functions.sigmoid, derivatives.sigmoid),
    Op.expanded("softplus", 1, type_rules.function, functions.softplus, derivatives.softplus),
    Op.expanded("erf", 1, type_rules.function, functions.erf, derivatives.erf),
    Op.expanded("normal_cdf", 1, type_rules.function, functions.normal_cdf, derivatives.normal_cdf),
    Op.expanded("gelu", 1, type_rules.function, functions.gelu, derivatives.gelu),
    Op.expanded("gelu_tanh", 1, type_rules.function, functions.gelu_tanh, derivatives.gelu_tanh),
    Op.expanded("silu", 1, type_rules.function, functions.silu, derivatives.silu),
    Op.expanded("clamp", 1, type_rules.clamp, functions.clamp, derivatives.clamp, attrs=("high", "low")),
)
