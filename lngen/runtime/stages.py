"""The upper steps of the debug ladder: every stage of a kernel set, on stderr or as files."""

from __future__ import annotations

import sys

from lngen import config
from lngen.lower import Plan


def show_stages(plan: Plan, source: str) -> None:
    """Print the graph after each pass (LNGEN_DEBUG=3), the plan and the CUDA (4); write all to LNGEN_DUMP.

    The files of a plan are ``<name>/00-build.ir``, one for each pass, then ``plan.txt`` and ``kernel.cu``.
    """
    graphs = {f"{n:02}-{name}.ir": str(graph) for n, (name, graph) in enumerate(plan.spec.trace().items())}
    text = {"plan.txt": str(plan), "kernel.cu": source}
    printed = (graphs if config.debug_level() >= 3 else {}) | (text if config.debug_level() >= 4 else {})
    for name, content in printed.items():
        print(f"---- {plan.name}: {name} ----\n{content}", file=sys.stderr)
    folder = config.dump_dir()
    if folder is None:
        return
    (folder / plan.name).mkdir(parents=True, exist_ok=True)
    for name, content in (graphs | text).items():
        (folder / plan.name / name).write_text(content)
