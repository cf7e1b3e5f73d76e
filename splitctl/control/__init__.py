"""The control socket of a hosted session: its server, its requests, and the client that the commands use."""

from __future__ import annotations
