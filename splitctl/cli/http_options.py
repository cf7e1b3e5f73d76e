"""Flags of the HTTP server, with llama-server's names and variables; the server is imported when they are used."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitctl.errors import ConfigInvalid

if TYPE_CHECKING:
    from splitctl.http import HttpConfig

_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_PORT = 8080
_MAX_KEY_FILE_BYTES = 1 << 20
#: A scheme and a host, which pages of apps and files may not have.
_ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([A-Za-z0-9._~:\[\]-]*)/?")
_WEB_PORTS = {"http": ":80", "https": ":443"}


def http_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags; it gets ``http``: how to listen, or None where neither host nor port was named."""

    @click.option(
        "--host", envvar="LLAMA_ARG_HOST", help=f"Serve HTTP on this address; {_DEFAULT_HOST} if only --port is given."
    )
    @click.option(
        "--port",
        type=click.IntRange(0, 65535),
        envvar="LLAMA_ARG_PORT",
        help=f"Serve HTTP on this port; {_DEFAULT_PORT} if only --host is given, 0 takes a free one.",
    )
    @click.option(
        "--api-key",
        "api_keys",
        multiple=True,
        envvar="LLAMA_API_KEY",
        metavar="KEY",
        help="Key that HTTP clients must send; can be given several times. --api-key-file and LLAMA_API_KEY are safer.",
    )
    @click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        envvar="LLAMA_ARG_API_KEY_FILE",
        metavar="FILE",
        help="File with keys of which HTTP clients must send one, one a line.",
    )
    @click.option(
        "--alias",
        "-a",
        "alias",
        default="",
        envvar="LLAMA_ARG_ALIAS",
        metavar="NAMES",
        help="Names of the model for HTTP clients, with commas; answers have the first one.",
    )
    @click.option(
        "--cors",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Allow web pages of this origin to use the server: as browsers send it, null, or * for all.",
    )
    @click.option(
        "--slot-save-path",
        "save_folder",
        type=click.Path(path_type=Path),
        envvar="LLAMA_ARG_SLOT_SAVE_PATH",
        metavar="FOLDER",
        help="Folder in which HTTP clients can save and restore the session.",
    )
    @click.option(
        "--drain",
        "drain_s",
        type=click.FloatRange(min=0.0),
        default=3.0,
        show_default=True,
        metavar="S",
        help="When stopping, wait this long for HTTP answers that are under way.",
    )
    @functools.wraps(command)
    def wrapped(
        *,
        host: str | None,
        port: int | None,
        api_keys: tuple[str, ...],
        api_key_file: Path | None,
        alias: str,
        origins: tuple[str, ...],
        save_folder: Path | None,
        drain_s: float,
        **rest: Any,
    ) -> Any:
        if host is None and port is None:
            named = click.get_current_context().get_parameter_source
            if any(named(one) is _COMMAND_LINE for one in _FOR_HTTP):
                raise click.UsageError("--api-key, --alias, --cors and --slot-save-path are for HTTP: give --port too")
            return command(http=None, **rest)
        # Commas as llama-server has them; a variable is taken apart at spaces as well.
        keys = tuple(key for one in api_keys for key in one.split(","))
        http = _config(host, port, (*keys, *_keys_of(api_key_file)), alias, origins, save_folder, drain_s)
        return command(http=http, **rest)

    return wrapped


_COMMAND_LINE = click.core.ParameterSource.COMMANDLINE
_FOR_HTTP = ("api_keys", "api_key_file", "alias", "origins", "save_folder")


def _config(
    host: str | None,
    port: int | None,
    keys: tuple[str, ...],
    alias: str,
    origins: tuple[str, ...],
    folder: Path | None,
    drain_s: float,
) -> HttpConfig:
    try:
        from splitctl.http import HttpConfig  # noqa: PLC0415 - an extra, which other commands do without
        from splitctl.http.bodies import MAX_MODEL_CHARS  # noqa: PLC0415
    except ModuleNotFoundError as error:
        way = "pip install 'splitctl[server]', or leave out --host and --port"
        raise click.UsageError(f"serving HTTP needs the package {error.name}: {way}") from error
    if not all(key.strip() and key.isascii() and key.isprintable() for key in keys):
        raise click.UsageError("an API key is empty or has characters that no header can hold")
    aliases = tuple(one.strip() for one in alias.split(",") if one.strip())
    if not all(len(one) <= MAX_MODEL_CHARS and one.isprintable() for one in aliases):
        raise click.UsageError(f"--alias {alias[:60]!r}: wanted: names of 1 to {MAX_MODEL_CHARS} printable characters")
    if folder is not None and not folder.is_dir():
        raise click.UsageError(f"--slot-save-path {folder} is no folder")
    return HttpConfig(
        host=host or _DEFAULT_HOST,
        port=_DEFAULT_PORT if port is None else port,
        api_keys=tuple(key.strip() for key in keys),
        aliases=aliases,
        origins=tuple(map(_origin, origins)),
        folder=None if folder is None else folder.absolute(),
        drain_s=drain_s,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _origin(given: str) -> str:
    """Write an origin as browsers send it."""
    if given in {"*", "null"}:
        return given
    found = _ORIGIN.fullmatch(given)
    scheme, host = (found[1].lower(), found[2]) if found is not None else ("", "")
    if scheme in _WEB_PORTS:
        host = host.lower().removesuffix(_WEB_PORTS[scheme])
    if not scheme or (scheme in _WEB_PORTS and not host):
        wanted = "a scheme and a host in ASCII, such as https://example.org, or null or *"
        raise click.UsageError(f"--cors {given!r} is no origin that browsers send; wanted: {wanted}")
    return f"{scheme}://{host}"


def _keys_of(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        with file.open("rb") as handle:
            raw = handle.read(_MAX_KEY_FILE_BYTES + 1)
        lines = raw.decode("ascii").splitlines() if len(raw) <= _MAX_KEY_FILE_BYTES else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid("--api-key-file", str(file), f"a readable text file ({error})") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigInvalid("--api-key-file", str(file), "a file with at least one key")
    return keys
