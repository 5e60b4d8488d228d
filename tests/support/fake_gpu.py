"""A GPU that only writes down what it is asked: arrays of addresses, and kernels that do nothing."""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import fake_launches
from c_calls import c_function, number
from fake_arrays import FakeArray, FakeArrays
from fake_driver import CONTEXTS, FakeDriver
from lngen.compiler.compile import KernelSet
from lngen.compiler.lower import Kernel, Plan
from lngen.launch import arrays, driver
from lngen.launch.runtime import launcher


@dataclass(frozen=True)
class Launched(fake_launches.Launched):
    """A kernel of a plan, its arguments by name, and all else that the driver is given."""

    plan: Plan
    kernel: Kernel  # type: ignore[assignment]
    values: dict[str, int]  # type: ignore[assignment]


class FakeGpu(FakeArrays, FakeDriver):
    """A driver that runs nothing, CuPy and a library of arrays, all in one.

    asked       the attributes that functions were given, and their values
    """

    capturing = False  # kernels may be loaded during a capture: what a driver refuses then is not the subject here

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> None:
        name = "NVIDIA H200" if capability == 90 else "another"
        FakeDriver.__init__(self, (capability // 10, capability % 10), name=name)
        addresses = itertools.count(1 << 30, 1 << 24)
        FakeArrays.__init__(self, lambda size: next(addresses))
        self.asked: list[tuple[int, int]] = []
        self.zeroed: list[tuple[int, int, int]] = []
        self._kernels: dict[str, tuple[Plan, Kernel]] = {}
        self.initialised, self.retained = True, [1]
        self._local.context = CONTEXTS
        monkeypatch.setattr(driver, "library", lambda: self)
        monkeypatch.setattr(launcher, "device_count", lambda: 1)
        monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: self.compiled(kernels.plan))
        monkeypatch.setitem(arrays._BY_TYPE, FakeArray, self)

    # ---- the compiler ----

    def compiled(self, plan: Plan) -> Any:
        """An image of the plan, whose kernels return at once."""
        text = f".version 8.0\n.target sm_{self.capability[0]}{self.capability[1]}\n.address_size 64\n"
        for kernel in plan.kernels:
            self._kernels[kernel.name] = plan, kernel
            kinds = ("u32" if (a.kind, a.ctype) == ("value", "float") else "u64" for a in kernel.arguments)
            lines = ",\n".join(f".param .{kind} {a.name}" for kind, a in zip(kinds, kernel.arguments, strict=True))
            text += f".visible .entry {kernel.name}(\n{lines}\n)\n{{\nret;\n}}\n"
        return SimpleNamespace(image=text.encode(), resources={})

    # ---- the driver ----

    @c_function()
    def cuMemsetD8Async(self, to: Any, value: Any, size: Any, stream: Any) -> None:
        assert number(value) == 0
        self.zeroed.append((number(to), number(size), number(stream)))

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: Any) -> int:
        self.asked.append((attribute, value))
        return super().cuFuncSetAttribute(function, attribute, value)

    def _enqueue(self, stream: int, work: Callable[[], None], *launched: Any) -> None:
        done = self.launched[-1]
        plan, kernel = self._kernels[done.kernel]
        values = {a.name: ctypes.c_longlong(v).value for a, v in zip(kernel.arguments, done.values, strict=True)}
        self.launched[-1] = Launched(**{**vars(done), "plan": plan, "kernel": kernel, "values": values})
        super()._enqueue(stream, lambda: None, *launched)
