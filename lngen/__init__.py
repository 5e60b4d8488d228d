"""lngen: a compiler for row-normalisation kernels.

A graph says what to compute, forward only; lngen derives its backward, lowers both to CUDA, compiles them
with NVRTC, runs and checks them. ``import lngen`` loads nothing: each public name is imported on its first use, so
neither CuPy nor PyTorch is imported before it is needed.

    compile                   a callable norm: ``lngen.compile("layernorm", d=4096, dtype="bf16")``
    build, verify, load       packs of kernels: made ahead of time, checked, launched without a compiler
    overlap_captured          in a CUDA graph, calls that begin while the kernel before them ends
    parse_spec, Spec          what is specialised on: ``layernorm.bwd:d=4096,dtype=bf16``
    parse_schedule, Schedule  what may change speed and never a bit
    GRAPHS, Definition, GraphBuilder, M, D    the named graphs, and the parts of a new one
    LngenError                the base of every error that lngen raises on purpose

The stages are modules, also imported on first use: ``lngen.ir``, ``lngen.passes``, ``lngen.interpret``,
``lngen.lower``, ``lngen.emit``, ``lngen.toolchain``; for example ``lngen.emit.emit(plan)``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from lngen.version import __version__

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import Any

    from lngen import emit, interpret, ir, lower, passes, toolchain
    from lngen.aot.build import build
    from lngen.aot.verify import verify
    from lngen.errors import LngenError
    from lngen.graphs import GRAPHS, Definition, GraphBuilder
    from lngen.ir import D, M
    from lngen.launch.early import overlap_captured
    from lngen.launch.pack import load
    from lngen.problem import Schedule, parse_schedule
    from lngen.runtime.norm import compile
    from lngen.spec import Spec, parse_spec

__all__ = [
    "GRAPHS",
    "D",
    "Definition",
    "GraphBuilder",
    "LngenError",
    "M",
    "Schedule",
    "Spec",
    "__version__",
    "build",
    "compile",
    "emit",
    "interpret",
    "ir",
    "load",
    "lower",
    "overlap_captured",
    "parse_schedule",
    "parse_spec",
    "passes",
    "toolchain",
    "verify",
]

_MODULES = {"emit", "interpret", "ir", "lower", "passes", "toolchain"}

_HOMES = {
    "GRAPHS": "graphs",
    "D": "ir",
    "Definition": "graphs",
    "GraphBuilder": "graphs",
    "LngenError": "errors",
    "M": "ir",
    "Schedule": "problem",
    "Spec": "spec",
    "build": "aot.build",
    "compile": "runtime.norm",
    "load": "launch.pack",
    "overlap_captured": "launch.early",
    "parse_schedule": "problem",
    "parse_spec": "spec",
    "verify": "aot.verify",
}


def __getattr__(name: str) -> Any:
    """A public name, imported on first use and then stored in the module."""
    if name in _MODULES:
        return import_module(f"lngen.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lngen' has no attribute {name!r}")
    value = getattr(import_module(f"lngen.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """This package, in which ``compile`` is always the function: importing lngen/compile.py does not replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "compile" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
