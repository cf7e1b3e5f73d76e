"""What `splitctl run -psm` says at its end: the rates that it measured, and whether its switch can have paid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitctl.ipc.profiles import KeptProfile, ProfileKey, day_of, driver_text, keep
from splitctl.model.facts import read_facts
from splitctl.placement import Placement, SplitMode
from splitctl.planning.profile import Profile
from tests.ctl.planning.profiles import constant
from tests.stublib import build, needs_compiler, write_model

_ROOT = Path(__file__).parents[3]
_RUN = ["--device", "CPU,CPU", "-c", "512", "--temp", "0", "-t", "1", "-psm", "layer", "-sm", "tensor"]


def _run(*arguments: str | Path, code: int = 0, **env: str) -> tuple[dict[str, Any], str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "STUB_"))}
    program = "import sys; from splitctl.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "run", *map(str, arguments), "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=clean | {"PYTHONPATH": str(_ROOT), **env},
        check=False,
    )
    assert done.returncode == code, done.stderr.decode()
    return json.loads(done.stdout), done.stderr.decode()


@pytest.fixture
def no_profile(tmp_path: Path) -> dict[str, str]:
    """A cache folder without the profiles that its user has measured."""
    return {"XDG_CACHE_HOME": str(tmp_path)}


@pytest.mark.model
def test_a_run_with_a_switch_ends_with_rates_and_a_verdict(smollm2: Path, no_profile: dict[str, str]) -> None:
    """The rates are those of the timings, what was not measured is null, and the last line judges the switch."""
    body, said = _run("-m", smollm2, *_RUN, "-p", "Once upon a time", "-n", "4", **no_profile)
    payoff, timings = body["payoff"], body["timings"]
    modes = payoff["rates"]["modes"]
    assert modes["layer"] == {"prompt_tps": pytest.approx(timings["prompt"]["tps"]), "generate_tps": None}
    assert modes["tensor"] == {"prompt_tps": None, "generate_tps": pytest.approx(timings["generate"]["tps"])}
    # A try in a child is made once for a build: what it took is no part of the switch.
    without_the_try = timings["switch_ms"] - body["switch"]["stages_ms"]["checking"]
    assert payoff["rates"]["switch_s"] == pytest.approx(without_the_try / 1e3)
    assert payoff["paid"] in {False, None}
    assert payoff["sentence"] == said.splitlines()[-1]
    assert f"switch {payoff['rates']['switch_s']:,.2f} s" in said.splitlines()[-2]


@pytest.mark.model
def test_a_run_without_a_switch_judges_none(smollm2: Path, no_profile: dict[str, str]) -> None:
    """Where the prompt's mode is the generation's, nothing is said of a switch."""
    flags = ("--device", "CPU,CPU", "-c", "512", "-t", "1", "-p", "Once", "-n", "2")
    body, said = _run("-m", smollm2, *flags, **no_profile)
    assert body["payoff"] is None
    assert "switch" not in said


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    ("arguments", "faults", "code", "said"),
    [
        (["-n", "0"], "", 0, "nothing was generated after it"),
        (["-n", "4"], "init:null:tensor", 3, "ended in layer mode, where it began"),
    ],
    ids=["nothing generated", "fell back"],
)
def test_a_switch_that_did_not_pay_is_told(
    arguments: list[str], faults: str, code: int, said: str, tmp_path: Path
) -> None:
    """A switch before nothing, or one that fell back, did not pay, and the run says so."""
    model = write_model(tmp_path / "tiny.gguf")
    env = {"STUB_FAULTS": faults} if faults else {}
    body, told = _run("-m", model, "--lib", build(), *_RUN, "--force", "-p", "hi", *arguments, code=code, **env)
    assert body["payoff"]["paid"] is False
    assert said in body["payoff"]["sentence"]
    assert body["payoff"]["sentence"] in told


@needs_compiler
@pytest.mark.stub
def test_a_refused_switch_has_no_price(tmp_path: Path) -> None:
    """A switch that was refused took nothing, and is not judged."""
    model = write_model(tmp_path / "tiny.gguf")
    env = {"STUB_FAULTS": "decode:abort:tensor", "XDG_CACHE_HOME": str(tmp_path)}
    body, _ = _run("-m", model, "--lib", build(), *_RUN, "-p", "hi", "-n", "4", code=4, **env)
    assert (body["switch"]["status"], body["payoff"]) == ("refused", None)


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    ("more", "rates", "paid", "said"),
    [
        (["-psm", "layer", "-sm", "tensor"], (1.0, 1.0), True, "the switch paid: "),
        (["-sm", "layer"], (1e6, 1e6), None, "tensor mode throughout would have saved "),
    ],
    ids=["paid", "another mode would have been better"],
)
def test_a_run_is_held_against_the_kept_profile(
    more: list[str],
    rates: tuple[float, float],
    paid: bool | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a profile the last line says whether the switch paid, or what would have been better."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = write_model(tmp_path / "tiny.gguf")
    modes = (constant(SplitMode.LAYER, 1.0, 1.0), constant(SplitMode.TENSOR, *rates))
    placement = Placement(devices=("CPU", "CPU"), n_threads=1)
    key = ProfileKey.of(build(), read_facts(model), placement)
    kept = KeptProfile(key, Profile(modes), 1.7e9, "b1", driver_text(), model, "tiny", "1")
    keep(kept)
    plain = ["--device", "CPU,CPU", "-c", "512", "--temp", "0", "-t", "1", "--force", "-p", "hi" * 200, "-n", "2"]
    body, told = _run("-m", model, "--lib", build(), *plain, *more, XDG_CACHE_HOME=str(tmp_path))
    payoff = body["payoff"]
    known = payoff["by_profile"]
    assert (known["paid"], known["saved_s"] > 0.0) == (paid, bool(paid))
    assert known["sentence"].endswith(f"(by the profile of {day_of(kept)})")
    # What the run itself can rule out is said first: times of a stub are all alike.
    assert told.splitlines()[-1] == (payoff if payoff["paid"] is False else known)["sentence"]
    assert known["sentence"].startswith(said)
