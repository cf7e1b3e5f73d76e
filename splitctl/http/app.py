"""The HTTP app: its configuration, and which path is answered by what."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from splitctl.errors import SplitctlError
from splitctl.http.admin import Admin
from splitctl.http.chat import Chat
from splitctl.http.devices import Devices
from splitctl.http.errors import ApiError, api_error, fault_of_ours
from splitctl.http.guard import Guard
from splitctl.http.intake import HttpLimits, Intake
from splitctl.http.metrics import CONTENT_TYPE, Metrics
from splitctl.http.tokens import Service, Tokens
from splitctl.ipc.wire import shown

#: The status under which requests are counted whose clients did not wait for one, as nginx has it.
_HUNG_UP = 499

Answer = Callable[[Request], Awaitable[Response]]

#: Lets the browser load nothing from elsewhere into the page, and run only the page's own script.
_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """How a server listens.

    Attributes:
        host: address or name to listen on.
        port: its port; 0: any that is free.
        api_keys: any of them opens; none: no key is asked for.
        aliases: names of the model for clients, the first in answers; none: that of its header or file.
        origins: pages elsewhere that may use it, as browsers send them; ``*``: all.
        folder: where files are saved and restored; None: nowhere.
        limits: what clients may take.
        drain_s: for answers under way, when the server is ended, seconds.
        visible_gpus: the workers' CUDA_VISIBLE_DEVICES; None where it is not set.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    folder: Path | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)
    drain_s: float = 3.0
    visible_gpus: str | None = None


def make_app(
    host: Service, config: HttpConfig, *, is_loopback: bool, log: Callable[[str], None]
) -> tuple[ASGIApp, Chat]:
    """Put together all that a session answers over HTTP.

    Returns:
        What a server calls, and the part of it that answers requests for text.
    """
    metrics = Metrics(host)
    intake = Intake(config.limits)
    chat = Chat(host, intake, metrics.done, config.aliases)
    is_open = bool(config.api_keys) or is_loopback
    devices = Devices(config.visible_gpus)
    admin = Admin(host, intake, devices, config.folder, is_open=is_open, aliases=config.aliases)
    app = Starlette(
        routes=[
            Route(path, _counted(answer, path, metrics), methods=[method])
            for method, path, answer in _routes(chat, Tokens(host, intake, chat), admin, metrics)
        ],
        exception_handlers={HTTPException: functools.partial(_not_found, metrics=metrics), Exception: _failed},
    )
    # A redirect would be built from the Host header, which may be anything.
    app.router.redirect_slashes = False
    names = (config.host, socket.gethostname())
    guarded = Guard(
        app,
        api_keys=config.api_keys,
        hosts=names,
        origins=config.origins,
        is_loopback=is_loopback,
        on_refused=lambda status: metrics.request("other", status),
        log=log,
    )
    if not config.origins:
        return guarded, chat
    # Outermost, so that the pages that may use the server can read its refusals as well.
    origins = list(config.origins)
    return CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]), chat


def _routes(chat: Chat, tokens: Tokens, admin: Admin, metrics: Metrics) -> tuple[tuple[str, str, Answer], ...]:
    async def numbers(_request: Request) -> Response:
        return Response(
            metrics.text(), media_type=CONTENT_TYPE, headers={"Process-Start-Time-Unix": metrics.started_at}
        )

    return (
        ("GET", "/", _page),
        ("GET", "/health", admin.health),
        ("GET", "/v1/health", admin.health),
        ("GET", "/v1/models", chat.models),
        ("GET", "/models", chat.models),
        ("GET", "/v1/models/{id:path}", chat.model),
        ("GET", "/models/{id:path}", chat.model),
        ("POST", "/v1/chat/completions", chat.chat_completions),
        ("POST", "/chat/completions", chat.chat_completions),
        ("POST", "/v1/completions", chat.completions),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("POST", "/apply-template", tokens.apply_template),
        ("GET", "/props", admin.props),
        ("GET", "/slots", admin.slots),
        ("GET", "/session", admin.session),
        ("GET", "/metrics", numbers),
        ("GET", "/split-mode", admin.modes),
        ("POST", "/split-mode", admin.switch),
        ("POST", "/split-mode/cancel", admin.cancel),
        ("GET", "/split-mode/events", admin.events),
        ("POST", "/policy", admin.policy),
        ("POST", "/session/save", admin.save),
        ("POST", "/session/restore", admin.restore),
    )


def _counted(answer: Answer, path: str, metrics: Metrics) -> Answer:
    """Count answers by their route and status, and turn what the session refuses into an answer."""

    async def counted(request: Request) -> Response:
        try:
            response = await answer(request)
        except ApiError as error:
            response = error.response()
        except SplitctlError as error:
            response = api_error(error).response()
        except (ClientDisconnect, ConnectionError):
            metrics.request(path, _HUNG_UP)
            raise
        metrics.request(path, response.status_code)
        return response

    return counted


async def _not_found(request: Request, error: Exception, *, metrics: Metrics) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    metrics.request("other", status)
    # Not from request.url: that takes the Host header apart, which may be anything.
    path = str(request.scope["path"])
    said = {404: f"there is nothing at {shown(path)}", 405: f"{shown(path)} does not take {request.method[:20]}"}
    response = ApiError(status, said.get(status, "the request cannot be answered")).response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _failed(_request: Request, _error: Exception) -> Response:
    return fault_of_ours().response()


async def _page(_request: Request) -> Response:
    text, policy = _page_and_policy()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


@functools.cache
def _page_and_policy() -> tuple[str, str]:
    text = importlib.resources.files("splitctl.http").joinpath("data/page.html").read_text("utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return text, _POLICY.format(script=digest)
