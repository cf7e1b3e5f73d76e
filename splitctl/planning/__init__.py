"""Answers before anything is loaded or moved: what fits where, and whether a switch pays."""

from __future__ import annotations
