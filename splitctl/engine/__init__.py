"""The live model of a session: its context, sequences and samplers, and whose turn it is."""

from __future__ import annotations
