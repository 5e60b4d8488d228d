"""If these fail, the C library rotates by other angles than the interpreter, or takes a wrong table."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import c_launcher
from c_driver import Bridge
from c_library import CLibrary
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import is_of_table
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import parse_spec
from lngen.packs.build import build
from lngen.packs.verify import verify
from lngen.proof.check.inputs import random_inputs

pytest.importorskip("cupy")

D, HEAD = 128, 64
SPECS = {
    "rope_forward_head_64_positions_i64": f"rope.fwd:d={D},dtype=bf16,head={HEAD},positions=i64",
    "rope_backward_head_64": f"rope.bwd:d={D},dtype=bf16,head={HEAD}",
    "qk_rmsnorm_forward_head_64_k_heads_1_rotate_halves_positions_i32": (
        f"qk_rmsnorm.fwd:d={D},dtype=bf16,head={HEAD},k_heads=1,rotate=halves,positions=i32"
    ),
    "qk_rmsnorm_backward_head_64_k_heads_1_rotate_halves_positions_i64": (
        f"qk_rmsnorm.bwd:d={D},dtype=bf16,head={HEAD},k_heads=1,rotate=halves,positions=i64"
    ),
    "rope_forward_head_64_rotate_pairs_positions_i32_strides_2": (
        f"rope.fwd:d={D},dtype=bf16,head={HEAD},rotate=pairs,positions=i32,strides=2"
    ),
}
ROPE, BY_ROW, _, NORM, _ = SPECS
COLUMNS = HEAD // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("pack")
    with cubins_of_ptx():
        build([*SPECS.values()], where, arch="sm_90", rows="1", emit="ptx,cubin,c")
    return where


class OfTables:
    """The library of the pack, and a GPU that launches it."""

    def __init__(self, gpu: FakeDriver, library: CLibrary, functions: Any = None) -> None:
        self.gpu, self.library, self.functions = gpu, library, functions
        assert library.call("load", 0) == "OK", library.error()
        c_launcher.begin(gpu)

    def fields(self, group: str, rows: int, apart: int = 0) -> tuple[dict[str, Any], dict[str, Array]]:
        """Arguments with inputs on the GPU, rows of tables so many elements ``apart`` unless 0; and the inputs."""
        spec = parse_spec(SPECS[group])
        inputs, found = random_inputs(spec, rows, 0), {"d": D, "rows": rows}
        found["dtype"] = self.library.dtypes[str(spec.dtype)]
        for value in spec.graph().tensors:
            array = inputs[value.name]
            if is_of_table(value) and apart:
                placed = np.zeros((len(array), apart), array.dtype)
                placed[:, :COLUMNS] = array
                array, found[f"{value.name}_stride"] = placed, apart
            found[value.name] = c_launcher.upload(self.gpu, array) if array.size else None
        for value in spec.graph().results:
            size = int(np.prod(value.type.shape(rows, D), initial=1)) * value.type.dtype.size
            found[value.name] = c_launcher.allocate(self.gpu, max(size, 1)).value
        found |= {"workspace": c_launcher.allocate(self.gpu, 1 << 20).value, "workspace_bytes": 1 << 20}
        made = self.library.structs[group](**found)
        assert self.library.call(f"{group}_init_workspace", made, 0, None) == "OK", self.library.error()
        return found, inputs

    def status(self, group: str, fields: dict[str, Any], **changes: Any) -> str:
        return self.library.call(group, self.library.structs[group](**{**fields, **changes}), 0, None)

    def has_the_bits(self, group: str, rows: int, fields: dict[str, Any], inputs: dict[str, Array]) -> None:
        """The results in memory are those of the interpreter."""
        graph = parse_spec(SPECS[group]).graph()
        wanted = interpret(graph, inputs)
        for value in graph.results:
            shape = tuple(value.type.shape(rows, D))
            if 0 not in shape:
                got = c_launcher.download(self.gpu, fields[value.name], shape, NUMPY_DTYPE[value.type.dtype])
                assert got.tobytes() == wanted[value.name].tobytes(), (value.name, rows)


@pytest.fixture
def of_tables(folder: Path, bridge: Bridge, tmp_path: Path) -> Iterator[OfTables]:
    CLibrary.built(folder, tmp_path, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=bridge.path)
    gpu = FakeDriver(version=14000, capability=(9, 0))
    gpu.knows_pack(folder)
    with bridge.behind(gpu):
        yield OfTables(gpu, CLibrary(tmp_path / "kernels.so", folder))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("group", SPECS)
def test_rotations_have_the_bits_of_the_interpreter(of_tables: OfTables, group: str) -> None:
    """Tables that are contiguous, and those that lie side by side."""
    for rows, apart in ((5, 0), (1, 2 * COLUMNS), (7, 2 * COLUMNS), (6, COLUMNS), (0, 0)):
        fields, inputs = of_tables.fields(group, rows, apart)
        assert of_tables.status(group, fields) == "OK", of_tables.library.error()
        of_tables.has_the_bits(group, rows, fields, inputs)


@pytest.mark.usefixtures("compiler")
def test_wrong_tables_are_refused(of_tables: OfTables) -> None:
    for group, result in ((ROPE, "y"), (BY_ROW, "dx")):
        fields, _ = of_tables.fields(group, 6)
        for changes, status, words in (
            ({"cos": None}, "NULL_POINTER", "cos is null"),
            ({"cos": fields["cos"] + 4}, "MISALIGNED", "cos is expected at a multiple of"),
            ({"sin_stride": COLUMNS + 1}, "BAD_STRIDE", "sin: its stride is expected to be a multiple of"),
            ({"sin_stride": 2**62}, "BAD_STRIDE", "sin: its stride"),
            ({result: fields["cos"]}, "OVERLAP", "cos"),
        ):
            assert of_tables.status(group, fields, **changes) == status, (group, changes)
            assert words in of_tables.library.error(), of_tables.library.error()
    fields, _ = of_tables.fields(ROPE, 6)
    assert of_tables.status(ROPE, fields, positions=None) == "NULL_POINTER"
    fields, _ = of_tables.fields(BY_ROW, 6)
    assert of_tables.status(BY_ROW, fields, dx=fields["cos"] + 5 * COLUMNS * 4) == "OVERLAP"
    assert of_tables.gpu.launched == []


# ---- TVM FFI: distances are those of the shapes ----


@pytest.fixture
def ffi(folder: Path, bridge: Bridge, tmp_path: Path) -> Iterator[OfTables]:
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, of the extra test")
    CLibrary.built(folder, tmp_path, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=bridge.path, LNGEN_TVM_FFI="")
    gpu = FakeDriver(version=14000, capability=(9, 0))
    gpu.knows_pack(folder)
    with bridge.behind(gpu):
        library = CLibrary(tmp_path / "kernels.so", folder)
        yield OfTables(gpu, library, tvm_ffi.load_module(str(tmp_path / "kernels.so")))


def tensors(group: str, fields: dict[str, Any], inputs: dict[str, Array], lead: tuple[int, ...]) -> dict[str, Any]:
    """The tensors of a call by name, whose rows have these leading dimensions, and its workspace."""
    from gpu_dlpack import tensor

    graph, found = parse_spec(SPECS[group]).graph(), dict[str, Any]()
    rows = int(np.prod(lead))
    for value in (*graph.tensors, *graph.results):
        own = tuple(inputs[value.name].shape if value.name in inputs else value.type.shape(rows, D))
        shape = (*lead, *own[1:]) if str(value.type.axes[0]) == "M" else own
        apart = fields.get(f"{value.name}_stride", 0)
        strides = tuple(int(np.prod(shape[n + 1 : -1])) * apart for n in range(len(shape) - 1)) if apart else ()
        found[value.name] = tensor(fields[value.name], shape, str(value.type.dtype), (*strides, 1) if apart else ())
    return found | {"workspace": tensor(fields["workspace"], (1 << 20,), "u8")}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("group", SPECS)
def test_distances_are_those_of_the_tensors(ffi: OfTables, group: str) -> None:
    for lead, apart in product(((6,), (2, 3)), (0, 2 * COLUMNS)):
        fields, inputs = ffi.fields(group, 6, apart)
        getattr(ffi.functions, group)(*tensors(group, fields, inputs, lead).values())
        ffi.has_the_bits(group, 6, fields, inputs)


@pytest.mark.usefixtures("compiler")
def test_other_tables_are_refused(ffi: OfTables) -> None:
    from gpu_dlpack import tensor

    fields, inputs = ffi.fields(NORM, 6)
    for changes, kind, words in (
        ({"cos": ((9, COLUMNS + 1), "f32", ())}, ValueError, "dimension 1 of cos is expected to be 32, got 33"),
        ({"cos": ((9, COLUMNS), "f32", (1, 9))}, ValueError, "cos is expected to have contiguous rows"),
        ({"cos": ((9, COLUMNS), "f32", (0, 1))}, ValueError, "cos is expected to have rows at one distance"),
        ({"cos": ((9 * COLUMNS,), "f32", ())}, ValueError, "cos is expected to have 2 dimensions, got 1"),
        ({"cos": ((9, COLUMNS), "bf16", ())}, TypeError, "cos is expected to be f32, got bf16"),
        ({"positions": ((6,), "i32", ())}, TypeError, "positions is expected to be i64, got i32"),
        ({"positions": ((5,), "i64", ())}, ValueError, "dimension 0 of positions is expected to be 6, got 5"),
    ):
        given = tensors(NORM, fields, inputs, (6,))
        given |= {name: tensor(fields[name], *how) for name, how in changes.items()}
        with pytest.raises(kind, match=words):
            getattr(ffi.functions, NORM)(*given.values())
    assert ffi.gpu.launched == []


def test_a_pack_of_tables_is_verified(folder: Path) -> None:
    found = verify(folder)
    assert found.ok, found.faults
    assert found.rebuilt == len(SPECS)
