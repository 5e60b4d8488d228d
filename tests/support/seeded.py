"""What must not depend on the hash seed, as hashes: kernels, plans, graphs of every stage, rankings and names."""

import hashlib
from collections.abc import Iterator

from lngen.compiler.emit import emit
from lngen.compiler.lower import lower
from lngen.compiler.problem import problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import parse_spec
from lngen.packs import catalog
from own_graphs import own
from plans import PLANS, plan_of
from test_identity import negated, of

# Beside the golden set: one spec per option that adds to a name or a graph.
OTHERS = (
    "layernorm.bwd:d=96,dtype=f64",
    "layernorm.bwd:d=4096,dtype=bf16,save=none",
    "rmsnorm.bwd:d=2048,dtype=f16,beta=yes,wrt=x+gamma",
    "layernorm.fwd:d=3,dtype=f32,gamma=no,eps=1e-06",
)
OWN = ("colscale", "quadratic", "norm_of_norm")
SCHEDULED = len(PLANS) + len(OTHERS)


def texts() -> Iterator[str]:
    """Golden kernels, those of every structure, others under the model's own choice, graphs and a name of one's own."""
    yield from (name + text for name, text in catalog.sources().items())
    yield from (emit(plan_of(*args)) for args in PLANS.values())
    for text in OTHERS:
        spec = parse_spec(text)
        listed = ranked(problem(spec.graph(), spec.d))
        plan = lower(spec, listed[0])
        yield "\n".join(map(str, (plan.name, emit(plan), plan, *spec.trace().values(), *listed)))
    yield from (str(own(name, "bwd", d=64, dtype="f32").graph()) for name in OWN)
    yield str(of(negated, gamma=True))


def hashes() -> list[str]:
    """A hash of each text."""
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts()]
