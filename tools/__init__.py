"""Programs of the project, each run as `python -m tools.NAME`; README.md says what each is for."""

from __future__ import annotations
