"""A plugin of pytest: what each test runs and costs, or which mutants a set of tests kills. ``cover.py`` starts it.

    LNGEN_RECORD=FILE    a line of JSON for each test: its name, outcome, CPU with its children's, and blocks
    LNGEN_KILL=FILE      a line of JSON for each mutant of ``LNGEN_MUTANTS`` with the test that killed it, or none

Both need one process (``-p no:xdist``). A mutant runs in a fork of the process, which has imported and collected all.
One of a template is a changed line in a copy of the folder.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

import blocks

RECORD, KILL = (os.environ.get(name, "") for name in ("LNGEN_RECORD", "LNGEN_KILL"))
TABLE = blocks.install(mutants=bool(KILL))
PLACE = 5  # parts of a place, behind which a caller may write more
LONGEST = 3.0  # seconds of a test that is tried on a mutant


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def positional(item: pytest.Item) -> bool:
    """True for a case whose name counts cases, so that another one may get it."""
    indices: Mapping[str, int] = getattr(getattr(item, "callspec", None), "indices", {})
    parts = item.nodeid.partition("[")[2].removesuffix("]").split("-")
    return "<lambda>" in item.nodeid or any(f"{name}{index}" in parts for name, index in indices.items())


class Recorder:
    """Writes a line for each test."""

    def __init__(self, path: Path):
        self.file = path.open("w", encoding="utf-8")
        self.outcomes: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.outcomes.clear()
        TABLE.ran[:] = bytes(blocks.MOST)
        start = time.process_time() + children()
        result = yield
        cpu = time.process_time() + children() - start
        outcome = next((o for o in ("failed", "skipped") if o in self.outcomes), "passed")
        line = {"test": item.nodeid, "outcome": outcome, "cpu": round(cpu, 4), "positional": positional(item)}
        line["blocks"] = [TABLE.blocks[n] for n, flag in enumerate(TABLE.ran[: len(TABLE.blocks)]) if flag]
        print(json.dumps(line), file=self.file, flush=True)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report.outcome)


class Killer:
    """Runs, in place of the tests, those that may kill each mutant."""

    def __init__(self, path: Path, mutants: Sequence[Mapping[str, Any]]):
        self.file, self.mutants = path.open("w", encoding="utf-8"), mutants
        self.unfit = set[str]()  # tests that fail in a fork

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        numbers = {m.place: n for n, m in enumerate(TABLE.mutants)}
        for mutant in self.mutants:
            place, tests = tuple(mutant["place"][:PLACE]), [items[name] for name in mutant["tests"] if name in items]
            if place in numbers:
                killed = self.killer(partial(TABLE.chosen.__setitem__, 0, numbers[place]), tests)
            elif place[0].startswith("templates"):
                with tempfile.TemporaryDirectory() as folder:
                    killed = self.killer(partial(edit_template, Path(folder), *place, mutant["after"]), tests)
            else:
                killed = ""  # no test that was recorded imports it
            print(json.dumps({"place": mutant["place"], "killed": killed}), file=self.file, flush=True)
        return True

    def killer(self, mutate: Callable[[], object], items: Sequence[pytest.Item]) -> str:
        """The test that fails with the mutant, and passes in a fork without it."""
        fit = [item for item in items if item.nodeid not in self.unfit]
        killed = forked(mutate, fit)
        if killed and forked(lambda: None, [item for item in fit if item.nodeid == killed]):
            self.unfit.add(killed)
            return self.killer(mutate, fit)
        return killed


def edit_template(folder: Path, name: str, function: str, operator: str, line: int, before: str, after: str) -> None:
    """Give lngen this folder of templates, in which one line of one file is changed, and forget all it knows."""
    from lngen.config import data_dir  # imported here, behind the hook

    shutil.copytree(data_dir("templates"), folder, dirs_exist_ok=True)
    file = folder / Path(name).relative_to("templates")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[line] == before, operator
    lines[line] = after
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == "lngen"}
    for module in found.values():
        if "data_dir" in vars(module):
            vars(module)["data_dir"] = lambda name: folder if name == "templates" else data_dir(name)
        for value in [*vars(module).values()]:
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def forked(mutate: Callable[[], object], items: Sequence[pytest.Item]) -> str:
    """The test that fails, runs too long or ends the process with the mutant; empty if all pass."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        _try(mutate, items, writes)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as pipe:
        started = pipe.read().splitlines()
    os.waitpid(child, 0)
    return "" if started and started[-1] == "survives" else (started[-1] if started else "the start")


def _try(mutate: Callable[[], object], items: Sequence[pytest.Item], writes: int) -> None:
    """In the child: write the name of each test before it runs, and ``survives`` behind the last."""
    try:
        mutate()
        for item in items:
            os.write(writes, f"{item.nodeid}\n".encode())
            signal.alarm(int(10 * LONGEST))  # whose default ends the process
            reports = runtestprotocol(item, log=False, nextitem=None)
            signal.alarm(0)
            if any(report.failed for report in reports):
                os._exit(1)
        os.write(writes, b"survives\n")
    finally:
        os._exit(0)


def pytest_configure(config: pytest.Config) -> None:
    """Registers what is asked for."""
    if RECORD:
        config.pluginmanager.register(Recorder(Path(RECORD)))
    if KILL:
        sys.setrecursionlimit(10_000)
        mutants = [json.loads(line) for line in Path(os.environ["LNGEN_MUTANTS"]).read_text().splitlines()]
        config.pluginmanager.register(Killer(Path(KILL), mutants))
