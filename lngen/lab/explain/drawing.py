"""Drawings as SVG text: how a row lies over threads, where values live, and the times of schedules."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lngen.compiler.lower import Kernel
from lngen.compiler.lower.plan import Plan
from lngen.compiler.problem.footprint import cluster_tile
from lngen.lab.explain.steps import CLUSTER, GLOBAL, REGISTERS, SHARED, columns, lives

WIDTH = 960
CLASSES = {GLOBAL: "global", SHARED: "shared", CLUSTER: "cluster", REGISTERS: "registers"}  # and colours of the page


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return "".join([head, *parts, "</svg>"])


def _box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    about = f"<title>{escape(title)}</title>" if title else ""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect {box} rx="3" class="{kind}">{about}</rect>'


def _text(x: float, y: float, text: object, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(str(text))}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{kind}"/>'


# ---- a row over blocks, vectors and threads ----


def row_levels(plan: Plan) -> list[tuple[str, int, str]]:
    """From a row, or the rows of a block, to an element: what is divided, into how many parts, and what they are."""
    s, p = plan.schedule, plan.problem
    rounds, threads = -(-p.segment_chunks // s.threads), min(s.threads, p.segment_chunks)
    apart = "" if p.run == p.chunk else f", runs of {p.run} that are {p.segment_chunks * p.run} apart"
    divided = [
        (s.cluster, "block", f"a block's share: {cluster_tile(s, p)} elements"),
        (-(-p.segments // s.cluster), "segment", f"a segment: {p.segment} elements"),
        (rounds, "vector", f"a vector of every thread: {threads * p.chunk} elements"),
        (threads, "thread", f"a vector of a thread: {p.chunk} elements{apart}, {s.vec} in an access"),
    ]
    each = "its share of each" if s.cluster > 1 else "each"
    block = f"a block: {s.rows_per_block} rows side by side, {s.threads} threads for {each}"
    levels, what = [(block, s.rows_per_block, "row")] * (s.rows_per_block > 1), f"a row: D = {p.d} elements"
    for count, part, of_part in divided:
        if count > 1:
            levels.append((what, count, part))
            what = of_part
    return [*levels, (what, p.chunk, "element")]


def row_drawing(plan: Plan) -> str:
    """Each level of a row under the one before, of which it is the first part."""
    parts, step, most = [], 74, 8
    levels = row_levels(plan)
    for n, (label, count, part) in enumerate(levels):
        y, shown = n * step + 18, min(count, most)
        width = WIDTH / shown
        parts.append(_text(0, y, label, "label"))
        for i in range(shown):
            number = count - 1 if i == shown - 1 else i
            between = count > most and i == shown - 2
            name = f"{part}s {number} to {count - 2}" if between else f"{part} {number}"
            parts.append(_box(i * width + 1, y + 8, width - 2, 24, "part first" if i == 0 else "part"))
            parts.append(_text((i + 0.5) * width, y + 25, name, "", "middle"))
        if n + 1 < len(levels):
            parts += [_line(1, y + 33, 1, y + 60, "zoom"), _line(width - 1, y + 33, WIDTH - 1, y + 60, "zoom")]
    return _svg(len(levels) * step - 14, "; ".join(f"{a}: {n} times {b}" for a, n, b in levels), parts)


# ---- where values live ----


def kernel_drawing(kernel: Kernel, plan: Plan) -> str:
    """A line for each value, in the columns of a kernel's phases: a bar for each place where it lives."""
    found = lives(kernel, plan)
    first = int(min((begin for stays in found.values() for _, begin, _ in stays), default=0))
    heads, left, row, top = columns(kernel)[first:], 210.0, 24, 34
    width, height = (WIDTH - left) / len(heads), top + row * len(found)
    parts = [_text(left + (n + 0.5) * width, 20, head, "label", "middle") for n, head in enumerate(heads)]
    parts += [_line(left + n * width, top - 4, left + n * width, height, "grid") for n in range(len(heads) + 1)]
    for n, (name, stays) in enumerate(found.items()):
        y = top + n * row
        parts.append(_text(left - 10, y + 15, name, "value", "end"))
        for level, begin, end in stays:
            x, long = left + (begin - first) * width, (end - begin) * width
            parts.append(_box(x + 1, y + 4, long - 2, row - 8, CLASSES[level], f"{name}: {level}"))
    return _svg(height, f"where the values of {kernel.role} live, phase by phase", parts)


# ---- the times of schedules ----


def trial_drawing(trials: Sequence[Mapping[str, Any]], chosen: str) -> str:
    """Measured times over predicted ones, in us, on logarithmic axes; empty without measured ones."""
    points = sorted((t["measured_us"], t["predicted_us"], t["schedule"]) for t in trials if t["measured_us"])
    if not points:
        return ""
    height, left, right, bottom = 420.0, 60.0, WIDTH - 10.0, 44.0
    shown = [us for *times, _ in points for us in times]
    low, high = min(shown) / 1.1, max(shown) * 1.1

    def share(us: float) -> float:
        return math.log(us / low) / math.log(high / low)

    def up(us: float) -> float:
        return 20 + (1 - share(us)) * (height - bottom - 20)

    def along(us: float) -> float:
        return left + share(us) * (right - left)

    parts = [_text(0, 10, "measured time in us", "label")]
    parts.append(_text(right, height - 6, "predicted time in us", "label", "end"))
    for tick in _ticks(low, high):
        parts.append(_line(left, up(tick), right, up(tick), "grid"))
        parts.append(_text(left - 8, up(tick) + 4, f"{tick:g}", "label", "end"))
        parts.append(_text(along(tick), height - bottom + 18, f"{tick:g}", "label", "middle"))
    parts.append(_line(along(low), up(low), along(high), up(high), "zoom"))
    for us, x, schedule in sorted(points, key=lambda point: point[2] == chosen):
        kind, radius = ("chosen", 6) if schedule == chosen else ("trial", 4)
        about = f"<title>{escape(f'{schedule}: {us:.2f} us')}</title>"
        parts.append(f'<circle cx="{along(x):.1f}" cy="{up(us):.1f}" r="{radius}" class="{kind}">{about}</circle>')
    return _svg(height, f"measured times of {len(points)} schedules; the chosen one is marked", parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, few of them."""
    steps = (1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    return [m * 10.0**e for e in range(-2, 7) for m in steps if low <= m * 10.0**e <= high]
