"""Colours, marks, names and order of the providers in figures."""

from __future__ import annotations

from lngen.bench.records import OWN, is_ceiling
from lngen.bench.tasks import CEILINGS, OVERLAPPED

INK, GRID, TARGET = "#333333", "#e4e4e4", "#7a7a7a"
CEILING = "#222222"
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "both": "forward and backward"}
OVERLAPPING_MARK = "|"  # of lngen's overlapping calls, on its bar
COLOURS = {
    **dict.fromkeys(CEILINGS, CEILING),
    **dict.fromkeys([name + OVERLAPPED for name in CEILINGS], "#8a8a8a"),
    "lngen": "#0b5fa5",
    "lngen-overlapped": "#7fb2e0",
    "lngen-serial": "#7fb2e0",  # in files of earlier versions: lngen's calls in turn, where "lngen" overlaps them
    "torch": "#d55e00",
    "compile": "#e69f00",
    "liger": "#009e73",
    "quack": "#cc79a7",
    "flash-attn": "#8c510a",
    "mamba": "#b8860b",
    "flashinfer": "#56b4a9",
    "apex-fast": "#7b5ea7",
    "apex": "#a08fc0",
}
MARKERS = {
    "torch": "s",
    "compile": "D",
    "liger": "^",
    "quack": "v",
    "flash-attn": "<",
    "mamba": ">",
    "flashinfer": "h",
    "apex-fast": "P",
    "apex": "X",
}
NAMES = {
    **{name + OVERLAPPED: f"{name}, overlapped (ceiling)" for name in CEILINGS},
    "lngen-overlapped": "lngen, overlapped",
    "lngen-serial": "lngen, in turn",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "mamba": "Mamba",
    "flashinfer": "FlashInfer",
    "apex": "Apex",
    "apex-fast": "Apex fast",
}


def order(name: str) -> tuple[int, str]:
    """A sort key of providers: lngen first, peers in the order of their colours, the ceilings last."""
    places = {n: i for i, n in enumerate(COLOURS)}
    return (0 if name.startswith(OWN) else 99 if is_ceiling(name) else places.get(name, 50), name)
