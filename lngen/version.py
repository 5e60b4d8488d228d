"""The version, and how what is missing is installed, in a file of its own so that every layer may read it."""

__version__ = "0.1.0"


def install_hint(extra: str) -> str:
    """The command that installs lngen with an extra of its pyproject.toml, ``cuda13`` for example.

    It names the checkout, because the package called lngen on the public index is not this one.
    """
    return f'pip install ".[{extra}]" in the checkout of lngen'
