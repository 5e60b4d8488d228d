"""If these fail, a fat binary lacks an image, differs from run to run, or a driver cannot load it."""

import ctypes
import re
import struct
import sys
from types import SimpleNamespace

import pytest

from lngen.aot import fatbin as module
from lngen.aot.fatbin import Image, fatbin
from lngen.errors import LngenError, MissingError
from lngen.toolchain import compile_cubin, compile_ptx

SOURCE = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1.0f; } // a comment'
MAGIC = 0xBA55ED50  # the first four bytes, little-endian
PTX, CUBIN = 1, 2  # the kind of a member, as its header has it


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("cuda.pathfinder")


@pytest.fixture(scope="module")
def images() -> tuple[Image, ...]:
    cubins = [Image(arch, "cubin", compile_cubin(SOURCE, arch).image) for arch in ("sm_80", "sm_90", "sm_120")]
    return (*cubins, Image("sm_120", "ptx", compile_ptx(SOURCE, "sm_120").encode()))


def members(data: bytes) -> list[tuple[int, int, bytes]]:
    """Kind, arch and payload of each member: a header of 16 bytes, then a header and a payload for each."""
    magic, version, header, size = struct.unpack_from("<IHHQ", data)
    assert (magic, version, header, size) == (MAGIC, 1, 16, len(data) - 16)
    found, at = [], header
    while at < len(data):
        kind, _, own, payload = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        found.append((kind, arch, data[at + own : at + own + payload]))
        at += own + payload
    assert at == len(data)
    return found


def test_every_image_is_there_uncompressed(images: tuple[Image, ...]) -> None:
    """A driver of CUDA 12.0 reads no Zstandard, with which the library compresses PTX by default."""
    data = fatbin(images)
    found = members(data)
    assert [(kind, arch) for kind, arch, _ in found] == [(CUBIN, 80), (CUBIN, 90), (CUBIN, 120), (PTX, 120)]
    for image, (_, _, payload) in zip(images[:3], found[:3], strict=True):
        assert payload.startswith(image.data)
        assert not payload[len(image.data) :].strip(b"\0")
    text = found[3][2].decode()
    assert re.search(r"^\.target sm_120$", text, re.MULTILINE)
    assert ".visible .entry one(" in text
    assert len(data) - sum(len(i.data) for i in images) < 1024
    ptx = images[-1]
    assert fatbin([ptx]) == fatbin([ptx._replace(data=ptx.data.rstrip(b"\0") + b"\0")]), "with a NUL at its end or not"


WRONG = {
    "no cubin": (Image("sm_80", "cubin", b""), "cubin for sm_80: empty input"),
    "no ELF": (Image("sm_80", "cubin", b"no ELF" * 99), "cubin for sm_80: fatbinary elf mismatch"),
    "no PTX": (Image("sm_80", "ptx", b""), "ptx for sm_80: empty input"),
    "a text": (Image("sm_80", "ptx", b"no PTX"), "ptx for sm_80: could not find ptx version"),
}


def test_a_wrong_image_is_one_sentence(images: tuple[Image, ...]) -> None:
    another = images[0]._replace(arch="sm_90"), "cubin for sm_90: fatbinary elf mismatch: elf arch"
    for image, message in (*WRONG.values(), another):
        with pytest.raises(LngenError, match=f"nvFatbin refused the {message}"):
            fatbin([image])


def test_each_fat_binary_is_destroyed(monkeypatch: pytest.MonkeyPatch, images: tuple[Image, ...]) -> None:
    """Also that of a refused image."""
    library, count = module._library(), []
    names = ("nvFatbinCreate", "nvFatbinAddCubin", "nvFatbinAddPTX", "nvFatbinSize", "nvFatbinGet")
    fake = SimpleNamespace(**{n: getattr(library, n) for n in (*names, "nvFatbinGetErrorString")})
    fake.nvFatbinDestroy = lambda handle: count.append(library.nvFatbinDestroy(handle))
    monkeypatch.setattr(module, "_library", lambda: fake)
    fatbin(images)
    with pytest.raises(LngenError, match="refused"):
        fatbin([Image("sm_80", "cubin", b"no ELF")])
    assert count == [0, 0]


@pytest.mark.parametrize("missing", ["cuda.pathfinder", "the library", "a function"])
def test_a_missing_library_is_a_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch, images: tuple[Image, ...], missing: str
) -> None:
    module._library.cache_clear()
    from cuda import pathfinder

    def not_found(name: str) -> SimpleNamespace:
        raise pathfinder.DynamicLibNotFoundError(f"no {name}\nmuch more")

    if missing == "cuda.pathfinder":
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    elif missing == "the library":
        monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace())
    with pytest.raises(MissingError, match=r'pip install "\.\[fatbin\]" in the checkout') as raised:
        fatbin(images)
    assert "\n" not in str(raised.value)
    assert "pip install nvidia-nvfatbin" in str(raised.value)
