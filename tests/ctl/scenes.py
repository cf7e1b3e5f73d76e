"""Scenes for tests with the stub library, played in a child: a session in some placement, a fault, a switch, the end.

A scene generates some tokens, switches with the faults in place, generates as many again and closes. What it tells is
plain JSON: the outcome, the tokens of every sequence, the calls that the library saw, what was left alive.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llama_native import CallFailed, Library
from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import Parked
from splitctl.outcome import Proof, Stage, WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.session import Session
from tests.stublib import Stub

N_TOKENS = 5
PROMPTS = ("the quick brown fox", "jumps", "over the lazy dog again and again", "x")


@dataclass(frozen=True, slots=True)
class Scene:
    """What is played.

    Args:
        faults: asked of the stub after the session has begun to generate; their turns count from there.
        start: the mode that the session opens in.
        target: the mode that it is switched to.
        n_seq: sequences that hold something.
        unified: one buffer of cells for all of them.
        proof: how the restore is proved.
        cancel_at: the stage whose start sets the cancel flag, "" for none.
        change: further fields of the target placement.
        adapters: adapter files, all at scale 0.5.
        trial: whether tokens are generated after the switch.
        weights: where switches take the weights from.
    """

    faults: str = ""
    start: str = "layer"
    target: str = "tensor"
    n_seq: int = 1
    unified: bool = False
    proof: str = "bytes"
    cancel_at: str = ""
    change: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    trial: bool = True
    weights: str = "file"

    def placement(self) -> Placement:
        """Where the session opens: two devices, room for every sequence, nothing left to the library."""
        return Placement(
            mode=SplitMode(self.start),
            devices=("STUB0", "STUB1"),
            n_ctx=1024,
            n_batch=16,
            n_ubatch=16,
            n_seq_max=self.n_seq,
            kv_unified=self.unified,
            flash_attn=FlashAttn.ON,
            n_threads=1,
            n_threads_batch=1,
        )


def spec(seq_id: int) -> SamplerSpec:
    """A seeded sampler with a penalty window, another one for each sequence."""
    return SamplerSpec(temp=0.9, top_k=20, repeat_penalty=1.3, repeat_last_n=8, seed=100 + seq_id)


def start(library: Library, model: str, scene: Scene, cancel: threading.Event | None = None) -> Session:
    """Open a session and read the prompts."""
    session = Session.open(
        model,
        scene.placement(),
        library=library,
        adapters=[(a, 0.5) for a in scene.adapters],
        prober=None,
        cancel=cancel,
        weights=WeightsTier(scene.weights),
    )
    for seq_id in range(scene.n_seq):
        session.set_sampler(spec(seq_id), seq_id)
        session.prefill(session.tokenize(PROMPTS[seq_id]), seq_id)
    return session


def generate(session: Session, n_seq: int, n: int = N_TOKENS) -> None:
    """Generate n tokens of every sequence, all in one batch a step."""
    for _ in range(n):
        session.advance(range(n_seq))


def straight(library: Library, model: str, scene: Scene) -> list[list[int]]:
    """The tokens of every sequence when nothing is ever switched."""
    with start(library, model, replace(scene, faults="")) as session:
        generate(session, scene.n_seq, 2 * N_TOKENS)
        return [session.tokens(seq_id) for seq_id in range(scene.n_seq)]


def play(library: Library, stub: Stub, model: str, scene: Scene) -> dict[str, Any]:
    """Play a scene.

    Returns:
        status, stage, reason, effective, requested, recomputed, confirmed, via and the codes of the reasons; tokens
        (as they are, and as they would be without a switch); calls between the order to switch and the close; live
        objects and mistakes at the end; whether it parked; the error of a decode that failed in both modes.
    """
    stub.faults("clear")
    wanted = straight(library, model, scene)
    cancel = threading.Event()
    session = start(library, model, scene, cancel)
    generate(session, scene.n_seq)
    stub.reset()
    if scene.faults:
        stub.faults(scene.faults)

    def progress(stage: Stage, _share: float) -> None:
        if stage.value == scene.cancel_at:
            cancel.set()

    target = session.placement.changed(mode=SplitMode(scene.target), **scene.change)
    first = session.switch(target, proof=Proof(scene.proof), progress=progress)
    at_switch = stub.calls()
    cancel.clear()
    parked, error = False, ""
    try:
        if scene.trial:
            generate(session, scene.n_seq)
    except Parked:
        parked = True
    except CallFailed as failure:
        # The library decodes nowhere any more; when it does again the same call goes on where it was.
        error = str(failure)
        stub.faults("clear")
        generate(session, scene.n_seq)
    calls = stub.calls()
    outcome = session.last_switch or first
    tokens = [session.tokens(seq_id) for seq_id in range(scene.n_seq)]
    at = str(session.parked_at) if session.parked_at else ""
    placement = session.placement
    session.close()
    stub.faults("clear")
    return {
        "first": first.status.value,
        "status": outcome.status.value,
        "stage": outcome.stage.value if outcome.stage else None,
        "reason": outcome.reason,
        "codes": [reason.code for reason in outcome.reasons],
        "requested": outcome.requested.value,
        "effective": outcome.effective.value if outcome.effective else None,
        "in_placement": placement == (outcome.effective_placement or placement),
        "recomputed": outcome.recomputed,
        "confirmed": outcome.confirmed,
        "via": outcome.via.value,
        "json": outcome.to_json(),
        "tokens": tokens,
        "wanted": wanted,
        "at_switch": [asdict(call) for call in at_switch],
        "calls": [asdict(call) for call in calls],
        "live": stub.live(),
        "mistakes": stub.mistakes(),
        "parked": parked,
        "error": error,
        "parked_at": at,
    }


def play_all(path: str, model: str, scenes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play many scenes on one library, each in a session of its own.

    Args:
        path: the stub.
        model: a model file.
        scenes: fields of `Scene` by name.
    """
    library = Library.open(path)
    stub = Stub(path)
    return [play(library, stub, model, Scene(**{**one, "adapters": tuple(one.get("adapters", ()))})) for one in scenes]


def names(calls: list[dict[str, Any]]) -> list[str]:
    """The names of calls, without what is only bookkeeping."""
    return [call["name"] for call in calls if call["name"] not in {"fault", "llama_sampler_init", "llama_log_set"}]
