"""How a sequence's next token is drawn, and the token drawn: what flags, requests and carries say of it."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ulp
from typing import Any

from splitctl.errors import ConfigInvalid
from splitctl.placement import number, whole

RANDOM_SEED = 0xFFFFFFFF
"""The seed that asks for a random one (llama.cpp's LLAMA_DEFAULT_SEED)."""

MAX_GRAMMAR = 1 << 20
"""More than any grammar of use; reading one takes the library's time and memory [characters]."""

_I32_MAX = (1 << 31) - 1
_F64_MAX = sys.float_info.max


@dataclass(frozen=True, slots=True)
class SamplerParam:
    """What flags, HTTP bodies and errors know of a field of `SamplerSpec`.

    Attributes:
        default: llama.cpp's; its type is the field's.
        low: least value; of a number.
        high: largest value; of a number.
        wanted: the range in words, for errors.
        help: what it does, one line.
        flags: on the command line.
        envvar: variable that stands in for the flag; None: there is none.
        json_name: in the body of an HTTP request.
        served: least and largest value there.
    """

    default: float | tuple[str, ...]
    low: float
    high: float
    wanted: str
    help: str
    flags: tuple[str, ...]
    envvar: str | None
    json_name: str
    served: tuple[float, float]


def _param(
    default: float | tuple[str, ...],
    low: float,
    high: float,
    wanted: str,
    *flags: str,
    about: str,
    envvar: str | None = None,
    json_name: str = "",
    served: tuple[float, float] | None = None,
) -> Any:
    json_name = json_name or flags[-1].removeprefix("--").replace("-", "_")
    param = SamplerParam(default, low, high, wanted, about, flags, envvar, json_name, served or (low, high))
    return field(default=default, metadata={"param": param})


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """How the next token is chosen from logits; names and defaults are llama.cpp's.

    The one list of its fields: flags, HTTP bodies and the carry follow it.

    Args:
        temp: temperature; at or below 0 the largest logit is taken and nothing is drawn.
        top_k: keep the k largest; at or below 0 keeps all.
        top_p: keep the smallest set with this probability, 0 to 1; 1 keeps all.
        min_p: keep what has at least this share of the largest probability, 0 to 1; 0 keeps all.
        repeat_penalty: divides (or multiplies) the logits of recent tokens, above 0; 1 changes nothing.
        repeat_last_n: tokens that count as recent; 0 none, -1 the whole context.
        seed: start of the random draws, 0 to 2**32 - 1; ``RANDOM_SEED`` asks for a random one. A carry holds the one
            that was really used.
        stop: texts that end the generation; not part of the text.

    Raises:
        ConfigInvalid: a value is outside its range.
    """

    temp: float = _param(
        0.8, -_F64_MAX, _F64_MAX, "a finite number", "--temp", "--temperature", envvar="LLAMA_ARG_TEMPERATURE",
        served=(0.0, 100.0), about="Temperature; 0 takes the most likely token.",
    )  # fmt: skip
    top_k: int = _param(
        40, -_I32_MAX, _I32_MAX, "a whole number of 32 bits", "--top-k", envvar="LLAMA_ARG_TOP_K",
        served=(-1, _I32_MAX), about="Keep the k most likely tokens; 0 keeps all.",
    )  # fmt: skip
    top_p: float = _param(
        0.95, 0.0, 1.0, "0 to 1", "--top-p", envvar="LLAMA_ARG_TOP_P",
        about="Keep the most likely tokens up to this total probability; 1 keeps all.",
    )  # fmt: skip
    min_p: float = _param(
        0.05, 0.0, 1.0, "0 to 1", "--min-p", envvar="LLAMA_ARG_MIN_P",
        about="Keep tokens with at least this share of the highest probability; 0 keeps all.",
    )  # fmt: skip
    repeat_penalty: float = _param(
        1.0, ulp(0.0), _F64_MAX, "a finite number above 0", "--repeat-penalty", envvar="LLAMA_ARG_REPEAT_PENALTY",
        served=(1e-6, 100.0), about="Penalty for recent tokens; 1 is none.",
    )  # fmt: skip
    # Served: the library keeps room for as many tokens.
    repeat_last_n: int = _param(
        64, -1, _I32_MAX, "a whole number of 32 bits, -1 or more", "--repeat-last-n",
        served=(-1, 1 << 20), about="How many recent tokens are penalized; 0 is none, -1 the whole context.",
    )  # fmt: skip
    seed: int = _param(
        RANDOM_SEED, 0, RANDOM_SEED, "a whole number, 0 to 4294967295", "-s", "--seed",
        served=(-(1 << 63), (1 << 63) - 1), about="Random seed; -1 takes a random one.",
    )  # fmt: skip
    stop: tuple[str, ...] = _param(
        (), 0, 0, "texts that are not empty", "-r", "--stop", "--reverse-prompt", json_name="stop",
        about="Stop before this text; can be given several times.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Take numbers of any type and one stop text alone; refuse values that the library would take and misuse."""
        for name, param in SAMPLER_PARAMS.items():
            object.__setattr__(self, name, _fitting(name, getattr(self, name), param))

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken without a draw."""
        return self.temp <= 0.0

    def seeded(self) -> SamplerSpec:
        """Give the same with a seed drawn now where it asks for a random one, so that its draws can be repeated."""
        return replace(self, seed=secrets.randbelow(RANDOM_SEED)) if self.seed == RANDOM_SEED else self


def _fitting(name: str, value: object, param: SamplerParam) -> float | tuple[str, ...]:
    if isinstance(param.default, tuple):
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
            raise ConfigInvalid(name, value, param.wanted)
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise ConfigInvalid(name, value, "texts that UTF-8 can hold (one has half a character)") from error
        return tuple(texts)
    found = whole(value) if isinstance(param.default, int) else number(value)
    if found is None or not param.low <= found <= param.high:
        raise ConfigInvalid(name, value, param.wanted)
    return found


SAMPLER_PARAMS: Mapping[str, SamplerParam] = {one.name: one.metadata["param"] for one in fields(SamplerSpec)}
"""What is known of each field of `SamplerSpec`, in their order."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Args:
        id: its id.
        piece: its bytes; may be a part of a UTF-8 character; empty for one that ends the generation.
        pos: its position in the sequence.
        is_end: it ends the generation.
        is_stop: it completes a stop text, which is not in the pieces.
    """

    id: int
    piece: bytes
    pos: int
    is_end: bool
    is_stop: bool = False
