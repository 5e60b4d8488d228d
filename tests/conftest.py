"""What every test shares: GPU tests skip without a GPU, hypothesis is deterministic, the cache is private."""

import os
import signal
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked ``gpu`` where there is no GPU, saying why; asks CuPy only if there are any."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    if reason is not None:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU ({reason})"))


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the tests out of the user's cache; a test that is about the cache sets a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        shared = os.environ.get("LNGEN_TEST_CACHE")  # of mutate.py, whose runs compile much the same
        patch.setenv("LNGEN_CACHE_DIR", shared or str(tmp_path_factory.mktemp("lngen-cache")))
        yield
