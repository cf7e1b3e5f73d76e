"""Signals that come while the stub is at work, and a handler that raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.stublib.control import Stub


class Alarm(Exception):
    """What the handler raises."""


def catch(number: int) -> None:
    """Let a signal raise Alarm in this process."""

    def handler(*_: object) -> None:
        raise Alarm

    signal.signal(number, handler)


@contextmanager
def signalled_while_it_hangs(stub: Stub, faults: str) -> Iterator[None]:
    """Ask for faults, one of which hangs; send the main thread SIGUSR1 then, and let the call go on."""
    stub.faults(faults)
    me = threading.main_thread().ident
    assert me is not None

    # No Python function is entered between the signal and the release: CPython 3.11 under a tracer (coverage) spins
    # there until the main thread has taken the signal, which hangs in C.
    release = stub.lib.stub_release

    def send() -> None:
        stub.wait_hanging()
        signal.pthread_kill(me, signal.SIGUSR1)
        release()

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()
    stub.faults("clear")
