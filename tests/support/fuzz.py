"""How many cases each fuzz test tries: a few in the default suite, 5000 with ``LNGEN_FUZZ=5000 pytest -m fuzz``.

``@fuzzed`` stands above ``@given``. Only tests read this variable.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("LNGEN_FUZZ", "50"))


def fuzzed(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a hypothesis test with CASES examples; fixtures of pytest may be shared by them."""
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    marked: Callable[..., Any] = pytest.mark.fuzz(test)
    return settings(max_examples=CASES, deadline=None, suppress_health_check=suppressed)(marked)


TEXT = st.text(st.characters(exclude_categories=()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
).map(lambda value: json.dumps(value).encode())
