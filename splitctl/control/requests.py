"""What a client may ask of a host over its control socket.

Laws:
    1. A request is one line, read by `wire` alone; the classes here say what a field may hold.
    2. What a request builds is bounded by the length of its line, `MAX_REQUEST_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import MAX_GRAMMAR, SamplerSpec
from splitctl.errors import ConfigInvalid
from splitctl.ipc.wire import LATER, kinds_of
from splitctl.model.chat_messages import refuse_unreadable, refuse_unsound
from splitctl.outcome import Proof, Route, SwitchOptions
from splitctl.placement import Changes

#: A longer line is no request [bytes].
MAX_REQUEST_BYTES = 16 * 1024 * 1024

_INT32_MAX = 2**31 - 1
#: Longest time that a switch may wait for the token boundary [seconds].
_MAX_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Say how the session is."""


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """Move the session; proof, convert, force and via as in `SwitchOptions`.

    Attributes:
        changes: fields of the placement that change.
        timeout_s: longest wait for the token boundary, seconds; None: as long as it takes.
    """

    changes: Changes
    proof: Proof = Proof.BYTES
    convert: bool = True
    force: bool = False
    timeout_s: float | None = None
    via: Route = field(default=Route.AUTO, metadata=LATER)

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0.0 <= self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigInvalid("timeout_s", self.timeout_s, f"from 0 to {_MAX_TIMEOUT_S:g} seconds")

    @property
    def options(self) -> SwitchOptions:
        """How the switch is to be done."""
        return SwitchOptions(self.proof, self.convert, self.force, self.via)


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Say what a switch that changes these fields of the placement would do; the rest as for a switch."""

    changes: Changes
    convert: bool = True
    force: bool = False
    via: Route = field(default=Route.AUTO, metadata=LATER)

    @property
    def options(self) -> SwitchOptions:
        """How the switch would be done."""
        return SwitchOptions(convert=self.convert, force=self.force, via=self.via)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Read a prompt and generate after it; exactly one of prompt, messages and tokens is given.

    Attributes:
        prompt: a text.
        messages: a chat, turned into a text by the model's template: objects with role and content, and what else the
            template knows, such as tool_calls.
        tokens: the prompt as tokens.
        add_special: put the model's first token before a text.
        parse_special: let names of special tokens in a text be those tokens.
        n_predict: most tokens to generate; negative: until the model ends or the context is full.
        sampler: how tokens are drawn, and the texts that end the generation.
        chat_template_kwargs: more variables of the template; add_generation_prompt is true if absent.
        continue_final_message: field of the last message, content or reasoning_content, that the answer goes on with.
        grammar: a grammar in GBNF, with a rule named root, that the answer follows; empty: none.
    """

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tokens: tuple[int, ...] | None = None
    add_special: bool = True
    parse_special: bool = False
    n_predict: int = -1
    sampler: SamplerSpec = field(default_factory=SamplerSpec)
    chat_template_kwargs: dict[str, Any] | None = field(default=None, metadata=LATER)
    continue_final_message: str | None = field(default=None, metadata=LATER)
    grammar: str = field(default="", metadata=LATER)

    def __post_init__(self) -> None:
        given = [one for one in (self.prompt, self.messages, self.tokens) if one is not None]
        if len(given) != 1:
            raise ConfigInvalid("prompt", f"one of {len(given)} kinds", "exactly one of prompt, messages and tokens")
        if not given[0]:
            raise ConfigInvalid("prompt", "empty", "some text, message or token")
        if self.tokens is not None and not all(0 <= token <= _INT32_MAX for token in self.tokens):
            raise ConfigInvalid("tokens", "a token out of range", f"from 0 to {_INT32_MAX}")
        if self.messages is not None:
            refuse_unsound("messages", self.messages)
            refuse_unreadable(self.messages)
        refuse_unsound("chat_template_kwargs", self.chat_template_kwargs)
        if taken := sorted({"messages", "bos_token", "eos_token"}.intersection(self.chat_template_kwargs or ())):
            raise ConfigInvalid("chat_template_kwargs", taken[0], "names that the server does not give itself")
        if self.continue_final_message not in {None, "content", "reasoning_content"}:
            raise ConfigInvalid("continue_final_message", self.continue_final_message, "content or reasoning_content")
        refuse_unsound("grammar", self.grammar)
        if len(self.grammar) > MAX_GRAMMAR:
            raise ConfigInvalid("grammar", f"{len(self.grammar)} characters", f"{MAX_GRAMMAR} at most")
        if not -_INT32_MAX <= self.n_predict <= _INT32_MAX:
            raise ConfigInvalid("n_predict", self.n_predict, f"at most {_INT32_MAX}; negative: no limit")


@dataclass(frozen=True, slots=True)
class _FileRequest:
    path: Path

    def __post_init__(self) -> None:
        # A relative path would depend on where the host was started.
        if not self.path.is_absolute():
            raise ConfigInvalid("path", str(self.path), "an absolute path")


@dataclass(frozen=True, slots=True)
class SaveRequest(_FileRequest):
    """Write the whole session to a file; its path is absolute."""


@dataclass(frozen=True, slots=True)
class RestoreRequest(_FileRequest):
    """Replace all that the session holds with a carry, or a session or slot file of llama.cpp; its path is absolute."""


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """Let the session switch by itself, or no more.

    Attributes:
        policy: auto or off.
    """

    policy: str

    def __post_init__(self) -> None:
        if self.policy not in {"auto", "off"}:
            raise ConfigInvalid("policy", self.policy, "auto or off")


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Save the session and end the host.

    Attributes:
        force: end it even if the session cannot be saved; without it that is refused, and the session goes on.
    """

    force: bool = field(default=False, metadata=LATER)


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """Tell what happens to the session, until the client hangs up."""


ControlRequest = (
    StatusRequest | SwitchRequest | CheckRequest | GenerateRequest | SaveRequest | RestoreRequest | StopRequest
    | EventsRequest | PolicyRequest
)  # fmt: skip

REQUESTS = kinds_of(ControlRequest)
