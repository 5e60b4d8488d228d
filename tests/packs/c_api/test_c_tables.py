"""If these fail, the C library rotates by other angles than the interpreter, or takes a wrong table."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import c_launcher
from c_driver import Bridge
from c_on_gpu import OnGpu, built
from c_wrong import wrong
from lngen.compiler.ir import is_of_table
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import parse_spec
from lngen.launch.pack import Pack
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
    return built(SPECS, tmp_path_factory.mktemp("pack"))


class OfTables(OnGpu):
    """The library of the pack, whose calls have tables."""

    specs = SPECS

    def fields(self, group: str, rows: int, apart: int = 0) -> tuple[dict[str, Any], dict[str, Array]]:
        """Arguments with inputs on the GPU, rows of tables so many elements ``apart`` unless 0; and the inputs."""
        spec = parse_spec(SPECS[group])
        inputs = random_inputs(spec, rows, 0)
        distances = {f"{v.name}_stride": apart for v in spec.graph().tensors if is_of_table(v) and apart}
        tables = {"table_rows": len(inputs["cos"])} if "positions" in inputs else {}
        fields = self.arguments(group, inputs, "_stride", d=D, rows=rows, **tables, **distances)
        self.begin_workspace(group, fields)
        return fields, inputs


@pytest.fixture
def of_tables(folder: Path, bridge: Bridge, tmp_path: Path) -> Iterator[OfTables]:
    with OfTables.opened(folder, bridge, tmp_path) as found:
        yield found


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("group", SPECS)
def test_rotations_have_the_bits_of_the_interpreter(of_tables: OfTables, group: str) -> None:
    """Tables that are contiguous, and those that lie side by side."""
    for rows, apart in ((5, 0), (1, 2 * COLUMNS), (7, 2 * COLUMNS), (6, COLUMNS), (0, 0)):
        fields, inputs = of_tables.fields(group, rows, apart)
        assert of_tables.status(group, fields) == "OK", of_tables.library.error()
        of_tables.has_the_bits(group, fields, inputs)


@pytest.mark.usefixtures("compiler")
def test_wrong_tables_are_refused(of_tables: OfTables, folder: Path) -> None:
    """A table ends with its rows: a result may begin there."""
    for group in (ROPE, BY_ROW, NORM):
        fields, _ = of_tables.fields(group, 6)
        for field, value, status in wrong(fields, Pack(folder).described(SPECS[group])):
            assert of_tables.status(group, fields, **{field: value}) == status, (group, field, value)
            assert field.split("_")[0] in of_tables.library.error(), of_tables.library.error()
    for group, result in ((ROPE, "y"), (BY_ROW, "dx")):
        fields, _ = of_tables.fields(group, 6)
        for changes, status, words in (
            ({"sin_stride": COLUMNS + 1}, "BAD_STRIDE", "sin: its stride is expected to be a multiple of"),
            ({"sin_stride": 2**62}, "BAD_STRIDE", "sin: its stride"),
            ({result: fields["cos"]}, "OVERLAP", "cos"),
        ):
            assert of_tables.status(group, fields, **changes) == status, (group, changes)
            assert words in of_tables.library.error(), of_tables.library.error()
    fields, _ = of_tables.fields(BY_ROW, 6)
    assert of_tables.status(BY_ROW, fields, dx=fields["cos"] + 5 * COLUMNS * 4) == "OVERLAP"
    assert of_tables.gpu.launched == []
    fields, _ = of_tables.fields(ROPE, 6)
    fields["positions"] = c_launcher.upload(of_tables.gpu, np.ones(6, np.int64))
    fields["cos"] = c_launcher.upload(of_tables.gpu, np.zeros((100, COLUMNS), np.float32))
    for rows, status in ((3, "OVERLAP"), (2, "OK")):
        assert of_tables.status(ROPE, fields, table_rows=rows, y=fields["cos"] + 2 * COLUMNS * 4) == status


# ---- TVM FFI: distances are those of the shapes ----


@pytest.fixture
def ffi(folder: Path, bridge: Bridge, tmp_path: Path) -> Iterator[tuple[OfTables, Any]]:
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, of the extra test")
    with OfTables.opened(folder, bridge, tmp_path, LNGEN_TVM_FFI="") as found:
        yield found, tvm_ffi.load_module(str(tmp_path / "kernels.so"))


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
    size = fields.get("workspace_bytes")
    return found | ({"workspace": tensor(fields["workspace"], (size,), "u8")} if size else {})


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("group", SPECS)
def test_distances_are_those_of_the_tensors(ffi: tuple[OfTables, Any], group: str) -> None:
    of_tables, functions = ffi
    for lead, apart in product(((6,), (2, 3)), (0, 2 * COLUMNS)):
        fields, inputs = of_tables.fields(group, 6, apart)
        getattr(functions, group)(*tensors(group, fields, inputs, lead).values())
        of_tables.has_the_bits(group, fields, inputs)


@pytest.mark.usefixtures("compiler")
def test_other_tables_are_refused(ffi: tuple[OfTables, Any]) -> None:
    from gpu_dlpack import tensor

    of_tables, functions = ffi
    fields, inputs = of_tables.fields(NORM, 6)
    rows = len(inputs["cos"])
    for changes, kind, words in (
        ({"cos": ((9, COLUMNS + 1), "f32", ())}, ValueError, "dimension 1 of cos is expected to be 32, got 33"),
        ({"cos": ((9, COLUMNS), "f32", ())}, ValueError, f"sin is expected to have 9 rows, as many as cos, got {rows}"),
        (dict.fromkeys(("cos", "sin"), ((0, COLUMNS), "f32", ())), ValueError, "cos, a table, .* 1 to .* rows, got 0"),
        ({"cos": ((9, COLUMNS), "f32", (1, 9))}, ValueError, "cos is expected to have contiguous rows"),
        ({"cos": ((rows, COLUMNS), "f32", (0, 1))}, ValueError, "cos is expected to have rows at one distance"),
        ({"cos": ((9 * COLUMNS,), "f32", ())}, ValueError, "cos is expected to have 2 dimensions, got 1"),
        ({"cos": ((9, COLUMNS), "bf16", ())}, TypeError, "cos is expected to be f32, got bf16"),
        ({"positions": ((6,), "i32", ())}, TypeError, "positions is expected to be i64, got i32"),
        ({"positions": ((5,), "i64", ())}, ValueError, "dimension 0 of positions is expected to be 6, got 5"),
    ):
        given = tensors(NORM, fields, inputs, (6,))
        given |= {name: tensor(fields[name], *how) for name, how in changes.items()}
        with pytest.raises(kind, match=words):
            getattr(functions, NORM)(*given.values())
    assert of_tables.gpu.launched == []


def test_a_pack_of_tables_is_verified(folder: Path) -> None:
    found = verify(folder)
    assert found.ok, found.faults
    assert found.rebuilt == len(SPECS)
