"""The models that LLM gets: one for each session that is served, and one for each GGUF file."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click
import llm
from llm.parts import Message, ReasoningPart, TextPart
from pydantic import Field, create_model

import splitctl
from llm_splitctl.settings import files, settings
from splitctl.carry.sampling import SAMPLER_PARAMS
from splitctl.control.sockets import runtime_folder, sessions
from splitctl.ipc.stop_texts import Usage

#: A model's name begins with it; alone it is the only session that is served.
PREFIX = "splitctl"


def _option(default: object, about: str, **limits: Any) -> tuple[Any, Any]:
    kind: Any = str | list[str] if isinstance(default, tuple) else type(default)
    return kind | None, Field(default=None, description=about, **limits)


_DRAWING: dict[str, Any] = {
    param.json_name: _option(
        param.default, param.help, **({} if isinstance(param.default, tuple) else {"ge": param.low, "le": param.high})
    )
    for param in SAMPLER_PARAMS.values()
}
_LENGTH: dict[str, Any] = {
    "n_predict": _option(-1, "Most tokens of the answer; -1 goes on to the model's end or a full context."),
}
_MODE: dict[str, Any] = {
    "split_mode": (
        # Words: LLM keeps options as JSON.
        Literal[*(one.value for one in splitctl.SplitMode)] | None,
        Field(default=None, description="Switch to this split mode before: none, layer, row or tensor."),
    ),
}

SessionOptions = create_model("SessionOptions", __base__=llm.Model.Options, **_DRAWING, **_LENGTH)
FileOptions = create_model("FileOptions", __base__=SessionOptions, **_MODE)


class _Common:
    """What all of the models have."""

    model_id: str
    can_stream = True
    supports_schema = True

    def __str__(self) -> str:
        return f"splitctl: {self.model_id}"


class SessionModel(_Common, llm.Model):
    """A running session. Its host keeps what a conversation has read, on the sequence that holds it."""

    Options = SessionOptions

    def __init__(self, name: str | None) -> None:
        """Take a session by name; None: the only one that is served."""
        self._name = name
        self.model_id = PREFIX if name is None else f"{PREFIX}/{name}"

    def what(self) -> str:
        """Say in a few words how it is."""
        if self._name is None:
            return "the only session that is served"
        try:
            status = splitctl.Client(self._name).status()
        except splitctl.SplitctlError as error:
            return f"session: {error}"
        mode = "" if status.effective is None else f" in {status.effective.value} mode"
        return f"session, {status.state}{mode}: {(status.raw.get('model') or {}).get('path', '')}"

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: FBT001 - as LLM calls it
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Give the text of the answer as it comes."""
        del stream, conversation
        with _told(), splitctl.Client(self._name) as client, client.chat(**_asked(prompt)) as answer:
            for delta in answer:
                if delta.text:
                    yield delta.text
            _note(response, answer.usage)


class AsyncSessionModel(_Common, llm.AsyncModel):
    """The same for asyncio."""

    Options = SessionOptions

    def __init__(self, name: str | None) -> None:
        """As `SessionModel`."""
        self._name = name
        self.model_id = PREFIX if name is None else f"{PREFIX}/{name}"

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: FBT001 - as LLM calls it
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,
    ) -> AsyncGenerator[str, None]:
        """Give the text of the answer as it comes."""
        del stream, conversation
        with _told():
            async with splitctl.connect_async(self._name) as client, client.chat(**_asked(prompt)) as answer:
                async for delta in answer:
                    if delta.text:
                        yield delta.text
                _note(response, answer.usage)


class FileModel(_Common, llm.Model):
    """A GGUF file, opened in this process when it is first asked, and kept open until the process ends."""

    Options = FileOptions

    def __init__(self, name: str, path: Path, placement: splitctl.Placement) -> None:
        """Take a file, and where it is to be opened."""
        self._path = path
        self._placement = placement
        self.model_id = f"{PREFIX}/{name}"

    def what(self) -> str:
        """Say in a few words what it is."""
        return f"file: {self._path}" if self._path.is_file() else f"file that is not there: {self._path}"

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: FBT001 - as LLM calls it
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Give the text of the answer as it comes; the session is switched before, where another mode is asked for."""
        del stream, conversation
        mode: str | None = getattr(prompt.options, "split_mode", None)
        with _told(), _SESSIONS.taken(self._path, self._placement, mode) as session:
            asked = _asked(prompt)
            asked["sampler"] = splitctl.SamplerSpec(**asked["sampler"])
            answer = session.chat(**asked)
            yield from answer
            _note(response, answer.usage)


class _Sessions:
    """The open sessions of this process, by file. Thread: any; a session answers one prompt at a time."""

    def __init__(self) -> None:
        self._open: dict[Path, splitctl.Session] = {}
        self._busy: set[Path] = set()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, path: Path, placement: splitctl.Placement, mode: str | None) -> Iterator[splitctl.Session]:
        """Give the session of a file to one answer, in a split mode; None: the one that it is in.

        Raises:
            llm.ModelError: it answers another prompt, or the switch was not made.
            splitctl.SplitctlError: it cannot be opened.
        """
        with self._lock:
            if path in self._busy:
                raise llm.ModelError(f"{path} answers another prompt; read that to its end first, or close it")
            self._busy.add(path)
        try:
            if path not in self._open:
                if not self._open:
                    atexit.register(self.close)
                wanted = placement if mode is None else placement.changed(mode=mode)
                self._open[path] = splitctl.Session.open(path, wanted)
            elif mode is not None:
                outcome = self._open[path].switch(mode)
                if outcome.effective is not outcome.requested:
                    raise llm.ModelError(f"the switch to {mode} was not made: {outcome.reason}")
            yield self._open[path]
        finally:
            self._busy.discard(path)

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1].close()


_SESSIONS = _Sessions()


def found() -> Iterator[tuple[SessionModel | FileModel, AsyncSessionModel | None]]:
    """Give the models that there are: the sessions first, then the files.

    What is wrong with the settings, or the folder of sessions, is told on stderr: the models of others are there.
    """
    yield SessionModel(None), AsyncSessionModel(None)
    taken: set[str] = set()
    try:
        for address in sessions(runtime_folder(os.environ)):
            taken.add(address.name)
            yield SessionModel(address.name), AsyncSessionModel(address.name)
        read = settings()
        for name, path in files(read.models).items():
            if name not in taken:
                yield FileModel(name, path, read.placement), None
    except splitctl.SplitctlError as error:
        click.echo(f"llm-splitctl: {error}", err=True)


def _asked(prompt: llm.Prompt) -> dict[str, Any]:
    """Give the arguments of a chat; raises llm.ModelError for what is no text."""
    options = {name: value for name, value in prompt.options if value is not None}
    sampler = {name: options[param.json_name] for name, param in SAMPLER_PARAMS.items() if param.json_name in options}
    asked: dict[str, Any] = {"messages": list(map(_plain, prompt.messages)), "n": options.get("n_predict", -1)}
    if prompt.schema is not None:
        # It imports the native package.
        from splitctl.compat.llama_cpp.json_schema import to_gbnf  # noqa: PLC0415

        asked["grammar"] = to_gbnf(prompt.schema)
    return asked | {"sampler": sampler}


def _plain(message: Message) -> dict[str, str]:
    """Give a message as the model's template knows it; what a model thought is not said again."""
    said = [one for one in message.parts if not isinstance(one, ReasoningPart)]
    texts = [one.text for one in said if isinstance(one, TextPart)]
    if len(texts) != len(said):
        kinds = ", ".join(sorted({type(one).__name__ for one in said if not isinstance(one, TextPart)}))
        raise llm.ModelError(f"the model takes text alone, and a message of the {message.role} holds {kinds}")
    return {"role": message.role, "content": "".join(texts)}


def _note(response: llm.Response | llm.AsyncResponse, usage: Usage | None) -> None:
    if usage is not None:
        response.set_usage(input=usage.n_prompt, output=usage.n_generated, details={"reused": usage.n_reused})
        times = {"prompt_ms": round(usage.prompt_ms, 1), "generate_ms": round(usage.generate_ms, 1)}
        response.response_json = {"finish_reason": usage.finish_reason, **times}


@contextmanager
def _told() -> Iterator[None]:
    """Let LLM show what splitctl says: one line, with what to do."""
    try:
        yield
    except splitctl.NoSuchSession as error:
        if error.name is None and error.names:
            named = " or ".join(f"-m {PREFIX}/{name}" for name in error.names)
            raise llm.ModelError(f"several sessions are served; name one: {named}") from error
        raise llm.ModelError(str(error)) from error
    except (splitctl.SplitctlError, splitctl.NativeError) as error:
        raise llm.ModelError(str(error)) from error
