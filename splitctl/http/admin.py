"""Routes for people and managers: status, the switch, events and files.

Laws:
    1. A file is a base name in the one folder that was named at the start; without one there are no files.
    2. Without a key, what changes the session is for this machine alone.
    3. A client that hangs up is let go of at once: its check, switch, save or restore ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitctl.carry.sampling import SAMPLER_PARAMS
from splitctl.control.connection import event_body
from splitctl.control.requests import REQUESTS
from splitctl.control.server import SessionService
from splitctl.errors import Busy, SplitctlError
from splitctl.http import bodies, fields
from splitctl.http.answers import comment
from splitctl.http.chat import names_of, room_of
from splitctl.http.devices import Devices
from splitctl.http.errors import ApiError, api_error
from splitctl.http.intake import Intake
from splitctl.http.sse import EventStream, unless_gone
from splitctl.ipc.wire import from_object
from splitctl.outcome import PROBE_INCONCLUSIVE, SwitchOptions
from splitctl.placement import SplitMode

#: Longest silence of the events [seconds].
_SILENCE_S = 10.0
_MAX_NAME = 128
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]*")

#: How tokens are drawn where a request does not say.
_DEFAULTS = {"n_predict": -1} | {param.json_name: param.default for param in SAMPLER_PARAMS.values()}


class Admin:
    """The routes beside OpenAI's.

    Thread: the loop's.
    """

    def __init__(
        self,
        host: SessionService,
        intake: Intake,
        devices: Devices,
        folder: Path | None,
        *,
        is_open: bool,
        aliases: Sequence[str] = (),
    ) -> None:
        """Answer from a session; files are saved in `folder` and restored from it, None: nowhere.

        `is_open`: the session may be changed, as there is a key, or the server listens to this machine alone.
        `aliases` name the model.
        """
        self._host = host
        self._intake = intake
        self._devices = devices
        self._folder = folder
        self._aliases = aliases
        self._is_open = is_open
        self._untried: tuple[str, dict[SplitMode, dict[str, Any]]] = "", {}
        self._judging = asyncio.Lock()
        self._n_watchers = 0

    async def health(self, _request: Request) -> Response:
        """Say whether the server lives; 503 only while the model is loaded for the first time."""
        state = str(self._host.status()["state"])
        if state == "loading":
            error = ApiError(503, "the model is being loaded", code="loading")
            return JSONResponse({"status": "loading", **error.body}, 503, {"Retry-After": "1"})
        return JSONResponse({"status": "ok" if state == "serving" else state})

    async def props(self, _request: Request) -> Response:
        """Say what is served, and where."""
        status = self._host.status()
        model, placement = status.get("model") or {}, status.get("placement") or {}
        model = _without_folder(model)
        return JSONResponse(
            {
                "model_alias": names_of(model, self._aliases)[0],
                "model_path": model["path"],
                "model": model,
                "devices": self._devices.read(status),
                "build_info": model.get("build"),
                "total_slots": placement.get("n_seq_max"),
                "default_generation_settings": {"n_ctx": room_of(placement), "params": _DEFAULTS},
                "modalities": {"vision": False, "audio": False},
                "split_mode": {"requested": status.get("requested"), "effective": status.get("effective")},
                "placement": placement,
                "weights": status.get("weights"),
                "session": status.get("name"),
                "has_files": self._folder is not None,
            }
        )

    async def slots(self, request: Request) -> Response:
        """Say what every sequence is doing; 503 if all are busy and the client asks for that."""
        status = self._host.status()
        if request.query_params.get("fail_on_no_slot") and all(one["state"] != "idle" for one in status["sequences"]):
            raise ApiError(503, "no slot available", code="busy")
        placement = status.get("placement") or {}
        room = room_of(placement)
        return JSONResponse(
            [
                {
                    "id": one["seq_id"],
                    "n_ctx": room,
                    "speculative": False,
                    "n_tokens": one["n_tokens"],
                    "state": one["state"],
                    "is_processing": one["state"] != "idle",
                }
                for one in status["sequences"]
            ]
        )

    async def session(self, _request: Request) -> Response:
        """Give all that the page shows."""
        status = self._host.status()
        model = _without_folder(status.get("model") or {})
        devices = self._devices.read(status)
        recent = self._host.recent_switches()
        return JSONResponse({**status, "model": model, "recent_switches": recent, "devices": devices})

    async def modes(self, request: Request) -> Response:
        """Say for each mode whether a switch to it would be allowed, and why not."""
        status = self._host.status()
        known = {"requested": status.get("requested"), "effective": status.get("effective")}
        modes = await unless_gone(request.receive, self._judgements(status))
        return JSONResponse({**known, "placement": status.get("placement"), "modes": modes})

    async def switch(self, request: Request) -> Response:
        """Move the session; every outcome is an answer with status 200."""
        self._refuse_closed()
        body = {name: value for name, value in (await self._intake.small(request)).items() if value is not None}
        is_dry = bodies.flag(body, "dry_run")
        body.pop("dry_run", None)
        mode = body.pop("to", None)
        if mode is not None:
            changes = body.get("changes", {})
            if not isinstance(changes, dict) or changes.get("mode", mode) != mode:
                raise bodies.wrong("to", mode, "one mode, in to or in changes")
            body["changes"] = {**changes, "mode": mode}
        if isinstance(body.get("changes"), dict):
            body["changes"] = {name: bodies.as_whole(value) for name, value in body["changes"].items()}
        kind = "check" if is_dry else "switch"
        asked = from_object({**body, "kind": kind}, {kind: REQUESTS[kind]})
        if is_dry:
            work = self._host.check(asked.changes, asked.options)
        else:
            work = self._host.switch(
                asked.changes, asked.options, timeout_s=asked.timeout_s, on_stage=lambda _stage, _share: None
            )
        return JSONResponse(await unless_gone(request.receive, work, goes_on=not is_dry))

    async def policy(self, request: Request) -> Response:
        """Let the session switch by itself, or no more."""
        self._refuse_closed()
        asked = from_object({**await self._intake.small(request), "kind": "policy"}, {"policy": REQUESTS["policy"]})
        return JSONResponse(self._host.set_policy(asked.policy))

    async def cancel(self, _request: Request) -> Response:
        """Ask the switch under way to end in the old placement."""
        self._refuse_closed()
        self._host.cancel_switch()
        return JSONResponse({"cancelled": True})

    async def events(self, request: Request) -> Response:
        """Send what happens to the session from now on."""
        del request
        if self._n_watchers >= self._intake.limits.n_watchers:
            raise ApiError(429, f"{self._n_watchers} clients watch already", code="busy")
        self._n_watchers += 1
        return EventStream(self._events(), on_gone=self._unwatched, write_s=self._intake.limits.write_s)

    async def save(self, request: Request) -> Response:
        """Write the session to a file of the folder."""
        path = await self._file(request)
        saved = await unless_gone(request.receive, self._host.save(path), goes_on=True)
        return JSONResponse({**saved, "path": path.name})

    async def restore(self, request: Request) -> Response:
        """Replace the session with a file of the folder."""
        path = await self._file(request)
        if not path.is_file() or path.is_symlink():
            raise ApiError(404, f"there is no saved session {path.name!r}", param="filename")
        restored = await unless_gone(request.receive, self._host.restore(path), goes_on=True)
        return JSONResponse({**restored, "path": path.name})

    # ---- the work behind them ----

    async def _judgements(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Judge every mode, as what the session holds and the memory that is free change; none where it cannot be."""
        if status["state"] != "serving" or status.get("placement") is None:
            return {}
        async with self._judging:
            here = json.dumps(status["placement"], sort_keys=True)
            if self._untried[0] != here:
                self._untried = here, {}
            return {mode.value: self._untried[1].get(mode) or await self._judge(mode) for mode in _OFFERED}

    async def _judge(self, mode: SplitMode) -> dict[str, Any]:
        try:
            found = await self._host.check({"mode": mode}, SwitchOptions())
        except Busy as error:
            raise api_error(error) from error
        except SplitctlError as error:
            return {"allowed": False, "reasons": [str(error)]}
        reasons = [str(one["text"]) for one in found["reasons"]]
        judged = {"allowed": not reasons, "reasons": reasons, "expected_s": found.get("expected_s")}
        if any(one["code"] == PROBE_INCONCLUSIVE for one in found["reasons"]):
            # No verdict is remembered of it: each question would start another child process.
            self._untried[1][mode] = judged
        return judged

    def _unwatched(self) -> None:
        self._n_watchers -= 1

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield comment("events of the session")
        events = aiter(self._host.subscribe())
        pending: asyncio.Future[Any] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({pending}, timeout=_SILENCE_S)
                if not done:
                    yield comment("nothing new")
                    continue
                try:
                    body = event_body(pending.result())
                except StopAsyncIteration:
                    return
                pending = None
                name = body.pop("kind")
                yield f"event: {name}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
        finally:
            if pending is not None:
                pending.cancel()

    async def _file(self, request: Request) -> Path:
        self._refuse_closed()
        if self._folder is None:
            raise ApiError(403, "no folder for files; start the server with --slot-save-path FOLDER")
        body = await self._intake.small(request)
        fields.FILE.refuse_others(body)
        name = body.get("filename")
        if not isinstance(name, str) or len(name) > _MAX_NAME or _FILE_NAME.fullmatch(name) is None:
            wanted = f"a file's name of letters, digits, dots, dashes and underscores, {_MAX_NAME} characters at most"
            raise bodies.wrong("filename", name, wanted)
        return self._folder / name

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise ApiError(403, "this server listens to other machines, so this needs a key: start it with --api-key")


def _without_folder(model: Mapping[str, Any]) -> dict[str, Any]:
    """Show the file's name without its folder."""
    return {**model, "path": str(model.get("path") or "").rpartition("/")[2]}


#: Modes that the page offers.
_OFFERED = (SplitMode.LAYER, SplitMode.TENSOR, SplitMode.NONE, SplitMode.ROW)
