"""RPC devices: devices of other processes or machines, which ``ggml_backend_rpc_start_server`` serves there.

Laws:
    1. A server is asked to shake hands by us before the library sees it: the library aborts the process where a server
       cannot be reached, and waits for ever where one is busy.
    2. A server serves one client at a time; a second one waits in its queue. While a model of this process lies on a
       server, no other process gets an answer from it.

Source: ggml-rpc.h and ggml-rpc.cpp of llama.cpp (the handshake: command 14, size, 24 bytes; older builds: size 0).
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Any

from llama_native.devices import text
from llama_native.errors import CapabilityMissing, RpcServerUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SERVERS = 16
"""Source: ggml-rpc.h, GGML_RPC_MAX_SERVERS."""

_ENDPOINT = re.compile(r"[A-Za-z0-9._-]+:([0-9]{1,5})")
_LAST_PORT = 65535
_TIMEOUT_S = 5.0
_HELLO = 14
_HELLO_BYTES = (24, 0)
"""Bytes of a handshake request, newest first."""
_SIZE_BYTES = 8
_REPLY_BYTES = range(3, 257)
"""A reply begins with three bytes of version; a server that is none of ours answers with something else."""


def check_endpoint(endpoint: str) -> tuple[str, int]:
    """Take HOST:PORT apart (HOST: a name or an IPv4 address).

    Raises:
        RpcServerUnusable: it is something else.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match[1]) <= _LAST_PORT:
        raise RpcServerUnusable(endpoint, "it is not HOST:PORT", "name each server as in 127.0.0.1:50052")
    return endpoint.rpartition(":")[0], int(match[1])


def greet(endpoint: str, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Shake hands with a server at HOST:PORT and leave again; each step may take ``timeout_s`` seconds.

    Raises:
        RpcServerUnusable: it cannot be reached, is busy, or is no RPC server.
    """
    host, port = check_endpoint(endpoint)
    for n_bytes in _HELLO_BYTES:
        request = bytes([_HELLO]) + n_bytes.to_bytes(_SIZE_BYTES, "little") + bytes(n_bytes)
        try:
            with socket.create_connection((host, port), timeout_s) as connection:
                connection.sendall(request)
                reply = _receive(connection, _SIZE_BYTES)
        except TimeoutError as error:
            raise RpcServerUnusable(
                endpoint,
                f"it does not answer within {timeout_s:g} s: it serves one client at a time, and another one has it",
                "end the other client, or start a second server",
            ) from error
        except OSError as error:
            raise RpcServerUnusable(
                endpoint, f"it cannot be reached ({error.strerror or error})", "start it, or check host and port"
            ) from error
        if len(reply) == _SIZE_BYTES and int.from_bytes(reply, "little") in _REPLY_BYTES:
            return
        if reply:
            break
    raise RpcServerUnusable(
        endpoint, "what listens there is no RPC server, or one of another time", "use a server of this library's build"
    )


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    try:
        with connection.makefile("rb") as file:
            return file.read(n_bytes)
    except ConnectionError:
        return b""


def find(ffi: Any, lib: Any, name: str, prototype: str) -> Any:
    """Find a function of the RPC backend: among the exports, else in its registry (backends in files of their own).

    Returns:
        The function, cast to ``prototype`` (a C pointer type) where it is not exported; NULL without RPC.
    """
    if hasattr(lib, name):
        return getattr(lib, name)
    if not (hasattr(lib, "ggml_backend_reg_by_name") and hasattr(lib, "ggml_backend_reg_get_proc_address")):
        return ffi.NULL
    registry = lib.ggml_backend_reg_by_name(b"RPC")
    address = lib.ggml_backend_reg_get_proc_address(registry, name.encode()) if registry else ffi.NULL
    return ffi.cast(prototype, address)


def is_there(ffi: Any, lib: Any) -> bool:
    """Tell whether the build can take RPC servers."""
    return bool(_add_server(ffi, lib)) and hasattr(lib, "ggml_backend_register")


def _add_server(ffi: Any, lib: Any) -> Any:
    return find(ffi, lib, "ggml_backend_rpc_add_server", "ggml_backend_reg_t (*)(const char *)")


def add_server(ffi: Any, lib: Any, endpoint: str) -> tuple[str, ...]:
    """Let the library take a server's devices in. The server has been greeted, and the caller holds the lock.

    Returns:
        The names of its devices.

    Raises:
        RpcServerUnusable: it offers no device.
    """
    n_before = int(lib.ggml_backend_dev_count())
    registry = _add_server(ffi, lib)(endpoint.encode("ascii"))
    if not registry:
        raise RpcServerUnusable(endpoint, "it offers no device", "start it with a device")
    lib.ggml_backend_register(registry)
    devices = [lib.ggml_backend_dev_get(index) for index in range(n_before, lib.ggml_backend_dev_count())]
    return tuple(text(ffi, lib.ggml_backend_dev_name(device)) for device in devices)


def serve(ffi: Any, lib: Any, endpoint: str, devices: Sequence[Any], n_threads: int) -> None:
    """Serve devices; returns only when the endpoint cannot be listened on.

    Raises:
        CapabilityMissing: the build has no RPC server.
    """
    name = "ggml_backend_rpc_start_server"
    start = find(ffi, lib, name, "void (*)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *)")
    if not start:
        raise CapabilityMissing("rpc", (name,))
    handles = ffi.new("ggml_backend_dev_t[]", list(devices))
    start(endpoint.encode("ascii"), ffi.NULL, n_threads, len(devices), handles)
