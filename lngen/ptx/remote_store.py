"""st.async: a store to another block's shared memory that completes on an mbarrier there.

PTX ISA, Data Movement and Conversion Instructions: st.async. The completion on the mbarrier releases, with the scope of
the cluster, the store and the accesses that are visible to its thread.
"""

from __future__ import annotations

import re

import numpy as np

from lngen.ptx.access import address_of, spread
from lngen.ptx.batch import Batch
from lngen.ptx.bulk import One, agent, memory_operand, single, target
from lngen.ptx.flights import begin
from lngen.ptx.in_flight import Copy
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown
from lngen.ptx.values import DTYPES, UNSIGNED

_FORM = re.compile(
    r"st\.async(?:\.weak)?(?:\.shared::cluster)?\.mbarrier::complete_tx::bytes(?:\.v(?P<v>[24]))?"
    r"\.(?P<t>[bus](?:32|64)|f32|f64)"
)


def async_store_step(program: Program, i: Instruction) -> Step:
    """The step of st.async."""
    m = _FORM.fullmatch(i.opcode)
    if m is None or len(i.operands) != 3:
        raise unknown(i)
    values = i.operands[1].items or (i.operands[1],)
    kind = UNSIGNED[DTYPES[m["t"]].itemsize]
    if len(values) != int(m["v"] or 1):
        raise unknown(i, f"has {len(values)} elements, expected {m['v'] or 1}")
    to, barrier = memory_operand(program, i, i.operands[0]), memory_operand(program, i, i.operands[2])
    sources = [program.source(o, kind, i) for o in values]
    size = kind.itemsize * len(values)

    def step(batch: Batch, lanes: Lanes) -> None:
        columns = [spread(batch.R[s] if a is None else a(batch.R[s]), lanes) for s, a in sources]
        rows = np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)
        there, keys = address_of(batch, *to, lanes), address_of(batch, *barrier, lanes)
        for n, lane in enumerate(lanes.index.tolist()):
            part = slice(n, n + 1)
            where = target(
                batch, i, One(single(lane, lanes.total), there[part], there[part], keys[part], size), size, False
            )
            if where is not None:
                copy = Copy(i, lane, agent(batch, where[1]), rows[n], batch.shared, where[0], releases=True)
                begin(batch, copy, "barrier", where[1])

    return step
