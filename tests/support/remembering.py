"""A fake GPU for processes that remember: cubins are made up, and lie in a cache of the test's own."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fake_driver import FakeDriver
from fake_images import made_up_cubin
from lngen.compiler import toolchain
from lngen.compiler.spec import Spec
from lngen.compiler.toolchain import Binary, compile_ptx
from lngen.launch.runtime import remembered

# What the session replaces, so that no other test remembers anything.
RECALLED, REMEMBER = remembered._recalled, remembered._remember


@cache
def ptx_of(source: str, arch: str) -> str:
    return compile_ptx(source, arch, lines=True)


class Remembering:
    """What is compiled and derived on a GPU, by the names of kernels and the texts of specs.

    before   is called with the name of what is compiled next
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: FakeDriver, folder: Path) -> None:
        self.compiled: list[str] = []
        self.derived: list[str] = []
        self.before: Callable[[str], object] = lambda name: None
        self.folder, self.gpu = folder, gpu
        monkeypatch.setenv("LNGEN_CACHE_DIR", str(folder))
        monkeypatch.setattr(remembered, "_recalled", RECALLED)
        monkeypatch.setattr(remembered, "_remember", REMEMBER)
        monkeypatch.setattr("lngen.compiler.compile.compile_cubin", self._compile)
        trace = Spec.trace
        monkeypatch.setattr(Spec, "trace", lambda spec: self.derived.append(str(spec)) or trace(spec))

    def _compile(self, source: str, arch: str, *, name: str, lines: bool = False) -> Binary:
        self.before(name)
        key = hashlib.sha256(f"{arch}{source}".encode()).hexdigest()
        ptx = ptx_of(source, arch)
        image = self.gpu.knows(made_up_cubin(ptx, arch), ptx, arch, source=source)
        self.compiled.append(name)
        toolchain.cache.store(key, toolchain.cache.Entry(arch, "", image))
        return Binary(arch, image, "", {}, key)

    @property
    def files(self) -> list[Path]:
        """What is remembered."""
        return sorted(path for path in (self.folder / "choices").rglob("*") if path.is_file())

    def forget(self) -> None:
        """Count from here on."""
        self.compiled.clear()
        self.derived.clear()

    @property
    def idle(self) -> bool:
        """True if nothing was derived or compiled."""
        return not self.compiled and not self.derived


def remembering(monkeypatch: pytest.MonkeyPatch, folder: Path, **gpu: Any) -> Remembering:
    """On an H100, with PyTorch's tensors of the CPU."""
    from host_tensors import pass_for_gpu_tensors

    found = FakeDriver(version=13090, **gpu)
    pass_for_gpu_tensors(monkeypatch, found)
    return Remembering(monkeypatch, found, folder)
