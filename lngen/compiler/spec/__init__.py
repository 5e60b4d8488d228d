"""Specs: what a kernel is specialised on, and the one grammar for it."""

from lngen.compiler.spec.parse import BACKWARD_KEYS, DIRECTIONS, KEYS, MAX_D, SAVES, make_spec, parse_spec
from lngen.compiler.spec.spec import LONGEST_SLUG, Spec

__all__ = ["BACKWARD_KEYS", "DIRECTIONS", "KEYS", "LONGEST_SLUG", "MAX_D", "SAVES", "Spec", "make_spec", "parse_spec"]
