"""The outcome of a switch: the contract's object, and no outcome that lies about itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from splitctl.errors import Reason
from splitctl.outcome import DevicePeak, Stage, StageTimes, SwitchOutcome, SwitchStatus, Via, to_plain
from splitctl.placement import Placement, SplitMode

LAYER = Placement(mode=SplitMode.LAYER, n_ctx=512)
TENSOR = Placement(mode=SplitMode.TENSOR, tensor_split=(3.0, 1.0), devices=("CPU", "CPU"))
SWITCHED = SwitchOutcome(SwitchStatus.SWITCHED, TENSOR, TENSOR)
FELL_BACK = SwitchOutcome(
    status=SwitchStatus.FELL_BACK,
    requested_placement=TENSOR,
    effective_placement=LAYER,
    reason="the context could not be built: 3 GiB wanted, 1 GiB free",
    reasons=(Reason("no-memory", "3 GiB wanted, 1 GiB free"),),
    stage=Stage.BUILDING,
    stages_ms=StageTimes(quiescing=0.5, building=12.0),
    total_ms=40.0,
    fallback_ms=20.0,
    state_bytes=1234,
    weight_bytes=5678,
    n_sequences=2,
    n_tokens=99,
    conversions=("K f16 to q8_0",),
    peak_device_bytes=(DevicePeak(0, "CPU", None), DevicePeak(1, "CUDA0", 1 << 30)),
)

#: Every key of the contract, in its order.
CONTRACT = (
    "status requested effective requested_placement effective_placement confirmed recomputed reason reasons stage "
    "stages_ms total_ms fallback_ms state_bytes weight_bytes n_sequences n_tokens conversions via via_reason "
    "peak_device_bytes pause_ms weights weights_reason carry_pinned carry_pinned_reason ahead_bytes ahead_reason "
    "stages_gb_s"
)
STAGES = "quiescing checking saving sealing freeing placing building restoring switching_natively proving"


def test_the_object_is_the_contract() -> None:
    """Every key, in order, with the values of a fallback; it goes through JSON unchanged."""
    plain = FELL_BACK.to_json()
    assert " ".join(plain) == CONTRACT
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    stages = plain["stages_ms"]
    assert isinstance(stages, dict)
    assert " ".join(stages) == STAGES
    assert (stages["quiescing"], stages["building"], stages["proving"]) == (0.5, 12.0, None)
    assert (plain["status"], plain["requested"], plain["effective"], plain["stage"], plain["via"]) == (
        "fell_back",
        "tensor",
        "layer",
        "building",
        "composed",
    )
    assert plain["requested_placement"] == TENSOR.to_json()
    assert plain["effective_placement"] == LAYER.to_json()
    assert plain["reasons"] == [{"code": "no-memory", "text": "3 GiB wanted, 1 GiB free"}]
    assert plain["peak_device_bytes"] == [
        {"index": 0, "device": "CPU", "bytes": None},
        {"index": 1, "device": "CUDA0", "bytes": 1 << 30},
    ]


def test_requested_and_effective_are_two_fields() -> None:
    """P19: after a fallback the request is still told as it was made, beside what serves."""
    assert (FELL_BACK.requested, FELL_BACK.effective) == (SplitMode.TENSOR, SplitMode.LAYER)
    assert FELL_BACK.requested_placement is TENSOR


def test_a_parked_session_serves_nowhere() -> None:
    """Effective is null, in both forms."""
    parked = replace(FELL_BACK, status=SwitchStatus.PARKED, effective_placement=None)
    assert parked.effective is None
    assert (parked.to_json()["effective"], parked.to_json()["effective_placement"]) == (None, None)


def test_a_trial_that_succeeds_confirms() -> None:
    """The same outcome, confirmed."""
    assert replace(SWITCHED, confirmed=True).to_json() == {**SWITCHED.to_json(), "confirmed": True}
    assert replace(SWITCHED, via=Via.NATIVE).to_json()["via"] == "native"


@pytest.mark.parametrize(
    ("outcome", "change", "said"),
    [
        (SWITCHED, {"effective_placement": None}, "serves in some"),
        (SWITCHED, {"effective_placement": LAYER}, "serves in the requested mode"),
        (SWITCHED, {"stage": Stage.PLACING}, "failed at no stage"),
        (FELL_BACK, {"reason": ""}, "has a reason"),
        (FELL_BACK, {"confirmed": True}, "only the requested"),
        (FELL_BACK, {"status": SwitchStatus.PARKED}, "serves in no placement"),
        (FELL_BACK, {"status": SwitchStatus.REFUSED, "reason": ""}, "has a reason"),
        (FELL_BACK, {"status": SwitchStatus.CANCELLED, "reason": ""}, "has a reason"),
        (FELL_BACK, {"status": SwitchStatus.UNCHANGED}, "failed at no stage"),
    ],
)
def test_an_outcome_that_contradicts_itself_is_refused(
    outcome: SwitchOutcome, change: dict[str, Any], said: str
) -> None:
    """Law 4 is a check of the type, not a habit of its makers."""
    with pytest.raises(ValueError, match=said):
        replace(outcome, **change)


def test_an_outcome_is_frozen() -> None:
    """Nobody rewrites what happened."""
    with pytest.raises(AttributeError):
        SWITCHED.confirmed = True  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Sample:
    """Something of every kind."""

    path: Path
    mode: SplitMode
    pairs: dict[int, tuple[int, ...]]


def test_plain_forms() -> None:
    """Dataclasses, enums, paths, tuples and dictionaries have one; anything else says that it has none."""
    assert to_plain(Sample(Path("/x"), SplitMode.ROW, {1: (2, 3)})) == {
        "path": "/x",
        "mode": "row",
        "pairs": {"1": [2, 3]},
    }
    assert to_plain([None, True, 1, 1.5, "a"]) == [None, True, 1, 1.5, "a"]
    for strange in (object(), Sample, b"bytes"):
        with pytest.raises(TypeError, match="has no JSON form"):
            to_plain(strange)


def test_an_outcome_is_a_table_in_a_notebook() -> None:
    """It says how it ended, why, and the times of the stages, as well-formed markup that nothing in a reason breaks."""
    reason = "wanted <b>3 GiB</b> & found 1"
    shown = replace(FELL_BACK, reason=reason, conversions=("K f16 to <q8_0>",))._repr_html_()
    table = ET.fromstring(shown)  # noqa: S314 - made here
    assert table.tag == "table"
    assert table.findtext("caption") == "switch to tensor: fell_back"
    rows = {row[0].text: row[1].text for row in table.iter("tr")}
    assert (rows["serves in"], rows["reason"], rows["converted"]) == ("layer", reason, "K f16 to <q8_0>")
    assert (rows["building"], rows["proving"], rows["total"]) == ("12.0 ms", "-", "40.0 ms")
    assert "<b>" not in shown
    parked = replace(FELL_BACK, status=SwitchStatus.PARKED, effective_placement=None)._repr_html_()
    assert "nothing: it is parked" in parked
    assert "reason" not in SWITCHED._repr_html_()
