"""Traces of requests: the names that count, dates, and what is said of a line that is none."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.planning import traces
from splitctl.planning.traces import Request, TraceInvalid, parse_trace, read_trace

_LINE = {"arrival": 0, "prompt": 10, "cached": 2, "generated": 3}


def test_our_own_lines() -> None:
    """JSON lines give requests in their order, the first at zero."""
    lines = [{**_LINE, "arrival": 7.5, "max_tokens": 64}, {**_LINE, "arrival": 5}]
    text = "\n" + "\n".join(json.dumps(one) for one in lines) + "\n\n"
    assert parse_trace(text) == [Request(0.0, 10, 2, 3), Request(2.5, 10, 2, 3, 64)]


_AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:16:46.6805900,396,109\r
"""
_BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,374,44,418,API
65,GPT-4,396,109,505,API
"""
_MOONCAKE = """{"timestamp": 1700000000000, "input_length": 374, "output_length": 44}
{"timestamp": 1700000060000, "input_length": 396, "output_length": 109}
"""
_OPENAI = """{"created": 1700000000, "usage": {"prompt_tokens": 374, "completion_tokens": 44}}
{"created": "2023-11-14T22:14:20Z", "usage": {"prompt_tokens": 396, "completion_tokens": 109, \
"prompt_tokens_details": {"cached_tokens": 0}}}
"""


@pytest.mark.parametrize("text", [_AZURE, _BURST, _MOONCAKE, _OPENAI], ids=["Azure", "BurstGPT", "Mooncake", "OpenAI"])
def test_names_of_others(text: str) -> None:
    """Public traces and OpenAI's usage are read as they are."""
    found = parse_trace(text)
    assert [(one.prompt, one.cached, one.generated) for one in found] == [(374, 0, 44), (396, 0, 109)]
    assert [one.arrival for one in found] == [0.0, pytest.approx(60.0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the trace is empty; wanted: a line for each request"),
        ("arrival,prompt,generated\n", "the trace is a header alone; wanted: a line for each request"),
        ("arrival,prompt\n1,2\n", "line 1 is 'arrival,prompt'; wanted: fields of arrival"),
        ("arrival,prompt,generated\n1,2,3\n4,5\n", "line 3 is of 2 fields; wanted: 3, as in the header"),
        ("arrival,prompt,generated\n1,2,x\n", "line 2: generated is 'x'; wanted: whole tokens"),
        ('arrival,prompt,generated\n1,2,"x\n', "line 2 is no CSV"),
        ("arrival,prompt,generated\nsoon,2,3\n", "line 2: arrival is 'soon'; wanted: seconds"),
        ("arrival,prompt,generated\n2023-13-01 00:00:00,2,3\n", "line 2: arrival is '2023-13-01 00:00:00'"),
        ('{"arrival": 0, "prompt": 1, "generated": 1}\n{"arrival"', "line 2 is no JSON"),
        ("{}\n[]", "line 1 is without arrival"),
        ('{"arrival": 0, "prompt": 1, "generated": 1}\n[]', "line 2 is []; wanted: an object of one request"),
        ('{"arrival": 0, "prompt": true, "generated": 1}', "line 1: prompt is True"),
        ('{"arrival": 0, "prompt": 1.5, "generated": 1}', "line 1: prompt is 1.5"),
        ('{"arrival": 0, "prompt": [1], "generated": 1}', "line 1: prompt is [1]; wanted: whole tokens"),
        ('{"arrival": 0, "prompt": 1, "cached": {}, "generated": 1}', "line 1: cached is {}; wanted: whole tokens"),
        ('{"arrival": 0, "prompt": -1, "generated": 1}', "line 1: prompt is -1"),
        ('{"arrival": NaN, "prompt": 1, "generated": 1}', "line 1 is no JSON (NaN is no number)"),
        ('{"arrival": -1, "prompt": 1, "generated": 1}', "line 1: arrival is -1"),
        ('{"arrival": 0, "prompt": 1, "cached": 2, "generated": 1}', "line 1: cached is 2; wanted: 1 at most"),
        ('{"arrival": 0, "prompt": 1, "prompt_tokens": 1, "generated": 1}', "line 1 is with prompt and prompt_tokens"),
    ],
)
def test_a_bad_line_is_named(text: str, said: str) -> None:
    """The message has the line's number, what is there, and what was wanted."""
    with pytest.raises(TraceInvalid) as caught:
        parse_trace(text)
    assert str(caught.value).startswith(said)


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of too many lines is refused, and so is a line that is too long."""
    monkeypatch.setattr(traces, "MAX_LINES", 3)
    line = json.dumps(_LINE)
    assert len(parse_trace(f"{line}\n" * 3)) == 3
    with pytest.raises(TraceInvalid, match="the trace is of more than 3 lines; wanted: 3 at most"):
        parse_trace(f"{line}\n" * 4)
    with pytest.raises(TraceInvalid, match="line 1 is of more than 65,536 characters"):
        parse_trace('{"arrival": 0' + " " * 70_000 + "}")


def test_no_more_lines_are_taken_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace without an end is left as soon as it is too long."""
    monkeypatch.setattr(traces, "MAX_LINES", 3)
    endless = itertools.count()
    with pytest.raises(TraceInvalid, match="more than 3 lines"):
        read_trace(json.dumps(_LINE) for _ in endless)
    assert next(endless) == 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 9))
def test_the_first_of_a_trace_are_those_that_came_first(times: list[int], n_most: int) -> None:
    """Whatever is thrown away on the way, the first requests are those of the whole trace, in its order."""
    lines = [json.dumps({"arrival": at, "prompt": number, "generated": 1}) for number, at in enumerate(times)]
    assert read_trace(lines, n_most) == (parse_trace("\n".join(lines))[:n_most], len(times))


@given(st.text(max_size=200) | st.text('{}[],:0123456789.eE-\n "arivlpomtgned', max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    """Whatever is given comes out as requests or as one line that says what was wanted."""
    try:
        said, found = "", parse_trace(text)
    except TraceInvalid as error:
        said, found = str(error), []
    assert bool(found) != bool(said)
    assert "\n" not in said
