"""`python -m mpbroker`: the same as the `mpbroker` command."""

import sys

from mpbroker.cli import main

if __name__ == "__main__":
    sys.exit(main())
