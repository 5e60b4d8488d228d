"""The page of a kernel, one HTML file that needs nothing else: its panes, sections, drawings and comparisons.

The texts of the panes and what belongs together are JSON, deflated, that ``templates/page/page.js`` shows.
"""

import base64
import difflib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import DEFAULT_ARCH, capability, device_for
from lngen.compiler.headers import PREFIX
from lngen.compiler.lower.cuda.spelling import note
from lngen.compiler.problem import parse_schedule
from lngen.compiler.problem.schedule import exists
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain.nvrtc import compiler_build
from lngen.config import data_dir
from lngen.lab.explain import explain
from lngen.lab.explain.drawing import CLASSES, kernel_drawing, row_drawing, trial_drawing
from lngen.lab.explain.line_map import Line, line_map, ptx_lines, sass_lines
from lngen.lab.explain.section import Section, Subject
from lngen.lab.explain.steps import lives
from lngen.lab.inspect.machine_code import KernelCode, machine_code, mix, packed
from lngen.lab.inspect.sass import Location
from lngen.packs.catalog import CATALOG


@dataclass(frozen=True)
class Version:
    """Kernels that a page shows or compares with those it shows: CUDA, and machine code, with lines if it has any.

    ``text``: the one with which a user asks for the comparison.
    """

    text: str
    arch: str
    schedule: str
    cuda: str
    codes: tuple[KernelCode, ...]

    @cached_property
    def sass(self) -> tuple[Line, ...]:
        """The instructions of all kernels."""
        return sass_lines(self.codes)


def built(kernels: KernelSet, arch: str, text: str = "") -> Version:
    """Kernels for an arch; MissingError without a compiler or a disassembler."""
    return Version(text, arch, str(kernels.plan.schedule), kernels.text, machine_code(kernels, arch, lines=True))


def version(subject: Subject, arch: str, text: str) -> Version:
    """What ``text`` names to compare with: an arch, "sm_80", changes of the schedule, "vec=4", or the folder of a pack.

    An arch without the instructions of the schedule gets its own default. ScheduleError for an illegal schedule,
    LngenError for a folder without such a pack.
    """
    kernels = subject.kernels
    if re.fullmatch(r"sm_\d+[af]?", text):
        if not exists(subject.schedule, capability(text)):
            kernels = subject.compilation.changed("", text, rows=subject.expected)
        return built(kernels, text, text)
    if "=" in text and not Path(text).exists():
        return built(subject.compilation.kernels(parse_schedule(text, subject.schedule)), arch, text)
    source, binary = (packed(Path(text), kernels.plan, arch, kind) for kind in ("cu", "cubin"))
    schedule = binary.entry["schedule"]["text"]
    return Version(text, arch, schedule, source.data.decode(errors="replace"), binary.machine_code(arch))


def page(subject: Subject, sections: Sequence[Section], shown: Version, compared: Sequence[Version] = ()) -> str:
    """The HTML of a page, the same bytes for the same input. ``shown``: the subject's kernels, for one arch."""
    graph, plan = subject.plan.graph, subject.plan
    data = {**_panes(shown, subject.kernels), "compare": [_compared(shown, other) for other in compared]}
    return _environment().get_template("page.html.jinja").render(
        subject=subject,
        shown=shown,
        compiler=re.findall(r"release (.*)", compiler_build()),
        sections=[(s, _trials(s, subject)) for s in sections],
        names={v.name for v in (*graph.params, *(e.out for e in graph.eqns))},
        row=Markup(row_drawing(plan)),
        kernels=[(k, Markup(kernel_drawing(k, plan)), lives(k, plan)) for k in plan.kernels],
        levels=CLASSES,
        compared=compared,
        data=_deflated(data),
    )  # fmt: skip


def golden_page(spec: str) -> tuple[str, str, Version]:
    """Of a kernel of the golden set the file name, the HTML, and what it shows."""
    compilation = Compilation(parse_spec(spec))
    kernels, default = compilation.changed(CATALOG[spec]), compilation.schedule(DEFAULT_ARCH, compiled=False)
    changed = "" if kernels.plan.schedule == default else CATALOG[spec]
    subject = Subject(compilation, kernels, device_for(DEFAULT_ARCH), changed=changed)
    shown = built(kernels, DEFAULT_ARCH)
    return f"{kernels.plan.name}.html", page(subject, explain(subject), shown), shown


def golden_pages(progress: Callable[[int, int], None] | None = None) -> Iterator[tuple[str, str]]:
    """The pages of the golden set, by file name, and their index."""
    listed = []
    for spec in sorted(CATALOG, key=lambda text: (text.partition(":")[0], parse_spec(text).d)):
        file, html, shown = golden_page(spec)
        listed.append((spec, file, shown))
        yield file, html
        if progress:
            progress(len(listed), len(CATALOG))
    yield "index.html", _environment().get_template("index.html.jinja").render(pages=listed)


# ---- the data of the panes ----


def _panes(shown: Version, kernels: KernelSet) -> dict[str, Any]:
    """The texts of the panes, the statements, and the places in headers that lines come from."""
    graph, found = kernels.plan.graph, line_map(shown.cuda, kernels.plan.graph)
    chains: dict[tuple[Location, ...], int] = {(): 0}

    def code(lines: tuple[Line, ...]) -> dict[str, Any]:
        decided = (found.decides(line.where) for line in lines)
        return {
            "text": "\n".join(line.text for line in lines),
            "of": [-1 if n is None else n for n in decided],
            "from": [chains.setdefault(line.where, len(chains)) for line in lines],
        }

    inputs = [(f"%{v.name}", str(v.type), v.name) for v in graph.params]
    equations = [(note(e), str(e.out.type), e.out.name) for e in graph.eqns]
    return {
        "graph": [*inputs, *equations, (f"return {', '.join(map(str, graph.results))}", "", "")],
        "statements": found.statements,
        "cuda": shown.cuda.rstrip("\n"),
        "ptx": code(ptx_lines(kernels.ptx(shown.arch, lines=True), kernels.plan.name)),
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
    lined = all(any(line.where for line in v.sass) for v in (shown, other))
    return {
        "title": other.text,
        "texts": {"cuda": other.cuda.rstrip("\n"), "sass": "\n".join(line.text for line in other.sass)},
        "changes": {
            "cuda": _changes(shown.cuda.splitlines(), other.cuda.splitlines()),
            "sass": _changes(*([_likened(line, lined) for line in v.sass] for v in (shown, other))),
        },
    }


def _likened(line: Line, lined: bool) -> str:
    """What two instructions have in common that do the same, in other registers; if ``lined``, for the same reason."""
    code = _RENAMED.sub(r"\1", line.text.partition("  ")[2])
    return " ".join([code, *(w.function for w in line.where if lined and w.file.startswith(PREFIX))])


def _changes(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int, int, int]]:
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return [(a, b, c, d) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]


# ---- sections ----


def _trials(section: Section, subject: Subject) -> Markup:
    """The drawing of a section's trials, empty if it has none."""
    return Markup(trial_drawing(section.data.get("trials", ()), str(subject.schedule)))


def _linked(text: str, names: Set[str]) -> Markup:
    """A text whose values lead to the panes: after %, left of an equation, in a list, or with a name unlike a word."""
    link, done, parts = Markup('<a href="#tab=source&amp;sel=value:{}">{}</a>'), 0, []
    for found in re.finditer(r"%?\b(\w+)", text):
        listed = re.search(r"(^|, |  )$", text[: found.start()]) and re.match(r"$|[,;]| = ", text[found.end() :])
        if found[1] in names and (found[0] != found[1] or listed or re.search(r"[_\d]", found[1])):
            parts += [text[done : found.start()], link.format(found[1], found[0])]
            done = found.end()
    return Markup("").join([*parts, text[done:]])


def _breakable(text: object) -> Markup:
    """A spec or a schedule, whose lines may break behind a comma or colon."""
    return Markup("<wbr>").join(re.split(r"(?<=[,:])", str(text)))


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
    made.filters |= {"linked": _linked, "kind": lambda block: type(block).__name__, "breakable": _breakable, "mix": mix}
    made.globals |= {f: Markup((folder / f"page.{f}").read_text(encoding="utf-8")) for f in ("css", "js")}
    return made
