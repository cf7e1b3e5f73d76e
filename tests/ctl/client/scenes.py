"""For tests of the clients: hosts and servers that say what the test wants, byte by byte."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from splitctl.control.sockets import claim, prepared

WAIT_S = 60.0
"""How long anything may take before a test fails; no test measures it."""


def line(body: dict[str, Any]) -> bytes:
    """Write a line of a host."""
    return json.dumps(body).encode() + b"\n"


@contextmanager
def speaking(*answers: bytes, runtime: Path | None = None, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer each connection with the next bytes and hang up: as host "fake" of a runtime folder, or on a free port.

    Gives the port. Connections after the last answer get none, and stay open to the end of the block.
    """
    with ExitStack() as stack:
        if runtime is None:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        else:
            held = stack.enter_context(claim(prepared(runtime / "splitctl"), "fake"))
            listening = stack.enter_context(held.listen())
        thread = threading.Thread(target=_answer, args=(listening, answers, tls))
        thread.start()
        try:
            yield 0 if runtime is not None else listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answer(listening: socket.socket, answers: Sequence[bytes], tls: ssl.SSLContext | None) -> None:
    said = iter(answers)
    with ExitStack() as left:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            answer = next(said, None)
            if answer is None:
                left.enter_context(one)
                continue
            one.settimeout(WAIT_S)
            # A client that does not trust the server hangs up.
            with one, suppress(ssl.SSLError), one if tls is None else tls.wrap_socket(one, server_side=True) as speaker:
                got = b""
                # A request over HTTP without a body ends with its head.
                while not got.endswith((b"\n", b"}")):
                    got += speaker.recv(1 << 16)
                speaker.sendall(answer)
