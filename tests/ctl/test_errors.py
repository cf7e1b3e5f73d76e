"""The errors of splitctl: each says what, where, found, wanted and what to do, and crosses a process boundary whole."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

from splitctl import errors
from splitctl.errors import Difference, Reason, SplitctlError

SAMPLES: list[tuple[SplitctlError, str]] = [
    (
        errors.Refused([Reason("alibi", "tensor mode cannot do ALiBi"), Reason("no-host-memory", "2 GiB short")]),
        "refused, nothing was touched: tensor mode cannot do ALiBi [alibi]; 2 GiB short [no-host-memory]",
    ),
    (errors.Busy("a switch to tensor"), "the session is busy with a switch to tensor; try again when it has ended"),
    (
        errors.WorkerLost(7, "killed by SIGABRT", ["1", "2", " out of memory ", "GGML_ASSERT"]),
        "worker 7 was lost (killed by SIGABRT); it said last: 2 | out of memory | GGML_ASSERT",
    ),
    (errors.WorkerLost(7, "exit status 1", ()), "worker 7 was lost (exit status 1); it said nothing"),
    (errors.DeadlineExceeded("the token boundary", 2.5), "the token boundary did not come within 2.5 s;"),
    (errors.ConfigInvalid("top_p", 7, "0 to 1"), "top_p is 7; wanted: 0 to 1"),
    (errors.Cancelled("a decode"), "a decode was cancelled"),
    (
        errors.ContextFull(500, 20, 512),
        "it holds 500 tokens, 20 more make 520, and n_ctx is 512; give a larger one (-c 520",
    ),
    (errors.Parked(None), "the session is closed; open a new one"),
    (errors.Parked(Path("/x")), "the session is parked at /x; open a session and restore it from there"),
    (errors.CarryMismatch([Difference("n_vocab", "1", "2")]), "n_vocab: carry 1, session 2;"),
    (errors.CarryDamaged(Path("/x"), "it ends early"), "/x cannot be used as a carry: it ends early;"),
    (errors.CarryDamaged(None, "it ends early"), "the carry in memory cannot be used"),
    (errors.StateUnsound("no cells"), "no cells"),
    (errors.TrialFailed("no numbers"), "the first decode after the switch failed: no numbers"),
    (errors.CannotConvert("no type"), "the carry cannot be converted for the target: no type"),
    (
        errors.FileChanged(Path("/m"), "it is gone"),
        "/m: the file changed since the session opened: it is gone; put the same file back",
    ),
    (errors.AdapterInvalid(Path("/a"), "it is empty"), "adapter /a cannot be used: it is empty; give a LoRA file"),
    (
        errors.CarryNotWritten(Path("/x"), "No space left on device"),
        "could not be saved as /x: No space left on device",
    ),
    (
        errors.BadModelFile(Path("/m"), errors.ModelFileFault.EMPTY, "0 bytes", "download it again"),
        "model file /m is empty: 0 bytes; download it again",
    ),
]


@pytest.mark.parametrize(("error", "said"), SAMPLES, ids=lambda one: type(one).__name__)
def test_the_message_is_built_from_the_fields(error: SplitctlError, said: str) -> None:
    """One line that says what and what to do."""
    assert said in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("error", "_"), SAMPLES, ids=lambda one: type(one).__name__)
def test_an_error_crosses_a_process_boundary(error: SplitctlError, _: str) -> None:
    """Class, message and fields survive pickling."""
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert (type(back), str(back), back.__dict__) == (type(error), str(error), error.__dict__)


def test_every_error_has_the_one_root_and_the_root_is_abstract() -> None:
    """Whoever embeds a session catches one class; nobody can raise it by itself."""
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, Exception)]
    assert len(classes) >= 10
    assert all(issubclass(one, SplitctlError) for one in classes)
    assert {type(error) for error, _ in SAMPLES} == set(classes) - {SplitctlError}, "every class has a sample here"
    with pytest.raises(TypeError, match="abstract"):
        raise SplitctlError


@pytest.mark.parametrize("make", [errors.Refused, errors.CarryMismatch])
def test_a_refusal_without_a_reason_cannot_be_made(make: type[SplitctlError]) -> None:
    """Somebody would have to act on it."""
    with pytest.raises(ValueError, match="needs a"):
        make(())
