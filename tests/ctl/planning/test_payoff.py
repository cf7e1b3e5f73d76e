"""What a run's choice was worth, by a profile that has the half that the run did not measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitctl.outcome import WeightsTier
from splitctl.placement import SplitMode
from splitctl.planning.cost import Choice
from splitctl.planning.payoff import ByProfile, SwitchedRun, by_profile, look_back, without_switch
from splitctl.planning.profile import Profile
from tests.ctl.planning.profiles import MEASURED, constant

_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR
#: As the profile has it: 800 and 15 tokens/s in layer mode, 500 and 20 in tensor mode.
_SWITCHED = SwitchedRun(_LAYER, _TENSOR, _TENSOR, 58300, 58300 / 800, 1000, 1000 / 20, 5.0, WeightsTier.FILE)
_IN_TENSOR = SwitchedRun(_TENSOR, _TENSOR, _TENSOR, 58300, 58300 / 500, 1000, 1000 / 20, 0.0, WeightsTier.FILE)
_IN_LAYER = SwitchedRun(_LAYER, _LAYER, _LAYER, 58300, 58300 / 800, 1000, 1000 / 15, 0.0, WeightsTier.FILE)


def _judged(seen: SwitchedRun, profile: Profile = MEASURED) -> ByProfile:
    found = by_profile(seen, profile, "2026-11-30 (b1)")
    assert found is not None
    return found


def test_a_switch_that_paid_is_told_by_how_much() -> None:
    """Against the better mode throughout, of which one half is the profile's and the other as it was measured."""
    found = _judged(_SWITCHED)
    assert (found.paid, found.other, found.is_close) == (True, Choice.LAYER, False)
    assert found.saved_s == pytest.approx(1000 / 15 - 1000 / 20 - 5.0)
    assert found.sentence == (
        "the switch paid: layer mode throughout would have taken 11.67 s more than the 127.88 s "
        "(by the profile of 2026-11-30 (b1))"
    )


def test_a_switch_that_did_not_pay_names_what_would_have_been_better() -> None:
    """An answer that is too short for it, with the flags for next time."""
    found = _judged(replace(_SWITCHED, n_generated=20, generate_s=1.0, switch_s=9.0))
    assert (found.paid, found.other) == (False, Choice.LAYER)
    assert found.saved_s == pytest.approx(20 / 15 - 1.0 - 9.0)
    assert "layer mode throughout would have saved 8.67 s: leave out -psm, -sm layer" in found.sentence


def test_what_lies_within_the_spread_is_not_called() -> None:
    """Both seconds are given, and the switch neither paid nor did not."""
    found = _judged(replace(_SWITCHED, switch_s=15.0))
    assert (found.paid, found.is_close) == (None, True)
    assert "too close to call: this run took 137.88 s, layer would have taken 139.54 s" in found.sentence
    loose = replace(MEASURED, modes=(constant(_LAYER, 800.0, 15.0, 0.3), MEASURED.modes[1]))
    assert _judged(_SWITCHED, loose).is_close


def test_a_run_in_one_mode_is_told_of_the_switch_that_would_have_paid() -> None:
    """The prompt in the other mode, or the answer in it: with the flags, and by what a session's first switch takes."""
    found = _judged(_IN_TENSOR)
    assert (found.paid, found.other) == (None, Choice.LAYER_TO_TENSOR)
    assert found.saved_s == pytest.approx(-(58300 / 500 - 58300 / 800 - 9.0))
    assert "reading in layer mode and switching would have saved 34.72 s: -psm layer (" in found.sentence
    found = _judged(_IN_LAYER)
    assert found.other is Choice.LAYER_TO_TENSOR
    assert "after a switch would have saved 7.67 s: -psm layer -sm tensor (" in found.sentence


def test_the_tier_that_the_run_would_have_used_is_judged() -> None:
    """Pinned weights add to every token; a tier that nobody measured says nothing of a switch; auto takes the best."""
    pinned = _judged(replace(_IN_TENSOR, weights=WeightsTier.PINNED))
    assert pinned.saved_s == pytest.approx(-(58300 / 500 - 58300 / 800 - 1.0 - 0.5))
    assert _judged(replace(_IN_TENSOR, weights=WeightsTier.RESIDENT)).other is Choice.LAYER
    assert _judged(replace(_IN_TENSOR, weights=WeightsTier.AUTO)).saved_s == pytest.approx(pinned.saved_s)


def test_a_mode_that_was_well_chosen_is_told_so() -> None:
    """A long answer to a short prompt in the mode that generates faster."""
    found = _judged(replace(_IN_TENSOR, n_prompt=100, prompt_s=0.2))
    assert found.saved_s > 0.0
    assert found.sentence.startswith("no other choice would have been better than tensor mode throughout")
    found = _judged(replace(_IN_LAYER, n_prompt=100, prompt_s=0.125))
    assert "tensor mode throughout would have saved" in found.sentence
    assert "-sm tensor (" in found.sentence


def test_tokens_that_the_session_held_count_with_their_depth() -> None:
    """What was restored is not read again; what is read stands behind it."""
    layer, tensor = MEASURED.modes
    deep = replace(tensor, reads=(*tensor.reads[:-1], constant(_TENSOR, 100.0, 1.0).reads[-1]))
    profile = replace(MEASURED, modes=(layer, deep))
    seen = replace(_SWITCHED, n_prompt=512, prompt_s=512 / 800)
    flat, held = _judged(seen, profile), _judged(replace(seen, n_held=4096), profile)
    assert flat.other is Choice.TENSOR
    assert held.other_s > flat.other_s + 3.0


@pytest.mark.parametrize(
    "seen",
    [
        replace(_SWITCHED, generates_in=_LAYER),
        replace(_IN_LAYER, reads_in=SplitMode.NONE, generates_in=SplitMode.NONE, requested=SplitMode.NONE),
    ],
    ids=["fell back", "a mode without choices"],
)
def test_what_cannot_be_judged_is_not(seen: SwitchedRun) -> None:
    """A switch that fell back, a mode that no profile is of, and a profile that knows no other choice."""
    assert by_profile(seen, MEASURED, "") is None
    assert by_profile(_IN_LAYER, Profile(MEASURED.modes[:1]), "") is None


def test_the_object_of_a_run_keeps_its_keys() -> None:
    """A run with a switch has what it had, and `by_profile`; one without the same keys, null for what was not."""
    plain = look_back(_SWITCHED, 2).to_json()
    assert list(plain) == ["paid", "sentence", "pays_if", "rates", "by_profile"]
    assert plain["by_profile"] is None
    found = _judged(_IN_LAYER)
    body = without_switch(_IN_LAYER, found).to_json()
    assert list(body) == list(plain)
    assert (body["paid"], body["pays_if"], body["rates"]["switch_s"]) == (None, None, None)
    assert body["sentence"] == body["by_profile"]["sentence"] == found.sentence
    assert body["by_profile"]["other"] == "layer->tensor"
