"""Fields of OpenAI's and llama-server's requests: read, without effect, or without effect at some values. Pure.

A field that stands in no list here is refused as well: nobody knows what it would change.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from splitctl.carry.sampling import SAMPLER_PARAMS
from splitctl.http.errors import ApiError
from splitctl.ipc.wire import shown

#: Whether a value changes nothing, and what to do in place of another one.
Neutral = tuple[Callable[[Any], bool], str]


@dataclass(frozen=True, slots=True)
class Fields:
    """What is known of the fields of an object.

    Attributes:
        read: fields that are honoured.
        harmless: fields that change nothing, whatever they hold.
        neutral: fields that change nothing at some values, and are refused at others.
    """

    read: frozenset[str]
    harmless: frozenset[str] = frozenset()
    neutral: Mapping[str, Neutral] = field(default_factory=dict)

    def refuse_others(self, found: Mapping[str, Any], where: str = "") -> None:
        """Refuse what would change something and is not read.

        Args:
            found: the object. Null is absent.
            where: its name, for errors; empty for the body.

        Raises:
            ApiError: a field would change something; it is named.
        """
        for name, value in found.items():
            if value is None or name in self.read or name in self.harmless:
                continue
            is_neutral, why = self.neutral.get(name, (_is_empty, ""))
            if not is_neutral(value):
                # Escaped: it may hold half a character.
                plain = repr(name[:_SHOWN])[1:-1]
                full = f"{where}.{plain}" if where else plain
                message = f"{full} is {shown(value)}; {why or self._unknown(name)}"
                raise ApiError(400, message, param=(where or full).partition("[")[0], code="unsupported")

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name[:_SHOWN], sorted(self.read), 1)
        return f"unknown field: {f'did you mean {close[0]}?' if close else 'leave it out'}"


#: Characters of a name that are shown.
_SHOWN = 60


def _is_one(value: Any) -> bool:
    return type(value) in {int, float} and value == 1


def _is_zero(value: Any) -> bool:
    return type(value) in {int, float} and value == 0


def _is_off(value: Any) -> bool:
    return type(value) in {int, float} and value <= 0


def _is_below_zero(value: Any) -> bool:
    return type(value) in {int, float} and value < 0


def _is_empty(value: Any) -> bool:
    return value in ({}, [], "")


def _is_false(value: Any) -> bool:
    return value in ({}, [], "", False)


def _is_never(_value: Any) -> bool:
    return False


def _is_no_choice(value: Any) -> bool:
    return value in ("none", "auto")


def _is_usual_order(value: Any) -> bool:
    """Whether samplers stand in the order in which they are applied; those that are off at any place."""
    if not isinstance(value, list):
        return False
    return [one for one in value if one not in _SAMPLERS_OFF] in (_SAMPLERS, _SAMPLERS[1:])


_SAMPLERS = ["penalties", "top_k", "top_p", "min_p", "temperature"]
_SAMPLERS_OFF = ("dry", "top_n_sigma", "typ_p", "xtc")

_READ = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "return_tokens",
        "max_tokens",
        "max_completion_tokens",
        "n_predict",
        "grammar",
    )
) | {param.json_name for param in SAMPLER_PARAMS.values()}

_HARMLESS = frozenset(
    (
        # Whose request it is, and how OpenAI bills, stores and speeds it up.
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "prediction",
        # Where and how llama-server computes: here the sequence that holds most of a prompt takes it, and none is cut.
        "cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "n_discard", "backend_sampling", "sse_ping_interval",
        "speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type", "speculative.ngram_size_n",
        "speculative.ngram_size_m", "speculative.ngram_min_hits",
        # Details of what is refused below.
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay", "post_sampling_probs", "grammar_type",
        "grammar_triggers", "grammar_lazy", "preserved_tokens", "parallel_tool_calls", "reasoning_budget_message",
        "reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags",
    )
)  # fmt: skip

_SAMPLE = "use temperature, top_k, top_p and min_p"
_PENALIZE = "use repeat_penalty and repeat_last_n"
_GRAMMARS = "send a grammar in GBNF, as grammar"
_PROBABILITIES = "probabilities are not given"
_ANSWERS = "one answer a request: send several requests"
_TOOLS = "tools are not called"
_THINKING = "how long a model thinks is not limited"
_AFTER = "text is generated after a prompt only"
_AT_THE_END = "timings come with the end of an answer"

_NEUTRAL: Mapping[str, Neutral] = {
    "n": (_is_one, _ANSWERS),
    "n_cmpl": (_is_one, _ANSWERS),
    "best_of": (_is_one, _ANSWERS),
    "presence_penalty": (_is_zero, _PENALIZE),
    "frequency_penalty": (_is_zero, _PENALIZE),
    "repetition_penalty": (_is_one, _PENALIZE),
    "dry_multiplier": (_is_zero, _PENALIZE),
    "logit_bias": (_is_empty, "single tokens cannot be weighed"),
    "mirostat": (_is_zero, _SAMPLE),
    "dynatemp_range": (_is_zero, _SAMPLE),
    "typical_p": (_is_one, _SAMPLE),
    "top_n_sigma": (_is_off, _SAMPLE),
    "xtc_probability": (_is_zero, _SAMPLE),
    "adaptive_target": (_is_below_zero, _SAMPLE),
    "min_keep": (lambda value: _is_zero(value) or _is_one(value), _SAMPLE),
    "samplers": (_is_usual_order, f"the order is {', '.join(_SAMPLERS)}"),
    "logprobs": (lambda value: _is_false(value) or _is_zero(value), _PROBABILITIES),
    "top_logprobs": (_is_zero, _PROBABILITIES),
    "n_probs": (_is_zero, _PROBABILITIES),
    "ignore_eos": (_is_false, "an answer ends where the model ends it"),
    "n_indent": (_is_zero, "lines of any indent are generated"),
    "t_max_predict_ms": (_is_off, "an answer has no time limit: hang up to end it"),
    "t_max_prompt_ms": (_is_off, "a prompt has no time limit: hang up to end it"),
    "lora": (_is_empty, "adapters are applied for all requests: splitctl serve --lora"),
    # An empty schema is not none: any JSON fits it, and other text does not.
    "json_schema": (_is_never, _GRAMMARS),
    "tools": (_is_empty, _TOOLS),
    "functions": (_is_empty, _TOOLS),
    "tool_choice": (_is_no_choice, _TOOLS),
    "function_call": (_is_no_choice, _TOOLS),
    "parse_tool_calls": (_is_false, "tool calls are part of the text"),
    "echo": (_is_false, "the prompt is not sent back"),
    "suffix": (_is_empty, _AFTER),
    "input_prefix": (_is_empty, _AFTER),
    "input_suffix": (_is_empty, _AFTER),
    "input_extra": (_is_empty, _AFTER),
    "timings_per_token": (_is_false, _AT_THE_END),
    "return_progress": (_is_false, _AT_THE_END),
    "verbose": (_is_false, "answers have one form"),
    "response_fields": (_is_empty, "answers have one form"),
    "reasoning_format": (_is_no_choice, "reasoning is part of the text"),
    "reasoning_control": (_is_false, _THINKING),
    "reasoning_budget_tokens": (_is_below_zero, _THINKING),
    "thinking_budget_tokens": (_is_below_zero, _THINKING),
    "generation_prompt": (_is_empty, "use continue_final_message"),
    "chat_format": (_is_zero, "answers are text"),
    "chat_parser": (_is_empty, "answers are text"),
    "modalities": (lambda value: value == ["text"], "answers are text"),
    "audio": (_is_never, "answers are text"),
    "verbosity": (lambda value: value == "medium", "say it in a message"),
    "web_search_options": (_is_never, "nothing is searched"),
    "moderation": (_is_never, "nothing is moderated"),
    "enable_thinking": (_is_never, "send it in chat_template_kwargs"),
}

_NO_TEMPLATE = "a completion has no template: use /v1/chat/completions"
_TEMPLATE = frozenset(("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "reasoning_effort"))

CHAT = Fields(
    _READ | _TEMPLATE | {"messages", "response_format"},
    _HARMLESS,
    {**_NEUTRAL, "prompt": (_is_empty, "a chat is made of messages")},
)
"""The body of /v1/chat/completions."""

COMPLETION = Fields(
    _READ | {"prompt", "response_format"},
    _HARMLESS,
    {
        **_NEUTRAL,
        **dict.fromkeys(_TEMPLATE, (_is_false, _NO_TEMPLATE)),
        "add_generation_prompt": (lambda value: isinstance(value, bool), _NO_TEMPLATE),
        "messages": (_is_empty, "send them to /v1/chat/completions"),
    },
)
"""The body of /v1/completions."""

STREAM_OPTIONS = Fields(frozenset({"include_usage"}), frozenset({"include_obfuscation"}), {
    "continuous_usage_stats": (_is_false, "the counts come with the end of an answer"),
})  # fmt: skip
"""What stream_options holds."""

RESPONSE_FORMAT = Fields(frozenset(), frozenset(), {
    "type": (lambda value: value in ("text", ""), _GRAMMARS),
    "schema": (_is_never, _GRAMMARS),
    "json_schema": (_is_never, _GRAMMARS),
})  # fmt: skip
"""What response_format holds."""

MESSAGE = Fields(
    frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")),
    # Notes of servers and clients on what was said.
    frozenset(("annotations", "cache_control", "provider_specific_fields")),
    {
        "refusal": (_is_empty, "send it as content"),
        "function_call": (_is_empty, "use tool_calls"),
        "audio": (_is_empty, "images and sound are not taken"),
    },
)
"""A message of a chat."""

FILE = Fields(frozenset({"filename"}))
"""The body of /session/save and /session/restore."""

TEXT_PART = Fields(frozenset(("type", "text")), frozenset(("annotations", "cache_control", "prompt_cache_breakpoint")))
"""A part of a message's content."""
