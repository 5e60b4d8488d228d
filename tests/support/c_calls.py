"""Calls of a C library through ctypes, taken by Python: what the caller gave, read and written as C would.

Plain numbers, ctypes scalars, ``ctypes.byref(...)``, pointers, arrays and bytes all mean what they mean to ctypes. What
ctypes would pass on wrongly, without a word, is an AssertionError here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

INT_MAX = (1 << 31) - 1
_TEXTS = (ctypes.c_char_p, ctypes.c_wchar_p)  # scalars to Python, pointers to C

# CUresult
STATUS = {
    "CUDA_SUCCESS": 0,
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_DEINITIALIZED": 4,
    "CUDA_ERROR_STUB_LIBRARY": 34,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_IMAGE": 200,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
    "CUDA_ERROR_INVALID_PTX": 218,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": 222,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_NOT_FOUND": 500,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": 701,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": 720,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": 803,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": 901,
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": 912,
    "CUDA_ERROR_UNKNOWN": 999,
}


class Refused(Exception):
    """Ends a function of the library with a status."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.status = STATUS[f"CUDA_ERROR_{name}"]


def refuse_if(wrong: bool, name: str = "INVALID_VALUE") -> None:
    """Ends the function with that CUDA_ERROR if something is wrong."""
    if wrong:
        raise Refused(name)


def number(given: Any) -> int:
    """An argument passed by value: a size, a flag, a handle, an address."""
    if given is None:
        return 0
    if isinstance(given, int):
        return int(given)
    if isinstance(given, ctypes._SimpleCData) and not isinstance(given, _TEXTS):
        return int(given.value or 0)
    if not isinstance(given, ctypes._SimpleCData) and hasattr(given, "_as_parameter_"):
        return number(given._as_parameter_)
    return ctypes.cast(given, ctypes.c_void_p).value or 0


def room(given: Any) -> int | None:
    """The bytes behind a pointer, where Python knows them."""
    if isinstance(given, bytes):
        return len(given)
    if isinstance(given, ctypes.Array):
        return ctypes.sizeof(given)
    behind = getattr(given, "_obj", None)  # of byref
    return None if behind is None else ctypes.sizeof(behind)


def write(to: Any, kind: type[Any], value: Any) -> None:
    """Writes a result behind a pointer; a null pointer is an invalid value."""
    size = room(to)
    assert size is None or size >= ctypes.sizeof(kind), (
        f"{ctypes.sizeof(kind)} bytes are written ({kind.__name__}), and the caller gives {size}."
    )
    refuse_if(not number(to))
    kind.from_address(number(to)).value = value


def text_of(given: Any) -> bytes:
    """The bytes before the NUL behind a pointer."""
    refuse_if(not number(given))
    return ctypes.string_at(number(given))


class Function:
    """A function of a library: ``argtypes`` and ``restype`` can be set, as those of a ctypes function can."""

    def __init__(self, name: str, call: Callable[..., int]) -> None:
        self.__name__, self._call = name, call
        self.argtypes: Any = None
        self.restype: Any = ctypes.c_int
        self.errcheck: Any = None

    def __call__(self, *given: Any) -> Any:
        """The status; ctypes.ArgumentError for an argument that does not suit ``argtypes``."""
        kinds = self.argtypes
        if kinds is None:
            for place, one in enumerate(given):
                assert not isinstance(one, int) or -INT_MAX - 1 <= one <= 2 * INT_MAX + 1, (
                    f"{self.__name__}: argument {place} is the plain number {one:#x}, of which ctypes passes 32 bits; "
                    "a c_void_p, c_uint64 or c_size_t, or argtypes, are expected."
                )
                assert not isinstance(one, float), f"{self.__name__}: argument {place} is a float."
        else:
            assert len(given) == len(kinds), f"{self.__name__} takes {len(kinds)} arguments, got {len(given)}."
            given = tuple(map(self._converted, kinds, given))
        status = self._call(*given)
        return status if self.errcheck is None else self.errcheck(status, self, given)

    def _converted(self, kind: Any, given: Any) -> Any:
        try:
            kind.from_param(given)
        except TypeError as error:
            raise ctypes.ArgumentError(f"{self.__name__}: {error}") from error
        if isinstance(given, int) and issubclass(kind, ctypes._SimpleCData):
            return kind(given)
        return given


def c_function(*, context: bool = True, initialised: bool = True, capturable: bool = True) -> Any:
    """Marks a method as a function of the library, and says what it needs before it does anything.

    ``context``: a current context; ``initialised``: cuInit; not ``capturable``: no stream that is captured.
    """

    def marked(method: Callable[..., None]) -> Callable[..., int]:
        @functools.wraps(method)
        def call(self: Any, *given: Any) -> int:
            with self.lock:
                self.calls.append(method.__name__)
                if status := self.refuse.get(method.__name__):
                    return int(status)
                try:
                    refuse_if(initialised and not self.initialised, "NOT_INITIALIZED")
                    refuse_if(context and not self.context, "INVALID_CONTEXT")
                    refuse_if(not capturable and self.capturing, "STREAM_CAPTURE_UNSUPPORTED")
                    method(self, *given)
                except Refused as refused:
                    return refused.status
                return 0

        call.of_library = True  # type: ignore[attr-defined]
        return call

    return marked
