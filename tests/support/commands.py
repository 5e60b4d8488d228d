"""The command line, called in this process."""

from pathlib import Path

from click.testing import CliRunner, Result

from lngen.cli import cli


def call(*args: str | Path) -> Result:
    """What ``lngen args`` prints and exits with."""
    return CliRunner().invoke(cli, [*map(str, args)], prog_name="lngen")


def prints(*args: str | Path) -> str:
    """The standard output of a call that must succeed."""
    done = call(*args)
    assert done.exit_code == 0, done.output
    return done.stdout


def fails(code: int, *args: str | Path) -> str:
    """The message on stderr of a call that must exit with ``code`` and print nothing."""
    done = call(*args)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert "Traceback" not in done.stderr
    return done.stderr
