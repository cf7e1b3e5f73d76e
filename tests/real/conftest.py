"""Tests on one real build, run by tests/ctl/real_builds.py in a child for each build.

By hand: SPLITCTL_TEST_LIBRARY=/path/to/libllama.so python -m pytest tests/real
With SPLITCTL_TEST_RPC=HOST:PORT,HOST:PORT (tools.rpc_server) the devices are those of the servers; else one
processor, named twice. SPLITCTL_TEST_VIA says who does the work of the switches that name no route: composed, or native
wherever the library's own call can do it; without it, what the session takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl import FlashAttn, Placement, SamplerSpec, Session, SplitMode, SwitchOutcome
from splitctl.ipc.probes import Prober
from splitctl.model.facts import read_facts
from splitctl.outcome import Route, WeightsTier
from splitctl.placement import FLAGS
from splitctl.probing import VerdictCache
from splitctl.session.arguments import target_of
from splitctl.switching.own_call import BY_THE_CALL
from splitctl.switching.switcher import complete
from tests.ctl import one_kv_head
from tools.make_dummies import make_many
from tools.places import default_folder

RPC = tuple(filter(None, os.environ.get("SPLITCTL_TEST_RPC", "").split(",")))
VIA = Route(os.environ.get("SPLITCTL_TEST_VIA", Route.AUTO.value))
DEVICES = tuple(f"RPC{index}" for index in range(len(RPC))) or ("CPU", "CPU")
PROMPT = "Once upon a time there was a little girl who lived near the sea. Every morning she"
SEEDED = SamplerSpec(temp=0.9, top_k=40, top_p=0.95, min_p=0.02, repeat_penalty=1.1, seed=7)


@pytest.fixture(scope="session")
def library() -> Library:
    """The build under test, with the devices under test."""
    library = Library.open(os.environ["SPLITCTL_TEST_LIBRARY"])
    assert len(library.add_rpc_servers(RPC)) == len(RPC)
    return library


@pytest.fixture(scope="session", autouse=True)
def _by_the_route_under_test(library: Library) -> Iterator[None]:
    """Let switches that name no route go by the one under test; native is an error where it cannot be, but should."""
    assert VIA is not Route.NATIVE or library.has("native-switch")
    switch = Session.switch

    def routed(session: Session, target: Placement | str | None = None, **named: Any) -> SwitchOutcome:
        changes = {name: value for name, value in named.items() if name in FLAGS}
        wanted = target_of(target, changes, session.placement)
        return switch(session, target, **{"via": _route_of(session, wanted), **named})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "switch", routed)
        yield


def _route_of(session: Session, target: Placement) -> Route:
    engine = session._live.engine
    if VIA is not Route.NATIVE:
        return VIA
    changed = set(session.placement.differs(complete(target, session.placement)))
    is_for_it = engine.weights is WeightsTier.FILE and not engine.adapters and changed <= BY_THE_CALL
    return Route.NATIVE if is_for_it else Route.AUTO


@pytest.fixture(scope="session")
def own_call(library: Library) -> None:
    """Skips what needs a build that switches by itself."""
    if not library.has("native-switch"):
        pytest.skip(f"{library.path} has no call of its own for a switch (ci/builds --native makes one that has)")


@pytest.fixture(scope="session")
def prober(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Prober:
    """Tries placements in children, and remembers them for this run only."""
    cache = VerdictCache(tmp_path_factory.mktemp("probes") / "probes.json")
    return Prober(library.path, dict(os.environ), cache, rpc=RPC)


@pytest.fixture(scope="session")
def other_mode(library: Library, prober: Prober, smollm2: Path) -> SplitMode:
    """A mode other than layer that this build can do on the two devices: tensor where it can, else none.

    Session-wide and asked first of all: an RPC server that serves this process answers no child.
    """
    placement = base(mode=SplitMode.TENSOR, flash="on")
    verdict = prober(smollm2, placement, read_facts(smollm2))
    return SplitMode.TENSOR if verdict.verdict.value == "ok" else SplitMode.NONE


@pytest.fixture(scope="session", autouse=True)
def _tried_first(other_mode: SplitMode) -> None:
    """See `other_mode`."""


@pytest.fixture(scope="session")
def straight(library: Library, smollm2: Path) -> tuple[int, ...]:
    """30 seeded tokens after the prompt, of a session that never switches: what every session that does is held to."""
    with Session.open(smollm2, base(), library=library, prober=None) as session:
        session.prefill(session.tokenize(PROMPT))
        return tuple(token.id for token in session.generate(n=30, sampler=SEEDED))


def base(*, mode: SplitMode = SplitMode.LAYER, flash: str = "auto", **named: object) -> Placement:
    """A small placement on two virtual devices."""
    fields: dict[str, object] = {
        "mode": mode,
        "devices": DEVICES,
        "n_ctx": 256,
        "n_batch": 64,
        "n_ubatch": 64,
        # Two threads that spin for each other take minutes where the machine has other work.
        "n_threads": 1,
        "flash_attn": FlashAttn(flash),
    }
    return Placement(**{**fields, **named})  # type: ignore[arg-type]


Opener = Callable[..., Session]

SMALL_PROMPT = [5, 9, 2, 7, 11, 3, 8, 1, 6, 4, 10, 12, 15, 13]
"""Tokens for `open_small`, whose model has no words."""


@pytest.fixture(scope="session")
def small_model() -> Path:
    """A llama with small random weights, for what does not depend on the model: it loads and decodes at once."""
    ((_, path, why),) = make_many(default_folder(), ["llama"])
    assert path is not None, why
    return path


@pytest.fixture(scope="session")
def words_model(smollm2: Path) -> Path:
    """A llama with small random weights and the real model's tokenizer and chat template."""
    return one_kv_head.made(smollm2)


@pytest.fixture
def open_session(library: Library, smollm2: Path) -> Iterator[Opener]:
    """Opens sessions that are closed at the end of the test."""
    with _opener(library, smollm2) as opener:
        yield opener


@pytest.fixture
def open_small(library: Library, small_model: Path) -> Iterator[Opener]:
    """Opens sessions on the small model that are closed at the end of the test."""
    with _opener(library, small_model) as opener:
        yield opener


@contextmanager
def _opener(library: Library, model: Path) -> Iterator[Opener]:
    with ExitStack() as opened:

        def opener(placement: Placement | None = None, **named: object) -> Session:
            more: dict[str, Any] = {"library": library, "prober": None, **named}
            session = Session.open(model, placement or base(), **more)
            return opened.enter_context(session)

        yield opener
