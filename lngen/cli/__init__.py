"""The command line. The module of a command is imported when the command is called.

Exit codes: 0 ok, 1 a check failed, 2 the request was wrong, 3 a GPU, a dependency or memory is missing, 70 an error
in lngen itself, 130 Ctrl-C, 141 the reader of the output is gone.
"""

import contextlib
import sys
import warnings
from importlib import import_module
from typing import Any

import click

from lngen.cli.failures import INTERRUPTED, UNREAD, OutputError, brief_usage, close_streams, failed, open_streams
from lngen.version import __version__

# In the order of first use; ``lngen --help`` prints the sentences.
COMMANDS = {
    "list": "The graphs: inputs, outputs, statistics, and the keys of a spec.",
    "show": "One stage of a spec: graph, plan, CUDA, PTX, resources, traffic.",
    "explain": "Why a kernel is what it is: derivation, stability, cost, fusion, schedule.",
    "repro": "A kernel as one Python file that launches, checks and times it.",
    "build": "Generate a pack of kernels ahead of time, with a manifest.",
    "verify": "Hashes and bytes of a pack.",
    "pack": "What a pack has: the kernels a launcher takes.",
    "check": "Bits against the interpreter, errors against the oracles.",
    "conform": "An adversarial list of cases for a kernel or anybody's function.",
    "tune": "Measure schedules, record every trial, lock the fastest.",
    "warm": "Compile kernels for this machine's GPU before a program asks for them.",
    "bench": "Time lngen, its peers and the ceilings side by side.",
    "run": "Apply a kernel to .npy files.",
    "generated": "Rewrite, or verify, the golden set of kernels.",
    "doctor": "Dependencies found and missing, and commands that install them.",
    "help": "A page of the documentation; without a topic the list of pages.",
}

# The modules of several commands, or of one whose name says something else.
MODULES = {
    "inspection": ("list", "show"),
    "explanation": ("explain", "repro"),
    "generation": ("build", "generated"),
    "packs": ("verify", "pack"),
    "verification": ("check", "conform"),
    "run_files": ("run",),
    "installation": ("doctor", "help"),
}


class Commands(click.Group):
    """A group whose commands are imported only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of ``COMMANDS``."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called ``cmd_name``, from its module."""
        if cmd_name not in COMMANDS:
            return None
        module = next((name for name, commands in MODULES.items() if cmd_name in commands), cmd_name)
        values = vars(import_module(f"lngen.cli.{module}")).values()
        return next(v for v in values if isinstance(v, click.Command) and v.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **extra: Any) -> click.Context:
        """The context of a command line; a usage error is brief."""
        with brief_usage():
            return super().make_context(info_name, args, *others, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; any error becomes a line on stderr and an exit code."""
        try:
            with brief_usage():
                return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            ctx.exit(failed(error))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: lngen doctor, then lngen show layernorm.fwd:d=4096,dtype=bf16 --stage cuda",
)
@click.version_option(__version__, prog_name="lngen")
def cli() -> None:
    """A compiler for row-normalisation kernels: LayerNorm and its family, forward and backward, as CUDA.

    A SPEC is GRAPH.fwd|bwd:key=value,... for example layernorm.bwd:d=4096,dtype=bf16.
    """


def main() -> None:
    """The command line as a process, which ends with the exit code."""
    open_streams()
    warnings.showwarning = _warned
    try:
        code = cli.main(prog_name="lngen", standalone_mode=False)
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SystemExit as done:  # click and Rich exit with 1 when the reader of the output is gone
        code = UNREAD if done.code == 1 else done.code
    except OSError as error:  # from click itself, which prints help and version
        code = failed(OutputError(error))
    sys.exit(close_streams(code or 0))


def _warned(message: Warning | str, *_: Any, **__: Any) -> None:
    from lngen.cli.output import note

    note(f"warning: {message}")
