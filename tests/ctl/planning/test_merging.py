"""Profiles put together: what is new stands, and what only the earlier one had stays."""

from __future__ import annotations

from dataclasses import replace

from splitctl.placement import SplitMode
from splitctl.planning.merging import merged
from splitctl.planning.profile import Crowd, LeftOut, MeasuredMode, Profile, Served, Step
from tests.ctl.planning.profiles import MEASURED, constant, exactly, switch

_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR
_NEW = constant(_LAYER, 900.0, 16.0)


def _stays(mine: tuple[MeasuredMode, ...], theirs: tuple[MeasuredMode, ...]) -> tuple[str, ...]:
    found, stays = merged(Profile(mine), Profile(theirs))
    # Whichever is taken, nothing that was measured is gone.
    assert {(one.mode, one.n_ubatch) for one in (*mine, *theirs)} == {(one.mode, one.n_ubatch) for one in found.modes}
    assert all(one in found.modes for one in theirs) == bool(stays)
    return stays


def test_less_of_a_mode_does_not_replace_more_of_it() -> None:
    """A mode that is less deep, with fewer sequences, in one repetition or with one -ub leaves the earlier one."""
    layer, tensor = MEASURED.modes
    once = tuple(replace(one, seconds=replace(one.seconds, n=1)) for one in tensor.reads)
    four = (*tensor.steps, Step(4, 0, exactly(0.1)))
    shallow = replace(tensor, reads=tensor.reads[:3], steps=tensor.steps[:1])
    assert _stays((shallow,), (tensor,)) == ("tensor mode up to 4,608 tokens",)
    assert _stays((tensor,), (replace(tensor, steps=four),)) == ("tensor mode with 4 sequences",)
    assert _stays((replace(tensor, reads=once),), (tensor,)) == ("tensor mode in 3 repetitions",)
    assert _stays((tensor,), (layer,)) == ("layer mode",)
    assert _stays((_NEW,), (replace(layer, n_ubatch=1024),)) == ("layer mode with -ub 1024",)
    assert _stays((replace(tensor, steps=four),), (shallow,)) == ()


def test_a_bench_of_a_part_renews_that_part() -> None:
    """A bench of layer mode, with a way that there was not, stands beside the earlier tensor mode and its switches."""
    beside = switch(_LAYER, _TENSOR, 0.1, way="beside")
    found, stays = merged(Profile((_NEW,), (beside,)), MEASURED)
    assert (found.of(_LAYER), found.of(_TENSOR)) == (_NEW, MEASURED.modes[1])
    assert set(found.switches) == {*MEASURED.switches, beside}
    assert stays == ("tensor mode", "layer -> tensor file", "layer -> tensor pinned", "tensor -> layer file")
    assert merged(MEASURED, MEASURED) == (MEASURED, ())


def test_a_way_with_less_of_it_leaves_the_earlier_one() -> None:
    """First switches alone, or smaller states, do not replace later ones and larger states; as many do."""
    large = switch(_LAYER, _TENSOR, 5.0, n_tokens=4096)
    old = Profile((_NEW,), (switch(_LAYER, _TENSOR, 4.0), large))
    for less in (switch(_LAYER, _TENSOR, 1.0), switch(_LAYER, _TENSOR, 1.0, n_tokens=4096, is_first=True)):
        assert merged(Profile((_NEW,), (less,)), old) == (old, ("layer -> tensor file",))
    as_much = Profile((_NEW,), (switch(_LAYER, _TENSOR, 1.0, n_tokens=4000),))
    assert merged(as_much, old) == (as_much, ())


def test_what_only_several_sequences_show_stays() -> None:
    """A bench of one sequence keeps what others cost, and what a host adds to steps of many; more replaces it."""
    crowd = Crowd(128, 1000, exactly(0.1), exactly(0.2))
    eight, one = (tuple(Served(_LAYER, n, exactly(n / 1e3)) for n in some) for some in ((1, 8), (1,)))
    old = Profile((replace(_NEW, crowds=(crowd,)),), served=eight)
    found, stays = merged(Profile((_NEW,), served=one), old)
    assert found.modes[0].crowds == (crowd,)
    # One that is not as deep brings what an older profile could not have.
    shallow = replace(_NEW, reads=_NEW.reads[:3], steps=_NEW.steps[:1], crowds=(crowd,))
    assert merged(Profile((shallow,)), Profile((_NEW,)))[0] == Profile((replace(_NEW, crowds=(crowd,)),))
    assert found.served == eight
    assert stays == ("what a host adds to steps of 8 streams in layer mode",)
    assert merged(Profile((_NEW,), served=eight), Profile((_NEW,), served=one))[0].served == eight


def test_nothing_is_called_missing_that_one_of_both_has() -> None:
    """A way that only the earlier profile has is not left out; what neither has is, once, for the newer reason."""
    new = Profile((_NEW,), left_out=(LeftOut("file", "no time"), LeftOut("row", "new"), LeftOut("tensor", "died")))
    found, _ = merged(new, replace(MEASURED, left_out=(LeftOut("row", "old"),)))
    assert found.left_out == (LeftOut("row", "new"),)
