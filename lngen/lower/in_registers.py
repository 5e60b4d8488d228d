"""Rows that stay in registers from load to store: the partials of such a kernel."""

from __future__ import annotations

from dataclasses import replace

from lngen.lower.pieces import COPIED, HELD_COLUMNS, LOADED, files, in_pieces
from lngen.lower.plan import Kernel, Sections
from lngen.schedule import Problem, Schedule, met_numbers, partial_numbers


def in_registers(kernel: Kernel, s: Schedule, p: Problem) -> Kernel:
    """A row kernel whose rows are in registers: its clusters, its partials."""
    if p.column_sums:
        end = "_end_groups_in_turn" if partial_numbers(s, p) else "_end_sums"
        return replace(kernel, sections=Sections(end=files(end, *["_one_launch"] * s.one_launch)))
    meets, shared = met_numbers(s, p) > 0, s.cluster > 1
    # The blocks of a cluster may send to each other once all of them run: rows are asked for before that.
    sections = Sections(
        setup=files(*["_start"] * shared, *["_setup_cluster"] * meets, *["_piece"] * shared),
        held=(*[HELD_COLUMNS] * s.keep, *files(*["_ready_cluster"] * meets)),
        columns=COPIED if s.keep else LOADED,
    )
    return replace(in_pieces(kernel, s, p) if shared else kernel, sections=sections)
