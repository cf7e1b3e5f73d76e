"""`splitctl serve --policy auto`: where it finds its numbers, what it says without them, and what it does with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitctl.cli import profiled
from splitctl.cli.policy_options import PolicyOptions, policy_config
from splitctl.control.client import Call, wait
from splitctl.control.requests import EventsRequest
from splitctl.ipc.profiles import Found, KeptProfile, ProfileKey, day_of
from splitctl.outcome import WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode
from tests.ctl.houses import GUARD_S, House, house, served, stub_arguments
from tests.ctl.planning.profiles import MEASURED
from tests.stublib import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stub]


@pytest.fixture
def home() -> Iterator[House]:
    """A user with folders of their own."""
    with house() as made:
        made.more["XDG_CACHE_HOME"] = str(made.folder / "cache")
        yield made


def _rates(folder: Path, **modes: tuple[float, float]) -> Path:
    path = folder / "rates.json"
    plain = {name: {"prompt_tps": prompt, "generate_tps": made} for name, (prompt, made) in modes.items()}
    path.write_text(json.dumps({"switch_s": 0.001, "modes": plain}), encoding="ascii")
    return path


def test_without_numbers_it_says_how_to_measure(home: House, tmp_path: Path) -> None:
    """Nobody has measured the model and no file of rates is named: one line names the bench, and nothing is served."""
    done = home.run("serve", *stub_arguments(tmp_path), "--policy", "auto")
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert "--policy auto" in line
    assert f"splitctl bench -m {tmp_path / 'tiny.gguf'}" in line
    assert "--rates FILE" in line


@pytest.mark.parametrize("is_stale", [False, True])
def test_the_kept_profile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_stale: bool) -> None:
    """Its times are the policy's, with its day and build as their source; one that is stale is used with a line."""
    model = tmp_path / "tiny.gguf"
    key = ProfileKey("m", "b", ("CPU",), None, ("f16", "f16"), offload_kqv=True, flash_attn=FlashAttn.ON)
    kept = KeptProfile(key, MEASURED, 1.7e9, "2026.10", "", model, "tiny", "1")
    found = Found(None, "the profile is stale; measure again", kept) if is_stale else Found(kept)
    monkeypatch.setattr(profiled, "find_profile", lambda *_: found)
    said: list[str] = []
    options = PolicyOptions(is_on=True, rates=None, bounds={"max_wait_s": 3.0})
    config = policy_config(options, model, Placement(), None, (), WeightsTier.FILE, said.append)
    assert config.costs is not None
    assert config.costs.read_s(SplitMode.LAYER, 2048, 0) == MEASURED.of(SplitMode.LAYER).read_s(2048)
    assert config.source == day_of(kept)
    assert config.settings.max_wait_s == 3.0
    stale = "policy: the profile is stale; measure again; until then that profile is used"
    unknown = "policy: what a host adds to a step was not measured and counts as nothing; measure it: splitctl bench"
    assert said == [stale] * is_stale + [unknown]


def test_rates_are_for_a_policy(home: House, tmp_path: Path) -> None:
    """Rates without the policy would do nothing, so they are refused; so are those that are none, and odd bounds."""
    rates = _rates(tmp_path, layer=(1.0, 1.0), tensor=(1.0, 1.0))
    assert home.run("serve", *stub_arguments(tmp_path), "--rates", rates).returncode == 2
    bad = tmp_path / "bad.json"
    bad.write_text("{}", encoding="ascii")
    auto = ("serve", *stub_arguments(tmp_path), "--policy", "auto", "--rates")
    for arguments in ((*auto, bad), (*auto, tmp_path / "none.json"), (*auto, rates, "--max-wait", "1e9")):
        done = home.run(*arguments)
        assert done.returncode in {1, 2}
        assert len(done.stderr.decode().splitlines()) == 1


def test_a_session_goes_to_the_mode_that_is_faster(home: House, tmp_path: Path) -> None:
    """A mode that is faster in everything by its rates is gone to; the log and ps say why; the text is right."""
    arguments = stub_arguments(tmp_path)
    ask = ("attach", "-p", "x" * 200, "-n", "40", "--temp", "0")
    rates = _rates(tmp_path, layer=(100.0, 10.0), tensor=(10000.0, 1000.0))
    with served(home, *arguments, "--policy", "auto", "--rates", rates, "--min-stay", "0") as host:
        before: dict[str, Any] = home.json("ps")["sessions"][0]
        assert (before["effective"], before["policy"]["policy"]) == ("layer", "auto")
        assert before["policy"]["profile"] == f"rates of {rates}"
        with Call(host.address, EventsRequest()) as watch:
            text = home.json(*ask)["text"]
            while not any(message.body.get("kind") == "switch_ended" for message in watch.read()):
                assert wait([watch], GUARD_S)
            assert home.json(*ask)["text"] == text
        after = home.json("ps")["sessions"][0]
        assert after["effective"] == "tensor"
        assert after["policy"]["decisions"]["switch"] == 1
        said = home.run("ps").stdout.decode()
        assert f"  policy       {after['policy']['decision']}" in said
        assert home.json("policy", "off") == {"policy": "off"}
        _, log = host.end()
    assert "policy: " in log
    assert "switched to tensor" in log
