"""Inputs of graphs with sets of rows: so many sets of so many rows."""

from typing import Any

from lngen.compiler.graphs import GRAPHS
from lngen.compiler.spec import Spec
from lngen.proof.check.inputs import random_inputs

Array = Any

OF_SETS = {name for name in GRAPHS if name.startswith("ada_")}


def set_inputs(spec: Spec, per_set: int, sets: int, seed: int = 0) -> dict[str, Array]:
    """The spec's inputs by name; those that a backward takes from forward are computed by forward."""
    return random_inputs(spec, per_set * sets, seed, sets=sets)
