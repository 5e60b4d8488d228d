"""Specs: what a kernel is specialised on, and the one grammar for it."""

from lngen.compiler.spec.parse import BACKWARD_KEYS, KEYS, SAVES, make_spec, parse_spec
from lngen.compiler.spec.spec import LONGEST_SLUG, Spec
