"""The device headers: if these fail, a kernel includes too little or too much, or a header cannot be read alone."""

import re
from functools import cache
from pathlib import Path

import pytest

import lngen
from lngen.config import data_dir
from lngen.emit import emit
from lngen.errors import CompileError
from lngen.headers import HEADER_OF, PROVIDES, SEARCH, bundled, included, includes, text_of
from lngen.toolchain import compile_ptx
from plans import PLANS, plan_of, plans_of_every_template

TEXTS = {header: text_of(header) for header in PROVIDES}
COMMENT = re.compile(r"//.*")


@cache
def kernels() -> tuple[str, ...]:
    """Kernels that take every template between them, without their headers and comments."""
    return tuple(COMMENT.sub("", emit(plan)) for plan in plans_of_every_template())


def declared(text: str) -> set[str]:
    """The names that a header declares in its namespace: types and functions."""
    code = COMMENT.sub("", text[text.index("namespace lngen {") :])
    types = re.findall(r"^(?:template <[^;{]*?>\s*)?(?:struct|union) (?:alignas\(.*?\) )?(\w+)", code, re.MULTILINE)
    functions = re.findall(r"^(?:\S.*)?__device__ [^;{]*?(\w+)\(", code, re.MULTILINE)
    return {*types, *functions}


def words(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", COMMENT.sub("", code)))


def test_the_table_names_every_header_and_what_it_declares() -> None:
    folder = data_dir("templates") / "include" / "lngen"
    assert sorted(PROVIDES) == sorted(path.stem for path in folder.iterdir())
    assert {header: sorted(declared(text)) for header, text in TEXTS.items()} == {
        header: sorted(names.split()) for header, names in PROVIDES.items()
    }


@pytest.mark.parametrize("header", PROVIDES)
def test_a_header_can_be_read_alone(header: str) -> None:
    """It says what it is for, how it is used, and includes the headers of the names it uses, but no others."""
    text = TEXTS[header]
    assert text.startswith(f"// {header}.cuh: ")
    about = text[: text.index("#ifndef")]
    assert re.search(r"^//     \S", about, re.MULTILINE), "a usage line"
    assert set(re.findall(r"[A-Za-z_]\w*", about)) & {*PROVIDES[header].split()}, "a name of its own in it"
    assert f"#ifndef LNGEN_{header.upper()}_CUH\n#define LNGEN_{header.upper()}_CUH\n" in text
    needed = {HEADER_OF[name] for name in words(text) if name in HEADER_OF} - {header}
    listed = re.findall(r'#include "lngen/(\w+)\.cuh"', text)
    assert listed == sorted(listed)
    reached = {name.removeprefix("lngen/").removesuffix(".cuh") for name in included(text)}
    assert {*listed} <= needed <= reached


@pytest.mark.parametrize("header", PROVIDES)
def test_a_header_compiles_alone(header: str) -> None:
    pytest.importorskip("cupy")
    source = f'#include "lngen/{header}.cuh"\n' * 2 + 'extern "C" __global__ void k() {}\n'
    assert ".entry k" in compile_ptx(source, "sm_90", name=f"{header}.cu")


def test_every_name_of_the_headers_is_used() -> None:
    """By a kernel, by the text of an op, by another header or in its own."""
    ops = (path.read_text(encoding="utf-8") for path in (Path(lngen.__file__).parent / "ir").glob("*.py"))
    used = set[str]().union(*map(words, (*kernels(), *ops)))
    for header, text in TEXTS.items():
        for name in PROVIDES[header].split():
            elsewhere = set[str]().union(*(words(t) for other, t in TEXTS.items() if other != header))
            assert name in used | elsewhere or len(re.findall(rf"\b{name}\b", COMMENT.sub("", text))) > 1, name


def test_a_kernel_includes_the_headers_whose_names_it_uses() -> None:
    for text in kernels():
        body = text[text.index("namespace lngen {") :]
        assert includes(body) in text
        assert {HEADER_OF[name] for name in words(body) if name in HEADER_OF} == {
            *re.findall(r'#include "lngen/(\w+)\.cuh"', text)
        }
    assert includes("pdl_wait();  // tma_load\n") == '#include "lngen/launch.cuh"'
    assert includes("int a;") == ""


def test_a_bundle_stands_alone_and_compiles_to_the_same() -> None:
    pytest.importorskip("cupy")
    text = emit(plan_of(*PLANS["row"]))
    bundle = bundled(text)
    assert "#include" in text
    assert "#include" not in bundle
    assert bundled(bundle) == bundle
    assert SEARCH in text.split("\n\n")[0]  # and a bundle needs no -I
    assert SEARCH not in bundle
    assert bundle.endswith(text[text.index("namespace lngen {") :])
    one, other = (compile_ptx(t, "sm_90", name="k.cu") for t in (text, bundle))
    assert one == other
    assert compile_ptx(bundle + bundled(emit(plan_of(*PLANS["columns"]))), "sm_90", name="two.cu").count(".entry") > 1


def test_an_error_in_a_header_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    broken = TEXTS["launch"].replace("inline", "inlin", 1)
    monkeypatch.setattr("lngen.headers.text_of", lambda header: broken if header == "launch" else TEXTS[header])
    line = broken[: broken.index("__forceinlin__")].count("\n") + 1
    with pytest.raises(CompileError) as error:
        compile_ptx(emit(plan_of(*PLANS["row"])), "sm_90", name="row.cu")
    assert f"lngen/launch.cuh({line}): error" in str(error.value)
    assert "lngen/launch.cuh:\n" in str(error.value)
    assert f"> {line} | __device__ __forceinlin__ void pdl_wait() {{" in str(error.value)
