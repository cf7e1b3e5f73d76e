"""The clients against a hosted session of a real model: the programs of the documents, a switch, a kill, a new host."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import splitctl
from splitctl.outcome import SwitchStatus
from tests.ctl.houses import GUARD_S, ROOT, house, served, stub_arguments
from tests.ctl.web import Web, web
from tests.stublib import needs_compiler

pytestmark = [pytest.mark.model, pytest.mark.stub, needs_compiler]

PROGRAMS = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "hosting.md").read_text("utf-8"), re.DOTALL)
KEY = "a-key-of-this-test"
PROMPT = "The capital of France is"
GREEDY = {"temp": 0.0}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Web]:
    """A host of a real model on two virtual devices, which clients of this process find."""
    placed = ["-m", smollm2, "--device", "CPU,CPU", "-c", "512", "-np", "2", "-kvu", "-t", "1"]
    with (
        house() as home,
        web(home, *placed, "--slot-save-path", home.folder, key=KEY) as made,
        mock.patch.dict(os.environ, home.env(), clear=True),
    ):
        yield made


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_documents_runs(server: Web, program: str) -> None:
    """It prints text, what the answer took, and that the session was switched."""
    assert len(PROGRAMS) == 2
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        program = program.replace("http://127.0.0.1:8080", server.url).replace('"KEY"', repr(KEY))
        exec(program, {})  # noqa: S102 - a program of ours, in a process that has the imports already
    said = out.getvalue()
    assert len(said.split()) > 5
    assert "SwitchStatus.SWITCHED" in said


def test_both_ways_lead_to_the_same_session(server: Web) -> None:
    """One switches, the other switches back; tokens, state and file are the same for both, and what came before."""
    by_name, by_url = splitctl.connect(), splitctl.connect(url=f"{server.url}/v1", api_key=KEY)
    paths = server.host.house.folder / "a.safetensors", "b.safetensors"
    before, held = set(), set()
    serves = by_name.status().effective
    modes = ("tensor", "layer") if serves is splitctl.SplitMode.LAYER else ("layer", "tensor")
    for client, mode, path in zip((by_name, by_url), modes, paths, strict=True):
        answers = [client.generate(PROMPT, n=6, sampler=GREEDY), client.generate(PROMPT, n=6, sampler=GREEDY)]
        before |= {"".join(delta.text for delta in answers[0]), answers[1].result().text}
        outcome = client.switch(mode, via="in-place").result()
        assert (outcome.status, outcome.requested.value) == (SwitchStatus.SWITCHED, mode)
        status = client.status()
        assert status.last_switch is not None
        assert (status.effective, status.last_switch.status) == (outcome.effective, outcome.status)
        saved, restored = client.save(path), client.restore(path)
        held |= {(saved.n_tokens, saved.n_sequences), (restored.n_tokens, restored.n_sequences)}
    assert len(before) == 1
    assert len(held) == 1


def test_a_killed_host_breaks_its_answers_and_the_next_one_is_found(server: Web, tmp_path: Path) -> None:
    """Each way says how much had come; a host that comes back under the name is found and told."""
    by_name = splitctl.connect(reconnect_s=GUARD_S)
    answers = [one.generate(PROMPT, n=400) for one in (by_name, splitctl.connect(url=server.url, api_key=KEY))]
    for answer in answers:
        next(answer)
    server.host.process.kill()
    for answer in answers:
        with pytest.raises(splitctl.AnswerBroken, match="its host hung up") as caught:
            answer.result()
        assert 0 < len(caught.value.tokens) < 400
    with served(server.host.house, *stub_arguments(tmp_path)):
        assert len(by_name.generate("hello", n=4).result().tokens) == 4
        assert by_name.n_restarts == 1
        assert by_name.stop().reason == ""
