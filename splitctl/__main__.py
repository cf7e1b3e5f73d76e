"""`python -m splitctl`: the command line of the interpreter at hand."""

from __future__ import annotations

import sys

from splitctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
