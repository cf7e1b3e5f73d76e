"""The short form of `ci/fuzz --http`: some hundred bad requests, beside clients that hold connections."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fuzz import web
from tests.fuzz.requests import Sent, request
from tests.stublib import needs_compiler


@pytest.mark.stub
@needs_compiler
def test_bad_requests_keep_the_laws() -> None:
    """Every bad request gets its refusal, the host lives, serves others, and holds no more memory."""
    with web.target() as server:
        tally = asyncio.run(web.attack(server, seed=7, n_cases=400, n_holding=150))
    assert tally.findings == []
    assert sum(tally.statuses.values()) == 400
    assert set(tally.statuses) >= {0, 200, 400, 403, 404, 431}


def test_requests_are_made_again_from_their_number() -> None:
    """The same seed and number make the same bytes."""
    assert [request(3, number) for number in range(50)] == [request(3, number) for number in range(50)]


def test_broken_laws_are_found() -> None:
    """A fault of the server, an error without its shape, and a redirect are findings; a good answer is none."""
    sent = Sent(b"", is_whole=True, is_head=False, kind="")
    error = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": None}}).encode()
    assert web.broken(sent, 400, error) == web.broken(sent, 200, b"x") == ""
    assert "status 500" in web.broken(sent, 500, error)
    assert "status 307" in web.broken(sent, 307, b"")
    assert "no error" in web.broken(sent, 404, b"Not Found")
    assert "another shape" in web.broken(sent, 404, b'{"error": {"message": "m"}}')
