"""The sampler's specification: llama.cpp's defaults, and refusals by name."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from splitctl.carry.sampling import RANDOM_SEED, SAMPLER_PARAMS, SamplerSpec
from splitctl.carry.sequence import no_logits, no_tokens
from splitctl.errors import ConfigInvalid


def test_the_defaults_are_those_of_llama_cpp() -> None:
    """Source: common_params_sampling in llama.cpp's common/common.h."""
    assert asdict(SamplerSpec()) == {
        "temp": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "seed": 0xFFFFFFFF,
        "stop": (),
    }
    assert SamplerSpec().seed == RANDOM_SEED


def test_every_field_can_be_given_everywhere() -> None:
    """Each field has flags, a help text and a name in HTTP bodies of its own, and its default is that of the list."""
    assert {name: param.default for name, param in SAMPLER_PARAMS.items()} == asdict(SamplerSpec())
    flags = [flag for param in SAMPLER_PARAMS.values() for flag in param.flags]
    assert len(set(flags)) == len(flags)
    assert len({param.json_name for param in SAMPLER_PARAMS.values()}) == len(SAMPLER_PARAMS)
    assert all(param.flags and param.help for param in SAMPLER_PARAMS.values())


def test_a_random_seed_is_drawn_once() -> None:
    """A seed that is given stays; a random one becomes a number that can be given again."""
    assert SamplerSpec(seed=7).seeded() == SamplerSpec(seed=7)
    drawn = SamplerSpec().seeded()
    assert drawn.seed != RANDOM_SEED
    assert drawn.seeded() == drawn


@pytest.mark.parametrize(("temp", "is_greedy"), [(-1.0, True), (0.0, True), (1e-6, False), (0.8, False)])
def test_a_temperature_at_or_below_zero_is_greedy(temp: float, is_greedy: bool) -> None:
    """As in llama.cpp."""
    assert SamplerSpec(temp=temp).is_greedy is is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temp", math.nan),
        ("temp", math.inf),
        ("top_k", 1 << 31),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_p", math.nan),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", math.inf),
        ("repeat_penalty", math.nan),
        ("repeat_last_n", -2),
        ("seed", -1),
        ("seed", 1 << 32),
        ("stop", ("",)),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(field: str, value: Any) -> None:
    """The library would take each of these and misuse it."""
    with pytest.raises(ConfigInvalid, match=f"{field} is ") as caught:
        SamplerSpec(**{field: value})
    assert (caught.value.field, caught.value.wanted) == (field, caught.value.wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.0), ("min_p", 0.0), ("repeat_last_n", -1), ("seed", 0)],
)
def test_the_ends_of_the_ranges_are_accepted(field: str, value: Any) -> None:
    """Zero and -1 have meanings of their own."""
    assert getattr(SamplerSpec(**{field: value}), field) == value


def test_empty_rows_have_their_types() -> None:
    """int32[0] and float32[0, 0]."""
    assert (no_tokens().dtype.name, no_tokens().shape) == ("int32", (0,))
    assert (no_logits().dtype.name, no_logits().shape) == ("float32", (0, 0))


@pytest.mark.parametrize(
    ("field", "value", "held"),
    [
        ("temp", 1, 1.0),
        ("temp", np.float32(0.5), 0.5),
        ("top_k", np.int32(7), 7),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
    ],
)
def test_a_sampler_takes_values_as_people_write_them(field: str, value: Any, held: object) -> None:
    """One text alone is one stop text, a list is as good as a tuple, and numbers of numpy are numbers."""
    found = getattr(SamplerSpec(**{field: value}), field)
    assert (found, type(found)) == (held, type(held))


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("temp", "0.8", "a finite number"),
        ("temp", None, "a finite number"),
        ("temp", float("nan"), "a finite number"),
        ("top_k", 40.5, "a whole number"),
        ("top_k", True, "a whole number"),
        ("top_p", 1.5, "0 to 1"),
        ("seed", "7", "a whole number, 0 to"),
        ("stop", 3, "texts that are not empty"),
        ("stop", ("a", ""), "texts that are not empty"),
        ("stop", [b"a"], "texts that are not empty"),
    ],
)
def test_a_sampler_refuses_values_of_another_kind(field: str, value: Any, wanted: str) -> None:
    """Each by its name, with what is wanted in its place."""
    with pytest.raises(ConfigInvalid, match=wanted) as caught:
        SamplerSpec(**{field: value})
    assert caught.value.field == field
