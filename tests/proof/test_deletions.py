"""If these fail, the executor overlooks a missing or weakened instruction that orders something."""

import pytest

pytest.importorskip("cupy")

import deletions
import sampling

STRIDE = 7  # every so many changes of a form are tried


@sampling.rotating("form", deletions.CASES)
def test_what_is_not_redundant_is_missed(form: str) -> None:
    assert deletions.noticed(form, None) == ""
    known = deletions.known()
    tried = [*deletions.changes(deletions.twin(form).ptx)][STRIDE // 2 :: STRIDE]
    wrong = [c.name for c in tried if bool(deletions.noticed(form, c)) == (f"{form}: {c.name}" in known)]
    assert wrong == []


def test_every_reason_is_for_an_instruction_that_is_there() -> None:
    names = {f"{form}: {c.name}" for form in deletions.CASES for c in deletions.changes(deletions.twin(form).ptx)}
    assert set(deletions.known()) <= names
    assert len(names) > 200


def test_a_fence_of_two_is_needed() -> None:
    """Either of those that release mbarriers is redundant; both are not."""
    twin = deletions.twin("cluster")
    assert twin.ptx.count("fence.mbarrier_init.release.cluster;") == 2
    assert twin.gives_away(twin.ptx.replace("fence.mbarrier_init.release.cluster;", ""), 12) == "proxy"
