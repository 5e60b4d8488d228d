"""The C library of a pack, called on a fake GPU that executes what it launches."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

import c_launcher
from c_driver import Bridge
from c_library import CLibrary
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Value
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import parse_spec
from lngen.packs.build import build


def built(specs: Mapping[str, str], where: Path) -> Path:
    """A folder with the pack of these specs and its C library, whose cubins are PTX."""
    with cubins_of_ptx():
        build([*specs.values()], where, arch="sm_90", rows="1", emit="ptx,cubin,c")
    return where


class OnGpu:
    """A library whose groups have the specs of ``specs``, and a GPU that launches it."""

    specs: Mapping[str, str]

    def __init__(self, gpu: FakeDriver, library: CLibrary) -> None:
        self.gpu, self.library = gpu, library
        assert library.call("load", 0) == "OK", library.error()
        c_launcher.begin(gpu)

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, bridge: Bridge, where: Path, **defines: Any) -> Iterator[Self]:
        CLibrary.built(folder, where, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=bridge.path, **defines)
        gpu = FakeDriver(version=14000, capability=(9, 0))
        gpu.knows_pack(folder)
        with bridge.behind(gpu):
            yield cls(gpu, CLibrary(where / "kernels.so", folder))

    def shape(self, value: Value, fields: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(value.type.shape(fields["rows"], fields["d"]))

    def arguments(self, group: str, inputs: Mapping[str, Array], apart: str = "", **fields: Any) -> dict[str, Any]:
        """These fields with inputs on the GPU and memory for the results.

        An input whose field NAME + ``apart`` is among them has its rows that many elements apart.
        """
        spec = parse_spec(self.specs[group])
        fields["dtype"] = self.library.dtypes[str(spec.dtype)]
        for value in spec.graph().tensors:
            array = inputs[value.name]
            if distance := fields.get(value.name + apart):
                placed = np.zeros((len(array), distance), array.dtype)
                placed[:, : array.shape[1]] = array
                array = placed
            fields[value.name] = c_launcher.upload(self.gpu, array) if array.size else None
        for value in spec.graph().results:
            size = int(np.prod(self.shape(value, fields), initial=1)) * value.type.dtype.size
            fields[value.name] = c_launcher.allocate(self.gpu, max(size, 1)).value
        return fields

    def status(self, group: str, fields: Mapping[str, Any], **changes: Any) -> str:
        return self.library.call(group, self.library.structs[group](**{**fields, **changes}), 0, None)

    def workspace(self, group: str, fields: Mapping[str, Any]) -> int:
        """The bytes that a call needs."""
        size = ctypes.c_size_t()
        made = self.library.structs[group](**fields)
        assert self.library.call(f"{group}_workspace_bytes", made, 0, ctypes.byref(size)) == "OK", self.library.error()
        return size.value

    def begin_workspace(self, group: str, fields: dict[str, Any]) -> None:
        """Gives a call a workspace, if it needs one."""
        if size := self.workspace(group, fields):
            fields |= {"workspace": c_launcher.allocate(self.gpu, size).value, "workspace_bytes": size}
        made = self.library.structs[group](**fields)
        assert self.library.call(f"{group}_init_workspace", made, 0, None) == "OK", self.library.error()

    def has_the_bits(self, group: str, fields: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
        """The results in memory are those of the interpreter."""
        graph = parse_spec(self.specs[group]).graph()
        wanted = interpret(graph, inputs)
        for value in graph.results:
            shape = self.shape(value, fields)
            if 0 not in shape:
                got = c_launcher.download(self.gpu, fields[value.name], shape, NUMPY_DTYPE[value.type.dtype])
                assert got.tobytes() == wanted[value.name].tobytes(), (value.name, shape)
