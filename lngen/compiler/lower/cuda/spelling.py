"""The spelling of a nest: how values, statements, loops and reductions are written in CUDA C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lngen.compiler.ir import (
    F32,
    OPS,
    SUMS,
    Axis,
    D,
    DType,
    Eqn,
    Graph,
    Value,
    ctype,
    is_column_fold,
    is_join,
    is_of_halves,
    is_of_table,
    is_over_heads,
    is_over_sets,
    is_segment_size,
    is_segment_sum,
    print_eqn,
)
from lngen.compiler.lower.arguments import Argument
from lngen.compiler.lower.cuda.fragments import (
    BlocksText,
    Join,
    LoopText,
    PhaseText,
    Reduce,
    Statement,
    Sum,
    Tensor,
    c_name,
)
from lngen.compiler.lower.nest import Blocks, Loop, Nest, Phase, exchanged_in, joined_from
from lngen.dtypes import FLOATS_OF_8_BITS
from lngen.rules import ROW_KINDS

# ---- values and equations ----


@dataclass(frozen=True)
class Inputs:
    """The C expressions for the [M, D] and [D] inputs.

    element   the element ``i_`` of each
    vector    the statement, once per loop, that loads the vector ``v_`` of inputs that are not in registers
    widened   f16 inputs that are stored as floats
    at_use    f16 is converted at every use
    place     the column of an element, and ``of_vector`` that of the first one of a vector, which is in one block
    number    of a vector among those of a thread
    taken     the element of an input at an index of its row
    """

    element: Mapping[Value, str]
    vector: Mapping[Value, str] = field(default_factory=dict)
    widened: frozenset[Value] = frozenset()
    at_use: bool = False
    place: str = "Row::column(v_, i_)"
    of_vector: str = ""
    number: str = "v_"
    taken: Callable[[Value, str], str] | None = None

    def spell(self, value: Value) -> str:
        """``value`` in C."""
        return self.element.get(value) or c_name(value)

    def statement(self, eqn: Eqn) -> Statement:
        """The C line of one equation: its IR name, its op's CUDA meaning, its IR text as note."""
        if eqn.op == "iota":
            text = self.place_along(eqn.axis)
            return self._defined(eqn, text if eqn.out.type.dtype is DType.I32 else f"static_cast<long long>({text})")
        if eqn.op == "gather":
            return self._defined(eqn, self.spell(eqn.args[0]))
        if eqn.op == "take":
            assert self.taken is not None, "rows alone have an element at an index"
            return self._defined(eqn, self.taken(eqn.args[0], self.spell(eqn.args[1])))
        meaning = OPS[eqn.op].cuda
        assert meaning is not None, f"'{eqn.op}' is lowered by the pass '{OPS[eqn.op].lowered_by}', which has not run"
        text = meaning(tuple(map(self.spell, eqn.args)), eqn)
        if eqn.op == "cast" and eqn.args[0] in self.widened:
            text = self.spell(eqn.args[0])
        elif eqn.op == "cast" and self.at_use and eqn.args[0].type.dtype is DType.F16:
            text = text.replace("f32_from_f16(", "f32_from_f16_at_use(")
        return self._defined(eqn, text)

    def place_along(self, axis: Axis) -> str:
        """The number along D, or along an axis that is derived from it."""
        if axis.base is None:
            return self.place
        each = f" / {axis.each}" if axis.each > 1 else ""
        return f"{(self.of_vector if axis.by == '/' else '') or self.place} {axis.by} {axis.number}{each}"

    def _defined(self, eqn: Eqn, text: str) -> Statement:
        return Statement(f"const {ctype(eqn.out.type.dtype)} {c_name(eqn.out)} = {text};", note(eqn))


def note(eqn: Eqn) -> str:
    """The equation without its type, which the C declaration has."""
    return print_eqn(eqn).replace(f" : {eqn.out.type}", "", 1)


def tensor(value: Value) -> Tensor:
    """The tensor of a value."""
    axis = value.type.along(D)
    period, each = (axis.period, axis.each) if axis else (0, 1)
    return Tensor(value.name, ctype(value.type.dtype), c_name(value), period=period, each=each)


def tables(graph: Graph) -> dict[Value, Tensor]:
    """The inputs with columns that repeat along a row, and some for each row, or for each of a table."""
    index = {e.args[0]: c_name(e.args[1]) for e in graph.eqns if e.op == "gather"}
    return {p: replace(tensor(p), index=index.get(p, "")) for p in graph.params if is_of_table(p)}


def tensors(values: Iterable[Value]) -> tuple[Tensor, ...]:
    """The tensors of values."""
    return tuple(map(tensor, values))


def named(eqns: Iterable[Eqn]) -> tuple[Sum, ...]:
    """The sums of reductions."""
    return tuple(
        Sum(e.out.name, c_name(e.out), n, note(e), functor(e), ctype(e.out.type.dtype)) for n, e in enumerate(eqns)
    )


def functor(eqn: Eqn) -> str:
    """The device functor of a reduction."""
    return "Add" if eqn.op in SUMS else "Max"


def address(name: str, row: str, strides: int) -> str:
    """C++: the address of a row of an [M, D] tensor; of rows at two distances, of the row at ``place_``."""
    if strides == 1:
        return f"{name}_ptr_ + {row} * {name}_stride_"
    return f"row_of({name}_ptr_, place_, {name}_outer_, {name}_stride_)"


def address_of_set(name: str) -> str:
    """C++: the address of the features of a row's set; sets are the inner rows at two distances."""
    return f"{name}_ptr_ + place_.quotient * {name}_outer_"


def declaration(argument: Argument) -> str:
    """An argument in a kernel's signature."""
    if argument.kind in ROW_KINDS:
        return f"const long long {argument.name}"
    if argument.kind == "value":
        return f"const {argument.ctype} {argument.name}"
    const, restrict = "const " if argument.const else "", "__restrict__ " if argument.alone else ""
    return f"{const}{argument.ctype}* {restrict}{argument.name}"


def taken(begin: str, index: str, d: int, when: str = "true") -> str:
    """C++: the element at an index of the row of ``d`` elements that begins there; 0 outside it, or without a row."""
    return f"taken</* D */ {d}>({begin}, {index}, {when})"


# ---- a nest ----


@dataclass(frozen=True)
class Spelling:
    """How one kind of kernel writes its nest.

    inputs          the C expressions of inputs
    store           where an element of a result is stored, by its name
    when            the condition before a term of a reduction that ends a phase
    partial_when    the condition before a term of a column sum, and ``partial``, to what it is added
    held_when       the condition before an element that is taken into a maximum over all rows
    call            of the reductions of a loop and their functor: the device function, its arguments before the terms
    in_pairs        the maximum of an input of 16 bits is taken two elements at a time; ``of_units``: of the whole units
                    in which a stage has an unaligned row
    layout          of the same: the layout of a vector of features
    array           the declaration of the array of the sums of segments
    cluster         the blocks of a cluster share a row
    d, vector       features of a row, and of a vector
    lanes           neighbouring threads that fold a block of so many features, or what they have of it
    chunks          of a block that a vector has: one, or one of each half
    meets           what threads share of a block has met in shared memory before
    """

    inputs: Inputs
    store: str = "{}_out_[i_]"
    when: str = ""
    partial_when: str = ""
    partial: str = "{}_sums_[v_][i_]"
    held_when: str = ""
    call: Callable[[Sequence[Eqn], str], str] = lambda eqns, functor: ""
    in_pairs: bool = False
    of_units: bool = False
    layout: Callable[[Sequence[Eqn]], str] = lambda eqns: ""
    array: str = ""
    cluster: bool = False
    d: int = 0
    vector: int = 1
    lanes: Callable[[int], int] = lambda features: 1
    chunks: int = 1
    meets: bool = False

    def statements(self, eqns: Iterable[Eqn]) -> tuple[Statement, ...]:
        """The lines of equations outside loops."""
        return tuple(map(self.inputs.statement, eqns))

    def added(self, eqn: Eqn) -> tuple[str, str]:
        """The condition before a term of a partial reduction, and to what it is added."""
        if _adds_columns(eqn):
            return self.partial_when, self.partial.format(eqn.out.name)
        return self.held_when, f"{eqn.out.name}_acc_"

    def taken(self, eqn: Eqn) -> Statement:
        """The statement that takes the number of a row into a maximum over all rows."""
        return _term(eqn, self.inputs, self.partial_when, f"{eqn.out.name}_acc_")


def _adds_columns(eqn: Eqn) -> bool:
    """True for a sum of each column: over rows, over sets of rows, or over heads."""
    return is_column_fold(eqn) or is_over_sets(eqn) or is_over_heads(eqn)


def phase_texts(graph: Graph, placed: Nest, spelling: Spelling) -> tuple[PhaseText, ...]:
    """The text of a nest, phase by phase."""
    return tuple(_phase(graph, p, spelling) for p in placed.phases)


def _phase(graph: Graph, found: Phase, s: Spelling) -> PhaseText:
    loop = found.loop
    partial = loop.terms if loop else ()
    return PhaseText(
        number=found.number,
        loop=_loop(loop, s, s.added) if loop else None,
        outputs=_outputs(loop, s) if loop else (),
        of_blocks=tensors(loop.of_blocks if loop else ()),
        accumulators=named(filter(_adds_columns, partial)),
        maxima=named(e for e in partial if not _adds_columns(e)),
        reduces=tuple(_reduce(fold, s) for fold in found.folds),
        after=tuple(_after(graph, e, found.number, s) for e in found.after),
        row_outputs=tensors(found.stores),
        alone=s.statements(found.alone),
        exchanged=tuple(v.name for v in exchanged_in(graph, found)) if s.cluster else (),
        kept=tensors(loop.keep if loop else ()),
    )


def _outputs(loop: Loop, s: Spelling) -> tuple[Tensor, ...]:
    """The results that a loop stores, those that are converted in pairs marked."""
    pairs = _pairs(loop, s)
    return tuple(replace(tensor(v), in_pairs=v in pairs) for v in loop.stores)


def _pairs(loop: Loop, s: Spelling) -> dict[Value, Eqn]:
    """The casts of results that a loop stores as vectors and does not read: two are converted by one instruction."""
    read = {*loop.keep, *(a for e in (*loop.element, *loop.terms) for a in e.args)}
    casts = (e for e in loop.element if e.op == "cast" and e.args[0].type.dtype is F32)
    paired = (e for e in casts if e.out.type.dtype in FLOATS_OF_8_BITS and s.store == Spelling.store)
    return {e.out: e for e in paired if e.out in loop.stores and e.out not in read}


def _reduce(loop: Loop, s: Spelling) -> Reduce:
    """The reductions of a loop, which are of one kind; sums of segments fill an array."""
    sums, of_segments = named(loop.terms), is_segment_sum(loop.terms[0])
    text = _loop(loop, s, lambda e: (s.when, f"{e.out.name}_acc_"))
    if s.in_pairs and (stored := _maxima_of_inputs(loop)):
        sums = tuple(replace(t, halves=ctype(v.type.dtype)) for t, v in zip(sums, stored, strict=True))
        vectors = ((_unit if s.of_units else s.inputs.spell)(v).removesuffix("[i_]") for v in stored)
        taken = (Statement(f"{t.accumulator}.take({v});", t.note) for t, v in zip(sums, vectors, strict=True))
        text = replace(text, vector=() if s.of_units else text.vector, element=(), after=tuple(taken))
    names, real = ", ".join(total.cname for total in sums), sums[0].real
    results = f"{sums[0].name}_own_" if of_segments else names
    return Reduce(
        op=sums[0].op,
        call=s.call(loop.terms, sums[0].functor),
        layout=s.layout(loop.terms),
        results=results,
        declaration=s.array.format(real=real, array=results) if of_segments else f"{real} {names};",
        sums=sums,
        loop=text,
        whole_row=not of_segments,
        kept=tensors(loop.keep),
    )


def _unit(v: Value) -> str:
    """C++: the vector of an unaligned row in its stage."""
    return f"stage_vector<Row>({v.name}_shared_, v_, Half<{ctype(v.type.dtype)}>::LEAST)"


# Their result is the operand.
SAME = ("cast", "detach", "stop_gradient", "sealed")


def _maxima_of_inputs(loop: Loop) -> tuple[Value, ...]:
    """The inputs of one type of 16 bits whose maxima are all that a loop computes; none if there are others."""
    producer = {e.out: e for e in loop.element}

    def source(v: Value) -> Value:
        return source(producer[v].args[0]) if v in producer and producer[v].op in SAME else v

    found = tuple(source(e.args[0]) for e in loop.terms if functor(e) == "Max")
    alone = len(found) == len(loop.terms) and not (loop.keep or loop.stores or loop.blocks or loop.meeting)
    alone &= all(e.out.type.dtype is F32 for e in loop.terms)
    halves = {v.type.dtype for v in found} in ({DType.BF16}, {DType.F16})
    return found if alone and halves and set(found) <= {*loop.inputs} else ()


def _loop(loop: Loop, s: Spelling, added: Callable[[Eqn], tuple[str, str]]) -> LoopText:
    """The lines of a loop: loads and numbers of segments, then equations, terms and stores.

    ``added``: the condition before a term, and to what it is added.
    """
    ready = {v: f"{v.name}_row_[v_][i_]" for v in loop.ready}
    own = {v: f"{v.name}_own_[s_]" for v in loop.segments}
    turned = {e.out: f"{e.out.name}_vector_[i_]" for part in loop.blocks for e in part.turned}
    inputs = replace(s.inputs, element={**s.inputs.element, **turned, **ready, **own})
    loads = [Statement(s.inputs.vector[p]) for p in loop.inputs if p in s.inputs.vector]
    if loop.vector or loop.segments:
        segment = Statement("const int s_ = v_ / Row::PER_SEGMENT;")
        loads += [segment, *_over_segments(loop.vector, inputs, "Row::rank() * Row::SEGMENTS + s_")]
    pairs = _pairs(loop, s)
    return LoopText(
        vector=tuple(loads),
        element=(
            *(line for e in loop.element if e.out not in pairs for line in _computed(e, inputs, loop.keep)),
            *(_shared(e, inputs) if e.op == "rotate" else _term(e, inputs, *added(e)) for e in loop.terms),
            *(_stored(v, pairs.get(v), s, inputs) for v in loop.stores),
        ),
        inputs=tuple(p.name for p in loop.inputs),
        blocks=tuple((_met_blocks if s.meets else _blocks)(part, s, inputs) for part in loop.blocks),
        after=tuple(_stored_block(v, s, inputs) for v in loop.of_blocks),
        meeting=tuple(_meeting(first, s) for first in loop.meeting),
    )


def _stored(value: Value, cast: Eqn | None, s: Spelling, inputs: Inputs) -> Statement:
    """An element of a result; of one that is converted behind the loop, what it is cast from."""
    target = s.store.format(value.name)
    if cast is None:
        return Statement(f"{target} = {inputs.spell(value)};")
    return Statement(f"{target} = {inputs.spell(cast.args[0])};", note(cast))


def _meeting(loop: Loop, s: Spelling) -> LoopText:
    """The loop in which every thread shares the sum or the maximum of each of its vectors, or the elements."""
    text = _loop(loop, s, lambda e: ("", f"{e.out.name}_acc_"))
    sums, turned = named(e for e in loop.terms if e.op != "rotate"), [e for e in loop.terms if e.op == "rotate"]
    begin = (Statement(f"{t.real} {t.accumulator} = {t.functor}::neutral();") for t in sums)
    share = (
        *(Statement(f"share_vector<Row>({t.of_vectors}, v_, {t.accumulator});") for t in sums),
        *(Statement(f"share_elements<Row>({of_elements(e)}, v_, {_vector_of(e)});") for e in turned),
    )
    return replace(text, vector=(*text.vector, *begin, *map(_vector, turned)), after=share)


def _blocks(part: Blocks, s: Spelling, inputs: Inputs) -> BlocksText:
    """Neighbouring threads fold what each has of a block: its chunks from left to right, then a tree over lanes."""
    sums, of_chunk = named(part.folds), "i_ / Row::RUN" if s.chunks > 1 else "0"
    lanes = [s.lanes(_features(e.to)) // s.chunks for e in part.folds]
    fold = [Statement(t.fold_of_block(n, s.chunks)) for t, n in zip(sums, lanes, strict=True)]
    whole = [Statement(f"const {t.real} {t.cname} = {t.name}_block_[0];", t.note) for t in sums]
    return BlocksText(
        before=(
            *(Statement(t.begin_of_block(s.chunks)) for t in sums),
            *map(_vector, part.turned),
        ),
        element=(
            *map(inputs.statement, part.element),
            *(_term(e, inputs, "", f"{e.out.name}_block_[{of_chunk}]") for e in part.folds),
            *(_of_vector(e, inputs) for e in part.turned),
        ),
        after=(*(_turn(e, inputs) for e in part.turned), *fold, *whole, *map(inputs.statement, part.after)),
    )


def _met_blocks(part: Blocks, s: Spelling, inputs: Inputs) -> BlocksText:
    """Every thread folds the numbers of vectors that have met, in the same order: its last levels are over lanes.

    Of a rotated head it reads the other halves of planes.
    """
    whole = [
        Statement(f"const {t.real} {t.cname} = {_fold_vectors(t, _features(e.to), s)};", t.note)
        for e, t in zip(part.folds, named(part.folds), strict=True)
    ]
    own = [e for e in part.turned if not is_of_halves(e)]
    return BlocksText(
        before=tuple(map(_vector, part.turned)),
        element=(*map(inputs.statement, part.element), *(_of_vector(e, inputs) for e in own)),
        after=(*(_turn(e, inputs, met=e not in own) for e in part.turned), *whole, *map(inputs.statement, part.after)),
    )


def _vector(rotation: Eqn) -> Statement:
    """The elements of a vector, which a rotation takes from others of it."""
    return Statement(f"{ctype(rotation.out.type.dtype)} {_vector_of(rotation)}[Row::N];")


def _vector_of(rotation: Eqn) -> str:
    return f"{rotation.out.name}_vector_"


def of_elements(rotation: Eqn) -> str:
    """The array in which the elements of rotated heads meet."""
    return f"{rotation.out.name}_of_elements_"


def _of_vector(rotation: Eqn, inputs: Inputs) -> Statement:
    return Statement(f"{_vector_of(rotation)}[i_] = {inputs.spell(rotation.args[0])};")


def _shared(rotation: Eqn, inputs: Inputs) -> Statement:
    """An element of a vector that other threads take."""
    return replace(_of_vector(rotation, inputs), note=note(rotation))


def _turn(rotation: Eqn, inputs: Inputs, met: bool = False) -> Statement:
    place = f"/* head */ {rotation.attr('head')}, /* width */ {rotation.attr('width')}"
    given = f"{_vector_of(rotation)}{f', {of_elements(rotation)}' if met else ''}, {inputs.number}"
    return Statement(f"turn_{'met_' if met else ''}{rotation.attr('by')}<Row, {place}>({given});", note(rotation))


def _fold_vectors(total: Sum, features: int, s: Spelling) -> str:
    counts = f"/* vectors */ {features // s.vector}, /* lanes */ {s.lanes(features)}"
    return f"fold_vectors<{total.functor}, Row, {counts}>({total.of_vectors}, v_)"


def _features(axis: Axis | None) -> int:
    """Features of a block."""
    assert axis is not None
    assert isinstance(axis.number, int)
    return axis.number


def _stored_block(value: Value, s: Spelling, inputs: Inputs) -> Statement:
    """The first thread of a block stores its number."""
    features = _features(value.type.along(D))
    block, pointer, number = f"<Row, /* features */ {features}>", f"{value.name}_ptr_", inputs.spell(value)
    if value.type.by_columns:
        column = f"{value.name}_stride_, stream_.row, rows_, {value.name}_padded_"
        store = f"store_block_by_columns{block}({pointer}, {column}, v_, {number});"
    else:
        store = f"store_block{block}({pointer} + stream_.row * /* blocks */ {s.d // features}, v_, {number});"
    return Statement(f"if (stream_.has_row()) {store}")


def _computed(eqn: Eqn, inputs: Inputs, keep: Sequence[Value]) -> tuple[Statement, ...]:
    """The statement of an equation, and the one that keeps its value, which the compiler would rather recompute."""
    name = c_name(eqn.out)
    value = f"materialised({name})" if eqn.out.type.dtype.arithmetic else name
    keeps = [Statement(f"{eqn.out.name}_row_[v_][i_] = {value};")] if eqn.out in keep else []
    return inputs.statement(eqn), *keeps


def _term(eqn: Eqn, inputs: Inputs, when: str, into: str) -> Statement:
    """A term added to the sum, or taken into the maximum, ``into``."""
    first, *times = map(inputs.spell, eqn.args)
    if functor(eqn) == "Max":
        taken = f"maximum({into}, {first})"
    else:
        taken = f"fmaf({first}, {times[0]}, {into})" if times else f"{into} + {first}"
    return Statement(f"{when}{into} = {taken};", note(eqn))


# ---- numbers of segments ----


FEW = 2  # rounds of interleaved partial sums at a time where their terms are computed: more need more registers


def _after(graph: Graph, eqn: Eqn, number: int, s: Spelling) -> Statement | Join:
    """An equation behind the reductions of a phase; a sum over segments reads those of all blocks, or the own ones."""
    if not is_join(eqn):
        return s.inputs.statement(eqn)
    of_all = f"_all_{number}_(s_)" if s.cluster else "_own_[s_]"
    sums = {e.out: f"{e.out.name}{of_all}" for e in graph.eqns if is_segment_sum(e)}
    inputs, computed = replace(s.inputs, element={**s.inputs.element, **sums}), joined_from(graph, eqn)
    return Join(
        result=Statement(f"const {ctype(eqn.out.type.dtype)} {c_name(eqn.out)}", note(eqn)),
        statements=_over_segments(computed, inputs, "s_"),
        value=inputs.spell(eqn.args[0]),
        interleave=eqn.int_attr("interleave") if "interleave" in dict(eqn.attrs) else 1,
        unroll=FEW if computed else 0,
    )


def _over_segments(eqns: Iterable[Eqn], inputs: Inputs, segment: str) -> tuple[Statement, ...]:
    return tuple(_sized(e, segment) if is_segment_size(e) else inputs.statement(e) for e in eqns)


def _sized(eqn: Eqn, segment: str) -> Statement:
    """The elements of a segment, the last of which may be shorter."""
    real = ctype(eqn.out.type.dtype)
    text = f"const {real} {c_name(eqn.out)} = static_cast<{real}>(segment_size<Row>({segment}));"
    return Statement(text, note(eqn))
