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

The stages of the compiler are modules, also imported on first use: ``lngen.ir``, ``lngen.passes``, ``lngen.interpret``,
``lngen.lower``, ``lngen.emit``, ``lngen.toolchain``; for example ``lngen.emit.emit(plan)``.

    compiler   a spec becomes a graph, a plan, a text, a cubin    torch      lngen in PyTorch
    launch     arrays are checked, kernels chosen and launched    lab        tuner, benchmark, explanations
    packs      kernels ahead of time, in files                    cli        the commands
    proof      PTX executed on NumPy, checks against oracles      docs, examples
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from lngen.version import __version__

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import Any

    from lngen.compiler import emit, interpret, ir, lower, passes, toolchain
    from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
    from lngen.compiler.ir import D, M
    from lngen.compiler.problem import Schedule, parse_schedule
    from lngen.compiler.spec import Spec, parse_spec
    from lngen.errors import LngenError
    from lngen.launch.early import overlap_captured
    from lngen.launch.pack import load
    from lngen.launch.runtime.norm import compile
    from lngen.packs.build import build
    from lngen.packs.verify import verify

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
    "GRAPHS": "compiler.graphs",
    "D": "compiler.ir",
    "Definition": "compiler.graphs",
    "GraphBuilder": "compiler.graphs",
    "LngenError": "errors",
    "M": "compiler.ir",
    "Schedule": "compiler.problem",
    "Spec": "compiler.spec",
    "build": "packs.build",
    "compile": "launch.runtime.norm",
    "load": "launch.pack",
    "overlap_captured": "launch.early",
    "parse_schedule": "compiler.problem",
    "parse_spec": "compiler.spec",
    "verify": "packs.verify",
}


def __getattr__(name: str) -> Any:
    """A public name, imported on first use and then stored in the module."""
    if name in _MODULES:
        return import_module(f"lngen.compiler.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lngen' has no attribute {name!r}")
    value = getattr(import_module(f"lngen.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_ROOMS = {
    "compiler": "contract devices emit graphs headers interpret ir lower passes problem schedule spec toolchain",
    "launch": "hub_package runtime",
    "lab": "bench explain inspect tune",
    "proof": "check ptx torch_graph",
}
_MOVED = {name: f"lngen.{room}.{name}" for room, names in _ROOMS.items() for name in names.split()} | {
    "aot": "lngen.packs",
    "schedule.recorded": "lngen.lab.tune.recorded",
}


class _Moved:
    """Finds a module by its name of lngen 0.1, such as ``lngen.spec.spec``, which older programs and pickles have."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A spec whose module is the one that the new name has."""
        package, _, rest = name.partition(".")
        first, *inner = rest.split(".")
        if package != "lngen" or first not in _MOVED:
            return None
        from importlib.util import find_spec

        found = find_spec(_MOVED.get(rest) or ".".join([_MOVED[first], *inner]))
        packages = found and found.submodule_search_locations
        loader: Any = cls(found) if found else None
        return found and ModuleSpec(name, loader, origin=found.origin, is_package=packages is not None)

    def __init__(self, found: ModuleSpec) -> None:
        self.found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self.found.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.found  # the import system has just replaced it

    def get_code(self, name: str) -> Any:
        """What ``python -m`` runs."""
        return self.found.loader.get_code(self.found.name)  # type: ignore[union-attr]


sys.meta_path.insert(0, _Moved)
