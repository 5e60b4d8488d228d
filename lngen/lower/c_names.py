"""The C names of the values of a graph.

A value keeps its name. Everything else that a kernel declares ends in an underscore, which no value does. A value with
a name of C++, of CUDA or of a device header gets the suffix ``_value_``.
"""

from __future__ import annotations

from lngen.headers import HEADER_OF
from lngen.ir import Value

# Keywords and alternative tokens of C++20; macros of the compilers and of the headers they always include; names that
# CUDA declares and statements use; the names of a kernel's own types.
_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
assert errno linux stderr stdin stdout typeof unix va_arg va_copy va_end va_start
threadIdx blockIdx blockDim gridDim warpSize fmaf sqrtf sqrt fabsf fabs rintf rint
Row Reduce Exchange Stream Finish lngen
"""


# The names that values may not have in a kernel.
TAKEN = frozenset(_CPP.split()) | HEADER_OF.keys()


def c_name(value: Value) -> str:
    """The C identifier of ``value``."""
    return f"{value.name}_value_" if value.name in TAKEN else value.name
