"""The short form of tools.load: many clients, switches under them, and every token where it belongs."""

from __future__ import annotations

import json

import pytest

from tests.stublib import needs_compiler
from tools import load


@pytest.mark.stub
@needs_compiler
def test_no_token_is_lost_under_many_clients_and_switches(capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer of many clients is the one that a single client gets, whatever the session does meanwhile."""
    assert load.main(["--json", "--clients", "24", "--seconds", "3", "--slots", "4"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["n_faults"], [one["status"] for one in told["switches"]]) == (0, ["switched"] * 2)
    assert told["requests"] > 24
    assert told["pause_ms"]["n"] > 0


def test_a_token_too_few_is_a_fault() -> None:
    """What the program looks for it finds: other texts, other counts, other statuses."""
    right = load.Answer(0, 0.0, [0.1, 0.2], [5, 6], "ab", 200, n_counted=2)
    lost = load.Answer(0, 0.0, [0.1], [5], "a", 200, n_counted=2)
    refused = load.Answer(0, 0.0, status=503, error="busy")
    moved = load.Move(0.15, 0.17, {"status": "fell_back"})
    assert load.wrong_texts([right, refused], [right]) == []
    assert len(load.wrong_texts([lost], [right])) == 1
    faults = load.summary([right, lost, refused], [moved], [])["faults"]
    assert len(faults) == 3
    assert load.longest_silence(right, moved) == pytest.approx(0.1)
    assert load.longest_silence(lost, moved) is None
