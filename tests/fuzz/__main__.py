"""`python -m tests.fuzz`: see run."""

from __future__ import annotations

from tests.fuzz.run import main

if __name__ == "__main__":
    raise SystemExit(main())
