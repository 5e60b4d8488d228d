"""How many elements of a batch differ from those of another batch, or of another run: lngen beside its peers.

A run takes x and dy [M, D] with gamma and beta [D], all bf16, and gives y, dx, dgamma and dbeta as NumPy arrays. Rows
(y, dx) are compared with the same rows of the training batch, sums (dgamma, dbeta) with those of the same batch.
"""

from __future__ import annotations

import importlib
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec
from lngen.lab.bench.figures import COLOURS, GRID, INK, MARKERS, NAMES, OTHER, STYLE, check_plot, save, sign
from lngen.lab.bench.peers import LIGER, Call, own_form
from lngen.lab.bench.summary import unique
from lngen.launch.runtime.launcher import device_count, device_name
from lngen.launch.runtime.numpy_arrays import raw
from lngen.proof.check.inputs import differing
from lngen.version import __version__

Arrays = Mapping[str, Array]
Run = Callable[[Arrays], Arrays]
ROWS, SUMS = ("y", "dx"), ("dgamma", "dbeta")
BETWEEN = "then"  # one peer, then another
THREADS = (1, 2)  # of PyTorch on a CPU
CALLS = 64  # batches of one size


@dataclass(frozen=True)
class Implementation:
    """An implementation: each of ``runs`` has to give the bits of ``want``.

    calls  how many batches of one size are compared, at places spread over the training batch
    whole  ``runs`` compute the training batch as well
    """

    name: str
    shown: str
    want: Run
    runs: Sequence[Run]
    calls: int = CALLS
    whole: bool = True


@dataclass(frozen=True)
class Line:
    """One comparison: ``differ`` of ``elements``, over all runs of a side and all its batches of one size."""

    graph: str
    what: str
    batch: int
    name: str
    shown: str
    elements: int
    differ: int

    @property
    def share(self) -> float:
        """The elements that differ, from 0 to 1."""
        return self.differ / self.elements


def compare(side: Implementation, graph: str, inputs: Arrays, batches: Sequence[int]) -> Iterator[Line]:
    """The rows in batches of every size, and the sums of the largest and of the training batch."""
    rows, training = len(inputs["x"]), side.want(inputs)
    for batch in unique([*batches, *([rows] if side.whole else [])]):
        elements, differ = Counter[str](), Counter[str]()
        for number, at in enumerate(_places(rows, batch, side.calls)):
            part = {n: a[at] if a.ndim == 2 else a for n, a in inputs.items()}
            want = {n: training[n][at] for n in ROWS}
            if number == 0 and batch in (max(batches), rows):
                want |= {n: a for n, a in side.want(part).items() if n in SUMS}
            for run in side.runs:
                got = run(part)
                elements.update({n: a.size for n, a in want.items()})
                differ.update({n: differing(got[n], a) for n, a in want.items()})
        for names in (ROWS, SUMS):
            if what := [n for n in names if n in elements]:
                counts = (sum(c[n] for n in what) for c in (elements, differ))
                yield Line(graph, ", ".join(what), batch, side.name, side.shown, *counts)


def _places(rows: int, batch: int, calls: int) -> list[slice]:
    """Where the batches of one size lie in the training batch."""
    calls = 1 if batch == rows else calls
    starts = ((2 * n + 1) * (rows - batch) // (2 * calls) for n in range(calls))
    return [slice(start, start + batch) for start in starts]


def table(lines: Sequence[Line]) -> str:
    """A line of text for each comparison."""
    form = "{:10} {:14} {:>6}  {:26} {:>11} {:>10}".format
    rows = (form(x.graph, x.what, x.batch, x.shown, f"{x.elements:,}", f"{x.differ:,}") for x in lines)
    return "\n".join([form("graph", "what", "batch", "computed by", "elements", "differ"), *rows])


def origin() -> str:
    """Where this runs, and which versions."""
    where = device_name(0) if device_count() else f"{platform.machine()} CPU, lngen's PTX on NumPy"
    peers = [f"{name} {version(name)}" for name in ("torch", "liger-kernel") if find_spec(name.replace("-", "_"))]
    return ", ".join([where, f"lngen {__version__}", *peers])


# ---- peers ----


def peers(spec: Spec, compiled: bool = False) -> list[Implementation]:
    """PyTorch, and on a GPU Liger, as far as they are installed; ``compiled``: torch.compile too.

    A training program may compute by one and its server by another, so PyTorch is also compared with each other peer.
    """
    own = own_form(spec) if find_spec("torch") else None
    if own is None:
        return []
    import torch

    gpu = device_count() > 0 and torch.cuda.is_available()
    eager, again = (_run(own, gpu, 0 if gpu else threads) for threads in THREADS)
    shown = "torch" if gpu else f"torch, {' and '.join(map(str, THREADS))} threads"
    sides = [Implementation("torch", shown, eager, [again])]
    others: dict[str, Call] = {}
    if compiled:
        torch.compiler.reset()
        others["compile"] = torch.compile(own, dynamic=False)
    if gpu and LIGER.available() and LIGER.covers(spec):
        others["liger"] = _liger(spec)
    for name, call in others.items():
        run = _run(call, gpu, 0 if gpu else THREADS[0])
        sides.append(Implementation(name, NAMES[name], run, [run]))
        sides.append(Implementation(name, f"torch, {BETWEEN} {NAMES[name]}", eager, [run]))
    return sides


def _liger(spec: Spec) -> Call:
    member = LIGER.members[spec.definition.name]
    module = importlib.import_module(member.module)
    return lambda tensors: (member.call(module, tensors, spec),)


def _run(forward: Call, gpu: bool, threads: int) -> Run:
    """Forward and, by autograd, backward; ``threads`` 0: as many as there are."""
    import torch

    def tensor(a: Array) -> Any:
        t = torch.from_numpy(raw(a).view(np.int16).copy()).view(torch.bfloat16)
        return t.cuda() if gpu else t

    def run(inputs: Arrays) -> Arrays:
        leaves = {n: tensor(a).requires_grad_() for n, a in inputs.items() if n != "dy"}
        with _threads(threads):
            y = forward(leaves)[0]
            gradients = torch.autograd.grad(y, [*leaves.values()], tensor(inputs["dy"]))
        results = {"y": y.detach(), **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}
        return {n: a.view(torch.int16).cpu().numpy().view(inputs["x"].dtype) for n, a in results.items()}

    return run


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- the figure ----


def draw(lines: Sequence[Line], title: str, origin: str, path: Path) -> None:
    """A panel for each graph, a row for each comparison: the share of elements that differ; errors as of ``plot``."""
    matplotlib, figures = check_plot(path)
    graphs, sides = unique(x.graph for x in lines), {x.shown: x.name for x in lines}
    labels = sorted(unique(map(_label, lines)))
    with matplotlib.rc_context(STYLE):
        height = max(3.0, 1.5 + 0.13 * len(labels) * (len(sides) + 0.5))
        figure = figures.Figure(figsize=(11.0, height), layout="constrained")
        panels = figure.subplots(1, len(graphs), sharey=True, squeeze=False)[0]
        for axes, graph in zip(panels, graphs, strict=True):
            for number, (shown, name) in enumerate(sides.items()):
                mine = [x for x in lines if (x.graph, x.shown) == (graph, shown)]
                low = (number - (len(sides) - 1) / 2) * 0.7 / len(sides)
                _marks(axes, name, shown, [(x.share, labels.index(_label(x)) + low) for x in mine])
            axes.set_title(graph, loc="left", fontsize=9)
            _axis(axes, [text for *_, text in labels])
        figure.get_layout_engine().set(wspace=0.06)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(sides), frameon=False
        )
        sign(figure, origin)
        save(figure, path)


def _label(line: Line) -> tuple[bool, int, str]:
    """What a row of the figure is called, behind its place: rows before sums, small batches first."""
    sums = line.what != ", ".join(ROWS)
    return sums, line.batch, f"{', '.join(SUMS) if sums else line.what}, batch of {line.batch:,}"


def _marks(axes: Any, name: str, shown: str, points: Sequence[tuple[float, float]]) -> None:
    """A side: hollow marks where two peers are compared, and a number where a bit differs."""
    colour, marker = COLOURS.get(name, OTHER), MARKERS.get(name, "o")
    look: dict[str, Any] = {
        "color": colour,
        "markerfacecolor": "white" if BETWEEN in shown else colour,
        "markersize": 6,
    }
    look |= {"zorder": 4, "clip_on": False, "in_layout": False}
    shares, places = [share for share, _ in points], [place for _, place in points]
    axes.plot(shares, places, linewidth=0, marker=marker, label=shown, **look)
    for share, place in points:
        if share:
            side, far = ("right", -8) if share > 0.1 else ("left", 8)
            at = {"xytext": (far, 0), "textcoords": "offset points", "ha": side, "va": "center"}
            axes.annotate(f"{100 * share:.2g} %", (share, place), fontsize=8, color=INK, **at)


def _axis(axes: Any, labels: Sequence[str]) -> None:
    """Comparisons from the top down; zero, then shares on a logarithmic scale."""
    axes.set_xscale("symlog", linthresh=1e-6)
    axes.set_xlim(0.0, 1.0)
    ticks = {0.0: "0", 1e-6: "0.0001 %", 1e-4: "0.01 %", 1e-2: "1 %", 1.0: "100 %"}
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, pad=10)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    for place in range(1, len(labels)):
        axes.axhline(place - 0.5, color=GRID, linewidth=0.7)
