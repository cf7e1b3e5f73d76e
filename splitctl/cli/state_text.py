"""Says what a state is: as one object for programs, as a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

import statecodec
from splitctl.cli.state_diff import rotation_of
from splitctl.cli.state_file import CarryAround, StateFile
from splitctl.outcome import mib
from statecodec import AttentionSection, Columns, KvStream, OpaqueSection, RecurrentSection, Rows, Section, StateImage

_FIRST_TOKENS = 16


def describe(file: StateFile, image: StateImage) -> dict[str, Any]:
    """Say what a state in a file is, as an object for JSON.

    Version word, layouts and producer are three separate answers: the word is what a file says, the layouts are what
    its structure can be, the producer is a guess.
    """
    # One more than there are sections where there are none.
    ends = [*(section.offset for section in image.sections[1:]), image.n_bytes]
    return {
        "file": str(file.path),
        "file_bytes": file.n_bytes,
        "container": "llama.cpp" if file.carry is None else "splitctl carry",
        "form": image.form.value if image.tokens is not None else f"{image.form.value} blob",
        "n_bytes": image.n_bytes,
        "version_word": image.version_word,
        "layouts": sorted(layout.name for layout in image.layouts),
        "versions": sorted(image.versions),
        "sequence_versions": sorted(image.sequence_versions),
        "producer_guess": list(image.writers),
        "architecture": image.architecture,
        "content": image.content.value,
        "is_opaque": image.is_opaque,
        "source_seq_id": image.source_seq_id,
        "sequences": [{"seq_id": seq_id, **span._asdict()} for seq_id, span in image.sequences().items()],
        "findings": [
            {"code": one.code.value, "seq_id": one.seq_id, "text": one.text} for one in statecodec.findings(image)
        ],
        "tokens": _tokens(image),
        "outputs": _outputs(image),
        "sections": [_section(section, end) for section, end in zip(image.sections, ends, strict=False)],
        "carry": None if file.carry is None else _carry(file.carry),
    }


def _tokens(image: StateImage) -> dict[str, Any] | None:
    tokens = image.tokens
    if tokens is None:
        return None
    return {
        "kind": "plain" if tokens.packed_version is None else f"packed v{tokens.packed_version}",
        "n_tokens": len(tokens.text),
        "n_words": len(tokens.words),
        "media": [{"start": one.start, "n_bytes": len(one.data)} for one in tokens.media],
        "first": tokens.text[:_FIRST_TOKENS].tolist(),
    }


def _outputs(image: StateImage) -> dict[str, Any] | None:
    outputs = image.outputs
    if outputs is None:
        return None
    return {
        "ids": outputs.ids.tolist(),
        "n_logits_rows": outputs.logits.shape[0],
        "n_vocab": outputs.logits.shape[1],
        "n_embeddings": outputs.embeddings.size,
    }


def _section(section: Section, end: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "kind": section.kind.value,
        "offset": section.offset,
        "n_bytes": end - section.offset,
        "n_cells": section.n_cells,
        "n_layers": section.n_layers,
    }
    match section:
        case AttentionSection():
            filled = [stream for _, stream in section.filled()]
            body |= {
                "n_streams": len(section.streams),
                "ext_bytes": section.ext_bytes,
                "v": _v(filled),
                "v_trans": filled[0].v_trans if filled else None,
                "rotation": _rotation(filled[0]) if filled else None,
                "sequences": _sequences(section),
                "streams": [
                    {"index": index, "n_cells": 0 if stream is None else len(stream.cells)}
                    for index, stream in enumerate(section.streams)
                ],
                "layers": _layers(filled[0]) if filled else [],
            }
        case RecurrentSection():
            body |= {
                "n_layer": section.n_layer,
                "sequences": _sequences(section),
                "layers": [
                    {
                        "r": {"type": layer.r.kind.name.lower(), "row_bytes": layer.r.row_bytes},
                        "history_bytes": None if layer.history is None else layer.history.row_bytes,
                        "s": {"type": layer.s.kind.name.lower(), "row_bytes": layer.s.row_bytes},
                    }
                    for layer in section.layers
                ],
            }
        case OpaqueSection():
            body["name"] = section.name
    return body


def _v(filled: list[KvStream]) -> str:
    if not filled or not filled[0].values:
        return "absent"
    return "transposed" if filled[0].v_trans else "plain"


def _rotation(stream: KvStream) -> dict[str, Any]:
    """Hadamard blocks of K and V, None where nothing says; whether it is the bytes that say it."""
    known = rotation_of(stream)
    return {"said": stream.rotation is not None, "k": known.k, "v": known.v}


def _sequences(section: AttentionSection | RecurrentSection) -> list[dict[str, Any]]:
    """What every sequence has here; positions that are missing between its first and its last are counted."""
    found = []
    for seq_id, span in section.sequences().items():
        if isinstance(section, AttentionSection):
            pairs = [stream.cells.pairs() for _, stream in section.filled()]
            held = np.unique(np.concatenate([positions[ids == seq_id] for ids, positions in pairs]))
            n_missing = span.pos_max - span.pos_min + 1 - len(held)
        else:
            n_missing = 0
        found.append({"seq_id": seq_id, **span._asdict(), "n_missing": n_missing})
    return found


def _layers(stream: KvStream) -> list[dict[str, Any]]:
    values = stream.values or (None,) * len(stream.keys)
    return [
        {"k": _rows(key), "v": None if value is None else _rows(value)}
        for key, value in zip(stream.keys, values, strict=True)
    ]


def _rows(layer: Rows | Columns) -> dict[str, Any]:
    return {"type": layer.kind.name.lower(), "n_values": layer.n_values, "row_bytes": layer.row_bytes}


def _carry(carry: CarryAround) -> dict[str, Any]:
    identity, representation = carry.words.fingerprint.identity, carry.words.fingerprint.representation
    sequences = []
    for one in carry.words.sequences:
        tokens = carry.found.tokens(one.seq_id)
        sequences.append(
            {
                "seq_id": one.seq_id,
                "n_past": one.n_past,
                "n_tokens": 0 if tokens is None else tokens.size,
                "first": [] if tokens is None else tokens[:_FIRST_TOKENS].tolist(),
            }
        )
    return {
        "build": representation.build,
        "state_version": representation.state_version,
        "architecture": identity.architecture,
        "n_vocab": identity.n_vocab,
        "placement": carry.words.placement.to_json(),
        "sequences": sequences,
    }


# ---- for people ----


def rows(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lay out as labels and texts what `describe` gave."""
    yield "file", f"{body['file']} ({_size(body['file_bytes'])})"
    form = body["form"] if body["carry"] is None else f"{body['form']} in a splitctl carry"
    yield "form", form if body["content"] == "full" else f"{form}, {body['content']}"
    yield "version word", "none in this form" if body["version_word"] is None else str(body["version_word"])
    yield "layout", " or ".join(body["layouts"])
    if body["carry"] is not None:
        carry = body["carry"]
        yield "made by", f"build {carry['build']}, state version {carry['state_version']}"
    yield "producer (a guess)", "; or ".join(body["producer_guess"])
    yield "architecture", body["architecture"] or "not said in this form"
    if body["source_seq_id"] is not None:
        yield "taken from", f"sequence {body['source_seq_id']}"
    yield from _token_rows(body)
    if body["outputs"] is not None:
        outputs = body["outputs"]
        ids = ", ".join(map(str, outputs["ids"][:8])) + (", ..." if len(outputs["ids"]) > 8 else "")
        kept = f"{outputs['n_logits_rows']} rows of {outputs['n_vocab']} logits, {outputs['n_embeddings']} embeddings"
        yield "outputs", f"ids {ids or '-'}; {kept}"
    for one in body["sequences"]:
        yield f"sequence {one['seq_id']}", f"{one['n_cells']} cells, positions {one['pos_min']} to {one['pos_max']}"
    yield from (("note", one["text"]) for one in body["findings"])
    if not body["sections"]:
        why = "the model keeps nothing between two decodes" if body["n_bytes"] else "the tokens alone were saved"
        yield "memory", f"none: {why}"
    for index, section in enumerate(body["sections"]):
        yield f"section {index}", _section_text(section)
        yield from ((f"  {label}", text) for label, text in _section_rows(section))


def _size(n_bytes: int) -> str:
    return f"{n_bytes:,} bytes" if n_bytes < 1 << 20 else f"{mib(n_bytes)}, {n_bytes:,} bytes"


def _token_rows(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if body["carry"] is not None:
        for one in body["carry"]["sequences"]:
            yield f"tokens of {one['seq_id']}", _listed(one["first"], one["n_tokens"])
    tokens = body["tokens"]
    if tokens is not None:
        text = f"{tokens['kind']}: {_listed(tokens['first'], tokens['n_tokens'])}"
        for one in tokens["media"]:
            text += f"; media at {one['start']} ({one['n_bytes']} bytes)"
        yield "tokens", text
    elif body["carry"] is None:
        yield "tokens", "none in this form: only a file or a carry lists them"


def _listed(first: list[int], count: int) -> str:
    listed = ", ".join(map(str, first[:8]))
    return f"{count} ({listed}{', ...' if count > 8 else ''})" if count else "0"


def _section_text(section: dict[str, Any]) -> str:
    if section["kind"] == "opaque":
        return f"{section['name']}, a memory with a format of its own: carried whole ({_size(section['n_bytes'])})"
    text = f"{section['kind']}, {section['n_cells']} cells, {section['n_layers'] or 0} layers"
    return f"{text}, at byte {section['offset']} ({_size(section['n_bytes'])})"


def _section_rows(section: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if section["kind"] == "attention":
        streams = section["streams"]
        cells = ", ".join(str(one["n_cells"]) for one in streams[:16]) + (", ..." if len(streams) > 16 else "")
        yield "streams", f"{len(streams)}" + (f" (cells: {cells})" if len(streams) > 1 else "")
        yield "V", f"{section['v']}" + ("" if section["v_trans"] is None else f" (v_trans {int(section['v_trans'])})")
        if section["rotation"] is not None:
            yield "rotation", _rotation_text(section["rotation"])
        if section["ext_bytes"]:
            yield "extra record", f"{section['ext_bytes']} bytes a cell"
    number = 0
    for text, group in groupby(section.get("layers", ()), key=_layer_text):
        count = len(list(group))
        name = f"layer {number}" if count == 1 else f"layers {number} to {number + count - 1}"
        number += count
        yield name, text


def _rotation_text(rotation: dict[str, Any]) -> str:
    def side(block: int | None) -> str:
        return "unknown" if block is None else f"blocks of {block}" if block else "none"

    said = "" if rotation["said"] else " (this layout does not say)"
    return f"K {side(rotation['k'])}, V {side(rotation['v'])}{said}"


def _layer_text(layer: dict[str, Any]) -> str:
    parts = []
    for name in ("k", "v", "r", "s"):
        side = layer.get(name)
        if side is not None:
            parts.append(f"{name.upper()} {side['type']}, {side['row_bytes']} bytes a row")
    if layer.get("history_bytes") is not None:
        parts.append(f"second history {layer['history_bytes']} bytes a row")
    return "; ".join(parts)
