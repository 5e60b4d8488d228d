"""``python -m lngen``: the command line."""

from lngen.cli import main

if __name__ == "__main__":
    main()
