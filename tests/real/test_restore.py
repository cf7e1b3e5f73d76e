"""What a restore takes in and what it refuses; a session that refused goes on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import pytest

from llama_native import sequence_state_get, sequence_state_size, state_get, state_size
from splitctl import CarryDamaged, CarryMismatch, Refused, SamplerSpec, Session
from tests.real.conftest import SMALL_PROMPT, Opener, base

GREEDY = SamplerSpec(temp=0.0)
LONG = [3 + (7 * place) % 90 for place in range(300)]
"""More tokens than the small context of these tests has room for."""

Writer = Callable[[Session, Path], None]


def _by_the_library(session: Session, path: Path, *, of_one: bool) -> None:
    """Let the library write a session file, or a slot file of sequence 0."""
    ffi = cffi.FFI()
    ffi.cdef(
        "bool llama_state_save_file(void *, const char *, const int32_t *, size_t);"
        "size_t llama_state_seq_save_file(void *, const char *, int32_t, const int32_t *, size_t);"
    )
    live = session._live
    lib, row = ffi.dlopen(str(live.engine.library.path)), ffi.new("int32_t[]", session.tokens())
    with live.engine.library.calling() as (theirs, _):
        context = ffi.cast("void *", int(theirs.cast("uintptr_t", live.engine.live_context.pointer)))
        if of_one:
            assert lib.llama_state_seq_save_file(context, bytes(path), 0, row, len(row)) > 0
        else:
            assert lib.llama_state_save_file(context, bytes(path), row, len(row))


def _carry(session: Session, path: Path) -> None:
    session.save(path)


def _session_file(session: Session, path: Path) -> None:
    _by_the_library(session, path, of_one=False)


def _slot_file(session: Session, path: Path) -> None:
    _by_the_library(session, path, of_one=True)


WRITERS = [_carry, _session_file, _slot_file]


def _refused(session: Session, fresh: Session, path: Path) -> str:
    """Give the words of a refusal; the session goes on as one that never saw the file."""
    for one in (session, fresh):
        one.prefill(SMALL_PROMPT)
    with pytest.raises(Refused) as error:
        session.restore(path)
    assert session.tokens() == SMALL_PROMPT
    for mine, other in zip(session.generate(n=3, sampler=GREEDY), fresh.generate(n=3, sampler=GREEDY), strict=True):
        assert mine == other
    assert np.array_equal(session.logits(), fresh.logits())
    return str(error.value)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("n_seq", [1, 2])
def test_a_state_larger_than_its_context_is_refused_with_both_numbers(
    open_small: Opener, tmp_path: Path, write: Writer, n_seq: int
) -> None:
    """A carry, a session file and a slot file say what a switch says, one stream of several too; nothing is touched."""
    large = open_small(base(n_ctx=512))
    large.prefill(LONG)
    write(large, tmp_path / "saved")
    small = base(n_ctx=256 * n_seq, n_seq_max=n_seq)
    said = _refused(open_small(small), open_small(small), tmp_path / "saved")
    assert f"holds 300 tokens and the context has room for 256; ask for -c {300 * n_seq} or more" in said


def test_a_unified_cache_has_room_for_all_sequences_together(open_small: Opener, tmp_path: Path) -> None:
    """Two sequences that have a stream each do not fit one buffer of cells for both."""
    large = open_small(base(n_ctx=1024, n_seq_max=2))
    large.prefill(LONG[:200], 0)
    large.prefill(LONG[:100], 1)
    large.save(tmp_path / "carry")
    small = base(n_ctx=256, n_seq_max=2, kv_unified=True)
    assert "holds 300 tokens" in _refused(open_small(small), open_small(small), tmp_path / "carry")


def test_sequences_that_share_their_cells_fit_where_they_were(open_small: Opener, tmp_path: Path) -> None:
    """A copy in a unified cache takes no cells of its own, and none when it is restored."""
    place = base(n_ctx=256, n_seq_max=2, kv_unified=True)
    session, other = open_small(place), open_small(place)
    session.prefill(LONG[:200])
    session.copy_sequence(0, 1)
    session.save(tmp_path / "carry")
    assert not other.restore(tmp_path / "carry").recomputed
    assert [other.tokens(seq_id) for seq_id in (0, 1)] == [LONG[:200]] * 2


def test_a_sequence_that_the_context_has_no_place_for_is_refused(open_small: Opener, tmp_path: Path) -> None:
    """The flag that makes room is named."""
    session = open_small(base(n_seq_max=2))
    session.prefill(SMALL_PROMPT, 1)
    session.save(tmp_path / "carry")
    assert "raise -np to 2" in _refused(open_small(), open_small(), tmp_path / "carry")


@pytest.mark.every_build
@pytest.mark.parametrize("write", WRITERS)
def test_an_empty_session_is_restored_to_an_empty_sequence(open_small: Opener, tmp_path: Path, write: Writer) -> None:
    """Whoever saved before the first token gets that back, and reads a prompt as anywhere."""
    write(open_small(), tmp_path / "saved")
    session, fresh = open_small(), open_small()
    session.prefill(SMALL_PROMPT)
    restored = session.restore(tmp_path / "saved")
    assert (restored.recomputed, session.tokens()) == (False, [])
    for one in (session, fresh):
        one.prefill(SMALL_PROMPT[3:])
    assert np.array_equal(session.logits(), fresh.logits())


def _whole(session: Session) -> bytes:
    context = session._live.engine.live_context
    buffer = bytearray(state_size(context))
    return bytes(buffer[: state_get(context, buffer)])


def _of_one(session: Session) -> bytes:
    context = session._live.engine.live_context
    buffer = bytearray(sequence_state_size(context, 0))
    return bytes(buffer[: sequence_state_get(context, buffer, 0)])


NAMED: list[tuple[Callable[[Session], bytes], str]] = [
    (_whole, "a bare context of 14 positions, without the tokens"),
    (_of_one, "a bare sequence of 14 positions, without the tokens"),
    (lambda _: "Es war einmal … ".encode() * 40, "a text file"),
    (lambda _: b"", "an empty file"),
    (lambda session: Path(session._live.engine.model_path).read_bytes()[:4096], "a model"),
    (lambda _: bytes(range(128, 256)), "no saved session"),
]


@pytest.mark.parametrize(("content", "name"), NAMED)
def test_a_file_that_cannot_be_restored_is_named(
    open_small: Opener, tmp_path: Path, content: Callable[[Session], bytes], name: str
) -> None:
    """A bare state, a text, a model, nothing at all: each is called what it is, and the session goes on."""
    session: Any = open_small()
    session.prefill(SMALL_PROMPT)
    (tmp_path / "file").write_bytes(content(session))
    with pytest.raises(CarryDamaged, match=name):
        session.restore(tmp_path / "file")
    assert session.tokens() == SMALL_PROMPT


def test_positions_without_tokens_are_refused(open_small: Opener, tmp_path: Path) -> None:
    """A slot file whose token list is empty though its cache is not: nobody knows what it was made from."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    _slot_file(session, tmp_path / "slot")
    data = (tmp_path / "slot").read_bytes()
    (tmp_path / "slot").write_bytes(data[:8] + bytes(4) + data[12 + 4 * len(SMALL_PROMPT) :])
    with pytest.raises(CarryMismatch, match="tokens: carry none"):
        session.restore(tmp_path / "slot")
    assert session.tokens() == SMALL_PROMPT
