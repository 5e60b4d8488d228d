"""A GPU that only writes down what it is asked, for the tests of this folder."""

import pytest

from fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)
