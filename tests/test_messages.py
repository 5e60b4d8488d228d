"""If these fail, a mistake gets another message than the one in tests/messages; ``pytest --update`` writes it there."""

from pathlib import Path

import pytest

import golden_messages
from paths import ROOT

pytest_plugins = ["pytester"]
FILES = sorted((ROOT / "tests" / "messages").rglob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=[path.stem for path in FILES])
def test_messages(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    golden_messages.check(golden_messages, file, tmp_path, monkeypatch, pytestconfig)


FILE = '''\
"""What is refused."""

def fails(text):
    raise ValueError(text)

fails("one")
# ValueError: one

fails(
    f"two lines:\\n    {folder}/x"
)
# TypeError: another
# and more

# A heading stays.
lngen("shwo")
fails("a " * 70)
'''
OLD, NOW = "# TypeError: another\n# and more\n", "# ValueError: two lines:\n#     FOLDER/x\n"


def test_the_file_has_what_is_raised_now(tmp_path: Path) -> None:
    now = golden_messages.rewritten(FILE, tmp_path)
    assert now.startswith(FILE.replace(OLD, NOW).partition('fails("a ')[0])
    assert "\n# exit 2: " in now
    assert "\n#   a a" in now
    assert golden_messages.rewritten(now, tmp_path) == now
    for code in ("len('x')\n# TypeError: no\n", "missing\n", "(1).x\n"):
        assert len(golden_messages.unmeant(golden_messages.rewritten(code, tmp_path))) == 1


def test_no_message_is_updated_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = full: as in this project")
    monkeypatch.setenv("CI", "true")
    found = pytester.runpytest("--update")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*--update writes files that somebody reads first; it is refused where CI is set*"])
