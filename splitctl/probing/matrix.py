"""What `verify` tries: every mode with every place and type of the cache, every split, and several sequences. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitctl.placement import FlashAttn, Placement, SplitMode

#: The mode that the others are compared with.
REFERENCE = SplitMode.LAYER


@dataclass(frozen=True, slots=True)
class Cell:
    """One placement to try.

    Attributes:
        placement: where and how.
        is_reference: whether others are compared with it: layer mode, no split named, the cache on the devices.
    """

    placement: Placement
    is_reference: bool

    @property
    def cache_types(self) -> tuple[str, str]:
        """Types of keys and values."""
        return self.placement.type_k, self.placement.type_v

    def label(self) -> str:
        """Name the cell in a few words, such as "tensor, 3,1, f16/f16, cache on the host"."""
        one = self.placement
        split = "" if one.tensor_split is None else ",".join(f"{share:g}" for share in one.tensor_split) + " split, "
        where = "devices" if one.offload_kqv else "host"
        several = f", {sequences(one.n_seq_max, unified=one.kv_unified)}" if one.n_seq_max > 1 else ""
        return f"{one.mode.value}, {split}{one.type_k}/{one.type_v}, cache on the {where}{several}"


def sequences(n: int, *, unified: bool) -> str:
    """Say in a few words how sequences share the cells, such as "2 unified" or "2 streams"; "" for one."""
    return "" if n == 1 else f"{n} unified" if unified else f"{n} streams"


def cells(
    base: Placement,
    modes: Sequence[SplitMode],
    cache_types: Sequence[tuple[str, str]],
    tensor_splits: Sequence[tuple[float, ...]],
    offloads: Sequence[bool] = (True, False),
    n_seq: int = 1,
) -> tuple[Cell, ...]:
    """Lay out what is tried.

    Args:
        base: what all of them have in common.
        modes: the modes to try.
        cache_types: pairs of types, keys and values.
        tensor_splits: shares to try beside the library's own; mode `none` uses a single device and has none.
        offloads: whether the cache is on the devices, each way to try.
        n_seq: sequences that are tried at once, in one cache for all and with a stream each, in the first of these
            places; 1: only one is.

    Returns:
        Every placement once. Those of a pair of cache types stand together and begin with their reference, which is
        there also where its mode was not asked for.
    """
    found: list[Cell] = []
    for type_k, type_v in dict.fromkeys(cache_types):
        plain = dataclasses.replace(base, type_k=type_k, type_v=type_v, tensor_split=None)
        found.append(Cell(dataclasses.replace(plain, mode=REFERENCE, offload_kqv=True), is_reference=True))
        for mode in dict.fromkeys(modes):
            for split in _splits(mode, tensor_splits):
                for offload in dict.fromkeys(offloads):
                    one = dataclasses.replace(plain, mode=mode, tensor_split=split, offload_kqv=offload)
                    found.append(Cell(_with_flash(one), is_reference=False))
        alone = found[:]
        for cell in alone if n_seq > 1 else ():
            one = cell.placement
            if cell.cache_types == (type_k, type_v) and not cell.is_reference and one.offload_kqv is offloads[0]:
                for unified in (True, False):
                    several = dataclasses.replace(one, n_seq_max=n_seq, kv_unified=unified)
                    found.append(Cell(several, is_reference=False))
    return tuple(_each_once(found))


def _splits(mode: SplitMode, asked: Sequence[tuple[float, ...]]) -> Iterable[tuple[float, ...] | None]:
    return (None,) if mode is SplitMode.NONE else (None, *asked)


def _with_flash(placement: Placement) -> Placement:
    """Turn an open choice on where the mode does so by itself, so that the verdict is kept under one name."""
    is_open = placement.flash_attn is FlashAttn.AUTO and placement.mode is SplitMode.TENSOR
    return dataclasses.replace(placement, flash_attn=FlashAttn.ON) if is_open else placement


def _each_once(found: Iterable[Cell]) -> Iterable[Cell]:
    """Leave out what is there already; of two equal ones the reference comes first."""
    seen: set[Placement] = set()
    for cell in found:
        normal = cell.placement.normalise()
        if normal not in seen:
            seen.add(normal)
            yield cell
