"""A pack, its C library, and a libcuda whose functions are those of a FakeDriver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from c_driver import Bridge
from c_library import built
from c_packs import Made, pack


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Bridge:
    return Bridge(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, folder: Path, bridge: Bridge) -> Path:
    where = [f'-DLNGEN_CUDA_LIBRARY="{bridge.path}"', f'-DLNGEN_PACK_DIR="{folder}"']
    return built(folder, tmp_path_factory.mktemp("library") / "kernels.so", *where)


@pytest.fixture
def make(folder: Path, library: Path, bridge: Bridge) -> Iterator[Any]:
    """Makes a GPU with the library loaded on its first device."""
    with ExitStack() as stack:

        def made(**how: Any) -> Made:
            found = Made(folder, library, **how)
            stack.enter_context(bridge.behind(found.gpu))
            assert found.library.call("load", 0) == "OK", found.library.error()
            return found

        yield made
