"""Serve devices of a libllama over RPC, as llama.cpp's rpc-server does: a second device for trying a switch.

    python -m tools.rpc_server [--lib PATH] [--host 127.0.0.1] [--port N] [--device CPU] [--threads N]

Prints "listening on HOST:PORT" when it does; port 0, the default, takes a free one. It ends when its stdin ends, so it
does not outlive the program that started it. What the library itself prints goes to stderr. Anyone who reaches the port
can use it, and nothing is encrypted: leave it on 127.0.0.1 unless the network is yours.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_native import Library, NativeError, RpcServerUnusable, greet_rpc_server
from tools.places import CHECKOUT

_STEP_S = 0.02
_M_MMAP_THRESHOLD = -3
"""Source: malloc.h of glibc."""
_LARGE_BYTES = 64 * 1024
_FAILED = 1
_END_S = 30


@contextmanager
def served(library: Path) -> Iterator[tuple[str, int]]:
    """Serve a processor of a library from a child of this process.

    Yields:
        HOST:PORT, and the child's process id.

    Raises:
        RuntimeError: the child does not begin to serve, or does not end well.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "tools.rpc_server", "--lib", str(library)]
    with subprocess.Popen(command, cwd=CHECKOUT, text=True, **pipes) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            if not said.startswith("listening on "):
                raise RuntimeError(f"the RPC server said {said!r}")
            yield said.split()[-1], process.pid
        finally:
            if process.stdin:
                process.stdin.close()
        if status := process.wait(_END_S):
            raise RuntimeError(f"the RPC server ended with {status}")


def free_port(host: str) -> int:
    """Find a port that nobody listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def give_zeroed_memory() -> None:
    """Let large buffers be fresh pages, which are zero.

    Tensor mode in llama-cpp-python 0.3.36 multiplies parts of buffers that it never wrote by zero; in memory that was
    used before there may be a NaN, and then every logit of the client is one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def announce(endpoint: str, say_to: int, stopped: threading.Event) -> None:
    """Say so when the server answers."""
    while not stopped.wait(_STEP_S):
        try:
            greet_rpc_server(endpoint)
        except RpcServerUnusable:
            continue
        os.write(say_to, f"listening on {endpoint}\n".encode())
        return


def end_with_parent() -> None:
    """Wait for the end of stdin, then end the process: the library's own loop never does."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the end of stdin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, help="the libllama; else the first usable one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--device", action="append", help="a device to serve; may be given more than once (CPU)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each processor device")
    options = parser.parse_args(arguments)
    give_zeroed_memory()
    say_to = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    stopped = threading.Event()
    endpoint = f"{options.host}:{options.port or free_port(options.host)}"
    try:
        library = Library.open(options.lib, env=os.environ)
        threading.Thread(target=announce, args=(endpoint, say_to, stopped), daemon=True).start()
        library.serve_rpc(endpoint, options.device or ["CPU"], n_threads=options.threads)
    except NativeError as error:
        stopped.set()
        print(f"rpc_server: {error}", file=sys.stderr)
        return _FAILED
    stopped.set()
    print(f"rpc_server: {endpoint} is not to be had; name another port", file=sys.stderr)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
