"""A LoRA adapter travels with every switch, at its scale, and a carry made under another scale is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llama_native import Library
from llama_native.user_model import MetaKind, MetaValue, TensorSlot
from splitctl import (
    AdapterInvalid,
    CarryMismatch,
    ConfigInvalid,
    Refused,
    SamplerSpec,
    Session,
    SplitMode,
    SwitchStatus,
)
from splitctl.outcome import WeightsTier
from tests.real.conftest import PROMPT, Opener, base
from tools.gguf_out import write_gguf

N_EMBD = 576
RANK = 2
LAYERS = (0, 14, 29)
GREEDY = SamplerSpec(temp=0.0)
_F32 = 0


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank 2 adapter of SmolLM2's query projections in three layers, strong enough to change its words."""
    path = tmp_path_factory.mktemp("lora") / "lora.gguf"
    write_lora(path, LAYERS)
    return path


def write_lora(path: Path, layers: Sequence[int], *, kind: str = "adapter") -> None:
    """Write an adapter: A is f32[RANK, N_EMBD], B is f32[N_EMBD, RANK], C order."""
    metadata = (
        MetaValue("general.architecture", MetaKind.STR, "llama"),
        MetaValue("general.type", MetaKind.STR, kind),
        MetaValue("adapter.type", MetaKind.STR, "lora"),
        MetaValue("adapter.lora.alpha", MetaKind.F32, 4.0),
    )
    rng = np.random.default_rng(11)
    slots, data = [], []
    for layer in layers:
        for part, dims in (("lora_a", (N_EMBD, RANK)), ("lora_b", (RANK, N_EMBD))):
            weights = rng.standard_normal(N_EMBD * RANK).astype(np.float32) * np.float32(0.3)
            slots.append(TensorSlot(f"blk.{layer}.attn_q.weight.{part}", dims, _F32, weights.nbytes))
            data.append(weights.tobytes())
    write_gguf(path, metadata, slots, data)


def _ids(session: Session, n: int) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=GREEDY)]


def _read(session: Session) -> Session:
    session.prefill(session.tokenize(PROMPT))
    return session


def test_an_adapter_changes_what_the_model_says(open_session: Opener, lora: Path) -> None:
    """Without this, the tests below would pass with an adapter that is never applied."""
    plain = _read(open_session())
    weak, strong = (_read(open_session(adapters=[(lora, scale)])) for scale in (0.5, 1.0))
    assert not np.array_equal(plain.logits(), weak.logits())
    assert not np.array_equal(weak.logits(), strong.logits())


@pytest.mark.every_build
@pytest.mark.parametrize("changed", [{"tensor_split": (0.2, 0.8)}, {"mode": SplitMode.NONE}])
def test_an_adapter_travels_with_a_switch(
    open_session: Opener, lora: Path, tmp_path: Path, changed: dict[str, object]
) -> None:
    """After a switch, tokens and logits are those of a fresh session with the adapter and the same state."""
    session = _read(open_session(adapters=[(lora, 0.5)]))
    _ids(session, 3)
    session.save(tmp_path / "carry")
    outcome = session.switch(session.placement.changed(**changed))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    fresh = open_session(session.placement, adapters=[(lora, 0.5)])
    fresh.restore(tmp_path / "carry")
    assert _ids(session, 6) == _ids(fresh, 6)
    assert np.array_equal(session.logits(), fresh.logits())

    bare = open_session(session.placement)
    with pytest.raises(CarryMismatch):
        bare.restore(tmp_path / "carry")


@pytest.mark.parametrize("tier", [WeightsTier.RESIDENT, WeightsTier.PINNED])
def test_an_adapter_stands_on_each_model(
    library: Library, open_session: Opener, lora: Path, tmp_path: Path, tier: WeightsTier
) -> None:
    """On one that was kept, and on one made from the copy: there and back, it says what a fresh session says."""
    if tier is WeightsTier.PINNED and not library.has("model-from-memory"):
        pytest.skip(f"{library.path} cannot make models from metadata")
    session = _read(open_session(adapters=[(lora, 0.5)], weights=tier))
    copy, first = session._live.engine.copy, session.placement
    assert copy is None or copy.wait()
    for target in (first.changed(tensor_split=(0.2, 0.8)), first):
        _ids(session, 3)
        session.save(tmp_path / "carry")
        outcome = session.switch(target)
        assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, tier), outcome.weights_reason
    fresh = open_session(first, adapters=[(lora, 0.5)])
    fresh.restore(tmp_path / "carry")
    assert _ids(session, 6) == _ids(fresh, 6)
    assert np.array_equal(session.logits(), fresh.logits())


def test_a_switch_to_tensor_mode_with_an_adapter_is_refused(open_session: Opener, lora: Path) -> None:
    """The library would abort at the next decode; the session serves on as it was, and none opens there."""
    session = _read(open_session(base(flash="on"), adapters=[(lora, 0.5)]))
    outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR), force=True)
    assert outcome.status is SwitchStatus.REFUSED
    assert [one.code for one in outcome.reasons] == ["adapters-in-tensor-mode"]
    assert len(_ids(session, 2)) == 2
    with pytest.raises(Refused, match="adapter"):
        open_session(base(mode=SplitMode.TENSOR, flash="on"), adapters=[(lora, 0.5)])


def test_layer_to_layer_with_an_adapter_is_as_if_nothing_had_happened(open_session: Opener, lora: Path) -> None:
    """The same floats in the same order: a switch to other shares changes no token."""
    straight = _read(open_session(adapters=[(lora, 0.5)]))
    whole = _ids(straight, 10)
    session = _read(open_session(adapters=[(lora, 0.5)]))
    first = _ids(session, 5)
    assert session.switch(session.placement.changed(tensor_split=(0.2, 0.8))).status is SwitchStatus.SWITCHED
    assert first + _ids(session, 5) == whole
    assert np.array_equal(session.logits(), straight.logits())


def test_s27_a_carry_made_at_another_scale_is_refused_with_the_list(
    open_session: Opener, lora: Path, tmp_path: Path
) -> None:
    """Scale 1.0 is not 0.5: the refusal names the adapter and both, and the session is as it was."""
    _read(open_session(adapters=[(lora, 1.0)])).save(tmp_path / "carry")
    session = _read(open_session(adapters=[(lora, 0.5)]))
    held = session.logits()
    with pytest.raises(CarryMismatch) as caught:
        session.restore(tmp_path / "carry")
    (difference,) = caught.value.differences
    assert difference.field == "adapter 0"
    assert difference.carried.endswith("at scale 1.0")
    assert difference.wanted.endswith("at scale 0.5")
    assert np.array_equal(session.logits(), held)
    assert len(_ids(session, 2)) == 2


def test_s27_a_carry_made_with_another_adapter_is_refused(open_session: Opener, lora: Path, tmp_path: Path) -> None:
    """The file's checksum counts, not its name: the same scale of other weights is another adapter."""
    other = tmp_path / lora.name
    write_lora(other, LAYERS[:1])
    _read(open_session(adapters=[(other, 0.5)])).save(tmp_path / "carry")
    session = _read(open_session(adapters=[(lora, 0.5)]))
    with pytest.raises(CarryMismatch, match="adapter 0"):
        session.restore(tmp_path / "carry")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "no such file"),
        ("folder", "a directory"),
        ("empty", "0 bytes"),
        ("garbage", "GGUF"),
        ("truncated", "is truncated"),
        ("a model", "general.type is model"),
        ("no such tensor", r"blk\.4000\.attn_q\.weight"),
    ],
)
def test_an_adapter_file_that_is_none_is_named(
    open_session: Opener, lora: Path, tmp_path: Path, fault: str, said: str
) -> None:
    """The error names the file and what is wrong with it; nothing is left open."""
    path = tmp_path / "wrong.gguf"
    if fault == "folder":
        path.mkdir()
    elif fault == "empty":
        path.touch()
    elif fault == "garbage":
        path.write_bytes(b"no GGUF at all" * 100)
    elif fault == "truncated":
        path.write_bytes(lora.read_bytes()[:2000])
    elif fault == "a model":
        write_lora(path, LAYERS, kind="model")
    elif fault == "no such tensor":
        write_lora(path, (4000,))
    with pytest.raises(AdapterInvalid, match=rf"wrong\.gguf.*{said}"):
        open_session(adapters=[(path, 0.5)])


def test_a_scale_that_is_no_number_is_refused(open_session: Opener, lora: Path) -> None:
    """NaN would turn every logit into one."""
    with pytest.raises(ConfigInvalid, match="scale"):
        open_session(adapters=[(lora, float("nan"))])
