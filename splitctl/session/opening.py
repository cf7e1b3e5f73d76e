"""What a session is made of, put together: facts, checks, and a model placed with its context."""

from __future__ import annotations

import dataclasses
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llama_native import Library, pin
from splitctl.engine.engine import Engine, LoadedAdapter, check_adapters, resolve_threads
from splitctl.engine.host_copy import HostCopy
from splitctl.engine.live import CancelFlag, LiveSession
from splitctl.errors import FileChanged, Refused
from splitctl.ipc.probes import Prober as Trials
from splitctl.ipc.probes import verdicts_file
from splitctl.model.facts import read_facts
from splitctl.model.identity import FileIdentity
from splitctl.outcome import WeightsTier
from splitctl.placement import SplitMode
from splitctl.probing import VerdictCache
from splitctl.probing.free_memory import FreeMemoryCheck
from splitctl.session.storage import Storage
from splitctl.switching.checking import Checker
from splitctl.switching.own_call import OwnCall
from splitctl.switching.tiers import Tiers

if TYPE_CHECKING:
    import mmap
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from llama_native import Pin
    from splitctl.carry.arena import Arenas
    from splitctl.model.facts import ModelFacts
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
    copy: HostCopy | None,
) -> tuple[LiveSession, Checker, Storage]:
    """Load a model and open a context; arguments and errors are those of `Session.open`."""
    # It is loaded again after the program may have gone to another folder.
    model_path = str(Path(model_path).absolute())
    adapters = [dataclasses.replace(one, path=str(Path(one.path).absolute())) for one in adapters]
    facts = standing_facts(model_path, files, len(adapters), copy)
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
    if weights in {WeightsTier.PINNED, WeightsTier.AUTO}:
        copy = copy or HostCopy()
    trials = prober

    def why_no_copy(placement: Placement, known_only: bool) -> str:  # noqa: FBT001 - by position, as it is declared
        if trials is None:  # nothing is tried, and everything taken for sound
            return ""
        if isinstance(trials, Trials):
            return trials.why_no_copy(placement, facts, known_only=known_only)
        return "nobody has compared it with a load from the file"

    def why_no_own_call(now: Placement, target: Placement, known_only: bool) -> str:  # noqa: FBT001 - likewise
        if trials is None:
            return ""
        if isinstance(trials, Trials):
            return trials.why_no_own_call(now, target, facts, known_only=known_only)
        return "nobody has tried the library's own call"

    tiers = Tiers(lambda now, target: memory.beside(now, target, same_process=True).reason, why_no_copy)
    checker = Checker(library, facts, prober, memory, tiers, OwnCall(why_no_own_call))
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
        copy=copy,
    )
    model_files = engine.files[: len(engine.files) - len(adapters)]
    try:
        tier = WeightsTier.FILE
        known_only = True
        if copy is not None and copy.is_of(model_files):
            copy.start(model_files)
            tier = WeightsTier.FILE if copy.why or why_no_copy(wanted, known_only) else WeightsTier.PINNED
        engine.place(wanted, progress, tier=tier)
        live = LiveSession(engine, facts, engine.build(wanted), flag, arenas)
        if copy is not None:
            if not copy.share:
                copy.start(model_files)
            copy.pin(_pinning(weakref.ref(live)))
        return live, checker, Storage(live)
    except BaseException:
        engine.close()
        raise


def standing_facts(
    model_path: str, files: Sequence[FileIdentity], n_adapters: int, copy: HostCopy | None
) -> ModelFacts:
    """Read the facts of a model; a complete copy stands in for files that are gone or replaced.

    Args:
        model_path: where the model was.
        files: what it and its adapters were; empty: whatever lies there.
        n_adapters: how many of them are adapters.
        copy: a copy, perhaps.

    Raises:
        FileChanged: a file is not what it was, and nothing stands in for it.
        BadModelFile: there is none, and it was never another.
    """
    model_files = files[: len(files) - n_adapters]
    for one in files:
        try:
            one.confirmed()
        except FileChanged:
            if one not in model_files or copy is None or not copy.is_of(model_files):
                raise
            return copy.facts(Path(model_path), model_files)
    return read_facts(model_path)


def _pinning(of: weakref.ref[LiveSession]) -> Callable[[mmap.mmap], Pin | str]:
    """Return what pins the copy of a session, which may be dropped meanwhile; never while something is placed."""

    def hold(block: mmap.mmap) -> Pin | str:
        live = of()
        if live is None:
            return "the session is gone"
        with live.placing:
            return pin(live.engine.library, live.placement.devices, block)

    return hold
