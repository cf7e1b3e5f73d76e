"""What work takes by what was measured: the laws of the arithmetic, and what is no measurement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.errors import ConfigInvalid
from splitctl.placement import SplitMode
from splitctl.planning.cost import MAX_TOKENS, NOISE, Choice, Work, compare
from splitctl.planning.profile import (
    Crowd,
    LeftOut,
    MeasuredMode,
    ModeNotMeasured,
    Profile,
    Read,
    Served,
    Spread,
    Step,
    SwitchTime,
)
from tests.ctl.planning.profiles import CHUNK, DEPTHS, LENGTHS, MEASURED, constant, exactly, switch

_SECONDS = st.floats(1e-4, 10.0)


@st.composite
def _modes(draw: st.DrawFn, *, grows: bool = False) -> MeasuredMode:
    """Make a mode of any times, or of times that grow with lengths, depths and sequences."""

    def times(n: int) -> Iterator[float]:
        found = draw(st.lists(_SECONDS, min_size=n, max_size=n))
        return iter(list(itertools.accumulate(found)) if grows else found)

    steps, reads = times(len(DEPTHS)), times(len(LENGTHS) + len(DEPTHS))
    lone = [Step(1, depth, exactly(next(steps))) for depth in DEPTHS]
    # What a step takes is the least that a read takes, and one more sequence only adds to it.
    least = lone[0].seconds.median if grows else 0.0
    deep = [Read(n, 0, exactly(least + next(reads))) for n in LENGTHS]
    deep += [Read(CHUNK, depth, exactly(least + next(reads))) for depth in DEPTHS[1:]]
    return MeasuredMode(SplitMode.LAYER, 512, tuple(deep), (*lone, Step(4, 0, exactly(least + next(reads)))))


# -- what reading and generating take ----------------------------------------------------------------------------------


@given(_modes(), st.integers(-5, 20_000), st.integers(0, 20_000), st.integers(1, 8))
def test_no_work_takes_less_than_no_time(mode: MeasuredMode, n: int, depth: int, n_seq: int) -> None:
    """Whatever was measured, nothing takes negative or endless time, and no tokens take none."""
    for seconds in (mode.read_s(n, depth), mode.generate_s(n, depth, n_seq)):
        assert 0.0 <= seconds < math.inf
        assert seconds > 0.0 or n <= 0


@given(_modes(grows=True), st.integers(0, 8), st.integers(0, 3000), st.integers(0, 9000), st.integers(1, 8))
def test_work_in_pieces_takes_what_it_takes_whole(
    mode: MeasuredMode, chunks: int, n: int, depth: int, n_seq: int
) -> None:
    """Chunks that are read, and tokens that are generated, can be counted in two parts."""
    m = chunks * CHUNK
    assert mode.read_s(m, depth) + mode.read_s(n, depth + m) == pytest.approx(mode.read_s(m + n, depth), abs=1e-6)
    parts = mode.generate_s(m, depth, n_seq) + mode.generate_s(n, depth + m, n_seq)
    assert parts == pytest.approx(mode.generate_s(m + n, depth, n_seq), abs=1e-6)


@given(_modes(grows=True), st.integers(1, 5000), st.integers(0, 9000), st.integers(1, 8))
def test_more_takes_longer_where_it_did_when_measured(mode: MeasuredMode, n: int, depth: int, n_seq: int) -> None:
    """One more token, one more held before, and one more sequence never make it sooner."""
    least, slack = mode.read_s(n, depth), 1 - 1e-9
    assert mode.read_s(n, depth + 1) >= least * slack
    if n % CHUNK:
        assert mode.read_s(n + 1, depth) >= least * slack
    made = mode.generate_s(n, depth, n_seq)
    assert mode.generate_s(n + 1, depth, n_seq) >= made
    assert mode.generate_s(n, depth + 1, n_seq) >= made * slack
    assert mode.generate_s(n, depth, n_seq + 1) >= made * slack


@given(st.integers(1, 30_000), st.integers(0, 30_000), st.floats(0.1, 1e4), st.floats(0.1, 1e4))
def test_constant_rates_give_tokens_over_rate(n: int, depth: int, prompt_tps: float, generate_tps: float) -> None:
    """Where every token took the same, so many tokens take so many times that, at any depth."""
    mode = constant(SplitMode.LAYER, prompt_tps, generate_tps)
    assert mode.read_s(n, depth) == pytest.approx(n / prompt_tps)
    assert mode.generate_s(n, depth) == pytest.approx(n / generate_tps)


def test_what_was_measured_comes_back() -> None:
    """The measured lengths and depths take what they took, and between two of them the middle takes the middle."""
    reads = (Read(128, 0, exactly(1.0)), Read(512, 0, exactly(2.0)), Read(512, 2048, exactly(3.0)))
    steps = (Step(1, 0, exactly(0.1)), Step(1, 1000, exactly(0.2)), Step(4, 0, exactly(0.25)))
    mode = MeasuredMode(SplitMode.LAYER, 512, reads, steps)
    assert [mode.read_s(n) for n in (128, 320, 512)] == pytest.approx([1.0, 1.5, 2.0])
    assert mode.read_s(512, 2048) == pytest.approx(3.0)
    assert mode.read_s(512, 1024) == pytest.approx(2.5)
    assert mode.read_s(256, 2048) == pytest.approx(1 + 1 / 3 + 0.5)
    assert [mode.step_s(1, at) for at in (0, 500, 1000)] == pytest.approx([0.1, 0.15, 0.2])
    assert mode.step_s(2) == pytest.approx(0.15)
    assert mode.step_s(4, 1000) == pytest.approx(0.25 + 4 * 0.1)


def test_a_single_token_that_is_read_takes_what_a_step_takes() -> None:
    """A prompt shorter than any that was measured lies between a step and the shortest of them."""
    mode = MeasuredMode(SplitMode.LAYER, 512, (Read(101, 0, exactly(1.1)),), (Step(1, 0, exactly(0.1)),))
    assert [mode.read_s(n) for n in (1, 51, 101)] == pytest.approx([0.1, 0.6, 1.1])


def test_beyond_the_last_point_its_slope_goes_on_and_never_falls() -> None:
    """Deeper than measured, a chunk takes what the last slope says; one that falls counts as none."""
    read, steps = Read(512, 0, exactly(1.0)), (Step(1, 0, exactly(0.1)), Step(1, 1000, exactly(0.3)))
    rising = MeasuredMode(SplitMode.LAYER, 512, (read, Read(512, 1000, exactly(2.0))), steps)
    assert rising.read_s(512, 3000) == pytest.approx(4.0)
    assert rising.step_s(1, 2000) == pytest.approx(0.5)
    falling = replace(rising, reads=(read, Read(512, 1000, exactly(0.5))), steps=tuple(reversed(steps)))
    assert falling.read_s(512, 3000) == pytest.approx(0.5)
    assert falling.step_s(1, 2000) == pytest.approx(0.5)
    down = replace(rising, steps=(Step(1, 0, exactly(0.3)), Step(1, 1000, exactly(0.1))))
    assert down.step_s(1, 1e9) == pytest.approx(0.1)


def test_beyond_the_last_point_noise_is_no_slope() -> None:
    """What repetitions differ by is not multiplied; a point farther back that is lower for certain gives the slope."""
    # Measured with 27B on two GPUs: the line through the first and the last would add 1 s to a switch with 64,000
    # tokens held, and 3 ms to a token.
    near, far = Step(1, 32, Spread(0.01421, 0.01419, 0.01422, 2)), Step(1, 256, Spread(0.01429, 0.01401, 0.01456, 2))
    mode = MeasuredMode(SplitMode.LAYER, 512, (Read(32, 0, exactly(0.03)),), (near, far))
    assert mode.step_s(1, 10_000) == far.seconds.median
    deep = Step(1, 2304, Spread(0.0143, 0.0142, 0.0144, 2))
    sure = replace(mode, steps=(replace(near, seconds=Spread(0.0141, 0.0140, 0.0141, 2)), far, deep))
    assert sure.step_s(1, 4576) == pytest.approx(0.0143 + 0.0002)
    times = {256: Spread(0.952, 0.950, 1.138, 3), 512: Spread(1.091, 1.076, 1.106, 2)}
    switches = tuple(
        replace(switch(SplitMode.TENSOR, SplitMode.LAYER, 1.0), n_tokens=n, pause=one) for n, one in times.items()
    )
    assert replace(MEASURED, switches=switches).switch(SplitMode.TENSOR, SplitMode.LAYER, "file", 64_000) == (1.091, 0)


def test_more_tokens_than_any_context_holds_are_answered_at_once() -> None:
    """A sum over pieces and not over chunks: the largest number that is allowed takes no longer than a small one."""
    mode = constant(SplitMode.LAYER, 800.0, 15.0)
    assert mode.read_s(MAX_TOKENS) == pytest.approx(MAX_TOKENS / 800.0)
    assert mode.generate_s(MAX_TOKENS, MAX_TOKENS) == pytest.approx(MAX_TOKENS / 15.0)


# -- a whole profile ---------------------------------------------------------------------------------------------------


def test_a_profile_of_constant_rates_is_those_rates() -> None:
    """The rates of any work are those that were measured, with the switch as later ones of a session take it."""
    rates = MEASURED.rates(Work(5000, 700, 100))
    assert rates.layer.prompt_tps == pytest.approx(800.0)
    assert rates.layer.generate_tps == pytest.approx(15.0)
    assert rates.tensor.prompt_tps == pytest.approx(500.0)
    assert rates.tensor.generate_tps == pytest.approx(20.0)
    assert rates.tier_switch_s == pytest.approx({"file": 5.0, "pinned": 1.0})
    assert (rates.switch_s, rates.pinned_ms_per_token) == (5.0, 0.5)
    assert compare(rates, Work(58300, 1000)).best is Choice.LAYER_TO_TENSOR


def test_cached_tokens_cost_nothing_but_their_depth() -> None:
    """A prompt whose cached part is longer reads the rest where it stands: the same tokens, deeper."""
    reads = (Read(512, 0, exactly(1.0)), Read(512, 4096, exactly(2.0)))
    modes = tuple(replace(one, reads=reads) for one in MEASURED.modes)
    profile = replace(MEASURED, modes=modes)
    flat, deep = profile.rates(Work(512, 10)), profile.rates(Work(4096 + 512, 10, 4096))
    assert 512 / flat.layer.prompt_tps == pytest.approx(1.0)
    assert 512 / deep.layer.prompt_tps == pytest.approx(2.0)


def test_sequences_are_read_in_turn_and_generate_together() -> None:
    """Four prompts take four times one; a step of four takes what it was measured to."""
    modes = tuple(replace(one, steps=(*one.steps, Step(4, 0, exactly(0.1)))) for one in MEASURED.modes)
    rates = replace(MEASURED, modes=modes).rates(Work(1024, 100), n_seq=4)
    assert 1024 / rates.layer.prompt_tps == pytest.approx(4 * 1024 / 800.0)
    assert 100 / rates.layer.generate_tps == pytest.approx(100 * 0.1)


def test_the_spread_decides_what_is_too_close_to_call() -> None:
    """The same medians are told apart where they came back alike, and not where they did not."""
    work = Work(58300, 1000)
    steady = compare(MEASURED.rates(work), work)
    assert (steady.rates.noise, steady.is_close) == (NOISE, False)
    modes = (constant(SplitMode.LAYER, 800.0, 15.0, 0.3), constant(SplitMode.TENSOR, 500.0, 20.0))
    loose = compare(replace(MEASURED, modes=modes).rates(work), work)
    assert loose.rates.noise == pytest.approx(0.3)
    assert (loose.best, loose.is_close) == (steady.best, True)


def test_the_size_of_micro_batches_that_reads_fastest_speaks_for_a_mode() -> None:
    """Without a size the faster one is taken; a named one is taken as it is."""
    slow, fast = (
        constant(SplitMode.LAYER, 700.0, 15.0),
        replace(constant(SplitMode.LAYER, 900.0, 14.0), n_ubatch=1024),
    )
    profile = Profile((slow, fast))
    assert profile.of(SplitMode.LAYER) is fast
    assert profile.of(SplitMode.LAYER, 512) is slow


def test_each_choice_counts_the_switch_of_its_own_direction() -> None:
    """A switch back that takes 4 s is not taken for one there of 5 s, in the tier that is judged alone."""
    work = Work(500, 100)
    rates = MEASURED.rates(work)
    found = compare(rates, work)
    assert found.seconds[Choice.LAYER_TO_TENSOR] == pytest.approx(500 / 800 + 5 + 100 / 20)
    assert found.seconds[Choice.TENSOR_TO_LAYER] == pytest.approx(500 / 500 + 4 + 100 / 15)
    pinned = compare(rates.in_tier("pinned"), work)
    assert pinned.seconds[Choice.LAYER_TO_TENSOR] == pytest.approx(500 / 800 + 1 + 100 / 20 + 100 * 0.5e-3)
    given = compare(rates.in_tier("file", 2.0), work)
    assert given.seconds[Choice.TENSOR_TO_LAYER] == pytest.approx(500 / 500 + 2 + 100 / 15)


def test_a_switch_is_taken_from_its_size_way_and_direction() -> None:
    """Between two sizes of the state lies a line, the first of a session counts where no other was measured."""
    one, other = SplitMode.LAYER, SplitMode.TENSOR
    large = switch(one, other, 7.0, n_tokens=1512)
    profile = replace(MEASURED, switches=(*MEASURED.switches, large))
    assert profile.switch(one, other, "file", 1012) == pytest.approx((6.0, 0.0))
    assert profile.switch(one, other, "pinned", 1012) == pytest.approx((1.0, 0.5))
    assert profile.switch(other, one, "pinned") is None
    assert profile.ways(one, other) == ("file", "pinned")
    assert profile.switch(one, other, "file", is_first=True) == pytest.approx((9.0, 0.0))
    assert profile.switch(one, other, "pinned", is_first=True) == pytest.approx((1.0, 0.5))
    only_first = Profile(MEASURED.modes, (MEASURED.switches[1],))
    assert only_first.switch(one, other, "file") == pytest.approx((9.0, 0.0))


def test_what_was_not_measured_is_named_with_its_reason() -> None:
    """A mode that was left out says why; without a reason, and without any switch, the command that measures it."""
    alone = Profile((MEASURED.modes[0],), left_out=(LeftOut("tensor", "this build aborts on it"),))
    with pytest.raises(ModeNotMeasured, match="no numbers of tensor mode: this build aborts on it"):
        alone.rates(Work(1, 1))
    with pytest.raises(ModeNotMeasured, match="no numbers of row mode: measure it: splitctl bench"):
        alone.of(SplitMode.ROW)
    with pytest.raises(ModeNotMeasured, match="a switch to tensor"):
        Profile(MEASURED.modes).rates(Work(1, 1))


# -- what is no measurement --------------------------------------------------------------------------------------------


@given(st.floats(), st.floats(), st.floats(), st.integers(-1, 20_000))
def test_a_spread_is_three_times_in_order_or_refused(low: float, middle: float, high: float, n: int) -> None:
    """Not a number, an infinity, a negative time and a wrong order are refused, with what was found."""
    in_order = 0.0 <= low <= middle <= high <= 1e6 and 1 <= n <= 10_000
    if in_order:
        assert Spread(middle, low, high, n).share >= 0.0
    else:
        with pytest.raises(ConfigInvalid):
            Spread(middle, low, high, n)


def test_what_took_no_time_somewhere_still_takes_some() -> None:
    """Points of no length leave seconds above nothing, which others divide by."""
    none, some = exactly(0.0), exactly(1.0)
    mode = MeasuredMode(
        SplitMode.LAYER, 512, (Read(8, 0, some), Read(512, 0, none)), (Step(1, 0, some), Step(1, 64, none))
    )
    assert min(mode.read_s(2048), mode.read_s(512), mode.step_s(1, 1024), mode.generate_s(9, 2048)) > 0.0


def test_damaged_numbers_are_refused() -> None:
    """Tokens and sequences that cannot be, a way that nobody knows, and a mode without a rate."""
    good = exactly(1.0)
    layer, tensor = SplitMode.LAYER, SplitMode.TENSOR
    for damaged in (
        lambda: Read(0, 0, good),
        lambda: Read(1, -1, good),
        lambda: Step(0, 0, good),
        lambda: Step(1, -1, good),
        lambda: Read(10**400, 0, good),
        lambda: Step(1, 10**400, good),
        lambda: SwitchTime(layer, tensor, "by-hand", False, 1, good, good),
        lambda: SwitchTime(layer, tensor, "file", False, -1, good, good),
        lambda: SwitchTime(layer, tensor, "file", False, 1, good, good, more_ms=math.nan),
        lambda: SwitchTime(layer, tensor, "file", False, 10**400, good, good),
        lambda: MeasuredMode(layer, 512, (), (Step(1, 0, good),)),
        lambda: MeasuredMode(layer, 512, (Read(8, 0, good),) * 1_001, (Step(1, 0, good),)),
        lambda: MeasuredMode(layer, 512, (Read(8, 64, good),), (Step(1, 0, good),)),
        lambda: MeasuredMode(layer, 512, (Read(8, 0, exactly(0.0)),), (Step(1, 0, good),)),
        lambda: MeasuredMode(layer, 512, (Read(8, 0, good),), (Step(2, 0, good),)),
    ):
        with pytest.raises(ConfigInvalid):
            damaged()


def test_repetitions_are_summed_up_by_their_middle_and_ends() -> None:
    """An outlier moves the ends and not the middle."""
    spread = Spread.of([1.0, 9.0, 1.2])
    assert (spread.median, spread.low, spread.high, spread.n) == (1.2, 1.0, 9.0, 3)
    assert spread.share == pytest.approx(8.0 / 2 / 1.2)
    assert Spread.of([0.0]).share == 0.0


def _crowded(n_tokens: int, alone: float, crowded: float, n_others: int = 1000) -> Crowd:
    return Crowd(n_tokens, n_others, exactly(alone), exactly(crowded))


def test_tokens_of_others_cost_what_was_measured_of_a_pair() -> None:
    """What a decode takes more beside others is shared by its tokens and theirs, of reads and steps by themselves."""
    mode = replace(
        constant(SplitMode.LAYER, 800.0, 15.0),
        steps=(Step(1, 0, exactly(0.01)), Step(1, 1000, exactly(0.02))),
        crowds=(_crowded(1, 0.010, 0.012), _crowded(100, 0.2, 0.3)),
    )
    assert mode.pair_s(is_read=False) == pytest.approx(2e-6)
    assert mode.pair_s(is_read=True) == pytest.approx(1e-6)
    # Of two prompts of 100 tokens after 50 each the first is read beside 50, the second beside 150.
    assert mode.others_read_s(100, 50, 2) == pytest.approx((50 + 150) * 100 * 1e-6)
    assert mode.others_generate_s(10, 100, 3) == pytest.approx(10 * 3 * 2 * 105 * 2e-6)
    assert mode.others_read_s(100, 50, 1) == mode.others_generate_s(10, 100, 1) == 0.0


def test_steps_that_compute_all_of_the_cache_count_it_once() -> None:
    """Where a token of another sequence takes as long as one of the own, steps together have it already."""
    steps = (Step(1, 0, exactly(0.01)), Step(1, 1000, exactly(0.02)))
    mode = replace(constant(SplitMode.LAYER, 800.0, 15.0), steps=steps, crowds=(_crowded(1, 0.01, 0.02),))
    assert mode.pair_s(is_read=False) == 0.0


def test_what_was_not_measured_adds_nothing() -> None:
    """Without crowds and served steps, with noise that makes others cheap, and with a cache each, nothing is added."""
    mode = constant(SplitMode.LAYER, 800.0, 15.0)
    assert mode.pair_s(is_read=True) == MEASURED.served_s(SplitMode.LAYER, 8) == 0.0
    assert replace(mode, crowds=(_crowded(100, 0.3, 0.2),)).pair_s(is_read=True) == 0.0
    noisy = Crowd(100, 1000, Spread(0.2, 0.1, 0.25, 3), Spread(0.24, 0.21, 0.3, 3))
    assert replace(mode, crowds=(noisy,)).pair_s(is_read=True) == 0.0
    crowded = replace(mode, crowds=(_crowded(100, 0.2, 0.3),))
    assert Profile((crowded,)).unshared() == Profile((mode,))
    work = Work(prompt=1000, generate=100)
    both = Profile((crowded, MEASURED.modes[1]), MEASURED.switches)
    assert both.rates(work, n_seq=1) == MEASURED.rates(work, n_seq=1)
    assert both.rates(work, n_seq=4).layer.prompt_tps < MEASURED.rates(work, n_seq=4).layer.prompt_tps


def test_what_a_host_adds_lies_on_a_line_between_numbers_of_streams() -> None:
    """Between one stream and the most a straight line is taken; a mode without numbers of its own has the other's."""
    served = (Served(SplitMode.LAYER, 1, exactly(0.001)), Served(SplitMode.LAYER, 5, exactly(0.005)))
    profile = replace(MEASURED, served=served)
    work, tensor = Work(prompt=1000, generate=100), MEASURED.modes[1]
    assert profile.work_s(tensor, work, 1) == MEASURED.work_s(tensor, work, 1)
    more_s = profile.work_s(tensor, work, 5)[1] - MEASURED.work_s(tensor, work, 5)[1]
    assert more_s == pytest.approx(100 * 0.005)
    assert profile.served_s(SplitMode.LAYER, 3) == pytest.approx(0.003)
    assert profile.served_s(SplitMode.TENSOR, 5) == pytest.approx(0.005)
