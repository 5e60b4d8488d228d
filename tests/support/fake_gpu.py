"""A GPU that only writes down what it is asked: arrays of addresses, and kernels that are told apart by name."""

import ctypes
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from lngen.compile import KernelSet
from lngen.ir import DType
from lngen.launch import arrays, driver
from lngen.launch.arrays import Layout
from lngen.lower import Kernel, Plan
from lngen.runtime import launcher

CONTEXT = 77  # the primary context


@dataclass(frozen=True)
class FakeArray:
    """A layout, with strides in elements, and an address."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: int = 0


@dataclass(frozen=True)
class Launched:
    """A kernel of a plan, its arguments by name, all else that the driver is given, and the thread that launched it."""

    plan: Plan
    kernel: Kernel
    values: dict[str, int]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: dict[int, int]
    stream: int
    thread: int


class FakeGpu:
    """The driver, CuPy and a library of arrays, all in one.

    stream_of   the library's current stream
    captures    the streams that are captured, and the numbers of their captures
    pause       seconds that a launch takes, while other threads go on
    status      what the driver answers; not 0: it refuses
    registers   the registers of the function with that number; numbers are from 1
    attributes  those that functions were given: function, attribute, value
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> None:
        self.status = 0
        self.registers: Callable[[int], int] = lambda function: 32
        self.attributes: list[tuple[int, int, int]] = []
        self.loaded: list[bytes] = []
        self.launched: list[Launched] = []
        self.made: list[FakeArray] = []
        self.zeroed: list[tuple[int, int, int]] = []
        self.stream_of: Callable[[], int] = lambda: 0
        self.captures: dict[int, int] = {}
        self.pause = 0.0
        self._kernels: dict[int, tuple[Plan, Kernel]] = {}
        self._destructors: dict[int, Callable[[], int]] = {}  # of user objects
        self._retained: dict[int, list[int]] = {}  # the user objects of each capture's graph
        self._addresses = itertools.count(1 << 30, 1 << 24)
        self._capability = capability
        self._local = threading.local()  # the context of a thread
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
        """A binary of the plan; its kernels are functions from now on."""
        for kernel in plan.kernels:
            self._kernels[1 + len(self._kernels)] = plan, kernel
        return SimpleNamespace(image=plan.name.encode(), resources={})

    # ---- the driver ----

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H200" if self._capability == 90 else b"another"
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = CONTEXT
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        """The capability; a GPU that reports no limits has those of its description."""
        value._obj.value = dict(zip(driver.CAPABILITY, divmod(self._capability, 10), strict=True)).get(number, 0)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self._local.__dict__.get("context", 0)
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self._local.context = context.value
        return 0

    def cuModuleLoadDataEx(self, module: Any, image: Any, count: int, options: Any, values: Any) -> int:
        self.loaded.append(image.value)
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleUnload(self, module: Any) -> int:
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        found = {kernel.name: address for address, (_, kernel) in self._kernels.items()}
        function._obj.value = found[name.decode()]
        return 0

    def cuMemsetD8Async(self, address: Any, value: int, size: Any, stream: Any) -> int:
        assert value == 0
        self.zeroed.append((address.value, size.value, stream.value or 0))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:
        plan, kernel = self._kernels[function.value]
        values = {
            a.name: ctypes.c_longlong.from_address(p).value for a, p in zip(kernel.arguments, arguments, strict=True)
        }
        c = config._obj
        listed = ctypes.cast(c.attributes, ctypes.POINTER(driver._Attribute))
        attributes = {listed[n].id: listed[n].value[0] for n in range(c.count)}
        assert all((*listed[n].value[1:3],) == (1, 1) for n in range(c.count))
        given = tuple(c.grid), tuple(c.block), c.shared, attributes, c.stream or 0
        self.launched.append(Launched(plan, kernel, values, *given, threading.get_ident()))
        if self.pause:
            time.sleep(self.pause)
        return self.status

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, graph: Any, *others: None) -> int:
        number._obj.value = self.captures.get(stream.value or 0, 0)
        status._obj.value = int(number._obj.value != 0)
        if graph is not None:
            graph._obj.value = number._obj.value
        return self.status

    def cuUserObjectCreate(self, made: Any, value: Any, destroy: Any, count: int, flags: int) -> int:
        made._obj.value = 1 + len(self._destructors)
        self._destructors[made._obj.value] = lambda: ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(destroy.value)(
            value
        )
        return 0

    def cuGraphRetainUserObject(self, graph: Any, kept: Any, count: int, flags: int) -> int:
        self._retained.setdefault(graph.value, []).append(kept.value)
        return 0

    def destroy(self, capture: int) -> None:
        """The graph of a capture, and all that was instantiated from it."""
        for kept in self._retained.pop(capture):
            self._destructors.pop(kept)()

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((function.value, attribute, value))
        return self.status

    def cuFuncGetAttribute(self, number: Any, attribute: int, function: Any) -> int:
        assert attribute in (driver.NUM_REGS, driver.PTX_VERSION)
        registers = attribute == driver.NUM_REGS
        number._obj.value = self.registers(function.value) if registers else self._capability
        return self.status

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_A_TEST"
        return 0
