"""`splitctl attach`: prompts from this terminal, answers from a session that another process holds."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import click

from splitctl.carry.sampling import SamplerSpec
from splitctl.cli.hosts import CtrlC, address_of, session_option, with_screen
from splitctl.cli.options import predict_option, prompt_options, sampler_options
from splitctl.cli.output import ExitCode, Screen, one_line
from splitctl.cli.prompts import PromptUnreadable, read_prompt
from splitctl.cli.switch import outcome_line
from splitctl.control.client import Call, ControlAnswer, HostGone, wait
from splitctl.control.requests import EventsRequest, GenerateRequest
from splitctl.control.sockets import Address
from splitctl.ipc.jobs import Progress


@dataclass(slots=True)
class Talk:
    """Prompts to a session, one after the other.

    Attributes:
        address: where the session is reached.
        sampler: how tokens are drawn.
        n_predict: most tokens of an answer; negative: no limit.
        is_chat: apply the model's template, and keep the messages.
        messages: the chat so far.
    """

    address: Address
    sampler: SamplerSpec
    n_predict: int
    is_chat: bool
    messages: list[dict[str, Any]] = field(default_factory=list)

    def request(self, prompt: str) -> GenerateRequest:
        """Make the request for the next prompt."""
        if not self.is_chat:
            return GenerateRequest(prompt=prompt, n_predict=self.n_predict, sampler=self.sampler)
        messages = (*self.messages, {"role": "user", "content": prompt})
        return GenerateRequest(messages=messages, n_predict=self.n_predict, sampler=self.sampler)

    def remember(self, prompt: str, text: str) -> None:
        """Keep prompt and answer for the next prompt of a chat."""
        if self.is_chat:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]


@click.command()
@session_option
@prompt_options
@click.option("--chat", is_flag=True, help="Apply the model's chat template, and keep the conversation.")
@predict_option
@sampler_options
@with_screen
def attach(
    *,
    session: str | None,
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    n_predict: int,
    sampler: SamplerSpec,
    screen: Screen,
) -> int:
    """Generate with a running session. Without -p or -f, prompts are read line by line.

    A switch during an answer is shown, and the answer goes on. Ctrl-C ends the answer; at the prompt it ends the
    command.
    """
    if screen.as_json and prompt is None and prompt_file is None:
        raise click.UsageError("--json prints one answer: give the prompt with -p TEXT or with -f FILE")
    if prompt is None and prompt_file is None:
        return _prompts(Talk(address_of(session), sampler, n_predict, chat), screen)
    text = read_prompt(prompt, prompt_file, needed=True)
    return answer_once(Talk(address_of(session), sampler, n_predict, chat), text, screen)


def answer_once(talk: Talk, prompt: str, screen: Screen) -> ExitCode:
    """Answer one prompt and show how that ended."""
    body = _answer(talk, prompt, screen)
    screen.end_text()
    code = {"error": ExitCode.FAILED, "cancelled": ExitCode.CANCELLED}.get(body["why"], ExitCode.DONE)
    if code is ExitCode.CANCELLED:
        # It is told once, whatever comes now.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = str(body["message"] or "the answer was ended by Ctrl-C")
    if code is ExitCode.DONE:
        screen.line(_rates(body))
        return screen.answer(body)
    return screen.fail("Cancelled" if code is ExitCode.CANCELLED else "StreamEnded", message, code, body)


def _prompts(talk: Talk, screen: Screen) -> ExitCode:
    is_terminal = sys.stdin.isatty()
    for prompt in _lines(screen, is_terminal=is_terminal):
        body = _answer(talk, prompt, screen)
        screen.end_text()
        if body["why"] == "error":
            screen.line(f"splitctl: {one_line(str(body['message']))}")
            if not is_terminal:
                return ExitCode.FAILED
        elif body["why"] == "cancelled" and not is_terminal:
            return ExitCode.CANCELLED
        else:
            screen.line(_rates(body))
            talk.remember(prompt, body["text"])
    return ExitCode.DONE


def _lines(screen: Screen, *, is_terminal: bool) -> Iterator[str]:
    while True:
        try:
            if is_terminal and _is_interrupted(screen):
                screen.line("")
                return
            line = sys.stdin.readline()
            # In some locales bytes that are no text come through.
            line.encode()
        except KeyboardInterrupt:
            screen.line("")
            return
        except UnicodeError as error:
            message = "standard input is not UTF-8; convert it, for example with iconv"
            raise PromptUnreadable(message) from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _is_interrupted(screen: Screen) -> bool:
    """Show the mark and wait for a line: a read that an interrupt comes just before is not ended by it."""
    with CtrlC() as ctrl_c:
        screen.question("> ")
        return ctrl_c.fileno() in wait([sys.stdin.fileno(), ctrl_c.fileno()])


def _answer(talk: Talk, prompt: str, screen: Screen) -> dict[str, Any]:
    """Answer a prompt on the screen; returns how the stream ended, with `text` and `tokens`."""
    pieces: list[str] = []
    tokens: list[int] = []
    with ExitStack() as stack:
        ctrl_c = stack.enter_context(CtrlC())
        watch = stack.enter_context(Call(talk.address, EventsRequest()))
        stream = stack.enter_context(Call(talk.address, talk.request(prompt)))
        sources: list[Call | int] = [stream, watch, ctrl_c.fileno()]
        while True:
            ready = wait(sources)
            if ctrl_c.fileno() in ready:
                ctrl_c.take()
                stream.cancel()
            if watch in ready and not _watched(watch, screen):
                sources.remove(watch)
            if stream not in ready:
                continue
            for message in stream.read():
                if isinstance(message, ControlAnswer):
                    return {**message.body, "text": "".join(pieces), "tokens": tokens}
                match message.body:
                    case {"kind": "delta", "text": str() as text, "token": token}:
                        pieces.append(text)
                        tokens += [token] if token is not None else []
                        screen.text(text.encode("utf-8", "replace"))
                    case {"kind": "begun", "n_prompt": n_prompt, "n_reused": n_reused}:
                        screen.progress(Progress("prompt", None, f"{n_prompt} tokens, {n_reused} of them held already"))
                    case {"kind": "paused", "why": str() as why}:
                        screen.note(f"-- paused: {one_line(why)}")


def _watched(watch: Call, screen: Screen) -> bool:
    """Show events of the session; return whether more may come."""
    try:
        for message in watch.read():
            if isinstance(message, ControlAnswer):
                return False
            line = _line_of(message.body)
            if line:
                screen.note(f"-- {line}")
    except HostGone:
        # The stream reports its own end.
        return False
    return True


def _line_of(event: dict[str, Any]) -> str:
    """Describe an event in one line; empty for those that are not shown."""
    match event:
        case {"kind": "switch_ended", "outcome": dict() as outcome}:
            return outcome_line(outcome)
        case {"kind": "trial_ended", "outcome": {"status": "switched"}}:
            return ""
        case {"kind": "trial_ended", "outcome": dict() as outcome}:
            return outcome_line(outcome)
        case {"kind": "worker_gone", "reason": str() as reason}:
            return f"{one_line(reason)}; recovering"
        case {"kind": "session_recovered", "mode": str() as mode, "recomputed": bool() as recomputed}:
            return f"the session serves again in {mode} mode{', read again from its tokens' if recomputed else ''}"
        case {"kind": "session_parked", "path": path}:
            return f"the session is parked at {path}; splitctl restore {path} brings it back"
    return ""


def _rates(body: dict[str, Any]) -> str:
    def rate(n: int, ms: float, n_timed: int) -> str:
        return f"{n} tokens at {n_timed / ms * 1e3:,.1f} tokens/s" if n_timed > 0 and ms else f"{n} tokens"

    n_read = body["n_prompt"] - body["n_reused"]
    held = f", {body['n_reused']} held already" if body["n_reused"] else ""
    # The first token comes from the prompt's last decode; the one that ends the answer has a decode of its own.
    generated = rate(body["n_predicted"], body["generate_ms"], body["n_predicted"] - (body["why"] != "eos"))
    return f"prompt {rate(n_read, body['prompt_ms'], n_read)}{held}, generate {generated} ({body['why']})"
