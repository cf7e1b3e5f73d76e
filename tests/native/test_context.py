"""A context on a real build: decoding, its memory, its state, and what it refuses."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import (
    CallFailed,
    Context,
    ContextParams,
    FlashAttn,
    HandleClosed,
    KvType,
    Library,
    Model,
    ModelParams,
    sequence_state_get,
    sequence_state_set,
    sequence_state_size,
    state_get,
    state_set,
    state_size,
)
from tests.native.real import NEWEST, OLDER, WITH_RPC, library_of
from tests.stublib import run_child

pytestmark = [pytest.mark.build, pytest.mark.model]

PROMPT = [504, 1885, 6354, 16438, 690, 260, 23790, 2767]


def _context(model: Model, **named: Any) -> Context:
    fields = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_seq_max": 2, **named}
    return Context(model, ContextParams(**fields))


def _read(context: Context, tokens: list[int], first: int = 0, seq_id: int = 0) -> bytes:
    n = len(tokens)
    context.decode(tokens, range(first, first + n), [seq_id] * n, [False] * (n - 1) + [True])
    return context.logits(n - 1)


def child_memory(path: str, model_path: str, unified: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with (
        Model.load(Library.open(path), model_path, ModelParams()) as model,
        _context(model, kv_unified=unified) as context,
    ):
        found["sizes"] = [context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.n_ctx_seq]
        found["memory"] = [context.has_memory, context.can_shift()]

        def span(seq_id: int) -> list[int]:
            return [context.pos_min(seq_id), context.pos_max(seq_id)]

        found["none"] = span(0)
        first = _read(context, PROMPT)
        found["after read"] = span(0)
        found["same row twice"] = context.logits(len(PROMPT) - 1) == first
        context.seq_cp(0, 1)
        found["after copy"] = span(1)
        found["copy goes on"] = _read(context, [42], len(PROMPT), 1) == _read(context, [42], len(PROMPT), 0)
        found["cut"] = [context.seq_rm(0, 4), span(0)]
        context.seq_rm(0)
        found["after removal"] = [span(0), span(1)]
        context.clear()
        found["after clear"] = [span(0), span(1)]
        found["again"] = _read(context, PROMPT) == first
        context.seq_rm(0, 2, 4)
        context.seq_add(0, 4, -1, -2)
        found["after shift"] = span(0)
        row = np.frombuffer(_read(context, [42], len(PROMPT) - 2), np.float32)
        found["row"] = [row.size, bool(np.isfinite(row).all()), bool(np.ptp(row) > 1)]
        context.synchronize()
        context.set_adapters([])
        found["changes"] = _changes(context)
    return found


def _changes(context: Context) -> dict[str, list[bool]]:
    """Say of which of two sequences each call tells that it may have changed it; the first one holds something."""
    context.clear()
    _read(context, PROMPT)
    one, whole = bytearray(sequence_state_size(context, 0)), bytearray(state_size(context))

    def changed(act: Callable[[], object]) -> list[bool]:
        before = [context.version(seq_id) for seq_id in (0, 1)]
        act()
        return [context.version(seq_id) != was for seq_id, was in enumerate(before)]

    return {
        "looking": changed(lambda: (context.pos_max(0), sequence_state_get(context, one, 0), context.logits(7))),
        "getting": changed(lambda: state_get(context, whole)),
        "decoding": changed(lambda: _read(context, [42], len(PROMPT))),
        "setting one": changed(lambda: sequence_state_set(context, one, 1)),
        "cutting": changed(lambda: context.seq_rm(1)),
        "copying": changed(lambda: context.seq_cp(0, 1)),
        "moving": changed(lambda: context.seq_add(0, 4, -1, 1)),
        "clearing": changed(context.clear),
        "setting all": changed(lambda: state_set(context, whole)),
    }


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("folder", [NEWEST, OLDER])
def test_the_memory_does_as_it_is_told(smollm2: Path, folder: str, unified: bool) -> None:
    """Read, copy, cut, remove, clear and shift; positions tell what is held, and versions which sequence may differ."""
    found = run_child(child_memory, library_of(folder), smollm2, unified).value()
    n = len(PROMPT)
    assert found["sizes"] == [512, 64, 64, 2, 256] or found["sizes"][1:4] == [64, 64, 2]
    assert found["memory"] == [True, True]
    assert found["none"] == [-1, -1]
    assert found["after read"] == [0, n - 1]
    assert found["same row twice"]
    assert found["after copy"] == [0, n - 1]
    assert found["copy goes on"]
    assert found["cut"] == [True, [0, 3]]
    assert found["after removal"] == [[-1, -1], [0, n]]
    assert found["after clear"] == [[-1, -1], [-1, -1]]
    assert found["again"]
    assert found["after shift"] == [0, n - 3]
    assert found["row"] == [49152, True, True]
    both, first, second = [True, True], [True, False], [False, True]
    none, both, first, second = [False, False], [True, True], [True, False], [False, True]
    wanted = (none, none, first, second, second, both, first, both, both)
    assert found["changes"] == dict(zip(found["changes"], wanted, strict=True))


def child_state(path: str, model_path: str, unified: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Model.load(Library.open(path), model_path, ModelParams()) as model:
        with _context(model, kv_unified=unified) as context:
            _read(context, PROMPT)
            _read(context, PROMPT[::-1], 0, 1)
            whole = bytearray(state_size(context))
            found["got"] = [state_get(context, whole) == len(whole), len(whole)]
            one = bytearray(sequence_state_size(context, 1))
            found["one"] = [sequence_state_get(context, one, 1) == len(one), len(one) < len(whole)]
            goes_on = [_read(context, [42], len(PROMPT), seq_id) for seq_id in (0, 1)]
        with _context(model, kv_unified=unified) as other:
            found["set"] = state_set(other, whole) == len(whole)
            back = bytearray(state_size(other))
            state_get(other, back)
            found["positions"] = [[other.pos_min(seq_id), other.pos_max(seq_id)] for seq_id in (0, 1)]
            found["same bytes"] = back == whole
            if not found["same bytes"]:
                return found
            found["same rows"] = [_read(other, [42], len(PROMPT), seq_id) for seq_id in (0, 1)] == goes_on
        with _context(model, kv_unified=unified) as third:
            found["one set"] = sequence_state_set(third, one, 0) == len(one)
            found["one row"] = _read(third, [42], len(PROMPT), 0) == goes_on[1]
        with _context(model, kv_unified=unified) as fourth:
            refused = []
            for wrong in (bytes(64), whole[: len(whole) // 2]):
                try:
                    refused.append(str(state_set(fourth, wrong)))
                except CallFailed as error:
                    refused.append(error.function)
            found["refused"] = refused
            try:
                sequence_state_set(fourth, bytes(16), 0)
            except CallFailed as error:
                found["one refused"] = error.function
            with pytest.raises(BufferError):
                state_get(fourth, bytes(10))  # read-only
    return found


@pytest.mark.parametrize(("folder", "unified"), [(NEWEST, False), (NEWEST, True), (OLDER, True), (WITH_RPC, False)])
def test_a_state_comes_back_whole(smollm2: Path, folder: str, unified: bool) -> None:
    """All sequences or one, into a fresh context: the same bytes, the same next rows; other bytes are refused."""
    found = run_child(child_state, library_of(folder), smollm2, unified).value()
    assert found["got"][0]
    assert found["one"] == [True, True]
    assert found["set"]
    assert found["same bytes"]
    assert found["same rows"]
    assert found["one set"]
    assert found["one row"]
    assert found["refused"] == ["llama_state_set_data"] * 2
    assert found["one refused"] == "llama_state_seq_set_data"


def test_an_older_build_restores_the_last_stream_alone(smollm2: Path) -> None:
    """It says that it read everything: what a rule of the switch stands on, and why positions are proved."""
    found = run_child(child_state, library_of(OLDER), smollm2, False).value()
    assert found["set"]
    assert found["positions"] == [[-1, -1], [0, len(PROMPT) - 1]]
    assert not found["same bytes"]


def child_refusals(path: str, model_path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    library = Library.open(path)
    model = Model.load(library, model_path, ModelParams())
    context = _context(model)
    for arguments in (([], [], [], []), ([5], [0, 1], [0], [True]), ([5], [0], [], [True]), ([5], [0], [0], [])):
        with pytest.raises(ValueError, match="a batch of"):
            context.decode(*arguments)
    for work, most in ((context.decode, 64), (context.encode, 64)):
        with pytest.raises(ValueError, match=f"a batch of 65 tokens .* {most} at most"):
            work([5] * 65, range(65), [0] * 65, [True] * 65)
    _read(context, PROMPT)
    with pytest.raises(CallFailed) as no_row:
        context.logits(0)
    found["no row"] = no_row.value.function
    with pytest.raises(CallFailed) as no_embedding:
        context.embeddings(0)
    found["no embedding"] = no_embedding.value.function
    first = len(PROMPT)
    while first + 64 <= context.n_ctx_seq:
        _read(context, [5] * 64, first)
        first += 64
    with pytest.raises(CallFailed) as full:
        _read(context, [5] * 64, first)
    found["full"] = full.value.rc
    with pytest.raises(CallFailed) as gap:
        _read(context, [5], 2000)
    found["gap"] = gap.value.rc
    stop = []
    with Context(model, ContextParams(n_ctx=256, n_threads=1), abort=lambda: bool(stop)) as abortable:
        _read(abortable, PROMPT)
        stop.append(True)
        with pytest.raises(CallFailed) as aborted:
            _read(abortable, [5], len(PROMPT))
        found["aborted"] = aborted.value.rc
        stop.clear()
        found["goes on"] = len(_read(abortable, [5], abortable.pos_max(0) + 1))
    with pytest.raises(CallFailed) as impossible:
        _context(model, type_v=KvType.Q8_0, flash_attn=FlashAttn.OFF)
    found["impossible"] = [impossible.value.function, str(impossible.value)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forgotten = _context(model)
        del forgotten
        gc.collect()
    found["warnings"] = [one.category.__name__ for one in caught]
    context.close()
    context.close()
    with pytest.raises(HandleClosed, match="context"):
        _read(context, [5])
    with pytest.raises(HandleClosed, match="context"):
        state_size(context)
    model.close()
    with pytest.raises(HandleClosed, match="model"):
        _context(model)
    return found


def test_what_cannot_be_decoded_is_an_error_and_no_crash(smollm2: Path) -> None:
    """Odd batches, rows nobody asked for, a full cache, a gap, an abort, impossible types, and use after close."""
    found = run_child(child_refusals, library_of(NEWEST), smollm2).value()
    assert found["no row"] == "llama_get_logits_ith"
    assert found["no embedding"] == "llama_get_embeddings_ith"
    assert found["full"] == 1
    assert found["gap"] == -1
    assert found["aborted"] == 2
    assert found["goes on"] == 4 * 49152
    assert found["impossible"][0] == "llama_init_from_model"
    assert "flash" in found["impossible"][1].lower()
    assert found["warnings"] == ["ResourceWarning"]
