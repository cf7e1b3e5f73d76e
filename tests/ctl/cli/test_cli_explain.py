"""`splitctl explain` by what was measured: which profile it takes, and what it says where there is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from splitctl.cli.main import main
from splitctl.cli.output import ExitCode
from splitctl.ipc import profiles
from splitctl.ipc.profiles import KeptProfile, ProfileKey, keep
from splitctl.ipc.reserving import Reserved, Reserver
from splitctl.model.facts import read_facts
from splitctl.placement import Placement
from splitctl.planning.profile import LeftOut, Profile
from tests.ctl.planning.profiles import MEASURED, constant
from tests.stublib import build, needs_compiler, write_model

_WORK = ["--prompt", "58300", "--generate", "1000"]
_PLACED = ["--device", "CPU,CPU", "-t", "1"]
_PLACEMENT = Placement(devices=("CPU", "CPU"), n_threads=1)


@dataclasses.dataclass
class _Place:
    """A model, a library that was asked, and a profile to keep."""

    model: Path
    library: Path

    def keep(self, profile: Profile = MEASURED, placement: Placement = _PLACEMENT, **changes: Any) -> None:
        key = ProfileKey.of(self.library, read_facts(self.model), placement)
        plain: dict[str, Any] = {
            "key": key, "profile": profile, "made_at": 1_700_000_000.0, "library_version": "2026.10 (b1)",
            "driver": profiles.driver_text(), "model_path": self.model, "model_name": "tiny", "splitctl_version": "1",
        }  # fmt: skip
        keep(KeptProfile(**plain | changes))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Place:
    """A cache folder of its own, and a library that answers without a child."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = _Place(write_model(tmp_path / "tiny.gguf"), tmp_path / "libllama.so")
    found.library.write_bytes(b"x")
    told = {"path": str(found.library), "version": "1", "devices": [{"name": "CPU"}]}
    monkeypatch.setattr(Reserver, "__call__", lambda *_: Reserved((), "", told))
    return found


def _explain(
    place: _Place, capfd: pytest.CaptureFixture[str], *more: str, code: ExitCode = ExitCode.DONE
) -> tuple[dict[str, Any], str]:
    assert main(["explain", "-m", str(place.model), *_PLACED, *_WORK, *more, "--json"]) == code
    out, err = capfd.readouterr()
    return json.loads(out), err


def test_the_kept_profile_answers(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """The object has what a file of rates gives, the profile that it is from, and every way that was measured."""
    place.keep()
    body, _ = _explain(place, capfd)
    assert (body["best"], body["close"], list(body["tiers"])) == ("layer->tensor", False, ["file", "pinned"])
    assert body["seconds"]["layer->tensor"] == pytest.approx(58300 / 800 + 5 + 1000 / 20)
    told = body["profile"]
    assert (told["made_at"], told["stale"], told["why"], told["devices"]) == (
        1_700_000_000.0,
        False,
        "",
        ["CPU", "CPU"],
    )
    cached, _ = _explain(place, capfd, "--cached", "58300")
    assert cached["seconds"]["tensor"] == pytest.approx(1000 / 20)
    four, _ = _explain(place, capfd, "-np", "4")
    assert (four["sequences"], four["best"]) == (4, "layer->tensor")
    assert four["seconds"]["layer"] > 4 * 58300 / 800


def test_the_flags_of_other_commands_are_taken(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """`-ub` picks what was measured with it, `-c` bounds prompt and answer, and `-b` is taken as it is elsewhere."""
    layer, tensor = MEASURED.modes
    slow = dataclasses.replace(constant(layer.mode, 400.0, 15.0), n_ubatch=256)
    place.keep(dataclasses.replace(MEASURED, modes=(layer, slow, tensor)))
    body, _ = _explain(place, capfd, "-c", "59392", "-b", "1024")
    assert body["seconds"]["layer"] == pytest.approx(58300 / 800 + 1000 / 15)
    lacking, _ = _explain(place, capfd, "-ub", "256")
    assert (lacking["best"], lacking["seconds"]["tensor"]) == ("layer", None)
    place.keep(dataclasses.replace(MEASURED, modes=(layer, slow, tensor, dataclasses.replace(tensor, n_ubatch=256))))
    for flags in (("-ub", "256"), ("-ub", "512", "-b", "256")):
        body, _ = _explain(place, capfd, *flags)
        assert body["seconds"]["layer"] == pytest.approx(58300 / 400 + 1000 / 15)
    other, _ = _explain(place, capfd, "-ub", "1024", code=ExitCode.USAGE)
    assert "1024 was not measured; wanted: 256 or 512, or measure it" in other["error"]["message"]
    full, _ = _explain(place, capfd, "-c", "59000", code=ExitCode.REFUSED)
    assert full["error"]["kind"] == "ContextFull"
    assert full["error"]["message"].startswith(
        "59,300 tokens of prompt and answer, and the context holds 59,000; raise"
    )
    together, _ = _explain(place, capfd, "-c", "60000", "-np", "2", "-kvu", code=ExitCode.REFUSED)
    assert together["error"]["message"].endswith(
        "118,600 tokens of prompt and answer, and the context holds 60,000; raise -c to 118600"
    )


def test_every_way_that_a_table_shows_can_be_judged(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """A switch beside is asked for by the name that its row has."""
    beside = tuple(dataclasses.replace(one, way="beside") for one in MEASURED.switches[:1])
    place.keep(dataclasses.replace(MEASURED, switches=(*MEASURED.switches, *beside)))
    body, _ = _explain(place, capfd, "--weights", "beside")
    assert (body["way"], list(body["tiers"])) == ("beside", ["file", "pinned", "beside"])
    assert "; this is for a switch beside in a served session" in body["sentence"]


def test_people_are_told_from_when_it_is(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Day, build, model and devices stand above the tables; the tiers that were measured are rows of one."""
    place.keep()
    assert main(["explain", "-m", str(place.model), *_PLACED, *_WORK, "--weights", "pinned"]) == 0
    first, *_, last = capfd.readouterr().out.splitlines()
    assert first.startswith("measured 2023-11-14 ")
    assert "(2026.10 (b1)): tiny on CPU,CPU" in first
    assert last.startswith("read the prompt in layer mode, switch, and generate in tensor mode: 124.4 s")


def test_a_stale_profile_answers_with_a_warning(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Another driver, or another build: the numbers are given, and one line says what changed and how to measure."""
    place.keep(driver="NVIDIA 1")
    body, err = _explain(place, capfd)
    assert (body["best"], body["profile"]["stale"]) == ("layer->tensor", True)
    assert "the driver is" in body["profile"]["why"]
    assert err.startswith("warning: the profile of 2023-11-14")
    assert f"splitctl bench -m {place.model} --device CPU,CPU" in err
    place.library.write_bytes(b"another build")
    assert "another build" in _explain(place, capfd)[0]["profile"]["why"]


def test_work_far_beyond_what_was_measured_is_answered_with_a_warning(
    place: _Place, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice as many tokens as any sequence held in the bench are still the profile's to tell."""
    place.keep()
    reach = min(one.reach for one in MEASURED.modes)
    warning = f"measured up to {reach:,} tokens"
    assert _explain(place, capfd, "--prompt", str(2 * reach - 100), "--generate", "100")[1] == ""
    assert warning in _explain(place, capfd, "--prompt", str(2 * reach), "--generate", "100")[1]


@pytest.mark.parametrize("other", ["nothing", "devices", "weights"])
def test_what_was_not_measured_here_is_not_answered(
    other: str, place: _Place, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a profile, and with one of other devices or other weights, one line names the command that measures."""
    if other == "devices":
        place.keep(placement=_PLACEMENT.changed(devices=("CUDA0", "CUDA1")))
    elif other == "weights":
        place.keep()
        data = bytearray(place.model.read_bytes())
        data[-1] ^= 1
        place.model.write_bytes(data)
    body, err = _explain(place, capfd, code=ExitCode.FAILED)
    assert (body["error"]["kind"], err.count("\n")) == ("NoProfile", 1)
    assert f"splitctl bench -m {place.model} --device CPU,CPU -t 1" in err


def test_a_mode_that_the_build_cannot_do_is_named(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """The answer is to stay, and why nothing else was measured; a tier that is missing is an error with its reason."""
    left_out = (LeftOut("tensor", "this build aborts on it"), LeftOut("pinned", "no copy can be made"))
    place.keep(Profile(MEASURED.modes[:1], (), left_out))
    assert main(["explain", "-m", str(place.model), *_PLACED, *_WORK]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == "stay in layer mode: 139.5 s; tensor mode was not measured: this build aborts on it"
    place.keep(Profile(MEASURED.modes, MEASURED.switches[:1], left_out))
    body, err = _explain(place, capfd, "--weights", "pinned", code=ExitCode.FAILED)
    assert (body["error"]["kind"], "no copy can be made" in err) == ("ModeNotMeasured", True)


def test_measurements_that_spread_make_it_too_close(place: _Place, capfd: pytest.CaptureFixture[str]) -> None:
    """The sentence says so, with both seconds."""
    layer, tensor = MEASURED.modes
    place.keep(dataclasses.replace(MEASURED, modes=(constant(layer.mode, 800.0, 15.0, 0.3), tensor)))
    body, _ = _explain(place, capfd)
    assert body["close"] is True
    assert body["sentence"].startswith("too close to call: layer->tensor takes 127.9 s and layer 139.5 s")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a model that splitctl bench has measured (-m), or a file of rates (--rates)"),
        (["--rates", "rates.json", "-m", "tiny.gguf"], "-m is for a measured profile"),
        (["--rates", "rates.json", "-np", "4"], "-np is for a measured profile"),
    ],
)
def test_flags_that_do_not_go_together_are_usage(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither a model nor rates, or both."""
    monkeypatch.delenv("LLAMA_ARG_MODEL", raising=False)
    assert main(["explain", *arguments, *_WORK]) == ExitCode.USAGE
    assert said in capfd.readouterr().err


@needs_compiler
@pytest.mark.stub
def test_a_library_is_asked_for_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where no device is named the library's own are the key; it is asked in a child, and loads nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place, ask = _Place(write_model(tmp_path / "tiny.gguf"), build()), Reserver.__call__
    told: list[Reserved] = []

    def once(reserver: Reserver, placement: Placement) -> Reserved:
        told[:] = told or [ask(reserver, placement)]
        return told[0]

    monkeypatch.setattr(Reserver, "__call__", once)
    asked = ["explain", "-m", str(place.model), "--lib", str(place.library), *_WORK, "--json"]
    assert main(asked) == ExitCode.FAILED
    assert "has not been measured here; measure it: splitctl bench -m" in capfd.readouterr().err
    names = tuple(one["name"] for one in told[0].library["devices"])
    place.keep(placement=Placement(devices=names))
    assert main(asked) == ExitCode.DONE
    assert json.loads(capfd.readouterr().out)["profile"]["devices"] == list(names)
