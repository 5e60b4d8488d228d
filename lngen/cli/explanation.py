"""``lngen explain``: why a kernel is what it is."""

from __future__ import annotations

import click

from lngen.cli.output import Output, output_options
from lngen.cli.shared_options import arch_option, device_option, rows_option, schedule_option, split, target
from lngen.compile import Compilation
from lngen.devices import device_for
from lngen.problem import check_arch
from lngen.spec import parse_spec

SECTIONS = ("derivation", "stability", "cost", "fusion", "schedule")


@click.command("explain", epilog="Example: lngen explain layernorm.bwd:d=4096,dtype=bf16 --rows 8192")
@click.argument("spec")
@click.option("--only", metavar="SECTION,...", help=f"Some of the sections: {', '.join(SECTIONS)}.")
@click.option("--why-not", metavar="K=V,...", help="Only why this change of the schedule was not chosen.")
@schedule_option
@rows_option
@arch_option("Target, one.")
@device_option
@output_options
def explain_command(
    spec: str,
    only: str | None,
    why_not: str | None,
    schedule: str,
    rows: int | None,
    arches: tuple[str, ...],
    device: str | None,
    output: Output,
) -> None:
    """Explain SPEC: how its equations were derived, where digits can be lost, what it costs, why it is one kernel, and
    why its schedule was chosen.
    """
    from lngen.explain import Section, Subject, explain

    if only is not None and why_not is not None:
        raise click.UsageError("--why-not answers alone; leave --only out.")
    names = split(only) if only is not None else SECTIONS
    unknown = next((n for n in names if n not in SECTIONS), None)
    if unknown is not None or not names:
        raise click.UsageError(f"--only expects some of {', '.join(SECTIONS)}, got '{unknown or only}'.")
    arches, gpu = target(arches, device)
    if len(arches) > 1:
        raise click.UsageError(f"explain takes one --arch, got {', '.join(arches)}.")
    compilation = Compilation(parse_spec(spec))
    kernels = compilation.changed(schedule, *arches, rows=rows, device=gpu, compiled=False)
    check_arch(kernels.plan.schedule, arches[0])
    subject = Subject(compilation, kernels, gpu or device_for(arches[0]), rows, schedule)
    if why_not is not None:
        from lngen.explain.why_not import why_not as answer

        sections: tuple[Section, ...] = (answer(subject, why_not),)
    else:
        sections = explain(subject, names)
    head = f"{subject.plan.spec}\n{subject.schedule}\n"
    about = {"spec": str(subject.plan.spec), "schedule": str(subject.schedule), "rows": subject.rows}
    text = "\n".join([head, *map(str, sections)])
    output.table(about | {"device": subject.device.name} | {s.name: dict(s.data) for s in sections}, text)
