"""What a session is made of, put together: facts, checks, and a model placed with its context."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llama_native import Library
from splitctl.engine.engine import Engine, LoadedAdapter, check_adapters, resolve_threads
from splitctl.engine.live import CancelFlag, LiveSession
from splitctl.errors import Refused
from splitctl.ipc.probes import Prober as Trials
from splitctl.ipc.probes import verdicts_file
from splitctl.model.facts import read_facts
from splitctl.model.identity import FileIdentity
from splitctl.placement import SplitMode
from splitctl.probing import VerdictCache
from splitctl.probing.free_memory import FreeMemoryCheck
from splitctl.session.storage import Storage
from splitctl.switching.checking import Checker
from splitctl.switching.tiers import Tiers

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from splitctl.carry.arena import Arenas
    from splitctl.outcome import WeightsTier
    from splitctl.placement import Placement
    from splitctl.switching.checking import Prober


def trials_of(library: Library, env: Mapping[str, str], is_cancelled: Callable[[], bool]) -> Trials:
    """Return what tries placements in child processes, with an environment, and keeps verdicts in the cache folder."""
    return Trials(
        library=library.path,
        env=env,
        cache=VerdictCache(verdicts_file()),
        device_names=tuple(device.name for device in library.devices(memory=False)),
        rpc=library.rpc_servers,
        is_cancelled=is_cancelled,
    )


def open_parts(
    model_path: str,
    placement: Placement,
    library: Library | None,
    adapters: Sequence[LoadedAdapter],
    *,
    embeddings: bool,
    prober: Prober | Literal["auto"] | None,
    cancel: threading.Event | None,
    progress: Callable[[float], None] | None,
    force: bool,
    arenas: Arenas | None,
    on_tick: Callable[[], None] | None,
    files: Sequence[FileIdentity],
    weights: WeightsTier,
) -> tuple[LiveSession, Checker, Storage]:
    """Load a model and open a context; arguments and errors are those of `Session.open`."""
    # It is loaded again after the program may have gone to another folder.
    model_path = str(Path(model_path).absolute())
    adapters = [dataclasses.replace(one, path=str(Path(one.path).absolute())) for one in adapters]
    facts = read_facts(model_path)
    library = library or Library.open(env=dict(os.environ))
    headers = (*facts.headers, *check_adapters(adapters))
    wanted = resolve_threads(placement)
    flag = CancelFlag(cancel)
    if prober == "auto":
        prober = trials_of(library, dict(os.environ), flag.is_set)
        if library.rpc_servers:
            # A server serves one client at a time: once our model lies on it, a trial in a child gets no answer.
            prober(facts.path, wanted.changed(mode=SplitMode.TENSOR), facts)
    memory = FreeMemoryCheck(library, facts)
    tiers = Tiers(lambda now, target: memory.beside(now, target, same_process=True).reason)
    checker = Checker(library, facts, prober, memory, tiers)
    reasons = checker.opening(wanted, n_adapters=len(adapters), force=force)
    if reasons:
        raise Refused(reasons)
    engine = Engine(
        library,
        model_path,
        adapters,
        files=files or [FileIdentity.of(header) for header in headers],
        embeddings=embeddings or facts.is_encoder_only,
        is_cancelled=flag.is_set,
        on_tick=on_tick,
        weights=weights,
    )
    try:
        engine.place(wanted, progress)
        live = LiveSession(engine, facts, engine.build(wanted), flag, arenas)
        return live, checker, Storage(live)
    except BaseException:
        engine.free()
        raise
