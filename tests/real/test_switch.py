"""A running session moves to another placement on a real build, and nothing of it is lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from llama_native import ForkedProcess, Library
from splitctl import (
    Busy,
    Placement,
    Proof,
    Refused,
    SamplerSpec,
    Session,
    SplitMode,
    Stage,
    SwitchOutcome,
    SwitchStatus,
)
from splitctl.carry import file as carries
from splitctl.ipc.probes import Prober
from splitctl.outcome import Route
from tests.real.conftest import PROMPT, SEEDED, SMALL_PROMPT, Opener, base

GREEDY = SamplerSpec(temp=0.0)
STREAMS_LOST = {"xllamacpp 2026.6.9713", "xllamacpp 2026.8.10566"}
"""Builds that restore the last stream alone."""


def _ids(session: Session, n: int, seq_id: int = 0, sampler: SamplerSpec | None = None) -> list[int]:
    return [token.id for token in session.generate(seq_id, n=n, sampler=sampler)]


def _fresh(session: Session, path: Path, placement: Placement, open_session: Opener) -> Session:
    """Open a session in a placement and give it what another one holds."""
    session.save(path)
    fresh = open_session(placement)
    fresh.restore(path)
    return fresh


def _refuses_streams(session: Session, outcome: SwitchOutcome) -> None:
    """Nothing is freed, the reason names the build, and every sequence goes on."""
    assert outcome.status is SwitchStatus.REFUSED
    assert [one.code for one in outcome.reasons] == ["streams-lost-on-restore"]
    assert outcome.stages_ms.freeing is None
    assert session.stage is Stage.SERVING
    for seq_id in range(session.placement.n_seq_max):
        assert len(_ids(session, 2, seq_id, GREEDY)) == 2


@pytest.mark.every_build
@pytest.mark.parametrize("seq", [{"n_seq_max": 1}, {"n_seq_max": 3, "kv_unified": True}, {"n_seq_max": 3}])
def test_the_continuation_equals_a_fresh_session_given_the_same_state(
    library: Library, open_session: Opener, other_mode: SplitMode, tmp_path: Path, seq: dict[str, int]
) -> None:
    """After a switch, tokens and logits are those of a fresh context in the target mode with the same state."""
    session = open_session(base(**seq))
    ids = range(seq["n_seq_max"])
    for seq_id in ids:
        session.prefill(session.tokenize(PROMPT + " again" * seq_id), seq_id)
        _ids(session, 3, seq_id, SEEDED)
    held = {seq_id: session.logits(seq_id) for seq_id in ids}
    session.save(tmp_path / "before")

    outcome = session.switch(session.placement.changed(mode=other_mode))

    if library.version in STREAMS_LOST and seq == {"n_seq_max": 3}:
        _refuses_streams(session, outcome)
        return
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert not outcome.confirmed
    assert outcome.effective is other_mode
    assert outcome.n_sequences == seq["n_seq_max"]
    for seq_id in ids:
        assert np.array_equal(session.logits(seq_id), held[seq_id])
    fresh = open_session(session.placement)
    fresh.restore(tmp_path / "before")
    for seq_id in ids:
        assert _ids(session, 4, seq_id) == _ids(fresh, 4, seq_id)
        assert np.array_equal(session.logits(seq_id), fresh.logits(seq_id))
    assert session.last_switch is not None
    assert session.last_switch.confirmed


@pytest.mark.every_build
def test_a_round_trip_leaves_every_byte_as_it_was(open_session: Opener, other_mode: SplitMode, tmp_path: Path) -> None:
    """There and back again without a decode between: the saved state is the same file but for its placement."""
    session = open_session()
    session.prefill(session.tokenize(PROMPT))
    _ids(session, 3, sampler=SEEDED)
    session.save(tmp_path / "before")
    assert session.switch(session.placement.changed(mode=other_mode)).status is SwitchStatus.SWITCHED
    assert session.stage is Stage.TRIAL
    back = session.switch(session.placement.changed(mode=SplitMode.LAYER))
    assert back.status is SwitchStatus.SWITCHED
    session.save(tmp_path / "after")
    before, after = carries.read(tmp_path / "before"), carries.read(tmp_path / "after")
    assert bytes(before.carry.state) == bytes(after.carry.state)
    one, two = before.carry.sequences[0], after.carry.sequences[0]
    assert one.tokens.tolist() == two.tokens.tolist()
    assert np.array_equal(one.logits, two.logits)
    assert (one.sampler, one.n_draws) == (two.sampler, two.n_draws)


@pytest.mark.every_build
def test_seeded_sampling_goes_on_as_if_nothing_had_happened(open_session: Opener, straight: tuple[int, ...]) -> None:
    """10 seeded tokens, a switch, 10 more are the 20 of a session that never switched (layer to layer: same floats)."""
    session = open_session()
    session.prefill(session.tokenize(PROMPT))
    first = _ids(session, 10, sampler=SEEDED)
    outcome = session.switch(session.placement.changed(tensor_split=(0.2, 0.8)))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert (*first, *_ids(session, 10)) == straight[:20]


@pytest.mark.every_build
def test_a_saved_session_goes_on_with_its_sampler_in_another_one(
    open_session: Opener, straight: tuple[int, ...], tmp_path: Path
) -> None:
    """Sampler, penalties and draws are rebuilt and replayed from the file."""
    session = open_session()
    session.prefill(session.tokenize(PROMPT))
    first = _ids(session, 8, sampler=SEEDED)
    fresh = _fresh(session, tmp_path / "carry", session.placement, open_session)
    assert fresh.tokens() == session.tokens()
    assert (*first, *_ids(fresh, 8)) == straight[:16]


@pytest.mark.parametrize("proof", list(Proof))
def test_every_proof_ends_switched(open_small: Opener, proof: Proof) -> None:
    """Bytes, positions and off all pass on a library that is sound."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    outcome = session.switch(session.placement.changed(tensor_split=(3.0, 1.0)), proof=proof)
    assert outcome.status is SwitchStatus.SWITCHED
    assert len(_ids(session, 2, sampler=GREEDY)) == 2


def test_a_session_grows_its_context_while_it_runs(open_small: Opener, tmp_path: Path) -> None:
    """A target that only has a larger context is a switch too."""
    session = open_small(base(n_ctx=256))
    session.prefill(SMALL_PROMPT)
    outcome = session.switch(session.placement.changed(n_ctx=512))
    assert outcome.status is SwitchStatus.SWITCHED
    assert session.placement.n_ctx == 512
    session.prefill([5] * 260)
    assert len(session.tokens()) > 260


def test_a_context_too_small_is_refused_with_both_numbers(open_small: Opener) -> None:
    """Nothing is touched, and the numbers say what would fit."""
    session = open_small(base(n_ctx=512))
    session.prefill([5] * 270)
    outcome = session.switch(session.placement.changed(n_ctx=256))
    assert outcome.status is SwitchStatus.REFUSED
    assert "270" in outcome.reason
    assert "256" in outcome.reason
    assert session.placement.n_ctx == 512
    assert len(_ids(session, 2, sampler=GREEDY)) == 2


def test_the_same_placement_is_unchanged(open_small: Opener) -> None:
    """Nothing is freed for nothing."""
    session = open_small()
    outcome = session.switch(session.placement)
    assert outcome.status is SwitchStatus.UNCHANGED
    assert outcome.stages_ms.freeing is None


def test_an_empty_session_switches(open_session: Opener, other_mode: SplitMode) -> None:
    """A session that has read nothing yet has nothing to lose, and moves."""
    session = open_session()
    assert session.switch(session.placement.changed(mode=other_mode)).status is SwitchStatus.SWITCHED
    session.prefill(session.tokenize(PROMPT))
    assert len(_ids(session, 2, sampler=GREEDY)) == 2


def test_a_cancel_while_placing_ends_in_the_old_placement(
    open_session: Opener, straight: tuple[int, ...], other_mode: SplitMode
) -> None:
    """A cancel is not a failure: the session serves in the old mode with the tokens it would have had."""
    flag = threading.Event()
    session = open_session(cancel=flag)
    session.prefill(session.tokenize(PROMPT))
    first = _ids(session, 6, sampler=SEEDED)

    def cancel_while_placing(stage: Stage, _share: float) -> None:
        if stage is Stage.PLACING:
            flag.set()

    target = session.placement.changed(mode=other_mode)
    outcome = session.switch(target, via=Route.COMPOSED, progress=cancel_while_placing)
    assert outcome.status is SwitchStatus.CANCELLED
    assert outcome.effective is SplitMode.LAYER
    flag.clear()
    assert (*first, *_ids(session, 6)) == straight[:12]


def test_a_switch_comes_between_two_tokens_of_another_thread(open_session: Opener, straight: tuple[int, ...]) -> None:
    """A thread that generates pauses for a switch and goes on; no token is lost or doubled."""
    session = open_session()
    session.prefill(session.tokenize(PROMPT))
    got: list[int] = []
    five = threading.Event()

    def stream() -> None:
        for token in session.generate(n=30, sampler=SEEDED):
            got.append(token.id)
            if len(got) == 5:
                five.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert five.wait(60)
    outcome = session.switch(session.placement.changed(tensor_split=(1.0, 3.0)))
    thread.join(60)
    assert outcome.status is SwitchStatus.SWITCHED
    assert got == list(straight)


def test_a_second_switch_and_a_call_from_a_callback_get_busy(open_small: Opener) -> None:
    """The stage callback runs inside a switch: from there, another switch and a decode are refused."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    seen: list[str] = []

    def call_back(stage: Stage, _share: float) -> None:
        if stage is not Stage.PLACING or seen:
            return
        with pytest.raises(Busy):
            session.switch(session.placement.changed(n_ctx=512))
        with pytest.raises(Busy):
            session.prefill([5])
        other: list[BaseException] = []

        def second() -> None:
            try:
                session.switch(session.placement.changed(n_ctx=512))
            except Busy as error:
                other.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(60)
        seen.append(str(other[0]))

    target = session.placement.changed(tensor_split=(1.0, 3.0))
    outcome = session.switch(target, via=Route.COMPOSED, progress=call_back)
    assert outcome.status is SwitchStatus.SWITCHED
    assert "switch" in seen[0]


@pytest.mark.every_build
@pytest.mark.parametrize("unified", [True, False])
def test_a_copied_sequence_is_whole_before_any_decode(
    library: Library, open_session: Opener, other_mode: SplitMode, unified: bool
) -> None:
    """Copy, switch at once, and the copy goes on as its source does."""
    session = open_session(base(n_seq_max=2, kv_unified=unified))
    session.prefill(session.tokenize(PROMPT), 0)
    session.copy_sequence(0, 1)
    outcome = session.switch(session.placement.changed(mode=other_mode))
    if library.version in STREAMS_LOST and not unified:
        _refuses_streams(session, outcome)
    else:
        assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert _ids(session, 6, 1, GREEDY) == _ids(session, 6, 0, GREEDY)


@pytest.mark.every_build
def test_a_shift_is_applied_before_it_returns(open_session: Opener, tmp_path: Path) -> None:
    """Shift, then switch at once: a fresh session given the same state goes on alike, with the keys moved."""
    session = open_session()
    session.prefill(session.tokenize(PROMPT))
    session.shift(2, 4)
    session.save(tmp_path / "carry")
    assert session.switch(session.placement.changed(tensor_split=(1.0, 3.0))).status is SwitchStatus.SWITCHED
    fresh = open_session(session.placement)
    fresh.restore(tmp_path / "carry")
    assert _ids(session, 6, sampler=GREEDY) == _ids(fresh, 6, sampler=GREEDY)
    assert np.array_equal(session.logits(), fresh.logits())


def test_a_shift_in_tensor_mode_is_refused(open_session: Opener, other_mode: SplitMode) -> None:
    """There the library would say yes and abort at the next decode."""
    if other_mode is not SplitMode.TENSOR:
        pytest.skip("this build's tensor mode does not work on the devices under test")
    session = open_session(base(mode=SplitMode.TENSOR, flash="on"))
    session.prefill(session.tokenize(PROMPT))
    with pytest.raises(Refused, match="tensor mode"):
        session.shift(2, 4)
    assert len(_ids(session, 2, sampler=GREEDY)) == 2


def test_a_rewound_sequence_reads_on_from_there(open_small: Opener) -> None:
    """Cut to the prompt, the same seeded draws come again."""
    session = open_small()
    tokens = SMALL_PROMPT
    session.prefill(tokens)
    first = _ids(session, 5, sampler=GREEDY)
    session.rewind(len(tokens))
    assert session.tokens() == tokens
    assert _ids(session, 5) == first


def test_a_forked_child_may_not_call(open_small: Opener) -> None:
    """The child gets an error and exits clean; the parent goes on."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            session.prefill([5])
        except ForkedProcess:
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(_ids(session, 2, sampler=GREEDY)) == 2


@pytest.mark.every_build
def test_a_tensor_mode_that_this_build_gets_wrong_is_refused_before_anything_is_freed(
    library: Library, smollm2: Path, other_mode: SplitMode, prober: Prober
) -> None:
    """The try in a child process says how it died; the session serves on as it was."""
    if other_mode is SplitMode.TENSOR:
        pytest.skip("this build's tensor mode works on the devices under test")
    session = Session.open(smollm2, base(flash="on"), library=library, prober=prober)
    with session:
        session.prefill(session.tokenize(PROMPT))
        first = _ids(session, 3, sampler=GREEDY)
        outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR))
        assert outcome.status is SwitchStatus.REFUSED
        assert outcome.stage is Stage.CHECKING
        assert "signal" in outcome.reason
        assert len(first + _ids(session, 3)) == 6


def test_a_context_that_was_small_for_a_while_reads_in_the_batches_that_were_wished(open_small: Opener) -> None:
    """The library cuts batches to a small context; a larger one afterwards has those that it began with."""
    session = open_small(base(n_ctx=1024, n_batch=512, n_ubatch=300))
    session.prefill(SMALL_PROMPT)
    start = session.placement
    sizes = []
    for n_ctx in (256, 1024):
        outcome = session.switch(session.placement.changed(n_ctx=n_ctx))
        assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
        context = session._live.engine.live_context
        sizes.append((context.n_batch, context.n_ubatch))
        session.prefill([3] * 200)
        session.rewind(len(SMALL_PROMPT))
    assert sizes == [(256, 256), (512, 300)]
    assert session.placement == start
