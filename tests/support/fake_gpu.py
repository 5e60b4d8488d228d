"""A GPU that only writes down what it is asked: arrays of addresses, and kernels that do nothing."""

import ctypes
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import fake_launches
from c_calls import c_function, number
from fake_driver import CONTEXTS, FakeDriver
from lngen.compiler.compile import KernelSet
from lngen.compiler.ir import DType
from lngen.compiler.lower import Kernel, Plan
from lngen.launch import arrays, driver
from lngen.launch.arrays import Layout
from lngen.launch.runtime import launcher


@dataclass(frozen=True)
class FakeArray:
    """A layout, with strides in elements, and an address."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: int = 0


@dataclass(frozen=True)
class Launched(fake_launches.Launched):
    """A kernel of a plan, its arguments by name, and all else that the driver is given."""

    plan: Plan
    kernel: Kernel  # type: ignore[assignment]
    values: dict[str, int]  # type: ignore[assignment]


class FakeGpu(FakeDriver):
    """A driver that runs nothing, CuPy and a library of arrays, all in one.

    stream_of   the library's current stream
    pause       seconds that a launch takes, while other threads go on
    asked       the attributes that functions were given, and their values
    """

    capturing = False  # kernels may be loaded during a capture: what a driver refuses then is not the subject here

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> None:
        name = "NVIDIA H200" if capability == 90 else "another"
        super().__init__((capability // 10, capability % 10), name=name)
        self.asked: list[tuple[int, int]] = []
        self.made: list[FakeArray] = []
        self.zeroed: list[tuple[int, int, int]] = []
        self.stream_of: Callable[[], int] = lambda: 0
        self.pause = 0.0
        self._kernels: dict[str, tuple[Plan, Kernel]] = {}
        self._addresses = itertools.count(1 << 30, 1 << 24)
        self.initialised, self.retained = True, [1]
        self._local.context = CONTEXTS
        monkeypatch.setattr(driver, "library", lambda: self)
        monkeypatch.setattr(launcher, "device_count", lambda: 1)
        monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: self.compiled(kernels.plan))
        monkeypatch.setitem(arrays._BY_TYPE, FakeArray, self)

    def array(self, dtype: str, *shape: int, strides: Sequence[int] = (), address: int | None = None) -> FakeArray:
        """An array at ``address``, or at one of its own."""
        strides = tuple(strides) or tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return FakeArray(dtype, shape, strides, next(self._addresses) if address is None else address)

    # ---- the library of arrays ----

    def view(self, array: FakeArray, *, written: bool) -> FakeArray:
        return array

    def describe(self, given: Sequence[FakeArray]) -> tuple[list[int], list[Layout]]:
        return [a.address for a in given], [(a.dtype, a.shape, a.strides, a.device) for a in given]

    def in_elements(self, layout: Layout) -> Layout:
        return layout

    def dtype(self, own: str) -> DType:
        return DType(own)

    def stream(self, device: int) -> int:
        return self.stream_of()

    def maker(self, shape: Sequence[int], dtype: DType, device: int) -> Callable[[], FakeArray]:
        def make() -> FakeArray:
            self.made.append(self.array(str(dtype), *shape))
            return self.made[-1]

        return make

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

    def cuLaunchKernelEx(self, *given: Any) -> int:
        status = super().cuLaunchKernelEx(*given)
        time.sleep(self.pause)
        return status

    def _enqueue(self, stream: int, work: Callable[[], None], *launched: Any) -> None:
        done = self.launched[-1]
        plan, kernel = self._kernels[done.kernel]
        values = {a.name: ctypes.c_longlong(v).value for a, v in zip(kernel.arguments, done.values, strict=True)}
        self.launched[-1] = Launched(**{**vars(done), "plan": plan, "kernel": kernel, "values": values})
        super()._enqueue(stream, lambda: None, *launched)
