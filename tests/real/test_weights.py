"""Where a switch takes the weights from: both placements kept, or a copy in host memory; the answer is the file's."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import Library
from llama_native.user_model import TensorSlot
from splitctl import FileChanged, Placement, SamplerSpec, Session, SplitMode, Stage, SwitchStatus, Via
from splitctl.carry import file as carries
from splitctl.engine.host_copy import HostCopy
from splitctl.ipc.probes import Prober
from splitctl.model.facts import read_facts
from splitctl.model.header import read_header
from splitctl.outcome import Route, WeightsTier
from tests.real.conftest import PROMPT, RPC, SEEDED, SMALL_PROMPT, Opener, base
from tools.gguf_out import write_gguf
from tools.make_dummies import make_many, recipes, to_metadata
from tools.places import default_folder

GREEDY = SamplerSpec(temp=0.0)
NEWER = "model-from-file-with"
OTHER_SHARES = {"tensor_split": (0.2, 0.8)}


def _ids(session: Session, n: int, sampler: SamplerSpec | None = None) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=sampler)]


def _state(session: Session, path: Path) -> tuple[bytes, bytes]:
    """What a session carries: its state's bytes and its logits' bytes."""
    session.save(path)
    carry = carries.read(path).carry
    return bytes(carry.state), carry.sequences[0].logits.tobytes()


def _switched(session: Session, target: Placement, **named: Any) -> WeightsTier | None:
    outcome = session.switch(target, **named)
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    return outcome.weights


@pytest.mark.every_build
def test_ten_switches_between_kept_placements_give_what_ten_loads_give(
    open_small: Opener, other_mode: SplitMode, tmp_path: Path
) -> None:
    """There and back ten times with tokens between: state, logits and tokens are those of a session on the file."""
    kept, loaded = (open_small(weights=tier) for tier in (WeightsTier.RESIDENT, WeightsTier.FILE))
    for session in (kept, loaded):
        session.prefill(SMALL_PROMPT)
        _ids(session, 3, SEEDED)
    for turn in range(10):
        mode = other_mode if turn % 2 == 0 else SplitMode.LAYER
        assert _switched(kept, kept.placement.changed(mode=mode)) is WeightsTier.RESIDENT
        assert _switched(loaded, loaded.placement.changed(mode=mode)) is WeightsTier.FILE
        assert _ids(kept, 3) == _ids(loaded, 3)
        assert np.array_equal(kept.logits(), loaded.logits())
    assert _state(kept, tmp_path / "kept") == _state(loaded, tmp_path / "loaded")


def test_a_third_placement_takes_the_place_of_the_one_before(open_small: Opener) -> None:
    """Two are kept at most: the one that serves and the one before it."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    first = session.placement
    for target in (first.changed(**OTHER_SHARES), first.changed(mode=SplitMode.NONE)):
        assert _switched(session, target) is WeightsTier.RESIDENT
    engine = session._live.engine
    assert engine.keeps(first.changed(**OTHER_SHARES))
    assert not engine.keeps(first)


def test_a_kept_model_gets_another_context_where_the_target_asks_for_one(open_small: Opener) -> None:
    """A context that grows is built on the kept model; its size is what was asked for."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    first = session.placement
    assert _switched(session, first.changed(**OTHER_SHARES)) is WeightsTier.RESIDENT
    assert _switched(session, first.changed(n_ctx=1024)) is WeightsTier.RESIDENT
    assert session.placement.n_ctx == 1024
    assert len(_ids(session, 4, GREEDY)) == 4


def test_two_placements_that_do_not_fit_at_once_are_loaded_one_after_the_other(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch uses the file, and its outcome says what is short."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    monkeypatch.setattr(session._checker._tiers, "_beside", lambda _now, _target: "CPU lacks 7 MiB")
    outcome = session.switch(session.placement.changed(**OTHER_SHARES))
    assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.FILE)
    assert outcome.weights_reason == "CPU lacks 7 MiB"
    assert not session._live.engine._kept


def test_a_question_that_fails_costs_the_tier_and_not_the_switch(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome says what went wrong, and the file is loaded."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)

    def fails(_now: Placement, _target: Placement) -> str:
        raise OSError("no such memory")

    monkeypatch.setattr(session._checker._tiers, "_beside", fails)
    outcome = session.switch(session.placement.changed(**OTHER_SHARES))
    assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.FILE)
    assert outcome.weights_reason == "the tier could not be chosen: no such memory"


@pytest.mark.parametrize("stage", [Stage.PLACING, Stage.BUILDING, Stage.RESTORING, Stage.PROVING])
def test_a_cancel_finds_the_old_placement_still_there(open_small: Opener, stage: Stage) -> None:
    """Nothing is loaded on the way back, and the session goes on as if nobody had asked."""
    flag = threading.Event()
    session, straight = open_small(weights=WeightsTier.RESIDENT, cancel=flag), open_small()
    for one in (session, straight):
        one.prefill(SMALL_PROMPT)
    old = session._live.model

    def cancel(at: Stage, _share: float) -> None:
        if at is stage:
            flag.set()

    outcome = session.switch(session.placement.changed(**OTHER_SHARES), progress=cancel)
    flag.clear()
    assert outcome.status is SwitchStatus.CANCELLED
    assert session._live.model is old
    assert _ids(session, 6, SEEDED) == _ids(straight, 6, SEEDED)


def test_rewinding_and_shifting_work_after_a_switch_to_a_kept_context(open_small: Opener) -> None:
    """A context that was emptied and given the state is cut and shifted as one that was loaded."""
    answers: list[Any] = []
    for tier in (WeightsTier.RESIDENT, WeightsTier.FILE):
        session = open_small(weights=tier)
        session.prefill(SMALL_PROMPT)
        first = session.placement
        _switched(session, first.changed(**OTHER_SHARES))
        _ids(session, 8, GREEDY)
        _switched(session, first)
        session.reserve(64)
        session.rewind(12)
        session.prefill([4, 5])
        session.shift(2, 3)
        answers.append((_ids(session, 4, GREEDY), session.logits().tobytes()))
    assert answers[0] == answers[1]


def test_closing_and_parking_free_what_is_kept(open_small: Opener) -> None:
    """Nothing stays loaded behind a session that is closed."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    _switched(session, session.placement.changed(**OTHER_SHARES))
    models = [session._live.model, session._live.engine._kept[0].model]
    session.close()
    assert all(model.closed for model in models)


# ---- a copy in host memory ----


def _filled(session: Session) -> Session:
    copy = session._live.engine.copy
    assert copy is not None
    assert copy.wait(), copy.why
    return session


@pytest.fixture
def pinned(library: Library, open_session: Opener) -> Opener:
    """Opens sessions with a copy of SmolLM2 that is filled."""
    if not library.has("model-from-memory"):
        pytest.skip(f"{library.path} cannot make models from metadata")
    return lambda *placement, **named: _filled(open_session(*placement, weights=WeightsTier.PINNED, **named))


@pytest.fixture(params=["from the file's tensors", "from metadata"])
def made(request: pytest.FixtureRequest, library: Library, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Lets models be made from the copy by one of two calls; tells whether by the one that knows the file's tensors."""
    is_newer = request.param == "from the file's tensors"
    if is_newer and not library.has(NEWER):
        pytest.skip(f"{library.path} cannot take a file's tensors and the bytes from elsewhere")
    left = {name: symbols for name, symbols in library.capabilities.items() if is_newer or name != NEWER}
    monkeypatch.setattr(library, "capabilities", left)
    return is_newer


@pytest.mark.every_build
def test_a_model_made_from_the_copy_goes_on_like_one_of_the_file(
    pinned: Opener, made: bool, open_session: Opener, other_mode: SplitMode, tmp_path: Path
) -> None:
    """There and back: SmolLM2's output is tied to its embedding, and its file has no biases; all bytes are equal."""
    copied, loaded = pinned(), open_session()
    for session in (copied, loaded):
        session.prefill(session.tokenize(PROMPT))
    for mode in (other_mode, SplitMode.LAYER):
        assert _switched(copied, copied.placement.changed(mode=mode)) is WeightsTier.PINNED
        assert _switched(loaded, loaded.placement.changed(mode=mode)) is WeightsTier.FILE
        assert (copied.model.refill is not None) is made
        assert _ids(copied, 4, SEEDED) == _ids(loaded, 4, SEEDED)
        assert np.array_equal(copied.logits(), loaded.logits())
        assert copied.model.size_bytes == loaded.model.size_bytes
    assert _state(copied, tmp_path / "copied") == _state(loaded, tmp_path / "loaded")


@pytest.mark.parametrize(
    ("beside", "file_ms", "tier"),
    [
        ("", 500.0, WeightsTier.RESIDENT),
        ("CPU lacks 7 MiB", 500.0, WeightsTier.PINNED),
        ("CPU lacks 7 MiB", 1.0, WeightsTier.FILE),
    ],
)
def test_auto_takes_what_pays_and_says_why(
    pinned: Opener, monkeypatch: pytest.MonkeyPatch, beside: str, file_ms: float, tier: WeightsTier
) -> None:
    """Both placements where they fit; else the copy where it saves time; else the file."""
    session = pinned()
    session.prefill(session.tokenize(PROMPT))
    engine = session._live.engine
    monkeypatch.setattr(engine, "weights", WeightsTier.AUTO)
    monkeypatch.setattr(session._checker._tiers, "_beside", lambda _now, _target: beside)
    engine.load_ms = {WeightsTier.FILE: file_ms, WeightsTier.PINNED: 20.0}
    session.expect(lambda: 10)
    outcome = session.switch(session.placement.changed(**OTHER_SHARES))
    assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, tier)
    saved = f"; a pinned load saves {file_ms - 20:.0f} ms, and 10 tokens take 0 ms more after it"
    assert outcome.weights_reason == (f"{beside}{saved}" if beside else "both placements fit")


def test_a_switch_before_the_copy_is_filled_uses_the_file(open_small: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome says how far the copy is."""
    session = open_small(weights=WeightsTier.PINNED)
    session.prefill(SMALL_PROMPT)
    monkeypatch.setattr(type(session._live.engine.copy), "why", "the copy of the weights is 40% filled")
    outcome = session.switch(session.placement.changed(**OTHER_SHARES))
    assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.FILE)
    assert outcome.weights_reason == "the copy of the weights is 40% filled"


def test_a_tensor_that_the_file_has_not_gives_the_file_s_load(pinned: Opener) -> None:
    """What nobody knows a neutral value for is refused by name, and the library loads the file."""
    session = pinned()
    session.prefill(session.tokenize(PROMPT))
    copy = session._live.engine.copy
    assert copy is not None
    del copy.places["output_norm.weight"]
    outcome = session.switch(session.placement.changed(**OTHER_SHARES))
    assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.FILE)
    assert "this build wants output_norm.weight, which the file has not" in outcome.weights_reason
    assert len(_ids(session, 2, GREEDY)) == 2


def test_a_cancel_while_tensors_are_uploaded_ends_in_the_old_placement(
    pinned: Opener, straight: tuple[int, ...]
) -> None:
    """The half-filled model is freed; the way back is loaded from the copy too."""
    flag = threading.Event()
    session = pinned(cancel=flag)
    session.prefill(session.tokenize(PROMPT))
    first = _ids(session, 6, SEEDED)

    def cancel(stage: Stage, share: float) -> None:
        if stage is Stage.PLACING and share > 0.2:
            flag.set()

    outcome = session.switch(session.placement.changed(**OTHER_SHARES), progress=cancel)
    flag.clear()
    assert (outcome.status, outcome.stage) == (SwitchStatus.CANCELLED, Stage.PLACING)
    assert session._live.engine.came_from is WeightsTier.PINNED
    assert (*first, *_ids(session, 6)) == straight[:12]


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"GGUF")], ids=["gone", "replaced"])
def test_the_copy_serves_when_the_file_does_not(
    library: Library, small_model: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """A switch, the library's own load and a session that opens anew all work from it, and say so."""
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model.read_bytes())
    fd = os.memfd_create("copy")
    opened = {"library": library, "prober": None, "weights": WeightsTier.PINNED}
    with Session.open(path, base(), copy=HostCopy(fd), **opened) as session:  # type: ignore[arg-type]
        _filled(session).prefill(SMALL_PROMPT)
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        change(other)
        path.unlink()
        if other.exists():
            other.rename(path)
        outcome = session.switch(session.placement.changed(**OTHER_SHARES))
        assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.PINNED)
        assert "the copy of the weights in host memory stands in" in outcome.weights_reason
        session._live.engine.weights = WeightsTier.FILE
        none = session.placement.changed(mode=SplitMode.NONE)
        assert _switched(session, none, via=Route.AUTO) is WeightsTier.FILE
        session.save(tmp_path / "carry")
        ids = _ids(session, 5, GREEDY)
        files = session.files
    with pytest.raises(FileChanged):
        Session.open(path, base(), files=files, library=library, prober=None)
    again = Session.open(path, base(mode=SplitMode.NONE), files=files, copy=HostCopy(fd), **opened)  # type: ignore[arg-type]
    with again as session:
        assert session._live.engine.came_from is WeightsTier.PINNED
        assert session.facts.path == path
        session.restore(tmp_path / "carry")
        assert _ids(session, 5, GREEDY) == ids
    os.close(fd)


def test_a_file_that_changed_is_refused_where_there_is_no_whole_copy(
    library: Library, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a copy: nothing is freed, and the session serves on."""
    path = tmp_path / "model.gguf"
    path.write_bytes(small_model.read_bytes())
    opened = {"library": library, "prober": None, "weights": WeightsTier.PINNED}
    with Session.open(path, base(), **opened) as session:  # type: ignore[arg-type]
        session.prefill(SMALL_PROMPT)
        monkeypatch.setattr(HostCopy, "why", "the copy of the weights is 40% filled")
        path.unlink()
        outcome = session.switch(session.placement.changed(**OTHER_SHARES))
        assert [one.code for one in outcome.reasons] == ["file-changed"]
        assert len(_ids(session, 2, GREEDY)) == 2


@pytest.mark.parametrize("mode", [SplitMode.LAYER, SplitMode.TENSOR])
def test_a_build_is_compared_with_itself_in_a_child(
    prober: Prober, library: Library, smollm2: Path, other_mode: SplitMode, mode: SplitMode
) -> None:
    """To the bit; the verdict is remembered, and says of an old build that it cannot."""
    if RPC:
        pytest.skip("a server that serves this process answers no child")
    if mode is SplitMode.TENSOR and other_mode is not mode:
        pytest.skip("this build's tensor mode does not work on the devices under test")
    facts = read_facts(smollm2)
    unknown = prober.why_no_copy(base(mode=mode), facts, known_only=True)
    assert "has not been tried yet" in unknown
    why = prober.why_no_copy(base(mode=mode), facts)
    assert why == prober.why_no_copy(base(mode=mode), facts, known_only=True)
    assert (why == "") == library.has("model-from-memory"), why


def _with_fused_projections(path: Path) -> Path:
    """A Phi-3 as its files are: queries, keys and values of a layer in one tensor, which models from metadata lack."""
    ((_, made, why),) = make_many(default_folder(), ["phi3"])
    assert made is not None, why
    header, raw = read_header(made), made.read_bytes()
    slots: dict[str, TensorSlot] = {}
    data: dict[str, bytes] = {}
    for one in header.tensors:
        if re.search(r"attn_[qkv]\..*scale", one.name):
            continue
        start = header.data_offset + one.offset
        body, dims = raw[start : start + (one.n_bytes or 0)], one.dims
        name = re.sub(r"attn_[qkv]\.", "attn_qkv.", one.name)
        if before := slots.get(name):
            body, dims = data[name] + body, (*dims[:-1], before.dims[-1] + dims[-1])
        slots[name], data[name] = TensorSlot(name, dims, one.type_id, len(body)), body
    write_gguf(path, to_metadata(recipes()["phi3"]), list(slots.values()), data.values())
    return path


def test_a_model_that_cannot_be_made_from_the_copy_is_refused_by_name(
    library: Library, prober: Prober, tmp_path: Path
) -> None:
    """The child says which tensor is wanted; the switch uses the file, says so, and goes on as without a copy."""
    if not library.has("model-from-memory") or library.has(NEWER) or RPC:
        pytest.skip("this build makes no models from metadata, or needs none, or its servers answer no child")
    path = _with_fused_projections(tmp_path / "phi3.gguf")
    with Session.open(path, base(), library=library, prober=prober, weights=WeightsTier.PINNED) as session:
        _filled(session).prefill(SMALL_PROMPT)
        outcome = session.switch(session.placement.changed(**OTHER_SHARES))
        assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.FILE)
        assert outcome.weights_reason.startswith(
            "phi3 in layer mode from the copy of the weights is refused with this build: this build wants blk.0.attn_q."
        )
        assert len(_ids(session, 3, GREEDY)) == 3


def test_a_model_made_from_the_copy_has_the_file_s_tensors(library: Library, prober: Prober, tmp_path: Path) -> None:
    """Where the build can: a Phi-3 with fused projections, which metadata do not tell of, goes on as from the file."""
    if not library.has(NEWER) or RPC:
        pytest.skip("this build makes models from metadata alone, or its servers answer no child")
    path = _with_fused_projections(tmp_path / "phi3.gguf")
    went = []
    for tier in (WeightsTier.PINNED, WeightsTier.FILE):
        with Session.open(path, base(), library=library, prober=prober, weights=tier) as session:
            if tier is WeightsTier.PINNED:
                _filled(session)
            session.prefill(SMALL_PROMPT)
            for target in (session.placement.changed(**OTHER_SHARES), session.placement):
                outcome = session.switch(target)
                assert (outcome.status, outcome.weights, outcome.weights_reason) == (SwitchStatus.SWITCHED, tier, "")
            went.append((_ids(session, 5, SEEDED), session.logits().tobytes(), session.model.size_bytes))
    assert went[0] == went[1]


# ---- the library's own call, for a model that was made from the copy ----


@pytest.fixture
def own(library: Library, pinned: Opener) -> Opener:
    """Opens sessions whose next switch the library can do itself, with the bytes of the copy."""
    if not (library.has("native-switch") and library.has(NEWER)):
        pytest.skip(f"{library.path} has no call of its own for a switch")
    return pinned


def _own(session: Session, target: Placement) -> Any:
    outcome = session.switch(target, via=Route.NATIVE)
    assert (outcome.status, outcome.via) == (SwitchStatus.SWITCHED, Via.NATIVE), outcome.reason
    return outcome


def test_the_library_s_own_call_takes_the_bytes_of_the_copy(
    library: Library, smollm2: Path, own: Opener, straight: tuple[int, ...], tmp_path: Path
) -> None:
    """The file is cut short behind a session that was made from the copy, which goes on as one that never switched."""
    path = tmp_path / "model.gguf"
    path.write_bytes(smollm2.read_bytes())
    opened = {"library": library, "prober": None, "weights": WeightsTier.PINNED}
    with Session.open(path, base(), **opened) as session:  # type: ignore[arg-type]
        _filled(session).prefill(session.tokenize(PROMPT))
        first = session.placement
        assert session.switch(first.changed(**OTHER_SHARES), via=Route.NATIVE).status is SwitchStatus.REFUSED
        assert _switched(session, first.changed(**OTHER_SHARES)) is WeightsTier.PINNED
        with path.open("r+b") as file:
            file.truncate(1000)
        for target in (first.changed(mode=SplitMode.NONE), first):
            outcome = _own(session, target)
            assert outcome.weights is WeightsTier.PINNED
            assert "the copy of the weights in host memory stands in" in outcome.weights_reason
        assert tuple(_ids(session, 12, SEEDED)) == straight[:12]


def test_bytes_that_cannot_be_given_again_end_in_the_old_placement(own: Opener, straight: tuple[int, ...]) -> None:
    """What the library has placed is freed, the file serves, and no token is lost."""
    session = own()
    session.prefill(session.tokenize(PROMPT))
    first = session.placement
    _switched(session, first.changed(**OTHER_SHARES))
    tokens = _ids(session, 6, SEEDED)
    copy = session._live.engine.copy
    assert copy is not None
    del copy.places["output_norm.weight"]
    outcome = session.switch(first, via=Route.NATIVE)
    assert (outcome.status, outcome.stage) == (SwitchStatus.FELL_BACK, Stage.SWITCHING_NATIVELY)
    assert "output_norm.weight, which the file has not" in outcome.reason
    assert session.placement == first.changed(**OTHER_SHARES)
    assert (*tokens, *_ids(session, 6)) == straight[:12]


def test_auto_leaves_a_model_of_the_copy_to_the_library_s_own_call(own: Opener, open_session: Opener) -> None:
    """From the second switch on, with the tokens and the logits of a session on the file, in tensor mode too."""
    copied, loaded = own(), open_session()
    for session in (copied, loaded):
        session.prefill(session.tokenize(PROMPT))
    vias = []
    for mode in (SplitMode.NONE, SplitMode.TENSOR, SplitMode.LAYER):
        outcome = copied.switch(copied.placement.changed(mode=mode), via=Route.AUTO)
        assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.PINNED), outcome.weights_reason
        vias.append(outcome.via)
        loaded.switch(loaded.placement.changed(mode=mode), via=Route.COMPOSED)
        assert _ids(copied, 3, SEEDED) == _ids(loaded, 3, SEEDED)
        assert np.array_equal(copied.logits(), loaded.logits())
    assert vias == [Via.COMPOSED, Via.NATIVE, Via.NATIVE]


def test_a_model_made_from_metadata_is_not_left_to_the_library_s_own_call(
    library: Library, own: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library could not make it again; the outcome says so, and the copy serves as ever."""
    session = own()
    session.prefill(session.tokenize(PROMPT))
    capabilities = {name: symbols for name, symbols in library.capabilities.items() if name != NEWER}
    monkeypatch.setattr(library, "capabilities", capabilities)
    first = session.placement
    _switched(session, first.changed(**OTHER_SHARES))
    outcome = session.switch(first, via=Route.AUTO)
    assert (outcome.status, outcome.via, outcome.weights) == (SwitchStatus.SWITCHED, Via.COMPOSED, WeightsTier.PINNED)
    assert outcome.via_reason == "the library's own call moves no model that was made from metadata"
