"""Every kind of memory moves: attention in its shapes, recurrent, hybrid, behind an encoder, and none at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import CallFailed, Library
from splitctl import ConfigInvalid, Refused, SamplerSpec, Session, SplitMode, SwitchStatus
from splitctl.ipc.probes import Prober
from splitctl.model.facts import read_facts
from splitctl.outcome import WeightsTier
from tests.real.conftest import RPC, base
from tools.make_dummies import make_many
from tools.places import default_folder

GREEDY = SamplerSpec(temp=0.0)
#: More than two micro-batches of 64, and than the sliding windows of the recipes.
TOKENS = [(7919 * (index + 1) + 13) % 120 + 3 for index in range(150)]
#: What an encoder can read, which is one micro-batch.
SHORT = TOKENS[:60]
OTHER_SHARES = {"tensor_split": (0.2, 0.8)}

Open = Callable[..., Session]


@pytest.fixture
def open_dummy(library: Library, prober: Prober) -> Iterator[Open]:
    """Opens sessions on dummy models, which are made where they are not there yet."""
    opened: list[Session] = []

    def opener(
        recipe: str, *, for_tensor: bool = False, weights: WeightsTier = WeightsTier.FILE, **named: Any
    ) -> Session:
        ((_name, path, why),) = make_many(default_folder(), [recipe])
        assert isinstance(path, Path), why
        placement = base(flash="on", n_threads=1, **named)
        if for_tensor and RPC:
            # A server that serves this process answers no child: the try that the switch needs comes first.
            prober(path, placement.changed(mode=SplitMode.TENSOR), read_facts(path))
        try:
            session = Session.open(path, placement, library=library, prober=prober, weights=weights)
        except CallFailed as error:
            if "wrong number of tensors" in str(error):
                pytest.skip(f"this build wants other tensors of {recipe} than the newest, which made the dummy")
            raise
        opened.append(session)
        return session

    yield opener
    for session in opened:
        session.close()


def _prompt(recipe: str) -> list[int]:
    return SHORT if recipe in {"t5", "bert"} else TOKENS


def _ids(session: Session, n: int) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=GREEDY)]


def _goes_on_like_a_fresh_one(session: Session, fresh: Session, carry: Path) -> None:
    """Hold a switched session to one that got the carry of before the switch in the target placement."""
    fresh.restore(carry)
    for n in (1, 6):
        assert _ids(session, n) == _ids(fresh, n)
        logits = session.logits()
        assert np.array_equal(logits, fresh.logits())
        assert np.isfinite(logits).all()
        assert np.ptp(logits) > 0
    session.prefill(TOKENS[:9])
    fresh.prefill(TOKENS[:9])
    assert np.array_equal(session.logits(), fresh.logits())


MEMORIES = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("mamba", id="recurrent"),
        pytest.param("jamba+gqa", id="hybrid"),
        pytest.param("t5", id="encoder-decoder"),
        pytest.param("qwen2vl+gqa", id="M-RoPE"),
        pytest.param("deepseek2", id="MLA"),
        pytest.param("refact+8h", id="ALiBi"),
        pytest.param("gemma3+gqa", id="sliding window"),
        pytest.param("qwen3+mqa", id="K-norm and one KV head"),
    ],
)


@pytest.mark.every_build
@MEMORIES
@pytest.mark.parametrize("changed", [OTHER_SHARES, {"mode": SplitMode.NONE}], ids=["other shares", "none"])
def test_every_memory_moves_between_the_modes_that_all_models_have(
    open_dummy: Open, tmp_path: Path, recipe: str, changed: dict[str, Any]
) -> None:
    """State, positions and logits travel; what comes next is what a fresh session with the same state says."""
    session = open_dummy(recipe)
    session.prefill(_prompt(recipe))
    _ids(session, 4)
    held, tokens = session.logits(), session.tokens()
    session.save(tmp_path / "carry")
    outcome = session.switch(session.placement.changed(**changed))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert outcome.state_bytes
    assert np.array_equal(session.logits(), held)
    assert session.tokens() == tokens
    _goes_on_like_a_fresh_one(session, open_dummy(recipe, **changed), tmp_path / "carry")


@MEMORIES
def test_every_memory_comes_back_to_the_context_that_was_kept(open_dummy: Open, tmp_path: Path, recipe: str) -> None:
    """There with a second placement beside the first, and back to the first, which still held its old state."""
    session = open_dummy(recipe, weights=WeightsTier.RESIDENT)
    first = session.placement
    session.prefill(_prompt(recipe))
    _ids(session, 2)
    for target in (first.changed(**OTHER_SHARES), first):
        _ids(session, 3)
        session.save(tmp_path / "carry")
        outcome = session.switch(target)
        assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
        assert outcome.weights is WeightsTier.RESIDENT
    _goes_on_like_a_fresh_one(session, open_dummy(recipe), tmp_path / "carry")


@pytest.mark.every_build
@pytest.mark.parametrize("recipe", ["qwen35+gqa", "qwen2vl+gqa", "gemma3+gqa"])
def test_what_tensor_mode_takes_moves_there_and_back(
    open_dummy: Open, other_mode: SplitMode, tmp_path: Path, recipe: str
) -> None:
    """Hybrids, M-RoPE and sliding windows, tried in a child first."""
    if other_mode is not SplitMode.TENSOR:
        pytest.skip("this build's tensor mode does not work on the devices under test")
    session = open_dummy(recipe, for_tensor=True)
    session.prefill(_prompt(recipe))
    session.save(tmp_path / "carry")
    outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    _goes_on_like_a_fresh_one(session, open_dummy(recipe, mode=SplitMode.TENSOR), tmp_path / "carry")
    session.save(tmp_path / "back")
    assert session.switch(session.placement.changed(mode=SplitMode.LAYER)).status is SwitchStatus.SWITCHED
    _goes_on_like_a_fresh_one(session, open_dummy(recipe), tmp_path / "back")


@pytest.mark.every_build
@pytest.mark.parametrize(
    ("recipe", "code"),
    [
        ("mamba", "architecture-in-tensor-mode"),
        ("deepseek2", "architecture-in-tensor-mode"),
        ("t5", "architecture-in-tensor-mode"),
        ("refact+8h", "alibi-in-tensor-mode"),
        ("qwen3+mqa", "probe-dies"),
    ],
)
def test_what_tensor_mode_cannot_take_is_refused_and_the_session_goes_on(
    open_dummy: Open, recipe: str, code: str
) -> None:
    """By rule, or by a try whose death is its answer; the tokens are those of a session that was never asked."""
    straight = open_dummy(recipe, for_tensor=code.startswith("probe"))
    straight.prefill(_prompt(recipe))
    session = open_dummy(recipe)
    session.prefill(_prompt(recipe))
    outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR))
    assert outcome.status is SwitchStatus.REFUSED
    assert code in {one.code for one in outcome.reasons}
    assert outcome.stages_ms.freeing is None
    assert _ids(session, 6) == _ids(straight, 6)


@pytest.mark.parametrize(("n_ctx", "is_refused"), [(2048, True), (512, False)])
def test_a_state_that_is_carried_whole_refuses_another_size_before_anything_is_freed(
    open_dummy: Open, n_ctx: int, is_refused: bool
) -> None:
    """What deepseek4 keeps of older tokens is written whole: 512 tokens of context keep as many rows as 1024 do."""
    session, straight = open_dummy("deepseek4", n_ctx=1024), open_dummy("deepseek4", n_ctx=1024)
    for one in (session, straight):
        one.prefill(TOKENS)
    outcome = session.switch(session.placement.changed(n_ctx=n_ctx))
    assert [one.code for one in outcome.reasons] == (["cannot-convert"] if is_refused else [])
    assert (outcome.stages_ms.freeing is None) == is_refused
    assert _ids(session, 6) == _ids(straight, 6)


@pytest.mark.every_build
@pytest.mark.parametrize("changed", [OTHER_SHARES, {"mode": SplitMode.TENSOR}], ids=["other shares", "tensor"])
def test_s18_an_encoder_has_nothing_to_carry_and_moves(
    open_dummy: Open, other_mode: SplitMode, changed: dict[str, Any]
) -> None:
    """No size is asked, nothing is set; the embedding is kept, and the next one is that of a fresh session."""
    if changed.get("mode", other_mode) is not other_mode:
        pytest.skip("this build's tensor mode does not work on the devices under test")
    session = open_dummy("bert", for_tensor=True)
    session.prefill(TOKENS[:40])
    held = session.embedding()
    outcome = session.switch(session.placement.changed(**changed))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert outcome.state_bytes == 0
    kept = session.embedding()
    assert held is not None
    assert kept is not None
    assert np.array_equal(kept, held)
    fresh = open_dummy("bert", **changed)
    for one in (session, fresh):
        one.remove_sequence(0)
        one.prefill(TOKENS[:30])
    after, wanted = session.embedding(), fresh.embedding()
    assert after is not None
    assert wanted is not None
    assert np.array_equal(after, wanted)
    assert np.ptp(after) > 0


def test_a_prompt_for_an_encoder_is_not_doubled_by_a_switch(open_dummy: Open) -> None:
    """The encoder reads its prompt again in the new placement; the decoder's sequence does not."""
    straight, session = open_dummy("t5"), open_dummy("t5")
    for one in (straight, session):
        one.prefill(SHORT)
    first = _ids(session, 3)
    assert session.switch(session.placement.changed(**OTHER_SHARES)).status is SwitchStatus.SWITCHED
    assert len(session.tokens()) == 4
    assert first + _ids(session, 5) == _ids(straight, 8)


@pytest.mark.parametrize("recipe", ["t5", "bert"])
def test_more_than_an_encoder_reads_at_once_is_an_error_and_no_abort(
    open_dummy: Open, tmp_path: Path, recipe: str
) -> None:
    """A prompt above the micro-batch is refused with both numbers, in every way that it can come."""
    session = open_dummy(recipe)
    with pytest.raises(ConfigInvalid, match=r"65 for the encoder.*64 at most"):
        session.prefill(TOKENS[:65])
    session.prefill(SHORT)
    if recipe == "t5":
        outcome = session.switch(session.placement.changed(n_ubatch=32))
        assert [one.code for one in outcome.reasons] == ["encoder-prompt-too-long"]
        session.save(tmp_path / "carry")
        narrow = open_dummy(recipe, n_ubatch=32)
        with pytest.raises(Refused, match=r"read 60 tokens.*holds 32; ask for -ub 60"):
            narrow.restore(tmp_path / "carry")
        narrow.prefill(SHORT[:20])
        assert len(_ids(session, 2)) == len(_ids(narrow, 2)) == 2
