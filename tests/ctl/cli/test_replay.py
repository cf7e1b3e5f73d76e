"""`splitctl replay`: a trace and rates in, a table and one sentence out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitctl.cli.main import main
from splitctl.cli.output import ExitCode

_RATES = {
    "switch_s": 3.0,
    "modes": {
        "layer": {"prompt_tps": 1000.0, "generate_tps": 10.0},
        "tensor": {"prompt_tps": 500.0, "generate_tps": 20.0},
    },
    "tier_switch_s": {"pinned": 1.0},
}


@pytest.fixture
def rates(tmp_path: Path) -> str:
    """Give a file of rates by which long prompts with long answers are worth two switches."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(_RATES))
    return str(path)


def _trace(tmp_path: Path, n: int) -> str:
    path = tmp_path / "trace.csv"
    lines = [f"{200 * number},30000,1000" for number in range(n)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return str(path)


def test_it_says_whether_it_would_have_paid(tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has each mode, the policy and the oracle; the last line is the sentence."""
    assert main(["replay", _trace(tmp_path, 6), "--rates", rates]) is ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("│ ")] == ["layer", "tensor", "auto", "oracle"]
    assert lines[-1].startswith("it would have paid: ")


def test_json_has_the_same_numbers(tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One object has every course in seconds; a faster way of switching and fewer requests are taken as named."""
    trace = _trace(tmp_path, 8)
    argv = ["replay", trace, "--rates", rates, "--json"]
    assert main([*argv, "--first", "5"]) is ExitCode.DONE
    told = capsys.readouterr()
    body = json.loads(told.out)
    assert (body["requests"], body["requests_in_trace"], body["best_fixed"]) == (5, 8, "tensor")
    assert body["courses"]["tensor"]["busy_s"] == pytest.approx(5 * 110.0)
    assert body["gain_s"] == pytest.approx(550.0 - body["courses"]["auto"]["busy_s"])
    assert body["courses"]["oracle"]["regret_s"] == 0.0
    assert set(body["courses"]["auto"]["wait_s"]) == {"mean", "p95", "max"}
    assert "the first 5 of 8 requests are replayed" in told.err
    assert main([*argv, "--first", "5", "--way", "pinned"]) is ExitCode.DONE
    faster = json.loads(capsys.readouterr().out)["courses"]
    assert faster["oracle"]["busy_s"] < body["courses"]["oracle"]["busy_s"]


def test_a_request_that_the_context_has_no_room_for_is_refused(
    tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With -c the longest request has to fit a sequence's part of it; both numbers are told, and what would do."""
    argv = ["replay", _trace(tmp_path, 2), "--rates", rates, "-np", "2", "-c"]
    assert main([*argv, "60000"]) is ExitCode.REFUSED
    wanted = (
        "31,000 tokens of prompt and answer, and the context holds 30,000, 60,000 for 2 sequences; raise -c to 62000"
    )
    assert wanted in capsys.readouterr().err
    assert main([*argv, "62000"]) is ExitCode.DONE


def test_switches_are_made_as_serve_makes_them(tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside where its time is known, else from the file; which one it is stands in the answer."""
    trace = _trace(tmp_path, 2)
    assert main(["replay", trace, "--rates", rates, "--json"]) is ExitCode.DONE
    told = capsys.readouterr()
    assert (json.loads(told.out)["way"], "made with weights from the file" in told.err) == ("file", True)
    known = tmp_path / "known.json"
    known.write_text(json.dumps(_RATES | {"tier_switch_s": {"file": 5.0, "beside": 0.1}}))
    assert main(["replay", trace, "--rates", str(known), "--json"]) is ExitCode.DONE
    beside = json.loads(capsys.readouterr().out)
    assert main(["replay", trace, "--rates", str(known), "--json", "--way", "beside"]) is ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == beside
    assert beside["way"] == "beside"


def test_no_switch_where_none_is_allowed(tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds are the policy's: with a stay that is longer than the trace it switches once at most."""
    argv = ["replay", _trace(tmp_path, 5), "--rates", rates, "--json", "--min-stay", "90000", "--from", "tensor"]
    assert main(argv) is ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["courses"]["auto"]["switches"] <= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"arrival": 0, "prompt": "x", "generated": 1}', "trace.jsonl: line 1: prompt is 'x'; wanted: whole tokens"),
        ("", "trace.jsonl: the trace is empty; wanted: a line for each request"),
        (None, "trace.jsonl cannot be read: No such file or directory; name another file"),
    ],
)
def test_a_bad_trace_is_one_line(
    tmp_path: Path, rates: str, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    """What is wrong with a trace is said with its line, and nothing is replayed."""
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["replay", str(path), "--rates", rates]) is ExitCode.FAILED
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1
    assert said in told.err


def test_without_numbers_it_says_what_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a model nor rates is a usage error that names both."""
    assert main(["replay", _trace(tmp_path, 1)]) is ExitCode.USAGE
    assert "-m" in (err := capsys.readouterr().err)
    assert "--rates" in err
