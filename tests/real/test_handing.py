"""A session is handed to another one through shared memory: what comes next is what it is after a switch in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import Library
from splitctl import FlashAttn, Placement, Proof, Refused, SamplerSpec, Session, SplitMode, SwitchStatus
from splitctl.carry.arena import Arena, Arenas
from splitctl.carry.seal import Seal
from splitctl.errors import CannotConvert, CarryDamaged, StateUnsound
from splitctl.ipc.probes import Prober
from splitctl.outcome import Route, SwitchOptions
from tests.real.conftest import RPC, SEEDED, SMALL_PROMPT, base
from tests.real.test_adapters import lora  # noqa: F401 - a fixture
from tests.real.test_memories import MEMORIES, OTHER_SHARES, SHORT, TOKENS
from tools.make_dummies import make_many
from tools.places import default_folder

pytestmark = pytest.mark.skipif(bool(RPC), reason="a second session would get no answer from a server")

GREEDY = SamplerSpec(temp=0.0)


class Pair:
    """The memory that two sessions share, and the one that hands over."""

    def __init__(self, stack: ExitStack, library: Library, prober: Prober) -> None:
        self._stack = stack
        self._library = library
        self._prober = prober
        self.fds = [os.memfd_create(f"arena-{n}") for n in range(2)]
        self.seals: list[Seal] = []
        for fd in self.fds:
            stack.callback(os.close, fd)

    def open(self, model: Path, placement: Placement, **more: Any) -> Session:
        """Open a session whose carries lie in the shared memory."""
        arenas = Arenas(*map(Arena, self.fds))
        session = Session.open(model, placement, library=self._library, prober=self._prober, arenas=arenas, **more)
        session.handing.notify_seals(self.seals.append, lambda _arena: None)
        return self._stack.enter_context(session)

    def hand(self, first: Session, model: Path, change: dict[str, Any], **more: Any) -> tuple[Session, tuple[str, ...]]:
        """Let a session be taken over in another placement; gives the one that has it, and what was converted."""
        target = first.placement.changed(**change)
        checked = first.check(target, SwitchOptions())
        assert not checked.reasons
        assert first.handing.why_not_beside(checked) == ""
        second = self.open(model, checked.target, **more)
        second.handing.warm_up()
        handed = first.handing.hand_over(checked, lambda _stage: None)
        assert handed.n_sequences == len(first.sequences())
        taken = second.handing.take_over(self.seals[-1], proof=Proof.BYTES, is_trial=True)
        assert set(taken.stages_ms) == {"restoring", "proving"}
        return second, taken.conversions


@pytest.fixture
def pair(library: Library, prober: Prober) -> Iterator[Pair]:
    """Two sessions are closed at the end of the test, and their memory is given back."""
    with ExitStack() as stack:
        yield Pair(stack, library, prober)


Dummy = Callable[[str], Path]


@pytest.fixture
def dummy() -> Dummy:
    """Gives a small model of a recipe."""

    def made(recipe: str) -> Path:
        ((_name, path, why),) = make_many(default_folder(), [recipe])
        assert isinstance(path, Path), why
        return path

    return made


def _ids(session: Session, n: int, seq_id: int = 0, sampler: SamplerSpec | None = None) -> list[int]:
    return [token.id for token in session.generate(seq_id, n=n, sampler=sampler)]


def _is_what_a_switch_in_place_gives(first: Session, second: Session, change: dict[str, Any]) -> None:
    """Switch the one that has handed over, and serves on, in place, and let both go on."""
    assert [one.tokens.tolist() for one in first.sequences()] == [one.tokens.tolist() for one in second.sequences()]
    outcome = first.switch(first.placement.changed(**change))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert first.placement == second.placement
    for one in first.sequences():
        held = second.logits(one.seq_id)
        assert np.array_equal(first.logits(one.seq_id), held)
        assert (one.sampler, one.n_draws) == next(
            (other.sampler, other.n_draws) for other in second.sequences() if other.seq_id == one.seq_id
        )
        assert _ids(first, 4, one.seq_id) == _ids(second, 4, one.seq_id)
        assert np.array_equal(first.logits(one.seq_id), second.logits(one.seq_id))


@pytest.mark.every_build
@pytest.mark.parametrize("start", [SplitMode.LAYER, SplitMode.TENSOR])
@pytest.mark.parametrize("seq", [{"n_seq_max": 1}, {"n_seq_max": 3, "kv_unified": True}])
def test_both_ways_between_the_modes(
    pair: Pair, small_model: Path, other_mode: SplitMode, start: SplitMode, seq: dict[str, Any]
) -> None:
    """Tokens, logits, samplers and draws of every sequence are those of a switch in place; the first serves on."""
    modes = (SplitMode.LAYER, other_mode) if start is SplitMode.LAYER else (other_mode, SplitMode.LAYER)
    first = pair.open(small_model, base(mode=modes[0], flash="on", **seq))
    for seq_id in range(seq["n_seq_max"]):
        first.prefill(SMALL_PROMPT[seq_id:], seq_id)
        _ids(first, 3, seq_id, SEEDED)
    second, conversions = pair.hand(first, small_model, {"mode": modes[1]})
    assert conversions == ()
    _is_what_a_switch_in_place_gives(first, second, {"mode": modes[1]})


@MEMORIES
def test_every_memory_is_handed_over(pair: Pair, dummy: Dummy, recipe: str) -> None:
    """Recurrent, hybrid, sliding window, behind an encoder: the second session goes on as the first would have."""
    model = dummy(recipe)
    first = pair.open(model, base(flash="on"))
    first.prefill(SHORT if recipe == "t5" else TOKENS)
    _ids(first, 4, sampler=GREEDY)
    second, _ = pair.hand(first, model, OTHER_SHARES)
    _is_what_a_switch_in_place_gives(first, second, OTHER_SHARES)


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ({}, {"n_ctx": 512}),
        ({}, {"flash_attn": FlashAttn.OFF}),
        ({}, {"type_k": "f32", "type_v": "bf16"}),
        ({}, {"type_k": "q8_0", "type_v": "q8_0"}),
        ({"n_seq_max": 2}, {"kv_unified": True}),
        ({"n_seq_max": 2, "kv_unified": True}, {"kv_unified": False, "n_ctx": 512}),
    ],
    ids=lambda named: "+".join(named) or "plain",
)
def test_another_layout_is_converted_as_in_place(
    pair: Pair, small_model: Path, start: dict[str, Any], change: dict[str, Any]
) -> None:
    """What another layout needs is done by the one that takes over, and proved like any other."""
    first = pair.open(small_model, base(flash="on", **start))
    for seq_id in range(first.placement.n_seq_max):
        first.prefill(SMALL_PROMPT[seq_id:], seq_id)
        _ids(first, 2, seq_id, GREEDY)
    try:
        second, conversions = pair.hand(first, small_model, change)
    except CannotConvert as error:
        if "no stated rotation" not in str(error):
            raise
        pytest.skip("this build's states do not say how quantized rows are rotated, and the first one serves on")
    assert bool(conversions) is (set(change) != {"n_ctx"})
    _is_what_a_switch_in_place_gives(first, second, change)


def test_adapters_are_there_in_the_second_session(pair: Pair, smollm2: Path, lora: Path) -> None:  # noqa: F811
    """They are loaded from their files by both, and one without them is no session to take over."""
    first = pair.open(smollm2, base(flash="on"), adapters=[(lora, 0.5)])
    first.prefill(SMALL_PROMPT)
    _ids(first, 2, sampler=GREEDY)
    second, _ = pair.hand(first, smollm2, OTHER_SHARES, adapters=[(lora, 0.5)])
    _is_what_a_switch_in_place_gives(first, second, OTHER_SHARES)
    without = pair.open(smollm2, base(flash="on"))
    with pytest.raises(Exception, match="adapter"):
        without.handing.take_over(pair.seals[-1])


def test_an_empty_session_is_handed_over(pair: Pair, small_model: Path) -> None:
    """Nothing is held, and nothing is in the way."""
    first = pair.open(small_model, base())
    second, _ = pair.hand(first, small_model, OTHER_SHARES)
    assert second.sequences() == ()
    second.prefill(SMALL_PROMPT)
    assert len(_ids(second, 2)) == 2


def test_one_that_is_on_trial_hands_over_and_can_still_go_back(pair: Pair, small_model: Path) -> None:
    """The original of its own trial becomes what it has sealed: the other arena is free for the second session."""
    first = pair.open(small_model, base(flash="on"))
    first.prefill(SMALL_PROMPT)
    tokens = _ids(first, 2, sampler=GREEDY)
    assert first.switch(first.placement.changed(tensor_split=(0.4, 0.6))).status is SwitchStatus.SWITCHED
    second, _ = pair.hand(first, small_model, OTHER_SHARES)
    assert first.tokens() == second.tokens() == [*SMALL_PROMPT, *tokens]
    _is_what_a_switch_in_place_gives(first, second, OTHER_SHARES)


def test_what_was_sealed_and_is_damaged_is_not_taken(pair: Pair, small_model: Path) -> None:
    """A byte that changed on the way is seen before the library gets it, or when the state is read back."""
    first = pair.open(small_model, base())
    first.prefill(SMALL_PROMPT)
    checked = first.check(first.placement.changed(**OTHER_SHARES))
    second = pair.open(small_model, checked.target)
    first.handing.hand_over(checked, lambda _stage: None)
    seal = pair.seals[-1]
    at = seal.state_bytes // 2
    (byte,) = os.pread(pair.fds[seal.arena], 1, at)
    os.pwrite(pair.fds[seal.arena], bytes([byte ^ 1]), at)
    with pytest.raises(CarryDamaged, match="checksum of its state"):
        second.handing.take_over(seal)
    assert second.sequences() == ()
    with pytest.raises(StateUnsound, match="does not read back"):
        second.handing.take_over(seal, proof=Proof.BYTES)


def test_beside_a_server_there_is_no_second_worker(
    pair: Pair, small_model: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves one client at a time; no force changes that."""
    first = pair.open(small_model, base())
    checked = first.check(first.placement.changed(**OTHER_SHARES), SwitchOptions(force=True, via=Route.BESIDE))
    assert first.handing.why_not_beside(checked) == ""
    monkeypatch.setattr(library, "rpc_servers", ("127.0.0.1:50052",))
    assert "an RPC server serves one client at a time" in first.handing.why_not_beside(checked)


def test_what_the_session_does_not_allow_by_now_is_refused(pair: Pair, small_model: Path) -> None:
    """More tokens than the target has room for came after the check: nothing is sealed, and the session goes on."""
    first = pair.open(small_model, base(n_ctx=512))
    first.prefill(SMALL_PROMPT)
    checked = first.check(first.placement.changed(n_ctx=256))
    assert not checked.reasons
    for _ in range(20):
        first.prefill(SMALL_PROMPT)
    with pytest.raises(Refused):
        first.handing.hand_over(checked, lambda _stage: None)
    assert not pair.seals
    assert len(_ids(first, 1, sampler=GREEDY)) == 1
