"""If these fail, some request, graph text or .npy file ends in a traceback and not in a sentence."""

import io
import math
import os
import warnings
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen
from commands import call
from fuzz import fuzzed
from lngen.cli import COMMANDS, cli
from lngen.cli.run_files import read_npy
from lngen.compiler import ir
from lngen.compiler.devices import capability
from lngen.compiler.problem import ANY, parse_schedule
from lngen.compiler.spec import parse_spec
from lngen.errors import LngenError, MissingError, ScheduleError, SpecError
from lngen.user_input import LARGEST, decimal, whole

# ---- requests ----


FULL = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"
SPECS = (
    "rmsnorm.fwd:d=8", "layernorm.bwd:d=64,dtype=bf16", "layernorm.fwd:d=7,eps=0", "rmsnorm.bwd:d=8,wrt=x,save=none",
)  # fmt: skip
SCHEDULES = (
    FULL, f"{FULL},vec=1", "threads=32", "form=tma,threads=64,rows_per_block=1,vec=8,stages=2", "form=multipass",
    "vec=3",
)  # fmt: skip
NUMBERS = (
    "0", "1", "3", "²", "\uff14", "-1", "1e3", "nan", "inf", "1_0", "9" * 20, "9" * 400, "9" * 5000, "", "2147483647",
)  # fmt: skip
FOLDER, FIFO, LONG = "folder", "fifo", "a" * 300
NESTED = "[" * 100_000
FILES = {
    "empty": b"",
    "text": b"text\n",
    "nested.json": NESTED.encode(),
    "nested.toml": b"a = " + NESTED.encode(),
    "null.json": b"null",
    "records.json": b'{"records": [{"spec": 1}], "conditions": []}',
    "lock.toml": b'version = 1\n["H200"]\narch = "sm_90"\n["H200"."rmsnorm.fwd:d=8,dtype=f32"]\n4096 = "threads=1"\n',
    "t.jsonl": b'{"spec": []}\n{}\n[]\n{torn\n\xff\n',
    "x.npy": b"\x93NUMPY\x01\x00",
}
WORDS = (
    "graph", "all", "sm_²", "sm_" + "9" * 400, "cu", "auto", "f16", "layernorm", "fwd", "x", "-", "8x32", "60s",
    "os:getcwd",
)  # fmt: skip
# What an option takes, as a rule.
PLAUSIBLE: dict[str, tuple[str, ...]] = {
    "--stage": ("graph", "plan", "cuda", "ptx", "resources", "traffic"),
    "--after": ("all", "vjp", "build", "order_sums"),
    "--schedule": SCHEDULES,
    "--diff": SCHEDULES,
    "--rows": ("1", "0,1,3", "4096", "2147483647"),
    "--arch": ("sm_80", "sm_90", "sm_80,sm_90", "hopper", "sm_75"),
    "--emit": ("cu", "ptx", "cu,ptx,cubin", "cu,cu"),
    "--out": ("new", FOLDER, "y=y.npy", "y=y.npy,rstd=r.npy", "new/deeper/file"),
    "--in": ("x=x.npy,gamma=x.npy", "x=good.npy,gamma=gamma.npy"),
    "--lock": ("lock.toml", "nested.toml", "new.toml"),
    "--database": ("t.jsonl", "nested.json", "new.jsonl"),
    "--merge": ("t.jsonl", "nested.json"),
    "--from": ("records.json", "nested.json", "null.json"),
    "--callable": ("os:getcwd", "torch-layernorm", "no:such", "math:sqrt", "numpy:add"),
    "--backward": ("os:getcwd", "math:pi"),
    "--cases": ("ordinary", "ulps,ordinary", "d-31"),
    "--export": ("t4 x.json", "kernel-tuner x.json", "csv x.json"),
    "--plot": ("a.png", "a.svg", "a.pdf"),
    "--dask": ("tcp://127.0.0.1:1",),
    "--eps": ("1e-5", "0.5"),
    "--budget": ("20s", "2m", "480"),
    "--dir": (FOLDER, "new"),
    "--shapes": ("8x32", "8x32,9x"),
    "--d": ("64", "64,128"),
    "--graph": ("layernorm,rmsnorm", "layernorm"),
    "--direction": ("fwd,bwd", "both"),
    "--providers": ("torch", "lngen-overlapped,liger"),
}
junk = st.binary(max_size=12).filter(lambda b: b"\0" not in b and b"/" not in b).map(os.fsdecode)
edited_spec = st.tuples(st.sampled_from(SPECS), st.integers(0, 40), st.sampled_from(NUMBERS) | junk).map(
    lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :]
)
pair = st.tuples(
    st.sampled_from(("x", "gamma", "y", "rstd", "threads", "d", "vec")), st.sampled_from((*FILES, *NUMBERS))
)
value = st.one_of(
    st.sampled_from((*SPECS, *SCHEDULES, *NUMBERS, *WORDS, *FILES, FOLDER, FIFO, LONG)),
    edited_spec,
    pair.map("=".join),
    junk,
)


def options_of(name: str) -> list[click.Option]:
    command = cli.get_command(click.Context(cli), name)
    if isinstance(command, click.Group):
        command = command.get_command(click.Context(cli), "list")
    return [p for p in command.params if isinstance(p, click.Option)]


# How many a command takes.
SPECS_OF = {"show": 1, "repro": 1, "build": 2, "check": 2, "run": 1, "conform": 1, "tune": 2}


@st.composite
def request_of(draw: Any) -> list[str]:
    """A command with options of its own, most with what they take, and specs, most of them right."""
    name = draw(st.sampled_from([*COMMANDS]))
    found = [name, *["list"] * (name == "pack")]
    for option in draw(st.lists(st.sampled_from(options_of(name)), max_size=5)):
        found.append(option.opts[0])
        if not option.is_flag:
            choices = option.type.choices if isinstance(option.type, click.Choice) else ("1", *FILES)
            plausible = PLAUSIBLE.get(option.opts[0], tuple(map(str, choices)))
            taken = draw(st.sampled_from(plausible) if draw(st.integers(0, 3)) else value)
            found += taken.split(" ", 1) if option.nargs == 2 else [taken]
    if name in SPECS_OF:
        odd = draw(st.integers(0, 5)) == 0
        specs = edited_spec | value if odd else st.sampled_from(SPECS)
        found += draw(st.lists(specs, min_size=0 if odd else 1, max_size=SPECS_OF[name]))
    return found


words = st.lists(st.sampled_from((*COMMANDS, *PLAUSIBLE)) | value, max_size=6)
request = st.one_of(request_of(), request_of(), request_of(), words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of odd files, on a machine without GPU and compiler, on which nothing takes long."""

    def missing(*_: object, **__: object) -> None:
        raise MissingError("there is none here.")

    monkeypatch.chdir(tmp_path)
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "good.npy", np.ones((2, 8), np.float32))
    np.save(tmp_path / "gamma.npy", np.ones(8, np.float32))
    (tmp_path / FOLDER).mkdir()
    os.mkfifo(tmp_path / FIFO)
    for name in ("compile_cubin", "compile_ptx"):
        monkeypatch.setattr(import_module("lngen.compiler.compile"), name, missing)
    monkeypatch.setattr("lngen.cli.shared_options.import_module", missing)
    for name in ("check.matrix.conditions", "bench.torch_gpu.find_gpu", "aot.build.compile_ptx"):
        monkeypatch.setattr(f"lngen.{name}", missing, raising=False)
    for name in ("runtime.launcher", "cli.run_files", "bench.torch_gpu"):
        monkeypatch.setattr(f"lngen.{name}.device_count", lambda: 0)
    for name in ("job", "tuner"):
        monkeypatch.setattr(f"lngen.lab.tune.{name}.visible_devices", lambda: ())
    monkeypatch.setattr("lngen.cli.generation.differences", lambda folder: {})
    monkeypatch.setattr("lngen.cli.generation.rewrite", lambda folder: None)
    monkeypatch.setattr("lngen.cli.verification.check_spec", lambda spec, **_: [])
    return tmp_path


@fuzzed
@given(request)
def test_no_request_ends_in_anything_but_a_sentence(folder: Path, request: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = call(*request)
    assert done.exit_code in (0, 1, 2, 3), (request, done.output)
    assert done.exception is None or isinstance(done.exception, SystemExit), request
    assert (done.exit_code == 0) or done.stderr or done.stdout
    assert "Traceback" not in done.stderr


# ---- graph texts ----


GRAPHS = tuple(str(parse_spec(text).graph()) for text in SPECS)
TOKENS = (
    "graph", "@", "%", "x", "->", "(", ")", "{", "}", "[", "]", ":", ",", "=", "f32", "bf16", "M", "D", "M, D", "axis",
    "reduce_sum", "reduce_mean", "mul", "const", "cast", "return", "to", "value", "1e400", "-", "--", "²", "9" * 5000,
    "nan", "inf", "1_0", "\n", "\r", "\t", " ", "\0", "\ud800", "//", "chunk", "groups", "[[[[", "((((", "None", "True",
)  # fmt: skip


@st.composite
def graph_text(draw: Any) -> str:
    """A graph with pieces cut out, put elsewhere, and replaced by tokens; or tokens alone."""
    text = draw(st.sampled_from(GRAPHS) | st.just(""))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from((0, 0, 1, 1, 3, 10, 50))))
        place = draw(st.integers(0, len(text)))
        token = draw(st.sampled_from(TOKENS) | st.just(text[place : place + draw(st.integers(0, 40))]))
        text = text[:start] + token + text[end:]
    return str(text)


@fuzzed
@given(graph_text() | st.text(max_size=60) | st.lists(st.sampled_from(TOKENS), max_size=40).map(" ".join))
def test_a_graph_text_is_a_graph_or_a_sentence(text: str) -> None:
    try:
        graph = ir.parse(text)
    except LngenError:
        return
    assert str(ir.parse(str(graph))) == str(graph)


# ---- .npy files ----


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


WHOLE = (
    npy(np.ones((2, 8), np.float32)), npy(np.asfortranarray(np.ones((3, 8), np.float32))), npy(np.zeros((0, 8))),
    npy(np.float32(1)),
)  # fmt: skip


def header_text(descr: str, order: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


HEADERS = (
    "(" * 3000, "{" * 3000, "-" * 3000, "1" + "0" * 4000, "'", "\ud800", "\n\n  x\n y", "  {'descr': '<f4'}", "{[]: 1}",
    "{'a': f'{x}'}", "b'\\xff'", "1(2)",
    *(header_text("'<f4'", "False", shape) for shape in (
        "(1000000000000,)", "(-1, 8)", "(2, True)", "(0, 10000000000000000000000)", "[2, 8]", "(" * 90,
        "(" + "1," * 60 + ")",
    )),
    *(header_text(descr, "False", "(1,)") for descr in (
        "'O'", "'|O'", "[('a', '<f4')]", "'<f3'", "'V0'", "'M8[7Y]'", "'\\d'", "'f4,f4'", "None", "'S4'", "{}",
    )),
    header_text("'<f4'", "0", "(2, 8)"),
)  # fmt: skip


def with_header(text: str, version: int, data: bytes) -> bytes:
    header = text.encode("utf-8", "surrogatepass")
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 if version == 1 else 4, "little") + header + data


@pytest.mark.parametrize("version", [1, 2, 3])
def test_npy_files_of_every_version_are_read(version: int, tmp_path: Path) -> None:
    array = np.arange(16, dtype=np.float32).reshape(2, 8)
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 8), }\n"
    (tmp_path / "x.npy").write_bytes(with_header(text, version, array.tobytes()))
    np.testing.assert_array_equal(read_npy(tmp_path / "x.npy"), array)


@st.composite
def damaged(draw: Any) -> bytes:
    """A file with bytes cut out, changed and put in."""
    data = draw(st.sampled_from(WHOLE))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, min(len(data), 140)))
        data = data[:start] + draw(st.binary(max_size=6)) + data[start + draw(st.sampled_from((0, 1, 1, 2, 9, 200))) :]
    return bytes(data)


header = st.builds(
    with_header,
    st.sampled_from(HEADERS) | st.text("(){}[]'\",:-0123456789 \n\\descrfotanhpu<|=TFalse", max_size=80),
    st.integers(0, 4),
    st.binary(max_size=64),
)


@fuzzed
@given(damaged() | header | st.binary(max_size=200))
def test_a_npy_file_is_an_array_or_a_sentence(folder: Path, data: bytes) -> None:
    path = folder / "fuzzed.npy"
    path.write_bytes(data)
    try:
        array = read_npy(path)
    except ValueError:
        pass
    else:
        assert array.nbytes <= len(data)
    args = ("--in", f"x={path},gamma={folder}/gamma.npy", "--out", f"y={folder}/y.npy", "--on", "interpreter")
    (folder / "gamma.npy").write_bytes(npy(np.ones(8, np.float32)))
    done = call("run", "rmsnorm.fwd:d=8", *args)
    assert done.exit_code in (0, 2), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_headers_that_are_none(tmp_path: Path) -> None:
    """TokenError, MemoryError, TypeError, IndentationError, RecursionError: each is one sentence."""
    path = tmp_path / "bad.npy"
    for text, version in product(HEADERS, (1, 2, 3)):
        path.write_bytes(with_header(text, version, b"\0" * 100))
        with pytest.raises(ValueError, match=r"header|elements|shape|fortran_order"):
            read_npy(path)


# ---- numbers ----

# What int() or float() would take, or stumble over.
WRONG = ("", "²", "\uff14", "٣", "1_0", " 1", "1 ", "+1", "-1", "0x1", "9" * 400, "9" * 5000, "1" + "0" * 32, "\udc80")


def test_what_is_a_number_and_what_is_none() -> None:
    for text in (*WRONG, "1.0", "1e3"):
        assert whole(text) is None
        with pytest.raises(SpecError, match="'d' is expected to be a whole number from 1 to 1073741824, got"):
            parse_spec(f"layernorm.fwd:d={text}")
        with pytest.raises(ScheduleError, match="'threads' is expected to be a whole number, got"):
            parse_schedule(f"threads={text}", ANY)
    for text in (*WRONG, "nan", "inf", "1e-5²", "1,0", ".", "1e", "1e400", "2"):
        assert decimal(text, 0, 1) is None
        with pytest.raises(SpecError):
            parse_spec(f"layernorm.fwd:d=8,eps={text}")
    for value in (math.inf, math.nan, 8.0, True, None, "8.0", 2**31):
        assert whole(value) is None
        with pytest.raises(SpecError, match="'d' is expected to be a whole number"):
            lngen.compile("layernorm", d=value)  # type: ignore[arg-type]
    for arch in ("", "sm_", "sm_²", "sm_\uff190", "90", "hopper", "sm_" + "9" * 400):
        assert capability(arch) == 0
    assert whole("007") == whole(7) == whole(np.int64(7)) == 7
    assert whole(str(LARGEST)) == LARGEST
    assert (whole("3", 4), whole("5", 4, 4), whole("4", 4, 4)) == (None, None, 4)
    assert decimal("1e-5") == decimal("0.00001") == decimal(".1E-4") == decimal(np.float64(1e-5)) == 1e-5
    assert str(decimal(-0.0)) == "0.0"


@fuzzed
@given(st.text() | st.from_regex(r"[-+]?[0-9]{0,40}[._e]?[0-9]*", fullmatch=True))
def test_what_is_read_is_what_was_written(text: str) -> None:
    number, other = whole(text), decimal(text)
    assert number is None or (text.isascii() and text.lstrip("0") == str(number or ""))
    assert other is None or other == float(text)
