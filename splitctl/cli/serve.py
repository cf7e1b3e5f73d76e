"""`splitctl serve`: hold a session in a process of its own, until it is stopped."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitctl.cli.hosts import with_screen
from splitctl.cli.http_options import http_options
from splitctl.cli.options import (
    Parsed,
    library_option,
    model_option,
    named,
    rpc_option,
    serving_placement_options,
    verbose_option,
    weights_option,
)
from splitctl.cli.output import ExitCode, Screen, one_line, print_json
from splitctl.cli.policy_options import PolicyOptions, policy_config, policy_options
from splitctl.cli.switch import outcome_line
from splitctl.control.server import ControlServer
from splitctl.control.sockets import DEFAULT_NAME, Claim, checked_name, claim, prepared, runtime_folder
from splitctl.errors import Refused, SplitctlError
from splitctl.host.config import HostConfig
from splitctl.host.events import SwitchEnded
from splitctl.ipc.orders import AdapterFile
from splitctl.outcome import WeightsTier
from splitctl.placement import FLAGS, Placement
from splitctl.places import state_folder

if TYPE_CHECKING:
    from splitctl.host.supervisor import Supervisor
    from splitctl.http import HttpConfig, HttpServer

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Signals that come so soon after another are the same wish: timeout(1) sends one to the process and one to its group,
#: and a closed terminal sends SIGHUP after SIGTERM [seconds].
_TOGETHER_S = 0.25


def _scaled_adapter(text: str) -> AdapterFile:
    """Take FILE:SCALE apart at its last colon."""
    file, _, scale = text.rpartition(":")
    try:
        factor = float(scale)
    except ValueError:
        factor = math.nan
    if not file or not math.isfinite(factor):
        raise ValueError(f"{text!r} is not FILE:SCALE, such as style.gguf:0.5")
    return AdapterFile(Path(file).absolute(), factor)


@click.command()
@model_option
@click.option("--session", default=DEFAULT_NAME, show_default=True, metavar="NAME", help="The session's name.")
@click.option(
    "--lora", "lora", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="A LoRA adapter, at scale 1."
)
@click.option(
    "--lora-scaled",
    "lora_scaled",
    multiple=True,
    type=Parsed("FILE:SCALE", _scaled_adapter),
    help="A LoRA adapter and its scale.",
)
@click.option("--resume", is_flag=True, help="Continue the saved session of this name, where it was.")
@click.option(
    "--checkpoint",
    "checkpoint_s",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="S",
    help="Save the session every S seconds while it changes. It is always saved when it is stopped.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0.0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Restart the process that holds the library if it makes no progress for this long.",
)
@weights_option
@click.option(
    "--access-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append a line for each answer, with its times and tokens, as splitctl replay reads them.",
)
@policy_options
@click.option("--force", is_flag=True, help="Open even if a trial in a child process failed.")
@http_options
@serving_placement_options
@library_option
@rpc_option
@verbose_option
@with_screen
def serve(
    *,
    model: Path,
    session: str,
    lora: tuple[Path, ...],
    lora_scaled: tuple[AdapterFile, ...],
    resume: bool,
    checkpoint_s: float | None,
    deadline_s: float,
    weights: WeightsTier,
    access_log: Path | None,
    policy: PolicyOptions,
    force: bool,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    http: HttpConfig | None,
    screen: Screen,
) -> int:
    """Serve a session that survives a crash of the library. Switch, attach, save and stop it from other terminals."""
    folder = state_folder() / "sessions"
    saved = folder / f"{checked_name(session)}.safetensors"
    if resume:
        from splitctl.carry.file import read_placement  # noqa: PLC0415 - numpy, which --help does without

        changes = {name: getattr(placement, name) for name in named(FLAGS)}
        placement = read_placement(saved).changed(**changes)
    decides = policy_config(policy, model, placement, library, rpc, weights, screen.line)
    config = HostConfig(
        model=model.absolute(),
        library=None if library is None else library.absolute(),
        placement=placement,
        adapters=(*(AdapterFile(one.absolute()) for one in lora), *lora_scaled),
        rpc=rpc,
        force=force,
        name=session,
        deadline_s=deadline_s,
        checkpoint_s=checkpoint_s,
        resume=saved if resume else None,
        state_folder=folder,
        weights=weights,
        policy=decides,
        access_log=access_log,
    )
    with claim(prepared(runtime_folder(os.environ)), session) as held:
        return asyncio.run(_Serving(config, held, screen, http).run())


class _Serving:
    """A host from its start to its end."""

    def __init__(self, config: HostConfig, held: Claim, screen: Screen, http: HttpConfig | None) -> None:
        self._config = config
        self._http = http
        self._held = held
        self._screen = screen
        self._over = asyncio.Event()
        self._code = ExitCode.DONE
        # Stops that were asked for and not refused.
        self._n_stops = 0
        self._ending: asyncio.Task[dict[str, Any]] | None = None
        self._signalled_at = -math.inf
        from splitctl.host.supervisor import Supervisor  # noqa: PLC0415 - numpy, which --help does without

        # Workers need no keys.
        env = {name: value for name, value in os.environ.items() if name != "LLAMA_API_KEY"}
        self._supervisor = Supervisor(config, env=env, log=self._log)
        self._server: HttpServer | None = None

    async def run(self) -> ExitCode:
        """Serve until a signal or a client says stop."""
        if self._http is not None:
            self._server = _server_of(self._supervisor, self._http, self._log)
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # nohup has SIGHUP ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        control = ControlServer(self._supervisor, stop=self._stop, log=self._log)
        await control.start(self._held.listen())
        if self._server is not None:
            await self._server.start()
        watching = asyncio.ensure_future(self._watch())
        try:
            self._log(f"loading {self._config.model}")
            await self._start()
            if not self._n_stops:
                self._say_ready()
            await self._over.wait()
            if self._ending is not None:
                await self._ending
        finally:
            watching.cancel()
            await control.close()
            if self._server is not None:
                await self._server.close()
        return self._code

    async def _start(self) -> None:
        """Load the model; being stopped meanwhile is not a failure."""
        try:
            await self._supervisor.start()
        except (SplitctlError, OSError):
            if not self._n_stops:
                raise

    async def _watch(self) -> None:
        """Log how switches end; the supervisor logs what goes wrong."""
        async for event in self._supervisor.subscribe():
            if isinstance(event, SwitchEnded):
                self._log(outcome_line(event.outcome))

    def _say_ready(self) -> None:
        path = self._held.address.path
        url = None if self._server is None else self._server.url
        if self._screen.as_json:
            print_json({"session": self._config.name, "socket": str(path), "url": url, "pid": os.getpid()})
            return
        sys.stdout.write(f"ready: session {self._config.name} at {path}{f' and {url}' if url else ''}\n")
        sys.stdout.flush()

    async def _stop(self, *, force: bool) -> dict[str, Any]:
        """Save the session and end; one that cannot be saved goes on, unless `force`."""
        self._n_stops += 1
        try:
            body = await self._supervisor.stop(force=force)
        except Refused as error:
            self._n_stops -= 1
            self._log(f"not stopped: {error}")
            raise
        except Exception:
            # A fault of ours in the middle of the end leaves nothing to go on with.
            self._code = ExitCode.FAILED
            self._over.set()
            raise
        if not self._over.is_set():
            self._over.set()
            self._say_ended(body)
        return body

    def _say_ended(self, body: dict[str, Any]) -> None:
        if body["reason"]:
            self._code = ExitCode.FAILED
            self._log(f"ended; the session was NOT saved: {body['reason']}")
        else:
            self._log(f"ended; saved at {body['path']}" if body["path"] else "ended; there was nothing to save")

    async def _drain_and_end(self) -> dict[str, Any]:
        """End because of a signal: whoever sent it does not wait for an answer."""
        try:
            if self._server is not None:
                await self._server.drain()
            return await self._stop(force=True)
        finally:
            self._over.set()

    def _on_signal(self, number: int) -> None:
        """End well at the first signal, at once at the second."""
        name = signal.Signals(number).name
        now = asyncio.get_running_loop().time()
        if now - self._signalled_at < _TOGETHER_S:
            return
        self._signalled_at = now
        if self._ending is not None:
            self._log(f"{name} again: ending now")
            self._held.release()
            # The worker reads the end of its stdin, and ends as well.
            os._exit(ExitCode.CANCELLED)
        self._log(f"{name}: ending; once more ends at once, without saving")
        self._ending = asyncio.ensure_future(self._drain_and_end())

    def _log(self, text: str) -> None:
        self._screen.line(f"{time.strftime('%H:%M:%S')} {one_line(text)}")


def _server_of(supervisor: Supervisor, http: HttpConfig, log: Callable[[str], None]) -> HttpServer:
    """Take the port before the model is loaded, so that a port in use is reported at once."""
    from splitctl.http import HttpServer  # noqa: PLC0415 - an extra, which a session on its socket does without

    server = HttpServer(supervisor, http, log=log)
    server.listen()
    return server
