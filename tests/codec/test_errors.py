from __future__ import annotations

import functools
import gc
import mmap
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statecodec import (
    Ambiguous,
    BadField,
    Inconsistent,
    LimitExceeded,
    ModelFacts,
    NotRepresentable,
    StateCodecError,
    StateFormatError,
    TrailingBytes,
    Truncated,
    UnknownVersion,
    parse,
    salvage,
    transcode,
    validate,
)
from tests.codec.cases import CASES
from tests.codec.goldens import golden

_FORMAT_ERRORS = [Ambiguous, BadField, Inconsistent, LimitExceeded, TrailingBytes, Truncated, UnknownVersion]


@pytest.mark.parametrize("kind", _FORMAT_ERRORS)
def test_a_format_error_says_what_where_found_wanted_and_what_to_do(kind: type[StateFormatError]) -> None:
    """Each class builds one sentence from its four facts and adds its own advice."""
    error = kind(17, "section 0 n_layer", 513, "at most 512")
    assert str(error) == f"section 0 n_layer at byte 17: found 513, expected at most 512. {kind.advice}"
    assert (error.offset, error.field, error.found, error.expected) == (17, "section 0 n_layer", 513, "at most 512")
    assert isinstance(error, StateCodecError)


def test_every_kind_of_damage_gives_its_own_advice() -> None:
    """No two classes tell the user the same thing."""
    assert len({kind.advice for kind in _FORMAT_ERRORS}) == len(_FORMAT_ERRORS)


def test_not_representable_is_no_format_error() -> None:
    """Sound input that a target cannot hold is not called damaged."""
    error = NotRepresentable("V", "absent", "plain V", "Nothing converts it.")
    assert not isinstance(error, StateFormatError)
    assert str(error) == "V: absent cannot be held by plain V. Nothing converts it."
    assert (error.what, error.found, error.wanted, error.action) == error.args


@pytest.mark.parametrize("error", [Truncated(1, "a", 2, 3), NotRepresentable("a", "b", "c", "d")])
def test_errors_survive_a_pipe_between_processes(error: StateCodecError) -> None:
    """A worker can send an error to its supervisor."""
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy)) == (type(error), str(error))


@pytest.fixture
def _without_collector() -> Iterator[None]:
    """What goes here goes by its references alone."""
    gc.disable()
    yield
    gc.enable()


def caught(call: Callable[[], object]) -> StateCodecError:
    """The error of a call, as a report keeps it."""
    try:
        call()
    except StateCodecError as error:
        # The error holds this frame.
        del call
        return error
    raise AssertionError("nothing was refused")


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("name", CASES)
def test_what_was_read_lets_its_buffer_go(name: str) -> None:
    """A buffer can be resized as soon as the image, or all but the error, is gone, without a collection."""
    for data in (CASES[name].data, CASES[name].data[:-1], CASES[name].data + bytes(3), b"GGUF" + bytes(9)):
        buffer = bytearray(data)
        kept: list[StateFormatError | None] = []
        for read in (parse, salvage):
            try:
                found = read(buffer)
            except StateFormatError as error:
                kept.append(error)
            else:
                kept.append(getattr(found, "damage", None))
                del found
        buffer.append(0)


@pytest.mark.usefixtures("_without_collector")
def test_a_mapping_can_be_closed_in_the_handler(tmp_path: Path) -> None:
    """While the error of a damaged file is being handled its mapping is no longer in use, nor later by its report."""
    path = tmp_path / "cut"
    path.write_bytes(golden("x11549-dense")[:-3])
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        parse(mapped)
    except Truncated as error:
        mapped.close()
        kept = error
    assert kept.__context__ is None


class Failed(Exception):
    """A call that was refused, with what its frames hold."""


def fail() -> None:
    """Be refused."""
    raise Failed


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("cut", [0, 1])
def test_reading_in_a_handler_keeps_nothing_of_what_is_handled(cut: int) -> None:
    """A failure whose handler reads the state, soundly or not, goes with its frames when the handler ends."""
    data = golden("x11549-dense")
    seen: list[weakref.ref[Failed]] = []
    told: list[object] = []
    try:
        fail()
    except Failed as failure:
        seen.append(weakref.ref(failure))
        told.append(salvage(data[: len(data) - cut]))
    assert seen[0]() is None
    assert told


@pytest.mark.usefixtures("_without_collector")
def test_a_refused_change_keeps_no_image() -> None:
    """The error of a change or a check, kept in a report, holds neither the image nor its buffer."""
    buffer = bytearray(CASES["recurrent"].data)
    image = parse(buffer)
    kept = [
        caught(functools.partial(transcode.keep_first, image, 1)),
        caught(functools.partial(transcode.extract, image, 7)),
        caught(functools.partial(validate, image, ModelFacts(sections=()))),
    ]
    assert all(error.__context__ is None for error in kept)
    del image
    buffer.append(0)
