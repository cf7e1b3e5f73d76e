"""A placement: where a model and its cache live, and how their work is split over devices.

Everything here is a pure value. What a given model and build can do with a placement is the business of
`switching.rules`; this module only refuses what no model and no build could mean (a split that is not a number, a
context of -1 tokens).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from splitctl.errors import ConfigInvalid

Word = TypeVar("Word", bound=enum.Enum)

#: What `type_k` and `type_v` may be.  Source: `kv_cache_types` in llama.cpp's common/arg.cpp.
KV_TYPES: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

#: Most sequences a context can hold.  Source: LLAMA_MAX_SEQ in llama.cpp's src/llama-cparams.h.
MAX_SEQUENCES = 256

#: Most shares that a split text may hold before anything is built from it; builds have 16 devices at most.
MAX_SHARES = 128

#: Shares are compared after scaling to a sum of one and rounding to this many digits (they are C floats).
_SHARE_DIGITS = 6
#: The library adds shares up in floats of 32 bits.
_MAX_SHARE = 1e30

_INT32_MAX = 2**31 - 1

#: The flag of each field, as users know it.
FLAGS: Mapping[str, str] = {
    "mode": "-sm",
    "devices": "--device",
    "tensor_split": "-ts",
    "main_gpu": "-mg",
    "n_gpu_layers": "-ngl",
    "n_ctx": "-c",
    "type_k": "-ctk",
    "type_v": "-ctv",
    "flash_attn": "-fa",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "n_seq_max": "-np",
    "n_threads": "-t",
    "n_threads_batch": "-tb",
    "offload_kqv": "-nkvo",
    "kv_unified": "-kvu",
}


class SplitMode(enum.Enum):
    """How a model is spread over devices, by llama.cpp's own words."""

    NONE = "none"
    LAYER = "layer"
    ROW = "row"
    TENSOR = "tensor"


class FlashAttn(enum.Enum):
    """Whether flash attention is used; `AUTO` is resolved once, when a session opens."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class PlacementInvalid(ConfigInvalid):
    """A placement that no model and no build could mean; the message names field, value and what is wanted."""


def parse_tensor_split(text: str, *, max_shares: int = MAX_SHARES) -> tuple[float, ...] | None:
    """Read a tensor split as the command line gives it ("3,1" or "3/1").

    Args:
        text: shares separated by commas or slashes; empty means the library's default.
        max_shares: how many shares the build takes (its llama_max_devices).

    Returns:
        The shares as given, or None for the default.

    Raises:
        PlacementInvalid: a share is not a number, is negative or not finite, all are zero, or there are too many.
    """
    if not text.strip():
        return None
    parts = text.replace("/", ",").split(",", max_shares + 1)
    if len(parts) > max_shares:
        raise PlacementInvalid("tensor_split", _shortened(text), f"{max_shares} shares at most (one a device)")
    try:
        shares = tuple(float(part) for part in parts)
    except ValueError as error:
        raise PlacementInvalid("tensor_split", _shortened(text), "numbers separated by commas, such as 3,1") from error
    check_tensor_split(shares, max_shares=max_shares)
    return shares


def check_tensor_split(shares: Sequence[float], *, max_shares: int = MAX_SHARES) -> None:
    """Refuse shares that are no split.

    Args:
        shares: one share a device, in any unit.
        max_shares: how many shares are allowed.

    Raises:
        PlacementInvalid: empty, too long, a share negative or too large for the library's floats, or all zero.
    """
    if not shares:
        raise PlacementInvalid("tensor_split", (), "one share or more, or left out")
    if len(shares) > max_shares:
        raise PlacementInvalid("tensor_split", f"{len(shares)} shares", f"{max_shares} shares at most (one a device)")
    for share in shares:
        if not 0 <= share <= _MAX_SHARE:
            raise PlacementInvalid("tensor_split", tuple(shares), f"shares from 0 to {_MAX_SHARE:g}")
    if max(shares) < 1 / _MAX_SHARE:
        raise PlacementInvalid("tensor_split", tuple(shares), "more than zero on one device at least")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights and the cache live, and the shape of the context.

    Attributes:
        mode: the split mode, or its word.
        devices: device names in order, a name may come twice, or one text with commas; empty means all that the library
            offers.
        tensor_split: one share a device, in any unit, or a text such as "3,1"; None means the library's default.
        main_gpu: index into `devices` of the device that mode `none` uses.
        n_gpu_layers: layers placed on devices; negative means all.
        n_ctx: context size [tokens]; 0 means the model's own maximum.
        type_k: cache type of keys, one of `KV_TYPES`.
        type_v: cache type of values, one of `KV_TYPES`.
        offload_kqv: whether the cache lives on the devices (False keeps it in host memory).
        flash_attn: flash attention, or its word.
        n_batch: most tokens of one decode call.
        n_ubatch: most tokens of one computed batch.
        n_seq_max: most sequences at once.
        kv_unified: one buffer of cells for all sequences, instead of a stream each.
        n_threads: threads for batches of one token; 0 means the library's default.
        n_threads_batch: threads for larger batches; 0 means the library's default.
    """

    mode: SplitMode = SplitMode.LAYER
    devices: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] | None = None
    main_gpu: int = 0
    n_gpu_layers: int = -1
    n_ctx: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    offload_kqv: bool = True
    flash_attn: FlashAttn = FlashAttn.AUTO
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    kv_unified: bool = False
    n_threads: int = 0
    n_threads_batch: int = 0

    def __post_init__(self) -> None:
        """Take values in the forms that people write, and refuse what no model and no build could mean.

        Raises:
            PlacementInvalid: with the field, what it holds and what it may hold.
        """
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _fitting(field.name, getattr(self, field.name)))
        if self.tensor_split is not None:
            check_tensor_split(self.tensor_split, max_shares=len(self.devices) or MAX_SHARES)

    @property
    def n_streams(self) -> int:
        """Streams of cells in the context's memory."""
        return 1 if self.kv_unified else self.n_seq_max

    def normalise(self) -> Placement:
        """Write the same placement in the one way that compares equal.

        Returns:
            The placement with shares that sum to one, one a device; "all layers" as -1; no micro-batch above the
            batch; and no split where the mode uses a single device.
        """
        split = self.tensor_split
        if self.mode is SplitMode.NONE:
            split = None
        elif split is not None:
            total = math.fsum(split)
            split = tuple(round(share / total, _SHARE_DIGITS) for share in split)
            split += (0.0,) * (len(self.devices) - len(split))
        return dataclasses.replace(
            self,
            tensor_split=split,
            n_gpu_layers=max(self.n_gpu_layers, -1),
            n_ubatch=min(self.n_ubatch, self.n_batch),
        )

    def differs(self, other: Placement) -> list[str]:
        """Name the fields in which two placements differ, after normalising both, in the order of the class."""
        mine, theirs = self.normalise(), other.normalise()
        return [
            field.name for field in dataclasses.fields(self) if getattr(mine, field.name) != getattr(theirs, field.name)
        ]

    def changed(self, **named: Any) -> Placement:
        """Make the target of a switch: fields that are not named stay, but a tensor split only within a mode.

        Raises:
            PlacementInvalid: an unknown field, or a value that no placement can have.
        """
        named = {name: _fitting(name, value) for name, value in named.items()}
        if "tensor_split" not in named and self.tensor_split is not None:
            moved = named.get("mode", self.mode) is not self.mode
            devices = named.get("devices", self.devices)
            if moved or (devices and len(self.tensor_split) > len(devices)):
                named["tensor_split"] = None
        return dataclasses.replace(self, **named)

    def describe(self) -> str:
        """Say the placement in one line, in the words of the command line.

        Returns:
            For example `-sm tensor --device CPU,CPU -ts 3,1 -c 4096`; defaults of the rest are left out.
        """
        words = []
        plain = Placement()
        for field, flag in FLAGS.items():
            value = getattr(self, field)
            if value == getattr(plain, field) and field != "mode":
                continue
            match value:
                case bool():
                    words.append(flag)
                case enum.Enum():
                    words.append(f"{flag} {value.value}")
                case tuple():
                    words.append(f"{flag} {','.join(one if isinstance(one, str) else f'{one:g}' for one in value)}")
                case _:
                    words.append(f"{flag} {value}")
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Give the placement as plain values by field; enums by their word, tuples as lists."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Placement:
        """Read back what `to_json` gave; a field that is left out keeps its default.

        Raises:
            PlacementInvalid: an unknown field, or a value of the wrong kind or out of range.
        """
        if not isinstance(plain, Mapping):
            raise PlacementInvalid("placement", plain, "an object of the fields " + " ".join(FLAGS))
        return cls(**{name: _fitting(name, value) for name, value in plain.items()})


class Changes(dict[str, Any]):
    """Fields of a placement that a switch changes, by name, with values as a placement holds them.

    What is not named stays as it is; see `Placement.changed`.
    """

    def to_json(self) -> dict[str, Any]:
        """Give the values as `Placement.to_json` does."""
        return {name: _plain(value) for name, value in self.items()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Changes:
        """Read what `to_json` gave, from anybody.

        Raises:
            PlacementInvalid: an unknown field, or a value of the wrong kind or out of range.
        """
        devices = plain.get("devices", [])
        if not isinstance(devices, list) or len(devices) > MAX_SHARES:
            raise PlacementInvalid("devices", type(devices).__name__, f"a list of {MAX_SHARES} names at most")
        if not all(isinstance(name, str) and name.isprintable() for name in devices):
            raise PlacementInvalid("devices", "not a name", "names of devices (splitctl devices lists them)")
        try:
            whole = Placement.from_json(plain)
        except (OverflowError, RecursionError) as error:
            raise PlacementInvalid("placement", "a number that nothing can hold", "numbers of a usual size") from error
        return cls({name: getattr(whole, name) for name in plain})


#: Least and largest value of each whole number.
_RANGES: Mapping[str, tuple[int, int]] = {
    "main_gpu": (0, MAX_SHARES - 1),
    "n_gpu_layers": (-_INT32_MAX, _INT32_MAX),
    "n_ctx": (0, _INT32_MAX),
    "n_batch": (1, _INT32_MAX),
    "n_ubatch": (1, _INT32_MAX),
    "n_seq_max": (1, MAX_SEQUENCES),
    "n_threads": (0, 4096),
    "n_threads_batch": (0, 4096),
}


@cache
def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(Placement)}


def _field_of(name: str) -> dataclasses.Field[Any]:
    """Refuse a name that no field of a placement has."""
    known = _fields()
    if name not in known:
        raise PlacementInvalid("placement", name, "one of the fields " + " ".join(sorted(known)))
    return known[name]


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def whole(value: object) -> int | None:
    """Return a whole number of whichever type (numpy's too) as an int; None for anything else, a bool included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def number(value: object) -> float | None:
    """Return a number of whichever type as a float; None for anything else, a text or a bool included."""
    try:
        return None if isinstance(value, str | bytes | bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def word(name: str, value: object, kind: type[Word]) -> Word:
    """Read an enum, or its word; raises ConfigInvalid with all words."""
    try:
        return kind(value.lower() if isinstance(value, str) else value)
    except ValueError as error:
        raise ConfigInvalid(name, value, "one of " + " ".join(one.value for one in kind)) from error


def flag(name: str, value: object) -> bool:
    """Refuse anything but True or False: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise ConfigInvalid(name, value, "True or False")
    return value


def seconds(name: str, value: object) -> float | None:
    """Read a time, seconds, or None for any; raises ConfigInvalid."""
    found = None if value is None else number(value)
    if value is not None and (found is None or not 0.0 <= found < math.inf):
        raise ConfigInvalid(name, value, "seconds, 0 or more, or None for as long as it takes")
    return found


def _fitting(name: str, value: object) -> Any:
    """Return a value as its field holds it.

    Raises:
        PlacementInvalid: no such field, or a value of the wrong kind or out of range.
    """
    default = _field_of(name).default
    if isinstance(default, enum.Enum):
        return _of_words(name, value, type(default))
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise PlacementInvalid(name, value, "True or False")
    if name in _RANGES:
        low, high = _RANGES[name]
        found = whole(value)
        if found is None or not low <= found <= high:
            raise PlacementInvalid(name, value, f"a whole number from {low} to {high}")
        return found
    if name in {"type_k", "type_v"}:
        word = value.lower() if isinstance(value, str) else value
        if word not in KV_TYPES:
            raise PlacementInvalid(name, value, "one of " + " ".join(KV_TYPES))
        return word
    return _names(name, value) if name == "devices" else _shares(name, value)


def _of_words(name: str, value: object, kind: type[enum.Enum]) -> enum.Enum:
    if kind is FlashAttn and isinstance(value, bool):
        value = "on" if value else "off"
    try:
        return kind(value.lower() if isinstance(value, str) else value)
    except ValueError as error:
        raise PlacementInvalid(name, value, "one of " + " ".join(one.value for one in kind)) from error


def _names(name: str, value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(one, str) and one.strip() for one in names):
        raise PlacementInvalid(name, value, "names of devices (splitctl devices lists them)")
    return tuple(one.strip() for one in names)


def _shares(name: str, value: object) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return parse_tensor_split(value)
    shares = [number(one) for one in value] if isinstance(value, Iterable) else [None]
    if None in shares:
        raise PlacementInvalid(name, value, "numbers, one a device, such as (3, 1)")
    return tuple(one for one in shares if one is not None)


def _shortened(text: str, *, limit: int = 60) -> str:
    """Keep a long text from flooding an error message."""
    return text if len(text) <= limit else text[:limit] + "..."
