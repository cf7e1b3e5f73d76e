"""Every field that OpenAI's API and llama-server document: honoured, without effect, or refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import chat as openai_chat
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat_params

from splitctl.http import bodies, fields
from splitctl.http.errors import ApiError

SAYS = [{"role": "user", "content": "hi"}]

# What llama-server's README and its schema of a request name, /infill and the chat's own among it.
LLAMA_SERVER = """
    prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_discard n_cmpl
    n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier
    dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat
    mirostat_tau mirostat_eta adaptive_target adaptive_decay top_n_sigma grammar json_schema seed ignore_eos logit_bias
    n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token return_progress
    sse_ping_interval post_sampling_probs response_fields lora backend_sampling verbose echo input_prefix input_suffix
    input_extra chat_template_kwargs reasoning_effort reasoning_format reasoning_control generation_prompt
    parse_tool_calls parallel_tool_calls add_generation_prompt continue_final_message reasoning_budget_tokens
    thinking_budget_tokens reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tags chat_format
    chat_parser grammar_lazy grammar_triggers preserved_tokens max_tokens max_completion_tokens stream_options
"""
OPENAI = {
    *get_type_hints(openai_chat_params.CompletionCreateParamsBase),
    *get_type_hints(openai_completion.CompletionCreateParamsBase),
}


def known(of: fields.Fields) -> set[str]:
    """All names that stand in its lists."""
    return {*of.read, *of.harmless, *of.neutral}


@pytest.mark.parametrize("of", [fields.CHAT, fields.COMPLETION])
def test_every_documented_field_is_known(of: fields.Fields) -> None:
    """None is left to the rule for unknown ones, and none stands in two lists."""
    assert {*LLAMA_SERVER.split(), *OPENAI} - known(of) == set()
    assert len(known(of)) == len(of.read) + len(of.harmless) + len(of.neutral)


def test_every_field_of_openais_messages_is_known() -> None:
    """Messages of all roles, their text parts and the options of a stream."""
    roles = ("Developer", "System", "User", "Assistant", "Tool", "Function")
    said = [get_type_hints(getattr(openai_chat, f"ChatCompletion{role}MessageParam")) for role in roles]
    assert {name for one in said for name in one} - known(fields.MESSAGE) == set()
    assert {*get_type_hints(openai_chat.ChatCompletionContentPartTextParam)} - known(fields.TEXT_PART) == set()
    assert {*get_type_hints(openai_chat.ChatCompletionStreamOptionsParam)} - known(fields.STREAM_OPTIONS) == set()


# By field: values that change nothing, and values that would.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 1.0], [2, 0, True]),
    "n_cmpl": ([1], [2]),
    "best_of": ([1], [2]),
    "presence_penalty": ([0, 0.0], [0.1]),
    "frequency_penalty": ([0], [-1]),
    "repetition_penalty": ([1], [1.1]),
    "dry_multiplier": ([0], [0.8]),
    "logit_bias": ([{}, []], [{"5": -100}, [[5, False]]]),
    "mirostat": ([0], [1, 2]),
    "dynatemp_range": ([0.0], [0.5]),
    "typical_p": ([1.0], [0.5]),
    "top_n_sigma": ([-1, 0], [1]),
    "xtc_probability": ([0], [0.5]),
    "adaptive_target": ([-1], [0.0, 0.5]),
    "min_keep": ([0, 1], [5]),
    "samplers": (
        [
            ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
            ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ],
        [["temperature", "top_k"], ["top_k"], [], "kfypmt"],
    ),
    "logprobs": ([False, 0], [True, 1, 5]),
    "top_logprobs": ([0], [1]),
    "n_probs": ([0], [1]),
    "ignore_eos": ([False], [True]),
    "n_indent": ([0], [4]),
    "t_max_predict_ms": ([0, -1], [100]),
    "t_max_prompt_ms": ([0, -1], [100]),
    "lora": ([[]], [[{"id": 0, "scale": 0.5}]]),
    "json_schema": ([], [{}, {"type": "object"}]),
    "tools": ([[]], [[{"type": "function", "function": {"name": "f"}}]]),
    "functions": ([[]], [[{"name": "f"}]]),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "parse_tool_calls": ([False], [True]),
    "echo": ([False], [True]),
    "suffix": ([""], ["end"]),
    "input_prefix": ([""], ["def"]),
    "input_suffix": ([""], ["end"]),
    "input_extra": ([[]], [[{"filename": "a", "text": "b"}]]),
    "timings_per_token": ([False], [True]),
    "return_progress": ([False], [True]),
    "verbose": ([False], [True]),
    "response_fields": ([[]], [["content"]]),
    "reasoning_format": (["none", "auto"], ["deepseek"]),
    "reasoning_control": ([False], [True]),
    "reasoning_budget_tokens": ([-1], [0, 100]),
    "thinking_budget_tokens": ([-1], [0, 100]),
    "generation_prompt": ([""], ["<think>"]),
    "chat_format": ([0], [1]),
    "chat_parser": ([""], ["{}"]),
    "modalities": ([["text"]], [["text", "audio"]]),
    "audio": ([], [{"voice": "ash", "format": "wav"}]),
    "verbosity": (["medium"], ["low"]),
    "web_search_options": ([], [{}]),
    "moderation": ([], [{"model": "omni"}]),
    "enable_thinking": ([], [True, False]),
    "response_format": ([{"type": "text"}, {}], [{"type": "json_object"}, {"type": "text", "schema": {}}, {"x": 1}]),
    "stream_options": (
        [{}, {"include_usage": False}, {"include_obfuscation": True}],
        [{"include_usage": True}, {"continuous_usage_stats": True}, {"chunk_size": 5}],
    ),
    "prompt": ([""], ["Once"]),
    # Of no API: nobody knows what they would do.
    "zzz": ([None, [], {}, ""], [0, False, "x", [0]]),
    "tempature": ([], [0.5]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_field_is_without_effect_or_refused(name: str) -> None:
    """Null and neutral values give the same request as no value; any other is refused by its name, in a short line."""
    neutral, others = VALUES[name]
    for value in [None, *neutral]:
        assert bodies.chat({"messages": SAYS, name: value}, "m") == bodies.chat({"messages": SAYS}, "m")
    for value in others:
        with pytest.raises(ApiError, match=f"^{name}.* is ") as refused:
            bodies.chat({"messages": SAYS, name: value}, "m")
        assert (refused.value.status, refused.value.param) == (400, name)
        assert len(refused.value.message) < 300


def test_the_values_leave_no_field_out() -> None:
    """Whatever has a neutral value is tried, in chats and completions."""
    tried = {*VALUES, "messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
    assert {*fields.CHAT.neutral, *fields.COMPLETION.neutral} - tried == {"reasoning_effort"}


@pytest.mark.parametrize("value", [0, 7, "x", True, {"a": [1]}, [1.5]])
def test_harmless_fields_may_hold_anything(value: Any) -> None:
    """They change nothing, whatever they hold, in chats and completions."""
    more = dict.fromkeys(fields.CHAT.harmless, value)
    assert bodies.chat({"messages": SAYS, **more}, "m") == bodies.chat({"messages": SAYS}, "m")
    assert bodies.completion({"prompt": "a", **more}, "m") == bodies.completion({"prompt": "a"}, "m")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": SAYS}, "messages"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stop_words": ["x"]}, "stop_words"),
        ({"x" * 10_000: 1}, "x" * 60),
        ({"\ud800": 1}, "\\ud800"),
    ],
)
def test_a_completion_refuses_what_is_a_chats_and_what_nobody_knows(more: dict[str, Any], param: str) -> None:
    """What the model's template would read has no effect on a completion, so it is not taken."""
    with pytest.raises(ApiError) as refused:
        bodies.completion({"prompt": "a", **more}, "m")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, "unsupported")
    assert len(refused.value.message) < 300
    assert refused.value.response().status_code == 400


def test_a_near_name_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may hold a million unknown fields without a value: none of them takes the time of a look."""

    def look(*_: object) -> list[str]:
        raise AssertionError("it looks for a name that it will not show")

    monkeypatch.setattr("difflib.get_close_matches", look)
    bodies.completion({"prompt": "a", "x": "", "y": [], "z": {}}, "m")


@pytest.mark.parametrize(
    ("name", "meant"), [("tempature", "temperature"), ("max_token", "max_tokens"), ("stops", "stop")]
)
def test_a_misspelt_field_is_told_its_name(name: str, meant: str) -> None:
    """A setting that would have been lost is named, and so is the field that was meant."""
    with pytest.raises(ApiError, match=rf"^{name} is 1; unknown field: did you mean {meant}\?$"):
        bodies.chat({"messages": SAYS, name: 1}, "m")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"refusal": "I cannot"}, "messages[0].refusal"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call"),
        ({"audio": {"id": "a"}}, "messages[0].audio"),
        ({"contents": "hi"}, "messages[0].contents"),
        ({"thinking": "hm"}, "messages[0].thinking"),
        ({"name": 5}, "messages[0].name"),
        ({"name": 0}, "messages[0].name"),
        ({"tool_calls": {}}, "messages[0].tool_calls"),
        ({"reasoning_content": ["hm"]}, "messages[0].reasoning_content"),
        ({"tool_calls": {"name": "f"}}, "messages[0].tool_calls"),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, "messages[0].tool_calls[0]"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"content": [{"type": "text", "text": "a", "language": "en"}]}, "messages[0].content[0].language"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"content": []}, "messages[0].content"),
    ],
)
def test_a_message_is_read_as_strictly(message: dict[str, Any], named: str) -> None:
    """Inside messages too what would be lost is refused with its place; the field at fault is messages."""
    with pytest.raises(ApiError) as refused:
        bodies.chat({"messages": [{"role": "assistant", "content": "a", **message}]}, "m")
    assert refused.value.message.startswith(f"{named} is ")
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    """What clients keep of an answer, nulls and notes among it, is read as what was said."""
    kept = {
        "role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": None, "reasoning_content": "", "name": None, "provider_specific_fields": {"a": 1},
        "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    (said,) = bodies.chat({"messages": [kept]}, "m").request.messages or ()
    assert said == {"role": "assistant", "content": "yes"}
