"""`python -m tests.fuzz`: see run; with --http see web."""

from __future__ import annotations

import sys

from tests.fuzz import run, web

if __name__ == "__main__":
    rest = [word for word in sys.argv[1:] if word != "--http"]
    raise SystemExit(run.main() if len(rest) == len(sys.argv) - 1 else web.main(rest))
