"""A switch to another cache layout converts the carry, and files of other layouts are made to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cffi
import numpy as np
import pytest

from llama_native import Context, ContextParams, FlashAttn, KvType, Library, Model, ModelParams
from splitctl import CarryMismatch, Refused, SamplerSpec, Session, SwitchStatus
from splitctl import FlashAttn as Flash
from tests.real.conftest import PROMPT, Opener, base

GREEDY = SamplerSpec(temp=0.0)
PLAIN_LIMIT = 1e-2
"""NMSE of logits between two ways to store the same numbers; builds and kernels differ in float order."""

CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"flash_attn": Flash.OFF}, "V transposed"),
    ({"flash_attn": Flash.OFF}, {"flash_attn": Flash.ON}, "V made plain"),
    ({}, {"type_k": "f32", "type_v": "bf16"}, "K to f32 and V to bf16"),
    ({"n_seq_max": 2}, {"kv_unified": True}, "one stream"),
    ({"n_seq_max": 2, "kv_unified": True}, {"kv_unified": False}, "a stream for each"),
]


def _nmse(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    return float(((got.astype(np.float64) - wanted) ** 2).sum() / (wanted.astype(np.float64) ** 2).sum())


def _prefilled(open_session: Opener, **named: Any) -> tuple[Session, list[int]]:
    session = open_session(base(**{"flash_attn": Flash.ON, **named}))
    tokens = session.tokenize(PROMPT)
    for seq_id in range(session.placement.n_seq_max):
        session.prefill(tokens[:-1], seq_id)
    return session, tokens


@pytest.mark.every_build
@pytest.mark.parametrize(("start", "change", "said"), CHANGES)
def test_a_layout_change_converts_and_goes_on_as_a_context_of_that_layout(
    open_session: Opener, tmp_path: Path, start: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    """The outcome lists the change; the next logits are near those of a context that never had another layout."""
    session, tokens = _prefilled(open_session, **start)
    outcome = session.switch(session.placement.changed(**change))
    if [reason.code for reason in outcome.reasons] == ["streams-lost-on-restore"]:
        pytest.skip("this build restores the last sequence alone where each has a stream, and the switch was refused")
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert any(said in one for one in outcome.conversions), outcome.conversions
    session.save(tmp_path / "carry")
    fresh = open_session(session.placement)
    fresh.restore(tmp_path / "carry")
    session.prefill(tokens[-1:])
    fresh.prefill(tokens[-1:])
    assert np.array_equal(session.logits(), fresh.logits())
    native = open_session(session.placement)
    native.prefill(tokens)
    assert _nmse(session.logits()[-1], native.logits()[-1]) < PLAIN_LIMIT


@pytest.mark.every_build
def test_a_quantized_cache_costs_no_more_than_the_librarys_own(open_session: Opener) -> None:
    """f16 to q8_0: rotated as the build rotates, so the logits are as near as those of a q8_0 cache from the start."""
    session, tokens = _prefilled(open_session)
    outcome = session.switch(session.placement.changed(type_k="q8_0", type_v="q8_0"))
    if outcome.status is SwitchStatus.FELL_BACK:
        assert "rotation" in outcome.reason, outcome.reason
        pytest.skip("this build's states do not say how quantized rows are rotated, and the switch fell back")
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    session.prefill(tokens[-1:])
    plain = open_session(base(flash_attn=Flash.ON))
    plain.prefill(tokens)
    own = open_session(base(flash_attn=Flash.ON, type_k="q8_0", type_v="q8_0"))
    own.prefill(tokens)
    mine, theirs = (_nmse(one.logits()[-1], plain.logits()[-1]) for one in (session, own))
    assert mine <= max(2 * theirs, PLAIN_LIMIT)


def test_no_convert_refuses_by_name(open_session: Opener) -> None:
    """Nothing is touched, and the reason says which conversion it would have taken."""
    session, _ = _prefilled(open_session)
    outcome = session.switch(session.placement.changed(flash_attn=Flash.OFF), convert=False)
    assert outcome.status is SwitchStatus.REFUSED
    assert [reason.code for reason in outcome.reasons] == ["needs-conversion"]
    assert "flash attention" in outcome.reason


@pytest.fixture(scope="module")
def files(library: Library, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session file and a slot file that the library wrote, with flash attention off: V is transposed there."""
    folder = tmp_path_factory.mktemp("files")
    ffi = cffi.FFI()
    ffi.cdef(
        "bool llama_state_save_file(void *, const char *, const int32_t *, size_t);"
        "size_t llama_state_seq_save_file(void *, const char *, int32_t, const int32_t *, size_t);"
    )
    lib = ffi.dlopen(str(library.path))
    with Model.load(library, smollm2, ModelParams(devices=("CPU",))) as model:
        tokens = model.tokenize(PROMPT)
        n = len(tokens)
        with Context(
            model, ContextParams(n_ctx=256, n_threads=1, flash_attn=FlashAttn.OFF, type_k=KvType.F16)
        ) as context:
            context.decode(tokens, range(n), [0] * n, [False] * (n - 1) + [True])
            with library.calling() as (theirs, _):
                pointer = ffi.cast("void *", int(theirs.cast("uintptr_t", context.pointer)))
                row = ffi.new("int32_t[]", tokens)
                assert lib.llama_state_save_file(pointer, str(folder / "session").encode(), row, n)
                assert lib.llama_state_seq_save_file(pointer, str(folder / "slot").encode(), 0, row, n) > 0
    return folder


@pytest.mark.every_build
@pytest.mark.parametrize("name", ["session", "slot"])
def test_the_librarys_own_files_are_taken_in(open_session: Opener, files: Path, name: str) -> None:
    """Tokens and cache come from the file, made to fit; one decode gives the next token, at its position (S1, S8)."""
    session = open_session(base(flash_attn=Flash.ON, n_seq_max=2))
    tokens = session.tokenize(PROMPT)
    restored = session.restore(files / name)
    assert not restored.recomputed, restored.reason
    assert any("V made plain" in one for one in restored.conversions)
    assert session.tokens() == tokens
    before = session.n_decodes
    first = next(iter(session.generate(n=1, sampler=GREEDY)))
    assert session.n_decodes == before + 1
    assert first.pos == len(tokens)
    straight = open_session(base(flash_attn=Flash.ON))
    straight.prefill(tokens)
    assert _nmse(session.logits()[-1], straight.logits()[-1]) < PLAIN_LIMIT


def test_a_file_of_another_model_is_refused(open_session: Opener, files: Path, tmp_path: Path) -> None:
    """A token outside the vocabulary, and a token list that is cut: the session goes on as it was."""
    session, tokens = _prefilled(open_session)
    whole = (files / "slot").read_bytes()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(whole[:12] + (10**6).to_bytes(4, "little") + whole[16:])
    with pytest.raises(CarryMismatch, match="vocabulary"):
        session.restore(foreign)
    cut = tmp_path / "cut"
    cut.write_bytes(whole[:50])
    with pytest.raises(Exception, match="cut") as caught:
        session.restore(cut)
    assert not isinstance(caught.value, Refused)
    assert session.tokens() == tokens[:-1]


def test_a_damaged_file_is_read_again_from_its_tokens(open_session: Opener, files: Path, tmp_path: Path) -> None:
    """A slot file that is cut in its rows gives its tokens, and the restore says what happened (S31)."""
    session = open_session(base(flash_attn=Flash.ON))
    tokens = session.tokenize(PROMPT)
    cut = tmp_path / "cut"
    cut.write_bytes((files / "slot").read_bytes()[:-7])
    restored = session.restore(cut)
    assert restored.recomputed
    assert "cut short" in restored.reason
    assert session.tokens() == tokens
    straight = open_session(base(flash_attn=Flash.ON))
    straight.prefill(tokens)
    pairs = [next(iter(one.generate(n=1, sampler=GREEDY))) for one in (session, straight)]
    assert (pairs[0].id, pairs[0].pos) == (pairs[1].id, len(tokens))
