"""If these fail, schema.json and the manifests of builds disagree, or a wrong manifest is found too late."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lngen
from lngen.errors import LngenError
from lngen.launch.pack import FILE_NAME, Pack
from lngen.launch.shape import check_document
from lngen.packs.verify import verify
from own_graphs import own
from packs import SCHEMA, WRONG, at, changed, is_named, manifest_of, places, with_wrong_values, without_keys, written

VALIDATORS = pytest.importorskip("jsonschema")  # of the test extra; the machine of a GPU run may lack it
FWD, BWD = "rmsnorm.fwd:d=64,dtype=bf16", "layernorm.bwd:d=64,dtype=bf16"
SINGLE = "form=registers,threads=8,rows_per_block=128,vec=8,single_launch=yes"
BUILDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sources": (FWD, {"emit": "cu"}),
    "fatbin and vectors": (FWD, {"emit": "cu,ptx,cubin,fatbin,vectors", "arch": "sm_80,sm_90+ptx", "rows": "1,many"}),
    "bundle": ("rmsnorm.fwd:d=24,dtype=f64", {"emit": "cu,cubin", "bundle": True}),
    "own graph": (own("add_rmsnorm", "bwd"), {"emit": "cu"}),
    "single launch": (BWD, {"emit": "cu,fatbin", "schedule": SINGLE}),
    "every class": ("layernorm.fwd:d=24,dtype=f16,weight=f32", {"emit": "cu", "rows": "all"}),
    "options": ("rmsnorm.bwd:d=24,dtype=f32,wrt=x,accumulate=x,strides=2", {"emit": "cu"}),
    "eps at run time": ("l2norm.fwd:d=64,dtype=f64,guard=max,eps=run", {"emit": "cu"}),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a build by its name; each is built once."""
    pytest.importorskip("cupy")

    @cache
    def folder(name: str) -> Path:
        (spec, options), made = BUILDS[name], tmp_path_factory.mktemp("pack")
        lngen.build([spec], made, **options)
        return made

    return folder


VALIDATOR = VALIDATORS.Draft202012Validator(SCHEMA)


def faults(document: Any) -> list[str]:
    return [f"{e.json_path}: {e.message}" for e in VALIDATOR.iter_errors(document)]


def test_the_schema_is_one_and_every_key_is_described() -> None:
    VALIDATORS.Draft202012Validator.check_schema(SCHEMA)
    definitions, bare = SCHEMA["$defs"], []

    def walk(value: Any, place: str) -> None:
        for key, part in value.items() if isinstance(value, dict) else ():
            for name, of in part.items() if key == "properties" else ():
                target = definitions.get(of.get("$ref", "").rpartition("/")[2], {})
                bare.extend([f"{place}.{name}"] * ("description" not in {**target, **of}))
            if key not in ("allOf", "oneOf"):
                walk(part, f"{place}.{key}")

    walk(SCHEMA, "")
    assert bare == []


def test_builds_follow_the_schema(build: Any) -> None:
    """And have what the table above says, as otherwise this proves less."""
    found = {name: manifest_of(build(name)) for name in BUILDS}
    assert {name: faults(document) for name, document in found.items()} == {name: [] for name in BUILDS}
    single = next(s for s in found["single launch"]["kernel_sets"] if s["schedule"]["single_launch"])
    assert [b["zeroed"] for b in single["workspace"]["buffers"]].count(True) == 1
    (image,) = found["single launch"]["specs"][BWD]["images"]
    assert image["classes"][0]["otherwise"]["kernel_set"] != image["classes"][0]["kernel_set"] == single["name"]
    kinds = [(i["arch"], i["kind"]) for i in found["fatbin and vectors"]["specs"][FWD]["images"]]
    assert kinds == [("sm_90", "cubin"), ("sm_80", "cubin"), ("sm_90", "ptx")]
    assert found["bundle"]["kernel_sets"][0]["numerics"]["statistics"] == "f64"
    assert found["own graph"]["kernel_sets"][0]["spec"]["graph"] == "add_rmsnorm"
    assert len(next(iter(found["every class"]["specs"].values()))["images"][0]["classes"]) > 3


@pytest.fixture(scope="module")
def rich(build: Any) -> Any:
    """A small manifest with nearly every key: one spec, two kernel sets, a header."""
    document = manifest_of(build("single launch"))
    document["other_files"] = dict([*document["other_files"].items()][:1])
    first = document["kernel_sets"][0]
    first["kernels"] = first["kernels"][:1]
    assert faults(document) == []
    check_document(document)
    return document


# The wrong values that these rules allow: null in words, a fraction for the number eps, any option.
ALLOWED = {
    ("kernel_sets.*.spec.eps", "1.5"),
    *(("kernel_sets.*.call.eps", v) for v in ("None", "-1", "1.5")),
    ("kernel_sets.*.spec.grad", "None"),
    *(("kernel_sets.*.spec.options.*", v) for v in ("", "-1", "1.5", "True")),
    ("specs.*.images.*.classes.*.otherwise", "None"),
    ("kernel_sets.*.kernels.*.grid.x.limit", "None"),
    ("kernel_sets.*.compile.include", "None"),
    ("kernel_sets.*.resources.*.*.constant", "None"),
    *((f"kernel_sets.*.spec.{key}", v) for key in ("wrt", "of") for v in ("None", "[]")),
    *((f"kernel_sets.*.{key}", "[]") for key in ("spec.inputs", "spec.accumulate")),
}


def test_missing_keys_superfluous_ones_and_values_of_another_class_are_refused(rich: Any) -> None:
    missing, wrong = [*without_keys(rich)], [*with_wrong_values(rich)]
    objects = [p for p, rule in places(rich) if isinstance(at(rich, p), dict) and not is_named(rule)]
    assert (len(missing) > 130, len(wrong) > 800, len(objects) > 15) == (True, True, True)
    assert [rule for rule, document in missing if VALIDATOR.is_valid(document)] == []
    assert [place for place in objects if VALIDATOR.is_valid(changed(rich, (*place, "more"), 1))] == []
    assert {(rule, str(value)) for rule, value, document in wrong if VALIDATOR.is_valid(document)} <= ALLOWED


VALUE = {"tensor": None, "number": "eps"}
ARGUMENTS = [
    ({"name": "eps_", "ctype": "float", "kind": "value", **VALUE}, True),
    ({"name": "eps_", "ctype": "double", "kind": "value", **VALUE}, True),
    ({"name": "eps_", "ctype": "float", "kind": "value", "tensor": None}, False),
    ({"name": "eps_", "ctype": "long long", "kind": "value", **VALUE}, False),
    ({"name": "inner_", "ctype": "long long", "kind": "inner", "tensor": None}, True),
    ({"name": "inner_", "ctype": "long long", "kind": "inner", "tensor": "x"}, False),
    ({"name": "x_outer_", "ctype": "long long", "kind": "outer_stride", "tensor": "x"}, True),
    ({"name": "x_outer_", "ctype": "const bf16*", "kind": "outer_stride", "tensor": "x"}, False),
    ({"name": "x_", "ctype": "const bf16*", "kind": "input", "tensor": "x"}, True),
    ({"name": "x_", "ctype": "const bf16*", "kind": "input", "tensor": None}, False),
    ({"name": "x_", "ctype": "const bf16*", "kind": "input", "tensor": "x", "number": "eps"}, False),
    ({"name": "x_", "ctype": "bf16", "kind": "pointer", "tensor": "x"}, False),
]


def test_an_argument_of_each_kind(rich: Any) -> None:
    document = changed(rich, ("kernel_sets", 0, "tensors", 0, "stride_multiple"), 8)
    for argument, allowed in ARGUMENTS:
        given = changed(document, ("kernel_sets", 0, "kernels", 0, "arguments", 0), argument)
        assert VALIDATOR.is_valid(given) == allowed, argument


def test_whatever_a_manifest_lacks_a_program_says_it_in_a_sentence(build: Any, rich: Any, tmp_path: Path) -> None:
    """A launcher and verify read some manifests that the schema refuses; they end in no other error."""
    for source in build("single launch").glob("*.*"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    refused = []
    for rule, document in [*without_keys(rich), *((rule, d) for rule, _, d in with_wrong_values(rich))]:
        try:
            check_document(document)
        except ValueError as error:
            refused.append(str(error))
            continue
        (tmp_path / FILE_NAME).write_bytes(written(document))
        repr(Pack(tmp_path).check())
        if any(part in rule for part in ("files", "compile", "version")):
            verify(tmp_path)
    assert len(refused) > 500
    assert max(map(len, refused)) < 300


LENGTHS = ("D / 0", "M / 00128", "roundup(M, 99999999999)", "ceil(D)", str(2**63), "-1", "N", "D * 2", "", "stride / 2")


def tampered(document: Any, rng: random.Random) -> Any:
    """A manifest with one value of another kind, a length that there is not, a key less, or another version."""
    how = rng.randrange(4)
    if how == 0:
        return changed(document, ("schema_version",), rng.choice([4, 6, "5", 5.0, 10**30]))
    listed = [(place, rule) for place, rule in places(document) if place]
    lengths = [place for place, rule in listed if rule.endswith(("shape.*", "strides.*"))]
    if how == 1:
        return changed(document, rng.choice(lengths), rng.choice(LENGTHS))
    place, _ = rng.choice(listed)
    if how == 2 and isinstance(place[-1], str):
        return changed(document, place, delete=True)
    return changed(document, place, rng.choice([*WRONG, 2**63, "é" * 300, {}, [[]], -(2**62)]))


def test_a_tampered_description_is_one_sentence(rich: Any) -> None:
    """500 of them, drawn by a seed: each is refused in a sentence, or says nothing that a program reads."""
    rng, refused = random.Random(45), []
    for _ in range(500):
        try:
            check_document(tampered(rich, rng))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 350
    assert max(map(len, refused)) < 300
    assert not [text for text in refused if "\n" in text]


def test_a_changed_digit_is_found(build: Any, tmp_path: Path) -> None:
    """In whatever field: the file has its own hash, and that of each kernel set."""
    folder = build("single launch")
    for source in folder.iterdir():
        if source.is_file():
            (tmp_path / source.name).write_bytes(source.read_bytes())
    raw, rng = (folder / FILE_NAME).read_bytes(), random.Random(45)
    digits = [n for n, byte in enumerate(raw) if byte in b"0123456789"]
    assert Pack(tmp_path).check()
    for place in rng.sample(digits, 300):
        other = rng.choice([d for d in b"0123456789" if d != raw[place]])
        (tmp_path / FILE_NAME).write_bytes(raw[:place] + bytes([other]) + raw[place + 1 :])
        with pytest.raises(LngenError, match=r"is expected to be a pack"):
            Pack(tmp_path).check()
