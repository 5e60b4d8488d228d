"""The upper levels of LNGEN_DEBUG: every stage of a kernel set, on stderr or as files."""

from __future__ import annotations

import sys

from lngen import config
from lngen.lower import Plan


def dump(plan: Plan, source: str) -> None:
    """Print the graph after each pass (LNGEN_DEBUG=3), the plan and the CUDA (4); write all to LNGEN_DUMP.

    Without these variables nothing is written. The files of a plan are ``<name>/00-build.ir``, one for each pass, then
    ``plan.txt`` and ``kernel.cu``.
    """
    level, folder = config.debug_level(), config.dump_dir()
    if level < 3 and folder is None:
        return
    graphs = {f"{n:02}-{name}.ir": str(graph) for n, (name, graph) in enumerate(plan.spec.trace().items())}
    text = {"plan.txt": str(plan), "kernel.cu": source}
    printed = (graphs if level >= 3 else {}) | (text if level >= 4 else {})
    for name, content in printed.items():
        print(f"---- {plan.name}: {name} ----\n{content}", file=sys.stderr)
    if folder is None:
        return
    (folder / plan.name).mkdir(parents=True, exist_ok=True)
    for name, content in (graphs | text).items():
        (folder / plan.name / name).write_text(content)
