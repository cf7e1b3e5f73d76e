"""Programs of the project, each run as `python -m tools.NAME`; tools/README.md says what each is for."""

from __future__ import annotations
