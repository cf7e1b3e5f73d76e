"""The library's log: a bounded tail, whole lines, listeners, and what a failed call said."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from llama_native import CallFailed, Library, LogTail, Model, ModelParams
from llama_native.logs import LEVEL_CONTINUES
from tests.native.real import NEWEST, library_of
from tests.stublib import run_child

INFO = 2


def test_pieces_become_lines() -> None:
    """A line may come in pieces, several in one piece; blank ones are dropped, an unfinished one is shown."""
    log = LogTail()
    for level, text in (
        (INFO, "one "),
        (LEVEL_CONTINUES, "line\n"),
        (INFO, "two\n\nthree\nfo"),
        (LEVEL_CONTINUES, "ur"),
    ):
        log.feed(level, text)
    assert log.tail() == ("one line", "two", "three", "four")
    assert log.tail(2) == ("three", "four")


def test_the_tail_is_bounded() -> None:
    """The oldest lines go."""
    log = LogTail(n_lines=3)
    for number in range(10):
        log.feed(INFO, f"{number}\n")
    assert log.tail(100) == ("7", "8", "9")


def test_what_a_call_said_is_told_from_what_came_before() -> None:
    """Also where nothing was said, or more than the tail holds."""
    log = LogTail(n_lines=3)
    log.feed(INFO, "before\n")
    log.begin_call()
    assert log.said() == ()
    log.feed(INFO, "within\nopen")
    assert log.said() == ("within", "open")
    log.feed(LEVEL_CONTINUES, " end\n")
    log.begin_call()
    for number in range(5):
        log.feed(INFO, f"{number}\n")
    assert log.said() == ("2", "3", "4")
    assert log.said(1) == ("4",)


def test_listeners_hear_every_message_until_they_stop() -> None:
    """Two listeners, one of which stops, twice."""
    log = LogTail()
    one: list[str] = []
    two: list[str] = []
    stop = log.listen(lambda _, text: one.append(text))
    log.listen(lambda _, text: two.append(text))
    log.feed(INFO, "a\n")
    stop()
    stop()
    log.feed(INFO, "b\n")
    assert one == ["a\n"]
    assert two == ["a\n", "b\n"]


def test_threads_may_log_at_once() -> None:
    """No message is lost, no line is torn."""
    log = LogTail(n_lines=10_000)

    def say(name: str) -> None:
        for number in range(500):
            log.feed(INFO, f"{name} {number}\n")

    threads = [threading.Thread(target=say, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(log.tail(10_000)) == sorted(f"{name} {number}" for name in "abcd" for number in range(500))


def child_real(path: str, wrong: str) -> dict[str, Any]:
    library = Library.open(path)
    heard: list[str] = []
    stop = library.log.listen(lambda _, text: heard.append(text))
    with pytest.raises(CallFailed) as error:
        Model.load(library, wrong, ModelParams())
    stop()
    return {"tail": error.value.log_tail, "heard": "".join(heard), "message": str(error.value)}


@pytest.mark.build
def test_a_real_failure_carries_the_librarys_words(tmp_path: Path) -> None:
    """What the library logged during the call is in the error, and listeners heard it."""
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF" + bytes(60))
    found = run_child(child_real, library_of(NEWEST), wrong).value()
    assert found["tail"]
    for line in found["tail"]:
        assert line.strip() in found["heard"]
    assert found["tail"][-1].strip() in found["message"]


class _Freed:
    """Stands for a context that the collector frees: the library logs it on the same thread."""

    def __init__(self, log: LogTail) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.feed(INFO, "freed\n")

    def __call__(self, _level: int, _text: str) -> None:
        """Listen."""


def test_a_collector_that_runs_inside_may_free_what_logs() -> None:
    """The list of lines, or of listeners, is in hand while the library says more on the same thread."""
    log = LogTail()

    def work() -> None:
        log.listen(_Freed(log))()
        log._listeners.append(_Freed(log))
        with log._lock:
            log._listeners.clear()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert log.tail() == ("freed", "freed")
