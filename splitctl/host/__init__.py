"""The supervisor of a hosted session: it never loads the library, and outlives the worker that does."""

from __future__ import annotations
