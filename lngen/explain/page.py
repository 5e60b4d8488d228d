"""The page of a kernel, one HTML file that needs nothing else: its panes, sections, drawings and comparisons.

The texts of the panes and what belongs together are JSON, deflated, that ``templates/page/page.js`` shows.
"""

from __future__ import annotations

import base64
import difflib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lngen.aot.catalog import CATALOG
from lngen.compile import Compilation, KernelSet
from lngen.config import data_dir
from lngen.devices import DEFAULT_ARCH, capability, device_for
from lngen.explain import explain
from lngen.explain.drawing import kernel_drawing, row_drawing, trial_drawing
from lngen.explain.line_map import Line, LineMap, line_map, ptx_lines, sass_lines
from lngen.explain.lives import LEVELS, lives
from lngen.explain.section import Section
from lngen.explain.subject import Subject
from lngen.headers import PREFIX
from lngen.inspect import Location, disassemble, resources
from lngen.ir import Graph
from lngen.lower.parts import note
from lngen.problem import parse_schedule
from lngen.problem.schedule import exists
from lngen.spec import parse_spec
from lngen.toolchain.nvrtc import compiler_build


@dataclass(frozen=True)
class Version:
    """Kernels for one arch that a page shows, or compares with those it shows."""

    title: str
    kernels: KernelSet
    arch: str

    @cached_property
    def text(self) -> str:
        """The CUDA source."""
        return self.kernels.text

    @cached_property
    def map(self) -> LineMap:
        """The statements of the source."""
        return line_map(self.text, self.kernels.plan.graph)

    @cached_property
    def ptx(self) -> tuple[Line, ...]:
        """The lines of the PTX."""
        return ptx_lines(self.kernels.ptx(self.arch, lines=True), self.kernels.plan.name)

    @cached_property
    def sass(self) -> tuple[Line, ...]:
        """The instructions of the kernels in launch order; MissingError without a disassembler."""
        found = disassemble(self.kernels.cubin(self.arch, lines=True).image, lines=True)
        return sass_lines({kernel.name: found[kernel.name] for kernel in self.kernels.plan.kernels})

    @cached_property
    def uses(self) -> list[dict[str, Any]]:
        """What each kernel uses: the compiler's numbers, and its instructions."""
        plan, compiled = self.kernels.plan, self.kernels.cubin(self.arch).resources
        used = resources(plan, compiled, self.arch)
        bounds = [n for n, line in enumerate(self.sass) if not line.where and line.text.startswith("// ")]
        counts = (end - begin - 1 for begin, end in zip(bounds, [*bounds[1:], len(self.sass)], strict=True))
        spilled = (compiled[k.name].spilled for k in plan.kernels)
        return [
            {**used[k.name], "role": k.role, "launch": k.launch_rule(), "instructions": n, "spilled": bytes_}
            for k, n, bytes_ in zip(plan.kernels, counts, spilled, strict=True)
        ]


def page(subject: Subject, sections: Sequence[Section], arch: str, compared: Sequence[Version] = ()) -> str:
    """The HTML of a page, the same bytes for the same input; MissingError without a compiler or a disassembler."""
    shown, plan = Version("", subject.kernels, arch), subject.plan
    data = {**_panes(shown, plan.graph), "compare": [_compared(shown, other) for other in compared]}
    return _environment().get_template("page.html.jinja").render(
        subject=subject,
        arch=arch,
        compiler=re.findall(r"release (.*)", compiler_build()),
        sections=[(s, _trials(s, subject)) for s in sections],
        names=_names(plan.graph),
        row=Markup(row_drawing(plan)),
        kernels=[(use, Markup(kernel_drawing(k, plan)), lives(k, plan)) for use, k in zip(shown.uses, plan.kernels)],
        levels=LEVELS,
        compared=compared,
        shown=shown,
        data=_deflated(data),
    )  # fmt: skip


def version(subject: Subject, arch: str, text: str) -> Version:
    """What ``text`` names to compare with: another arch, "sm_80", or changes of the schedule, "threads=256".

    An arch without the instructions of the schedule's form gets its own default. ScheduleError for an illegal schedule.
    """
    if re.fullmatch(r"sm_\d+[af]?", text):
        kernels = subject.kernels
        if not exists(subject.schedule, capability(text)):
            kernels = subject.compilation.changed("", text, rows=subject.expected)
        return Version(text, kernels, text)
    return Version(text, subject.compilation.kernels(parse_schedule(text, subject.schedule)), arch)


def golden_pages(progress: Callable[[int, int], None] | None = None) -> Iterator[tuple[str, str]]:
    """The pages of the golden set, by file name, and their index."""
    listed = []
    for n, (spec, schedule) in enumerate(CATALOG.items()):
        compilation = Compilation(parse_spec(spec))
        kernels = compilation.changed(schedule, DEFAULT_ARCH)
        subject = Subject(compilation, kernels, device_for(DEFAULT_ARCH), changed=schedule)
        listed.append((f"{kernels.plan.name}.html", spec, Version("", kernels, DEFAULT_ARCH)))
        yield listed[-1][0], page(subject, explain(subject), DEFAULT_ARCH)
        if progress:
            progress(n + 1, len(CATALOG))
    listed.sort(key=lambda one: (one[1].partition(":")[0], one[2].kernels.plan.spec.d, one[1]))
    yield "index.html", _environment().get_template("index.html.jinja").render(pages=listed)


# ---- the data of the panes ----


def _names(graph: Graph) -> frozenset[str]:
    return frozenset(v.name for v in (*graph.params, *(e.out for e in graph.eqns)))


def _panes(shown: Version, graph: Graph) -> dict[str, Any]:
    """The texts of the panes, the statements, and the places in headers that lines come from."""
    chains: dict[tuple[Location, ...], int] = {(): 0}

    def code(lines: tuple[Line, ...]) -> dict[str, Any]:
        decided = (shown.map.decides(line.where) for line in lines)
        return {
            "text": "\n".join(line.text for line in lines),
            "of": [-1 if n is None else n for n in decided],
            "from": [chains.setdefault(line.where, len(chains)) for line in lines],
        }

    inputs = [(f"%{v.name}", str(v.type), [v.name]) for v in graph.params]
    equations = [(note(e), str(e.out.type), [e.out.name]) for e in graph.eqns]
    end = (f"return {', '.join(map(str, graph.results))}", "", [])
    return {
        "graph": [*inputs, *equations, end],
        "statements": shown.map.statements,
        "cuda": shown.text.rstrip("\n"),
        "ptx": code(shown.ptx),
        "sass": code(shown.sass),
        "chains": [_chain(where) for where in chains],
    }


def _chain(where: tuple[Location, ...]) -> tuple[str, str]:
    """The header function that a line comes from, and the whole chain in words."""
    inner = where[0].function if where and where[0].file.startswith(PREFIX) else ""
    places = (
        f"{w.function} ({w.file.removeprefix(PREFIX)}:{w.line})" if w.file.startswith(PREFIX) else f"line {w.line}"
        for w in where
    )
    return inner, " in ".join(places)


def _deflated(data: Any) -> str:
    raw = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(packer.compress(raw) + packer.flush()).decode()


# ---- comparisons ----

_RENAMED = re.compile(r"\b(U?[RPB])\d+\b|\b0x[0-9a-f]+\b")


def _compared(shown: Version, other: Version) -> dict[str, Any]:
    """The texts of another version, and where they differ: [first, end, first there, end there] of lines from 0."""
    texts = {"cuda": other.text.rstrip("\n"), "sass": "\n".join(line.text for line in other.sass)}
    changes = {
        "cuda": _changes(shown.text.splitlines(), other.text.splitlines()),
        "sass": _changes([*map(_likened, shown.sass)], [*map(_likened, other.sass)]),
    }
    return {"title": other.title, "texts": texts, "changes": changes}


def _likened(line: Line) -> str:
    """What two instructions have in common that do the same for the same reason, in other registers."""
    code = _RENAMED.sub(r"\1", line.text.partition("  ")[2])
    return " ".join([code, *(w.function for w in line.where if w.file.startswith(PREFIX))])


def _changes(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int, int, int]]:
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return [(a, b, c, d) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]


# ---- sections ----


def _trials(section: Section, subject: Subject) -> Markup | None:
    """The drawing of a section's trials; None for a section without this key."""
    if "trials" not in section.data:
        return None
    return Markup(trial_drawing(section.data["trials"], str(subject.schedule)))


def _linked(text: str, names: frozenset[str]) -> Markup:
    """A text whose values lead to the panes: after %, on the left of an equation, or with a name that is no word."""
    link = Markup('<a href="#tab=source&amp;sel=value:{}">{}</a>')
    parts = []
    for part in re.split(r"(%?\b\w+)", text):
        name = part.removeprefix("%")
        sure = name != part or re.search(r"[_\d]", name) or text.strip().startswith(f"{name} = ")
        parts.append(link.format(name, part) if name in names and sure else part)
    return Markup("").join(parts)


def _breakable(text: object) -> Markup:
    """A spec or a schedule, whose lines may break behind a comma."""
    return Markup(",<wbr>").join(str(text).split(","))


@cache
def _environment() -> Environment:
    """Jinja for HTML: everything is escaped, undefined names are errors."""
    folder = data_dir("templates") / "page"
    made = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"linked": _linked, "kind": lambda block: type(block).__name__, "breakable": _breakable}
    made.globals |= {f: Markup((folder / f"page.{f}").read_text(encoding="utf-8")) for f in ("css", "js")}
    return made
