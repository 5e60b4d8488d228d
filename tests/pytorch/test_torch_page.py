"""If these fail, ``lngen help torch`` lacks a function of lngen.torch."""

import re
from pathlib import Path

import lngen.torch

PAGE = (Path(lngen.torch.__file__).parents[1] / "docs" / "torch.md").read_text(encoding="utf-8")


def test_the_table_has_every_function() -> None:
    table = PAGE[PAGE.index("## Functions") : PAGE.index("## Derivatives")]
    others = ("patch", "_extension", "decompositions", "fuse")
    functions = [name for name in lngen.torch.__all__ if name.islower() and not name.endswith(others)]
    assert [name for name in functions if not re.search(rf"[`.]{name}\b", table)] == []
