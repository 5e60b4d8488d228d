"""Launches of the C++ extension of lngen.torch on a fake driver.

They come from C, with addresses of tensors that no Python has seen. So the driver gets an address for its function, and
the memory of a launch's tensors is mapped for as long as the launch runs.
"""

import ctypes
import math
from typing import Any

import pytest
import torch

from c_calls import number
from c_driver import c_callback
from fake_driver import FakeDriver
from lngen.errors import MissingError
from lngen.launch import direct
from lngen.launch.arrays import library_of
from lngen.launch.direct import Kernels
from lngen.torch import extension

Key = tuple[int, tuple[int, ...]]  # a kernel, and those of its arguments that are no addresses
Sizes = dict[int, int]  # bytes behind the addresses among the arguments, by number


class NativeLaunches:
    """cuLaunchKernelEx of a fake driver as a C function.

    launched   the number of launches from C
    errors     what went wrong in them, which C cannot raise
    """

    def __init__(self, gpu: FakeDriver) -> None:
        self.gpu, self.launched = gpu, 0
        self.errors: list[BaseException] = []
        self._addresses: dict[int, set[int]] = {}
        self._sizes: dict[Key, Sizes] = {}
        self._call = gpu.cuLaunchKernelEx
        self._call._as_parameter_ = self._address = c_callback(self.launch, "pppp", self.errors)

    def knows(self, plan: Any, tensors: list[int]) -> None:
        """Launches of a plan may come, with tensors of so many bytes."""
        block = (ctypes.c_longlong * (len(plan[0]) // 8)).from_buffer_copy(plan[0])
        known = dict(enumerate(tensors)) | {slot: plan[3] - offset for slot, offset in plan[2]}
        for function, _, _, slots in plan[1]:
            self._addresses[function] = {n for n, slot in enumerate(slots) if slot in known}
            sizes = {n: known[slot] for n, slot in enumerate(slots) if slot in known}
            self._sizes[function, tuple([block[slot] for slot in slots if slot not in known])] = sizes

    def launch(self, *given: ctypes.c_void_p) -> int:
        """The driver's function."""
        with self.gpu.lock:
            return self._launch(*given)

    def _launch(self, *given: ctypes.c_void_p) -> int:
        _, function, table, _ = (number(g) for g in given)
        places = self._addresses[function]
        count = len(next(s for f, s in self._sizes if f == function)) + len(places)
        pointers = (ctypes.c_void_p * count).from_address(table)
        values = [ctypes.c_longlong.from_address(p or 0).value for p in pointers]
        sizes = self._sizes[function, tuple([v for n, v in enumerate(values) if n not in places])]
        mapped = [start for start, end in joined([(values[n], values[n] + size) for n, size in sizes.items()])
                  if self._maps(start, end)]  # fmt: skip
        try:
            self.launched += 1
            return int(self._call(*given))
        finally:
            for start in mapped:
                self.gpu.unmaps(start)

    def _maps(self, start: int, end: int) -> bool:
        """Whether that memory had to be mapped."""
        before = len(self.gpu.memories._mapped)
        self.gpu.maps(start, end - start, f"native{start:x}")
        return len(self.gpu.memories._mapped) > before


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, as one where they touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def tensors_of(kernels: Kernels) -> list[int]:
    """The bytes of the tensors of a launch, in order."""
    rows = kernels.recipe.rows
    given = [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in kernels.given]
    sizes = [n * t.element_size() for n, t in zip(given, kernels.given, strict=True)]
    sizes += [t.numel() * t.element_size() for t in kernels.more]
    sizes += [math.prod((*shape[:1], *strides[:1])) * dtype.itemsize for shape, strides, dtype in kernels.made]
    dtype = kernels.numbers[2] if kernels.numbers else torch.float32
    return sizes + [rows * dtype.itemsize for _ in kernels.offsets]


def go_native(monkeypatch: pytest.MonkeyPatch, gpu: FakeDriver) -> NativeLaunches:
    """From now on the extension launches; the test is skipped if it cannot be built."""
    try:
        extension.module()
    except MissingError as error:
        pytest.skip(str(error))
    native, plan_of = NativeLaunches(gpu), extension.plan_of

    def planned(kernels: Kernels) -> Any:
        plan = plan_of(kernels)
        if plan is not None:
            native.knows(plan, tensors_of(kernels))
        return plan

    def gradients(*given: Any) -> Any:
        if given[-1] is not None:  # a tensor of numbers, of which Python's launches have addresses
            library_of(given[-1], "").describe(given[-1:])
        return found(*given)

    found = direct.Prepared.gradients
    monkeypatch.setattr(direct.Prepared, "gradients", gradients)
    monkeypatch.setattr(extension, "plan_of", planned)
    monkeypatch.setattr(direct, "native", extension.native)
    return native
