"""Models from metadata: the library lists every tensor and takes its data, and no failure unwinds through C."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_native import (
    CallFailed,
    Context,
    ContextParams,
    Library,
    LoadCancelled,
    ModelParams,
    Reentered,
    SplitMode,
    TensorUnknown,
    Weights,
    load_user_model,
)
from llama_native import user_model as native
from llama_native.user_model import MetaKind, MetaValue, TensorSlot, create_tensors
from splitctl.engine.host_copy import HostCopy
from tests.real.conftest import DEVICES
from tools.make_dummies import recipes, to_metadata

F32 = 0


@pytest.fixture(scope="module")
def metadata(library: Library) -> tuple[MetaValue, ...]:
    """A small model's metadata, for a library that can build one from it."""
    if not library.has("user-model"):
        pytest.skip(f"{library.path} cannot make models from metadata (llama-cpp-python-0.3.36 can)")
    return to_metadata(recipes()["llama"])


def test_every_tensor_is_listed_once(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """Four layers of attention and feed-forward, the embedding first among the shared ones, names unique."""
    slots = create_tensors(library, metadata)
    by_name = {slot.name: slot for slot in slots}
    assert len(by_name) == len(slots)
    assert by_name["token_embd.weight"].dims == (256, 128)
    assert {"blk.0.attn_q.weight", "blk.3.ffn_down.weight", "output_norm.weight"} <= set(by_name)
    assert all(slot.n_bytes == 4 * math.prod(slot.dims) for slot in slots if slot.type_id == F32)


def test_data_is_asked_for_with_its_size(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """The callback is asked for every tensor, and bytes of the right size are taken."""
    asked: list[TensorSlot] = []

    def fill(slot: TensorSlot) -> bytes:
        asked.append(slot)
        return bytes(slot.n_bytes)

    slots = create_tensors(library, metadata, fill)
    assert {slot.name for slot in asked} == {slot.name for slot in slots}


def test_data_of_another_size_is_refused(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """Too few bytes are an error of the caller, raised after the model has been freed."""
    with pytest.raises(ValueError, match="were given"):
        create_tensors(library, metadata, lambda _: b"short")
    assert create_tensors(library, metadata)


def test_an_error_in_the_callback_comes_out(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """What the callback raises reaches the caller once, and the library goes on."""
    asked = []

    def fill(slot: TensorSlot) -> bytes:
        asked.append(slot.name)
        raise KeyError(slot.name)

    with pytest.raises(KeyError):
        create_tensors(library, metadata, fill)
    assert len(asked) == 1
    assert create_tensors(library, metadata)


def test_the_callback_may_not_call_the_library(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """A call from inside the callback is refused instead of hanging on the lock."""

    def fill(_: TensorSlot) -> None:
        library.devices(memory=False)

    with pytest.raises(Reentered):
        create_tensors(library, metadata, fill)


def test_metadata_that_is_no_model(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """An architecture that the build lacks is the library's refusal, with its words."""
    changed = [dataclasses.replace(metadata[0], value="no-such-architecture"), *metadata[1:]]
    with pytest.raises(CallFailed, match="llama_model_init_from_user"):
        create_tensors(library, changed)


def test_every_kind_of_value_is_set(library: Library, metadata: tuple[MetaValue, ...]) -> None:
    """Metadata of every kind, and arrays of numbers and texts, are taken."""
    extra = [MetaValue(f"x.{kind.suffix}", kind, "text" if kind is MetaKind.STR else 1) for kind in MetaKind]
    extra += [MetaValue("x.texts", MetaKind.STR, ("a", "b")), MetaValue("x.numbers", MetaKind.F32, (1.0, 2.0))]
    assert create_tensors(library, [*metadata, *extra])


def test_an_unknown_kind() -> None:
    """A recipe with a kind that does not exist is refused by its name."""
    with pytest.raises(ValueError, match="u128"):
        MetaKind.of("u128")


# ---- weights in memory ----

PARAMS = ModelParams(devices=DEVICES)


@pytest.fixture
def weights(library: Library, small_model: Path) -> Iterator[Weights]:
    """The small model's, as they lie in its file."""
    if not library.has("model-from-memory"):
        pytest.skip(f"{library.path} cannot make models from metadata (llama-cpp-python-0.3.36 can)")
    copy = HostCopy.of_file(small_model)
    yield copy.weights
    copy.close()


def test_progress_tells_how_much_is_uploaded(library: Library, weights: Weights) -> None:
    """From nothing to all of it, and never back; the model is of the file's size at least."""
    shares: list[float] = []

    def progress(share: float) -> bool:
        shares.append(share)
        return True

    with load_user_model(library, weights, PARAMS, progress=progress) as model:
        assert model.size_bytes >= sum(n_bytes for _, n_bytes in weights.places.values())
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)


@pytest.mark.parametrize("after", [0.0, 0.5])
def test_a_load_that_is_cancelled_leaves_nothing(library: Library, weights: Weights, after: float) -> None:
    """Before the first tensor or between them: the model is freed, and the next one loads."""
    with pytest.raises(LoadCancelled):
        load_user_model(library, weights, PARAMS, progress=lambda share: share < after)
    load_user_model(library, weights, PARAMS).close()


def test_what_progress_raises_comes_out_when_the_model_is_freed(library: Library, weights: Weights) -> None:
    """Uploads under way end first."""

    def progress(share: float) -> bool:
        if share > 0.5:
            raise KeyError("no")
        return True

    with pytest.raises(KeyError):
        load_user_model(library, weights, PARAMS, progress=progress)
    load_user_model(library, weights, PARAMS).close()


def test_one_thread_uploads_in_tensor_mode_without_a_lock(
    library: Library, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every first write to a tensor of several devices adds to a map, which builds with the newer call alone lock."""
    asked = []
    upload = native._upload

    def seen(lib: Any, uploads: Any, go_on: Any, n_threads: int) -> None:
        asked.append(n_threads)
        upload(lib, uploads, go_on, n_threads)

    monkeypatch.setattr(native, "_upload", seen)
    for mode in (SplitMode.LAYER, SplitMode.TENSOR):
        load_user_model(library, weights, dataclasses.replace(PARAMS, split_mode=mode), n_threads=3).close()
    assert asked == [3, 3 if library.has("model-from-file-with") else 1]


def test_what_a_thread_raises_comes_out(library: Library, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that fails is the load's failure, whichever thread it is in."""
    with monkeypatch.context() as patched:
        patched.setattr(native._Made, "_uploads", lambda *_: [native._Upload("no tensor", 4, b"")])
        with pytest.raises(TypeError):
            load_user_model(library, weights, PARAMS)
    load_user_model(library, weights, PARAMS).close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"blk.0.attn_norm.weight": None}, "blk.0.attn_norm.weight, which the file has not"),
        ({"token_embd.weight": (0, 7)}, r"token_embd.weight, of 131072 bytes, and the file has 7"),
    ],
    ids=["not there", "of another size"],
)
def test_a_tensor_without_its_data_is_refused_by_name(
    library: Library, weights: Weights, changed: dict[str, tuple[int, int] | None], words: str
) -> None:
    """Nothing is uploaded in its place."""
    places = {name: place for name, place in {**weights.places, **changed}.items() if place is not None}
    with pytest.raises(TensorUnknown, match=words):
        load_user_model(library, dataclasses.replace(weights, places=places), PARAMS)


def _row(context: Context) -> bytes:
    """The logits of the same tokens in an empty context."""
    context.clear()
    context.decode([3, 5, 7], range(3), [0] * 3, [False, False, True])
    return context.logits(2)


@pytest.fixture
def moved(library: Library, weights: Weights) -> Iterator[tuple[Context, bytes]]:
    """A context of weights in memory that the library can move by its own call, and a row of it."""
    if not (library.has("native-switch") and library.has("model-from-file-with")):
        pytest.skip(f"{library.path} has no call of its own for a switch")
    with (
        load_user_model(library, weights, PARAMS) as model,
        Context(model, ContextParams(n_ctx=64, n_threads=1)) as context,
    ):
        yield context, _row(context)


def test_bytes_are_given_again_to_each_placement(moved: tuple[Context, bytes]) -> None:
    """There and back; a call for the mode that is there asks for none."""
    context, wanted = moved
    for mode in (SplitMode.NONE, SplitMode.LAYER, SplitMode.LAYER):
        assert context.native_switch(mode.value, None)
        assert _row(context) == wanted


def test_a_call_that_asks_for_too_little_is_not_trusted(moved: tuple[Context, bytes]) -> None:
    """A model with tensors that hold anything is an error and not an answer."""
    context, _ = moved
    refill = context.model.refill

    def with_less() -> None:
        del made.tensors[0]
        made.fill_again()

    made = refill.__self__  # type: ignore[union-attr]
    context.model.refill = with_less
    with pytest.raises(CallFailed, match=r"asked for the bytes of \d+ tensors, and before for those of \d+"):
        context.native_switch(SplitMode.NONE.value, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blk.3.attn_q.bias", 0.0),
        ("blk.3.attn_q.scale", 1.0),
        ("blk.3.ffn_up.input_scale", 1.0),
        ("rope_freqs.weight", 1.0),
        ("blk.3.attn_q_norm.weight", None),
        ("blk.3.attn_sinks.weight", None),
    ],
)
def test_optional_tensors_have_the_value_that_changes_nothing(name: str, value: float | None) -> None:
    """By their kind; of the others nobody knows one."""
    assert native.neutral_value(name) == value
