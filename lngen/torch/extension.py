"""The direct way in C++, an option: ``use_extension()`` builds extension.cpp, once for a PyTorch and a Python.

What is launched, with what, is still prepared in Python (``direct``); so are the checks of a call. The extension has
the rest: results, the launch, and PyTorch's graph of gradients. Where it does not suit, direct.py does the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lngen.config import cache_dir
from lngen.errors import MissingError
from lngen.files import exclusive, keep, kept
from lngen.launch import direct, driver
from lngen.launch.direct import Kernels, Made, Prepared
from lngen.version import install_hint

NAME = "lngen_extension"
LONGEST = 600  # seconds to wait for another process that builds it
SOURCE = Path(__file__).with_name("extension.cpp")

Plan = tuple[Any, ...]


def use_extension() -> None:
    """From now on, calls that are like earlier ones are launched by the extension, in C++; the bits are the same.

    It is built when this is called for the first time, which takes about 20 seconds, and is kept in lngen's cache
    folder. MissingError without what a build needs: a C++ compiler, ninja and setuptools.
    """
    module()
    direct.native = native
    direct.forget()


# ---- once per call that is prepared ----


def native(prepared: Prepared, inference: Kernels, saving: Kernels | None) -> Callable[..., Any] | None:
    """``call(stream, *tensors)``: the outputs of a prepared call; None if the extension cannot launch its kernels."""
    first = plan_of(inference)
    second = None if saving is None else plan_of(saving)
    if first is None or (saving is not None and second is None):
        return None
    alone = copy(prepared)  # without the native call, to avoid a circle of references

    def planned(cotangents: Sequence[Tensor], kept: Sequence[Tensor], numbers: Tensor | None) -> Plan | None:
        return plan_of(alone.kernels_of([*cotangents, *kept], numbers))

    taken = saving.made + [_layout(inference.given, saving, n) for n in prepared.kept] if saving else []
    address = ctypes.cast(driver.library().cuLaunchKernelEx, ctypes.c_void_p).value
    kept, places = (prepared.kept, prepared.places) if saving else ((), ())
    made: Callable[..., Any] = module().make(
        address, len(inference.given), first, second, taken, kept, places, alone.gradients, planned
    )
    return made


def _layout(given: Sequence[Tensor], saving: Kernels, number: int) -> Made:
    """The layout of saved tensor ``number``: inputs come first, then outputs."""
    if number >= len(given):
        return saving.made[number - len(given)]
    tensor = given[number]
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def plan_of(kernels: Kernels) -> Plan | None:
    """What C++ launches kernels with, as plain data; None if their workspace has to be prepared."""
    bound = kernels.bound
    if bound.zeroed:
        return None
    base = ctypes.addressof(bound.block)
    launches = [
        (one.given[1].value, bytes(one.config), bytes(one.attributes), [(at - base) // 8 for at in one.given[2]])
        for one in bound.launches
    ]
    more = [t.data_ptr() - kernels.more[0].data_ptr() for t in kernels.more]
    numbers = [] if kernels.numbers is None else [kernels.numbers]
    size = bound.workspace_bytes
    return bytes(bound.block), launches, bound.buffers, size, more, kernels.made, kernels.offsets, numbers, bound


# ---- once per process, and per PyTorch and Python ----


@cache
def module() -> Any:
    """The extension, built if it is not in the cache folder."""
    made_of = torch.__version__, sysconfig.get_config_var("SOABI"), torch.compiled_with_cxx11_abi(), SOURCE.read_text()
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder, name = cache_dir() / "torch", f"{torch.__version__}-{sys.implementation.cache_tag}-{digest}"
    with exclusive(folder, name, LONGEST) as staging:
        staging.mkdir(mode=0o700, exist_ok=True)
        library = staging / f"{NAME}.so"
        try:
            library.write_bytes(kept(folder / name))
        except (OSError, ValueError):
            _build(staging)
            keep(folder / name, library.read_bytes())
        return _imported(library)


def _imported(library: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found


def _build(folder: Path) -> None:
    """Compile the extension in a folder."""
    try:
        from torch.utils import cpp_extension
    except ImportError as error:  # of setuptools, in some versions of PyTorch
        raise _missing(f"setuptools ({error})") from error
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler):
        raise _missing(f"a C++ compiler ('{compiler}' is not found; install g++, or name another with CXX)")
    if not cpp_extension.is_ninja_available():
        raise _missing("ninja")
    headers = [Path(sysconfig.get_paths()["include"], "Python.h"), *map(Path, cpp_extension.include_paths()[:1])]
    for path in headers:
        if not path.exists():
            raise _missing(f"the headers of Python and PyTorch ({path} is missing)")
    try:
        cpp_extension.load(
            NAME, [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O2"], is_python_module=False
        )
    except RuntimeError as error:
        raise MissingError(
            f"PyTorch {torch.__version__} and '{compiler}' cannot build the extension of lngen.torch, without which "
            f"all else works: {str(error).strip()}"
        ) from error


def _missing(what: str) -> MissingError:
    return MissingError(
        f"lngen.torch.use_extension() builds a C++ file, for which it needs {what}; "
        f"for all but the compiler: {install_hint('torch-ext')}."
    )
