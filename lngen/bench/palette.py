"""Colours, marks and names of the providers in figures."""

from __future__ import annotations

from lngen.bench.tasks import CEILINGS, OVERLAPPED

CEILING = "#222222"
COLOURS = {
    **dict.fromkeys(CEILINGS, CEILING),
    **dict.fromkeys([name + OVERLAPPED for name in CEILINGS], "#8a8a8a"),
    "lngen": "#0b5fa5",
    "lngen-serial": "#7fb2e0",
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
    "lngen-serial": "lngen, in turn",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "mamba": "Mamba",
    "flashinfer": "FlashInfer",
    "apex": "Apex",
    "apex-fast": "Apex fast",
}
