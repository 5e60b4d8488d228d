"""Calls of norms through the C library of a pack, with arrays in memory of a GPU, and what they wrote."""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bits import spec_of
from c_library import CLibrary
from fake_driver import FakeDriver
from lngen.compiler.interpret import interpret
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec
from lngen.launch.kernels import Described
from lngen.launch.signature import length
from lngen.proof.check.inputs import POISON, mismatches, random_inputs


class Memory(Protocol):
    """Memory of a GPU."""

    def put(self, content: Array) -> int:
        """The address of a copy of bytes."""

    def get(self, address: int, size: int) -> Array:
        """Bytes."""


class FakeMemory:
    """That of a device of a fake driver."""

    def __init__(self, gpu: FakeDriver, device: int = 0) -> None:
        self._memories, self._device = gpu.memories, device

    def put(self, content: Array) -> int:
        address = self._memories.allocate(self._device, content.size) if content.size else 0
        self._memories.put(address, content.tobytes())
        return address

    def get(self, address: int, size: int) -> Array:
        return np.frombuffer(bytearray(self._memories.content(address, size)), np.uint8)


@dataclass(frozen=True)
class Layout:
    """The gap after a row, in the smallest steps that are allowed; of rows at two distances, that after ``inner``."""

    gap: int = 0
    inner: int = 0
    outer_gap: int = 0

    def starts(self, tensor: Described, rows: int, d: int) -> tuple[Array, dict[str, int]]:
        """Where rows begin, in elements, and the fields of the structure that say so."""
        name, step = tensor["name"], tensor["stride_multiple"]
        stride, r = d + self.gap * step, np.arange(rows)
        if not self.inner:
            return r * stride, {f"{name}_stride": stride if self.gap else 0}
        outer = self.inner * stride + self.outer_gap * step
        return r // self.inner * outer + r % self.inner * stride, {
            f"{name}_stride": stride, f"{name}_outer_stride": outer,
        }  # fmt: skip


CLOSE = Layout()


class Call:
    """The arguments of one call, and its results.

    kernels   one of the kernel sets of the spec, as the manifest describes it
    fields    of the structure
    """

    def __init__(
        self, library: CLibrary, memory: Memory, group: str, kernels: Described, rows: int, *,
        layout: Layout = CLOSE, eps: float | None = None, seed: int = 0, device: int = 0,
    ) -> None:  # fmt: skip
        self.library, self.memory, self.group, self.kernels, self.device = library, memory, group, kernels, device
        self._spec: Spec = spec_of(re.sub("@[0-9a-f]+", "", kernels["spec"]["text"]))
        self._inputs = random_inputs(self._spec, rows, seed, eps=eps)
        self._results: dict[str, tuple[int, Array, Array]] = {}  # address, places of the elements, bytes before
        d = self._spec.d
        fields: dict[str, Any] = {"d": d, "dtype": library.dtypes[kernels["spec"]["dtype"]], "rows": rows}
        fields |= ({} if eps is None else {"eps": eps}) | ({"inner": layout.inner} if layout.inner else {})
        for t in kernels["tensors"]:
            starts, width = np.zeros(1, int), math.prod(length(text, rows, d) for text in t["shape"])
            if t["axes"] == ["M", "D"]:
                (starts, strides), width = layout.starts(t, rows, d), d
                fields |= strides
            places = (starts[:, None] + np.arange(width)).reshape(-1)
            content = np.full((places.max(initial=-1) + 1, t["element_bytes"]), POISON, np.uint8)
            if t["role"] == "input":
                given = np.frombuffer(self._inputs[t["name"]].tobytes(), np.uint8)
                content[places] = given.reshape(-1, content.shape[1])
            fields[t["name"]] = memory.put(content.reshape(-1))
            if t["role"] == "output":
                self._results[t["name"]] = fields[t["name"]], places, content
        self.fields = {name: fields.get(name, 0) for name, _ in library.structs[group]._fields_}

    def prepare(self, stream: int = 0) -> None:
        """Gives the call a workspace, if it needs one."""
        size = ctypes.c_size_t()
        given = self.library.structs[self.group](**self.fields), self.device
        assert self.library.call(f"{self.group}_workspace_bytes", *given, None) == "NULL_POINTER"
        status = self.library.call(f"{self.group}_workspace_bytes", *given, ctypes.byref(size))
        assert status == "OK", self.library.error()
        if size.value:
            self.fields["workspace"] = self.memory.put(np.full(size.value, POISON, np.uint8))
            self.fields["workspace_bytes"] = size.value
        self.launch(stream, "_init_workspace")

    def launch(self, stream: int = 0, function: str = "") -> None:
        """The call, which has to succeed."""
        status = self.status(function, stream)
        assert status == "OK", f"{status}: {self.library.error()}"

    def status(self, function: str = "", stream: int = 0, device: int | None = None, **changes: Any) -> str:
        """That of the call, or another function of the group, on a device and with some fields changed."""
        arguments = self.library.structs[self.group](**{**self.fields, **changes})
        where = self.device if device is None else device
        return self.library.call(f"{self.group}{function}", arguments, where, ctypes.c_void_p(stream))

    def wrong(self) -> list[str]:
        """The results that have other bits than the interpreter's, and those that were written beside their rows."""
        wanted, got, beside = interpret(self._spec.graph(), self._inputs), dict[str, Array](), []
        for name, (address, places, before) in self._results.items():
            found = self.memory.get(address, before.size).reshape(before.shape)
            value = np.ascontiguousarray(found[places]).view(wanted[name].dtype)
            got[name] = value.reshape(wanted[name].shape)
            found[places] = POISON
            beside += [f"{name}: gaps"] * bool((found != POISON).any())
        return [*mismatches(got, wanted), *beside]
