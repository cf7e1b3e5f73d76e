"""A model's first layers as a model of their own: one layer of every kind, and the data that belong to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from splitctl.model.facts import read_facts
from splitctl.placement import Placement
from splitctl.probing.short_model import short_model
from tools.gguf_out import MetaKind, MetaValue, TensorSlot, write_gguf

_F32, _N_LAYERS = 0, 6


def _meta(*more: MetaValue) -> tuple[MetaValue, ...]:
    return (
        MetaValue("general.architecture", MetaKind.STR, "llama"),
        MetaValue("llama.block_count", MetaKind.U32, _N_LAYERS),
        MetaValue("llama.embedding_length", MetaKind.U32, 8),
        MetaValue("llama.attention.head_count", MetaKind.U32, 2),
        *more,
    )


def _slots(names: list[str]) -> list[TensorSlot]:
    return [TensorSlot(name, (8,), _F32, 32) for name in names]


def _layers(extra: dict[int, str]) -> list[str]:
    """Two tensors a layer, one more in some, between those that belong to no layer."""
    layers = [f"blk.{n}.{part}.weight" for n in range(_N_LAYERS) for part in ("attn_q", "ffn_up", extra.get(n)) if part]
    return ["token_embd.weight", *layers, "output_norm.weight"]


def _write(path: Path, names: list[str], *more: MetaValue) -> Path:
    slots = _slots(names)
    write_gguf(path, _meta(*more), slots, (bytes([1 + n] * 32) for n in range(len(slots))))
    return path


def _short(path: Path, **placement: object) -> tuple[list[str], dict[str, bytes]] | None:
    """Give the names of the short model's tensors and their data; None where there is none."""
    fd = short_model(path, Placement(**placement))  # type: ignore[arg-type]
    if fd is None:
        return None
    facts = read_facts(Path(f"/proc/self/fd/{fd}"))
    (header,) = facts.headers
    data = {one.name: os.pread(fd, 32, header.data_offset + one.offset) for one in header.tensors}
    os.close(fd)
    assert facts.n_layer == len({name.split(".")[1] for name in data if name.startswith("blk.")})
    return list(data), data


@pytest.mark.parametrize(
    ("extra", "devices", "n_kept"),
    [({}, (), 2), ({2: "ffn_gate_exps"}, (), 3), ({2: "a", 3: "a", 5: "a"}, (), 3), ({}, ("A", "B", "C", "D"), 4)],
    ids=["all alike", "one of another kind", "several of it", "a layer a device"],
)
def test_as_many_layers_are_kept_as_have_every_kind(
    tmp_path: Path, extra: dict[int, str], devices: tuple[str, ...], n_kept: int
) -> None:
    """Each tensor keeps its own data, those of no layer too."""
    names = _layers(extra)
    found = _short(_write(tmp_path / "m.gguf", names), devices=devices)
    assert found is not None
    kept, data = found
    wanted = [name for name in names if not name.startswith("blk.") or int(name.split(".")[1]) < n_kept]
    assert kept == wanted
    assert all(data[name] == bytes([1 + names.index(name)] * 32) for name in kept)


def test_parts_give_one_short_model(tmp_path: Path) -> None:
    """The data come from whichever part has them."""
    names = _layers({})
    for number, half in enumerate((names[:7], names[7:])):
        split = (
            MetaValue("split.no", MetaKind.U16, number),
            MetaValue("split.count", MetaKind.U16, 2),
            MetaValue("split.tensors.count", MetaKind.I32, len(names)),
        )
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        data = (bytes([1 + names.index(name)] * 32) for name in half)
        write_gguf(path, _meta(*split) if number == 0 else split, _slots(half), data)
    found = _short(tmp_path / "m-00001-of-00002.gguf")
    assert found is not None
    assert found[1]["output_norm.weight"] == bytes([len(names)] * 32)
    assert len(found[0]) == 6


@pytest.mark.parametrize(
    ("names", "more", "placement"),
    [
        (_layers({5: "last_alone"}), (), {}),
        (_layers({}), (MetaValue("llama.attention.head_count_kv", MetaKind.U32, (2,) * _N_LAYERS),), {}),
        ([*_layers({}), "enc.blk.0.attn_q.weight"], (), {}),
        (_layers({})[:-3], (), {}),
        (_layers({}), (), {"n_gpu_layers": 4}),
    ],
    ids=["the last is of a kind of its own", "a number a layer", "an encoder", "a layer lacks", "layers on the host"],
)
def test_what_a_few_layers_would_not_show_has_no_short_model(
    tmp_path: Path, names: list[str], more: tuple[MetaValue, ...], placement: dict[str, object]
) -> None:
    """Then the whole model is compared."""
    assert _short(_write(tmp_path / "m.gguf", names, *more), **placement) is None
