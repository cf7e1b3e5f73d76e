"""Tests on one real build: run by tests/ctl/test_real_builds.py in a child for each (one library a process).

By hand: SPLITCTL_TEST_LIBRARY=/path/to/libllama.so python -m pytest tests/real
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_native import Library
from splitctl import Placement, Session, SplitMode
from splitctl.host.probes import Prober

DEVICES = ("CPU", "CPU")
PROMPT = "Once upon a time there was a little girl who lived near the sea. Every morning she"


@pytest.fixture(scope="session")
def library() -> Library:
    """The build under test."""
    return Library.open(os.environ["SPLITCTL_TEST_LIBRARY"])


@pytest.fixture(scope="session")
def prober(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Prober:
    """Tries placements in children, and remembers them for this run only."""
    from splitctl.probing import VerdictCache

    cache = VerdictCache(tmp_path_factory.mktemp("probes") / "probes.json")
    return Prober(library.path, dict(os.environ), cache)


@pytest.fixture(scope="session")
def other_mode(library: Library, prober: Prober, smollm2: Path) -> SplitMode:
    """A mode other than layer that this build can do on two processors: tensor where it can, else none."""
    from splitctl.facts import read_facts

    placement = base(mode=SplitMode.TENSOR, flash="on")
    verdict = prober(smollm2, placement, read_facts(smollm2))
    return SplitMode.TENSOR if verdict.verdict.value == "ok" else SplitMode.NONE


def base(*, mode: SplitMode = SplitMode.LAYER, flash: str = "auto", **named: object) -> Placement:
    """A small placement on two virtual devices."""
    from splitctl import FlashAttn

    fields: dict[str, object] = {
        "mode": mode,
        "devices": DEVICES,
        "n_ctx": 256,
        "n_batch": 64,
        "n_ubatch": 64,
        "n_threads": 2,
        "flash_attn": FlashAttn(flash),
    }
    return Placement(**{**fields, **named})  # type: ignore[arg-type]


Opener = Callable[..., Session]


@pytest.fixture
def open_session(library: Library, smollm2: Path) -> Iterator[Opener]:
    """Opens sessions that are closed at the end of the test."""
    opened: list[Session] = []

    def opener(placement: Placement | None = None, **named: object) -> Session:
        session = Session.open(smollm2, placement or base(), library=library, **named)  # type: ignore[arg-type]
        opened.append(session)
        return session

    yield opener
    for session in opened:
        session.close()
