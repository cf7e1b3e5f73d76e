"""Idle sequences go to another session before the others: it comes to the very bytes of a state in one piece."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llama_native import state_get, state_size
from splitctl import Proof, Session, SplitMode
from splitctl.carry import seal as seals
from splitctl.carry.arena import Arena
from splitctl.errors import CarryDamaged, StateUnsound
from splitctl.outcome import SwitchOptions
from splitctl.session import ahead
from splitctl.session.handing import Handed, Handing
from splitctl.switching.checking import Checked
from tests.real.conftest import RPC, SEEDED, SMALL_PROMPT, base
from tests.real.test_handing import Dummy, Pair, _ids, _is_what_a_switch_in_place_gives, dummy, pair  # noqa: F401
from tests.real.test_memories import OTHER_SHARES

pytestmark = pytest.mark.skipif(bool(RPC), reason="a second session would get no answer from a server")

STREAMS = base(flash="on", n_seq_max=4, n_ctx=512)


class Two(NamedTuple):
    """The session that hands over, with what hands it over, and the other one."""

    first: Session
    out: Handing
    checked: Checked
    second: Session
    taking: Handing

    def copy(self, busy: frozenset[int] = frozenset({1})) -> tuple[int, tuple[seals.Segment, ...]]:
        """Copy all that is not busy; gives where it lies."""
        self.out.begin_ahead(self.checked)
        while self.out.copy_next(busy):
            pass
        return self.out.copied()

    def hand_over(self) -> Handed:
        """Seal what the first holds."""
        return self.out.hand_over(self.checked, lambda _stage: None)


def _two(pair: Pair, model: Path, change: dict[str, Any], placement: Any = STREAMS, n_filled: int = 4) -> Two:  # noqa: F811
    first = pair.open(model, placement)
    for seq_id in range(min(n_filled, placement.n_seq_max)):
        first.prefill(SMALL_PROMPT[seq_id:], seq_id)
        _ids(first, 2, seq_id, SEEDED)
    checked = first.check(first.placement.changed(**change), SwitchOptions())
    assert not checked.reasons
    second = pair.open(model, checked.target)
    two = Two(first, first.handing, checked, second, second.handing)
    two.taking.warm_up()
    return two


def _state(session: Session) -> bytes:
    context = session._live.engine.live_context
    buffer = bytearray(state_size(context))
    return bytes(buffer[: state_get(context, buffer)])


def _flip(pair: Pair, arena: int, at: int) -> None:  # noqa: F811
    (byte,) = os.pread(pair.fds[arena], 1, at)
    os.pwrite(pair.fds[arena], bytes([byte ^ 1]), at)


@pytest.mark.parametrize("start", [SplitMode.LAYER, SplitMode.TENSOR])
def test_sequences_that_are_used_removed_or_copied_meanwhile_come_as_they_are_then(
    pair: Pair,  # noqa: F811
    small_model: Path,
    other_mode: SplitMode,
    start: SplitMode,
) -> None:
    """Bytes, logits, samplers and tokens are those of the state in one piece; so are the bytes from the seal alone."""
    modes = (SplitMode.LAYER, other_mode) if start is SplitMode.LAYER else (other_mode, SplitMode.LAYER)
    placement = STREAMS.changed(mode=modes[0], n_seq_max=5)
    two = _two(pair, small_model, {"mode": modes[1]}, placement)
    arena, segments = two.copy()
    assert [one.seq_id for one in segments] == [0, 2, 3]
    assert two.taking.take_ahead(arena, segments)
    _ids(two.first, 3, 1, SEEDED)  # it generates all the while
    _ids(two.first, 1, 2, SEEDED)  # used
    two.first.remove_sequence(0)  # removed
    two.first.copy_sequence(3, 4)  # a copy of one that stays
    _ids(two.first, 1, 4, SEEDED)
    handed = two.hand_over()
    seal = pair.seals[-1]
    assert [one.seq_id for one in seal.segments] == [1, 2, 3, 4]
    assert handed.ahead == (next(one.n_bytes for one in segments if one.seq_id == 3), "")
    assert two.taking.take_over(seal, proof=Proof.BYTES, is_trial=True).conversions == ()
    whole = _state(two.first)
    assert _state(two.second) == whole
    assert bytes(seals.take(Arena(pair.fds[seal.arena]), seal).state) == whole
    third = pair.open(small_model, two.checked.target)
    third.handing.take_over(seal)
    assert _state(third) == whole
    _is_what_a_switch_in_place_gives(two.first, two.second, {"mode": modes[1]})


@pytest.mark.parametrize(
    ("recipe", "change", "why"),
    [
        ("llama", {"kv_unified": True}, "share one cache"),
        ("mamba", {}, "recurrent or has a window"),
        ("gemma3+gqa", {}, "recurrent or has a window"),
        ("llama", {"n_seq_max": 1}, ""),
    ],
)
def test_where_the_bytes_would_not_be_the_same_nothing_goes_ahead(
    pair: Pair,  # noqa: F811
    dummy: Dummy,  # noqa: F811
    recipe: str,
    change: dict[str, Any],
    why: str,
) -> None:
    """The state goes in one piece, as ever, and the reason is told."""
    two = _two(pair, dummy(recipe), OTHER_SHARES, base(flash="on", n_seq_max=2).changed(**change))
    assert two.copy(frozenset({0})) == (0, ())
    handed = two.hand_over()
    assert handed.ahead[0] == 0
    assert why in handed.ahead[1]
    assert bool(handed.ahead[1]) is bool(why)
    assert not pair.seals[-1].segments
    two.taking.take_over(pair.seals[-1], proof=Proof.BYTES, is_trial=True)
    assert _state(two.second) == _state(two.first)


def test_sequences_that_are_not_all_of_the_state_are_found_out(
    pair: Pair,  # noqa: F811
    dummy: Dummy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A memory of which nobody knew that it has a window: what has left it is missed, and all goes in one piece."""
    monkeypatch.setattr(ahead, "why_not", lambda _live, _target: "")
    two = _two(pair, dummy("gemma3+gqa"), OTHER_SHARES, base(flash="on", n_seq_max=2))
    two.first.prefill([3 + n % 90 for n in range(50)], 1)
    assert two.taking.take_ahead(*two.copy(frozenset({0})))
    handed = two.hand_over()
    assert (handed.ahead[0], "that of all to" in handed.ahead[1]) == (0, True)
    two.taking.take_over(pair.seals[-1], proof=Proof.BYTES, is_trial=True)
    assert _state(two.second) == _state(two.first)


def test_a_state_that_is_converted_goes_in_one_piece(pair: Pair, small_model: Path) -> None:  # noqa: F811
    """Its sequences are not rewritten one by one."""
    two = _two(pair, small_model, {"type_k": "f32"})
    assert two.copy() == (0, ())
    assert "converted" in two.hand_over().ahead[1]
    assert two.taking.take_over(pair.seals[-1], proof=Proof.BYTES, is_trial=True).conversions


def test_copies_whose_memory_was_taken_count_no_more(pair: Pair, small_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """A save meanwhile, or changes of all of them: the state goes in one piece, into the memory that had taken some."""
    two = _two(pair, small_model, OTHER_SHARES)
    arena, segments = two.copy()
    assert two.taking.take_ahead(arena, segments)
    two.first.save(tmp_path / "saved")
    assert two.out.copied() == (0, ())
    assert "was taken" in two.hand_over().ahead[1]
    assert not pair.seals[-1].segments
    two.taking.take_over(pair.seals[-1], proof=Proof.BYTES, is_trial=True)
    assert _state(two.second) == _state(two.first)


def test_a_sequence_that_does_not_come_through_leaves_the_memory_empty(pair: Pair, small_model: Path) -> None:  # noqa: F811
    """What was copied is not what is there: none is held, and the state comes in one piece."""
    two = _two(pair, small_model, OTHER_SHARES)
    arena, segments = two.copy()
    _flip(pair, arena, segments[1].offset + segments[1].n_bytes - 1)
    assert not two.taking.take_ahead(arena, segments)
    two.out.end_ahead("why")
    assert two.hand_over().ahead == (0, "why")
    two.taking.take_over(pair.seals[-1], proof=Proof.BYTES, is_trial=True)
    assert _state(two.second) == _state(two.first)


def test_what_is_damaged_at_the_token_boundary_is_not_taken(pair: Pair, small_model: Path) -> None:  # noqa: F811
    """It is seen by its checksum, or when it is read back."""
    two = _two(pair, small_model, OTHER_SHARES)
    assert two.taking.take_ahead(*two.copy())
    two.hand_over()
    seal = pair.seals[-1]
    late = next(one for one in seal.segments if one.seq_id == 1)
    _flip(pair, seal.arena, late.offset + late.n_bytes // 2)
    with pytest.raises(CarryDamaged, match="sequence 1"):
        two.taking.take_over(seal, is_trial=True)
    with pytest.raises(StateUnsound, match="sequence 1 does not read back"):
        two.taking.take_over(seal, proof=Proof.BYTES, is_trial=True)
    with pytest.raises(CarryDamaged, match="sequence 1"):
        seals.take(Arena(pair.fds[seal.arena]), seal)


def test_a_session_without_an_idle_sequence_goes_in_one_piece(pair: Pair, small_model: Path) -> None:  # noqa: F811
    """Also where every copy has been used since."""
    two = _two(pair, small_model, OTHER_SHARES, n_filled=2)
    assert [one.seq_id for one in two.copy()[1]] == [0]
    _ids(two.first, 1, 0, SEEDED)
    assert two.hand_over().ahead == (0, "")
    assert not pair.seals[-1].segments
