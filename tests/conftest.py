"""What every test shares: GPU tests skip without a GPU, hypothesis is deterministic, a run has one compile cache.

A plain run takes what no file lists, and a sample of the large tables (sampling.py). What the tests compile stays for
later runs in the user's cache folder, or in the one that LNGEN_TEST_CACHE names. In CI, or if it is empty,
nothing stays (kept_cache.py). A key of the cache holds all that an entry depends on, so that no change can make one
stale.
"""

import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

import kept_cache
import sampling

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: threads of NumPy and PyTorch would wait for each other
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")

# Collections of garbage are rare: a test, and the import of one, makes many objects, few of them in cycles.
gc.set_threshold(100_000, 50, 100)

# A shell that runs the tests in the background ignores SIGINT, and so would every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def why_no_gpu() -> str | None:
    """The reason that GPU tests cannot run here; None when they can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns when it finds no toolkit, which is what we ask about
            import cupy

            return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except Exception as error:  # CuPy absent, its libraries absent, or no driver: each raises its own class
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def compiler() -> None:
    """Skips where there is no CuPy; a CuPy without NVRTC is a failure, not a reason to skip."""
    pytest.importorskip("cupy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--half`` of the full run, and ``--update`` of golden text."""
    parser.addoption("--half", action="store_true", help="with -m full: leave out half, by the commit")
    parser.addoption("--update", action="store_true", help="write what golden text would have to hold")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to update where nobody reads what changes."""
    if config.option.update and os.environ.get("CI"):
        raise pytest.UsageError("--update writes files that somebody reads first; it is refused where CI is set.")


def pytest_report_header() -> str:
    """What a plain run takes."""
    return f"a plain run leaves out {len(sampling.listed())} names and most of the large tables; -m full takes them"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the plain run's tests, or all others, then skips the tests marked ``gpu`` without a GPU, saying why.

    Whoever selects by another marker or names a test gets all that fits. CuPy is asked only if there are tests for a
    GPU.
    """
    config.stash[sampling.COLLECTED] = [item.nodeid for item in items if not sampling.is_left_out(item)]
    if not config.pluginmanager.hasplugin("recorder"):
        for item in (item for item in items if sampling.is_listed(item.nodeid)):
            item.add_marker(pytest.mark.full(sample=False), append=False)
    selected = config.option.markexpr
    if selected in ("", "full") and not any("::" in argument for argument in config.args):
        others = [item for item in items if sampling.is_left_out(item) == (selected == "")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if sampling.is_left_out(item) == (selected == "full")]
    if selected == "full" and config.option.half:
        items[:] = [item for item in items if sampling.in_half(item, sampling.commit())]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    if reason is not None:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU ({reason})"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting compiles nothing: each worker would, and each run of one test.

    What it made stays until the end, so that no collection of garbage has to walk over it again.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LNGEN_CACHE_DIR", folder)
        result = yield
        for made in Path(folder).rglob("*"):
            raise pytest.UsageError(f"nothing is compiled before a test runs; a file does when it is imported: {made}")
    gc.collect()
    gc.freeze()
    return result


def pytest_sessionfinish() -> None:
    """The user's folder does not grow for ever; one that is named is the business of who names it."""
    kept = kept_cache.of_user()
    if kept is not None and not {"PYTEST_XDIST_WORKER", kept_cache.NAMED, "CI"} & {*os.environ}:
        kept_cache.tidy(kept)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes tests that stand side by side, which share what is planned and compiled."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


@pytest.fixture(autouse=True)
def forgotten_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test imports from its temporary folder is forgotten: a later module of that name would not be imported."""
    before = {*sys.modules}
    yield
    folder = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name in {*sys.modules} - before:
        module = sys.modules[name]
        if not isinstance(module, ModuleType):
            continue
        own = object.__getattribute__(module, "__dict__")  # without the import of a module that is loaded on first use
        if str(own.get("__file__")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the tests out of the cache of lngen's user; the workers of a run share a folder.

    A test that is about the cache sets a folder of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.getbasetemp()
        run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        patch.setenv("LNGEN_CACHE_DIR", str(kept_cache.folder(os.environ, run / "lngen-cache")))
        # No test gets what was chosen in another one, for a fake GPU and by models and compilers of its own.
        patch.setattr("lngen.launch.runtime.remembered._recalled", lambda *_: None)
        patch.setattr("lngen.launch.runtime.remembered._remember", lambda *_: None)
        yield
