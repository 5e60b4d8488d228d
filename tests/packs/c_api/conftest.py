"""A pack, its C library, and a libcuda whose functions are those of a FakeDriver."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from c_driver import Bridge
from c_library import CLibrary
from c_packs import Made, pack
from fake_images import cubins_of_ptx


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with cubins_of_ptx():
        return pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Bridge:
    return Bridge(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, folder: Path, bridge: Bridge) -> Path:
    out = tmp_path_factory.mktemp("library")
    CLibrary.built(folder, out, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=bridge.path)
    return out / "kernels.so"


@pytest.fixture
def make(folder: Path, library: Path, bridge: Bridge) -> Iterator[Any]:
    """Makes a GPU that knows the pack, and a library of its own, loaded on the first device."""
    with ExitStack() as stack:

        def made(load: bool = True, **how: Any) -> Made:
            found = Made(folder, library, **how)
            stack.enter_context(bridge.behind(found.gpu))
            assert not load or found.library.call("load", 0) == "OK", found.library.error()
            return found

        yield made
