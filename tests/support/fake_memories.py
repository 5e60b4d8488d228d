"""The memory of a fake driver's GPUs: allocations, and host memory that stands in for memory of a GPU."""

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from c_calls import refuse_if
from lngen.proof.ptx.memory import START, WORD, Allocation, GlobalMemory, Rows

BETWEEN = 1 << 36  # addresses of a device; what its kernels reach of another's is out of bounds
LINE = 16  # bytes, of which a buffer holds a multiple


def locked(method: Any) -> Any:
    """A method that threads take turns in."""

    @functools.wraps(method)
    def call(self: Any, *given: Any, **how: Any) -> Any:
        with self.lock:
            return method(self, *given, **how)

    return call


class Memories:
    """One memory per device. ``capacity``: bytes that each can allocate; ``lock``: of whoever changes something."""

    def __init__(self, devices: int, lock: Any) -> None:
        self.lock = lock
        self._of = [GlobalMemory(START + n * BETWEEN) for n in range(devices)]
        self._allocated: dict[int, tuple[int, Allocation]] = {}  # by address, with the device
        self._mapped: dict[int, tuple[int, Allocation]] = {}
        self.capacity = 1 << 30

    def of(self, device: int) -> GlobalMemory:
        """The memory of a device."""
        return self._of[device]

    @locked
    def allocate(self, device: int, size: int) -> int:
        """The address of new memory, a multiple of 256, in which nothing is written."""
        refuse_if(size <= 0)
        used = sum(b.size for owner, b in self._allocated.values() if owner == device)
        refuse_if(used + size > self.capacity, "OUT_OF_MEMORY")
        name = f"allocation_{len(self._allocated)}"
        buffer = self._of[device].add(Allocation(name, "workspace", size, WORD))
        self._allocated[buffer.start] = device, buffer
        return buffer.start

    def free(self, address: int) -> None:
        """Ends an allocation; 0 is none."""
        if address == 0:
            return
        refuse_if(address not in self._allocated)
        device, buffer = self._allocated.pop(address)
        self._of[device].remove(buffer)

    def maps(
        self, address: int, size: int, name: str, *, device: int = 0, writes: bool = True, pitch: int = 0, used: int = 0
    ) -> None:
        """Host memory becomes memory of a device, at its own address and without a copy.

        ``writes``: kernels may write to it; ``pitch``, ``used``: it consists of rows of ``used`` bytes every ``pitch``.
        What lies in mapped memory is mapped already. Memory that overlaps with it otherwise has to be unmapped first.
        """
        if size == 0 or any(b.start <= address and address + size <= b.start + b.size for _, b in self._all(device)):
            return
        for _, b in self._all(device):
            free = address + size <= b.start or b.start + b.size <= address
            assert free, f"'{name}' overlaps with '{b.name}', which is mapped; unmap that, or map both at once."
        shift = address % LINE
        lines = -(-(shift + size) // LINE) * LINE  # up to 15 bytes more on each side, on the same page
        over = np.frombuffer((ctypes.c_char * lines).from_address(address - shift), np.uint8)
        rows = Rows(-(-size // pitch), used, (pitch,)) if pitch else None
        buffer = Allocation(name, "output" if writes else "input", size, WORD, rows, shift, over)
        self._mapped[address] = device, self._of[device].add(buffer, address - shift)

    def unmaps(self, address: int) -> None:
        """Ends the mapping that begins at an address."""
        device, buffer = self._mapped.pop(address)
        self._of[device].remove(buffer)

    @locked
    def put(self, address: int, content: bytes) -> None:
        """Writes bytes, which must lie in one allocation or mapping."""
        buffer, at = self._place(address, len(content))
        if buffer is not None:
            buffer.data[at : at + len(content)] = np.frombuffer(content, np.uint8)
            if buffer.written is not None:
                buffer.written[at : at + len(content)] = 1

    @locked
    def content(self, address: int, size: int) -> bytes:
        """Bytes of one allocation or mapping."""
        buffer, at = self._place(address, size)
        return b"" if buffer is None else buffer.data[at : at + size].tobytes()

    def device_of(self, address: int) -> int:
        """The device whose memory an address is in."""
        return self._find(address, 1)[0]

    def _place(self, address: int, size: int) -> tuple[Allocation | None, int]:
        """A buffer, and the position in its bytes; None for no bytes."""
        if size == 0:
            return None, 0
        buffer = self._find(address, size)[1]
        return buffer, address - buffer.base

    def _find(self, address: int, size: int) -> tuple[int, Allocation]:
        for device, b in self._all():
            if b.start <= address and address + size <= b.start + b.size:
                return device, b
        refuse_if(True)
        raise AssertionError

    def _all(self, device: int | None = None) -> Iterator[tuple[int, Allocation]]:
        for owner, buffer in (*self._mapped.values(), *self._allocated.values()):
            if device is None or owner == device:
                yield owner, buffer
