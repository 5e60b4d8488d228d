"""Fat binaries: the cubins and the PTX of one source for many archs in one file, by NVIDIA's library nvFatbin.

``cuModuleLoadData`` takes such a file and picks the image for its GPU. The library needs neither a GPU nor a driver:
https://docs.nvidia.com/cuda/nvfatbin. Its default compresses PTX with Zstandard, which drivers before CUDA 12.4 cannot
read, so nothing is compressed here.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from lngen.errors import LngenError, MissingError, short
from lngen.version import install_hint

_OPTIONS = (b"-64", b"-compress=false")
_SIZE_T = ctypes.c_size_t
_TEXT = ctypes.c_char_p
_HANDLE = ctypes.c_void_p
# The arguments of each function, all of which return a code that nvFatbinGetErrorString explains.
_SIGNATURES: dict[str, list[Any]] = {
    "nvFatbinCreate": [ctypes.POINTER(_HANDLE), ctypes.POINTER(_TEXT), _SIZE_T],
    "nvFatbinDestroy": [ctypes.POINTER(_HANDLE)],
    "nvFatbinAddCubin": [_HANDLE, _TEXT, _SIZE_T, _TEXT, _TEXT],
    "nvFatbinAddPTX": [_HANDLE, _TEXT, _SIZE_T, _TEXT, _TEXT, _TEXT],
    "nvFatbinSize": [_HANDLE, ctypes.POINTER(_SIZE_T)],
    "nvFatbinGet": [_HANDLE, ctypes.c_void_p],
}


class Image(NamedTuple):
    """One member of a fat binary: a cubin or the text of PTX, for ``arch`` ("sm_90", "sm_90a")."""

    arch: str
    kind: str
    data: bytes


def fatbin(images: Iterable[Image]) -> bytes:
    """One fat binary of ``images``, in their order. PTX loses its comments, which the library removes.

    LngenError for an image that the library refuses, MissingError without the library.
    """
    library, handle, size = _library(), _HANDLE(), _SIZE_T()
    options = (_TEXT * len(_OPTIONS))(*_OPTIONS)
    _call(library, "nvFatbinCreate", "its options", ctypes.byref(handle), options, len(_OPTIONS))
    try:
        for image in images:
            _add(library, handle, image)
        _call(library, "nvFatbinSize", "the images", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        _call(library, "nvFatbinGet", "the images", handle, buffer)
        return buffer.raw
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))


def _add(library: ctypes.CDLL, handle: ctypes.c_void_p, image: Image) -> None:
    """Add one image; its identifier is what tools that list a fat binary print."""
    arch = image.arch.removeprefix("sm_").encode()
    what, identifier = f"the {image.kind} for {image.arch}", f"{image.arch}.{image.kind}".encode()
    if image.kind == "cubin":
        _call(library, "nvFatbinAddCubin", what, handle, image.data, len(image.data), arch, identifier)
    else:
        text = image.data.rstrip(b"\0") + b"\0"
        _call(library, "nvFatbinAddPTX", what, handle, text, len(text), arch, identifier, b"")


def _call(library: ctypes.CDLL, function: str, what: str, *args: Any) -> None:
    """Call a function of the library; LngenError with its own words if it refuses."""
    if code := getattr(library, function)(*args):
        why = library.nvFatbinGetErrorString(code) or b"an unknown error"
        raise LngenError(f"nvFatbin refused {what}: {why.decode('ascii', 'replace')} (code {code}).")


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, found by cuda-pathfinder in wheels, in conda, in a toolkit, or on the system's path."""
    hint = f"install it with: {install_hint('fatbin')}, or: pip install nvidia-nvfatbin cuda-pathfinder"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise MissingError(f"A fat binary needs cuda-pathfinder, which cannot be imported ({error}); {hint}") from error
    try:
        library = ctypes.CDLL(load_nvidia_dynamic_lib("nvfatbin").abs_path or "")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.nvFatbinGetErrorString.argtypes, library.nvFatbinGetErrorString.restype = [ctypes.c_int], _TEXT
    except (RuntimeError, OSError, AttributeError) as error:
        why = short(str(error).strip().partition("\n")[0])
        raise MissingError(f"A fat binary needs libnvfatbin, which cannot be loaded ({why}); {hint}") from error
    return library
