"""If these fail, the process ends with a wrong exit code, writes to a wrong stream, or imports foreign modules."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from commands import call
from lngen.cli.failures import INTERRUPTED, UNHANDLED, UNREAD
from lngen.errors import ArrayError, LngenError
from paths import ROOT

FWD = "layernorm.fwd:d=64,dtype=f32"
SCRIPT = "-c", "from lngen.__main__ import main; main()"  # what an installed script does
MODULE = "-m", "lngen"


def run(
    *args: str,
    how: tuple[str, ...] = MODULE,
    shell: str = "",
    cwd: Path = ROOT,
    stdout: int = subprocess.PIPE,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """``lngen args`` in a process of its own; ``shell``: redirections that follow it."""
    command = [sys.executable, *how, *args]
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" "$@" {shell}', *command] if shell else command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )


# ---- streams ----


@pytest.mark.parametrize(("args", "where"), [
    (("list",), ">/dev/full"), (("list", "--json"), ">&- <&-"), (("--help",), ">&-"),
])  # fmt: skip
def test_output_that_cannot_be_written_is_a_sentence(args: tuple[str, ...], where: str) -> None:
    done = run(*args, shell=where)
    why = "No space left on device" if "full" in where else "Bad file descriptor"
    wanted = f"error: standard output cannot be written to: {why}; redirect it to another place.\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_a_file_needs_no_standard_output(tmp_path: Path) -> None:
    done = run("show", FWD, "--stage", "graph", "--out", str(tmp_path / "g"), shell=">&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "g").read_text().startswith("graph @layernorm_fwd")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What a command opens would be its standard output otherwise."""
    code = "import os; from lngen.cli.failures import open_streams; open_streams(); print(os.open('f', os.O_CREAT))"
    done = run(how=("-c", code), shell="<&- >&- 2>&-; test -e f && ls -l /dev/null >/dev/null", cwd=tmp_path)
    assert done.returncode == 0
    done = run(how=("-c", code.replace("print(", "os._exit(")), shell="<&- >&- 2>&-", cwd=tmp_path)
    assert done.returncode == 3  # the first number that no stream has


@pytest.mark.parametrize(("line", "where"), [("shwo", "2>/dev/full"), ("show layernrom.fwd:d=8", "2>&-")])
def test_messages_that_cannot_be_written_change_no_exit_code(line: str, where: str) -> None:
    assert run(*line.split(), shell=where).returncode == 2


@pytest.mark.parametrize("args", [("show", "layernorm.bwd:d=4096", "--stage", "graph", "--after", "all"), ("--help",)])
def test_output_without_a_reader_ends_quietly(args: tuple[str, ...]) -> None:
    """The reader is gone before the first byte: 141, as after SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*args, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_warning_is_a_line_and_changes_no_exit_code(tmp_path: Path) -> None:
    """The interpreter computes a graph that no kernels compute."""
    (tmp_path / "sums.py").write_text(
        'from lngen import D, M\n\n\ndef f(b):\n    b.output("y", b.input("x", M, D) * b.sum(b.input("g", D)))\n'
    )
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    np.save(tmp_path / "g.npy", np.arange(4, dtype=np.float32))
    done = run(
        "run", "sums:f.fwd:d=4", "--in", "x=x.npy,g=g.npy", "--out", "y=y.npy", "--on", "interpreter", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (
        0,
        "warning: graph @f_fwd: '%sum_g' reduces over D a value that has no rows, and rows depend on it; pass it as an "
        "input.\n",
    )
    assert (np.load(tmp_path / "y.npy") == 6).all()


def test_names_that_are_not_utf8_are_printed(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    done = run("build", FWD, "--emit", "cu", "--out", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "/\\udcff/manifest.json" in done.stdout


# ---- what is echoed ----


LONG, LONG_WORDS = "z" * 3000, "z y " * 800


@pytest.mark.parametrize("long", [LONG, LONG_WORDS], ids=["word", "words"])
@pytest.mark.parametrize("line", [
    "{}", "--{}", "show {}.fwd:d=8", "show rmsnorm.fwd:d={}", "show rmsnorm.fwd:{}=1", "show rmsnorm.fwd:d=8 {}",
    *(f"show rmsnorm.fwd:d=8 {option}" for option in (
        "--stage {}", "--rows {}", "--schedule {}", "--schedule threads={}", "--out {}"
    )),
    "check long.graph.fwd:d=8", "check absent_{}:f.fwd:d=8", "conform --callable {}", "bench --shapes {}",
    "run rmsnorm.fwd:d=8 --in {}", "tune rmsnorm.fwd:d=8 --budget {}",
])  # fmt: skip
def test_no_error_echoes_more_than_200_characters(
    line: str, long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.graph").write_text(
        f"graph @a(%x: f32[M, D]) -> (f32[M, D]) {{\n%y : f32[M, D] = neg %{long}\nreturn %y\n}}"
    )
    monkeypatch.chdir(tmp_path)
    done = call(*(arg.replace("{}", long) for arg in line.split()))
    echoes = re.findall("z{2,}|(?:z y ?){2,}", done.stderr)
    assert (done.exit_code, max(map(len, echoes), default=0) <= 200) == (2, True), done.stderr


@pytest.mark.parametrize("line", [
    "build rmsnorm.fwd:d=8 --out {}", "build rmsnorm.fwd:d=8 --out out --lock {}", "bench --from {}",
    "tune rmsnorm.fwd:d=8 --database {}", "generated --time --against {}",
])  # fmt: skip
@pytest.mark.parametrize("name", ["a\0b", "a\0b/c"])
def test_a_name_with_a_nul_is_a_usage_error(line: str, name: str) -> None:
    done = call(*(arg.replace("{}", name) for arg in line.split()))
    assert done.exit_code == 2
    assert f"'{name}' cannot be used: no file can have this name; name another one." in done.stderr


# ---- exit codes ----


def test_the_process_ends_with_the_exit_code() -> None:
    done = run("show", "layernrm.fwd:d=64", "--stage", "graph")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: spec 'layernrm.fwd:d=64': there is no graph")


@pytest.mark.parametrize(("error", "code", "message"), [
    (ArrayError("no array."), 2, "error: no array.\n"),
    (MemoryError("Unable to allocate 1 TiB"), 3, "error: there is not enough memory (Unable to allocate 1 TiB)"),
    (FileNotFoundError(2, "No such file", "a"), 2, "error: 'a' cannot be used: No such file.\n"),
    (RecursionError("too deep"), 70, "error: internal error of lngen (RecursionError: too deep)"),
    (OSError(5, "Input/output error"), 70, "error: internal error of lngen (OSError: [Errno 5]"),
    (EOFError(), 70, "error: internal error of lngen (EOFError: it has no message)"),
    (ValueError("two\nlines"), 70,
     "error: internal error of lngen (ValueError: two lines); please report it with the output of"),
])  # fmt: skip
@pytest.mark.parametrize("level", ["0", "5", "nonsense"])
def test_each_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str, level: str
) -> None:
    def described(*_: object) -> None:
        raise error

    monkeypatch.setattr("lngen.cli.inspection._described", described)
    monkeypatch.setenv("LNGEN_DEBUG", level)
    done = call("list")
    traceback, _, said = done.stderr.rpartition("error: ")
    assert (done.exit_code, done.stdout) == (code, "")
    assert traceback.startswith("Traceback (most recent call last)") == (level == "5") == bool(traceback)
    assert f"error: {said}".startswith(message)


def test_the_reference_lists_every_exit_code() -> None:
    text = (ROOT / "lngen" / "docs" / "reference.md").read_text(encoding="utf-8")
    table = text.partition("| exit code | means |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    codes = {0, UNHANDLED, INTERRUPTED, UNREAD} | {c.exit_code for c in LngenError.__subclasses__()}
    assert {int(code) for code in listed} == codes


# ---- signals ----


def interrupted(child: subprocess.Popen[str], started: str) -> tuple[int, str]:
    """The exit code and the messages of a process that gets a SIGINT once it has said ``started``."""
    assert child.stdout.readline() == f"{started}\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    return child.returncode, err


def test_an_interrupt_of_a_command() -> None:
    code = (
        "import time, lngen.cli\n"
        "def slow(self, ctx, name):\n    print('started', flush=True); time.sleep(60)\n"
        "lngen.cli.Commands.get_command = slow\nlngen.cli.main()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "list"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    code_, err = interrupted(child, "started")
    assert (code_, "Traceback" in err) == (130, False)


@pytest.mark.parametrize(("how", "module"), [(MODULE, "click"), (SCRIPT, "platformdirs")])
def test_an_interrupt_while_modules_are_imported(tmp_path: Path, how: tuple[str, ...], module: str) -> None:
    slow = "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    (tmp_path / f"{module}.py").write_text(slow)
    child = subprocess.Popen(
        [sys.executable, *how, "list"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert interrupted(child, "importing") == (130, "")


def test_an_interrupt_in_a_finaliser_is_not_lost() -> None:
    code = (
        "import lngen.cli, lngen.__main__\n"
        "class Late:\n    def __del__(self):\n        raise KeyboardInterrupt\n"
        "def slow(self, ctx, name):\n    late = Late(); del late; print('went on')\n"
        "lngen.cli.Commands.get_command = slow\nlngen.__main__.main()"
    )
    done = run("list", how=("-c", code))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import atexit; atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))\n"
        "from lngen.__main__ import main; main()"
    )
    assert run("--version", how=("-c", code)).stdout.splitlines()[-1] == "True"


# ---- imports ----


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A folder whose modules have the names of others, and leave a mark when they are imported."""
    names = ("cupy", "torch", "numpy", "click", "rich", "jinja2", "ml_dtypes", "json", "random", "typing", "tokenize")
    for name in (*names, "multiprocessing", "distributed", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w'); raise SystemExit(9)\n")
    return tmp_path


def trapped(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("imported-*"))


@pytest.mark.parametrize("line", ["doctor", "conform --callable torch-layernorm --device cpu --cases ordinary"])
def test_nothing_is_imported_from_the_current_folder(traps: Path, line: str) -> None:
    if "torch" in line:
        pytest.importorskip("torch")
    done = run(*line.split(), cwd=traps, PYTHONSAFEPATH="")
    assert trapped(traps) == [], done.stderr
    assert done.returncode in (0, 3)


def test_a_named_function_may_be_in_the_current_folder(traps: Path) -> None:
    """While it is imported, and no longer; what is elsewhere comes first."""
    (traps / "mine.py").write_text(
        "import os, sys\nimport numpy, cupy\nassert sys.path[-1] == os.getcwd()\n"
        "def f(x, gamma, beta, eps):\n"
        "    assert os.getcwd() not in sys.path and os.environ['PYTHONSAFEPATH']\n"
        "    w = x.astype(numpy.float64)\n    w = w - w.mean(1, keepdims=True)\n"
        "    return (w / numpy.sqrt((w * w).mean(1, keepdims=True) + eps) * gamma + beta).astype(x.dtype)\n"
    )
    pytest.importorskip("cupy")
    done = run("conform", "--callable", "mine:f", "--cases", "ordinary", cwd=traps)
    assert (trapped(traps), done.returncode) == ([], 0), done.stderr
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
