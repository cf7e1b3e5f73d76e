from __future__ import annotations

import pickle

import pytest

from statecodec import (
    Ambiguous,
    BadField,
    Inconsistent,
    LimitExceeded,
    NotRepresentable,
    StateCodecError,
    StateFormatError,
    TrailingBytes,
    Truncated,
    UnknownVersion,
)

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
