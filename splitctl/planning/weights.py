"""Where the weights lie: which tensors a device holds under each mode, and what stays on the host.

Source: load_tensors in llama-model.cpp and llama-arch.cpp's table of tensors, of llama.cpp (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from splitctl.model.facts import ModelFacts
from splitctl.model.header import TensorInfo
from splitctl.model.layers import layers_of
from splitctl.model.slices import Cutter
from splitctl.planning.backends import INPUT_TENSORS, Backend

#: Tensors without a layer number that every device of a layer holds once.
_OF_EVERY_LAYER = re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$")
#: Tensors without a layer number that go with the first layer.
_OF_FIRST_LAYER = frozenset({"token_embd_norm.weight", "token_embd_norm.bias"})
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
#: Architectures whose output matrix is not the embedding when it has none of its own.
_NO_OUTPUT = frozenset(
    {"bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert"}
)
#: The embedding as it lies on the device of the output layer, where both are one tensor of the file.
_TIED = "token_embd.weight"

HOST = -1
"""Stands for the host among the places of a tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, or what one device has of it.

    Args:
        tensor: the tensor of the file.
        place: index of the device, or ``HOST``.
        n_bytes: of it, bytes, before padding.
        part: the file it is in, from 0.
    """

    tensor: TensorInfo
    place: int
    n_bytes: int
    part: int


def layer_devices(n_layers: int, shares: Sequence[float], n_gpu_layers: int = -1) -> tuple[int, ...]:
    """Assign layers to devices, as layer mode does: the shares are of layers, in C floats.

    Args:
        n_layers: layers of the model.
        shares: one a device, in any unit, not all zero.
        n_gpu_layers: layers on devices, the last ones; negative for all.

    Returns:
        A device for each layer and for the output, ``HOST`` for those that stay there.
    """
    on_devices = n_layers + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layers + 1)
    start = n_layers + 1 - on_devices
    total, scan = np.float32(0), []
    for share in shares:
        total = np.float32(total + np.float32(share))
        scan.append(total)
    points = [np.float32(one / total) for one in scan]

    def device(index: int) -> int:
        if index < start or on_devices == 0:
            return HOST
        at = np.float32(np.float32(index - start) / np.float32(on_devices))
        return next((number for number, point in enumerate(points) if at < point), len(points) - 1)

    return tuple(device(index) for index in range(n_layers + 1))


def pieces_by_layer(facts: ModelFacts, devices: Sequence[int]) -> Iterator[Piece]:
    """Place every tensor as layer mode (or none) does: a piece for every place that holds it."""
    for tensor, part in _loaded(facts):
        for place in _places(facts, tensor, devices):
            yield Piece(tensor, place, tensor.n_bytes or 0, part)


def pieces_by_tensor(facts: ModelFacts, cutter: Cutter, n_devices: int, n_gpu_layers: int = -1) -> Iterator[Piece]:
    """Place every tensor as tensor mode does: a piece for every device that holds some of it."""
    on_meta = layer_devices(layers_of(facts).each[-1].index + 1, (1.0,), n_gpu_layers)
    for tensor, part in _loaded(facts):
        for place in _places(facts, tensor, on_meta):
            if place == HOST:
                yield Piece(tensor, HOST, tensor.n_bytes or 0, part)
                continue
            cut = cutter.cut(tensor.name, tensor.dims)
            whole = tensor.dims[cut.axis] if cut.axis is not None and cut.axis < len(tensor.dims) else 0
            for device in range(n_devices):
                share = (tensor.n_bytes or 0) * cut.sizes[device] // whole if whole else tensor.n_bytes or 0
                yield Piece(tensor, device, share, part)


def _loaded(facts: ModelFacts) -> Iterator[tuple[TensorInfo, int]]:
    """Give the tensors that are loaded, with the part that holds each."""
    skipped = {layer.index for layer in layers_of(facts).each if layer.is_prediction}
    ends: list[int] = []
    for count in facts.part_tensors or (len(facts.tensors),):
        ends.append(count + (ends[-1] if ends else 0))
    part = 0
    for number, tensor in enumerate(facts.tensors):
        while part < len(ends) - 1 and number >= ends[part]:
            part += 1
        found = _BLOCK.match(tensor.name)
        if found and int(found[1]) in skipped:
            continue
        yield tensor, part


def _places(facts: ModelFacts, tensor: TensorInfo, devices: Sequence[int]) -> tuple[int, ...]:
    name, output = tensor.name, devices[-1]
    found = _BLOCK.match(name)
    if found:
        index = int(found[1])
        passes = range(index, len(devices) - 1, facts.n_layer) if facts.n_layer < len(devices) - 1 else (index,)
        return tuple(dict.fromkeys(devices[one] for one in passes if one < len(devices) - 1))
    if _OF_EVERY_LAYER.match(name):
        return tuple(dict.fromkeys(devices[:-1]))
    if name in _OF_FIRST_LAYER:
        return (devices[0],)
    if name == _TIED and is_tied(facts):
        return (HOST,) if output == HOST else (HOST, output)
    return (HOST,) if name in INPUT_TENSORS else (output,)


def is_tied(facts: ModelFacts) -> bool:
    """Tell whether the embedding is also the output matrix; not where there is an output matrix, or none is needed."""
    return facts.architecture not in _NO_OUTPUT and all(one.name != "output.weight" for one in facts.tensors)


def weights_by_place(pieces: Sequence[Piece], backends: Mapping[int, Backend]) -> dict[int, int]:
    """Sum pieces by place, padded as each place's backend pads them; bytes."""
    sums = dict.fromkeys(backends, 0)
    for piece in pieces:
        sums[piece.place] += backends[piece.place].allocated(piece.tensor, piece.n_bytes)
    return sums


def mapped_bytes(pieces: Sequence[Piece]) -> int:
    """Tell the bytes of file that one mapping covers: from the first tensor to the end of the last, by part.

    A tensor that is there twice is mapped once.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for piece in pieces:
        start, end = piece.tensor.offset, piece.tensor.offset + (piece.tensor.n_bytes or 0)
        first[piece.part] = min(first.get(piece.part, start), start)
        last[piece.part] = max(last.get(piece.part, end), end)
    return sum(last[part] - first[part] for part in first)
