"""Any order of calls on a session with any fault at any command: it serves or is parked, and nothing is lost or left.

A shadow session on the same stub library gets the same calls but is never switched and meets no fault. After every
step both hold the same tokens; whatever is parked goes on in a new session. Hypothesis looks for an order that breaks
it, in a child (one library a process).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from llama_native import CallFailed, Library
from splitctl.errors import Cancelled, Parked
from splitctl.outcome import Proof, Stage, SwitchStatus, WeightsTier
from splitctl.placement import SplitMode
from splitctl.session import Session
from splitctl.switching.machine import RESTING
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.stublib import Stub, Variant, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

N_SEQ = 3
SEQ = st.integers(0, N_SEQ - 1)
MODES = st.sampled_from([*[SplitMode.NONE, SplitMode.LAYER, SplitMode.TENSOR] * 3, SplitMode.ROW])
_CALLS = ("load", "init", "set_data", "get_data", "get_size", "decode", "native")
_ACTIONS = {
    "load": ("null",),
    "init": ("null",),
    "set_data": ("zero", "short", "lie", "flip"),
    "get_data": ("zero", "short", "damage", "flip", "damage=17"),
    "get_size": ("zero",),
    "decode": ("fail", "nan", "const"),
    "native": ("fail", "spoil", "state"),
}
FAULT = st.sampled_from(_CALLS).flatmap(
    lambda call: st.builds(
        lambda action, turn, onward: f"{call}:{action}@{turn}{'+' if onward else ''}",
        st.sampled_from(_ACTIONS[call]),
        st.integers(1, 3),
        st.booleans(),
    )
)
FAULTS = st.lists(FAULT, max_size=3).map(" ".join)
TRIAL_FAULTS = st.sampled_from(
    [
        "",
        "",
        "decode:fail@1",
        "decode:nan@1",
        "decode:const@1",
        "decode:fail@1 load:null@1",
        "decode:nan@1 init:null@1",
        "decode:nan@1 set_data:lie@1",
        "decode:const@1 load:null",
        "decode:fail@1 init:null",
    ]
)
CANCEL = st.sampled_from(["", "", "", *(stage.value for stage in Stage)])


class SessionMachine(RuleBasedStateMachine):
    """Calls on a session and its shadow."""

    library: Library
    stub: Stub
    model: str
    scene: Scene

    def __init__(self) -> None:
        super().__init__()
        self.stub.faults("clear")
        self.stub.reset()
        self.before = self.stub.live()
        self.cancel = threading.Event()
        self.session = self.opened()
        self.shadow = self.opened()
        self.seeds = 0

    def opened(self) -> Session:
        """A session of its own."""
        return Session.open(
            self.model,
            self.scene.placement(),
            library=self.library,
            prober=None,
            cancel=self.cancel,
            weights=WeightsTier(self.scene.weights),
        )

    @contextmanager
    def faulty(self, faults: str) -> Iterator[None]:
        """Faults for the session alone: the shadow gets its calls outside."""
        if faults:
            self.stub.faults(faults)
        try:
            yield
        finally:
            self.stub.faults("clear")
            self.cancel.clear()

    def holding(self) -> list[int]:
        """The sequences that hold a prompt."""
        return [seq_id for seq_id in range(N_SEQ) if self.shadow.tokens(seq_id)]

    def go_on(self) -> None:
        """Where the session is parked, another one takes over what lies on disk."""
        if self.session.stage is not Stage.PARKED:
            return
        at = self.session.parked_at
        assert at is not None
        self.session.close()
        self.session = self.opened()
        self.session.restore(at)
        at.unlink()

    @rule(seq_id=SEQ, tokens=st.lists(st.integers(0, 255), min_size=1, max_size=20))
    def prefill(self, seq_id: int, tokens: list[int]) -> None:
        """Read a prompt, or more of it."""
        for session in (self.session, self.shadow):
            if not session.tokens(seq_id):
                session.set_sampler(scenes.spec(self.seeds), seq_id)
            session.prefill(tokens, seq_id)
        self.seeds += 1

    @precondition(lambda self: self.holding())
    @rule(n=st.integers(1, 4), faults=TRIAL_FAULTS)
    def generate(self, n: int, faults: str) -> None:
        """Generate tokens of all that hold a prompt; a fault meets the trial of a switch, or is an error."""
        seq_ids = self.holding()
        if self.session.stage is not Stage.TRIAL and "decode:fail" not in faults:
            # Wrong logits are looked for in a trial only.
            faults = ""
        for _ in range(n):
            done = False
            with self.faulty(faults), suppress(CallFailed, Cancelled, Parked):
                self.session.advance(seq_ids)
                done = True
            self.go_on()
            if not done:
                self.session.advance(seq_ids)
            self.shadow.advance(seq_ids)
            faults = ""

    @rule(source=SEQ, copy=SEQ)
    def copy(self, source: int, copy: int) -> None:
        """Start a sequence as a copy of another."""
        if source == copy or self.shadow.tokens(copy) or not self.shadow.tokens(source):
            return
        for session in (self.session, self.shadow):
            session.copy_sequence(source, copy)
            session.set_sampler(scenes.spec(self.seeds), copy)
        self.seeds += 1

    @rule(seq_id=SEQ)
    def remove(self, seq_id: int) -> None:
        """Forget a sequence."""
        for session in (self.session, self.shadow):
            session.remove_sequence(seq_id)

    @rule(
        mode=MODES,
        faults=FAULTS,
        cancel_at=CANCEL,
        proof=st.sampled_from(Proof),
        n_ctx=st.sampled_from([0, 0, 1536, 3072]),
    )
    def switch(self, mode: SplitMode, faults: str, cancel_at: str, proof: Proof, n_ctx: int) -> None:
        """Switch somewhere, with faults in place, perhaps cancelled."""
        if proof is Proof.OFF or "lie" in faults or "flip" in faults or "native:s" in faults:
            # What lies and is not asked to prove itself cannot be found out.
            proof = Proof.BYTES
        before = self.session.placement
        target = before.changed(mode=mode, **({"n_ctx": n_ctx} if n_ctx else {}))

        def progress(stage: Stage, _share: float) -> None:
            if stage.value == cancel_at:
                self.cancel.set()

        with self.faulty(faults):
            outcome = self.session.switch(target, proof=proof, progress=progress)
        status = outcome.status
        assert outcome.requested is mode
        if status is SwitchStatus.PARKED:
            assert self.session.stage is Stage.PARKED
        elif status is SwitchStatus.SWITCHED:
            assert not self.session.placement.differs(target)
        elif status is SwitchStatus.UNCHANGED:
            assert not before.differs(target)
        else:
            assert self.session.placement == before
        assert outcome.effective_placement in {None, self.session.placement}
        self.go_on()

    @precondition(lambda self: self.holding())
    @rule()
    def save_and_restore(self) -> None:
        """Go on from a file in another session."""
        path = Path(os.environ["XDG_STATE_HOME"]) / "saved"
        self.session.save(path)
        self.session.close()
        self.session = self.opened()
        self.session.restore(path)

    @invariant()
    def serves_and_holds_everything(self) -> None:
        """Nothing is under way, and both sessions hold the same tokens."""
        assert self.session.stage in RESTING - {Stage.PARKED, Stage.CLOSED}
        for seq_id in range(N_SEQ):
            assert self.session.tokens(seq_id) == self.shadow.tokens(seq_id)
        assert self.stub.mistakes() == []

    def teardown(self) -> None:
        """Close, and count what is left."""
        self.session.close()
        self.shadow.close()
        assert self.stub.live() == self.before
        assert self.stub.mistakes() == []


def child_machine(path: str, model: str, *, unified: bool, weights: str = "file") -> None:
    """Look for an order of calls that breaks a law.

    Args:
        path: the stub.
        model: a model file.
        unified: one buffer of cells for all sequences.
        weights: where switches take the weights from.
    """
    SessionMachine.library = Library.open(path)
    SessionMachine.stub = Stub(path)
    SessionMachine.model = model
    SessionMachine.scene = Scene(n_seq=N_SEQ, unified=unified, weights=weights)
    is_deep = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=1000 if is_deep else 25,
            stateful_step_count=25,
            deadline=None,
            derandomize=not is_deep,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            # A counterexample is told as it was found: looking for a smaller one takes minutes.
            phases=list(Phase) if is_deep else [Phase.generate],
        ),
    )


def child_machine_streams(path: str, model: str) -> None:
    """A stream of cells for each sequence."""
    child_machine(path, model, unified=False)


def child_machine_unified(path: str, model: str) -> None:
    """One buffer of cells, and both placements kept."""
    child_machine(path, model, unified=True, weights="resident")


@pytest.mark.parametrize("variant", [Variant.STOCK, Variant.NATIVE_SPLIT])
@pytest.mark.parametrize("child", [child_machine_streams, child_machine_unified])
def test_no_order_of_calls_and_faults_loses_anything(
    tmp_path: Path, variant: Variant, child: Callable[[str, str], None]
) -> None:
    """Any calls with any faults: serving or parked, the tokens of a session that met none, nothing left alive."""
    model = write_model(tmp_path / "tiny.gguf")
    run_child(child, build(variant), model, XDG_STATE_HOME=str(tmp_path)).value()
