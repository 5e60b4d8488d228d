"""Random row graphs, schedules and inputs out of one source of random numbers: a seed, or what hypothesis draws.

A recipe is a list of instructions; a definition replays it. An operand is a number, taken modulo what there is
to choose from, so that a recipe from which instructions were removed is a recipe, too.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lngen.compiler.devices import capability
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import BF16, F16, F32, F64, WIDE, D, DType, Graph, M, S, Value
from lngen.compiler.ir.functions import ULPS
from lngen.compiler.ir.numerics import Array, round_to
from lngen.compiler.ir.places import upstream
from lngen.compiler.problem import Problem, Schedule, is_legal, problem
from lngen.compiler.problem.footprint import vectors_per_thread
from lngen.compiler.problem.schedule import exists
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import Spec

KINDS = (
    "forward", "columns", "backward", "double", "special", "maxima", "wide", "many", "middle", "segments", "numbers",
    "blocks",
)  # fmt: skip
AXES = {"MD": (M, D), "M": (M,), "D": (D,), "": ()}
NARROW = (F16, BF16, F32)
NUMBERS = (0.0, -0.0, 1.0, -1.5, 0.1, 2.0**-140, 1e30, 65504.0)
ODD_NUMBERS = (float("inf"), float("-inf"), float("nan"), 1e300, 5e-324)
# Unrolled elements times equations: what a compile and a run may cost.
MOST_WORK = 3000

FUNCTIONS = tuple(ULPS)
PLAIN = (
    "add", "sub", "mul", "mul", "div", "quotient", "neg", "fma", "maximum", "relu", "select_eq", "select_gt",
    "root", "rroot", "sqrt", "minimum", "abs", "rint", "detach", "stop_gradient", "weighted", "clamp",
    "where_gt", "function", "function", "function",
)  # fmt: skip
RARE = ("copysign", "rsqrt", "const", "const", "size", "cast", "cast", "expand", "ties")
FOLDS = ("sum_d", "mean_d", "max_d", "dot_d")
COLUMNS = ("sum_m", "mean_m", "dot_m", "max_m")
TOTALS = ("sum", "mean", "max", "dot")
SEGMENTS = ("segment_sum", "segment_dot", "segment_size", "sum_s")
BLOCKS = ("block_sum", "block_mean", "block_max", "block_max")
MEETING = ("add", "sub", "mul", "fma", "maximum", "select_gt")
# What a schedule is chosen by, in this order.
CHOICES = (
    "form", "cluster", "threads", "rows_per_block", "prefetch", "blocks_per_sm", "stages", "tma_store",
    "cached_weights", "single_launch", "row_in_registers",
)  # fmt: skip
ARCHES = ("sm_90", "sm_90", "sm_75", "sm_120")


@dataclass(frozen=True)
class Input:
    """A parameter; ``direct``: used as it is if it has the compute dtype, not through a cast."""

    name: str
    dtype: DType
    axes: str
    direct: bool = False


@dataclass(frozen=True)
class Step:
    """An instruction: an op, its operands, and what else it needs."""

    op: str
    picks: tuple[int, ...] = (0, 0, 0)
    value: float = 0.0
    dtype: DType = F32
    pool: str = "rows"


@dataclass(frozen=True)
class Result:
    """A value that is returned, rounded to ``dtype``; or kept as it is, as a statistic."""

    pick: int
    dtype: DType
    pool: str = "rows"
    statistic: bool = False


@dataclass(frozen=True)
class Recipe:
    """A forward graph; ``blocks``: features of the blocks of a row."""

    compute: DType
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[Result, ...]
    blocks: tuple[int, ...] = ()

    def __call__(self, b: GraphBuilder) -> None:
        """Describe the graph."""
        _Kitchen(self, b).cook()


@dataclass(frozen=True)
class Case:
    """A graph, how it is compiled and what it is run on; ``schedule`` and ``vec`` choose among the legal ones."""

    recipe: Recipe
    direction: str
    d: int
    rows: int
    schedule: int
    vec: int
    arch: str
    numbers: str
    seed: int
    pad: int
    order: int

    def spec(self) -> Spec:
        """The spec; a backward is of some outputs, with respect to every input that one of all depends on."""
        dtype = self.recipe.inputs[0].dtype
        forward = Spec(Definition("random", self.recipe), "fwd", self.d, dtype, dtype, dtype)
        if self.direction == "fwd":
            return forward
        graph = forward.forward()
        outputs = forward.differentiated
        live = upstream(graph.eqns, [r for r in graph.results if r.name in outputs])
        rng = random.Random(self.seed)
        of = sorted(rng.sample(range(len(outputs)), rng.randint(1, len(outputs))))
        return replace(
            forward,
            direction="bwd",
            wrt=tuple(p.name for p in graph.params if p in live),
            of=None if len(of) == len(outputs) else tuple(outputs[n] for n in of),
        )

    def plan_schedule(self, graph: Graph) -> Schedule | None:
        """A legal schedule; None if none is cheap enough to run here."""
        facts = problem(graph, self.d)
        work = len(graph.eqns) * facts.chunk
        listed = [
            s for s in _space(facts) if vectors_per_thread(s, facts) * work <= MOST_WORK and runs_on(s, self.arch)
        ]
        if not listed:
            return None
        rng = random.Random(self.schedule)
        for field in CHOICES:  # each value as likely, however many have it
            value = rng.choice(sorted({getattr(s, field) for s in listed}))
            listed = [s for s in listed if getattr(s, field) == value]
        chosen = listed[0]
        if chosen.grid:  # few owners take many rows each
            fewer = replace(chosen, grid=rng.choice([1, 1, 2, 3, chosen.grid]))
            narrow = replace(fewer, rows_per_block=max(1, 32 // chosen.threads))
            chosen = narrow if rng.random() < 0.5 and is_legal(narrow, facts) else fewer
        narrower = [replace(chosen, vec=1 << n) for n in range(facts.run.bit_length())]
        narrower = [s for s in narrower if is_legal(s, facts)]
        return narrower[-1 - self.vec % len(narrower)]

    def inputs(self, graph: Graph) -> dict[str, Array]:
        """Every input of ``graph``."""
        rng = np.random.default_rng(self.seed)
        return {p.name: numbers(rng, p, self.rows, self.d, self.numbers) for p in graph.params}

    def strides(self, graph: Graph, schedule: Schedule) -> dict[str, int]:
        """Row strides: a gap follows a tensor's row, or not; none a ragged row, 16 bytes or more a bulk one."""
        wide = [v for v in (*graph.params, *graph.results) if v.type.axes == (M, D)]
        step = {"tma_unaligned": 0, "tma": 8}.get(schedule.form, schedule.vec)
        return {v.name: self.d + step * (self.pad * (n + 1) % 4) for n, v in enumerate(wide)}


def runs_on(schedule: Schedule, arch: str) -> bool:
    """True if its instructions, and clusters of its size, exist there."""
    return exists(schedule, capability(arch))


@lru_cache(maxsize=256)
def _space(facts: Problem) -> list[Schedule]:
    return space(facts)


class _Kitchen:
    """Replays a recipe."""

    def __init__(self, recipe: Recipe, b: GraphBuilder) -> None:
        self.recipe, self.b = recipe, b
        self.rows: list[Value] = []
        self.columns: list[Value] = []
        self.numbers: list[Value] = []

    def cook(self) -> None:
        """Inputs, steps, results."""
        b, to = self.b, self.recipe.compute
        self.blocks = [b.axis(f"B{n}", D / n) for n in self.recipe.blocks]
        for p in self.recipe.inputs:
            v = b.param(p.name, p.dtype, *AXES[p.axes])
            v = v if p.direct and p.dtype is to else b.cast(f"{p.name}32", v, to=to)
            self.rows.append(v)
            if p.axes in ("D", ""):
                self.columns.append(v)
        for step in self.recipe.steps:
            pool = {"columns": self.columns, "numbers": self.numbers}.get(step.pool, self.rows)
            out = self._total(step) if step.op in TOTALS else self._step(step, pool)
            if out is not None and step.op in TOTALS:
                self.numbers.append(out)
            elif out is not None:
                (self.columns if step.op in COLUMNS and step.pool == "rows" else pool).append(out)
        for n, result in enumerate(self.recipe.results):
            pool = self._returnable(result.pool)
            if not pool:
                continue
            v = pool[-1 - result.pick % len(pool)]
            if not result.statistic:
                b.results.append(b.cast(f"y{n}", v, to=result.dtype))
            elif v not in b.statistics:
                b.statistic(v)
        if not b.results:
            b.results.append(b.cast("y", [v for v in self.rows if S not in v.type.axes][-1], to=to))

    def _returnable(self, pool: str) -> list[Value]:
        """What kernels can return: with rows, or [D] and made of a column sum, or a number."""
        if pool == "numbers":
            return [v for v in (*self.rows, *self.columns, *self.numbers) if not v.type.axes and v not in self.b.params]
        if pool == "rows":
            return [v for v in self.rows if M in v.type.axes and S not in v.type.axes]
        sums = {e.out for e in self.b.eqns if e.op.startswith("reduce_") and e.attr("axis") is M}
        return [v for v in self.columns if v.type.axes == (D,) and sums & upstream(self.b.eqns, [v])]

    def _step(self, s: Step, pool: list[Value]) -> Value | None:
        b = self.b
        if not pool:
            return None
        first = pool[-1 - s.picks[0] % len(pool)]
        alike = [v for v in pool if v.type.dtype is first.type.dtype]
        x, y, z = first, *(alike[-1 - n % len(alike)] for n in s.picks[1:])
        dtype = first.type.dtype
        match s.op:
            case "function":  # exp, log, ...
                return b.emit(FUNCTIONS[s.picks[1] % len(FUNCTIONS)], "f", (x,)) if dtype is F32 else None
            case "copysign":
                return b.copysign("signed", x, y) if dtype is F32 else None
            case "clamp":
                low, high = sorted((s.value if s.value == s.value else 0.0, 1.0))
                return b.clamp("clamped", x, low=low, high=high)
            case "where_gt":
                return b.where_gt("chosen", x, y, z, x)
            case "add" | "sub" | "mul" | "div" | "maximum" | "minimum" | "weighted":
                return b.emit(s.op, s.op, (x, y))
            case "detach":  # what is detached has to cancel
                kept = b.detach("kept", y)
                return b.sub("less", b.add("more", x, kept), kept)
            case "neg" | "sqrt" | "rsqrt" | "relu" | "abs" | "rint" | "stop_gradient":
                return b.emit(s.op, s.op, (x,))
            case "select_eq" | "select_gt":
                return b.emit(s.op, "chosen", (x, y, z))
            case "fma":
                return b.fma("fused", x, y, z) if dtype is F32 else None
            case "quotient" | "root" | "rroot":
                above = b.add("above", b.mul("square", y, y), b.const("one", 1.0, dtype))
                return b.div("ratio", x, above) if s.op == "quotient" else b.emit(s.op[:-4] + "sqrt", "root", (above,))
            case "const":
                fits = dtype is F64 or not 1e39 < abs(s.value) < float("inf")
                return b.const("number", s.value if fits else 1e38, dtype)
            case "size":
                return b.size("count", M if s.picks[1] % 2 else D, dtype)
            case "cast":
                back = s.dtype if s.dtype in (F32, F64) and s.picks[1] % 4 == 0 else dtype
                return b.cast("back", b.cast("rounded", x, to=s.dtype), to=back)
            case "expand" if not any(a.is_declared for a in x.type.axes):
                missing = [a for a in WIDE if a not in x.type.axes]
                return b.expand("spread", x, axis=missing[s.picks[1] % len(missing)]) if missing else None
            case "ties" if D in x.type.axes and M in x.type.axes:
                return b.select_eq("largest", x, b.reduce_max("most", x, axis=D), y)
            case "sum_d" | "mean_d" | "max_d" if D in x.type.axes:
                reduce = {"sum": b.reduce_sum, "mean": b.reduce_mean, "max": b.reduce_max}[s.op[:-2]]
                return reduce(s.op, x, axis=D)
            case "dot_d" if dtype is F32 and D in (*x.type.axes, *y.type.axes):
                return b.reduce_dot(s.op, x, y, axis=D)
            case "block_sum" | "block_mean" | "block_max":
                wide = [v for v in pool if v.type.axes == (M, D)]
                if wide:
                    reduce = {"sum": b.sum, "mean": b.mean, "max": b.max}[s.op[6:]]
                    to = self.blocks[s.picks[1] % len(self.blocks)]
                    return reduce(wide[-1 - s.picks[0] % len(wide)], to=to)
            case "segment_sum" | "segment_dot" | "sum_s":
                return self._of_segments(s, alike)
            case "segment_size":
                return b.size("length", D, dtype, per=S)
            case "dot_m":
                wide = [v for v in pool if v.type.axes == (M, D) and v.type.dtype is F32]
                other = [v for v in pool if v.type.dtype is F32]
                if wide:
                    left, right = wide[-1 - s.picks[0] % len(wide)], other[-1 - s.picks[1] % len(other)]
                    return b.reduce_dot(s.op, left, right, axis=M)
            case "sum_m" | "mean_m" | "max_m":
                wide = [v for v in pool if v.type.axes == (M, D)]
                if wide:
                    reduce = {"sum": b.reduce_sum, "mean": b.reduce_mean, "max": b.reduce_max}[s.op[:-2]]
                    return reduce(s.op, wide[-1 - s.picks[0] % len(wide)], axis=M)
        return None

    def _total(self, s: Step) -> Value | None:
        """A reduction of an [M] or [D] value to a number, which other numbers of the same axis may scale."""
        b = self.b
        axis = M if s.picks[1] % 2 else D
        vectors = [v for v in (*self.rows, *self.columns) if v.type.axes == (axis,)]
        if not vectors:
            return None
        x = vectors[-1 - s.picks[0] % len(vectors)]
        alike = [v for v in (*vectors, *self.numbers) if v.type.dtype is x.type.dtype]
        y = alike[-1 - s.picks[2] % len(alike)]
        if s.op == "dot":
            return b.reduce_dot("dot", x, y, axis=axis) if x.type.dtype is F32 else None
        x = b.sub("far", x, y) if s.picks[1] % 3 == 0 else x
        return {"sum": b.reduce_sum, "mean": b.reduce_mean, "max": b.reduce_max}[s.op](s.op, x, axis=axis)

    def _of_segments(self, s: Step, pool: list[Value]) -> Value | None:
        """Sums of each segment of a row, or over the segments of a row; None without an operand."""
        axes = (M, S) if s.op == "sum_s" else (M, D)
        wide = [v for v in pool if v.type.axes == axes]
        if not wide or (s.op == "segment_dot" and wide[0].type.dtype is not F32):
            return None
        x = wide[-1 - s.picks[0] % len(wide)]
        if s.op == "segment_dot":
            y = x if s.picks[1] % 2 else pool[-1 - s.picks[1] % len(pool)]
            return self.b.reduce_dot("squares", x, y, axis=D, to=S)
        if s.op == "segment_sum":
            return self.b.reduce_sum("parts", x, axis=D, to=S)
        return self.b.reduce_sum("joined", x, axis=S)


def draw_case(rng: random.Random, kind: str) -> Case:
    """A case of a kind."""
    recipe = _recipe(rng, kind)
    if kind == "wide":
        d = rng.choice([4096, 4100, 5001, 8192, 8200, 20000, 20001, 16385])
        rows = rng.randint(0, 3)
    elif kind == "segments":
        d, rows = rng.choice([8200, 12296, 16385, 20001, rng.randint(1, 300)]), rng.randint(0, 3)
    elif kind == "blocks":  # some lie across segments of 4160, 4128, 2080, 2064 features
        d, rows = rng.choice([8320, 8256, 4160, 4128, 480, 768]), rng.randint(0, 5)
        sizes = [n for n in range(8, 264, 8) if d % n == 0]
        recipe = replace(recipe, blocks=tuple(rng.sample(sizes, rng.randint(1, 2))))
    elif kind == "middle":
        d, rows = rng.choice([512, 1024, rng.randint(260, 2000), 8 * rng.randint(33, 250)]), rng.randint(0, 9)
    elif kind == "many":
        d, rows = rng.randint(1, 70), rng.choice([133, 265, 300, 517])
    else:
        d = rng.choice([1, 2, 3, 5, 8, 16, 31, 32, 64, 128, 256, rng.randint(1, 300), rng.randint(1, 300)])
        rows = rng.choice([0, 1, 2, 3, rng.randint(0, 40), rng.randint(0, 40)])
    direction = (
        "bwd" if kind == "backward" or (kind in ("wide", "many", "double", "middle") and rng.random() < 0.4) else "fwd"
    )
    numbers = rng.choice(["odd", "edge"] if kind == "special" else ["normal", "normal", "small", "zeros"])
    return Case(
        recipe, direction, d, rows, rng.randrange(1 << 20), rng.choice([0, 0, 1, 2, 3, 4]), rng.choice(ARCHES),
        numbers, rng.randrange(1 << 30), rng.choice([0, 0, 1, 3]), rng.randrange(4),
    )  # fmt: skip


def _recipe(rng: random.Random, kind: str) -> Recipe:
    compute = F64 if kind == "double" or rng.random() < 0.05 else F32
    dtypes = (F64, F64, *NARROW) if compute is F64 else NARROW
    shapes = ["MD"] * rng.randint(1, 3) + ["M"] * rng.randint(0, 2) + ["D"] * rng.randint(0, 2)
    shapes += [""] * (rng.random() < 0.3)
    one = rng.choice(dtypes)
    mixed = rng.random() < 0.4
    letters = iter("xzuvwghpqe")
    inputs = tuple(Input(next(letters), rng.choice(dtypes) if mixed else one, s, rng.random() < 0.5) for s in shapes)
    columns = kind in ("columns", "many", "numbers") or rng.random() < {"wide": 0.5, "segments": 0}.get(kind, 0.25)
    words = (
        [*PLAIN * 2, *RARE, *FOLDS * 3]
        + list(COLUMNS) * 4 * columns
        + ["max_d", "maximum", "ties"] * 6 * (kind == "maxima")
        + list(SEGMENTS) * 6 * (kind == "segments")
    )
    steps = [_step(rng, rng.choice(words), dtypes) for _ in range(rng.randint(2, 5 if kind == "wide" else 11))]
    for op in {"segments": SEGMENTS * 2, "blocks": BLOCKS}.get(kind, ()):
        steps += [_step(rng, op, dtypes), replace(_step(rng, rng.choice(MEETING), dtypes), picks=(0, _recent(rng), 1))]
    steps += [_step(rng, "sum_m", dtypes) for _ in range(columns)]
    steps += [replace(_step(rng, rng.choice(PLAIN), dtypes), pool="columns") for _ in range(2 * columns)]
    for op in [rng.choice(TOTALS) for _ in range(rng.randint(1, 6))] * (kind == "numbers"):
        steps += [_step(rng, op, dtypes), replace(_step(rng, rng.choice(PLAIN), dtypes), pool="numbers")]
    steps = [replace(s, pool="columns") if s.op not in COLUMNS and rng.random() < 0.03 else s for s in steps]
    results = [Result(_recent(rng), rng.choice(dtypes)) for _ in range(rng.choice([1, 1, 2, 3]))]
    if columns:
        lone = rng.random() < 0.3 and kind != "backward"
        results = [] if lone else results
        results += [Result(_recent(rng), rng.choice(dtypes), "columns") for _ in range(rng.randint(1, 2))]
    results += [Result(_recent(rng), rng.choice(dtypes), "numbers") for _ in range(2 * (kind == "numbers"))]
    results += [Result(_recent(rng), F32, statistic=True) for _ in range(rng.choice([0, 0, 1, 2]))]
    return Recipe(compute, inputs, tuple(steps), tuple(results))


def _step(rng: random.Random, op: str, dtypes: Sequence[DType]) -> Step:
    value = rng.choice(NUMBERS if rng.random() < 0.8 else ODD_NUMBERS)
    pool = "columns" if op in COLUMNS and rng.random() < 0.03 else "rows"
    return Step(op, (_recent(rng), _recent(rng), _recent(rng)), value, rng.choice((*dtypes, F64)), pool)


def _recent(rng: random.Random) -> int:
    """A choice that favours what was made last."""
    return min(rng.randrange(12), rng.randrange(12))


def numbers(rng: np.random.Generator, value: Value, rows: int, d: int, kind: str) -> Array:
    """An array for ``value``: normal numbers, few small ones (ties), zeros of both signs, extremes, or all of it."""
    shape = value.type.shape(rows, d)
    base = rng.normal(0.3, 1.0, shape)
    tiny = {F16: 6e-8, BF16: 9.2e-41, F32: 1.4e-45, F64: 5e-324}[value.type.dtype]
    if kind == "small":
        base = rng.integers(-2, 3, shape) * 0.5
    elif kind == "zeros":
        base = np.where(rng.random(shape) < 0.8, np.where(rng.random(shape) < 0.8, -0.0, 0.0), base)
    elif kind in ("odd", "edge"):
        extremes = [0.0, -0.0, tiny, -tiny, 3 * tiny, 1e4, -6e4, 1e-4]
        extremes += [np.inf, -np.inf, np.nan] if kind == "odd" else [3e38, -3e38]
        base = np.where(rng.random(shape) < rng.choice([0.01, 0.1, 0.5]), rng.choice(extremes, shape), base)
    with np.errstate(all="ignore"):
        return round_to(np.asarray(base), value.type.dtype).reshape(shape)


def smaller(case: Case) -> Iterator[Case]:
    """Cases like this one with something left out, the largest cuts first."""
    r = case.recipe
    for rows in {0, 1, case.rows // 2, case.rows - 1}:
        if 0 <= rows < case.rows:
            yield replace(case, rows=rows)
    for field, plain in (("pad", 0), ("order", 0), ("vec", 0), ("arch", "sm_90"), ("numbers", "normal")):
        if getattr(case, field) != plain:
            yield replace(case, **{field: plain})
    for d in {1, case.d // 2, case.d - 1}:
        if 0 < d < case.d:
            yield replace(case, d=d)
    for name in ("steps", "results", "inputs"):
        items = getattr(r, name)
        for n in range(len(items)):
            yield replace(case, recipe=replace(r, **{name: items[:n] + items[n + 1 :]}))
