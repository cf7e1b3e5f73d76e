"""Which address is answered by whom."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from splitctl.errors import SplitctlError
from splitctl.host.control import Hosted
from splitctl.http.admin import Admin
from splitctl.http.chat import Chat
from splitctl.http.errors import ApiError, api_error
from splitctl.http.guard import App, Guard, Intake, Limits
from splitctl.http.metrics import CONTENT_TYPE, Metrics
from splitctl.http.watch import Watch

Answer = Callable[[Request], Awaitable[Response]]

#: The page uses nothing from elsewhere, and says so to the browser.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLAIN_LIMITS = Limits()


def build_app(
    host: Hosted,
    *,
    watch: Watch,
    tell: Callable[[str], None],
    api_keys: Sequence[str] = (),
    host_names: Sequence[str] = (),
    origins: Sequence[str] = (),
    is_loopback: bool = True,
    folder: Path | None = None,
    limits: Limits = _PLAIN_LIMITS,
) -> App:
    """Make the app of a session.

    Args:
        host: does the work.
        watch: knows the last switches.
        tell: takes lines for the log.
        api_keys: any of them opens; none: no key is asked for.
        host_names: names that the server is reached by.
        origins: pages elsewhere that may use it.
        is_loopback: whether it listens to this machine alone.
        folder: where files are saved and restored; None: nowhere.
        limits: what one client may take.
    """
    metrics = Metrics(host)
    intake = Intake(limits)
    chat = Chat(host, intake, metrics.done)
    admin = Admin(host, intake, watch, folder, is_open=bool(api_keys) or is_loopback)

    async def numbers(_request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    routes: tuple[tuple[str, str, Answer], ...] = (
        ("GET", "/", _page),
        ("GET", "/health", admin.health),
        ("GET", "/v1/health", admin.health),
        ("GET", "/v1/models", chat.models),
        ("GET", "/models", chat.models),
        ("POST", "/v1/chat/completions", chat.chat_completions),
        ("POST", "/chat/completions", chat.chat_completions),
        ("POST", "/v1/completions", chat.completions),
        ("GET", "/props", admin.props),
        ("GET", "/slots", admin.slots),
        ("GET", "/session", admin.session),
        ("GET", "/metrics", numbers),
        ("GET", "/split-mode", admin.modes),
        ("POST", "/split-mode", admin.switch),
        ("POST", "/split-mode/cancel", admin.cancel),
        ("GET", "/split-mode/events", admin.events),
        ("POST", "/session/save", admin.save),
        ("POST", "/session/restore", admin.restore),
    )
    app: App = Starlette(
        routes=[Route(path, _counted(answer, path, metrics), methods=[method]) for method, path, answer in routes],
        exception_handlers={HTTPException: functools.partial(_not_found, metrics=metrics)},
    )
    if origins:
        app = CORSMiddleware(app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return Guard(
        app,
        api_keys=api_keys,
        hosts=host_names,
        origins=origins,
        is_loopback=is_loopback,
        tell=tell,
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
        metrics.request(path, response.status_code)
        return response

    return counted


async def _not_found(request: Request, error: Exception, *, metrics: Metrics) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    metrics.request("other", status)
    path = request.url.path[:80]
    said = {404: f"there is nothing at {path!r}", 405: f"{path!r} does not take {request.method[:20]}"}
    response = ApiError(status, said.get(status, "the request cannot be answered")).response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _page(_request: Request) -> Response:
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(_page_text(), media_type="text/html; charset=utf-8", headers=headers)


@functools.cache
def _page_text() -> str:
    return importlib.resources.files("splitctl.http").joinpath("data/page.html").read_text("utf-8")


__all__ = ["build_app"]
