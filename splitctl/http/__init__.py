"""A hosted session over HTTP: OpenAI's routes for clients, a few of llama-server's, and the switch.

Main path: `server.HttpServer` listens in the supervisor's loop, `guard` turns away who may not come in, `app` routes to
`chat` (OpenAI's answers) and `admin` (the switch, files, events), all over the same supervisor as the control socket.
"""

from __future__ import annotations

from splitctl.http.app import HttpConfig
from splitctl.http.server import HttpServer

__all__ = ["HttpConfig", "HttpServer"]
