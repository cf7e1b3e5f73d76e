"""Answers end as llama-server's do: its timings, and how an answer ended."""

from __future__ import annotations

import math

import pytest

from splitctl.host.streams import Done, Why
from splitctl.http import answers

_NAMES = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


@pytest.mark.parametrize(
    ("done", "wanted"),
    [
        (
            Done(Why.LENGTH, n_prompt=5, n_reused=1, n_predicted=5, prompt_ms=10.0, generate_ms=8.0),
            {"cache_n": 1, "prompt_n": 4, "prompt_per_second": 400.0, "prompt_per_token_ms": 2.5}
            | {"predicted_n": 5, "predicted_per_second": 500.0, "predicted_per_token_ms": 2.0},
        ),
        (
            Done(Why.LENGTH, n_prompt=5, n_predicted=1, prompt_ms=10.0),
            {"predicted_n": 1, "predicted_ms": 0.0, "predicted_per_second": 0.0, "predicted_per_token_ms": 0.0},
        ),
        (
            Done(Why.LENGTH, n_prompt=5, n_reused=5, n_predicted=3, prompt_ms=0.25, generate_ms=8.0),
            {"cache_n": 5, "prompt_n": 0, "prompt_per_second": 0.0, "prompt_per_token_ms": 0.0}
            | {"predicted_per_second": 250.0},
        ),
        (
            Done(Why.EOS, n_prompt=5, n_predicted=4, prompt_ms=10.0, generate_ms=8.0),
            {"predicted_n": 5, "predicted_per_second": 500.0},
        ),
        (Done(Why.EOS, n_prompt=5, prompt_ms=10.0), {"predicted_n": 1, "predicted_per_second": 0.0}),
        (Done(Why.LENGTH, n_prompt=5, prompt_ms=10.0), {"predicted_n": 0, "predicted_per_second": 0.0}),
        (Done(Why.LENGTH, n_prompt=5, n_predicted=9), {"predicted_per_second": 0.0, "prompt_per_second": 0.0}),
    ],
    ids=["several tokens", "one token", "a cached prompt", "an end", "an end alone", "no token", "nothing measured"],
)
def test_timings_are_llama_servers(done: Done, wanted: dict[str, float]) -> None:
    """The first token is free, the one that ends an answer counts, and what cannot be divided by is 0."""
    found = answers.timings(done)
    assert set(found) == _NAMES
    assert {name: found[name] for name in wanted} == wanted
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    assert answers.usage(done)["completion_tokens"] == found["predicted_n"]


@pytest.mark.parametrize(
    ("why", "finish_reason", "stop_type", "truncated"),
    [
        (Why.EOS, "stop", "eos", False),
        (Why.STOP, "stop", "word", False),
        (Why.LENGTH, "length", "limit", False),
        (Why.CONTEXT, "length", "limit", True),
    ],
)
def test_a_full_context_is_told_from_a_limit(why: Why, finish_reason: str, stop_type: str, *, truncated: bool) -> None:
    """Whole answers and the last chunk of a stream say truncated and stop_type beside OpenAI's reason."""
    done = Done(why, n_prompt=5, n_predicted=3)
    for is_chat in (False, True):
        form = answers.Form("1", "m", 7, is_chat=is_chat)
        for body in (form.whole("abc", done), form.last(done)):
            assert (body["stop_type"], body["truncated"]) == (stop_type, truncated)
            assert body["choices"][0]["finish_reason"] == finish_reason


def test_every_part_names_the_build() -> None:
    """It is OpenAI's system_fingerprint, as in llama-server; null where it is not known."""
    done = Done(Why.EOS, n_prompt=5, n_predicted=3)
    for build, said in (("b1234-abc", "b1234-abc"), ("", None)):
        form = answers.Form("1", "m", 7, is_chat=True, build=build)
        parts = (form.first() or {}, form.piece("a"), form.last(done), form.counts(done), form.whole("a", done))
        assert [part["system_fingerprint"] for part in parts] == [said] * 5
