"""What goes wrong over HTTP: one error class with a status, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from splitctl.errors import (
    Busy,
    Cancelled,
    CarryDamaged,
    CarryMismatch,
    ConfigInvalid,
    ContextFull,
    DeadlineExceeded,
    Parked,
    Refused,
    SplitctlError,
)
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.wire import MessageInvalid

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}

_STATUS_OF_FAULT = {
    Fault.CONFIG: 400,
    Fault.MODEL: 400,
    Fault.REFUSED: 409,
    Fault.CANCELLED: 409,
    Fault.BUSY: 409,
    Fault.PARKED: 503,
}

_ANSWERS: dict[type[SplitctlError], tuple[int, str]] = {
    ContextFull: (400, "context_length_exceeded"),
    CarryDamaged: (400, "unusable_file"),
    CarryMismatch: (400, "unusable_file"),
    Busy: (409, "busy"),
    Cancelled: (409, "cancelled"),
    Parked: (503, "parked"),
    DeadlineExceeded: (503, "deadline"),
}


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Build from what the answer says.

        Args:
            status: 400 to 599.
            message: a line for a person.
            param: the field at fault.
            code: a short word for programs.
            more: further fields of the error object; a type among them replaces that of the status.
        """
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self._more = dict(more or {})
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The object that OpenAI's clients read."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self._more}}

    def response(self) -> JSONResponse:
        """Give the answer."""
        headers = {"Retry-After": "1"} if self.status in {429, 503} else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in {408, 431}:
            # What still comes is no request.
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def prompt_too_long(n_prompt: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """Refuse a prompt that no sequence can hold, in llama-server's words, and with OpenAI's code.

    Args:
        n_prompt: tokens of the prompt.
        n_ctx: tokens that a sequence can hold.
        at_least: the prompt was not counted, and has more.
    """
    found = f"at least {n_prompt}" if at_least else str(n_prompt)
    return ApiError(
        400,
        f"request ({found} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
        code="context_length_exceeded",
        more={"type": "exceed_context_size_error", "n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )


def fault_of_ours() -> ApiError:
    """Give the answer to a request over which our own code failed."""
    return ApiError(500, "a fault of splitctl; its log says more, please report it", code="internal")


def api_error(error: SplitctlError) -> ApiError:
    """Turn an error of the session into an answer."""
    match error:
        case ConfigInvalid() | MessageInvalid():
            return ApiError(400, str(error), param=error.field or None)
        case Refused():
            return ApiError(409, str(error), code=error.reasons[0].code if error.reasons else "refused")
        case RequestFailed():
            # Another process raised it, and has told its name.
            known = next((known for kind, known in _ANSWERS.items() if kind.__name__ == error.name), None)
            status, code = known or (_STATUS_OF_FAULT.get(error.fault, 500), error.name)
            return ApiError(status, error.message, code=code)
    known = next((known for kind, known in _ANSWERS.items() if isinstance(error, kind)), None)
    status, code = known or (500, type(error).__name__)
    return ApiError(status, str(error), code=code)
