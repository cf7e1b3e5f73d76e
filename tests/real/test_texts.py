"""Texts, chats, embeddings and states of a session on a real build: one session for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llama_native import Library
from splitctl import CarryMismatch, ConfigInvalid, ContextFull, SamplerSpec, Session, SplitMode, TextStream
from tests.real.conftest import SMALL_PROMPT, base
from tools.make_dummies import make_many
from tools.places import default_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

GREEDY = SamplerSpec(temp=0.0)
SEEDED = SamplerSpec(temp=1.2, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.2, seed=5)
DATES = 'root ::= "On " day ", " day " and 🌊é "\nday ::= "Mon" | "Tues" | "Wednes" | "Sun"'


@pytest.fixture(scope="module")
def session(library: Library, words_model: Path) -> Iterator[Session]:
    """Two sequences; every test goes on with it."""
    with Session.open(
        words_model,
        base(n_ctx=256, n_batch=16, n_ubatch=16, n_seq_max=2),
        library=library,
        prober=None,
        embeddings=True,
    ) as opened:
        yield opened


def drawn(stream: TextStream, n: int) -> list[int]:
    """Step a stream until it has drawn so many tokens."""
    while len(stream.tokens) < n:
        stream.step()
    return list(stream.tokens)


def test_a_text_goes_on_under_its_grammar_after_a_switch_as_in_a_fresh_context(
    session: Session, library: Library, words_model: Path, other_mode: SplitMode
) -> None:
    """Given the same state: the grammar and the draws are where they were in the session, and from its bytes."""
    stream = session.text("When is it? ", n=40, sampler=SEEDED, grammar=DATES)
    drawn(stream, 3)
    state, logits = session.state_bytes(), session.logits()
    outcome = session.switch(other_mode.value, proof="bytes")
    assert (outcome.status.value, session.placement.mode) == ("switched", other_mode)
    assert np.array_equal(session.logits(), logits)
    text = stream.read() and stream.text
    assert text.startswith("On ")
    assert text.endswith(" and 🌊é ")
    assert stream.usage is not None
    assert (stream.usage.finish_reason, stream.usage.n_generated) == ("stop", len(stream.tokens))
    with Session.open(words_model, session.placement, library=library, prober=None) as fresh:
        assert not fresh.load_state_bytes(state).recomputed
        again = [token.id for token in fresh.generate(n=40)]
        # One more ends the generation.
        assert again[:-1] == stream.tokens[3:]
        assert fresh.tokens() == session.tokens()
    assert session.switch(mode="layer").status.value == "switched"


def test_pieces_of_a_text_are_whole_characters_and_hold_no_stop_text(session: Session) -> None:
    """A character of several tokens comes when it is whole; what begins a stop text comes when it is none."""
    wanted = "héllo 🌊 wörld STOP and more"
    plain = session.text("x", grammar=f'root ::= "{wanted}"', sampler=GREEDY)
    pieces = list(plain)
    assert "".join(pieces) == plain.text == wanted
    assert len(plain.tokens) > len(pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    stopped = session.text("x", grammar=f'root ::= "{wanted}"', sampler=GREEDY, stop=("more", " STOP an"))
    assert "".join(stopped) == "héllo 🌊 wörld"
    assert stopped.usage is not None
    assert stopped.usage.finish_reason == "stop"
    cut = session.text("x", grammar=f'root ::= "{wanted}"', sampler=GREEDY, stop="wörld!", n=len(plain.tokens) - 9)
    assert wanted.startswith("".join(cut))
    assert cut.usage is not None
    assert (cut.usage.finish_reason, cut.usage.n_generated) == ("length", len(plain.tokens) - 9)


def test_a_chat_reads_only_its_new_turns(session: Session) -> None:
    """By the model's template, and the draws are those of its text as a prompt."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    first = session.chat(asked, n=4, sampler=GREEDY)
    answer = first.read()
    again = [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    second = session.chat(again, n=1, sampler=GREEDY)
    second.read()
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.n_prompt <= second.usage.n_reused < second.usage.n_prompt
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    same = session.text(text, parse_special=True, n=4, sampler=GREEDY)
    assert (same.read(), same.prompt) == (answer, first.prompt)


def test_a_bad_grammar_or_a_prompt_without_room_touches_nothing(session: Session) -> None:
    """Both are refused before the sequence is cut."""
    session.feed(session.tokenize("Held here"))
    held = session.state_bytes(bare=True)
    with pytest.raises(ConfigInvalid, match="rule named root"):
        session.text("x", grammar="start ::= [a-z]")
    with pytest.raises(ConfigInvalid, match="grammar"):
        session.text("x", grammar='root ::= "open')
    # The library's stack would end, and the process with it.
    for deep in ("(" * 100_000, "(" * 40_000 + '"a"' + ")" * 40_000, '"\\"(" (' * 40_000):
        with pytest.raises(ConfigInvalid, match="1000 deep at most"):
            session.text("x", grammar=f"root ::= {deep}")
    with pytest.raises(ConfigInvalid, match="10000 at most"):
        session.text("x", grammar="root::=a\n" + "a::=a\n" * 100_000)
    many = 'root ::= "((" [(\\]] ("a") ' + '("(" "a") ' * 3000
    assert not session.text("x", grammar=many).is_over
    with pytest.raises(ContextFull):
        session.text([5] * 300).read()
    with pytest.raises(ContextFull):
        session.feed([5] * 300)
    assert session.state_bytes(bare=True) == held


def test_processors_change_what_is_drawn_and_their_errors_lose_nothing(session: Session) -> None:
    """In place or by another row, before the grammar; after an error the sequence draws on from the same logits."""
    seen: list[list[int]] = []

    def last_only(tokens: NDArray[np.int32], row: NDArray[np.float32]) -> None:
        seen.append(tokens.tolist())
        row[:-1] = -np.inf

    def moved(_tokens: NDArray[np.int32], row: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.roll(row, -1)

    stream = session.text("Count", n=2, sampler=SEEDED, processors=(last_only, moved))
    stream.read()
    n_vocab = session.model.n_vocab
    assert stream.tokens == [n_vocab - 2] * 2
    assert seen == [[*stream.prompt], [*stream.prompt, n_vocab - 2]]

    def broken(_tokens: NDArray[np.int32], row: NDArray[np.float32]) -> None:
        row[:] = 0
        raise KeyError("mine")

    wanted = session.text("Count", n=3, sampler=SEEDED)
    wanted.read()
    failed = session.text("Count", n=3, sampler=SEEDED, processors=broken)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="mine"):
        failed.read()
    assert (session.tokens(), failed.is_over, failed.usage) == (list(failed.prompt), True, None)
    assert [token.id for token in session.generate(n=3, sampler=SEEDED)] == wanted.tokens
    for wrong, said in (
        (lambda _t, row: row[1:], "from a processor"),
        (lambda _t, row: row * -np.inf, "of numbers"),
        (lambda _t, row: row * 0 - np.inf, "no token"),
    ):
        with pytest.raises(ConfigInvalid, match="processor") as raised:
            session.text("Count", n=1, processors=[wrong]).read()
        assert said in str(raised.value)


def test_a_sequence_is_fed_what_it_does_not_hold(session: Session) -> None:
    """It keeps what both begin with, and its sampler; its logits are those of a sequence that read all at once."""
    tokens = session.tokenize("one two three four five")
    session.set_sampler(SEEDED)
    session.remove_sequence(1)
    first = session.feed(tokens)
    assert (first.n_kept + first.n_read, session.tokens()) == (len(tokens), tokens)
    again = session.feed(tokens)
    assert (again.n_kept, again.n_read) == (len(tokens), 0)
    changed = [*tokens[:3], *tokens[:2]]
    fed = session.feed(changed)
    assert (fed.n_kept, fed.n_read, session.tokens()) == (3, 2, changed)
    session.feed(changed, 1)
    assert np.allclose(session.logits(0), session.logits(1), atol=1e-3)
    session.remove_sequence(1)
    assert session.sampler() == (SEEDED, 0)


def test_a_state_in_memory_brings_everything_back(session: Session) -> None:
    """With its tokens, logits and draws; the library's own bytes with what is given beside, or read again."""
    tokens = session.tokenize("Once upon a time there was")
    session.feed(tokens)
    held, bare, logits = session.state_bytes(), session.state_bytes(bare=True), session.logits()
    wanted = [token.id for token in session.generate(n=4, sampler=GREEDY)]
    for state, given in ((held, {}), (bare, {"tokens": tokens, "logits": logits}), (bare, {"tokens": {0: tokens}})):
        session.text("Something else", n=1).read()
        restored = session.load_state_bytes(state, **given)
        assert not restored.recomputed
        assert session.tokens() == tokens
        if given.keys() != {"tokens"}:
            assert session.state_bytes(bare=True) == bare
            assert np.array_equal(session.logits(), logits)
        assert [token.id for token in session.generate(n=4, sampler=GREEDY)] == wanted
    now = session.tokens()
    with pytest.raises(CarryMismatch, match="as many as its 2 tokens"):
        session.load_state_bytes(bare, tokens[:2])
    with pytest.raises(ConfigInvalid, match="has its own"):
        session.load_state_bytes(held, tokens)
    assert session.tokens() == now


def test_texts_are_embedded_beside_what_sequences_hold(session: Session) -> None:
    """The last token's row is that of a prompt, and the mean that of all rows; the others stay as they are."""
    session.feed(session.tokenize("Held meanwhile"))
    session.remove_sequence(1)
    held = session.state_bytes(bare=True)
    texts = ["A wave on the sea, seen from the shore in the morning by a child", "Money"]
    last, mean = session.embed(texts, pooling="last"), session.embed(texts)
    assert last.shape == (2, session.model.n_embd)
    assert last.dtype == np.float32
    assert session.state_bytes(bare=True) == held
    tokens = session.tokenize(texts[1])
    session.prefill(tokens, 1)
    own = session.embedding(1)
    assert own is not None
    assert np.array_equal(last[1], own)
    with pytest.raises(ConfigInvalid, match="an empty sequence"):
        session.embed("x")
    session.remove_sequence(1)
    rows = [session.embed([tokens[: n + 1]], pooling="last")[0] for n in range(len(tokens))]
    assert np.allclose(mean[1], np.mean(rows, axis=0), atol=1e-2)
    lengths = np.linalg.norm(session.embed([tokens, "x"], pooling="cls", normalize=True), axis=1)
    assert np.allclose(lengths, 1, atol=1e-5)


def test_a_memory_that_cannot_be_cut_is_read_anew(library: Library) -> None:
    """A recurrent one is fed from its beginning, and an answer that is taken back leaves the same bytes and logits."""
    ((_, path, why),) = make_many(default_folder(), ["mamba"])
    assert path is not None, why
    with Session.open(path, base(), library=library, prober=None) as session:
        first, changed = session.feed(SMALL_PROMPT), session.feed([*SMALL_PROMPT[:3], 6])
        assert (first.n_kept, first.n_read) == (0, len(SMALL_PROMPT))
        assert (changed.n_kept, changed.n_read) == (0, 4)
        session.set_sampler(SEEDED)
        held, logits = session.state_bytes(bare=True), session.logits()
        stream = session.text([*session.tokens(), 4, 4], n=9, sampler=GREEDY)
        drawn(stream, 3)
        stream.take_back()
        assert (session.tokens(), session.sampler()) == ([*SMALL_PROMPT[:3], 6], (SEEDED, 0))
        assert session.state_bytes(bare=True) == held
        assert np.array_equal(session.logits(), logits)
        restored = session.load_state_bytes(held, session.tokens())
        assert restored.recomputed
        assert "cannot be rewound" in restored.reason
