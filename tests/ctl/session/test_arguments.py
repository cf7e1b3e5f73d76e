"""What a session is given that is no such thing: refused by its name, with what is wanted, and the session goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import Library
from splitctl import ConfigInvalid, Placement, Session, SplitctlError
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.native.real import NEWEST, library_of
from tests.stublib import build, needs_compiler, run_child, write_model
from tools.make_dummies import make_many
from tools.places import default_folder

pytestmark = [pytest.mark.stub, needs_compiler]

#: A call, the field that its error names, and a part of what is wanted.
WRONG: list[tuple[Callable[[Any], Any], str, str]] = [
    (lambda s: s.tokens("0"), "seq_id", "0 to 0"),
    (lambda s: s.tokens([0]), "seq_id", "0 to 0"),
    (lambda s: s.logits(True), "seq_id", "0 to 0"),
    (lambda s: s.remove_sequence(None), "seq_id", "0 to 0"),
    (lambda s: s.tokenize(5), "text", "text, or its UTF-8 bytes"),
    (lambda s: s.tokenize(None), "text", "text, or its UTF-8 bytes"),
    (lambda s: s.tokenize("\ud800"), "text", "UTF-8 can hold"),
    (lambda s: s.prefill("a text"), "tokens", "session.tokenize"),
    (lambda s: s.prefill(b"\0\0\0\0"), "tokens", "session.tokenize"),
    (lambda s: s.prefill(7), "tokens", "session.tokenize"),
    (lambda s: s.prefill([1.5]), "tokens", "session.tokenize"),
    (lambda s: s.prefill([1, None]), "tokens", "session.tokenize"),
    (lambda s: s.prefill([1 << 40]), "tokens", "session.tokenize"),
    (lambda s: s.prefill([]), "tokens", "at least one token"),
    (lambda s: s.prefill([1, 260]), "tokens", "0 to 259"),
    (lambda s: s.fill(0, "a text"), "tokens", "session.tokenize"),
    (lambda s: next(s.generate(n="5")), "n", "a whole number"),
    (lambda s: next(s.generate(sampler={"temp": 0})), "sampler", "a SamplerSpec"),
    (lambda s: s.set_sampler(0.8), "sampler", "a SamplerSpec"),
    (lambda s: s.advance(0), "seq_ids", "ids of sequences"),
    (lambda s: s.advance("0"), "seq_ids", "ids of sequences"),
    (lambda s: s.rewind("3"), "n_tokens", "a whole number"),
    (lambda s: s.shift(1.5, 2), "n_keep", "a whole number"),
    (lambda s: s.reserve(None), "n_tokens", "a whole number"),
    (lambda s: s.reserve(5, proof="faith"), "proof", "bytes positions off"),
    (lambda s: s.switch("sideways"), "mode", "none layer row tensor"),
    (lambda s: s.switch(), "placement", "fields such as n_ctx=8192"),
    (lambda s: s.switch(n_contexts=2), "placement", "n_ctx"),
    (lambda s: s.switch("tensor", n_ctx="many"), "n_ctx", "a whole number"),
    (lambda s: s.check({"mode": "tensor"}), "placement", "changed(mode='tensor')"),
    (lambda s: s.text(5), "tokens", "session.tokenize"),
    (lambda s: s.text("x", n="5"), "n", "a whole number"),
    (lambda s: s.text("x", n=True), "n", "a whole number"),
    (lambda s: s.text("x", stop=5), "stop", "texts that are not empty"),
    (lambda s: s.text("x", stop=("",)), "stop", "texts that are not empty"),
    (lambda s: s.text("x", sampler=0.8), "sampler", "a SamplerSpec"),
    (lambda s: s.text("x", seq_id=1), "seq_id", "0 to 0"),
    (lambda s: s.text("x", grammar=b"root"), "grammar", "GBNF"),
    (lambda s: s.text("x", grammar="x" * (2 << 20)), "grammar", "1048576 at most"),
    (lambda s: s.text("x", processors="low"), "processors", "functions"),
    (lambda s: s.text("x", processors=3), "processors", "functions"),
    (lambda s: s.chat("Hello"), "messages", "'role': 'user'"),
    (lambda s: s.chat(["Hello"]), "messages", "'role': 'user'"),
    (lambda s: s.chat([]), "messages", "one message at least"),
    (lambda s: s.chat([{"role": "user", "content": 5}]), "messages[0].content", "a text"),
    (lambda s: s.feed("a text"), "tokens", "session.tokenize"),
    (lambda s: s.feed([]), "tokens", "at least one token"),
    (lambda s: s.embed(5), "texts", "as text or as tokens"),
    (lambda s: s.embed("x"), "embeddings", "given to Session.open"),
    (lambda s: s.load_state_bytes(b"????"), "tokens", "{0: tokens}"),
    (lambda s: s.load_state_bytes(b"????", {0: [1]}, logits={0: [1.0]}), "logits", "float32[260]"),
    (lambda s: s.load_state_bytes(b"????", {"a": [1]}), "seq_id", "a whole number"),
    (lambda s: s.load_state_bytes(b"????", {7: [1]}), "tokens", "sequences 0 to 0"),
    (lambda s: s.load_state_bytes("state"), "state", "bytes"),
    (lambda s: s.switch(s.placement, proof=1), "proof", "bytes positions off"),
    (lambda s: s.switch(s.placement, timeout_s="60"), "timeout_s", "seconds"),
    (lambda s: s.switch(s.placement, timeout_s=-1), "timeout_s", "seconds"),
    (lambda s: s.switch(s.placement, timeout_s=float("nan")), "timeout_s", "seconds"),
    (lambda s: s.switch(s.placement, force="no"), "force", "True or False"),
    (lambda s: s.switch(s.placement, convert=0), "convert", "True or False"),
    (lambda s: s.switch(s.placement, via="moon"), "via", "in-place native"),
    (lambda s: s.switch(s.placement, progress=5), "progress", "the stage and its share"),
    (lambda s: s.switch(s.placement, checked=True), "checked", "session.check()"),
    (lambda s: s.switch("layer", mode="tensor"), "mode", "one mode"),
    (lambda s: s.check("tensor", {"convert": False}), "options", "SwitchOptions(convert=False)"),
    (lambda s: s.tokenize("x", add_special="no"), "add_special", "True or False"),
    (lambda s: s.text("x", parse_special=None), "parse_special", "True or False"),
    (lambda s: s.text("x", stop="\ud800"), "stop", "UTF-8 can hold"),
    (lambda s: s.text("x", stop=["a", "b\ud800"]), "stop", "UTF-8 can hold"),
    (lambda s: s.text({1, 2}), "tokens", "session.tokenize"),
    (lambda s: s.prefill({1: 2}), "tokens", "session.tokenize"),
    (lambda s: s.prefill(np.array([[1], [2]])), "tokens", "session.tokenize"),
    (lambda s: s.prefill([float("nan")]), "tokens", "session.tokenize"),
    (lambda s: s.prefill([1], progress=5), "progress", "the tokens done and all"),
    (lambda s: s.feed([1], progress="x"), "progress", "the tokens done and all"),
    (lambda s: s.chat([{"role": "user", "content": "x"}], chat_template_kwargs="x"), "chat_template_kwargs", "by name"),
    (lambda s: s.load_state_bytes(b"????", {0: [1]}, logits=[np.nan] * 260), "logits", "of numbers"),
    (lambda s: s.load_state_bytes(np.zeros(4)[::2]), "state", "bytes"),
    (lambda s: s.save(None), "path", "the path of a file"),
    (lambda s: s.save(b"x"), "path", "the path of a file"),
    (lambda s: s.restore(5), "path", "the path of a file"),
    (lambda s: s.restore("a\0b"), "path", "the path of a file"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def told(work: Callable[[], Any]) -> list[str]:
    """The class, the field and what is wanted of the error that it raised."""
    try:
        work()
    except ConfigInvalid as error:
        return [type(error).__name__, error.field, error.wanted]
    except Exception as error:  # noqa: BLE001 - it goes into the report
        return [type(error).__name__, "", str(error)]
    return ["", "", ""]


def child_wrong(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    with scenes.start(library, model, Scene()) as session:
        before = session.tokens()
        found = [told(lambda call=call: call(session)) for call, _, _ in WRONG]
        is_same = session.tokens() == before
        n_more = len([*session.generate(n=2)])
    opening = [
        told(lambda: Session.open(model, "sideways", library=library)),
        told(lambda: Session.open(model, 5, library=library)),  # type: ignore[arg-type]
        told(lambda: Session.open(model, library=library, weights="fast")),
        told(lambda: Session.open(model, library=library, adapters=["lora.gguf"])),  # type: ignore[list-item]
        told(lambda: Session.open(model, library=library, adapters=[("lora.gguf", "1")])),  # type: ignore[list-item]
        told(lambda: Session.open(None, library=library)),  # type: ignore[arg-type]
        told(lambda: Session.open(model, library="libllama.so")),  # type: ignore[arg-type]
        told(lambda: Session.open(model, library=library, force="no")),  # type: ignore[arg-type]
        told(lambda: Session.open(model, library=library, embeddings=1)),  # type: ignore[arg-type]
        told(lambda: Session.open(model, library=library, progress=5)),  # type: ignore[arg-type]
        told(lambda: Session.open(model, library=library, cancel=5)),  # type: ignore[arg-type]
    ]
    return {"found": found, "same": is_same, "more": n_more, "opening": opening}


def test_wrong_arguments_are_refused_by_name(model: Path) -> None:
    """Of every method, and nothing is touched."""
    told_all = run_child(child_wrong, build(), model).value()
    assert len(told_all["found"]) == len(WRONG)
    for number, ((_, field, wanted), found) in enumerate(zip(WRONG, told_all["found"], strict=True)):
        assert found[0] in {"ConfigInvalid", "PlacementInvalid"}, (number, found)
        assert found[1] == field, (number, found)
        assert wanted in found[2], (number, found)
    assert told_all["same"]
    assert told_all["more"] == 2
    assert [one[:2] for one in told_all["opening"]] == [
        ["PlacementInvalid", "mode"],
        ["ConfigInvalid", "placement"],
        ["ConfigInvalid", "weights"],
        ["ConfigInvalid", "adapters"],
        ["ConfigInvalid", "adapters"],
        ["ConfigInvalid", "model_path"],
        ["ConfigInvalid", "library"],
        ["ConfigInvalid", "force"],
        ["ConfigInvalid", "embeddings"],
        ["ConfigInvalid", "progress"],
        ["ConfigInvalid", "cancel"],
    ]


def child_as_written(path: str, model: str) -> list[Any]:
    with scenes.start(Library.open(path), model, Scene(n_seq=2)) as session:
        tokens = session.tokenize(b"bytes too")
        session.prefill(np.array(tokens, np.int64), np.int32(1))
        session.prefill(tuple(tokens), 0)
        session.advance(np.array([0, 1]))
        status = session.switch(session.placement.changed(mode="tensor"), proof="positions", timeout_s=5)
        return [session.tokens(0)[-len(tokens) - 1 : -1] == tokens, status.status.value]


def test_arguments_are_taken_as_people_write_them(model: Path) -> None:
    """Arrays of numpy, tuples and words."""
    assert run_child(child_as_written, build(), model).value() == [True, "switched"]


def child_closed(path: str, model: str) -> dict[str, list[str]]:
    session = scenes.start(Library.open(path), model, Scene())
    session.close()
    session.close()
    calls: dict[str, Callable[[], Any]] = {
        "model": lambda: session.model,
        "tokenize": lambda: session.tokenize("x"),
        "prefill": lambda: session.prefill([1]),
        "generate": lambda: next(session.generate()),
        "advance": lambda: session.advance((0,)),
        "sequences": session.sequences,
        "state_bytes": session.state_bytes,
        "n_state_bytes": session.n_state_bytes,
        "text": lambda: session.text([1]).read(),
        "feed": lambda: session.feed([1]),
        "embed": lambda: session.embed([[1]]),
        "switch": lambda: session.switch(session.placement),
        "check": lambda: session.check(session.placement),
        "save": lambda: session.save("x"),
        "why_full": lambda: session.why_full(0, 1),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except SplitctlError as error:
            found[name] = [type(error).__name__, str(error)]
        except Exception as error:  # noqa: BLE001 - it goes into the report
            found[name] = [type(error).__name__, str(error)]
    return found


def test_a_closed_session_says_that_it_is_closed(model: Path) -> None:
    """By every method that would need its model."""
    found = run_child(child_closed, build(), model).value()
    assert len(found) == 15
    for name, (kind, said) in found.items():
        assert (kind, said) == ("Parked", "the session is closed; open a new one"), name


def child_numbers_only(path: str, model: str) -> list[str]:
    with Session.open(model, Placement(n_ctx=256, n_threads=1), library=Library.open(path), prober=None) as session:
        found = told(lambda: session.tokenize("x"))
        for work in (lambda: session.model.tokenize("x"), lambda: session.model.piece(5)):
            with pytest.raises(ValueError, match="no tokenizer"):
                work()
        session.prefill([5])
        return [*found, next(session.generate()).piece.decode()]


def test_a_model_that_reads_numbers_only_is_asked_for_no_text() -> None:
    """The library aborts; the session says so, and generates on."""
    ((_, model, why),) = make_many(default_folder(), ["llama"])
    assert isinstance(model, Path), why
    found = run_child(child_numbers_only, library_of(NEWEST), model).value()
    assert found == ["ConfigInvalid", "model", "a model with a tokenizer: this one reads numbers only", ""]
