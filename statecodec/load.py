"""Opens a file that holds a state, of whichever form: the one module here that touches a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from statecodec.carried import carried
from statecodec.errors import raises_bare
from statecodec.facts import ModelFacts
from statecodec.image import StateImage
from statecodec.limits import DEFAULT_LIMITS, Limits
from statecodec.parse import parse

if TYPE_CHECKING:
    from os import PathLike


@raises_bare
def load(path: str | PathLike[str], *, facts: ModelFacts | None = None, limits: Limits = DEFAULT_LIMITS) -> StateImage:
    """Read a state from a file: a blob, a session, sequence or slot file, or a carry of splitctl.

    The file is mapped, so its size costs no memory. Nobody may make it shorter meanwhile: the process would end by a
    signal.

    Args:
        path: a regular file.
        facts: what is known of the model and context; narrows the readings and is checked.
        limits: upper bounds.

    Returns:
        The state. Of a carry it is the state in it, without any section where tokens alone were saved; `carried` gives
            its tokens and the rest.

    Raises:
        StateFormatError: the file holds no sound state; checksums of a carry are not looked at.
        OSError: it cannot be opened or mapped.

    Lifetime:
        The image keeps the file mapped, and nothing else does.
    """
    data = _mapped(path)
    carry = carried(data, limits)
    if carry is None:
        return parse(data, facts=facts, limits=limits)
    if not carry.state:
        facts = ModelFacts(sections=())
    return parse(carry.state, facts=facts, limits=limits)


def _mapped(path: str | PathLike[str]) -> memoryview:
    try:
        return memoryview(np.memmap(path, dtype=np.uint8, mode="r").data)
    except OSError:  # that of a pipe, which has no end to seek, is a ValueError too
        raise
    except ValueError:
        # An empty file cannot be mapped.
        return memoryview(b"")
