"""If these fail, the C library of a pack does not compile, has a wrong dispatch or colliding names, or is lost."""

import ctypes
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import lngen
from c_driver import linked, no_op
from c_library import CLibrary
from c_packs import CALLS, OTHERS, TABLES
from c_wrong import calls
from launchers import groups
from lngen.compiler.compile import Compilation
from lngen.compiler.contract import described
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.errors import LngenError
from lngen.launch.pack import Pack, class_for, image_for, lacking
from lngen.packs import manifest
from lngen.packs.c_library import SOURCE, Wanted, group_names
from lngen.packs.manifest import Facts, Manifest
from lngen.packs.verify import verify
from packs import kernel_set

STRICT = ("gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-DLNGEN_TESTING")
PLAIN = "form=registers,threads=1,rows_per_block=128,vec=1"

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


# ---- made-up packs: described as a build describes them, with files that no driver would take ----


def kernels(spec: str | Spec, name: str, *ends: str, schedule: str = PLAIN) -> Facts:
    """A kernel set with a file for each end of a name."""
    own = Compilation(parse_spec(spec) if isinstance(spec, str) else spec).changed(schedule, "sm_90").plan
    files = {f"{name}.{end}": f"{name}.{end}".encode() for end in ends}
    return {**kernel_set(name, files), **described(own), "name": name}


def pack_of(specs: Iterable[str | Spec], schedule: str = PLAIN) -> Manifest:
    """A pack with one kernel set for each spec."""
    made = Manifest()
    for n, spec in enumerate(specs):
        name = f"set_{n}"
        made.kernel_sets[name] = kernels(spec, name, "sm_90.cubin", schedule=schedule)
        entry = {"most_bytes": 1024, "kernel_set": name, "file": f"{name}.sm_90.cubin", "otherwise": None}
        images = [{"arch": "sm_90", "kind": "cubin", "classes": [entry]}]
        made.specs[str(spec)] = {"row_bytes": 32, "images": images}
    return made


def written(pack: Manifest, folder: Path, wanted: Wanted) -> Path:
    for name, data in wanted(pack, str.encode).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / "c"


def run(*words: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, env=env or None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shared_library(folder: Path, *options: str) -> Any:
    run(*STRICT, *options, "-fPIC", "-shared", "-o", "k.so", "lngen_kernels.c", cwd=folder)
    return ctypes.CDLL(str(folder / "k.so"))


# ---- the text ----


def awkward(b: GraphBuilder) -> None:
    """Tensors whose names are keywords, fields of every struct, or the stride of another one."""
    x, other, gamma = b.input("x", M, D), b.input("x_stride", M, D), b.input("int", D)
    b.output("rows", b.named("class", x + other) * gamma)
    b.output("operator", x - other)


SPECS: tuple[str | Spec, ...] = (
    "rmsnorm.fwd:d=8,dtype=bf16",
    "rmsnorm.fwd:d=8,dtype=f32",
    "rmsnorm.fwd:d=16,dtype=f32",
    "rmsnorm.fwd:d=8,dtype=f64,eps=run,strides=2",
    "add_rmsnorm.bwd:d=8,dtype=f32,wrt=x+residual,accumulate=x",
    "l2norm.fwd:d=8,dtype=f32,guard=max,eps=run",
    make_spec(Definition("awkward", awkward), "fwd", {"d": 8, "dtype": "f32"}),
    "rope.fwd:d=8,dtype=f32,head=4,rotate=pairs,positions=i32",
)


@pytest.mark.parametrize("embed", [False, True])
def test_it_compiles_without_a_word(embed: bool, tmp_path: Path) -> None:
    folder = written(pack_of(SPECS), tmp_path, Wanted(embed=embed))
    run(*STRICT, "-fsyntax-only", "lngen_kernels.c", cwd=folder)
    run(*STRICT, "-O0", "-c", "-DLNGEN_TRUST_POINTERS", '-DLNGEN_PACK_DIR="p"', "lngen_kernels.c", cwd=folder)
    Path(folder / "a.cpp").write_text(
        '#include "lngen_kernels.hpp"\ntemplate class lngen::RopeForwardHead4RotatePairsPositionsI32<float>;\n'
        "int main() { return lngen_load(0); }\n"
    )
    run("g++", "-std=c++17", *STRICT[2:], "-fsyntax-only", "a.cpp", cwd=folder)
    Path(folder / "a.c").write_text('#include "lngen_kernels.h"\nint main(void) { return lngen_load(0); }\n')
    run(*STRICT, "-fsyntax-only", "a.c", cwd=folder)


def test_embedded_images_are_the_bytes_of_the_files_and_a_nul() -> None:
    pack = pack_of(SPECS[:2])
    images = {
        file: bytes(range(255, 235 - n, -1)) for n, s in enumerate(pack.kernel_sets.values()) for file in s["files"]
    }
    text = Wanted(embed=True)(pack, images.__getitem__)[SOURCE].decode()
    found = re.findall(r"uint64_t image_\d+\[\] = \{(.*?)\};", text, re.DOTALL)
    held = [b"".join(int(n, 16).to_bytes(8, "little") for n in re.findall(r"0x\w+", one)) for one in found]
    assert [len(one) for one in held] == [24, 24]
    assert [one.rstrip(b"\0") for one in held] == [*images.values()]


def test_fields_are_the_tensors_of_every_spec_and_never_collide() -> None:
    text = Wanted()(pack_of(SPECS), str.encode)["c/lngen_kernels.h"].decode()
    structs = {name: body for body, name in re.findall(r"typedef struct \w+ \{\n(.*?)\} (\w+)_args;", text, re.DOTALL)}
    fields = {name: re.findall(r"\b(\w+);", re.sub(r"/\*.*?\*/", "", body)) for name, body in structs.items()}
    head, end = ["d", "dtype", "rows"], ["workspace", "workspace_bytes"]
    plain = ["x", "x_stride", "gamma", "y", "y_stride", "rstd"]
    assert fields["lngen_rmsnorm_forward"] == [*head, *plain, *end]
    two = ["x", "x_stride", "x_outer_stride", "gamma", "y", "y_stride", "y_outer_stride", "rstd"]
    assert fields["lngen_rmsnorm_forward_eps_run_strides_2"] == [*head, "eps", "inner", *two, *end]
    assert fields["lngen_l2norm_forward_guard_max_eps_run"][3] == "eps"
    tables = ["table_rows", "x", "x_stride", "cos", "cos_stride", "sin", "sin_stride", "positions", "y", "y_stride"]
    assert fields["lngen_rope_forward_head_4_rotate_pairs_positions_i32"] == [*head, *tables, *end]
    (own,) = (found for name, found in fields.items() if "awkward" in name)
    wide = ["x", "x_stride_", "x_stride", "x_stride_stride", "int_", "rows_", "rows__stride"]
    assert own[3:-2] == [*wide, "operator_", "operator__stride"]
    assert all(len({*found}) == len(found) for found in fields.values())


def test_names_of_groups_differ_even_where_their_words_do_not() -> None:
    keys = ["g.fwd:", "g.fwd:args=yes", "g.fwd:a_b=yes", "g.fwd:a=b", "g.bwd:wrt=x+y", "g@1a.bwd:gamma=no"]
    names = group_names(keys)
    assert names["g.bwd:wrt=x+y"] == "lngen_g_backward_wrt_x_y"
    assert names["g@1a.bwd:gamma=no"] == "lngen_g_1a_backward_no_gamma"
    ends = ("", "_args", "_workspace_bytes", "_init_workspace")
    declared = [name + end for name in names.values() for end in ends]
    assert len({*declared}) == len(declared) == 4 * len(keys)


def test_every_status_has_a_sentence_of_its_own(tmp_path: Path) -> None:
    folder = written(pack_of(SPECS[:1]), tmp_path, Wanted())
    library = shared_library(folder)
    library.lngen_status_text.restype = ctypes.c_char_p
    count = len(re.findall(r"^    LNGEN_\w+\b", (folder / "lngen_kernels.h").read_text(), re.MULTILINE))
    texts = [library.lngen_status_text(n).decode() for n in range(count)]
    assert len({*texts}) == count > 15
    assert all(text.endswith(".") for text in texts)
    assert "not a status" in library.lngen_status_text(count).decode()


# ---- dispatch ----

ARCHES = ("sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103f", "sm_103", "sm_120", "sm_120f")
KINDS = ("cubin", "ptx", "source")


def shuffled(seed: int, specs: int) -> Manifest:
    """A pack whose specs have images of all kinds and archs in any order, with kernel sets of any demands."""
    chance, made = random.Random(seed), Manifest()
    base = kernels(SPECS[0], "set", *(f"{a}.{k}" for a in ARCHES for k in ("cubin", "ptx")))
    for n in range(60):
        name = f"set_{n}"
        kernel = {**base["kernels"][0], "cluster": chance.choice((1, 8, 16))}
        kernel["dynamic_shared_bytes"] = chance.choice((0, 40_000, 90_000, 160_000, 220_000))
        facts = {"shared": chance.choice((16, 12_000, 48_000)), "launch_shared_bytes": 0}
        resources = {a: {kernel["name"]: facts} for a in chance.sample(ARCHES, 6)}
        files = {file.replace("set.", f"{name}."): facts for file, facts in base["files"].items()}
        made.kernel_sets[name] = {**base, "name": name, "kernels": [kernel], "resources": resources, "files": files}
    for n in range(specs):
        images = chance.sample([(a, k) for a in ARCHES for k in KINDS], chance.randint(1, 9))
        listed = [{"arch": a, "kind": k, "classes": classes_of(a, k, chance)} for a, k in images]
        made.specs[f"rmsnorm.fwd:d=8,dtype=bf16,blocks={n}"] = {
            "row_bytes": chance.choice((1, 24, 4096)),
            "images": listed,
        }
    return made


def classes_of(arch: str, kind: str, chance: random.Random) -> list[Facts]:
    def taken() -> Facts:
        name = f"set_{chance.randrange(60)}"
        return {"kernel_set": name, "file": f"{name}.{arch}.{'ptx' if kind == 'source' else kind}"}

    mosts = sorted(chance.sample((1, 7, 64, 1024, 8192, 2**20), chance.randint(1, 4)))
    return [{"most_bytes": m, **taken(), "otherwise": chance.choice((None, taken()))} for m in mosts]


def expected(pack: Manifest, text: str, capability: int, multiprocessors: int, shared: int, rows: int) -> str | None:
    """The file that Python's launcher takes."""
    facts, here = pack.specs[text], divmod(capability, 10)
    image = image_for(facts["images"], here)
    if image is None:
        return None
    found: Mapping[str, Any] = class_for(image["classes"], rows, facts["row_bytes"], multiprocessors)
    fitting = (
        str(c["file"])
        for c in filter(None, (found, found["otherwise"]))
        if not lacking(pack.kernel_sets[c["kernel_set"]], image["arch"], here, shared)
    )
    return next(fitting, None)


def test_dispatch_is_that_of_python_on_every_gpu_and_number_of_rows(tmp_path: Path) -> None:
    pack = shuffled(seed=32, specs=40)
    library = shared_library(written(pack, tmp_path, Wanted()))
    ask = library.lngen_testing_dispatch
    ask.restype, ask.argtypes = ctypes.c_char_p, [ctypes.c_char_p, *[ctypes.c_int] * 3, ctypes.c_longlong]
    answers = set[str | None]()
    gpus = [(c, m, s) for c in (75, 80, 86, 89, 90, 100, 103, 110, 120, 121) for m, s in ((1, 101_376), (132, 232_448))]
    for text, facts in pack.specs.items():
        ends = {c["most_bytes"] for i in facts["images"] for c in i["classes"]}
        for capability, multiprocessors, shared in gpus:
            edges = {most * multiprocessors // facts["row_bytes"] for most in ends}
            for rows in sorted({0, 1, 2**40, *edges, *(e + 1 for e in edges)}):
                given = capability, multiprocessors, shared, rows
                found, wanted = ask(text.encode(), *given), expected(pack, text, *given)
                assert (found and found.decode()) == wanted, (text, given)
                answers.add(wanted)
    assert len(answers) > 100
    assert None in answers


# ---- in a folder ----


def put(folder: Path, pack: Manifest, wanted: Wanted) -> None:
    names = [name for entry in pack.kernel_sets.values() for name in entry["files"]]
    manifest.put(folder, pack, {name: name.encode() for name in names}, wanted)


@pytest.mark.parametrize("embed", [False, True])
def test_a_folder_in_two_steps_has_the_library_of_the_whole(embed: bool, tmp_path: Path) -> None:
    whole = pack_of(SPECS)
    halves = [
        Manifest({t: f for t, f in whole.specs.items() if f["images"][0]["classes"][0]["kernel_set"] in names},
                 {n: whole.kernel_sets[n] for n in names})
        for names in (sorted(whole.kernel_sets)[3:], sorted(whole.kernel_sets)[:3])
    ]  # fmt: skip
    wanted = Wanted(cmake=True, embed=embed)
    put(tmp_path / "at once", whole, wanted)
    for half in halves:
        put(tmp_path / "in steps", half, wanted)
    for name in wanted.names:
        assert (tmp_path / "at once" / name).read_bytes() == (tmp_path / "in steps" / name).read_bytes(), name
    listed = manifest.read(tmp_path / "in steps").files()
    assert {*wanted.names} <= {*listed}
    assert verify(tmp_path / "in steps").ok
    (tmp_path / "in steps" / SOURCE).write_bytes(b"int x;\n")
    assert SOURCE in verify(tmp_path / "in steps").faults[0]
    with pytest.raises(LngenError, match="the folder has a C library, which would lack what this build adds"):
        lngen.build(["rmsnorm.fwd:d=8,dtype=f32"], tmp_path / "at once", emit="cubin")


# ---- CMake and pkg-config ----

CONSUMER = """cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES C)
find_package(lngen-pack REQUIRED)
add_executable(consumer main.c)
target_link_libraries(consumer lngen::kernels)
"""
MAIN = """#include <lngen_kernels.h>
#include <stdio.h>
int main(void)
{
    lngen_rmsnorm_forward_args args = {.d = 8, .dtype = LNGEN_F32};
    puts(lngen_status_text(lngen_rmsnorm_forward(&args, 0, NULL)));
    return lngen_supported("rmsnorm", 8, LNGEN_F32, 99);
}
"""


PARENT = """cmake_minimum_required(VERSION 3.16)
project(parent LANGUAGES C)
add_subdirectory(c)
"""


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("pkg-config")), reason="needs cmake and pkg-config")
@pytest.mark.parametrize("source", [".", "c"])
def test_an_installed_pack_is_found_by_cmake_and_pkg_config(source: str, tmp_path: Path) -> None:
    """Of a parent that names no build type, or by itself; where it is installed is said last."""
    written(pack_of(SPECS), tmp_path, Wanted(cmake=True))
    consumer, prefix = tmp_path / "main", tmp_path / "to"
    (tmp_path / "CMakeLists.txt").write_text(PARENT)
    run("cmake", "-S", source, "-B", "b", "--log-level=ERROR", cwd=tmp_path)
    run("cmake", "--build", "b", cwd=tmp_path)
    run("cmake", "--install", "b", "--prefix", prefix, cwd=tmp_path)
    consumer.mkdir()
    (consumer / "CMakeLists.txt").write_text(CONSUMER)
    (consumer / "main.c").write_text(MAIN)
    run("cmake", "-S", ".", "-B", "b", f"-DCMAKE_PREFIX_PATH={prefix}", "--log-level=ERROR", cwd=consumer)
    run("cmake", "--build", "b", cwd=consumer)
    (found,) = prefix.rglob("lngen-pack.pc")
    flags = run("pkg-config", "--static", "--cflags", "--libs", found, cwd=consumer).split()
    run("gcc", "main.c", *flags, "-o", "by-pkg-config", cwd=consumer)
    for program in ("b/consumer", "./by-pkg-config"):
        assert run(consumer / program, cwd=consumer).startswith("Kernels are launched before they are loaded")


# ---- the page ----


def test_the_program_of_the_page_compiles_and_says_what_is_missing(tmp_path: Path) -> None:
    """``lngen help c``, with the library of the specs that its command builds."""
    page = (Path(lngen.__file__).parent / "docs" / "c.md").read_text(encoding="utf-8")
    specs = re.findall(r"\w+\.(?:fwd|bwd):\S+", page.partition("--emit")[0])
    folder = written(pack_of(spec.replace("d=4096", "d=8") for spec in specs), tmp_path, Wanted())
    (program,) = re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / "main.c").write_text(program)
    driver = '-DLNGEN_CUDA_LIBRARY="no-driver.so"'
    run(*STRICT, driver, "main.c", "lngen_kernels.c", "-o", "main", "-ldl", "-pthread", cwd=folder)
    done = subprocess.run([folder / "main"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.match(r"libcuda\.so\.1 cannot be opened .*\(no-driver\.so: .*\)$", done.stderr)


# ---- under sanitizers ----

TRIED = (*(CALLS[name].spec for name in ("forward", "one launch", "heads", "eps")), OTHERS[1], TABLES)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_all_calls_are_clean(folder: Path, library: Path, tmp_path: Path, sanitizers: str) -> None:
    """Every call of the driver fails once; threads load and launch at the same time."""
    known, pack = CLibrary(library, folder), Pack(folder)
    named = groups(folder)
    tried = {
        named[spec]: (known.structs[named[spec]], pack.described(spec)) for spec in map(str, map(parse_spec, TRIED))
    }
    (tmp_path / "calls.c").write_text(calls(tried, known.dtypes), encoding="utf-8")
    tampered = shutil.copytree(folder, tmp_path / "tampered")
    for path in tampered.glob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    sanitized = f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"
    flags = f'-DTAMPERED="{tampered}"', f"-I{tmp_path}", "-g", "-O1", *sanitized
    source = Path(__file__).with_name("sanitized.c")
    program, where = linked(tmp_path / "program", source, folder, no_op(tmp_path), *flags)
    done = subprocess.run([program], env=where, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
