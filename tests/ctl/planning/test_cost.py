"""Whether a switch pays: the measured cases to the digit, the arithmetic's properties, and what is no file of rates."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splitctl.cli.main import main
from splitctl.cli.output import ExitCode
from splitctl.errors import ConfigInvalid
from splitctl.outcome import WeightsTier
from splitctl.placement import SplitMode
from splitctl.planning.cost import (
    MAX_TOKENS,
    PINNED_MS_PER_TOKEN,
    Choice,
    ModeRates,
    Rates,
    RatesInvalid,
    Work,
    compare,
    parse_rates,
)
from splitctl.planning.payoff import SwitchedRun, look_back

#: RTX 4070 and 3060, 27B Q5_K_M, q8_0 cache.
_A = Rates(5.2, ModeRates(807.57, 14.80), ModeRates(507.92, 19.76))
#: Two H200 over NVLink, 27.9B q8_0, prompts of 4,096 and of 512 tokens.
_C = Rates(1.0, ModeRates(5590.0, 92.9), ModeRates(5645.0, 134.5))
_C_SHORT = Rates(1.0, ModeRates(3277.0, 92.9), ModeRates(5847.0, 134.5))
#: A tensor split that reads 40 % faster and generates slower.
_OPPOSITE = Rates(5.2, ModeRates(500.0, 30.0), ModeRates(700.0, 20.0))


def _file(rates: Rates) -> dict[str, Any]:
    modes = {"layer": rates.layer, "tensor": rates.tensor}
    return {
        "switch_s": rates.switch_s,
        "modes": {
            name: {"prompt_tps": one.prompt_tps, "generate_tps": one.generate_tps} for name, one in modes.items()
        },
    }


# -- measured cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "generate", "tensor", "layer", "switched", "best"),
    [
        (58300, 1000, 165.4, 139.8, 128.0, Choice.LAYER_TO_TENSOR),
        (58300, 200, 124.9, 85.7, 87.5, Choice.LAYER),
        (3000, 1000, 56.5, 71.3, 59.5, Choice.TENSOR),
        (58300, 300, 130.0, 92.5, 92.6, Choice.LAYER),
        (58300, 320, 131.0, 93.8, 93.6, Choice.LAYER_TO_TENSOR),
    ],
)
def test_case_a_to_the_digit(
    prompt: int, generate: int, tensor: float, layer: float, switched: float, best: Choice
) -> None:
    """Case A gives the printed seconds, the printed choice and the printed break-even."""
    found = compare(_A, Work(prompt, generate))
    assert round(found.seconds[Choice.TENSOR], 1) == tensor
    assert round(found.seconds[Choice.LAYER], 1) == layer
    assert round(found.seconds[Choice.LAYER_TO_TENSOR], 1) == switched
    assert found.best is best
    body = found.to_json()
    assert body["break_even"] == {"prompt": 7118, "generate": 307}
    assert body["switch"] == "layer->tensor"


def test_tokens_in_the_cache_are_not_read() -> None:
    """Cached tokens cost nothing in any mode: 58,300 of which 55,300 are cached is as 3,000."""
    cached, plain = compare(_A, Work(58300, 1000, cached=55300)), compare(_A, Work(3000, 1000))
    assert cached.seconds == plain.seconds
    assert cached.best is Choice.TENSOR


@pytest.mark.parametrize("rates", [_C, _C_SHORT])
@pytest.mark.parametrize("work", [Work(512, 128), Work(4096, 1), Work(10**6, 10**6), Work(0, 1), Work(1, 0)])
def test_case_c_stays_in_tensor(rates: Rates, work: Work) -> None:
    """Where tensor mode is the faster in everything, no amount of work makes a switch pay, and the answer says so."""
    found = compare(rates, work)
    assert found.best is Choice.TENSOR
    body = found.to_json()
    assert (body["switch"], body["break_even"]) == (None, {"prompt": None, "generate": None})
    assert "no switch ever pays: tensor mode reads and generates at least as fast as layer mode" in body["sentence"]


def test_the_opposite_direction() -> None:
    """Where tensor mode reads faster and generates slower, the answer is tensor first, then layer."""
    found = compare(_OPPOSITE, Work(58300, 1000))
    assert found.best is Choice.TENSOR_TO_LAYER
    body = found.to_json()
    assert body["switch"] == "tensor->layer"
    assert body["break_even"] == {
        "prompt": round(5.2 / (1 / 500 - 1 / 700)),
        "generate": round(5.2 / (1 / 20 - 1 / 30)),
    }
    assert body["sentence"].startswith("read the prompt in tensor mode, switch, and generate in layer mode")


def test_a_margin_within_the_noise_is_called_so() -> None:
    """A choice that wins by less than timings differ from run to run is named, with that said of its margin."""
    close, clear = compare(_A, Work(58300, 300)), compare(_A, Work(58300, 1000))
    assert (close.is_close, clear.is_close) == (True, False)
    assert "less than timings differ" in close.sentence
    assert "less than timings differ" not in clear.sentence


# -- properties --------------------------------------------------------------------------------------------------------

_TPS = st.floats(1e-3, 1e6)
_RATES = st.builds(Rates, st.floats(0.0, 1e4), st.builds(ModeRates, _TPS, _TPS), st.builds(ModeRates, _TPS, _TPS))
_WORK = st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)).map(lambda two: Work(*two))


@given(_RATES, _WORK)
def test_the_best_is_the_minimum(rates: Rates, work: Work) -> None:
    """The best choice takes least, the margin leads to the next, and a tie is never a switch."""
    found = compare(rates, work)
    assert found.seconds[found.best] == min(found.seconds.values())
    assert found.margin == found.seconds[found.next_best] - found.seconds[found.best] >= 0.0
    ties = [one for one in Choice if found.seconds[one] == found.seconds[found.best]]
    assert found.best is ties[0]
    assert not found.best.is_switch or rates.switch_s < math.inf
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["best"] == found.best.value


def _that_can_pay(switch_s: float, slow: ModeRates, reads: float, writes: float, opposite: bool) -> Rates:
    reader = ModeRates(slow.prompt_tps * reads, slow.generate_tps)
    writer = ModeRates(slow.prompt_tps, slow.generate_tps * writes)
    return Rates(switch_s, writer, reader) if opposite else Rates(switch_s, reader, writer)


_FACTOR = st.floats(1.01, 100.0)


@given(
    st.builds(
        _that_can_pay,
        st.floats(0.1, 60.0),
        st.builds(ModeRates, st.floats(50.0, 1e4), st.floats(50.0, 1e4)),
        _FACTOR,
        _FACTOR,
        st.booleans(),
    ),
    st.integers(0, 10**7),
)
def test_break_even_is_where_the_lines_cross(rates: Rates, other: int) -> None:
    """At the break-even the switch and the mode that it replaces take equally long, and beyond it the switch less."""
    found = compare(rates, Work(0, 0))
    switch, even = found.switch, found.break_even
    assert switch is not None
    assert even.prompt is not None
    assert even.generate is not None
    reader, writer = rates.of(switch.reads_in), rates.of(switch.generates_in)
    switched = even.prompt / reader.prompt_tps + rates.switch_s
    assert switched == pytest.approx(even.prompt / writer.prompt_tps, rel=1e-6)
    answered = even.generate / writer.generate_tps + rates.switch_s
    assert answered == pytest.approx(even.generate / reader.generate_tps, rel=1e-6)
    # Around it, with whole tokens: on the far side of both the switch is best, on the near side of either it is not.
    beyond = Work(math.ceil(even.prompt * 1.001) + 1 + other, math.ceil(even.generate * 1.001) + 1 + other)
    assert compare(rates, beyond).best is switch
    assert compare(rates, replace(beyond, prompt=math.floor(even.prompt * 0.999))).best is not switch
    assert compare(rates, replace(beyond, generate=math.floor(even.generate * 0.999))).best is not switch


@given(_RATES, _WORK)
def test_exchanging_the_modes_exchanges_the_answer(rates: Rates, work: Work) -> None:
    """No mode is preferred by name: with the rates exchanged, the other choices take the same times."""
    swapped = compare(replace(rates, layer=rates.tensor, tensor=rates.layer), work)
    found = compare(rates, work)
    pairs = {"layer": "tensor", "tensor": "layer", "layer->tensor": "tensor->layer", "tensor->layer": "layer->tensor"}
    assert {pairs[one.value]: value for one, value in found.seconds.items()} == {
        one.value: value for one, value in swapped.seconds.items()
    }
    assert swapped.break_even == found.break_even


@given(_RATES, _WORK)
def test_a_switch_is_best_only_beyond_its_break_even(rates: Rates, work: Work) -> None:
    """A switch that is best is the one that gains at both ends, and the work exceeds both its break-evens."""
    found = compare(rates, work)
    if found.best.is_switch:
        assert found.best is found.switch
        assert found.break_even.prompt is not None
        assert found.break_even.generate is not None
        assert work.uncached >= found.break_even.prompt * (1 - 1e-9)
        assert work.generate >= found.break_even.generate * (1 - 1e-9)


@pytest.mark.parametrize("numbers", [(-1, 1, 0), (1, -1, 0), (1, 1, -1), (5, 1, 6), (MAX_TOKENS + 1, 1, 0)])
def test_work_that_cannot_be(numbers: tuple[int, int, int]) -> None:
    """Negative counts, counts beyond any context and more cached than there is are refused."""
    with pytest.raises(ConfigInvalid):
        Work(*numbers)


def test_only_measured_modes_have_rates() -> None:
    """Asking for the rates of another mode is refused."""
    with pytest.raises(ConfigInvalid):
        _A.of(SplitMode.ROW)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_of_rates_reads_back() -> None:
    """What the issue's form says is what is read, integers included."""
    assert parse_rates(json.dumps(_file(_A))) == _A
    tensor, layer = '{"generate_tps": 2, "prompt_tps": 1}', '{"prompt_tps": 3, "generate_tps": 4}'
    text = f'{{"switch_s": 0, "modes": {{"tensor": {tensor}, "layer": {layer}}}}}'
    assert parse_rates(text.encode()) == Rates(0.0, ModeRates(3.0, 4.0), ModeRates(1.0, 2.0))


_NO_RATES = [
    *("NaN", "Infinity", "-Infinity", "-1", "0", "-0.0", "1e400", "1e12", "1" + "0" * 400),
    *("null", "true", '"5"', "[]", "{}"),
]


@pytest.mark.parametrize("number", _NO_RATES)
@pytest.mark.parametrize("place", ["prompt_tps", "generate_tps"])
def test_a_rate_that_is_none(number: str, place: str) -> None:
    """NaN, negative, zero, huge or no number at all: the error names the place, what is there and the bounds."""
    text = json.dumps(_file(_A)).replace(f'"{place}": ', f'"{place}": {number}, "x": ', 1)
    text = text.replace(f', "x": {_A.layer.prompt_tps if place == "prompt_tps" else _A.layer.generate_tps}', "")
    with pytest.raises(RatesInvalid) as caught:
        parse_rates(text)
    assert "number" in caught.value.wanted
    assert place in str(caught.value) or "NaN" in number or "Infinity" in number


@pytest.mark.parametrize("number", ["NaN", "-1", "1e7", "null", '"5.2"', "false"])
def test_a_switch_time_that_is_none(number: str) -> None:
    """The seconds of a switch are a finite number, zero at least."""
    text = json.dumps(_file(_A)).replace('"switch_s": 5.2', f'"switch_s": {number}')
    with pytest.raises(RatesInvalid):
        parse_rates(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("[]", "is []"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (b"\xff\xfe\xff", "no JSON"),
        ("{}", "without switch_s and modes"),
        ('{"switch_s": 1}', "without modes"),
        ('{"switch_s": 1, "modes": []}', "modes is []"),
        ('{"switch_s": 1, "modes": {"layer": {}}}', "without tensor"),
        ('{"switch_s": 1, "modes": {"layer": {}, "tensor": {}}}', "modes.layer is without prompt_tps and generate_tps"),
        (json.dumps({**_file(_A), "more": 1}), "with 'more'"),
        ('{"switch_s": 1, "switch_s": 2, "modes": {}}', "switch_s twice"),
        ('{"switch_s": ' + "9" * 5000 + "}", "no JSON"),
    ],
)
def test_a_file_that_is_no_rates(text: str | bytes, said: str) -> None:
    """Broken JSON, wrong shapes, missing, unknown and repeated keys are one known error that says which."""
    with pytest.raises(RatesInvalid) as caught:
        parse_rates(text)
    assert said in str(caught.value)


_NAMES = st.sampled_from(["switch_s", "modes", "layer", "tensor", "prompt_tps", "generate_tps"])
_JSON = st.recursive(
    st.none() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
)


@given(st.one_of(st.text(max_size=60), st.binary(max_size=60), _JSON.map(json.dumps)))
def test_whatever_the_file_holds(text: str | bytes) -> None:
    """Any content is rates or the one known error."""
    with contextlib.suppress(RatesInvalid):
        assert isinstance(parse_rates(text), Rates)


# -- tiers of weights --------------------------------------------------------------------------------------------------

_TIERS = {"file": 5.0, "pinned": 1.0, "resident": 0.2, "beside": 0.1}


def test_a_switch_takes_the_time_of_its_tier() -> None:
    """Its seconds, and for pinned weights what each token after it takes more; the break-even follows."""
    rates = replace(_A, tier_switch_s=_TIERS, pinned_ms_per_token=0.5)
    work = Work(58300, 1000)
    plain = compare(replace(_A, switch_s=0.0), work).seconds[Choice.LAYER_TO_TENSOR]
    found = {tier: compare(one, work) for tier, one in rates.tiers.items()}
    seconds = {tier: one.seconds[Choice.LAYER_TO_TENSOR] - plain for tier, one in found.items()}
    assert seconds == pytest.approx({"file": 5.0, "pinned": 1.5, "resident": 0.2, "beside": 0.1})
    assert found["pinned"].seconds[Choice.TENSOR] == found["file"].seconds[Choice.TENSOR]
    reading, writing = 1 / 507.92 - 1 / 807.57, 1 / 14.80 - 1 / 19.76
    assert found["resident"].break_even.prompt == pytest.approx(0.2 / reading)
    assert found["resident"].break_even.generate == pytest.approx(0.2 / writing)
    assert found["pinned"].break_even.prompt == pytest.approx(1.0 / reading)
    assert found["pinned"].break_even.generate == pytest.approx(1.0 / (writing - 0.0005))


def test_pinned_weights_can_cost_more_than_a_mode_gains() -> None:
    """Then no switch pays with them, and the sentence says that it is for the tokens, not for the modes."""
    gain_ms = (1 / 14.80 - 1 / 19.76) * 1e3
    dear = replace(_A, pinned_ms_per_token=gain_ms * 1.01).in_tier("pinned", 0.5)
    found = compare(dear, Work(10**6, 10**6))
    assert (found.switch, found.best.is_switch) == (None, False)
    assert "no switch pays with these weights: no mode gains the 17.1" in found.sentence
    assert compare(replace(dear, pinned_ms_per_token=gain_ms * 0.99).in_tier("pinned"), Work(1, 1)).switch is not None


@given(_RATES, _WORK, st.floats(0.0, 10.0), st.floats(0.0, 1e4))
def test_a_tier_is_judged_as_rates_of_its_own(rates: Rates, work: Work, ms: float, switch_s: float) -> None:
    """Its break-even bounds what pays with it, and the file's row stays what it was."""
    found = compare(replace(rates, pinned_ms_per_token=ms).in_tier("pinned", switch_s), work)
    if found.best.is_switch:
        assert found.break_even.generate is not None
        assert work.generate >= found.break_even.generate * (1 - 1e-9)
    body = found.to_json()["tiers"]
    assert list(body) == ["file", "pinned"]
    assert body["file"]["best"] == compare(rates, work).best.value
    assert body["pinned"]["best"] == found.best.value


def test_a_tier_that_nobody_measured_has_no_time() -> None:
    """The error names the key of the file; its own time is the file's."""
    assert _A.in_tier("file").switch_s == _A.switch_s
    with pytest.raises(RatesInvalid, match=r"tier_switch_s.resident is missing; wanted: seconds of a switch"):
        _A.in_tier("resident")


def test_a_file_of_rates_may_have_times_of_tiers() -> None:
    """They are read as strictly as the rest; without them a pinned token takes what is said to be usual."""
    more = {"tier_switch_s": {"pinned": 0.9, "beside": 0}, "pinned_ms_per_token": 0.25}
    rates = parse_rates(json.dumps(_file(_A) | more))
    assert (rates.tier_switch_s, rates.pinned_ms_per_token) == ({"pinned": 0.9, "beside": 0.0}, 0.25)
    assert (parse_rates(json.dumps(_file(_A))).pinned_ms_per_token, _A.tier_switch_s) == (PINNED_MS_PER_TOKEN, {})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tier_switch_s": {"auto": 1}}, "with 'auto'; wanted: an object with the keys file and pinned and resident"),
        ({"tier_switch_s": {"pinned": None}}, "tier_switch_s.pinned is null, which means that nobody measured it"),
        ({"tier_switch_s": {"file": -1}}, "tier_switch_s.file is -1"),
        ({"tier_switch_s": 3}, "tier_switch_s is 3"),
        ({"pinned_ms_per_token": "0.6"}, "pinned_ms_per_token is '0.6'"),
        ({"pinned_ms_per_token": -0.5}, "pinned_ms_per_token is -0.5; wanted: a number from 0"),
    ],
)
def test_times_of_tiers_that_are_none(more: dict[str, Any], said: str) -> None:
    """Unknown tiers, and what is no time, are refused by name."""
    with pytest.raises(RatesInvalid) as caught:
        parse_rates(json.dumps(_file(_A) | more))
    assert said in str(caught.value)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rates_a(tmp_path: Path) -> Path:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(_file(_A)))
    return path


def test_explain_prints_one_object(rates_a: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`explain --json` prints best, seconds of every choice, break-even, margin and sentence, and nothing else."""
    assert main(["explain", "--rates", str(rates_a), "--prompt", "58300", "--generate", "1000", "--json"]) == 0
    out, err = capfd.readouterr()
    body = json.loads(out)
    assert (out.count("\n"), err) == (1, "")
    assert body["best"] == "layer->tensor"
    assert {name: round(value, 1) for name, value in body["seconds"].items()} == {
        "layer": 139.8,
        "tensor": 165.4,
        "layer->tensor": 128.0,
        "tensor->layer": 187.5,
    }
    assert body["break_even"] == {"prompt": 7118, "generate": 307}
    assert round(body["margin"], 1) == 11.8
    assert "128.0 s" in body["sentence"]


def test_explain_for_people(rates_a: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without --json a table of the choices and the sentence are on stdout; cached tokens are left out of the times."""
    arguments = ["explain", "--rates", str(rates_a), "--prompt", "58300", "--cached", "55300", "--generate", "1000"]
    assert main(arguments) == 0
    out, _ = capfd.readouterr()
    assert "* tensor " in out
    assert "56.5" in out
    assert "stay in tensor mode" in out


def test_explain_judges_the_tier_that_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With its time and its milliseconds, and lists all tiers beside each other; --switch-s replaces the time."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(_file(_A) | {"tier_switch_s": {"pinned": 1.0, "resident": 0.2}}))
    asked = ["explain", "--rates", str(path), "--prompt", "58300", "--generate", "1000"]

    def explained(*more: str) -> dict[str, Any]:
        assert main([*asked, *more, "--json"]) == 0
        body: dict[str, Any] = json.loads(capfd.readouterr().out)
        return body

    plain, resident = explained(), explained("--weights", "resident")
    assert plain["tiers"] == resident["tiers"]
    assert list(plain["tiers"]) == ["file", "pinned", "resident"]
    assert [one["switch_s"] for one in plain["tiers"].values()] == [5.2, 1.0, 0.2]
    assert [one["ms_per_token"] for one in plain["tiers"].values()] == [0.0, PINNED_MS_PER_TOKEN, 0.0]
    assert plain["break_even"] == plain["tiers"]["file"]["break_even"]
    assert resident["break_even"] == resident["tiers"]["resident"]["break_even"] == {"prompt": 274, "generate": 12}
    assert resident["seconds"]["layer->tensor"] == pytest.approx(plain["seconds"]["layer->tensor"] - 5.0)
    assert explained("--weights", "pinned", "--switch-s", "2")["tiers"]["pinned"]["switch_s"] == 2.0
    assert main([*asked, "--weights", "resident"]) == 0
    out, _ = capfd.readouterr()
    assert "switch [s]" in out
    (row,) = [line for line in out.splitlines() if "resident" in line]
    assert [word for word in row.split() if word.isalnum()] == ["resident", "0", "274", "12"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (["--weights", "auto"], ExitCode.USAGE, "'file', 'pinned', 'resident'"),
        (["--weights", "pinned"], ExitCode.FAILED, "tier_switch_s.pinned is missing"),
        (["--switch-s", "-1"], ExitCode.USAGE, "--switch-s"),
        (["--cached", "58301"], ExitCode.USAGE, "58300 at most"),
        (["--prompt", "-1"], ExitCode.USAGE, "--prompt"),
        (["--generate", "1.5"], ExitCode.USAGE, "--generate"),
        (["--rates", "/nonexistent"], ExitCode.FAILED, "cannot be read"),
        (["--rates", "/"], ExitCode.FAILED, "cannot be read"),
        (["--rates", "/dev/null"], ExitCode.FAILED, "no JSON"),
        (["--rates", "/dev/zero"], ExitCode.FAILED, "over 1048576 bytes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_explain_refuses_in_one_line(
    change: list[str], code: ExitCode, said: str, rates_a: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bad numbers are usage errors, bad files failures, each in one line that says what is wanted."""
    base = ["explain", "--rates", str(rates_a), "--prompt", "58300", "--generate", "1000"]
    assert main([*base, *change]) == code
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


# -- what a run says of its own switch ---------------------------------------------------------------------------------

_RUN = SwitchedRun(SplitMode.LAYER, SplitMode.TENSOR, SplitMode.TENSOR, 58300, 72.2, 1000, 50.6, 5.2)


def test_a_run_that_cannot_tell_says_what_it_would_take() -> None:
    """A long prompt and a long answer leave it open, with the limits that the two unmeasured rates have to keep."""
    found = look_back(_RUN, 2)
    assert found.paid is None
    assert found.reader_below == pytest.approx(1000 / (5.2 + 50.6))
    assert found.writer_below == pytest.approx(58300 / (5.2 + 72.2))
    # The unmeasured rates of case A keep both limits, and the switch did pay.
    assert _A.layer.generate_tps < found.reader_below
    assert _A.tensor.prompt_tps < found.writer_below
    assert "cannot tell" in found.sentence
    body = found.to_json()
    assert body["rates"]["modes"]["layer"]["generate_tps"] is None
    assert body["pays_if"]["tensor_prompt_tps_below"] == found.writer_below
    with pytest.raises(RatesInvalid, match="nobody measured it"):
        parse_rates(json.dumps(body["rates"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"generates_in": SplitMode.LAYER}, "ended in layer mode, where it began"),
        ({"n_generated": 0, "generate_s": None}, "nothing was generated after it"),
        ({"n_prompt": 0, "prompt_s": None}, "nothing was read before it"),
        ({"n_prompt": 50, "prompt_s": 0.1}, "reads no slower than that"),
        ({"n_generated": 20, "generate_s": 1.0}, "2 devices together are at most 2 times as fast"),
    ],
)
def test_a_switch_that_cannot_have_paid(change: dict[str, Any], said: str) -> None:
    """A switch that came to nothing, or had too little before or after it, is said not to have paid, and why."""
    found = look_back(replace(_RUN, **change), 2)
    assert found.paid is False
    assert found.sentence.startswith("the switch did not pay: ")
    assert said in found.sentence
    json.dumps(found.to_json(), allow_nan=False)


@given(
    st.floats(1e-3, 1e3),
    st.builds(ModeRates, st.floats(1.0, 1e5), st.floats(0.1, 1e3)),
    st.builds(ModeRates, st.floats(1.0, 1e5), st.floats(0.1, 1e3)),
    st.integers(0, 10**6),
    st.integers(0, 10**5),
    st.booleans(),
)
def test_hindsight_never_contradicts_the_whole_truth(
    switch_s: float, layer: ModeRates, tensor: ModeRates, n_prompt: int, n_generated: int, opposite: bool
) -> None:
    """Where a run says that its switch did not pay, the comparison with every rate known agrees."""
    for one in (layer, tensor):
        assume(one.prompt_tps >= one.generate_tps)
    assume(tensor.generate_tps <= 2 * layer.generate_tps)
    reader, writer = (tensor, layer) if opposite else (layer, tensor)
    modes = (SplitMode.TENSOR, SplitMode.LAYER) if opposite else (SplitMode.LAYER, SplitMode.TENSOR)
    seen = SwitchedRun(
        modes[0], modes[1], modes[1], n_prompt, n_prompt / reader.prompt_tps,
        n_generated, n_generated / writer.generate_tps, switch_s,
    )  # fmt: skip
    if look_back(seen, 2).paid is False:
        best = compare(Rates(switch_s, layer, tensor), Work(n_prompt, n_generated)).seconds
        choice = Choice.TENSOR_TO_LAYER if opposite else Choice.LAYER_TO_TENSOR
        assert min(best[Choice.LAYER], best[Choice.TENSOR]) <= best[choice] * (1 + 1e-9)


def test_rates_of_a_run_name_the_tier_of_its_switch() -> None:
    """The time is that tier's, and what pinned weights cost a token is in the measured rate already."""
    pinned = look_back(replace(_RUN, weights=WeightsTier.PINNED), 2).to_json()["rates"]
    assert (pinned["tier_switch_s"], pinned["pinned_ms_per_token"]) == ({"pinned": 5.2}, 0.0)
    for mode in pinned["modes"].values():
        mode.update({name: value or 1.0 for name, value in mode.items()})
    assert parse_rates(json.dumps(pinned)).in_tier("pinned").after_switch_ms == 0.0
    resident = look_back(replace(_RUN, weights=WeightsTier.RESIDENT), 2).to_json()["rates"]
    assert (resident["tier_switch_s"], "pinned_ms_per_token" in resident) == ({"resident": 5.2}, False)
    back = replace(_RUN, generates_in=SplitMode.LAYER, weights=WeightsTier.FILE)
    assert "tier_switch_s" not in look_back(back, 2).to_json()["rates"]
