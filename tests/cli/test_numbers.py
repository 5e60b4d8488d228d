"""If these fail, a number that is typed is read as another one, in a spec, a schedule or an option."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen
from fuzz import fuzzed
from lngen.devices import capability
from lngen.errors import ScheduleError, SpecError
from lngen.problem import Schedule, parse_schedule
from lngen.spec import parse_spec
from lngen.user_input import LARGEST, decimal, whole

# What int() or float() would take, or stumble over.
WRONG = ("", "²", "\uff14", "٣", "1_0", " 1", "1 ", "+1", "-1", "0x1", "9" * 400, "9" * 5000, "1" + "0" * 32, "\udc80")


@pytest.mark.parametrize("text", [*WRONG, "1.0", "1e3"])
def test_what_is_no_whole_number(text: str) -> None:
    assert whole(text) is None
    with pytest.raises(SpecError, match="'d' is expected to be a whole number from 1 to 1073741824, got"):
        parse_spec(f"layernorm.fwd:d={text}")
    with pytest.raises(ScheduleError, match="'threads' is expected to be a whole number, got"):
        parse_schedule(f"threads={text}", Schedule("registers", 1, 1, 1))


@pytest.mark.parametrize("text", [*WRONG, "nan", "inf", "1e-5²", "1,0", ".", "1e", "1e400", "2"])
def test_what_is_no_number_from_zero_to_one(text: str) -> None:
    assert decimal(text, 0, 1) is None
    with pytest.raises(SpecError):
        parse_spec(f"layernorm.fwd:d=8,eps={text}")


@pytest.mark.parametrize("value", [math.inf, math.nan, 8.0, True, None, "8.0", 2**31])
def test_objects_that_are_no_whole_number(value: object) -> None:
    assert whole(value) is None
    with pytest.raises(SpecError, match="'d' is expected to be a whole number"):
        lngen.compile("layernorm", d=value)  # type: ignore[arg-type]


def test_what_is_a_number() -> None:
    assert whole("007") == whole(7) == whole(np.int64(7)) == 7
    assert whole(str(LARGEST)) == LARGEST
    assert (whole("3", 4), whole("5", 4, 4), whole("4", 4, 4)) == (None, None, 4)
    assert decimal("1e-5") == decimal("0.00001") == decimal(".1E-4") == decimal(np.float64(1e-5)) == 1e-5
    assert str(decimal(-0.0)) == "0.0"


@pytest.mark.parametrize("arch", ["", "sm_", "sm_²", "sm_\uff190", "90", "hopper", "sm_" + "9" * 400])
def test_what_is_no_arch_has_no_capability(arch: str) -> None:
    assert capability(arch) == 0


@fuzzed
@given(st.text() | st.from_regex(r"[-+]?[0-9]{0,40}[._e]?[0-9]*", fullmatch=True))
def test_what_is_read_is_what_was_written(text: str) -> None:
    number, other = whole(text), decimal(text)
    assert number is None or (text.isascii() and text.lstrip("0") == str(number or ""))
    assert other is None or other == float(text)
