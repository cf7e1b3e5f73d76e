"""What a profile says of some work: the choice, what is missing for a better one, and what is too close to call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.placement import SplitMode
from splitctl.planning.advice import advise
from splitctl.planning.cost import Choice, Work, compare
from splitctl.planning.profile import LeftOut, ModeNotMeasured, Profile
from tests.ctl.planning.profiles import MEASURED, constant, exactly, switch

_WORK = Work(58300, 1000)


def test_a_profile_of_constant_rates_says_what_its_rates_say() -> None:
    """The choice, the seconds and the sentence are those of the rates; every way that was measured is weighed."""
    advice = advise(MEASURED, _WORK)
    rates = MEASURED.rates(_WORK)
    assert advice.comparison == compare(rates.in_tier("file"), _WORK)
    assert (advice.best, advice.way, list(advice.ways)) == (Choice.LAYER_TO_TENSOR, "file", ["file", "pinned"])
    assert advice.sentence.startswith(compare(rates, _WORK).sentence)
    pinned = advise(MEASURED, _WORK, way="pinned")
    gain = advice.seconds[Choice.LAYER_TO_TENSOR] - pinned.seconds[Choice.LAYER_TO_TENSOR]
    assert gain == pytest.approx(4.0 - 1000 * 0.5e-3)
    body = advice.to_json()
    assert list(body["tiers"]) == ["file", "pinned"]
    assert (body["way"], body["uncached"], body["break_even"]) == (
        "file",
        58300,
        compare(rates, _WORK).break_even.to_json(),
    )


def test_a_way_without_the_file_is_not_taken_for_it() -> None:
    """Where no switch from the file was measured the first that was is judged, and the file has no row."""
    pinned = replace(MEASURED, switches=tuple(one for one in MEASURED.switches if one.way == "pinned"))
    advice = advise(pinned, _WORK)
    assert (advice.way, list(advice.to_json()["tiers"])) == ("pinned", ["pinned"])
    with pytest.raises(ModeNotMeasured, match=r"no numbers of a switch \(file\) to another mode: measure it"):
        advise(pinned, _WORK, way="file")
    why = replace(pinned, left_out=(LeftOut("resident", "both placements do not fit"),))
    with pytest.raises(ModeNotMeasured, match="both placements do not fit"):
        advise(why, _WORK, way="resident")


def test_the_sentence_says_how_its_switch_is_made() -> None:
    """Where several ways were measured the one that is judged is named, and one that does the work sooner."""
    slow = (*MEASURED.switches[2:], replace(MEASURED.switches[0], pause=exactly(20.0)))
    profile = replace(MEASURED, switches=slow)
    said = advise(profile, _WORK).sentence
    quick = advise(profile, _WORK, way="pinned")
    assert said.endswith(
        "; this is for a switch with weights from the file: with pinned weights layer->tensor takes "
        f"{quick.seconds[quick.best]:,.1f} s"
    )
    assert quick.sentence.endswith("; this is for a switch with pinned weights")
    assert "this is for" not in advise(replace(MEASURED, switches=slow[2:]), _WORK).sentence


@pytest.mark.parametrize("work", [Work(0, 100), Work(5000, 100, 5000), Work(1, 100)])
def test_a_switch_that_short_work_does_not_pay_for_is_not_said_never_to_pay(work: Work) -> None:
    """Few tokens are read as fast as steps are made, which says nothing of longer prompts."""
    slow = (constant(SplitMode.LAYER, 200.0, 15.0), constant(SplitMode.TENSOR, 100.0, 20.0))
    modes = tuple(replace(one, reads=tuple(x for x in one.reads if x.n_tokens > 1)) for one in slow)
    said = advise(replace(MEASURED, modes=modes), work).sentence
    assert "no switch pays for such work: tensor mode reads and generates it at least as fast as layer mode" in said
    assert "ever" not in said
    assert "this is for" not in said


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 5000), st.integers(1, 8))
def test_the_best_is_never_slower_than_any_other(prompt: int, generate: int, cached: int, n_seq: int) -> None:
    """Whatever is to be done, the choice takes least, and a switch is chosen only if it saves its cost."""
    advice = advise(MEASURED, Work(prompt, generate, min(cached, prompt)), n_seq=n_seq)
    assert advice.seconds[advice.best] == min(advice.seconds.values())
    assert not (advice.best.is_switch and not (prompt and generate))


@pytest.mark.parametrize("kept", [SplitMode.LAYER, SplitMode.TENSOR])
def test_a_mode_that_was_not_measured_is_not_recommended(kept: SplitMode) -> None:
    """The answer is the other mode, with its seconds and with why the first was left out."""
    other = SplitMode.TENSOR if kept is SplitMode.LAYER else SplitMode.LAYER
    modes = tuple(one for one in MEASURED.modes if one.mode is kept)
    advice = advise(Profile(modes, (), (LeftOut(other.value, "this build aborts on it"),)), Work(800, 15))
    assert (advice.best, list(advice.seconds), advice.comparison) == (Choice(kept.value), [Choice(kept.value)], None)
    assert advice.sentence.startswith(f"stay in {kept.value} mode: ")
    assert advice.sentence.endswith(f"{other.value} mode was not measured: this build aborts on it")
    body = advice.to_json()
    assert body["seconds"][other.value] is body["margin"] is body["switch"] is None
    assert body["seconds"][kept.value] == pytest.approx(advice.seconds[advice.best])


def test_without_any_mode_there_is_no_answer() -> None:
    """A profile of neither mode says why layer mode is missing."""
    with pytest.raises(ModeNotMeasured, match="no numbers of layer mode: no memory"):
        advise(Profile((), (), (LeftOut("layer", "no memory"),)), _WORK)


def test_modes_without_a_switch_are_compared_alone() -> None:
    """The faster one is named with both seconds and with why no switch was measured; a given time stands in for it."""
    left_out = (LeftOut("file", "it was cut short"), LeftOut("pinned", "it was cut short"), LeftOut("row", "refused"))
    alone = Profile(MEASURED.modes, (), left_out)
    advice = advise(alone, _WORK)
    assert (advice.best, advice.comparison) == (Choice.LAYER, None)
    assert "(166.6 s); no switch between them was measured (file, pinned: it was cut short)" in advice.sentence
    assert advice.to_json()["margin"] == pytest.approx(166.6 - 139.5, abs=0.1)
    given = advise(alone, _WORK, switch_s=5.0)
    assert (given.best, given.way) == (Choice.LAYER_TO_TENSOR, "file")


def test_a_given_time_replaces_the_measured_one() -> None:
    """What pinned weights add to a token stays as it was measured."""
    assert advise(MEASURED, _WORK, switch_s=500.0).best is Choice.LAYER
    dear = advise(MEASURED, _WORK, way="pinned", switch_s=2.0)
    cheap = advise(MEASURED, _WORK, way="pinned")
    assert dear.seconds[dear.best] - cheap.seconds[cheap.best] == pytest.approx(1.0)


def test_what_the_measurements_cannot_tell_apart_is_too_close_to_call() -> None:
    """Both seconds are given, and by how much repetitions differed; a steady measurement of the same calls it."""
    assert advise(MEASURED, _WORK).sentence.startswith("read the prompt in layer mode, switch")
    loose = replace(MEASURED, modes=(constant(SplitMode.LAYER, 800.0, 15.0, 0.3), MEASURED.modes[1]))
    advice = advise(loose, _WORK)
    assert advice.to_json()["close"] is True
    assert advice.sentence.startswith(
        "too close to call: layer->tensor takes 127.9 s and layer 139.5 s, and measurements differ by 30%; the switch"
    )


def test_more_sequences_make_a_switch_pay_sooner() -> None:
    """One switch serves all of them: four answers of a length that alone does not pay for it do."""
    layer, tensor = MEASURED.modes
    many = replace(MEASURED, modes=(layer, tensor), switches=(switch(SplitMode.LAYER, SplitMode.TENSOR, 5.0),))
    assert advise(many, Work(58300, 200)).best is Choice.LAYER
    assert not advise(many, Work(3000, 3000)).best.is_switch
    assert advise(many, Work(3000, 3000), n_seq=4).best is Choice.LAYER_TO_TENSOR


def test_one_device_that_is_faster_alone_is_named() -> None:
    """Whoever splits for speed gets to know that it is none; where the split is faster nothing is added."""
    for prompt_tps, is_named in ((1600.0, True), (100.0, False)):
        modes = (*MEASURED.modes, constant(SplitMode.NONE, prompt_tps, 30.0))
        advice = advise(replace(MEASURED, modes=modes), _WORK)
        assert advice.to_json()["alone_s"] == pytest.approx(58300 / prompt_tps + 1000 / 30)
        assert advice.best is Choice.LAYER_TO_TENSOR
        assert ("one device alone takes 69.8 s (-sm none)" in advice.sentence) is is_named
    assert advise(MEASURED, _WORK).to_json()["alone_s"] is None
