"""If these fail, the C library gives norms of samples other bits than the interpreter, or takes a wrong call."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from c_driver import Bridge
from c_on_gpu import OnGpu, built
from lngen.compiler.compile import Compilation
from lngen.compiler.ir import Value, is_of_set
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import parse_spec
from lngen.launch.pack import Pack
from lngen.packs.verify import verify
from set_cases import set_inputs

pytest.importorskip("cupy")

D, CHUNKS = 64, 6  # of a projection
SPECS = {
    "ada_layernorm_forward_gate_residual": f"ada_layernorm.fwd:d={D},dtype=bf16,gate=yes,residual=yes",
    "ada_layernorm_backward_gate_residual": f"ada_layernorm.bwd:d={D},dtype=bf16,gate=yes,residual=yes",
    "ada_rmsnorm_backward_gamma": f"ada_rmsnorm.bwd:d={D},dtype=f32,gamma=yes",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(SPECS, tmp_path_factory.mktemp("pack"))


class OfSets(OnGpu):
    """The library of the pack, whose calls have samples."""

    specs = SPECS

    def fields(self, group: str, per_set: int, sets: int, apart: int = D) -> tuple[dict[str, Any], dict[str, Array]]:
        """Arguments with inputs on the GPU, those of sets so many elements ``apart``; and the inputs."""
        spec = parse_spec(SPECS[group])
        inputs = set_inputs(spec, per_set, sets)
        distances = {f"{v.name}_outer_stride": apart for v in spec.graph().tensors if is_of_set(v)}
        rows = {"rows": per_set * sets, "inner": per_set}
        return self.arguments(group, inputs, "_outer_stride", d=D, **rows, **distances), inputs

    def shape(self, value: Value, fields: Mapping[str, Any]) -> tuple[int, ...]:
        return (fields["rows"] // fields["inner"], D) if is_of_set(value) else super().shape(value, fields)

    def ready(self, group: str, *how: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """Arguments with a workspace."""
        fields, inputs = self.fields(group, *how)
        self.begin_workspace(group, fields)
        return fields, inputs


@pytest.fixture
def of_sets(folder: Path, bridge: Bridge, tmp_path: Path) -> Iterator[OfSets]:
    with OfSets.opened(folder, bridge, tmp_path) as found:
        yield found


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("group", SPECS)
def test_samples_have_the_bits_of_the_interpreter(of_sets: OfSets, group: str) -> None:
    """One sample, several, of one row, of several stretches; shift and scale are chunks of a projection, or not."""
    for per_set, sets, apart in ((5, 3, D), (1, 4, D), (300, 2, CHUNKS * D), (7, 1, D), (5, 0, D)):
        fields, inputs = of_sets.ready(group, per_set, sets, apart)
        assert of_sets.status(group, fields) == "OK", of_sets.library.error()
        of_sets.has_the_bits(group, fields, inputs)


@pytest.mark.usefixtures("compiler")
def test_a_workspace_has_room_for_the_stretches(of_sets: OfSets, folder: Path) -> None:
    """C counts as a plan does, at lengths on both sides of every change of the order."""
    group = "ada_layernorm_backward_gate_residual"
    found = Compilation(parse_spec(SPECS[group]))
    text = Pack(folder).described(SPECS[group])["schedule"]["text"]
    plan = found.changed(text, "sm_90").plan
    for inner in (1, 2, 255, 256, 1023, 1024, 4095, 4096, 20000):
        for sets in (0, 1, 3):
            size = of_sets.workspace(
                group, {"d": D, "dtype": of_sets.library.dtypes["bf16"], "rows": inner * sets, "inner": inner}
            )
            assert size == plan.workspace_bytes(inner * sets, inner), (inner, sets)


@pytest.mark.usefixtures("compiler")
def test_wrong_sets_are_refused(of_sets: OfSets) -> None:
    group = "ada_layernorm_backward_gate_residual"
    fields, _ = of_sets.ready(group, 6, 2)
    for changes, status, words in (
        ({"inner": 5}, "BAD_ROWS", "the rows of a set, is expected to divide 12 rows, got 5"),
        ({"inner": 24}, "BAD_ROWS", "divide 12 rows"),
        ({"inner": -1}, "BAD_STRIDE", "inner is expected to be 0 or more"),
        ({"scale_outer_stride": D + 1}, "BAD_STRIDE", "scale: its outer stride"),
        ({"scale_outer_stride": 2**62}, "BAD_STRIDE", "scale: its outer stride"),
        (
            {"dscale_outer_stride": D // 2},
            "BAD_STRIDE",
            "dscale is written to, but its rows overlap: strides of 64 and 32",
        ),
        ({"dscale": fields["dshift"]}, "OVERLAP", "dscale shares memory with dshift"),
        ({"dscale": fields["dshift"] + D * 2}, "OVERLAP", "dscale shares memory with dshift"),
        ({"inner": 1}, "WORKSPACE_TOO_SMALL", "needs a workspace"),
        ({"scale": None}, "NULL_POINTER", "scale is null"),
    ):
        assert of_sets.status(group, fields, **changes) == status, changes
        assert words in of_sets.library.error(), of_sets.library.error()
    assert of_sets.gpu.launched == []


# ---- TVM FFI: the samples of a call are those of the shapes ----

GROUP, SETS, PER_SET = "ada_layernorm_backward_gate_residual", 2, 6
FORMS = {  # the leading dimensions of rows, those of samples, and the distance of samples
    "[B, T, D] and [B, D]": ((SETS, PER_SET), (SETS,), D),
    "[B, T, D] and [B, 1, D], chunks": ((SETS, PER_SET), (SETS, 1), CHUNKS * D),
    "[B, F, T, D] and [B, F, 1, D]": ((1, SETS, PER_SET), (1, SETS, 1), D),
    "[M, D] and [N, D], chunks": ((SETS * PER_SET,), (SETS,), CHUNKS * D),
}
OTHERS = {
    "have a row for each sample": ((SETS, PER_SET), (PER_SET,)),
    "another tensor another number": ((SETS, PER_SET), (1,)),
    "which has the first dimensions of the rows": ((SETS * PER_SET,), (5,)),
    "which are expected to have rows, got none": ((SETS, 0), (SETS,)),
}


@pytest.fixture
def ffi(folder: Path, bridge: Bridge, tmp_path: Path) -> Iterator[tuple[OfSets, Any]]:
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, of the extra test")
    with OfSets.opened(folder, bridge, tmp_path, LNGEN_TVM_FFI="") as found:
        yield found, tvm_ffi.load_module(str(tmp_path / "kernels.so"))


def tensors(fields: dict[str, Any], rows: tuple[int, ...], samples: tuple[int, ...], apart: int) -> dict[str, Any]:
    """The tensors of a call by name, and its workspace."""
    from gpu_dlpack import tensor

    graph, found = parse_spec(SPECS[GROUP]).graph(), dict[str, Any]()
    for value in (*graph.tensors, *graph.results):
        of_set, dtype = is_of_set(value), str(value.type.dtype)
        shape = (*(samples if of_set else rows), *[D] * (len(value.type.axes) > 1))
        step = apart if of_set and value in graph.tensors else D
        strides = (*[step] * len(samples), 1) if of_set and step != D else ()
        found[value.name] = tensor(fields[value.name] or 0, shape, dtype, strides)
    size = fields["workspace_bytes"]
    return found | {"workspace": tensor(fields["workspace"], (size,), "u8")}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("form", FORMS)
def test_shapes_say_which_rows_are_a_sample(ffi: tuple[OfSets, Any], form: str) -> None:
    of_sets, functions = ffi
    rows, samples, apart = FORMS[form]
    fields, inputs = of_sets.ready(GROUP, PER_SET, SETS, apart)
    given = tensors(fields, rows, samples, apart)
    assert getattr(functions, f"{GROUP}_workspace_bytes")(given["dy"], PER_SET) == fields["workspace_bytes"]
    getattr(functions, GROUP)(*given.values())
    of_sets.has_the_bits(GROUP, fields, inputs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("words", OTHERS)
def test_other_shapes_are_refused(ffi: tuple[OfSets, Any], words: str) -> None:
    of_sets, functions = ffi
    rows, samples = OTHERS[words]
    fields, _ = of_sets.ready(GROUP, PER_SET, SETS)
    given = tensors(fields, rows, samples, D)
    if words.startswith("another"):
        given["dscale"] = tensors(fields, rows, (SETS,), D)["dscale"]
    with pytest.raises(ValueError, match=words):
        getattr(functions, GROUP)(*given.values())
    with pytest.raises(TypeError, match=r"takes \(dy, inner\), got 1"):
        getattr(functions, f"{GROUP}_workspace_bytes")(given["dy"])
    assert of_sets.gpu.launched == []


# ---- the pack ----


def test_a_pack_of_samples_is_verified(folder: Path) -> None:
    found = verify(folder)
    assert found.ok, found.faults
    assert found.rebuilt == len(SPECS)
