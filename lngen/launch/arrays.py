"""Arrays of other libraries: their memory, their layout, and new arrays of the same kind.

One ``Library`` handles torch tensors, another CuPy arrays and all arrays that CuPy can view without a copy
(``__cuda_array_interface__``, DLPack). It never converts, copies or waits for the GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ..dtypes import BYTES, READ
from ..errors import ArrayError, MissingError
from ..files import load_cupy
from .signature import contiguous

# Everything about an array but its address: the library's own dtype, shape, strides, device (-1: CPU). ``describe``
# gives strides in the library's own unit, which costs nothing per call; ``in_elements`` converts them.
Layout = tuple[Any, Sequence[int], Sequence[int], int]


def has_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True for strides of which the first is more than what lies there."""
    return len(strides) > 0 and strides[0] > math.prod(shape[1:])


def torch_dtypes() -> dict[str, Any]:
    """PyTorch's own dtypes."""
    import torch

    return {t.value: getattr(torch, t.library) for t in READ}


class Library(Protocol):
    """The interface to an array library."""

    def view(self, array: Any, *, written: bool) -> Any:
        """The array as one of this library's own, without a copy; ``written``: the array must be writable."""

    def describe(self, arrays: Sequence[Any]) -> tuple[list[int], list[Layout]]:
        """Addresses and layouts; AttributeError for an array of another library."""

    def in_elements(self, layout: Layout) -> Layout:
        """The layout with strides in elements."""

    def dtype(self, own: Any) -> str | None:
        """The element type of the library's own dtype, None if it is not one of lngen's."""

    def stream(self, device: int) -> int:
        """The library's current stream, as a pointer."""

    def maker(self, shape: Sequence[int], dtype: str, device: int, strides: Sequence[int] = ()) -> Callable[[], Any]:
        """A function that makes a new array, uninitialised; of other ``strides`` than a contiguous one, in elements.

        Such an array has all the memory of its first dimension.
        """


class Torch:
    """PyTorch tensors."""

    def __init__(self) -> None:
        import torch

        self.to_torch = torch_dtypes()
        self.from_torch = {t: d for d, t in self.to_torch.items()}
        self.current_stream = torch.cuda.current_stream
        # Returns the same stream without a Stream object: 0.1 us instead of 1.2 us (torch.compile's launches use it).
        self.stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", self._public_stream)
        self.new, self.make_device = torch.empty_strided, torch.device  # takes half the host time of torch.empty

    def view(self, array: Any, *, written: bool) -> Any:
        array.data_ptr()  # raises for a tensor without an address, such as a sparse one
        if array.is_neg():
            raise ValueError("its memory has the negated numbers; call .resolve_neg() first")
        return array

    def describe(self, arrays: Sequence[Any]) -> tuple[list[int], list[Layout]]:
        if True in [a.is_neg() for a in arrays]:
            raise AttributeError("is_neg")
        return [a.data_ptr() for a in arrays], [(a.dtype, a.shape, a.stride(), a.get_device()) for a in arrays]

    def in_elements(self, layout: Layout) -> Layout:
        return layout

    def dtype(self, own: Any) -> str | None:
        return self.from_torch.get(own)

    def _public_stream(self, device: int) -> int:
        return int(self.current_stream(device).cuda_stream)

    def maker(self, shape: Sequence[int], dtype: str, device: int, strides: Sequence[int] = ()) -> Callable[[], Any]:
        options = {"dtype": self.to_torch[dtype], "device": self.make_device("cuda", device)}
        if has_gaps(shape, strides):
            whole, lies = (shape[0] * strides[0],), (tuple(shape), tuple(strides))
            return lambda: self.new(whole, (1,), **options).as_strided_(*lies)
        return partial(self.new, tuple(shape), contiguous(shape), **options)


class CuPy:
    """CuPy arrays, and what CuPy can view."""

    def __init__(self) -> None:
        try:
            self.cupy = cupy = load_cupy()
        except ImportError as e:
            raise MissingError("GPU arrays need CuPy; install it: pip install cupy-cuda13x, or cupy-cuda12x.") from e
        self.to_numpy = {t.value: t.numpy() for t in READ}
        self.from_numpy = {own: dtype for dtype, own in self.to_numpy.items()}
        # No function of CuPy's has floats of 8 bits.
        self.new_as = {**self.to_numpy, **{t.value: "uint8" for t in BYTES}}
        self.current_device = cupy.cuda.runtime.getDevice  # the device of an empty array, which has no memory
        self.current_stream = cupy.cuda.get_current_stream

    def view(self, array: Any, *, written: bool) -> Any:
        if isinstance(array, self.cupy.ndarray):
            return array
        interface = getattr(array, "__cuda_array_interface__", None)
        if written and interface is not None and interface["data"][1]:
            raise ValueError("it is written to, but read-only")
        return self.cupy.from_dlpack(array) if interface is None else self._from_interface(array, interface)

    def _from_interface(self, owner: Any, interface: dict[str, Any]) -> Any:
        """The array of an interface; the current stream waits for the interface's stream, the host does not."""
        spelling = interface["typestr"]
        dtype = self.to_numpy["bf16"] if spelling in ("<V2", "|V2") else self.cupy.dtype(spelling)
        shape = tuple(interface["shape"])
        strides = interface.get("strides")
        span = math.prod(shape)
        if strides is not None and span:
            span = 1 + sum((n - 1) * s // dtype.itemsize for n, s in zip(shape, strides))
        memory = self.cupy.cuda.UnownedMemory(interface["data"][0], max(span, 1) * dtype.itemsize, owner)
        if interface.get("stream") not in (None, self.stream(0)):
            event = self.cupy.cuda.Event(disable_timing=True)
            self.cupy.cuda.runtime.eventRecord(event.ptr, interface["stream"])
            self.current_stream().wait_event(event)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0), strides)

    def describe(self, arrays: Sequence[Any]) -> tuple[list[int], list[Layout]]:
        data = [a.data for a in arrays]
        layouts: list[Layout] = [
            (a.dtype, a.shape, a.strides, m.device_id if m.ptr else self.current_device()) for a, m in zip(arrays, data)
        ]
        return [m.ptr for m in data], layouts

    def in_elements(self, layout: Layout) -> Layout:
        dtype, shape, strides, device = layout
        return dtype, shape, tuple(s // dtype.itemsize for s in strides), device

    def dtype(self, own: Any) -> str | None:
        return self.from_numpy.get(own)

    def stream(self, device: int) -> int:
        return int(self.current_stream().ptr)

    def maker(self, shape: Sequence[int], dtype: str, device: int, strides: Sequence[int] = ()) -> Callable[[], Any]:
        gaps = has_gaps(shape, strides)
        whole = (shape[0] * strides[0],) if gaps else tuple(shape)

        def make() -> Any:
            with self.cupy.cuda.Device(device):
                made = self.cupy.empty(whole, self.new_as[dtype])
                if not gaps:
                    return made
                return self.cupy.ndarray(shape, made.dtype, made.data, [made.itemsize * step for step in strides])

        return make


_LIBRARIES: dict[str, Library] = {}
_BY_TYPE: dict[type[Any], Library] = {}


def library_of(array: Any, name: str) -> Library:
    """The library for ``array``, called ``name``; ArrayError if it is not an array."""
    known = _BY_TYPE.get(type(array))
    if known is None:
        known = _BY_TYPE[type(array)] = _library_of(array, name)
    return known


def _library_of(array: Any, name: str) -> Library:
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch" or ("torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor)):
        return _get("torch", Torch)
    if kind == "numpy":
        raise ArrayError(f"'{name}' is expected on a GPU, got a NumPy array; copy it there, by CuPy or torch.")
    if kind == "cupy" or hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__"):
        return _get("cupy", CuPy)
    raise ArrayError(
        f"'{name}' is expected to be an array (CuPy, torch, __cuda_array_interface__, DLPack or NumPy), "
        f"got {type(array).__name__}."
    )


def _get(name: str, make: type[Any]) -> Library:
    if name not in _LIBRARIES:
        _LIBRARIES[name] = make()
    return _LIBRARIES[name]
