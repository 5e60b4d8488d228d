"""Where the checkout is, and what a child process has to search to import what a test imports."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FOLDERS = sorted({path.parent for path in TESTS.rglob("*.py")})
SEARCH = os.pathsep.join(map(str, (ROOT, *FOLDERS)))
