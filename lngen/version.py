"""The version, and the installation hint, in a file of their own so that every layer may read them."""

__version__ = "0.1.0"


def install_hint(extra: str) -> str:
    """The command that installs lngen with an extra of its pyproject.toml, ``cuda13`` for example.

    The command names the checkout, because the package called lngen on the public index is another one.
    """
    return f'pip install ".[{extra}]" in the checkout of lngen'
