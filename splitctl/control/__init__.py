"""The control socket of a hosted session: its server, its requests, and one request to it."""

from __future__ import annotations
